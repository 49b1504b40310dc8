"""What-if, recommend, compare and explain: known demands in, known answers out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import dataset, steps_table, write_part, write_run
from typer.testing import CliRunner

from kvcanary_trace.analysis import compare, explain, recommend, what_if
from kvcanary_trace.analysis.advice import advised_value
from kvcanary_trace.analysis.comparison import batch_means, welch
from kvcanary_trace.analysis.scenarios import MEMORY_BYTES
from kvcanary_trace.cli import app
from kvcanary_trace.errors import DatasetError, SettingError
from kvcanary_trace.kernels.buffers import VerifyPlan, WritePlan
from kvcanary_trace.replay.faults import parse_fault
from kvcanary_trace.replay.knobs import EngineKnobs
from kvcanary_trace.replay.runner import replay_workload
from kvcanary_trace.replay.synthetic import bursty_workload


def command(*arguments: Any) -> tuple[int, str]:
    """Exit code and standard output of a command."""
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    return done.exit_code, done.stdout


# --- what-if ----------------------------------------------------------------------------------------------------------


def test_what_other_capacities_would_have_meant(tmp_path: Path) -> None:
    """Rows past each value, entries unverified when skipped and when rotated, memory, and the current value."""
    demand = [50, 100, 150, 200]
    root = dataset(tmp_path, steps_table(4, verify_demand=demand, verify_capacity=120))
    found = what_if(root, "verify", [100, 200])
    assert (found.rows, found.peak_demand, found.current) == (4, 200, 120)
    by = {one.value: one for one in found.scenarios}
    assert list(by) == [100, 120, 200] and [one.value for one in found.scenarios if one.is_current] == [120]
    assert (by[100].rows_past, by[100].share_past) == (2, 0.5)
    assert by[100].unverified_skip == 350 / 500 and by[100].unverified_rotate == (50 + 100) / 500
    assert (by[200].rows_past, by[200].unverified_skip, by[200].unverified_rotate) == (0, 0.0, 0.0)
    assert by[100].memory_bytes == VerifyPlan.allocation_bytes(100)


def test_memory_is_that_of_the_buffers() -> None:
    """The formulas without torch say what the buffers take; a plan's inputs are four int64 a row."""
    assert MEMORY_BYTES["verify"](1000) == VerifyPlan.allocation_bytes(1000)
    assert MEMORY_BYTES["write_req"](64) == WritePlan.allocation_bytes(64) + 4 * 8 * 64


def test_a_ladder_is_made_around_the_peak(tmp_path: Path) -> None:
    """Without values: from well below the highest demand to above it; shares never rise with the capacity."""
    rng = np.random.default_rng(0)
    root = dataset(tmp_path, steps_table(500, bs=rng.integers(1, 200, 500), write_req_capacity=256))
    found = what_if(root, "write_req")
    shares = [one.share_past for one in found.scenarios]
    assert len(shares) > 10 and shares == sorted(shares, reverse=True) and shares[0] > 0.3 and shares[-1] == 0
    assert found.scenarios[0].unverified_skip is None  # only verification has entries


def test_steps_are_not_rows(tmp_path: Path) -> None:
    """A step whose two groups are past a value is one step; ranks are apart."""
    tables = [
        steps_table(4, group="full", verify_demand=[10, 50, 50, 10]),
        steps_table(4, group="swa", verify_demand=[10, 50, 10, 10]),
    ]
    root = dataset(tmp_path, pa.concat_tables(tables))
    write_part(root, steps_table(4, verify_demand=[10, 50, 10, 10]), rank=1)
    write_run(root, rank=1)
    found = what_if(root, "verify", [20])
    one = found.scenarios[0]
    assert (found.steps, found.rows, one.steps_past, one.rows_past) == (8, 12, 3, 4)
    code, text = command("what-if", root, "--values", "20")
    assert code == 0 and "12 rows of 8 steps" in text and "37.50%" in text and "goes unverified" in text


def test_what_if_until_and_group(tmp_path: Path) -> None:
    """Only the rows that were asked for count."""
    root = dataset(tmp_path, steps_table(10, verify_demand=np.arange(10), verify_capacity=100))
    assert what_if(root, "verify", [3], until=5).rows == 6
    with pytest.raises(DatasetError, match="measured verify of group swa"):
        what_if(root, "verify", group="swa")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("entries", []), "capacity must be one of write_req"), (("verify", [0]), "at least 1, got 0")],
)
def test_what_if_refuses(arguments: Any, words: str, tmp_path: Path) -> None:
    """Unknown capacities and values."""
    with pytest.raises(SettingError, match=words):
        what_if(dataset(tmp_path, steps_table(2)), *arguments)


# --- recommend --------------------------------------------------------------------------------------------------------


def test_advice_holds_for_what_comes(tmp_path: Path) -> None:
    """Of many runs of one process, the share that breaks the advised value is within the target."""
    rng = np.random.default_rng(1)
    broken = 0
    for _ in range(200):
        peaks = rng.gumbel(1000, 60, 300)
        value, basis = advised_value(peaks[:150], 150, 0.05)
        broken += peaks[150:].max() > value
        assert basis == "tail" and value >= peaks[:150].max()
    assert broken / 200 <= 0.09  # 5 % and its sampling error


def test_a_setting_bounds_the_advice(tmp_path: Path) -> None:
    """Where the engine cannot exceed a value, that value is enough."""
    table = steps_table(6000, bs=np.tile([8, 30], 3000), write_req_capacity=64)
    root = dataset(tmp_path, table, engine={"max_running_requests": 32})
    (one,) = [one for one in recommend(root).advice if one.capacity == "write_req"]
    assert (one.value, one.current, one.basis, one.flag) == (32, 64, "bounded", "--cuda-graph-max-bs-decode")
    assert recommend(root).flags == {"--cuda-graph-max-bs-decode": 32}
    assert one.memory_bytes is not None and one.current_memory_bytes is not None
    assert one.memory_bytes < one.current_memory_bytes


def test_few_rows_are_said_to_be_few(tmp_path: Path) -> None:
    """A short run has no tail: a margin over the highest demand, and the reason says so."""
    root = dataset(tmp_path, steps_table(100, verify_demand=10_000, verify_capacity=60_000))
    (one,) = [one for one in recommend(root).advice if one.capacity == "verify"]
    assert one.basis == "few-blocks" and one.value == 15_360 and "only 1 blocks" in one.reason


def test_a_pool_that_was_full_hides_what_was_wanted(tmp_path: Path) -> None:
    """One value for the engine, not one a group; a full pool's advice is said to be the least."""
    used = np.tile([4_000, 5_000], 3000)
    roomy = dataset(tmp_path / "a", steps_table(6000, kv_used=used, kv_capacity=20_000))
    (one,) = [one for one in recommend(roomy).advice if one.capacity == "kv_pool"]
    assert (one.group, one.basis, one.flag) == (None, "tail", "--max-total-tokens") and 5_000 <= one.value < 20_000
    full = dataset(tmp_path / "b", steps_table(6000, kv_used=used, kv_capacity=5_000))
    (one,) = [one for one in recommend(full).advice if one.capacity == "kv_pool"]
    assert one.basis == "clamped" and "at least" in one.reason


def test_what_holds_for_any_load_is_told(tmp_path: Path) -> None:
    """Where the advice is below what the settings allow, the sentence has the value that nothing can break."""
    root = dataset(tmp_path, steps_table(6000, bs=np.tile([8, 30], 3000)), engine={"max_running_requests": 512})
    (one,) = [one for one in recommend(root).advice if one.capacity == "write_req"]
    assert one.basis == "tail" and one.value < 512 and one.ceiling == 512
    assert one.reason.endswith("512, the most that the settings allow, holds for any load")


def test_recommend_says_what_is_too_small(tmp_path: Path) -> None:
    """Exit code 1 where a capacity is smaller than advised, 0 where none is, 2 for impossible targets."""
    small = dataset(tmp_path / "a", steps_table(100, verify_demand=10_000, verify_capacity=9_000))
    large = dataset(tmp_path / "b", steps_table(100))
    code, text = command("recommend", small, "--json")
    assert code == 1 and json.loads(text)["capacities"][-1]["current"] == 9_000
    code, text = command("recommend", large)
    assert code == 0 and "breach probability of each at most 0.01" in text
    with pytest.raises(SettingError, match="between 0 and 1, got 2"):
        recommend(large, probability=2)
    with pytest.raises(SettingError, match="at least 1, got 0"):
        recommend(large, steps=0)


# --- compare ----------------------------------------------------------------------------------------------------------


def correlated(rng: np.random.Generator, rows: int, mean: float, persistence: float = 0.97) -> np.ndarray:
    """A series like demand: each step close to the one before."""
    noise = rng.normal(0, 1, rows)
    out = np.empty(rows)
    level = 0.0
    for i in range(rows):
        level = persistence * level + noise[i]
        out[i] = level
    return np.maximum(0, mean + 20 * out).round()


def test_noise_is_hardly_ever_a_move() -> None:
    """Two runs of one process: at most a few percent differ at 1 %; a test over rows calls nearly all different."""
    rng = np.random.default_rng(2)
    ours = rows = 0
    for _ in range(200):
        a, b = correlated(rng, 3000, 1000), correlated(rng, 3000, 1000)
        ours += welch(batch_means(a), batch_means(b))[1] < 0.01
        rows += welch(a, b)[1] < 0.01
    assert ours <= 8 and rows > 100


def test_a_move_is_found(tmp_path: Path) -> None:
    """A change of a tenth is found, named as worse, and measured; what stayed is not."""
    rng = np.random.default_rng(3)
    before = dataset(tmp_path / "a", steps_table(4000, verify_demand=correlated(rng, 4000, 3000), host_ns=20_000_000))
    after = dataset(tmp_path / "b", steps_table(4000, verify_demand=correlated(rng, 4000, 3400), host_ns=20_000_000))
    found = compare(before, after)
    (moved,) = found.worse
    assert moved.metric == "verify_demand" and moved.ratio == pytest.approx(3400 / 3000, abs=0.02)
    assert moved.effect is not None and moved.effect > 2 and moved.p_value is not None and moved.p_value < 1e-4
    assert not next(one for one in found.moves if one.metric == "host_ns").moved
    code, text = command("compare", before, after)
    assert code == 1 and "1 of" in text and "+12.9%" in text
    code, _ = command("compare", after, before)
    assert code == 0  # it got better


def test_what_only_one_side_has_is_told(tmp_path: Path) -> None:
    """A group that is gone, or new, is not compared and not passed over."""
    both = pa.concat_tables([steps_table(400, group="full"), steps_table(400, group="swa")])
    before, after = dataset(tmp_path / "a", both), dataset(tmp_path / "b", steps_table(400))
    gone = compare(before, after).one_sided
    assert "verify_demand of swa, decode: only before" in gone and not any("full" in one for one in gone)
    assert "coverage of swa, decode: only after" in compare(after, before).one_sided
    _, text = command("compare", before, after)
    assert "not compared: verify_demand of swa, decode: only before" in text


def test_runs_of_one_folder(tmp_path: Path) -> None:
    """Runs can be named; the same run on both sides is refused, and so is one that is not there."""
    root = dataset(tmp_path, steps_table(200))
    with pytest.raises(SettingError, match="both sides are run"):
        compare(root, root)
    with pytest.raises(SettingError, match="has no run 'x'"):
        compare(root, root, after_run="x")


# --- explain ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A replay with requests in detail, a flipped byte, and a verify capacity that some steps outgrow."""
    root = tmp_path_factory.mktemp("replayed")
    replay_workload(
        bursty_workload(30, output_len=40),
        root,
        knobs=EngineKnobs(max_running_requests=16, max_total_tokens=20_000, verify_capacity=4_000),
        faults=[parse_fault("kv-flip@40")],
        detail="requests",
        progress=False,
    )
    return root


def test_a_violation_is_explained(replayed: Path) -> None:
    """Where, why, which step wrote the slot, who read it, and whose prefixes were in the batch."""
    found = explain(replayed)
    assert found.step >= 40 and any("new violation" in why for why in found.why)
    (slot,) = {(one.slot, one.reasons) for one in found.slots}
    assert slot[1] == "VERIFY_REAL_KV_HASH_MISMATCH"
    one = found.slots[0]
    assert one.readers and (one.writer_step is None or one.writer_step < found.step)
    assert found.all_requests is not None and sum(r.share for r in found.requests) <= 1.0 + 1e-9
    assert found.requests[0].share == max(r.share for r in found.requests)
    assert found.shared_prefix_factor is not None and not found.lacking


def test_a_breach_is_explained(replayed: Path) -> None:
    """A step past the verify capacity: by how much, and what the batch was before."""
    import duckdb

    ((step,),) = duckdb.sql(
        f"SELECT min(step) FROM '{replayed}/steps/*/*/*.parquet' WHERE verify_demand > verify_capacity"
    ).fetchall()
    found = explain(replayed, step)
    assert any(why.startswith("verify: ") and why.endswith("the step goes unverified") for why in found.why)
    assert found.now["verify_demand"] > 4_000 and found.before["verify_demand"] is not None
    code, text = command("explain", replayed, "--step", step)
    assert code == 0 and "shared-prefix factor" in text and "largest of" in text
    code, text = command("explain", replayed, "--step", step, "--json")
    assert json.loads(text)["step"] == step


def test_what_the_rows_lack_is_said(tmp_path: Path) -> None:
    """Without rows of requests or of the pool the answer says so, and how to get them."""
    root = dataset(tmp_path, steps_table(5, verify_demand=[1, 2, 3, 90_000, 5]))
    found = explain(root)
    assert found.step == 3 and found.requests == () and found.all_requests is None
    assert any('trace(detail="requests")' in one for one in found.lacking)
    assert any("kv_used" in one for one in found.lacking)


def test_nothing_to_explain(tmp_path: Path) -> None:
    """A clean run needs a step; a step that is not there is refused."""
    root = dataset(tmp_path, steps_table(5))
    with pytest.raises(DatasetError, match="nothing broke"):
        explain(root)
    assert explain(root, 2).why == ("nothing broke in this step",)
    with pytest.raises(SettingError, match="no row of step 99"):
        explain(root, 99)


def test_requests_need_the_kernels(tmp_path: Path) -> None:
    """A replay without kernels has no launches to read requests from."""
    with pytest.raises(SettingError, match="drop --kernels off"):
        replay_workload(bursty_workload(2), tmp_path, kernels=False, detail="requests", progress=False)


def test_a_curve_is_drawn(tmp_path: Path) -> None:
    """`what-if --plot` writes a figure; a bad ending or bad values are refused."""
    root = dataset(tmp_path, steps_table(50, verify_demand=np.arange(50) * 100))
    code, text = command("what-if", root, "--values", "1000, 2_000", "--plot", tmp_path / "curve.svg")
    assert code == 0 and "with rotate" in text and "rotate" in (tmp_path / "curve.svg").read_text()
    with pytest.raises(SettingError, match="whole numbers"):
        CliRunner().invoke(app, ["what-if", str(root), "--values", "many"], catch_exceptions=False)
