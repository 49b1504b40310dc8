"""Alarms, causal and from rows only: scores of each step, to be compared with a threshold. One file, every policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from prediction_rows import Rows
from prediction_scores import HORIZON

from kvcanary_trace.pressure.estimator import COLUMNS, Estimator
from kvcanary_trace.pressure.horizon import probability

__all__ = ["CAPACITIES", "GRIDS", "States", "alarms", "states_of"]

Floats: TypeAlias = NDArray[np.float64]

FULL_POOL: Final = 0.99
CAPACITIES: Final = {"write_req": "bs", "verify": "verify_demand", "kv_pool": "kv_used"}
_THRESHOLDS: Final = (0.04, 0.06, 0.08, 0.1, 0.12, 0.14, 0.16, 0.18, 0.2, 0.22, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7)
GRIDS: Final[dict[str, tuple[float, ...]]] = {
    "static": (0.5, 0.55, 0.58, 0.6, 0.62, 0.64, 0.66, 0.68, 0.7, 0.72, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99),
    "linear": (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0),
    "work": (0.1, 0.2, 0.35, 0.5, 0.6, 0.75, 0.9, 1.0, 1.25, 1.5, 2.0),
    "horizon": _THRESHOLDS,
    "horizon, rows only": _THRESHOLDS,
    "horizon, full pool": (0.3, 0.4, 0.5, 0.55, 0.6, 0.7),
}
"""Parameters that are tried: share of the limit, horizons ahead, rises ahead, probability."""


@dataclass(frozen=True, slots=True)
class States:
    """Of one capacity in one replay: [steps] each. `work` is running plus all queued work, the truth of a jump."""

    demand: Floats
    work: Floats
    slope: Floats
    queue: tuple[Floats, Floats, Floats]  # expected, rise, recent high: of a Horizon that is told the queue
    rows: tuple[Floats, Floats, Floats]  # of one that is told nothing


def states_of(rows: Rows, capacity: str) -> States:
    """Run the online estimators over a replay, row by row."""
    columns = rows.columns
    demand = columns[CAPACITIES[capacity]]
    resident = columns["resident_reqs" if capacity == "write_req" else "resident_tokens"]
    waiting = columns["waiting_reqs" if capacity == "write_req" else "waiting_tokens"]
    running = demand if capacity == "kv_pool" else np.maximum(resident, demand)
    return States(
        demand,
        running + waiting,
        _slope(demand),
        _run(columns, capacity, demand, told=True),
        _run(columns, capacity, demand, told=False),
    )


def _run(columns: dict[str, Floats], capacity: str, demand: Floats, *, told: bool) -> tuple[Floats, Floats, Floats]:
    unknown = np.full(len(demand), np.nan)
    # Limits are laid over the run afterwards, so its pool is none of what the estimator may know.
    given: dict[str, Floats] = dict.fromkeys(COLUMNS, unknown)
    given |= {"step": np.arange(len(demand), dtype=float), "demand": demand, "prefill": columns["mode"] == 0}
    given["write_entries"] = columns["write_entries"]
    if told:
        names = ("resident_reqs", "resident_tokens", "waiting_reqs", "waiting_tokens")
        given |= {name: columns[name] for name in names}
    states = Estimator(capacity).feed(given)
    return states.expected, states.rise, states.recent_high


def _slope(y: Floats) -> Floats:
    """[steps] least-squares slope of the trailing horizon, 0 while there are fewer than 8 steps."""
    steps = np.arange(len(y), dtype=float)
    begin = np.maximum(np.arange(len(y)) - HORIZON + 1, 0)
    n = steps - begin + 1
    sums = [np.concatenate(([0.0], np.cumsum(part))) for part in (steps, y, steps * y, steps * steps)]
    sx, sy, sxy, sxx = (total[1:] - total[begin] for total in sums)
    spread = n * sxx - sx * sx
    return np.where(n >= 8, (n * sxy - sx * sy) / np.maximum(spread, 1.0), 0.0)


def alarms(states: States, limit: float) -> dict[str, tuple[Floats, float]]:
    """For each policy a score and what it is compared with: (score, sign); the alarm is `score >= parameter`.

    The linear and work policies are turned round: the parameter at which they would begin to fire, negative.
    """
    room = limit - states.demand
    with np.errstate(divide="ignore", invalid="ignore"):
        ahead = np.where(room < 0, 0.0, np.where(states.slope > 0, room / (states.slope * HORIZON), np.inf))
        expected, rise, _ = states.queue
        rises = np.where(expected > limit, 0.0, np.where(rise > 0, (limit - expected) / rise, np.inf))
    return {
        "static": (states.demand / limit, 1.0),
        "linear": (-ahead, -1.0),
        "work": (-rises, -1.0),
        "horizon": (probability(*states.queue, limit), 1.0),
        "horizon, rows only": (probability(*states.rows, limit), 1.0),
        # Where a breach is a retraction: a pool must be full for it, and may be full without one.
        "horizon, full pool": (
            np.where(states.demand >= FULL_POOL * limit, probability(*states.queue, limit), 0.0),
            1.0,
        ),
    }
