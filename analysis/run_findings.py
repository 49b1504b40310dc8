"""Findings about how a run went and how it was recorded: errors, violations, coverage, losses, ranks, fallbacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from kvcanary_trace.pressure.capacities import capacity_of_error
from kvcanary_trace.pressure.severity import Severity

from .coverage import REASONS, Coverage, covered
from .dataset import Dataset, Run
from .findings import Finding, at_steps, percent
from .losses import Losses
from .series import Series
from .sql import KEYS, Connection, Key, fetch, known, split

__all__ = ["run_findings"]

_FALLBACK_WARNING: Final = 0.05  # share of forwards that fell back to eager


def run_findings(
    connection: Connection,
    dataset: Dataset,
    series: Sequence[Series],
    coverage: Mapping[Key, Coverage],
    losses: Mapping[tuple[str, int], Losses],
    where: str,
    until: int | None,
) -> Iterator[Finding]:
    """Everything that is not about one capacity."""
    yield from _errors(connection, where)
    yield from _violations(connection, series, where)
    yield from _unverified(series, coverage)
    yield from _fallbacks(series)
    yield from _lost(losses)
    yield from _missing_ranks(dataset)
    for run in dataset.runs:
        yield from _ended(run, until)


def _errors(connection: Connection, where: str) -> Iterator[Finding]:
    """Steps that raised, by code."""
    condition = f"{where} AND error IS NOT NULL" if where else "WHERE error IS NOT NULL"
    query = (
        "SELECT run, rank, runner, error, count(DISTINCT step) AS steps, min(step) AS first, max(step) AS last, "
        "arg_min(error_message, step) AS message "
        f"FROM steps {condition} GROUP BY run, rank, runner, error ORDER BY run, rank, runner, error"
    )
    for run, rank, runner, code, steps, first, last, message in connection.execute(query).fetchall():
        capacity = capacity_of_error(code)
        count = "one step" if steps == 1 else f"{steps:,} steps"
        yield Finding(
            rule="step-error",
            # A capacity that the error names has broken, whether its row carried the demand or not.
            severity="breached" if capacity is not None else "critical",
            capacity=capacity.id if capacity is not None else None,
            rank=rank,
            run=run,
            runner=runner,
            steps=(first, last),
            reason=f"{count} ended in {code} {at_steps(first, last)}: {message or 'no message was recorded'}",
        )


def _violations(connection: Connection, series: Sequence[Series], where: str) -> Iterator[Finding]:
    """Corrupted KV, by group."""
    if not any(one.violations for one in series):
        return
    condition = f"{where} AND violations_new > 0" if where else "WHERE violations_new > 0"
    rows = fetch(
        connection,
        f"SELECT {KEYS}, min(step) AS first, max(step) AS last, sum(violations_new)::BIGINT AS new "
        f"FROM steps {condition} GROUP BY ALL ORDER BY {KEYS}",
    )
    seen = dict(split(rows))
    reasons = _reasons(connection, where)
    for one in series:
        if not one.violations:
            continue
        part = seen.get(one.key)
        first, last = (int(part["first"][0]), int(part["last"][0])) if part is not None else one.steps
        count = int(known(part, "new")[0]) if part is not None else one.violations
        if part is None and any(other.run == one.key.run and other.rank == one.key.rank for other in seen):
            continue  # the groups share one ring, and another one found them
        names = reasons.get((one.key.run, one.key.rank, one.key.group))
        detail = f" ({names})" if names else ""
        found = "1 violation was" if count == 1 else f"{count:,} violations were"
        group = f" in group {one.key.group}" if one.key.group else ""
        yield Finding(
            rule="violations-found",
            severity="critical",
            group=one.key.group,
            rank=one.key.rank,
            run=one.key.run,
            runner=one.key.runner,
            steps=(first, last),
            reason=f"{found} found{group} {at_steps(first, last)}{detail}: KV slots do not hold what the engine thinks",
        )


def _reasons(connection: Connection, where: str) -> dict[tuple[str, int, str | None], str]:
    """(run, rank, group) → the fail reasons of the recorded violations, most frequent first."""
    query = (
        "SELECT run, rank, \"group\", coalesce(reasons, 'unknown'), count(*) AS n FROM violations "
        f'{where} GROUP BY ALL ORDER BY run, rank, "group", n DESC, 4'
    )
    found: dict[tuple[str, int, str | None], list[str]] = {}
    for run, rank, group, names, count in connection.execute(query).fetchall():
        found.setdefault((run, rank, group), []).append(f"{names.lower().replace('_', ' ')} {count:,}×")
    return {key: ", ".join(names[:3]) for key, names in found.items()}


def _unverified(series: Sequence[Series], coverage: Mapping[Key, Coverage]) -> Iterator[Finding]:
    """Demanded entries that nobody checked, by series."""
    for one in series:
        ledger = coverage.get(one.key)
        if ledger is None or not ledger.unverified:
            continue
        why = ", ".join(
            f"{ledger.unverified_by_reason[name]:,} in {ledger.rows_by_reason[name]:,} rows because {REASONS[name]}"
            for name in REASONS
            if name != "not_measured" and ledger.unverified_by_reason[name]
        )
        missed = (one.unverified > 0).nonzero()[0]
        steps = (int(one.first_steps[missed[0]]), int(one.last_steps[missed[-1]])) if len(missed) else one.steps
        group = f"group {one.key.group}" if one.key.group else "the run"
        yield Finding(
            rule="unverified-steps",
            severity="warning",
            group=one.key.group,
            rank=one.key.rank,
            run=one.key.run,
            runner=one.key.runner,
            steps=steps,
            reason=f"{ledger.unverified:,} of {ledger.demanded:,} entries of {group} went unverified "
            f"{at_steps(*steps)}: {why}; coverage {covered(ledger)}",
        )


def _fallbacks(series: Sequence[Series]) -> Iterator[Finding]:
    """Forwards that should have replayed a graph and ran eagerly."""
    told: set[tuple[str, int, str]] = set()
    for one in series:
        name = (one.key.run, one.key.rank, one.key.runner)
        eager = one.graph_known - one.graph_replayed
        if not eager or not one.graph_replayed or name in told:
            continue
        told.add(name)
        share = eager / one.graph_known
        severity: Severity = "warning" if share >= _FALLBACK_WARNING else "info"
        yield Finding(
            rule="graph-fallback",
            severity=severity,
            rank=one.key.rank,
            run=one.key.run,
            runner=one.key.runner,
            steps=one.steps,
            reason=f"{eager:,} of {one.graph_known:,} forwards ({percent(share)}) ran eagerly, the rest replayed a "
            "CUDA graph: their batch fitted no captured size, or they were prefills",
        )


def _lost(losses: Mapping[tuple[str, int], Losses]) -> Iterator[Finding]:
    """Rows that were counted and never came."""
    for (run, rank), lost in losses.items():
        if not lost.any:
            continue
        means = (
            "they are counted in the rows, and what they were is not known"
            if lost.only_detail
            else "figures here are lower bounds"
        )
        yield Finding(
            rule="rows-lost",
            severity="warning",
            rank=rank,
            run=run,
            steps=None,
            reason=f"the record has holes: {lost.sentence}; {means}",
        )


def _missing_ranks(dataset: Dataset) -> Iterator[Finding]:
    """Ranks that never started, or whose folder was not brought along."""
    for run, ranks in dataset.missing_ranks.items():
        names = ", ".join(str(rank) for rank in ranks)
        which, they = (f"rank {names}", "it") if len(ranks) == 1 else (f"ranks {names}", "they")
        yield Finding(
            rule="missing-rank",
            severity="warning",
            rank=ranks[0] if len(ranks) == 1 else None,
            run=run,
            reason=f"{which} of run {run} left nothing: {they} never started, or the files were not brought along; "
            "nothing here speaks for " + ("that rank" if len(ranks) == 1 else "those ranks"),
        )


def _ended(run: Run, until: int | None) -> Iterator[Finding]:
    """Runs that failed, or that never said that they ended."""
    if until is not None and run.last_step is not None and until < run.last_step:
        return  # seen from then, it is still running
    if run.status == "failed":
        yield Finding(
            rule="run-failed",
            severity="critical",
            rank=run.rank,
            run=run.run,
            steps=(run.last_step, run.last_step) if run.last_step is not None else None,
            reason=f"the run ended in an error: {run.error or 'no message was recorded'}",
        )
    elif run.status == "running":
        yield Finding(
            rule="run-unfinished",
            severity="info",
            rank=run.rank,
            run=run.run,
            steps=(run.last_step, run.last_step) if run.last_step is not None else None,
            reason="the run file says that the run is still going: it is, or the process was killed",
        )
