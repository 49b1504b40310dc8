"""What cannot work, or will not for long, said before the first request.

Takes the engine's arguments, spelled as SGLang's flags, or live sizes, spelled as the buffers' own names. A size that
is neither given nor follows from what is given stays unknown, and the rules that need it are listed as not checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from kvcanary_trace.kernels.layout import MAX_REQS_PER_LAUNCH

from .lint_sizes import RING_VARIABLE, Setting, read_sizes

__all__ = ["LintFinding", "LintReport", "Setting", "lint"]

Severity = Literal["warning", "critical"]


@dataclass(frozen=True, slots=True)
class LintFinding:
    """One thing that cannot work, or that will break under load.

    Attributes:
        remedy: What to do, in words.
        remedy_flag, remedy_value: The same as a flag and its value; None where no flag moves it.
        settings: The effective sizes that the rule looked at, with their origins.
    """

    rule: str
    severity: Severity
    capacity: str
    reason: str
    remedy: str
    remedy_flag: str | None
    remedy_value: int | None
    settings: Mapping[str, Setting]


@dataclass(frozen=True, slots=True)
class LintReport:
    """Findings, worst first, the effective sizes, and the rules that lacked a size."""

    findings: tuple[LintFinding, ...]
    settings: Mapping[str, Setting]
    unchecked: Mapping[str, tuple[str, ...]]  # rule → sizes that nobody gave


class _Found(NamedTuple):
    """What a rule finds: a remedy is a flag and its value, or words."""

    severity: Severity
    capacity: str
    reason: str
    flag: str | None
    value: int | str


@dataclass(frozen=True, slots=True)
class _Rule:
    """A rule, the sizes it needs, and what it finds in them."""

    id: str
    needs: tuple[str, ...]
    find: Callable[[Mapping[str, float]], _Found | None] = field(repr=False)


def lint(
    arguments: str | Sequence[str] | Mapping[str, object] | object = (),
    *,
    live: Sequence[object] = (),
    environment: Mapping[str, str] | None = None,
    **sizes: float,
) -> LintReport:
    """Check an engine's configuration against what the canary's kernels and buffers can take.

    Args:
        arguments: The engine's command line (`["--max-running-requests", "5000", …]` or one string; flags that move no
            capacity are passed over), a mapping of flag to value, or an object that has the flags as attributes, such
            as SGLang's `ServerArgs`. None as a value means not set.
        live: Live objects to read sizes off: plans, contexts, SGLang's launch capacities.
        environment: Variables to read; the process's own by default.
        **sizes: Sizes by name, as if read off live objects: `write_req_capacity`, `write_entry_capacity`,
            `verify_capacity`, `write_offsets_len`, `violation_ring_capacity`, `draft_pool_tokens`, and `sharing`, the
            expected ratio of summed prefixes to slots held. Any size that a flag sets may be given too, by its own
            name.

    Returns:
        Findings, worst first; effective sizes with their origins; rules that could not be checked.

    Raises:
        SettingError: A flag's value is not a whole number, a size has an unknown name, or a live object has no size.
    """
    settings = read_sizes(arguments, live, environment, sizes)
    known = {name: setting.value for name, setting in settings.items()}
    findings, unchecked = [], {}
    for rule in RULES:
        missing = tuple(name for name in rule.needs if name not in known)
        if missing:
            unchecked[rule.id] = missing
            continue
        found = rule.find(known)
        if found is not None:
            used = {name: settings[name] for name in rule.needs}
            remedy = f"{found.flag} {found.value}" if found.flag is not None else str(found.value)
            value = found.value if isinstance(found.value, int) else None
            findings.append(
                LintFinding(rule.id, found.severity, found.capacity, found.reason, remedy, found.flag, value, used)
            )
    findings.sort(key=lambda finding: finding.severity != "critical")
    return LintReport(tuple(findings), settings, unchecked)


def _request_pool(s: Mapping[str, float]) -> _Found | None:
    rows = s["write_req_capacity"]
    if rows <= MAX_REQS_PER_LAUNCH:
        return None
    reason = (
        f"plan inputs are padded to {rows:.0f} rows and one plan launch takes {MAX_REQS_PER_LAUNCH}: "
        "the first launch raises"
    )
    return _Found("critical", "plan_block", reason, "--max-running-requests", MAX_REQS_PER_LAUNCH)


def _graph_batch(s: Mapping[str, float]) -> _Found | None:
    if s["graph_max_bs"] <= s["write_req_capacity"]:
        return None
    reason = (
        f"graphs are captured up to bs {s['graph_max_bs']:.0f}, the write plan holds {s['write_req_capacity']:.0f}: "
        "the larger graphs raise at capture"
    )
    return _Found("critical", "write_req", reason, "--cuda-graph-max-bs-decode", int(s["write_req_capacity"]))


def _admission(s: Mapping[str, float]) -> _Found | None:
    if s["request_pool"] <= s["write_req_capacity"]:
        return None
    reason = (
        f"{s['request_pool']:.0f} requests may run at once, the write plan holds {s['write_req_capacity']:.0f}: "
        "the batch that outgrows it raises"
    )
    return _Found("critical", "write_req", reason, "--max-running-requests", int(s["write_req_capacity"]))


def _verify_sharing(s: Mapping[str, float]) -> _Found | None:
    need = s["pool_tokens"] * s["sharing"]
    if need <= s["verify_capacity"]:
        return None
    reason = (
        f"a full pool of {s['pool_tokens']:.0f} tokens shared {s['sharing']:.2f} times demands {need:.0f} entries, "
        f"the verify plan holds {s['verify_capacity']:.0f}: such steps go unverified"
    )
    return _Found("warning", "verify", reason, None, _verify_remedy(need))


def _verify_alone(s: Mapping[str, float]) -> _Found | None:
    if s["verify_capacity"] >= s["pool_tokens"]:
        return None
    reason = (
        f"the verify plan holds {s['verify_capacity']:.0f} entries, the pool {s['pool_tokens']:.0f} tokens: "
        "a full pool goes unverified even when nothing is shared"
    )
    return _Found("critical", "verify", reason, None, _verify_remedy(s["pool_tokens"]))


def _entries_chunk(s: Mapping[str, float]) -> _Found | None:
    if s["extend_tokens"] <= s["write_entry_capacity"]:
        return None
    reason = (
        f"one forward may prefill {s['extend_tokens']:.0f} tokens, its buffers hold {s['write_entry_capacity']:.0f}: "
        "a full chunk raises"
    )
    return _Found("critical", "write_entry", reason, "--chunked-prefill-size", int(s["write_entry_capacity"]))


def _entries_draft(s: Mapping[str, float]) -> _Found | None:
    need = s["request_pool"] * s["draft_tokens"]
    if need <= s["write_entry_capacity"]:
        return None
    reason = (
        f"{s['request_pool']:.0f} requests with {s['draft_tokens']:.0f} draft tokens each write {need:.0f} tokens a "
        f"forward, the buffers hold {s['write_entry_capacity']:.0f}: a full batch raises"
    )
    most = int(s["write_entry_capacity"] // s["draft_tokens"])
    return _Found("critical", "write_entry", reason, "--max-running-requests", most)


def _draft_pool(s: Mapping[str, float]) -> _Found | None:
    if s["draft_pool_tokens"] >= s["pool_tokens"]:
        return None
    reason = (
        f"the draft model's pool has {s['draft_pool_tokens']:.0f} tokens, the target's {s['pool_tokens']:.0f}: "
        "a target slot past the draft's pool lies outside its canary buffer"
    )
    return _Found("critical", "kv_pool", reason, "--max-total-tokens", int(s["draft_pool_tokens"]))


def _context(s: Mapping[str, float]) -> _Found | None:
    if s["context_length"] <= s["pool_tokens"]:
        return None
    reason = (
        f"a request may grow to {s['context_length']:.0f} tokens, the pool holds {s['pool_tokens']:.0f}: "
        "the longest requests can never run"
    )
    return _Found("warning", "kv_pool", reason, "--context-length", int(s["pool_tokens"]))


def _ring(s: Mapping[str, float]) -> _Found | None:
    if s["violation_ring_capacity"] >= s["write_req_capacity"]:
        return None
    reason = (
        f"one bad step can fail for each of {s['write_req_capacity']:.0f} requests, the ring keeps "
        f"{s['violation_ring_capacity']:.0f} violations: detail of the rest is lost in the first bad step"
    )
    return _Found("warning", "violation_ring", reason, RING_VARIABLE, _power_of_two(s["write_req_capacity"]))


def _offsets(s: Mapping[str, float]) -> _Found | None:
    if s["write_offsets_len"] == s["write_req_capacity"] + 1:
        return None
    reason = (
        f"write_offsets has {s['write_offsets_len']:.0f} words, write_req_capacity + 1 is "
        f"{s['write_req_capacity'] + 1:.0f}: every plan raises"
    )
    remedy = f"allocate write_offsets with {s['write_req_capacity'] + 1:.0f} words, as WritePlan.allocate does"
    return _Found("critical", "write_req", reason, None, remedy)


def _verify_remedy(need: float) -> str:
    return f'no flag moves it: allocate verify plans of {math.ceil(need)} entries, or launch with overflow="rotate"'


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
