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

DRAIN_THREAD: Final = "kvcanary-trace-drain"
LOGGER: Final = "kvcanary_trace"
