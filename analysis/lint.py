"""What cannot work, or will not for long, said before the first request.

Takes the engine's arguments, spelled as SGLang's flags, or live sizes, spelled as the buffers' own names. A size that
is neither given nor follows from what is given stays unknown, and the rules that need it are listed as not checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from kvcanary_trace.errors import SettingError
from kvcanary_trace.kernels.layout import MAX_REQS_PER_LAUNCH

__all__ = ["LintFinding", "LintReport", "Setting", "lint"]

FLAGS: Final = {
    "--max-running-requests": "request_pool",
    "--cuda-graph-max-bs-decode": "graph_max_bs",
    "--cuda-graph-max-bs": "graph_max_bs",
    "--max-total-tokens": "pool_tokens",
    "--chunked-prefill-size": "chunked_prefill_size",
    "--max-prefill-tokens": "max_prefill_tokens",
    "--context-length": "context_length",
    "--speculative-num-draft-tokens": "draft_tokens",
}
"""The engine's flags that move a capacity → the size each sets."""

LIVE: Final = (
    "write_req_capacity",
    "write_entry_capacity",
    "verify_capacity",
    "write_offsets_len",
    "violation_ring_capacity",
    "draft_pool_tokens",
    "sharing",
)
"""Sizes that no flag sets: read off live buffers, or, for `sharing`, measured (summed prefixes over slots held)."""

RING_VARIABLE: Final = "SGLANG_KV_CANARY_RING_CAPACITY"
VERIFY_POOL_FACTOR: Final = 3  # SGLang: three entries per pool token

Severity = Literal["warning", "critical"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One effective size and where it comes from."""

    value: float
    origin: str  # argument, environment, default, or what it was derived from


@dataclass(frozen=True, slots=True)
class LintFinding:
    """One thing that cannot work, or that will break under load."""

    rule: str
    severity: Severity
    capacity: str
    reason: str
    remedy_flag: str | None
    remedy_value: int | None
    settings: Mapping[str, Setting]


@dataclass(frozen=True, slots=True)
class LintReport:
    """Findings, worst first, the effective sizes, and the rules that lacked a size."""

    findings: tuple[LintFinding, ...]
    settings: Mapping[str, Setting]
    unchecked: Mapping[str, tuple[str, ...]]  # rule → sizes that nobody gave


@dataclass(frozen=True, slots=True)
class _Rule:
    """A rule, the sizes it needs, and what it finds in them."""

    id: str
    needs: tuple[str, ...]
    find: Callable[[Mapping[str, float]], tuple[Severity, str, str, str | None, int | None] | None] = field(repr=False)


def lint(
    arguments: Sequence[str] | Mapping[str, float] = (),
    *,
    environment: Mapping[str, str] | None = None,
    **sizes: float,
) -> LintReport:
    """Check an engine's configuration against what the canary's kernels and buffers can take.

    Args:
        arguments: The engine's command line (`["--max-running-requests", "5000", …]`; flags that move no capacity are
            passed over), or a mapping of flag to value.
        environment: Variables to read; the process's own by default.
        **sizes: Sizes read off live objects: `write_req_capacity`, `write_entry_capacity`, `verify_capacity`,
            `write_offsets_len`, `violation_ring_capacity`, `draft_pool_tokens`, and `sharing`, the expected ratio of
            summed prefixes to slots held. Any size that a flag sets may be given too, by its own name.

    Returns:
        Findings, worst first; effective sizes with their origins; rules that could not be checked.

    Raises:
        SettingError: A flag's value is not a whole number, or a size has an unknown name.
    """
    settings = _settings(arguments, os.environ if environment is None else environment, sizes)
    known = {name: setting.value for name, setting in settings.items()}
    findings, unchecked = [], {}
    for rule in RULES:
        missing = tuple(name for name in rule.needs if name not in known)
        if missing:
            unchecked[rule.id] = missing
            continue
        found = rule.find(known)
        if found is not None:
            severity, capacity, reason, flag, value = found
            used = {name: settings[name] for name in rule.needs}
            findings.append(LintFinding(rule.id, severity, capacity, reason, flag, value, used))
    findings.sort(key=lambda finding: finding.severity != "critical")
    return LintReport(tuple(findings), settings, unchecked)


def _settings(
    arguments: Sequence[str] | Mapping[str, float], environment: Mapping[str, str], sizes: Mapping[str, float]
) -> dict[str, Setting]:
    """Effective sizes: live ones beat arguments, which beat the environment, which beats what follows from the rest."""
    allowed = {*FLAGS.values(), *LIVE}
    unknown = sorted(set(sizes) - allowed)
    if unknown:
        raise SettingError(f"lint knows no size called {unknown[0]!r}; it takes {', '.join(sorted(allowed))}")
    settings = {"violation_ring_capacity": Setting(1024, "default")}
    if environment.get(RING_VARIABLE):
        settings["violation_ring_capacity"] = Setting(_whole(RING_VARIABLE, environment[RING_VARIABLE]), "environment")
    given = arguments.items() if isinstance(arguments, Mapping) else _flags(arguments)
    settings |= {FLAGS[flag]: Setting(_whole(flag, value), "argument") for flag, value in given if flag in FLAGS}
    settings |= {name: Setting(value, "live") for name, value in sizes.items()}
    _derive(settings)
    return settings


def _derive(settings: dict[str, Setting]) -> None:
    """Add the sizes that SGLang computes from others, where these are known and the size itself was not given."""

    def add(name: str, inputs: tuple[str, ...], compute: Callable[..., float], how: str) -> None:
        if name not in settings and all(key in settings for key in inputs):
            settings[name] = Setting(compute(*(settings[key].value for key in inputs)), f"derived: {how}")

    add("write_req_capacity", ("graph_max_bs", "request_pool"), max, "max(graph batch, request pool)")
    add("write_req_capacity", ("request_pool",), float, "request pool, graph batch not given")
    add("verify_capacity", ("pool_tokens",), lambda pool: VERIFY_POOL_FACTOR * pool, "3 x pool tokens")
    if settings.get("chunked_prefill_size", Setting(0, "")).value < 0:
        settings["extend_tokens"] = settings.get("max_prefill_tokens", settings["chunked_prefill_size"])
        if settings["extend_tokens"].value < 0:
            del settings["extend_tokens"]
    add("extend_tokens", ("chunked_prefill_size", "max_prefill_tokens"), min, "min(chunked prefill, max prefill)")
    add("extend_tokens", ("chunked_prefill_size",), float, "chunked prefill")


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(flag, value) pairs of a command line, both `--flag value` and `--flag=value`."""
    for i, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        if flag in FLAGS:
            if not equals and i + 1 == len(arguments):
                raise SettingError(f"{flag} needs a value")
            yield flag, value if equals else arguments[i + 1]


def _whole(name: str, value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise SettingError(f"{name} must be a whole number, got {value!r}") from None


def _request_pool(s: Mapping[str, float]) -> tuple[Severity, str, str, str | None, int | None] | None:
    rows = s["write_req_capacity"]
    if rows <= MAX_REQS_PER_LAUNCH:
        return None
    reason = (
        f"plan inputs are padded to {rows:.0f} rows and one plan launch takes {MAX_REQS_PER_LAUNCH}: "
        "the first launch raises"
    )
    return "critical", "plan_block", reason, "--max-running-requests", MAX_REQS_PER_LAUNCH


def _graph_batch(s: Mapping[str, float]) -> tuple[Severity, str, str, str | None, int | None] | None:
    if s["graph_max_bs"] <= s["write_req_capacity"]:
        return None
    reason = (
        f"graphs are captured up to bs {s['graph_max_bs']:.0f}, the write plan holds {s['write_req_capacity']:.0f}: "
        "the larger graphs raise at capture"
    )
    return "critical", "write_req", reason, "--cuda-graph-max-bs-decode", int(s["write_req_capacity"])


def _admission(s: Mapping[str, float]) -> tuple[Severity, str, str, str | None, int | None] | None:
    if s["request_pool"] <= s["write_req_capacity"]:
        return None
    reason = (
        f"{s['request_pool']:.0f} requests may run at once, the write plan holds {s['write_req_capacity']:.0f}: "
        "the batch that outgrows it raises"
    )
    return "critical", "write_req", reason, "--max-running-requests", int(s["write_req_capacity"])


def _verify_sharing(s: Mapping[str, float]) -> tuple[Severity, str, str, str | None, int | None] | None:
    need = s["pool_tokens"] * s["sharing"]
    if need <= s["verify_capacity"]:
        return None
    reason = (
        f"a full pool of {s['pool_tokens']:.0f} tokens shared {s['sharing']:.2f} times demands {need:.0f} entries, "
        f"the verify plan holds {s['verify_capacity']:.0f}: such steps go unverified"
    )
    return "warning", "verify", reason, None, None


def _verify_alone(s: Mapping[str, float]) -> tuple[Severity, str, str, str | None, int | None] | None:
    if s["verify_capacity"] >= s["pool_tokens"]:
        return None
    reason = (
        f"the verify plan holds {s['verify_capacity']:.0f} entries, the pool {s['pool_tokens']:.0f} tokens: "
        "a full pool goes unverified even when nothing is shared"
    )
    return "critical", "verify", reason, None, None


def _entries_chunk(s: Mapping[str, float]) -> tuple[Severity, str, str, str | None, int | None] | None:
    if s["extend_tokens"] <= s["write_entry_capacity"]:
        return None
    reason = (
        f"one forward may prefill {s['extend_tokens']:.0f} tokens, its buffers hold {s['write_entry_capacity']:.0f}: "
        "a full chunk raises"
    )
    return "critical", "write_entry", reason, "--chunked-prefill-size", int(s["write_entry_capacity"])


def _entries_draft(s: Mapping[str, float]) -> tuple[Severity, str, str, str | None, int | None] | None:
    need = s["request_pool"] * s["draft_tokens"]
    if need <= s["write_entry_capacity"]:
        return None
    reason = (
        f"{s['request_pool']:.0f} requests with {s['draft_tokens']:.0f} draft tokens each write {need:.0f} tokens a "
        f"forward, the buffers hold {s['write_entry_capacity']:.0f}: a full batch raises"
    )
    most = int(s["write_entry_capacity"] // s["draft_tokens"])
    return "critical", "write_entry", reason, "--max-running-requests", most


def _draft_pool(s: Mapping[str, float]) -> tuple[Severity, str, str, str | None, int | None] | None:
    if s["draft_pool_tokens"] >= s["pool_tokens"]:
        return None
    reason = (
        f"the draft model's pool has {s['draft_pool_tokens']:.0f} tokens, the target's {s['pool_tokens']:.0f}: "
        "a target slot past the draft's pool lies outside its canary buffer"
    )
    return "critical", "kv_pool", reason, "--max-total-tokens", int(s["draft_pool_tokens"])


def _context(s: Mapping[str, float]) -> tuple[Severity, str, str, str | None, int | None] | None:
    if s["context_length"] <= s["pool_tokens"]:
        return None
    reason = (
        f"a request may grow to {s['context_length']:.0f} tokens, the pool holds {s['pool_tokens']:.0f}: "
        "the longest requests can never run"
    )
    return "warning", "kv_pool", reason, "--context-length", int(s["pool_tokens"])


def _ring(s: Mapping[str, float]) -> tuple[Severity, str, str, str | None, int | None] | None:
    if s["violation_ring_capacity"] >= s["write_req_capacity"]:
        return None
    reason = (
        f"one bad step can fail for each of {s['write_req_capacity']:.0f} requests, the ring keeps "
        f"{s['violation_ring_capacity']:.0f} violations: detail of the rest is lost in the first bad step"
    )
    return "warning", "violation_ring", reason, RING_VARIABLE, _power_of_two(s["write_req_capacity"])


def _offsets(s: Mapping[str, float]) -> tuple[Severity, str, str, str | None, int | None] | None:
    if s["write_offsets_len"] == s["write_req_capacity"] + 1:
        return None
    reason = (
        f"write_offsets has {s['write_offsets_len']:.0f} words, write_req_capacity + 1 is "
        f"{s['write_req_capacity'] + 1:.0f}: every plan raises"
    )
    return "critical", "write_req", reason, None, None


def _power_of_two(need: float) -> int:
    return 1 << (int(need) - 1).bit_length()


RULES: Final = (
    _Rule("request-pool-over-plan-block", ("write_req_capacity",), _request_pool),
    _Rule("graph-batch-over-write-req", ("graph_max_bs", "write_req_capacity"), _graph_batch),
    _Rule("running-requests-over-write-req", ("request_pool", "write_req_capacity"), _admission),
    _Rule("verify-below-pool", ("verify_capacity", "pool_tokens"), _verify_alone),
    _Rule("verify-below-shared-pool", ("verify_capacity", "pool_tokens", "sharing"), _verify_sharing),
    _Rule("chunk-over-write-entry", ("extend_tokens", "write_entry_capacity"), _entries_chunk),
    _Rule("draft-over-write-entry", ("request_pool", "draft_tokens", "write_entry_capacity"), _entries_draft),
    _Rule("draft-pool-below-target", ("draft_pool_tokens", "pool_tokens"), _draft_pool),
    _Rule("context-over-pool", ("context_length", "pool_tokens"), _context),
    _Rule("violation-ring-below-batch", ("violation_ring_capacity", "write_req_capacity"), _ring),
    _Rule("write-offsets-length", ("write_offsets_len", "write_req_capacity"), _offsets),
)
