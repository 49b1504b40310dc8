"""When will a capacity break, as files tell it? Pure functions over the rows of a recorded series.

Three things announce a breach. For the capacities that the estimator is calibrated for, its claim, by the rule that the
live monitor goes by. For all, what the last row makes certain: running work that cannot fit, or a queued request that
never will. For the others, what is queued, or a slope that reaches the limit within the horizon.

A slope is trusted no further ahead than `TRUST` times as long as it has been seen, only when it leads to a level that
the series has not been at before (a sawtooth below the limit is not a ramp), and never past what the engine's own
settings or its pool allow. Where the queue is known, running plus queued work has to rise too: a burst that is already
here raises demand while its prompts are taken in, and then stops. Where the estimator claims a breach, a slope only
says more closely when.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcanary_trace.pressure.capacities import BY_ID
from kvcanary_trace.pressure.estimator import claims, outlook_after, states_over
from kvcanary_trace.pressure.horizon import Outlook
from kvcanary_trace.pressure.horizon_table import CALIBRATED
from kvcanary_trace.pressure.severity import HORIZON_STEPS, WARNING_UTILIZATION
from kvcanary_trace.pressure.work import Bounds, Committed, Load, committed, current_load, work_load

__all__ = ["Bounds", "Forecast", "Load", "Trend", "announced_steps", "forecast", "trend"]

Cause: TypeAlias = Literal["running", "likely", "queued", "never-fits", "trend"]

TRUST: Final = 2.0  # steps ahead for each step seen
WINDOWS_STEPS: Final = (500, 128, 32)
_MIN_POINTS: Final = 8
_MIN_RISE: Final = 0.02  # utilisation gained over the window; less is noise
_MIN_T: Final = 4.0  # slope over its standard error, autocorrelation accounted for

_SOON: Final = (1.0, 5.0, 14.0, 35.0, 85.0, 250.0)
_SOONEST: Final = (1.0, 3.0, 6.0, 10.0, 10.0, 18.0)
_LATEST: Final = (233.0, 233.0, 244.0, 321.0, 321.0, 365.0)
"""Where a slope says `_SOON` steps, 10 % of breaches came within `_SOONEST` and 90 % within `_LATEST`: slopes before a
breach mostly bend. From 844 claims of `benchmarks/prediction_intervals.py`, each workload counted alike; the standard
error of a slope says far too little."""


@dataclass(frozen=True, slots=True)
class Trend:
    """A slope that leads to the limit."""

    slope: float  # utilisation per step
    level: float  # utilisation now, on the fitted line
    seen_steps: float  # how long it has been seen
    steps_to_limit: float
    soonest: float  # 10 % and 90 % of the steps in which breaches came where a slope said as many
    latest: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is to be expected of one capacity after its last row.

    Attributes:
        cause: What announces a breach, or None where nothing does.
        steps, low, high: Steps until then, and 10 % and 90 % of them; None where the cause does not tell.
        outlook: What the estimator expects; None where it is not calibrated for the capacity.
        committed: What running and queued work will want.
        trend: The slope, if it leads to the limit in time.
        ceiling: The most that settings or pool allow, or None where unknown.
        used: Whether running and queued work was known (`queue`), or only the rows' own demand (`rows`).
    """

    cause: Cause | None
    steps: float | None
    low: float | None
    high: float | None
    outlook: Outlook | None
    committed: Committed
    trend: Trend | None
    ceiling: float | None
    used: Literal["queue", "rows"]

    def under_pressure(self, limit: float) -> bool:
        """Whether the work to come fills the capacity to the warning line, or the settings let it overflow."""
        wanted = max((x for x in (self.committed.likely, self.committed.most) if np.isfinite(x)), default=0.0)
        return self.cause is not None or wanted >= WARNING_UTILIZATION * limit


def trend(steps: NDArray[np.float64], utilization: NDArray[np.float64], earlier_peak: float = 0.0) -> Trend | None:
    """The slope that reaches utilisation 1 within the horizon, or None.

    Args:
        steps: [n] engine steps, increasing.
        utilization: [n] of the capacity, one value a step. NaN is skipped.
        earlier_peak: Highest utilisation before `steps` begin.
    """
    known = np.isfinite(utilization)
    steps, utilization = steps[known], utilization[known]
    best: Trend | None = None
    for window in WINDOWS_STEPS:
        begin = int(np.searchsorted(steps, steps[-1] - window)) if len(steps) else 0
        if len(steps) - begin < _MIN_POINTS:
            continue
        peak = max(earlier_peak, float(utilization[:begin].max()) if begin else 0.0)
        found = _fit(steps[begin:], utilization[begin:], peak)
        if found is not None and (best is None or found.steps_to_limit < best.steps_to_limit):
            best = found
    return best


def _fit(x: NDArray[np.float64], y: NDArray[np.float64], earlier_peak: float) -> Trend | None:
    """Least squares over one window; None unless it is a real rise, to a new high, that reaches 1 in time."""
    n, span = len(x), float(x[-1] - x[0])
    dx, dy = x - x.mean(), y - y.mean()
    slope = float(dx @ dy / (dx @ dx)) if span else 0.0
    level = float(y.mean() + slope * (x[-1] - x.mean()))
    if slope <= 0 or slope * span < _MIN_RISE:
        return None
    recent = max(1, n // 4)
    if float(y[-recent:].max()) <= max(earlier_peak, float(y[:-recent].max())):
        return None
    residual = dy - slope * dx
    variance = float(residual @ residual)
    error = 0.0
    if variance > 1e-12 * n:
        rho = min(0.99, max(0.0, float(residual[1:] @ residual[:-1]) / variance))
        effective = max(3.0, n * (1 - rho) / (1 + rho))
        error = float(np.sqrt(variance / n / effective) / np.sqrt(dx @ dx / n))
        if slope < _MIN_T * error:
            return None
    steps_to_limit = max(0.0, (1.0 - level) / slope)
    if steps_to_limit > min(float(HORIZON_STEPS), TRUST * span):
        return None
    soonest, latest = (float(np.interp(steps_to_limit, _SOON, nodes)) for nodes in (_SOONEST, _LATEST))
    return Trend(slope, level, span, steps_to_limit, min(soonest, steps_to_limit), max(latest, steps_to_limit))


def forecast(
    capacity: str, load: Load, bounds: Bounds, *, history: Load | None = None, earlier_peak: float = 0.0
) -> Forecast:
    """What the rows up to the last one announce.

    Args:
        capacity: Id of `CAPACITIES`.
        load: The recent rows of one series: at least 500 steps where there are as many.
        bounds: What the engine's settings allow.
        history: The same with the rows before them that the estimator remembers; `load` alone where None.
        earlier_peak: Highest utilisation before `load` begins.
    """
    outlook = outlook_after(capacity, load if history is None else history, bounds)
    claimed = outlook is not None and bool(
        claims(capacity, outlook.probability or 0.0, load.demand[-1] / load.limit[-1])
    )
    return _forecast(capacity, load, bounds, outlook, claimed, earlier_peak)


def announced_steps(capacity: str, load: Load, bounds: Bounds, *, earlier_peak: float = 0.0, most: int = 512) -> int:
    """For how many steps before the end of `load` a breach was announced without a break, causally: rows of later
    steps are not looked at. `most` rows are looked at; what was before `load`, the estimator does not know.
    """
    if not len(load):
        return 0
    claimed = _claimed(capacity, load, bounds) if capacity in CALIBRATED else np.zeros(len(load), np.bool_)
    announced = end = float(load.step[-1]) + 1
    for row in range(len(load) - 1, max(0, len(load) - most) - 1, -1):
        # Where the estimator claims a breach, nothing else has to be asked.
        if (
            not claimed[row]
            and _forecast(capacity, load.until(row + 1), bounds, None, False, earlier_peak).cause is None
        ):
            break
        announced = float(load.step[row])
    return int(end - announced)


def _claimed(capacity: str, load: Load, bounds: Bounds) -> NDArray[np.bool_]:
    """[rows] whether the estimator claimed a breach after each row."""
    likely = states_over(capacity, load).probability(load.limit)
    ceiling = bounds.ceiling(capacity)
    if ceiling is not None:
        likely = np.where(ceiling <= load.limit, 0.0, likely)
    return claims(capacity, likely, load.demand / load.limit)


def _forecast(
    capacity: str, load: Load, bounds: Bounds, outlook: Outlook | None, claimed: bool, earlier_peak: float
) -> Forecast:
    work = committed(capacity, load, bounds)
    limit = float(load.limit[-1])
    ceiling = _ceiling(capacity, load, bounds)
    used: Literal["queue", "rows"] = "queue" if load.knows_queue else "rows"

    def result(
        cause: Cause | None,
        steps: float | None = None,
        low: float | None = None,
        high: float | None = None,
        found: Trend | None = None,
    ) -> Forecast:
        return Forecast(cause, steps, low, high, outlook, work, found, ceiling, used)

    later = (None, None) if outlook is None else (outlook.low, outlook.high)
    if work.running > limit:
        return result("running", 1.0, 1.0, later[1])
    if np.isfinite(work.never_fits):
        return result("never-fits", None if outlook is None else outlook.steps, *later)
    calibrated = capacity in CALIBRATED
    if work.likely > limit and not calibrated:
        return result("queued")
    if calibrated and not claimed:
        return result(None)
    found = _rise(capacity, load, ceiling, earlier_peak)
    if found is not None:
        return result("likely" if claimed else "trend", found.steps_to_limit, found.soonest, found.latest, found)
    if outlook is not None and claimed:
        return result("likely", outlook.steps, *later)
    return result(None)


def _rise(capacity: str, load: Load, ceiling: float | None, earlier_peak: float) -> Trend | None:
    """The slope that leads past the limit, where settings and pool let it and work rises as well."""
    if not BY_ID[capacity].trended or (ceiling is not None and ceiling <= load.limit[-1]):
        return None
    steps, utilization = _per_step(load.step, current_load(capacity, load) / load.limit)
    found = trend(steps, utilization, earlier_peak)
    if found is None:
        return None
    work_rises = work_load(capacity, load)
    if work_rises is not None and trend(*_per_step(load.step, work_rises / load.limit)) is None:
        return None
    return found


def _ceiling(capacity: str, load: Load, bounds: Bounds) -> float | None:
    """The most that settings, or the pool with its present sharing, allow."""
    if capacity != "verify":
        return bounds.ceiling(capacity)
    tokens = load.resident_tokens
    known = np.isfinite(tokens) & (load.kv_used > 0) & np.isfinite(load.kv_capacity)
    if not known.any():
        return None
    sharing = np.maximum(1.0, tokens[known] / load.kv_used[known])
    return float((sharing * load.kv_capacity[known])[-64:].max())


def _per_step(
    step: NDArray[np.float64], values: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """One value a step: the highest of its forwards."""
    known = np.isfinite(values)
    step, values = step[known], values[known]
    if not len(step):
        return step, values
    begins = np.flatnonzero(np.diff(step, prepend=step[0] - 1))
    return step[begins], np.maximum.reduceat(values, begins)
