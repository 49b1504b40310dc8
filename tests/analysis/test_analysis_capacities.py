"""Findings about capacities: the field's cases, the ladder, and what each finding says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from datasets import dataset, steps_table, write_part, write_run

from kvcanary_trace.analysis import Analysis, Finding, analyze


def find(analysis: Analysis, capacity: str, group: str | None = "full") -> Finding:
    """The finding of one capacity and group."""
    (found,) = [
        one for one in analysis.findings if one.capacity == capacity and one.group == group and one.headroom is not None
    ]
    return found


def test_padding_is_no_load(tmp_path: Path) -> None:
    """Case 1: 3 requests launched as 256 fill 3/256 of the plan, not all of it."""
    found = find(analyze(dataset(tmp_path, steps_table(20, bs=3, bs_launched=256))), "write_req")
    assert found.peak_utilization == found.p99_utilization == 3 / 256
    assert (found.severity, found.headroom, found.breach, found.remedy) == ("info", 253, None, None)


def test_overflow_of_one_group_leaves_the_other_covered(tmp_path: Path) -> None:
    """Cases 2 and 3: the full group overflows at step 5, the window group at step 8: each is named."""
    demand = np.full(10, 50_000)
    full, swa = demand.copy(), demand // 10
    full[5], swa[8] = 190_000, 61_000
    tables = [
        steps_table(10, group="full", verify_demand=full, seq=np.arange(10) * 2 + 1),
        steps_table(10, group="swa", verify_demand=swa, seq=np.arange(10) * 2 + 2),
    ]
    analysis = analyze(dataset(tmp_path, pa.concat_tables(tables)))
    at_full, at_swa = find(analysis, "verify", "full"), find(analysis, "verify", "swa")
    assert (at_full.severity, at_full.steps, at_full.headroom) == ("breached", (5, 5), 60_000 - 190_000)
    assert (at_swa.severity, at_swa.steps, at_swa.headroom) == ("breached", (8, 8), -1000)
    assert at_full.peak_utilization == pytest.approx(190 / 60)
    assert "190,000" in at_full.reason and at_full.subject == "verify (full)"
    assert at_full.remedy is not None and at_full.remedy.flag is None  # the engine has no such knob: none is invented

    ledgers = {key.group: one for key, one in analysis.coverage_by_series.items()}
    assert ledgers["full"].unverified_by_reason["overflow"] == 190_000
    assert ledgers["full"].ratio == pytest.approx(450_000 / 640_000)
    assert ledgers["swa"].unverified_by_reason["overflow"] == 61_000
    assert analysis.coverage.demanded == sum(full) + sum(swa)


def test_plateau_is_a_warning(tmp_path: Path) -> None:
    """Case 7: flat at 0.96 for long, then drained: a warning, at the end and in the middle of it."""
    rng = np.random.default_rng(7)
    bs = np.concatenate([np.full(3000, 246) - rng.integers(0, 12, 3000), np.arange(246, 0, -4)])
    root = dataset(tmp_path, steps_table(len(bs), bs=bs))
    for until in (None, 2999, 1234, 700, 100):
        found = find(analyze(root, until), "write_req")
        assert found.severity == "warning", (until, found.reason)
        assert found.breach is None


def test_ramp_is_announced(tmp_path: Path) -> None:
    """Case 7: half a percent a step from 0.6 is critical well before 0.95, and the estimate is right."""
    bs = np.round(1000 * (0.6 + 0.005 * np.arange(90))).astype(int)
    root = dataset(tmp_path, steps_table(90, bs=bs, write_req_capacity=1000))
    found = find(analyze(root, 45), "write_req")  # 0.825
    assert found.severity == "critical"
    assert found.breach is not None and found.breach.steps is not None
    assert found.breach.steps == pytest.approx(35, abs=1)
    assert found.breach.seconds == pytest.approx(found.breach.steps * 0.02, rel=0.1)
    assert found.breach.probability is not None and found.breach.probability > 0.06  # calibrated, not certain
    assert found.breach.low is not None and found.breach.high is not None  # of the slope that says when
    assert found.breach.low <= found.breach.steps <= found.breach.high <= 400
    after = find(analyze(root), "write_req")
    assert (after.severity, after.steps) == ("breached", (81, 89))
    assert "at or above 80 % from step 40 on, critical 42 steps before" in after.reason


def test_queue_is_announced_only_as_far_as_it_can_be_admitted(tmp_path: Path) -> None:
    """A queue that the engine cannot let in is no breach to come; one that it can is."""
    queue = {"resident_reqs": 60, "waiting_reqs": 500, "waiting_tokens": 500_000, "resident_tokens": 60_000, "bs": 60}
    pool = {"kv_used": 60_000, "kv_capacity": 200_000}
    table = steps_table(50, **queue, **pool, write_req_capacity=64, verify_demand=60_000, verify_capacity=600_000)
    bounded = analyze(dataset(tmp_path / "bounded", table, engine={"max_running_requests": 64}))
    assert find(bounded, "write_req").severity == "warning"
    assert find(bounded, "verify").severity == "info"
    assert find(bounded, "kv_pool", None).severity == "info"
    open_ended = analyze(dataset(tmp_path / "open", table))
    found = find(open_ended, "write_req")
    assert found.severity == "critical" and found.breach is not None
    assert found.remedy is not None and found.remedy.value >= 200 and found.remedy.flag == "--cuda-graph-max-bs-decode"


def test_full_pool_keeps_the_queue_out(tmp_path: Path) -> None:
    """Without a request limit, the pool's free slots bound what can be admitted."""
    table = steps_table(
        50, bs=40, resident_reqs=40, resident_tokens=39_000, waiting_reqs=300, waiting_tokens=300_000,
        kv_used=39_000, kv_capacity=40_000, write_req_capacity=64,
    )  # fmt: skip
    assert find(analyze(dataset(tmp_path, table)), "write_req").severity != "critical"


def test_running_work_that_cannot_fit(tmp_path: Path) -> None:
    """A small prefill beside a large running batch: its own demand is blind, the running work is not."""
    table = steps_table(
        30, bs=2, mode="prefill", resident_reqs=70, resident_tokens=7000, waiting_reqs=0, waiting_tokens=0,
        write_req_capacity=64,
    )  # fmt: skip
    found = find(analyze(dataset(tmp_path, table)), "write_req")
    assert found.severity == "critical" and found.breach is not None and found.breach.steps == 1
    assert "70" in found.reason


def test_settings_that_allow_an_overflow_are_a_warning_from_the_first_step(tmp_path: Path) -> None:
    """An engine that may run 64 requests over a plan of 8 is under pressure before any load shows it."""
    table = steps_table(1, bs=1, write_req_capacity=8)
    found = find(analyze(dataset(tmp_path, table, engine={"--max-running-requests": 64})), "write_req")
    assert found.severity == "warning"
    assert found.remedy is not None and found.remedy.value == 64


def test_request_that_never_fits_the_pool(tmp_path: Path) -> None:
    """A queued request larger than the whole pool is said so."""
    table = steps_table(
        5, kv_used=100, kv_capacity=4000, resident_reqs=1, resident_tokens=100, waiting_reqs=1, waiting_tokens=5000
    )
    found = find(analyze(dataset(tmp_path, table)), "kv_pool", None)
    assert found.severity == "critical" and "5,000" in found.reason


def test_healthy_burst_is_no_ramp(tmp_path: Path) -> None:
    """Prompts of a burst that is already here raise the pool's use step by step, and then it stops: not critical."""
    used = np.concatenate([np.full(40, 1000), 1000 + 2000 * np.arange(12)])
    waiting = np.concatenate([np.zeros(40), 26_000 - 2000 * np.arange(12)]).astype(int)
    table = steps_table(
        52, kv_used=used, kv_capacity=30_000, resident_reqs=8, resident_tokens=used, waiting_reqs=0,
        waiting_tokens=waiting, mode=["decode"] * 40 + ["prefill"] * 12,
    )  # fmt: skip
    assert find(analyze(dataset(tmp_path, table)), "kv_pool", None).severity == "info"


def test_draft_and_ranks_are_apart(tmp_path: Path) -> None:
    """A finding names runner and rank; one rank's trouble is not averaged away by the others."""
    for rank in range(3):
        table = pa.concat_tables(
            [
                steps_table(10, bs=250 if rank == 1 else 3, seq=np.arange(10) * 2 + 1),
                steps_table(10, bs=5, runner="draft", seq=np.arange(10) * 2 + 2),
            ]
        )
        write_part(tmp_path, table, rank=rank)
        write_run(tmp_path, rank=rank, world_size=3)
    analysis = analyze(tmp_path)
    hot = [one for one in analysis.findings if one.capacity == "write_req" and one.severity == "warning"]
    assert [(one.rank, one.runner) for one in hot] == [(1, "target")]


def test_changed_limit_is_named(tmp_path: Path) -> None:
    """A capacity that changes during a run is measured against each step's limit, and said."""
    limit = np.where(np.arange(100) < 60, 100, 50)
    analysis = analyze(dataset(tmp_path, steps_table(100, bs=45, write_req_capacity=limit)))
    (changed,) = [one for one in analysis.findings if one.rule == "capacity-changed"]
    assert changed.steps == (60, 99) and "from 100 to 50" in changed.reason
    found = find(analysis, "write_req")
    assert found.peak_utilization == 0.9 and found.headroom == 5


def test_unmeasured_capacities_have_no_finding(tmp_path: Path) -> None:
    """Null is not zero: nothing is said about what nobody measured."""
    table = steps_table(5, verify_demand=None, verify_planned=None, verify_checked=None, verify_enabled=None)
    capacities = {one.capacity for one in analyze(dataset(tmp_path, table)).findings}
    assert "verify" not in capacities and "kv_pool" not in capacities and "write_req" in capacities


def test_error_row_without_demand_is_a_breach(tmp_path: Path) -> None:
    """The host alone saw the error: the code names the capacity, the message is quoted."""
    message = "kv-canary: bs=300 exceeds write_req_capacity=256"
    nothing = dict.fromkeys(
        ("group", "kind", "seq", "bs", "bs_launched", "write_req_capacity", "write_entries", "verify_demand",
         "verify_planned", "verify_capacity", "verify_enabled", "verify_checked", "violations"),
    )  # fmt: skip
    failed = steps_table(
        1, step=np.array([20]), error="bs-exceeds-write-req-capacity", error_message=message, **nothing
    )
    root = dataset(tmp_path, pa.concat_tables([steps_table(20), failed]))
    worst = analyze(root).findings[0]
    assert (worst.rule, worst.severity, worst.capacity, worst.steps) == (
        "step-error",
        "breached",
        "write_req",
        (20, 20),
    )
    assert message in worst.reason
    assert analyze(root, until=19).worst == "info"


def test_p99_of_large_and_small_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The histogram's percentile is within 0.002 of the exact one, for shapes with ties, tails and plateaus."""
    import kvcanary_trace.analysis.quantiles as quantiles

    rng = np.random.default_rng(3)
    n = 60_000
    tail = np.minimum(rng.pareto(2.0, n) * 50, 900).astype(int)
    ties = np.where(rng.random(n) < 0.4, 1000, 100)
    dense = rng.integers(0, 1_000_000, n)
    table = steps_table(
        n, bs=tail, write_req_capacity=1000, write_entries=ties, write_entry_capacity=1000, verify_demand=dense,
        verify_capacity=1_000_000, kv_used=np.arange(n), kv_capacity=n,
    )  # fmt: skip
    root = dataset(tmp_path, table)
    exact = {one.capacity: one.p99_utilization for one in analyze(root).findings}
    monkeypatch.setattr(quantiles, "_EXACT_ROWS", 0)
    binned = {one.capacity: one.p99_utilization for one in analyze(root).findings}
    monkeypatch.setattr(quantiles, "_floors", lambda *_: dict.fromkeys(("write_req", "verify"), 0.9999))  # misled
    again = {one.capacity: one.p99_utilization for one in analyze(root).findings}
    for name, expected in exact.items():
        assert binned[name] == pytest.approx(expected, abs=0.002), name
        assert again[name] == pytest.approx(expected, abs=0.002), name
    quantile = np.quantile(np.stack([tail / 1000, dense / 1_000_000]), 0.99, axis=1)
    assert [exact["write_req"], exact["verify"]] == pytest.approx(quantile.tolist())


def test_buckets_lose_no_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with more steps than buckets still has the peak, its step and its headroom exactly."""
    import kvcanary_trace.analysis.series as series

    bs = np.full(5000, 10)
    bs[[3210, 3211]] = 300, 290
    root = dataset(tmp_path, steps_table(5000, bs=bs))
    exact = find(analyze(root), "write_req")
    monkeypatch.setattr(series, "MAX_BUCKETS", 50)
    coarse = find(analyze(root), "write_req")
    assert (coarse.steps, coarse.headroom, coarse.peak_utilization) == ((3210, 3211), -44, 300 / 256)
    assert (coarse.steps, coarse.severity) == (exact.steps, exact.severity)


@pytest.mark.parametrize("limit", [0, [0, 0, 50, 50]], ids=["always", "at first"])
def test_limit_of_nothing(tmp_path: Path, limit: int | list[int]) -> None:
    """A limit of 0 counts as 1: any demand breaks it, and every number stays finite."""
    found = find(analyze(dataset(tmp_path, steps_table(4, bs=3, write_req_capacity=limit))), "write_req")
    assert (found.severity, found.peak_utilization) == ("breached", 3.0)


def test_rows_without_a_limit_do_not_count(tmp_path: Path) -> None:
    """A limit that is the same wherever it is known, and null elsewhere: those rows measured nothing."""
    table = steps_table(4, kv_used=[10, 900, 20, 800], kv_capacity=[100, None, 100, None])
    found = find(analyze(dataset(tmp_path, table)), "kv_pool", None)
    assert found.peak_utilization == 0.2


def test_limits_that_differ_between_parts(tmp_path: Path) -> None:
    """Each part has one limit of its own: rows are measured against theirs, whatever a footer says of one part."""
    for part, limit in enumerate((100, 50)):
        step = np.arange(10) + 10 * part
        write_part(tmp_path, steps_table(10, step=step, seq=step + 1, bs=40, write_req_capacity=limit), part=part)
    found = find(analyze(tmp_path), "write_req")
    assert (found.peak_utilization, found.headroom, found.steps) == (0.8, 10, (10, 19))


def test_pool_is_the_engines_not_a_groups(tmp_path: Path) -> None:
    """Rows of both groups tell the same pool: one finding, without a group."""
    tables = [
        steps_table(5, group=group, kv_used=90, kv_capacity=100, seq=np.arange(5) * 2 + at)
        for at, group in enumerate(("full", "swa"), 1)
    ]
    analysis = analyze(dataset(tmp_path, pa.concat_tables(tables)))
    assert find(analysis, "kv_pool", None).peak_utilization == 0.9
    assert len([one for one in analysis.to_json()["capacities"] if one["capacity"] == "kv_pool"]) == 1


def test_settings_that_just_fit_are_no_pressure(tmp_path: Path) -> None:
    """An engine that may run exactly what its plan holds is not under pressure for that."""
    table = steps_table(5, write_req_capacity=64)
    assert find(analyze(dataset(tmp_path, table, engine={"max_running_requests": 64})), "write_req").severity == "info"


def test_error_with_its_demand_is_one_finding(tmp_path: Path) -> None:
    """A refused launch whose row has the demand shows as the capacity's breach, not as an error beside it."""
    tables = [
        steps_table(5),
        steps_table(1, step=np.array([5]), seq=6, bs=300, verify_checked=None, error="bs-exceeds-write-req-capacity"),
    ]
    analysis = analyze(dataset(tmp_path, pa.concat_tables(tables)))
    assert [one.rule for one in analysis.at_least("critical")] == ["write-req-capacity"]
