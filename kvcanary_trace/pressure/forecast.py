"""When will a capacity break? Pure functions over arrays, for a recorded series and for a live one alike.

Two things announce a breach: running plus admissible queued work that cannot fit, and a slope that reaches the limit
within the horizon. A slope is trusted no further ahead than `TRUST` times as long as it has been seen, only when it
leads to a level that the series has not been at before (a sawtooth below the limit is not a ramp), and never past what
the engine's own settings or its pool allow. Where the queue is known, running plus queued work has to rise too: a burst
that is already here raises demand while its prompts are taken in, and then stops.

Nothing here is calibrated: there are no probabilities and no intervals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcanary_trace.pressure.capacities import BY_ID
from kvcanary_trace.pressure.severity import HORIZON_STEPS, WARNING_UTILIZATION
from kvcanary_trace.pressure.work import Bounds, Committed, Load, committed, current_load, work_load

__all__ = ["Bounds", "Forecast", "Load", "Trend", "announced_steps", "forecast", "trend"]

Cause: TypeAlias = Literal["running", "queued", "never-fits", "trend"]

TRUST: Final = 2.0  # steps ahead for each step seen
WINDOWS_STEPS: Final = (500, 128, 32)
_MIN_POINTS: Final = 8
_MIN_RISE: Final = 0.02  # utilisation gained over the window; less is noise
_MIN_T: Final = 4.0  # slope over its standard error, autocorrelation accounted for


@dataclass(frozen=True, slots=True)
class Trend:
    """A slope that leads to the limit."""

    slope: float  # utilisation per step
    level: float  # utilisation now, on the fitted line
    seen_steps: float  # how long it has been seen
    steps_to_limit: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is to be expected of one capacity after its last row.

    Attributes:
        cause: What announces a breach, or None where nothing does.
        steps: Steps until then, or None where the cause does not tell.
        committed: What running and queued work will want.
        trend: The slope, if it leads to the limit in time.
        ceiling: The most that settings or pool allow, or None where unknown.
        used: Whether running and queued work was known (`queue`), or only the rows' own demand (`rows`).
    """

    cause: Cause | None
    steps: float | None
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
    if variance > 1e-12 * n:
        rho = min(0.99, max(0.0, float(residual[1:] @ residual[:-1]) / variance))
        effective = max(3.0, n * (1 - rho) / (1 + rho))
        error = np.sqrt(variance / n / effective) / (np.sqrt(dx @ dx / n))
        if slope < _MIN_T * error:
            return None
    steps_to_limit = max(0.0, (1.0 - level) / slope)
    if steps_to_limit > min(float(HORIZON_STEPS), TRUST * span):
        return None
    return Trend(slope, level, span, steps_to_limit)


def forecast(capacity: str, load: Load, bounds: Bounds, *, earlier_peak: float = 0.0) -> Forecast:
    """What the rows up to the last one announce.

    Args:
        capacity: Id of `CAPACITIES`.
        load: The recent rows of one series: at least 500 steps where there are as many.
        bounds: What the engine's settings allow.
        earlier_peak: Highest utilisation before `load` begins.
    """
    work = committed(capacity, load, bounds)
    limit = float(load.limit[-1])
    ceiling = _ceiling(capacity, load, bounds)
    used: Literal["queue", "rows"] = "queue" if load.knows_queue else "rows"

    def result(cause: Cause | None, steps: float | None = None, found: Trend | None = None) -> Forecast:
        return Forecast(cause, steps, work, found, ceiling, used)

    if work.running > limit:
        return result("running", 1.0)
    if work.likely > limit:
        return result("queued")
    if np.isfinite(work.never_fits):
        return result("never-fits")
    if not BY_ID[capacity].trended or (ceiling is not None and ceiling <= limit):
        return result(None)
    steps, utilization = _per_step(load.step, current_load(capacity, load) / load.limit)
    found = trend(steps, utilization, earlier_peak)
    if found is None:
        return result(None)
    work_rises = work_load(capacity, load)
    if work_rises is not None and trend(*_per_step(load.step, work_rises / load.limit)) is None:
        return result(None)
    return result("trend", found.steps_to_limit, found)


def announced_steps(capacity: str, load: Load, bounds: Bounds, *, earlier_peak: float = 0.0, most: int = 512) -> int:
    """For how many steps before the end of `load` a breach was announced without a break, causally: rows of later
    steps are not looked at. `most` rows are looked at.
    """
    announced = float(load.step[-1]) + 1 if len(load) else 0.0
    end = announced
    for rows in range(len(load), max(0, len(load) - most), -1):
        if forecast(capacity, load.until(rows), bounds, earlier_peak=earlier_peak).cause is None:
            break
        announced = float(load.step[rows - 1])
    return int(end - announced)


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
