"""Findings about capacities: one for each measured capacity of each series, with its forecast, reason and remedy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvcanary_trace.pressure.capacities import Capacity
from kvcanary_trace.pressure.forecast import Bounds, Forecast, Load, announced_steps, forecast
from kvcanary_trace.pressure.severity import HORIZON_STEPS, WARNING_UTILIZATION, Severity, classify

from .dataset import Run
from .findings import Breach, Finding, Remedy, at_steps, percent
from .history import read_loads_and_history
from .series import CapacitySeries, Series, Span, load_before
from .sql import Connection

__all__ = ["capacity_findings", "changed_limits"]

_MAX_LOOK_BACKS: Final = 16


@dataclass(frozen=True, slots=True)
class _Case:
    """One capacity of one series and all that is known about it."""

    series: Series
    one: CapacitySeries
    run: Run
    bounds: Bounds
    forecast: Forecast | None
    is_past: bool = False
    """Whether the last row was past the limit."""

    @property
    def may_come_again(self) -> bool:
        """Whether a capacity that broke and is within its limit again will break again."""
        expected = self.forecast
        return (
            self.one.breached is not None and not self.is_past and expected is not None and expected.cause is not None
        )

    @property
    def capacity(self) -> Capacity:
        return self.one.capacity

    def counted(self, number: float) -> str:
        """A number of what the capacity counts."""
        whole, unit = math.ceil(number), self.capacity.unit
        plural = {"entry": "entries"}.get(unit, f"{unit}s")
        return f"{whole:,} {unit if whole == 1 else plural}"

    @property
    def ceiling(self) -> float | None:
        """The most that the engine's settings allow."""
        return self.bounds.ceiling(self.capacity.id)

    @property
    def is_bounded(self) -> bool:
        """Whether the engine's settings keep demand within the limit."""
        return self.ceiling is not None and self.ceiling <= self.one.last_limit

    @property
    def allows_overflow(self) -> bool:
        """Whether nothing but load keeps demand below the limit."""
        return self.ceiling is not None and self.ceiling > self.one.last_limit


def capacity_findings(
    connection: Connection, series: Sequence[Series], runs: Mapping[tuple[str, int], Run]
) -> Iterator[Finding]:
    """One finding for each measured capacity of each series.

    Args:
        connection: To the dataset.
        series: All series.
        runs: Run files by (run, rank).
    """
    loads, remembered = read_loads_and_history(connection, series)
    pools: set[tuple[str, int, str]] = set()
    look_backs = 0
    for one_series in series:
        key = one_series.key
        run = runs[key.run, key.rank]
        bounds = Bounds.of(run.engine)
        for one in one_series.capacities.values():
            if not one.capacity.grouped:
                if (key.run, key.rank, key.runner) in pools:
                    continue  # the pool is the engine's: its groups tell the same
                pools.add((key.run, key.rank, key.runner))
            load = loads.get(key, {}).get(one.capacity.id)
            expected = None
            if load is not None and len(load):
                expected = forecast(
                    one.capacity.id,
                    load,
                    bounds,
                    history=remembered[key][one.capacity.id],
                    earlier_peak=_earlier_peak(one_series, one, load),
                )
            past = load is not None and len(load) > 0 and bool(load.demand[-1] > load.limit[-1])
            case = _Case(one_series, one, run, bounds, expected, past)
            lead = 0
            if one.breached is not None and look_backs < _MAX_LOOK_BACKS:
                look_backs += 1
                lead = _lead_steps(connection, case)
            yield _finding(case, lead)


def changed_limits(series: Sequence[Series]) -> Iterator[Finding]:
    """Capacities whose limit changed while a run went on."""
    for one_series in series:
        for one in one_series.capacities.values():
            limits = one.limits[np.isfinite(one.limits).all(axis=1)]
            if limits.min() == limits.max():
                continue
            known = np.flatnonzero(np.isfinite(one.limits).all(axis=1))
            moved = np.flatnonzero((limits[:, 0] != limits[0, 0]) | (limits[:, 1] != limits[0, 0]))
            bucket = known[int(moved[0])]
            first = int(one_series.first_steps[bucket])
            key = one_series.key
            yield Finding(
                rule="capacity-changed",
                severity="info",
                capacity=one.capacity.id,
                group=key.group if one.capacity.grouped else None,
                rank=key.rank,
                run=key.run,
                runner=key.runner,
                kind=key.kind,
                steps=(first, one_series.steps[1]),
                reason=f"the limit changed during the run, from {int(limits[0, 0]):,} to "
                f"{one.last_limit:,} (between {int(limits.min()):,} and {int(limits.max()):,}), first at about step "
                f"{first:,}; utilisation is measured against the limit of each step",
            )


def _earlier_peak(series: Series, one: CapacitySeries, load: Load) -> float:
    """Highest utilisation in the buckets that end before the load begins."""
    before = one.utilization[series.last_steps < load.step[0]]
    before = before[np.isfinite(before)]
    return float(before.max()) if len(before) else 0.0


def _lead_steps(connection: Connection, case: _Case) -> int:
    """For how many steps before the first breach it was announced."""
    assert case.one.breached is not None
    load = load_before(connection, case.series.key, case.capacity, case.one.breached.first)
    if not len(load):
        return 0
    return announced_steps(case.capacity.id, load, case.bounds, earlier_peak=_earlier_peak(case.series, case.one, load))


def _finding(case: _Case, lead: int) -> Finding:
    one, key, expected = case.one, case.series.key, case.forecast
    limit = one.last_limit
    severity = classify(
        one.peak_utilization,
        breached=one.breached is not None,
        breach_forecast=expected is not None and expected.cause is not None,
    )
    if severity == "info" and (case.allows_overflow or (expected is not None and expected.under_pressure(limit))):
        severity = "warning"
    if severity == "breached" and one.breached is not None:
        steps = (one.breached.first, one.breached.last)
    elif one.high is not None:
        steps = (one.high.first, one.high.last)
    else:
        steps = case.series.steps
    return Finding(
        rule=case.capacity.rule,
        severity=severity,
        capacity=case.capacity.id,
        group=key.group if case.capacity.grouped else None,
        rank=key.rank,
        run=key.run,
        runner=key.runner,
        kind=key.kind,
        steps=steps,
        peak_utilization=one.peak_utilization,
        p99_utilization=one.p99_utilization,
        headroom=one.peak_limit - one.peak_demand,
        breach=_breach(case) if severity == "critical" or case.may_come_again else None,
        reason=_reason(case, severity, lead),
        remedy=_remedy(case) if severity != "info" else None,
    )


def _breach(case: _Case) -> Breach:
    expected = case.forecast
    assert expected is not None
    steps, low, high = (
        None if value is None else max(1, math.ceil(value)) for value in (expected.steps, expected.low, expected.high)
    )
    known = steps is not None and not math.isnan(case.series.step_s)
    return Breach(
        steps=steps,
        seconds=steps * case.series.step_s if known and steps is not None else None,
        low=low,
        high=high,
        probability=None if expected.outlook is None else expected.outlook.probability or None,
        used=expected.used,
    )


def _remedy(case: _Case) -> Remedy | None:
    """What to set so that the highest demand seen or expected fills the capacity to the warning line at most."""
    capacity, expected = case.capacity, case.forecast
    if case.is_bounded and case.one.breached is None:
        return None  # the engine's own limit keeps demand within it
    need = float(case.one.peak_demand)
    if expected is not None:
        wanted = (expected.committed.running, expected.committed.likely, expected.committed.never_fits)
        need = max([need, *(value for value in wanted if np.isfinite(value))])
        if expected.trend is not None:
            need = max(need, float(case.one.last_limit))  # it is about to reach it, and nothing says where it stops
    if case.allows_overflow and capacity.direction == "raise":
        # The least that no load can break, which for a request limit is the limit itself.
        assert case.ceiling is not None
        return Remedy(math.ceil(max(case.ceiling, need)), capacity.flag)
    if capacity.direction == "lower" and need <= case.one.last_limit and not case.allows_overflow:
        return None  # it fits, and the knob's value is not known to be wrong
    return Remedy(capacity.remedy_value(need, case.one.last_limit, WARNING_UTILIZATION), capacity.flag)


def _reason(case: _Case, severity: Severity, lead: int) -> str:
    """One sentence: what was seen, what is to come, and why."""
    one, limit, expected = case.one, case.one.last_limit, case.forecast
    peak = f"at most {case.counted(one.peak_demand)} of {one.peak_limit:,} ({percent(one.peak_utilization)})"
    if one.breached is not None:
        said = ""
        if one.high is not None and one.high.first < one.breached.first:
            said += f"; at or above {percent(WARNING_UTILIZATION)} from step {one.high.first:,} on"
        if lead:
            said += f", critical {lead:,} step{'s' * (lead != 1)} before"
        again = f"; and again: {_coming(case, expected)}" if case.may_come_again and expected is not None else ""
        return f"demand exceeded the limit {_when(one.breached)}, {peak}: {_consequence(case)}{said}{again}"
    if severity == "critical" and expected is not None:
        rebuilt = "; nobody told the queue, running work is rebuilt from the rows" if expected.used == "rows" else ""
        return f"{_coming(case, expected)}: {case.capacity.consequence}; so far {peak}{rebuilt}"
    if case.allows_overflow and case.ceiling is not None:
        allowed = f"the engine may reach {case.counted(case.ceiling)}, the limit is {limit:,}"
        return f"{allowed}; so far {peak}"
    if one.high is not None:
        cannot = ""
        if case.is_bounded and case.ceiling is not None:
            cannot = f"; the engine's own limit of {int(case.ceiling):,} keeps it from breaking"
        return f"at or above {percent(WARNING_UTILIZATION)} {_when(one.high)}, {peak}{cannot}"
    if severity == "warning" and expected is not None:
        work = expected.committed
        wanted = max(value for value in (work.likely, work.most) if np.isfinite(value))
        may = f"running and queued work may want {case.counted(wanted)} of {limit:,} ({percent(wanted / limit)})"
        return f"{may}; so far {peak}"
    return f"{peak}"


def _when(span: Span) -> str:
    """In how many rows, and between which steps."""
    rows = "one row" if span.rows == 1 else f"{span.rows:,} rows"
    return f"in {rows} {at_steps(span.first, span.last)}"


def _coming(case: _Case, expected: Forecast) -> str:
    """Why a breach is to come."""
    limit, work = case.one.last_limit, expected.committed
    if expected.cause == "running":
        return f"work already running wants {case.counted(work.running)} of {limit:,} at its next step"
    if expected.cause == "queued":
        wanted = case.counted(work.likely)
        return f"running work and what the engine can admit of its queue want {wanted} of {limit:,}"
    if expected.cause == "never-fits":
        return f"a queued request of at least {case.counted(work.never_fits)} cannot fit into {limit:,}"
    if expected.trend is not None:
        found = expected.trend
        return (
            f"rising by {100 * found.slope:.2g} % of the limit a step over {int(found.seen_steps):,} steps, it reaches "
            f"{limit:,} in about {_distance(_breach(case))}{_likely(expected)}"
        )
    outlook = expected.outlook
    assert outlook is not None and outlook.probability is not None
    rose = f"demand has lately risen by {case.counted(outlook.rise)} within as many steps"
    return (
        f"a breach within {HORIZON_STEPS} steps is {percent(outlook.probability)} likely, in about "
        f"{_distance(_breach(case))}: running work and what usually joins it of the queue want "
        f"{case.counted(outlook.expected)} of {limit:,}, and "
        f"{rose if outlook.rise > 0 else 'how much demand rises is not known yet'}"
    )


def _distance(breach: Breach) -> str:
    """Steps until a breach, with their interval and the time that they take, as far as each is known."""
    assert breach.steps is not None
    steps = f"{breach.steps:,} step{'s' * (breach.steps != 1)}"
    between = f" ({breach.low:,} to {breach.high:,})" if breach.low is not None and breach.high is not None else ""
    return f"{steps}{between}" + ("" if breach.seconds is None else f", {breach.seconds:.2g} s")


def _likely(expected: Forecast) -> str:
    """How likely it is, where the estimator is calibrated for it."""
    outlook = expected.outlook
    if outlook is None or not outlook.probability:
        return ""
    return f", {percent(outlook.probability)} likely within {HORIZON_STEPS} steps"


def _consequence(case: _Case) -> str:
    """What happened past the limit, in the past tense where the rows tell."""
    if case.capacity.id == "verify":
        rotate = case.run.engine.get("overflow") == "rotate"
        return "each step checked a part (overflow=rotate)" if rotate else "those steps went unverified"
    return case.capacity.consequence
