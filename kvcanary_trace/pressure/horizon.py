"""How likely is a breach within the next 500 steps? One estimator for the live monitor and for recorded runs.

Two quantities tell nearly all that rows can tell: how far running and queued work is from the limit, in units of how
much demand has lately risen within a horizon, and how close demand came to the limit in the last 10 000 steps. A table
over the two gives the probability. It was fitted to the first halves of replays of public request traces and checked on
the second halves (docs/prediction.md); slopes and further features did not improve on it.

    work, horizon = WorkRows("verify"), Horizon("verify")
    for row in rows:
        horizon.update(row.step, row.verify_demand, *work.update(...))
    horizon.outlook(limit=600_000).probability

Memory is bounded, a row costs O(1). Nothing here knows a row's format, and nothing needs more than numpy.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcanary_trace.pressure.horizon_table import CALIBRATED, HIGH_NODES, LOGITS, ROOM_NODES, STEPS
from kvcanary_trace.pressure.severity import HORIZON_STEPS
from kvcanary_trace.pressure.work import SHARING_SEEN

__all__ = [
    "BLOCK_STEPS",
    "MEMORY_STEPS",
    "Horizon",
    "Outlook",
    "WorkRows",
    "high_of",
    "probability",
    "room_of",
    "steps_until",
]

Floats: TypeAlias = NDArray[np.float64]

BLOCK_STEPS: Final = 25
"""Steps that are summed up together."""
_BLOCKS: Final = HORIZON_STEPS // BLOCK_STEPS
_MEMORY: Final = 160  # blocks over which rises are averaged: 4000 steps
_HIGH_PARTS: Final = 20  # horizons that the recent high looks back
MEMORY_STEPS: Final = _HIGH_PARTS * HORIZON_STEPS
"""Steps that the estimator remembers."""
_FLOOR: Final = 0.01  # of the limit: demand that never moved may still move this much
_LEAST_HIGH: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is to be expected of one capacity.

    Attributes:
        probability: Of a breach within `HORIZON_STEPS`, or None where no calibration exists for the capacity.
        steps: Steps until a breach, should it come within the horizon: the middle, and 10 % and 90 % in `low`, `high`.
        expected: Running work, and the part of queued work that usually joins it, in the capacity's unit.
        rise: How much demand rises within a horizon, root mean square of the recent past.
    """

    probability: float | None
    steps: float | None
    low: float | None
    high: float | None
    expected: float
    rise: float


class Horizon:
    """State of one series: one capacity as one runner and group demand it. Not for several threads at once.

    Attributes:
        expected, rise: As in `Outlook`.
        recent_high: Highest demand or running work of the last 10 000 steps.
    """

    __slots__ = (
        "_block",
        "_blocks",
        "_first",
        "_highs",
        "_joined",
        "_part_high",
        "_parts",
        "_past_high",
        "_queued",
        "_samples",
        "_squares",
        "_step",
        "_top",
        "capacity",
        "expected",
        "recent_high",
        "rise",
    )  # fmt: skip

    def __init__(self, capacity: str) -> None:
        self.capacity = capacity
        self._squares = self._joined = self._queued = 0.0
        self._samples = 0
        self._forget()

    def _forget(self) -> None:
        """Drop what belongs to a run that has ended; how much demand rises is kept."""
        self._step = -1
        self._block = -1
        self._top = 0.0
        self._first = (0.0, 0.0)
        self._blocks: deque[tuple[float, float, float]] = deque(maxlen=_BLOCKS)  # running, queued at begin; highest
        self._highs: deque[float] = deque(maxlen=_HIGH_PARTS)
        self._past_high = self._part_high = 0.0
        self._parts = 0
        self.expected = self.recent_high = 0.0
        self.rise = math.sqrt(self._squares)

    def update(self, step: int, demand: float, running: float, queued: float = 0.0, fits: float = math.inf) -> None:
        """Take in one row. Rows of one step may follow each other; a step that goes back is a restart.

        Args:
            step: Of the engine.
            demand: Of this row; NaN is skipped.
            running: What all running work demands, this row's included.
            queued: What queued work would add.
            fits: As much of it as the engine has room for; it counts until it was seen how much of a queue joins.
        """
        if demand != demand:
            return
        if step < self._step:
            self._forget()
        self._step = step
        if not running >= demand:
            running = demand
        if not queued >= 0.0:
            queued = 0.0
        block = step // BLOCK_STEPS
        if block != self._block:
            self._close(block)
            self._block, self._top, self._first = block, running, (running, queued)
        elif running > self._top:
            self._top = running
        if running > self.recent_high:
            self.recent_high = running
        if running > self._part_high:
            self._part_high = running
        if not self._samples and self._blocks:
            self.rise = max(self.rise, self.recent_high - self._blocks[0][0])
        if self._queued > 0.0:
            joining = min(1.0, self._joined / self._queued) * queued
        else:
            joining = fits if fits < queued else queued
        self.expected = running + joining

    def _close(self, block: int) -> None:
        """A block is over. Blocks without rows are as the one before."""
        if self._block < 0:
            return
        for _ in range(min(block - self._block, _BLOCKS * (_HIGH_PARTS + 1))):  # past that, nothing old is left
            self._blocks.append((*self._first, self._top))
            if len(self._blocks) == _BLOCKS:
                self._learn()
            self._parts += 1
            if self._parts == _BLOCKS:
                self._parts = 0
                self._highs.append(self._part_high)
                self._part_high = 0.0
                self._past_high = max(self._highs)
            self.recent_high = max(self._past_high, self._part_high)

    def _learn(self) -> None:
        """A horizon has passed since the oldest block began: what has become of it?"""
        running, queued, _ = self._blocks[0]
        rise = max(0.0, max(top for _, _, top in self._blocks) - running)
        self._samples = min(self._samples + 1, _MEMORY)
        weight = 1.0 / self._samples
        self._squares += weight * (rise * rise - self._squares)
        self._joined += weight * (min(rise, queued) - self._joined)
        self._queued += weight * (queued - self._queued)
        self.rise = math.sqrt(self._squares)

    def outlook(self, limit: float, ceiling: float | None = None) -> Outlook:
        """What is to be expected after the last row.

        Args:
            limit: Above it is a breach.
            ceiling: The most that the engine's settings let demand reach, if known.
        """
        if self.capacity not in CALIBRATED or self._step < 0:
            return Outlook(None, None, None, None, self.expected, self.rise)
        if ceiling is not None and ceiling <= limit:
            return Outlook(0.0, None, None, None, self.expected, self.rise)
        room = math.log1p(max(limit - self.expected, 0.0) / (self.rise + _FLOOR * limit))
        high = math.log(max(self.recent_high / limit, _LEAST_HIGH))
        i, u = _place(ROOM_NODES, room)
        j, v = _place(HIGH_NODES, high)
        logit = (1 - u) * ((1 - v) * LOGITS[i][j] + v * LOGITS[i][j + 1])
        logit += u * ((1 - v) * LOGITS[i + 1][j] + v * LOGITS[i + 1][j + 1])
        low, steps, late = steps_until(self.expected, self.rise, limit)
        return Outlook(1.0 / (1.0 + math.exp(-logit)), steps, low, late, self.expected, self.rise)


def _place(nodes: tuple[float, ...], x: float) -> tuple[int, float]:
    """Cell of a grid and the place within it, 0 to 1."""
    i = min(max(bisect_right(nodes, x) - 1, 0), len(nodes) - 2)
    return i, min(max((x - nodes[i]) / (nodes[i + 1] - nodes[i]), 0.0), 1.0)


def room_of(expected: Floats, rise: Floats, limit: float | Floats) -> Floats:
    """[rows] distance to the limit in units of recent rises, on a logarithmic scale."""
    room: Floats = np.log1p(np.maximum(limit - expected, 0.0) / (rise + _FLOOR * limit))
    return room


def high_of(recent_high: Floats, limit: float | Floats) -> Floats:
    """[rows] how close demand came to the limit, on a logarithmic scale."""
    high: Floats = np.log(np.maximum(recent_high / limit, _LEAST_HIGH))
    return high


def probability(expected: Floats, rise: Floats, recent_high: Floats, limit: float | Floats) -> Floats:
    """[rows] probability of a breach within the horizon, for many states of a `Horizon` at once."""
    table = np.asarray(LOGITS)
    i, u = _places(ROOM_NODES, room_of(expected, rise, limit))
    j, v = _places(HIGH_NODES, high_of(recent_high, limit))
    logit = (1 - u) * ((1 - v) * table[i, j] + v * table[i, j + 1])
    logit += u * ((1 - v) * table[i + 1, j] + v * table[i + 1, j + 1])
    result: Floats = 1.0 / (1.0 + np.exp(-logit))
    return result


def steps_until(expected: float, rise: float, limit: float) -> tuple[float, float, float]:
    """Steps until a breach, should it come within the horizon: 10 %, half and 90 %, from a state of a `Horizon`."""
    i, u = _place(ROOM_NODES, math.log1p(max(limit - expected, 0.0) / (rise + _FLOOR * limit)))
    low, half, high = ((1 - u) * a + u * b for a, b in zip(STEPS[i], STEPS[i + 1], strict=True))
    return low, half, high


def _places(nodes: tuple[float, ...], x: Floats) -> tuple[NDArray[np.int64], Floats]:
    grid = np.asarray(nodes)
    i = np.clip(np.searchsorted(grid, x, side="right") - 1, 0, len(grid) - 2)
    return i, np.clip((x - grid[i]) / (grid[i + 1] - grid[i]), 0.0, 1.0)


class WorkRows:
    """Running and queued work in a capacity's unit, row by row: as the engine tells it, or rebuilt from the rows.

    A row of prefills leaves running requests out. Rebuilt, they are the last row that had them all, plus what was
    prefilled since. The rebuilt count cannot see a queue, and may count the prompt of a chunk that goes on twice.
    """

    __slots__ = ("_capacity", "_chunk", "_full", "_per_token", "_running", "from_rows")

    def __init__(self, capacity: str) -> None:
        self._capacity = capacity
        self._running = 0.0
        self._chunk = 1.0  # the most tokens that a prefill has written
        self._full = False  # whether the last row was such a prefill
        self._per_token = 1.0
        self.from_rows = False  # whether the last row was rebuilt

    def update(
        self,
        demand: float,
        *,
        prefill: bool,
        write_entries: float = math.nan,
        resident_reqs: float = math.nan,
        resident_tokens: float = math.nan,
        waiting_reqs: float = math.nan,
        waiting_tokens: float = math.nan,
    ) -> tuple[float, float]:
        """(running, queued) after one row; NaN arguments are unknown. `prefill`: the row holds new prompts only."""
        self.from_rows = False
        if self._capacity == "write_req" and resident_reqs == resident_reqs:
            return resident_reqs, waiting_reqs
        if self._capacity == "verify" and resident_tokens == resident_tokens:
            if not prefill and resident_tokens > 0 and demand == demand:
                # A window verifies fewer entries than there are tokens.
                self._per_token += (1 / 64) * (min(1.0, demand / resident_tokens) - self._per_token)
            per_token = 1.0 if self._per_token > 0.9 else self._per_token
            return per_token * resident_tokens, per_token * waiting_tokens
        if self._capacity == "kv_pool":
            return demand, waiting_tokens
        self.from_rows = self._capacity in ("write_req", "verify")
        if not self.from_rows or not prefill:
            self._running, self._full = demand, False
            return demand, 0.0
        goes_on = self._full
        self._full = write_entries >= self._chunk
        if write_entries > self._chunk:
            self._chunk = write_entries
        if self._capacity == "write_req":
            self._running += demand - 1.0 if goes_on else demand
        else:
            self._running += write_entries if goes_on else write_entries + demand
        return max(self._running, demand), 0.0

    def pool_fits(
        self, waiting_reqs: float, waiting_tokens: float, resident_tokens: float, free_slots: float, used_slots: float
    ) -> float:
        """How much queued work the pool's free slots take in, sharing as now; infinite where that is unknown."""
        if free_slots != free_slots:
            return math.inf
        free_slots = max(0.0, free_slots)
        if self._capacity == "kv_pool":
            return free_slots
        sharing = resident_tokens / used_slots if used_slots > 0.0 and resident_tokens > used_slots else 1.0
        if self._capacity == "verify":
            # Once prefixes are shared, queued prompts may cost no slots at all.
            return math.inf if sharing >= SHARING_SEEN else self._per_token * free_slots * sharing
        if self._capacity == "write_req" and waiting_reqs > 0.0 and waiting_tokens > 0.0:
            return math.ceil(free_slots * sharing * waiting_reqs / waiting_tokens)
        return math.inf
