"""One estimator for the live monitor, for recorded rows and for the benchmark: rows in, states and claims out.

estimator = Estimator("verify")
states = estimator.feed(columns)
claims("verify", states.probability(limit), demand / limit)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcanary_trace.pressure.horizon import Horizon, Outlook, WorkRows, probability
from kvcanary_trace.pressure.horizon_table import ALARM_PROBABILITY, CALIBRATED, RETRACTION_PROBABILITY
from kvcanary_trace.pressure.work import Bounds, Load

__all__ = ["COLUMNS", "MAX_ROWS", "Estimator", "States", "claim_probability", "claims", "outlook_after", "states_over"]

Floats: TypeAlias = NDArray[np.float64]

COLUMNS: Final = (
    "step",
    "demand",
    "prefill",
    "write_entries",
    "resident_reqs",
    "resident_tokens",
    "waiting_reqs",
    "waiting_tokens",
    "kv_used",
    "kv_capacity",
)
"""What a row has to tell, as in `Load`."""

MAX_ROWS = 20_000
"""Rows of files that are looked at: the latest ones."""

_FULL_POOL: Final = 0.99
"""A pool is not past its limit when requests are retracted, but full."""


@dataclass(frozen=True, slots=True)
class States:
    """[rows] each, of a `Horizon` after each row: `expected`, `rise` and `recent_high`."""

    expected: Floats
    rise: Floats
    recent_high: Floats

    def probability(self, limit: float | Floats) -> Floats:
        """[rows] probability of a breach within the horizon."""
        return probability(self.expected, self.rise, self.recent_high, limit)


class Estimator:
    """What one series has told of one capacity. Bounded memory, not for several threads at once."""

    __slots__ = ("_horizon", "_work")

    def __init__(self, capacity: str) -> None:
        self._work, self._horizon = WorkRows(capacity), Horizon(capacity)

    def feed(self, columns: Mapping[str, ArrayLike]) -> States:
        """Take in rows, in order.

        Args:
            columns: [rows] each of `COLUMNS`, NaN where nobody measured; `prefill` is 1 or 0.
        """
        values = [np.asarray(columns[name]).tolist() for name in COLUMNS]
        work, horizon = self._work, self._horizon
        out = np.empty((3, len(values[0])))
        for i, row in enumerate(zip(*values, strict=True)):
            step, demand, prefill, written, reqs, tokens, waiting_reqs, waiting_tokens, kv_used, kv_capacity = row
            running, queued = work.update(
                demand,
                prefill=prefill == 1,
                write_entries=written,
                resident_reqs=reqs,
                resident_tokens=tokens,
                waiting_reqs=waiting_reqs,
                waiting_tokens=waiting_tokens,
            )
            fits = work.pool_fits(waiting_reqs, waiting_tokens, tokens, kv_capacity - kv_used, kv_used)
            horizon.update(int(step), demand, running, queued, fits)
            out[0, i], out[1, i], out[2, i] = horizon.expected, horizon.rise, horizon.recent_high
        return States(out[0], out[1], out[2])

    def outlook(self, limit: float, ceiling: float | None = None) -> Outlook:
        """What is to be expected after the last row, as in `Horizon.outlook`."""
        return self._horizon.outlook(limit, ceiling)


def claim_probability(capacity: str) -> float:
    """The probability from which a breach is claimed."""
    return RETRACTION_PROBABILITY if capacity == "kv_pool" else ALARM_PROBABILITY


def claims(capacity: str, likely: ArrayLike, utilization: ArrayLike) -> NDArray[np.bool_]:
    """[rows] whether a breach within the horizon is claimed: what makes a capacity critical, live and from files.

    Args:
        capacity: Id of `CAPACITIES`.
        likely: [rows] probability of a breach within the horizon.
        utilization: [rows] demand over limit.
    """
    claimed: NDArray[np.bool_] = np.asarray(likely) >= claim_probability(capacity)
    return claimed & (np.asarray(utilization) >= _FULL_POOL) if capacity == "kv_pool" else claimed


def outlook_after(capacity: str, load: Load, bounds: Bounds) -> Outlook | None:
    """What is to be expected of a capacity after the last row, or None where nothing is calibrated for it.

    Args:
        capacity: Id of `CAPACITIES`.
        load: Rows of one series.
        bounds: What the engine's settings allow.
    """
    if capacity not in CALIBRATED or not len(load):
        return None
    estimator = Estimator(capacity)
    estimator.feed({name: getattr(load, name)[-MAX_ROWS:] for name in COLUMNS})
    return estimator.outlook(float(load.limit[-1]), bounds.ceiling(capacity))


def states_over(capacity: str, load: Load) -> States:
    """The states after each row, each from the rows up to it alone."""
    return Estimator(capacity).feed({name: getattr(load, name) for name in COLUMNS})
