"""Findings about runs: coverage, violations, errors, losses, ranks and fallbacks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from datasets import dataset, steps_table, violations_table, write_part, write_run

from kvcanary_trace.analysis import Analysis, Finding, analyze


def by_rule(analysis: Analysis, rule: str) -> list[Finding]:
    """All findings of a rule."""
    return [one for one in analysis.findings if one.rule == rule]


def test_clean_run_has_nothing_to_report(tmp_path: Path) -> None:
    """A healthy run: every capacity informs, nothing warns, everything was verified."""
    analysis = analyze(dataset(tmp_path, steps_table(100)))
    assert analysis.worst == "info" and {one.headroom is not None for one in analysis.findings} == {True}
    assert analysis.coverage.ratio == 1.0 and analysis.coverage.demanded == 300_000


def test_ledger_balances(tmp_path: Path) -> None:
    """Verified and unverified by reason add up to what was demanded, reason by reason."""
    demand = np.array([100, 100, 90_000, 100, 100, 100])
    table = steps_table(
        6, verify_demand=demand,
        verify_enabled=[True, False, False, True, True, True],
        verify_checked=[100, 0, 0, 40, 0, None],
        error=[None, None, None, None, "other", None],
    )  # fmt: skip
    ledger = analyze(dataset(tmp_path, table)).coverage
    assert dict(ledger.unverified_by_reason) == {
        "overflow": 90_000, "disabled": 100, "error": 100, "not_launched": 60, "not_measured": 100,
        "slot_0": None, "lost_rows": 0,
    }  # fmt: skip
    assert ledger.demanded == ledger.verified + sum(value or 0 for value in ledger.unverified_by_reason.values())
    assert ledger.ratio == pytest.approx(140 / (demand.sum() - 100))


def test_rotation_counts_what_it_checked(tmp_path: Path) -> None:
    """overflow=rotate: the plan is enabled past capacity, the part that was checked counts."""
    table = steps_table(4, verify_demand=90_000, verify_enabled=True, verify_checked=60_000)
    analysis = analyze(dataset(tmp_path, table, engine={"overflow": "rotate"}))
    assert analysis.coverage.ratio == pytest.approx(2 / 3)
    assert "rotate" in analysis.findings[0].reason and analysis.findings[0].severity == "breached"


def test_error_that_was_made_good_counts_once(tmp_path: Path) -> None:
    """A refused launch done again in chunks: one demand, verified; another refusal stays unverified."""
    table = pa.concat_tables(
        [
            steps_table(1, verify_demand=500, verify_checked=None, error="bs-exceeds-write-req-capacity", bs=300),
            steps_table(1, verify_demand=500, forward=1, seq=2, bs=300),
            steps_table(1, step=1, seq=3, verify_demand=700, verify_checked=None, error="other"),
        ]
    )
    analysis = analyze(dataset(tmp_path, table))
    assert (analysis.coverage.demanded, analysis.coverage.verified) == (1200, 500)
    assert analysis.coverage.unverified_by_reason["error"] == 700
    assert analysis.coverage.rows_by_reason["error"] == 1
    (series,) = analysis.series
    assert series.unverified.tolist() == [0, 700]


def test_kernels_off_is_unknown_not_uncovered(tmp_path: Path) -> None:
    """Rows without a check count have no ratio: nothing is invented."""
    analysis = analyze(dataset(tmp_path, steps_table(5, verify_checked=None)))
    assert analysis.coverage.ratio is None and not by_rule(analysis, "unverified-steps")


def test_violations_are_critical_and_named(tmp_path: Path) -> None:
    """What was found, where, and why; the exit code sees it."""
    new = np.zeros(20, int)
    new[[7, 9]] = 2, 1
    dataset(tmp_path, steps_table(20, violations=np.cumsum(new), violations_new=new))
    write_part(
        tmp_path,
        violations_table(3, step=[7, 7, 9], launch_tag="HEAD_K_FULL", fail_reason=4,
                         reasons=["VERIFY_REAL_KV_HASH_MISMATCH"] * 2 + ["VERIFY_POSITION_MISMATCH"]),
        name="violations",
    )  # fmt: skip
    (found,) = by_rule(analyze(tmp_path), "violations-found")
    assert (found.severity, found.steps, found.group) == ("critical", (7, 9), "full")
    assert "3 violations" in found.reason and "verify real kv hash mismatch 2×" in found.reason
    assert not by_rule(analyze(tmp_path, until=6), "violations-found")


def test_ring_overflow_of_violations(tmp_path: Path) -> None:
    """Case 8: 1025 violations into a ring of 1024: breached, and the losses say how many were lost."""
    count = np.minimum(np.arange(30) * 50, 1025)
    root = dataset(tmp_path, steps_table(30, violations=count, violations_new=np.diff(count, prepend=0)),
                   losses={"violations_lost": 1, "violations_lost_from": 21, "last_lost_seq": None})  # fmt: skip
    analysis = analyze(root)
    (ring,) = [one for one in analysis.findings if one.capacity == "violation_ring"]
    assert (ring.severity, ring.headroom, ring.steps) == ("breached", -1, (21, 29))
    (lost,) = by_rule(analysis, "rows-lost")
    assert "1 violations whose detail no longer fitted the ring from step 21 on" in lost.reason
    assert "lower bounds" not in lost.reason  # the rows themselves are whole


def test_graph_fallback_share(tmp_path: Path) -> None:
    """Case 5: steps that fell back to eager are counted, with their share."""
    replayed = [True] * 80 + [False] * 20
    (found,) = by_rule(analyze(dataset(tmp_path, steps_table(100, graph_replay=replayed))), "graph-fallback")
    assert found.severity == "warning" and "20 of 100 forwards (20 %)" in found.reason
    assert not by_rule(analyze(dataset(tmp_path / "off", steps_table(9, graph_replay=False))), "graph-fallback")


def test_missing_rank_is_named(tmp_path: Path) -> None:
    """Case 18: ranks 0, 1 and 3 of 4 were recorded: rank 2 is named."""
    for rank in (0, 1, 3):
        write_part(tmp_path, steps_table(5), rank=rank)
        write_run(tmp_path, rank=rank, world_size=4)
    (found,) = by_rule(analyze(tmp_path), "missing-rank")
    assert (found.severity, found.rank) == ("warning", 2) and "rank 2" in found.reason


def test_a_sink_that_took_its_rows_later_lost_nothing(tmp_path: Path) -> None:
    """Errors of a sink alone are no holes in the record."""
    analysis = analyze(dataset(tmp_path, steps_table(10), losses={"sink_errors": 3, "rows_dropped": 0}))
    assert not by_rule(analysis, "rows-lost")
    assert analysis.to_json()["losses"]["sink_errors"] == 3


def test_losses_are_told(tmp_path: Path) -> None:
    """Counters of the run file and gaps of the ring numbers."""
    table = steps_table(10, seq=[1, 2, 3, 4, 5, 9, 10, 11, 12, 13])
    analysis = analyze(dataset(tmp_path, table, losses={"ring_overwritten": 2, "sink_errors": 1, "last_lost_seq": 8}))
    (found,) = by_rule(analysis, "rows-lost")
    assert "2 rows overwritten" in found.reason and "3 ring numbers" in found.reason
    assert analysis.coverage.lost_rows == 3 and analysis.coverage.unverified_by_reason["lost_rows"] is None
    assert analysis.to_json()["losses"] == {"ring_overwritten": 2, "sink_errors": 1, "rows_missing": 3}


def test_failed_and_unfinished_runs(tmp_path: Path) -> None:
    """A failed run is critical; seen from an earlier step it was still going."""
    root = dataset(tmp_path, steps_table(10), status="failed", error="ValueError: out of slots", last_step=9)
    (failed,) = by_rule(analyze(root), "run-failed")
    assert failed.severity == "critical" and "ValueError: out of slots" in failed.reason
    assert not by_rule(analyze(root, until=5), "run-failed")
    (going,) = by_rule(analyze(dataset(tmp_path / "going", steps_table(10), status="running")), "run-unfinished")
    assert going.severity == "info"


def test_runs_are_kept_apart(tmp_path: Path) -> None:
    """Two runs in one folder: each finding names its run, and steps that restart are no trend."""
    write_part(tmp_path, steps_table(50, bs=np.arange(50) * 4), run="ra")
    write_part(tmp_path, steps_table(50, bs=3), run="rb")
    hot = [one for one in analyze(tmp_path).findings if one.severity != "info"]
    assert {one.run for one in hot} == {"ra"}


def test_until_before_the_first_step(tmp_path: Path) -> None:
    """Nothing to look at is an error, not a clean bill."""
    from kvcanary_trace.errors import DatasetError

    with pytest.raises(DatasetError, match="no step up to 4: it begins at step 5"):
        analyze(dataset(tmp_path, steps_table(3, step=np.arange(3) + 5)), until=4)
