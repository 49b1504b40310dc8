"""The live estimator over recorded rows: the same code, fed with the rows of a `Load` in their order."""

from __future__ import annotations

from kvcanary_trace.pressure.horizon import Horizon, Outlook, WorkRows
from kvcanary_trace.pressure.horizon_table import CALIBRATED
from kvcanary_trace.pressure.work import Bounds, Load

__all__ = ["MAX_ROWS", "outlook_after"]

MAX_ROWS = 20_000
"""Rows that are looked at: the latest ones."""


def outlook_after(capacity: str, load: Load, bounds: Bounds) -> Outlook | None:
    """What is to be expected of a capacity after the last row, or None where nothing is calibrated for it.

    Args:
        capacity: Id of `CAPACITIES`.
        load: Rows of one series.
        bounds: What the engine's settings allow.
    """
    if capacity not in CALIBRATED or not len(load):
        return None
    work, horizon = WorkRows(capacity), Horizon(capacity)
    names = (
        "step",
        "demand",
        "prefill",
        "write_entries",
        "resident_reqs",
        "resident_tokens",
        "waiting_reqs",
        "waiting_tokens",
    )
    columns = [getattr(load, name)[-MAX_ROWS:].tolist() for name in names]
    for step, demand, prefill, written, reqs, tokens, waiting_reqs, waiting_tokens in zip(*columns, strict=True):
        running, queued = work.update(
            demand,
            prefill=prefill == 1.0,
            write_entries=written,
            resident_reqs=reqs,
            resident_tokens=tokens,
            waiting_reqs=waiting_reqs,
            waiting_tokens=waiting_tokens,
        )
        horizon.update(int(step), demand, running, queued)
    return horizon.outlook(float(load.limit[-1]), bounds.ceiling(capacity))
