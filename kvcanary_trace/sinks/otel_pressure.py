"""Transitions of severity, capacity by capacity, as they happen row by row. Drain thread only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kvcanary_trace.pressure.capacities import CAPACITIES, Capacity
from kvcanary_trace.pressure.severity import WARNING_UTILIZATION, Severity

from .otel_rows import Flags, StepRows

__all__ = ["Pressure", "Transition"]

_LEVELS: Final[tuple[Severity, ...]] = ("info", "warning", "breached")
_UP: Final = (WARNING_UTILIZATION, 1.0)
# A load that hovers around a threshold is one transition, not hundreds.
_DOWN: Final = tuple(0.95 * threshold for threshold in _UP)
_MAX_TRANSITIONS_PER_FLUSH: Final = 256


@dataclass(frozen=True, slots=True)
class Transition:
    """A capacity's severity changed at `row`, an index into the batch."""

    row: int
    capacity: Capacity
    runner: str | None
    group: str | None
    before: Severity
    after: Severity
    demand: int
    limit: int

    @property
    def utilization(self) -> float:
        """Demand over limit."""
        return self.demand / self.limit


class Pressure:
    """Remembers each capacity's severity between flushes."""

    def __init__(self) -> None:
        self._levels: dict[tuple[str, str | None, str | None], int] = {}

    def update(self, rows: StepRows) -> tuple[Flags, list[Transition]]:
        """Go through new rows.

        Returns:
            [n] flags of the rows in which some capacity is at the warning threshold or above, and the transitions.
        """
        pressed = np.zeros(len(rows), dtype=np.bool_)
        transitions: list[Transition] = []
        for capacity in CAPACITIES:
            if capacity.grouped:
                for runner, group, indices in rows.series():
                    self._walk(rows, capacity, runner, group, indices, pressed, transitions)
            else:
                self._walk(rows, capacity, None, None, np.arange(len(rows)), pressed, transitions)
        return pressed, transitions

    def _walk(
        self,
        rows: StepRows,
        capacity: Capacity,
        runner: str | None,
        group: str | None,
        indices: np.typing.NDArray[np.int64],
        pressed: Flags,
        transitions: list[Transition],
    ) -> None:
        at, demand, limit = rows.load(capacity, indices)
        if not len(at):
            return
        utilization = demand / limit
        # Exactly full is not past the limit.
        up = (utilization >= _UP[0]).astype(np.int64) + (utilization > _UP[1])
        down = (utilization >= _DOWN[0]).astype(np.int64) + (utilization > _DOWN[1])
        pressed[at[up > 0]] = True
        key = (capacity.id, runner, group)
        level = self._levels.get(key, 0)
        begin = 0
        while len(transitions) < _MAX_TRANSITIONS_PER_FLUSH:
            moved = np.flatnonzero((up[begin:] > level) | (down[begin:] < level))
            if not len(moved):
                break
            begin += int(moved[0])
            new = int(up[begin] if up[begin] > level else down[begin])
            transitions.append(
                Transition(
                    row=int(at[begin]),
                    capacity=capacity,
                    runner=runner,
                    group=group,
                    before=_LEVELS[level],
                    after=_LEVELS[new],
                    demand=int(demand[begin]),
                    limit=int(limit[begin]),
                )
            )
            level = new
        self._levels[key] = level
