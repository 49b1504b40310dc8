"""Fits the table of `kvcanary_trace/pressure/horizon_table.py` to the first halves of the replays, and writes it."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from prediction_policies import States
from prediction_scores import HORIZON, Risk, next_breach

from kvcanary_trace.pressure.horizon import high_of, room_of

__all__ = ["fit_table", "sample", "table_source"]

Floats: TypeAlias = NDArray[np.float64]

ROOM: Final = (0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1.1, 1.3, 1.5, 1.75, 2.1, 2.7, 4.0)
HIGH: Final = (-1.6, -1.1, -0.8, -0.6, -0.45, -0.3, -0.2, -0.1, -0.04, 0.0, 0.04, 0.2, 0.5)
_SMOOTH: Final = 2e-5
_PER_SERIES: Final = 400


def sample(states: States, where: Risk, breached: NDArray[np.bool_], limit: float, rng: np.random.Generator) -> Floats:
    """[n, 5] of steps at risk: room, high, whether a breach follows, steps until it, steps that this one stands for."""
    at = np.flatnonzero(where.at_risk)
    if not len(at):
        return np.zeros((0, 5))
    kept = np.sort(rng.choice(at, min(_PER_SERIES, len(at)), replace=False))
    expected, rise, recent = (one[kept] for one in states.queue)
    breaches = np.append(np.flatnonzero(breached), len(breached) + HORIZON)
    until = breaches[np.searchsorted(breaches, kept, side="right")] - kept
    weight = np.full(len(kept), len(at) / len(kept))
    return np.stack(
        [room_of(expected, rise, limit), high_of(recent, limit), next_breach(breached)[kept], until, weight], axis=1
    )


def _basis(nodes: tuple[float, ...], x: Floats) -> Floats:
    """[n, nodes] of piecewise-linear interpolation."""
    return np.stack([np.interp(x, nodes, row) for row in np.eye(len(nodes))], axis=1)


def _differences(n: int, nodes: tuple[float, ...]) -> Floats:
    """Second differences by true distance, so that smooth means straight."""
    grid, out = np.asarray(nodes), np.zeros((n - 2, n))
    for i in range(n - 2):
        left, right = grid[i + 1] - grid[i], grid[i + 2] - grid[i + 1]
        out[i, i : i + 3] = (right / (left + right), -1.0, left / (left + right))
    return out


def fit_table(rows: Floats) -> tuple[Floats, Floats]:
    """Logits [room, high] and quantiles [room, 3] of the steps until a breach, from samples."""
    cells = np.stack([np.round(rows[:, 0] / 0.02), np.round(np.clip(rows[:, 1], -1.7, 0.6) / 0.02)], axis=1)
    _, which = np.unique(cells, axis=0, return_inverse=True)
    which = which.ravel()
    weight = np.bincount(which, rows[:, 4])
    hits = np.bincount(which, rows[:, 4] * rows[:, 2]) / weight
    room, high = (np.bincount(which, rows[:, 4] * rows[:, k]) / weight for k in (0, 1))
    weight = weight / weight.sum()
    design = np.einsum("ni,nj->nij", _basis(ROOM, room), _basis(HIGH, high)).reshape(len(room), -1)
    penalty = np.zeros((design.shape[1],) * 2)
    for part in (
        np.kron(_differences(len(ROOM), ROOM), np.eye(len(HIGH))),
        np.kron(np.eye(len(ROOM)), _differences(len(HIGH), HIGH)),
    ):
        penalty += part.T @ part
    penalty = _SMOOTH * penalty + 1e-8 * np.eye(len(penalty))
    logits = np.full(design.shape[1], -3.0)
    for _ in range(60):
        p = 1.0 / (1.0 + np.exp(-np.clip(design @ logits, -30, 30)))
        gradient = design.T @ (weight * (p - hits)) + penalty @ logits
        curvature = (design * (weight * p * (1 - p))[:, None]).T @ design + penalty
        step = np.linalg.solve(curvature, gradient)
        logits = logits - step * min(1.0, 2.0 / np.abs(step).max())
    table = np.clip(logits.reshape(len(ROOM), len(HIGH)), -12, 8)
    for axis, sign in ((0, -1.0), (1, 1.0)):  # less room and a higher high never lower the probability
        low = np.maximum.accumulate(sign * table, axis=axis)
        high_side = np.flip(np.minimum.accumulate(np.flip(sign * table, axis=axis), axis=axis), axis=axis)
        table = sign * (low + high_side) / 2
    return table, _until(rows)


def _until(rows: Floats) -> Floats:
    """[room, 3]: 10 %, half and 90 % of the steps until a breach, of the steps that had one, near each node."""
    found = rows[rows[:, 2] > 0]
    out = np.zeros((len(ROOM), 3))
    for i, node in enumerate(ROOM):
        near = found[np.argsort(np.abs(found[:, 0] - node), kind="stable")]
        total = np.cumsum(near[:, 4])
        near = near[: max(200, int(np.searchsorted(total, 0.03 * total[-1])))]
        order = np.argsort(near[:, 3])
        share = np.cumsum(near[order, 4]) / near[:, 4].sum()
        out[i] = np.interp((0.1, 0.5, 0.9), share, near[order, 3])
    return np.maximum.accumulate(out, axis=0)


def table_source(logits: Floats, until: Floats, provenance: str) -> str:
    """The module's text."""

    def grid(values: Floats, digits: int) -> str:
        lines = [", ".join(f"{value:.{digits}f}" for value in row) for row in values]
        return "(\n" + "".join(f"    ({line}),\n" for line in lines) + ")"

    return f'''"""Probability of a breach within the horizon. `benchmarks/prediction.py --fit` writes this: do not edit.

{provenance}
"""

from __future__ import annotations

from typing import Final

__all__ = ["ALARM_PROBABILITY", "CALIBRATED", "HIGH_NODES", "LOGITS", "RETRACTION_PROBABILITY", "ROOM_NODES", "STEPS"]

CALIBRATED: Final = ("write_req", "verify", "kv_pool")
"""Capacities that the table was fitted to and checked on; others have no probability."""

ALARM_PROBABILITY: Final = 0.06
"""From here on a breach is claimed: the highest recall and lead among thresholds with at most 2 false claims in 10 000
steps, on the halves that the table was fitted to."""

RETRACTION_PROBABILITY: Final = 0.55
"""The same of a KV pool that is full to 0.99: there a breach is a retraction, and a pool may be full without one."""

ROOM_NODES: Final = {ROOM}
"""log(1 + room): the limit less expected work, over the recent rise within a horizon plus 1 % of the limit."""

HIGH_NODES: Final = {HIGH}
"""log of the highest demand of the last 10 000 steps over the limit."""

# fmt: off
# ruff: noqa: E501
LOGITS: Final = {grid(logits, 3)}
"""[room, high] log-odds at the nodes; linear between them, constant beyond."""

STEPS: Final = {grid(until, 0)}
"""[room] steps until a breach that comes within the horizon: 10 %, half, 90 %."""
'''
