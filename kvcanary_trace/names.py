"""Names of ranges, spans and metrics, once, so that a timeline and a query show one word."""

from __future__ import annotations

from typing import Final

DOMAIN: Final = "kv_canary"
"""The NVTX domain, and the first word of every span and metric."""

STEP: Final = "step"
PLAN: Final = "plan"
VERIFY: Final = "verify"
WRITE: Final = "write"

RANGES: Final = (STEP, PLAN, VERIFY, WRITE)

STEP_REPLAY: Final = f"{STEP} (graph replay: its {PLAN}, {VERIFY} and {WRITE} are in the rows)"
"""The range of a step that replays a CUDA graph: no Python runs inside, so there are no ranges inside either."""

COLORS: Final = {STEP: 0xFF7F7F7F, PLAN: 0xFF0072B2, VERIFY: 0xFF009E73, WRITE: 0xFFE69F00}
"""ARGB colours of ranges on a timeline; a palette that colour-blind people can tell apart."""

VIOLATION: Final = "violation"


def counter_name(capacity: str, runner: str | None, group: str | None) -> str:
    """What a timeline calls the counters of a capacity's id: `verify full`, `verify full draft`, `kv_pool`."""
    return " ".join([capacity, *([group] if group else []), *([runner] if runner not in (None, "target") else [])])


DRAIN_THREAD: Final = "kvcanary-trace-drain"
LOGGER: Final = "kvcanary_trace"
