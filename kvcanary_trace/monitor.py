"""The live monitor: each capacity's severity as rows are drained, and who is told when it changes. Drain thread only.

info → warning from 0.8 of the limit → critical when a breach within 500 steps is likely → breached past the limit. A
severity falls back only when load or probability is clearly below what raised it, so that a load that hovers is one
transition; critical and breached stand for 500 steps, so that prefills between decode steps are none.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcanary_trace import names
from kvcanary_trace.pressure.capacities import BY_ID, CAPACITIES, Capacity
from kvcanary_trace.pressure.estimator import COLUMNS, Estimator, claim_probability, claims
from kvcanary_trace.pressure.horizon import steps_until
from kvcanary_trace.pressure.horizon_table import CALIBRATED
from kvcanary_trace.pressure.severity import HORIZON_STEPS, LADDER, WARNING_UTILIZATION, Severity
from kvcanary_trace.pressure.work import Bounds
from kvcanary_trace.schema import NOT_MEASURED
from kvcanary_trace.sinks.otel_rows import Flags, Ints, StepRows

if TYPE_CHECKING:
    from kvcanary_trace.listener import Listener

__all__ = ["Monitor", "Seen", "Transition"]

Floats: TypeAlias = npt.NDArray[np.float64]
Key: TypeAlias = tuple[str, str | None, str | None]

_log: Final = logging.getLogger(f"{names.LOGGER}.pressure")

_FALL: Final = 0.95
_FALL_PROBABILITY: Final = 0.5
_MAX_TRANSITIONS_PER_FLUSH: Final = 256
_MAX_FED: Final = 2000
"""Rows of a series that the estimator takes one by one in a flush; of more it takes the highest of each 25 steps."""
_LOG_LEVEL: Final = {
    "info": logging.INFO,
    "warning": logging.INFO,
    "critical": logging.WARNING,
    "breached": logging.WARNING,
}


@dataclass(frozen=True, slots=True)
class Transition:
    """A capacity's severity changed.

    Attributes:
        row: Index into the batch of rows that it was seen in.
        step: Step of that row.
        capacity: Which.
        runner, group: Whose; None where it is the engine's.
        before, after: Severities.
        demand, limit: Of that row, in the capacity's unit.
        probability: Of a breach within 500 steps; None where nothing is calibrated for the capacity.
        expected: What running work, and the part of queued work that usually joins it, adds up to, in the capacity's
            unit; None likewise.
        steps, low, high: Steps until a breach, should it come within 500: half of such breaches came by `steps`, 10 %
            and 90 % by `low` and `high`; None likewise, and once it has come.
        seconds: The same of `steps` at the recent pace of steps; None where rows tell no pace.
    """

    row: int
    step: int
    capacity: Capacity
    runner: str | None
    group: str | None
    before: Severity
    after: Severity
    demand: int
    limit: int
    probability: float | None = None
    expected: int | None = None
    steps: int | None = None
    low: int | None = None
    high: int | None = None
    seconds: float | None = None

    @property
    def utilization(self) -> float:
        """Demand over limit."""
        return self.demand / self.limit

    @property
    def rises(self) -> bool:
        """Whether it got worse."""
        return LADDER.index(self.after) > LADDER.index(self.before)

    def __str__(self) -> str:
        where = f" of group {self.group}" if self.group is not None else ""
        known = self.probability is not None and self.after != "breached"
        likely = "" if not known else f", breach within 500 steps {self.probability:.0%} likely"
        if known and self.after == "critical" and self.steps is not None:
            likely += f", in about {self.steps} ({self.low} to {self.high})"
            likely += "" if self.seconds is None else f", {self.seconds:.2g} s"
        more = self.expected is not None and self.expected > self.demand and self.after != "breached"
        work = f", {self.expected} with all that runs and waits" if more else ""
        return (
            f"{self.capacity.id}{where} is {self.after}, was {self.before}: {self.demand} of {self.limit} "
            f"({self.utilization:.0%}){work}{likely}; past the limit, {self.capacity.consequence}"
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """What the monitor made of one batch: its rows, which of them are under pressure, and what changed."""

    rows: StepRows
    pressed: Flags
    transitions: list[Transition]


class Monitor:
    """Remembers each capacity between flushes: severity, estimator and limit."""

    def __init__(self, engine: Mapping[str, Any] | None = None, listener: Listener | None = None) -> None:
        """Start with every capacity at info.

        Args:
            engine: The engine's arguments, which bound what demand can reach.
            listener: Who is told of transitions.
        """
        self._bounds = Bounds.of(dict(engine or {}))
        self._listener = listener
        self._levels: dict[Key, tuple[int, int]] = {}  # place on the ladder, and the step from which it has to stand
        self._estimators: dict[Key, Estimator] = {}
        self._step_s: float | None = None
        self.limits: dict[str, int] = {}
        """Capacity → the least limit of the latest rows; read by other threads."""

    def update(self, rows: StepRows) -> Seen:
        """Go through new rows, tell of transitions."""
        seen = Seen(rows, np.zeros(len(rows), dtype=np.bool_), [])
        limits: dict[str, int] = {}
        self._keep_pace(rows)
        for capacity in CAPACITIES:
            if capacity.grouped:
                for runner, group, indices in rows.series():
                    self._walk(seen, capacity, runner, group, indices, limits)
            else:
                self._walk(seen, capacity, None, None, np.arange(len(rows)), limits)
        self.limits = {**self.limits, **limits}
        for change in seen.transitions:
            _log.log(_LOG_LEVEL[change.after], "%s", change)
            if self._listener is not None:
                self._listener.tell(change)
        return seen

    def _walk(
        self,
        seen: Seen,
        capacity: Capacity,
        runner: str | None,
        group: str | None,
        indices: Ints,
        limits: dict[str, int],
    ) -> None:
        at, demand, limit = seen.rows.load(capacity, indices)
        if not len(at):
            return
        limits[capacity.id] = min(int(limit[-1]), limits.get(capacity.id, int(limit[-1])))
        key = (capacity.id, runner, group)
        utilization = demand / limit
        likely, expected, rise = self._likely(key, seen.rows, at, demand, limit)
        # Exactly full is not past the limit.
        up = _levels(utilization, claims(capacity.id, likely, utilization), 1.0)
        down = _levels(utilization, likely >= _FALL_PROBABILITY * claim_probability(capacity.id), _FALL)
        seen.pressed[at[up > 0]] = True
        steps = seen.rows.ints("step")[at]
        level, since = self._levels.get(key, (0, 0))
        begin = 0
        past = np.maximum.accumulate(np.where(up == _BREACHED, np.arange(len(at)), -1))
        while len(seen.transitions) < _MAX_TRANSITIONS_PER_FLUSH:
            falls = down[begin:] < level
            if level == _CRITICAL:  # "within 500 steps" was said: it stands until it came true or did not
                falls &= np.abs(steps[begin:] - since) >= HORIZON_STEPS
            elif level == _BREACHED:  # the prefills between two decode steps past the limit are no relief
                latest = np.where(past[begin:] >= 0, steps[past[begin:]], since)
                falls &= np.abs(steps[begin:] - latest) >= HORIZON_STEPS
            moved = np.flatnonzero((up[begin:] > level) | falls)
            if not len(moved):
                break
            begin += int(moved[0])
            new = int(up[begin] if up[begin] > level else down[begin])
            row, since = int(at[begin]), int(steps[begin])
            known = capacity.id in CALIBRATED
            until: tuple[int, ...] | None = None
            if known and new != _BREACHED:
                told = steps_until(float(expected[begin]), float(rise[begin]), float(limit[begin]))
                until = tuple(max(1, round(value)) for value in told)
            seen.transitions.append(
                Transition(
                    row=row,
                    step=since,
                    capacity=capacity,
                    runner=runner,
                    group=group,
                    before=LADDER[level],
                    after=LADDER[new],
                    demand=int(demand[begin]),
                    limit=int(limit[begin]),
                    probability=float(likely[begin]) if known else None,
                    expected=round(float(expected[begin])) if known else None,
                    low=until[0] if until else None,
                    steps=until[1] if until else None,
                    high=until[2] if until else None,
                    seconds=until[1] * self._step_s if until and self._step_s else None,
                )
            )
            level = new
        if level == _BREACHED and past[-1] >= 0:
            since = int(steps[past[-1]])
        self._levels[key] = (level, since)

    def _keep_pace(self, rows: StepRows) -> None:
        """How long a step takes, from the first to the last row of a batch; batches of one step tell nothing."""
        times, steps = rows.ints("time"), rows.ints("step")
        known = times != NOT_MEASURED
        if known.any():
            times, steps = times[known], steps[known]
            first, last = int(steps.argmin()), int(steps.argmax())
            spent_ns, walked = int(times[last] - times[first]), int(steps[last] - steps[first])
            if walked > 0 and spent_ns > 0:
                self._step_s = spent_ns / walked / 1e9

    def _likely(self, key: Key, rows: StepRows, at: Ints, demand: Ints, limit: Ints) -> tuple[Floats, Floats, Floats]:
        """[n] probability of a breach within the horizon, 0 where bounded or not calibrated; [n] expected work and its
        recent rise.
        """
        name = key[0]
        if name not in CALIBRATED:
            return np.zeros(len(at)), np.zeros(len(at)), np.zeros(len(at))
        estimator = self._estimators.setdefault(key, Estimator(name))
        fed = _fed(rows.ints("step")[at], demand)
        columns: dict[str, npt.ArrayLike] = {one: _floats(rows.ints(one)[at[fed]]) for one in _MEASURED}
        codes, modes = rows.names("mode")
        prefill = codes[at[fed]] == modes.index("prefill") if "prefill" in modes else np.zeros(len(fed), bool)
        columns |= {"step": rows.ints("step")[at[fed]], "demand": demand[fed], "prefill": prefill}
        states = estimator.feed(columns)
        # Rows that were not fed are as the one before.
        last = np.maximum(np.searchsorted(fed, np.arange(len(at)), side="right") - 1, 0)
        likely = states.probability(limit[fed].astype(np.float64))[last]
        ceiling = self._bounds.ceiling(name)
        likely = likely if ceiling is None else np.where(ceiling <= limit, 0.0, likely)
        return likely, states.expected[last], states.rise[last]


_MEASURED: Final = tuple(name for name in COLUMNS if name not in ("step", "demand", "prefill"))
_CRITICAL: Final = LADDER.index("critical")
_BREACHED: Final = LADDER.index("breached")


def _levels(utilization: Floats, claimed: Flags, factor: float) -> Ints:
    return np.select([utilization > factor, claimed, utilization >= factor * WARNING_UTILIZATION], [3, 2, 1], default=0)


def _floats(values: Ints) -> Floats:
    return np.where(values == NOT_MEASURED, math.nan, values)


def _fed(steps: Ints, demand: Ints) -> Ints:
    """Indices of the rows that the estimator takes: all, or the highest of each 25 steps, and the last."""
    if len(steps) <= _MAX_FED:
        return np.arange(len(steps))
    block = steps // 25
    order = np.lexsort((demand, block))
    highest = order[np.append(block[order][1:] != block[order][:-1], True)]
    return np.union1d(highest, [len(steps) - 1])


assert set(CALIBRATED) <= set(BY_ID)
