"""Failures from the field, as lint, forecast, what-if and explain see them; `analyze` has its own of each beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import dataset, steps_table
from launches import Engine

import kvcanary_trace as kv_canary
from kvcanary_trace.analysis import analyze, explain, what_if
from kvcanary_trace.kernels import CanaryLaunchTag
from kvcanary_trace.monitor import Transition
from kvcanary_trace.pressure.horizon import Horizon
from kvcanary_trace.replay.knobs import EngineKnobs
from kvcanary_trace.replay.runner import replay_workload
from kvcanary_trace.replay.synthetic import bursty_workload

# --- 2: many requests share one long prefix ---------------------------------------------------------------------------

POOL, PREFIX, REQS = 100, 40, 20


@pytest.fixture(scope="module")
def shared_prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 requests over one prefix of 40 tokens: 800 entries in a plan of three pools, 300; the window group has 160."""
    root = tmp_path_factory.mktemp("shared")
    full = Engine(verify_capacity=3 * POOL, write_req_capacity=32)
    swa = Engine(verify_capacity=3 * POOL, write_req_capacity=32, window=8, tag=CanaryLaunchTag.HEAD_K_SWA)
    with kv_canary.trace(root, detail="requests"):
        for step in range(3):
            reqs = REQS if step == 2 else 2
            with kv_canary.step(step, mode="decode", kv_used=PREFIX + reqs, kv_capacity=POOL):
                full.forward(reqs, PREFIX)
                swa.forward(reqs, PREFIX)
    return root


def test_a_shared_prefix_is_explained(shared_prefix: Path) -> None:
    """The group that overflowed, by how much, that sharing did it, and that no request stands out."""
    found = explain(shared_prefix)
    assert (found.step, found.group) == (2, "full")
    assert found.why == ("verify: 800 of 300: the step goes unverified",)
    assert found.shared_prefix_factor == pytest.approx(800 / 60)
    assert found.all_requests == REQS and {one.share for one in found.requests} == {1 / REQS}
    assert found.before["verify_demand"] == 2 * PREFIX and found.lacking == ()


def test_a_shared_prefix_in_what_if_and_lint(shared_prefix: Path) -> None:
    """True demand, not the clamped count: the value that would have done, for the one group that needed it."""
    by = {one.value: one for one in what_if(shared_prefix, "verify", [799, 800], group="full").scenarios}
    assert [by[value].rows_past for value in (300, 799, 800)] == [1, 1, 0]
    assert by[300].unverified_skip == 800 / 960 and by[300].unverified_rotate == 500 / 960
    assert all(one.rows_past == 0 for one in what_if(shared_prefix, "verify", [300], group="swa").scenarios)
    report = kv_canary.lint(["--max-total-tokens", str(POOL)], environment={}, sharing=8.0)
    assert [one.rule for one in report.findings] == ["verify-below-shared-pool"]


def test_groups_that_overflow_at_different_times(tmp_path: Path) -> None:
    """Case 3: full at step 5, the window at step 8: each answer names its group."""
    demand = np.full(10, 1_000)
    full, swa = demand.copy(), demand // 10
    full[5], swa[8] = 70_000, 61_000
    tables = [steps_table(10, group="full", verify_demand=full), steps_table(10, group="swa", verify_demand=swa)]
    root = dataset(tmp_path, pa.concat_tables(tables))
    assert (explain(root).step, explain(root).group) == (5, "full")
    assert (explain(root, 8).group, explain(root, 8).now["verify_demand"]) == ("swa", 61_000)
    assert what_if(root, "verify", [65_000], group="swa").scenarios[-1].rows_past == 0
    assert what_if(root, "verify", [65_000], group="full").scenarios[-1].rows_past == 1


# --- 4: a request pool that no plan launch takes ----------------------------------------------------------------------


def test_a_pool_over_one_plan_launch(tmp_path: Path) -> None:
    """The lint says it before the first request, with the flag; the engine that goes on breaks at its first launch."""
    line = ["--max-running-requests", "5000", "--cuda-graph-max-bs-decode", "512"]
    said = kv_canary.lint(line, environment={"SGLANG_KV_CANARY_RING_CAPACITY": "8192"}).findings
    assert [(one.capacity, one.severity, one.remedy_flag, one.remedy_value) for one in said] == [
        ("plan_block", "critical", "--max-running-requests", 4096)
    ]
    done = replay_workload(
        bursty_workload(3), tmp_path, knobs=EngineKnobs(max_running_requests=5000), kernels=False, progress=False
    )
    assert not done.completed and done.first_error is not None and "at most bs=4096" in done.first_error[1]
    found = explain(tmp_path)
    assert found.step == 0 and any(why.startswith("plan_block: 5,000 of 4,096") for why in found.why)
    (broken,) = [one for one in analyze(tmp_path).findings if one.severity == "breached"]
    assert (broken.capacity, broken.remedy and broken.remedy.flag) == ("plan_block", "--max-running-requests")


# --- 6: a capacity that the engine overwrites at start ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "origin"),
    [(512, "engine, instead of environment 512"), (256, "environment")],
    ids=["overwritten", "kept"],
)
def test_the_effective_value_has_its_own_origin(tmp_path: Path, given: int, origin: str) -> None:
    """What the rows have counts. A setting that it does not follow is named, and is not given as its origin."""
    capacities = [{"capacity": "write_req", "group": None, "value": given, "origin": "environment"}]
    root = dataset(tmp_path, steps_table(5), capacities=capacities)
    (one,) = [one for one in analyze(root).to_json()["capacities"] if one["capacity"] == "write_req"]
    assert (one["limit"], one["origin"]) == (256, origin)


def test_origins_of_target_and_draft_are_apart(tmp_path: Path) -> None:
    """Each runner's own line of the run file."""
    tables = [steps_table(3), steps_table(3, runner="draft", write_req_capacity=128)]
    capacities = [
        {"capacity": "write_req", "group": None, "value": 256, "origin": "argument", "runner": "target"},
        {"capacity": "write_req", "group": None, "value": 128, "origin": "derived", "runner": "draft"},
    ]
    found = analyze(dataset(tmp_path, pa.concat_tables(tables), capacities=capacities)).to_json()["capacities"]
    origins = {one["runner"]: one["origin"] for one in found if one["capacity"] == "write_req"}
    assert origins == {"target": "argument", "draft": "derived"}


# --- 7: a plateau is no ramp ------------------------------------------------------------------------------------------

LIMIT = 1000


def live(tmp_path: Path, loads: Any) -> list[Transition]:
    """What the live monitor tells of a series that nothing but its rows is known of."""
    told: list[Transition] = []
    with kv_canary.trace(tmp_path, on_pressure=told.append) as session:
        for step, demand in enumerate(loads):
            session.record(step=step, mode="decode", verify_demand=int(demand), verify_capacity=LIMIT)
    return told


def test_a_ramp_is_critical_live_well_before_the_limit(tmp_path: Path) -> None:
    """Half a percent a step from 0.6, as the first thing in a run."""
    told = live(tmp_path, LIMIT * (0.6 + 0.005 * np.arange(90)))
    critical = next(one for one in told if one.after == "critical")
    breached = next(one for one in told if one.after == "breached")
    assert critical.utilization < 0.9 and critical.step < breached.step == 81


def test_a_plateau_is_a_warning_live(tmp_path: Path) -> None:
    """Flat at 0.96, then drained: once it has been seen to be flat, nothing but the warning that it is high."""
    rng = np.random.default_rng(7)
    flat = 960 - rng.integers(0, 40, 12_000)
    told = live(tmp_path, np.concatenate([flat, np.arange(960, 0, -4)]))
    assert "breached" not in {one.after for one in told}
    held = [one.after for one in told if one.step <= 2000][-1:] + [one.after for one in told if one.step > 2000]
    assert held[0] == "warning" and "critical" not in held, held
    assert held[-1] == "info"  # it was drained


def test_the_estimator_knows_a_plateau() -> None:
    """The same without a session: the probability of a breach falls below the alarm's as the plateau goes on."""
    horizon = Horizon("verify")
    rng = np.random.default_rng(7)
    for step, demand in enumerate(960 - rng.integers(0, 40, 12_000)):
        horizon.update(step, float(demand), float(demand))
    probability = horizon.outlook(LIMIT).probability
    assert probability is not None and probability < 0.06
