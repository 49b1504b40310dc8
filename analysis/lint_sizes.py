"""The sizes that the lint looks at, and where each comes from: live objects, arguments, environment, defaults."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvcanary_trace.errors import SettingError

__all__ = ["FLAGS", "LIVE", "RING_VARIABLE", "Setting", "read_sizes"]

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
_DEFAULT_RING: Final = 1024
_VERIFY_POOL_FACTOR: Final = 3  # SGLang: three entries per pool token

_BUFFERS: Final = {
    "verify_slot_indices": "verify_capacity",
    "write_seed_slot_indices": "write_req_capacity",
    "write_offsets": "write_offsets_len",
    "violation_ring": "violation_ring_capacity",
}
"""Tensor of a plan or a context, ours or SGLang's → the size that its first dimension is."""

_SGLANG_PREFIX: Final = "per_forward_"  # how SGLang's own launch capacities spell theirs


@dataclass(frozen=True, slots=True)
class Setting:
    """One effective size and where it comes from.

    Attributes:
        value: What counts.
        origin: live, argument, environment, default, or what it was derived from.
        instead_of: What else was set, and does not count: `environment 256`.
    """

    value: float
    origin: str
    instead_of: str | None = None

    def __str__(self) -> str:
        beaten = "" if self.instead_of is None else f", instead of {self.instead_of}"
        return (
            f"{self.value:g} ({self.origin}{beaten})" if self.value % 1 else f"{self.value:.0f} ({self.origin}{beaten})"
        )


def read_sizes(
    arguments: object, live: Sequence[object], environment: Mapping[str, str] | None, sizes: Mapping[str, float]
) -> dict[str, Setting]:
    """Effective sizes: live ones beat arguments, which beat the environment, which beats what follows from the rest.

    Raises:
        SettingError: a value is no whole number, a name is unknown, or a live object has no size that is known here.
    """
    allowed = {*FLAGS.values(), *LIVE}
    if unknown := sorted(set(sizes) - allowed):
        raise SettingError(f"lint knows no size called {unknown[0]!r}; it takes {', '.join(sorted(allowed))}")
    settings = {"violation_ring_capacity": Setting(_DEFAULT_RING, "default")}
    environment = os.environ if environment is None else environment
    if environment.get(RING_VARIABLE):
        settings["violation_ring_capacity"] = Setting(_whole(RING_VARIABLE, environment[RING_VARIABLE]), "environment")
    for flag, value in _given(arguments):
        _put(settings, FLAGS[flag], _whole(flag, value), "argument")
    for one in live:
        for name, size in _sizes_of(one):
            _put(settings, name, size, "live")
    for name, size in sizes.items():
        _put(settings, name, size, "live")
    _derive(settings)
    return settings


def _put(settings: dict[str, Setting], name: str, value: float, origin: str) -> None:
    """What comes later counts; what it beats is remembered, unless that was nobody's choice."""
    old = settings.get(name)
    beaten = None if old is None or old.origin in ("default", origin) else f"{old.origin} {old.value:.0f}"
    settings[name] = Setting(value, origin, None if old is not None and old.value == value else beaten)


def _given(arguments: object) -> Iterator[tuple[str, object]]:
    """(flag, value) pairs of a command line, of a mapping, or of an object with the flags as attributes."""
    if isinstance(arguments, str):
        arguments = shlex.split(arguments)
    if isinstance(arguments, Mapping):
        pairs: Iterator[tuple[str, Any]] = iter(arguments.items())
    elif isinstance(arguments, Sequence):
        pairs = _flags(arguments)
    else:
        spelled = {flag: flag[2:].replace("-", "_") for flag in FLAGS}
        pairs = ((flag, getattr(arguments, name, None)) for flag, name in spelled.items())
    for name, value in pairs:
        flag = f"--{str(name).lstrip('-').replace('_', '-')}"
        if flag in FLAGS and value is not None:
            yield flag, value


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pairs of a command line, both `--flag value` and `--flag=value`."""
    for i, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        if flag in FLAGS:
            if not equals and i + 1 == len(arguments):
                raise SettingError(f"{flag} needs a value")
            yield flag, value if equals else arguments[i + 1]


def _sizes_of(one: object) -> Iterator[tuple[str, float]]:
    """What a live object tells: first dimensions of its buffers, and attributes spelled as sizes."""
    shapes = {name: getattr(getattr(one, buffer, None), "shape", ()) for buffer, name in _BUFFERS.items()}
    found = [(name, float(shape[0])) for name, shape in shapes.items() if shape]
    for name in (*LIVE, *dict.fromkeys(FLAGS.values())):
        for spelling in (name, _SGLANG_PREFIX + name):
            if isinstance(value := getattr(one, spelling, None), int | float):
                found.append((name, float(value)))
    if not found:
        raise SettingError(
            f"lint finds no size in an object of type {type(one).__name__}: pass plans, contexts, or objects with "
            f"attributes such as {LIVE[0]}"
        )
    yield from found


def _whole(name: str, value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise SettingError(f"{name} must be a whole number, got {value!r}") from None


def _derive(settings: dict[str, Setting]) -> None:
    """Add the sizes that SGLang computes from others, where these are known and the size itself was not given."""

    def add(name: str, inputs: tuple[str, ...], compute: Callable[..., float], how: str) -> None:
        if name not in settings and all(key in settings for key in inputs):
            settings[name] = Setting(compute(*(settings[key].value for key in inputs)), f"derived: {how}")

    add("write_req_capacity", ("graph_max_bs", "request_pool"), max, "max(graph batch, request pool)")
    add("write_req_capacity", ("request_pool",), float, "request pool, graph batch not given")
    add("verify_capacity", ("pool_tokens",), lambda pool: _VERIFY_POOL_FACTOR * pool, "3 x pool tokens")
    if settings.get("chunked_prefill_size", Setting(0, "")).value < 0:
        settings["extend_tokens"] = settings.get("max_prefill_tokens", settings["chunked_prefill_size"])
        if settings["extend_tokens"].value < 0:
            del settings["extend_tokens"]
    add("extend_tokens", ("chunked_prefill_size", "max_prefill_tokens"), min, "min(chunked prefill, max prefill)")
    add("extend_tokens", ("chunked_prefill_size",), float, "chunked prefill")
