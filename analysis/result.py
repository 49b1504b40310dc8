"""The answer to "which capacity will break, when, and what to change": `analyze` and what it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcanary_trace.errors import DatasetError
from kvcanary_trace.pressure.severity import Severity, rank
from kvcanary_trace.schema import SCHEMA_VERSION

from .capacity_findings import capacity_findings, changed_limits
from .coverage import Coverage, read_coverage, read_retried, total
from .dataset import Run, open_dataset
from .findings import Finding, worst_first
from .losses import Losses, read_losses
from .run_findings import run_findings
from .series import CapacitySeries, Series, read_series
from .sql import Key

__all__ = ["Analysis", "analyze"]


@dataclass(frozen=True, slots=True)
class Analysis:
    """What a dataset says.

    Attributes:
        path: The dataset's folder.
        until: Last step looked at, or None for all.
        runs: What ran, one entry a rank.
        findings: Worst first.
        coverage: The ledger over all.
        coverage_by_series: The same for each series.
        losses: By (run, rank).
        series: Utilisation over time, for plots.
    """

    path: Path
    until: int | None
    runs: tuple[Run, ...]
    findings: tuple[Finding, ...]
    coverage: Coverage
    coverage_by_series: Mapping[Key, Coverage]
    losses: Mapping[tuple[str, int], Losses]
    series: tuple[Series, ...]

    @property
    def worst(self) -> Severity:
        """The most severe finding's severity; info where there is none."""
        return self.findings[0].severity if self.findings else "info"

    def at_least(self, severity: Severity) -> tuple[Finding, ...]:
        """Findings of that severity and worse."""
        return tuple(one for one in self.findings if rank(one.severity) >= rank(severity))

    @property
    def steps(self) -> tuple[int, int]:
        """First and last step looked at."""
        return min(one.steps[0] for one in self.series), max(one.steps[1] for one in self.series)

    @property
    def rows(self) -> int:
        """Rows looked at."""
        return sum(one.rows for one in self.series)

    def capacities(self) -> list[tuple[Series, CapacitySeries]]:
        """Every measured capacity of every series; what is the engine's own only once."""
        seen: set[tuple[str, int, str, str]] = set()
        found = []
        for series in self.series:
            for one in series.capacities.values():
                name = (series.key.run, series.key.rank, series.key.runner, one.capacity.id)
                if not one.capacity.grouped and name in seen:
                    continue
                seen.add(name)
                found.append((series, one))
        return found

    def to_json(self) -> dict[str, Any]:
        """Every number of the analysis, under the names of the command line's contract."""
        return {
            "schema": SCHEMA_VERSION,
            "runs": [_run_json(run, self.series) for run in self.runs],
            "findings": [one.to_json() for one in self.findings],
            "coverage": {
                **_coverage_json(self.coverage),
                "by_group": [{**_key_json(key), **_coverage_json(one)} for key, one in self.coverage_by_series.items()],
            },
            "losses": _losses_json(self.losses),
            "capacities": [_capacity_json(series, one, self.runs) for series, one in self.capacities()],
        }


def analyze(path: Path | str, until: int | None = None) -> Analysis:
    """Analyse a dataset: findings, coverage, losses.

    Args:
        path: The dataset's folder.
        until: Look at no later step: what could have been known then.

    Raises:
        DatasetError: There is no dataset, no row up to `until`, or a file is foreign or damaged.
        SchemaError: A file is of a newer schema than this package knows.
    """
    dataset = open_dataset(path)
    low, high = dataset.step_range
    if until is not None and until < low:
        raise DatasetError(f"{path} has no step up to {until}: it begins at step {low} and ends at {high}")
    where = "" if until is None else f"WHERE step <= {int(until)}"
    with dataset.connect() as connection:
        retried = read_retried(connection, where)
        series = [
            one.made_good(retried[one.key].steps, retried[one.key].demands) if one.key in retried else one
            for one in read_series(connection, dataset, until)
        ]
        demanded = {one.key: one.demanded for one in series if one.demanded is not None}
        coverage = read_coverage(connection, where, demanded, retried)
        losses = read_losses(dataset, series, until)
        runs = {(run.run, run.rank): run for run in dataset.runs}
        findings = [
            *capacity_findings(connection, series, runs),
            *changed_limits(series),
            *run_findings(connection, dataset, series, coverage, losses, where, until),
        ]
    return Analysis(
        path=Path(path),
        until=until,
        runs=dataset.runs,
        findings=worst_first(_without_echoes(findings)),
        coverage=total(coverage.values(), sum(one.rows for one in losses.values())),
        coverage_by_series=coverage,
        losses=losses,
        series=tuple(series),
    )


def _without_echoes(findings: Sequence[Finding]) -> list[Finding]:
    """Leave out errors whose capacity already shows the breach by its own demand: one event, one finding."""
    broken = {
        (one.run, one.rank, one.capacity) for one in findings if one.severity == "breached" and one.headroom is not None
    }
    return [one for one in findings if one.rule != "step-error" or (one.run, one.rank, one.capacity) not in broken]


def _key_json(key: Key) -> dict[str, Any]:
    return {"run": key.run, "rank": key.rank, "runner": key.runner, "group": key.group, "kind": key.kind}


def _coverage_json(one: Coverage) -> dict[str, Any]:
    return {
        "demanded": one.demanded,
        "verified": one.verified,
        "ratio": one.ratio,
        "unverified_by_reason": dict(one.unverified_by_reason),
    }


def _losses_json(losses: Mapping[tuple[str, int], Losses]) -> dict[str, Any]:
    names = dict.fromkeys(name for one in losses.values() for name in one.counters)
    sums: dict[str, int | None] = {}
    for name in names:
        values = [one.counters.get(name) for one in losses.values()]
        numbers = [value for value in values if value is not None]
        sums[name] = sum(numbers) if numbers else None
    return sums


def _run_json(run: Run, series: Sequence[Series]) -> dict[str, Any]:
    ours = [one for one in series if (one.key.run, one.key.rank) == (run.run, run.rank)]
    return {
        "run": run.run,
        "rank": run.rank,
        "status": run.status,
        "error": run.error,
        "device": run.device,
        "host": run.host,
        "started_ns": run.started_ns,
        "ended_ns": run.ended_ns,
        "world_size": run.world_size,
        "rows": sum(one.rows for one in ours),
        "steps": [min(one.steps[0] for one in ours), max(one.steps[1] for one in ours)] if ours else None,
        "engine": dict(run.engine),
        "versions": dict(run.versions),
    }


def _capacity_json(series: Series, one: CapacitySeries, runs: Sequence[Run]) -> dict[str, Any]:
    key = series.key
    group = key.group if one.capacity.grouped else None
    return {
        "capacity": one.capacity.id,
        "group": group,
        "rank": key.rank,
        "limit": one.last_limit,
        "origin": _origin(runs, key, one.capacity.id, group, one.last_limit),
        "peak": one.peak_demand,
        "peak_utilization": one.peak_utilization,
        "p99_utilization": one.p99_utilization,
        "headroom": one.peak_limit - one.peak_demand,
        "unit": one.capacity.unit,
        "run": key.run,
        "runner": key.runner,
        "kind": key.kind,
    }


def _origin(runs: Sequence[Run], key: Key, capacity: str, group: str | None, limit: int) -> str | None:
    """Where a limit comes from, as the run file tells: argument, environment, default or derived.

    A value that the rows do not have is not theirs: the engine overwrote it, and the answer has both.
    """
    for run in runs:
        if (run.run, run.rank) != (key.run, key.rank):
            continue
        for one in run.capacities:
            if (
                one.get("capacity") == capacity
                and one.get("group") in (None, group)
                and one.get("runner") in (None, key.runner)
            ):
                origin, value = one.get("origin"), one.get("value")
                if value is not None and value != limit:
                    return f"engine, instead of {origin or 'unknown'} {value}"
                return None if origin is None else str(origin)
    return None
