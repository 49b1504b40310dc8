"""A replay as a run of a dataset: rows, refusals, capacities, and demands without kernels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from typer.testing import CliRunner

from kvcanary_trace.cli import app
from kvcanary_trace.errors import KvCanaryError, SettingError
from kvcanary_trace.replay.faults import Fault
from kvcanary_trace.replay.knobs import EngineKnobs
from kvcanary_trace.replay.runner import ReplayResult, replay_workload
from kvcanary_trace.replay.synthetic import bursty_workload

LOAD = bursty_workload(16, seed=5, input_len=70, output_len=20, burst_every_s=1.0, quiet_rate_per_s=12.0)
KNOBS = EngineKnobs(max_running_requests=8, max_total_tokens=2_000, chunked_prefill_size=64)
DEMANDS = [
    "step", "forward", "runner", "group", "kind", "mode", "bs", "bs_launched", "write_req_capacity", "write_entries",
    "write_entry_capacity", "verify_demand", "verify_planned", "verify_capacity", "verify_enabled", "prefix_len_max",
    "prefix_len_sum", "seq_len_max", "req_to_token_width", "kv_used", "kv_capacity", "resident_reqs", "resident_tokens",
    "waiting_reqs", "waiting_tokens", "time", "error",
]  # fmt: skip


def rows_of(folder: Path, run: str | None = None) -> list[dict[str, Any]]:
    """Rows of the dataset, by step and group."""
    table = ds.dataset(folder / "steps", partitioning="hive").to_table()
    rows = [row for row in table.to_pylist() if run in (None, row["run"])]
    return sorted(rows, key=lambda row: (row["step"], row["forward"], str(row["group"])))


def run_file(folder: Path, result: ReplayResult) -> dict[str, Any]:
    (path,) = (folder / "runs").glob(f"{result.run_id}.*.json")
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def test_a_replay_is_a_run_with_one_row_a_step_and_group(tmp_path: Path) -> None:
    """Nothing lost, nothing found, every knob and size on file."""
    result = replay_workload(LOAD, tmp_path, knobs=replace(KNOBS, swa_window=24))
    rows = rows_of(tmp_path)
    assert (result.violations, result.errors, result.completed) == (0, 0, True)
    assert result.finished_reqs == result.requests == 16
    assert [row["step"] for row in rows] == [step for step in range(result.steps) for _ in range(2)]
    assert {row["group"] for row in rows} == {"full", "swa"}
    assert {row["violations"] for row in rows} == {0}
    assert all(row["verify_checked"] == row["verify_demand"] for row in rows)
    assert sum(row["verify_demand"] for row in rows) == result.entries
    assert sum(row["write_entries"] for row in rows) == 2 * result.tokens
    on_file = run_file(tmp_path, result)
    assert on_file["status"] == "completed"
    assert on_file["engine"]["max_running_requests"] == 8
    assert {item["capacity"] for item in on_file["capacities"]} >= {"verify", "write_req", "kv_pool", "req_to_token"}


def test_two_runs_never_mix(tmp_path: Path) -> None:
    """A second replay into the same folder is a run of its own."""
    first = replay_workload(LOAD, tmp_path, knobs=KNOBS, kernels=False)
    second = replay_workload(LOAD, tmp_path, knobs=KNOBS, kernels=False)
    assert first.run_id != second.run_id
    assert len(rows_of(tmp_path, first.run_id)) == len(rows_of(tmp_path, second.run_id)) == first.steps


VARIANTS = {
    "plain": (KNOBS, "skip"),
    "window": (replace(KNOBS, swa_window=24), "skip"),
    "mixed": (replace(KNOBS, schedule="mixed", page_size=4), "skip"),
    "overflow": (replace(KNOBS, verify_capacity=300), "skip"),
    "rotate": (replace(KNOBS, verify_capacity=300), "rotate"),
    "refused": (replace(KNOBS, write_req_capacity=3, swa_window=24), "skip"),
    "plan-block": (replace(KNOBS, write_req_capacity=4097), "skip"),
}


@pytest.mark.parametrize(("knobs", "overflow"), VARIANTS.values(), ids=VARIANTS)
def test_rows_without_kernels_are_the_same(tmp_path: Path, knobs: EngineKnobs, overflow: Any) -> None:
    """Every demand, capacity and time agrees with what the launchers saw."""
    tables = []
    for name in ("on", "off"):
        replay_workload(
            LOAD, tmp_path / name, knobs=knobs, kernels=name == "on", overflow=overflow, on_error="continue"
        )
        tables.append([{column: row[column] for column in DEMANDS} for row in rows_of(tmp_path / name)])
    assert len(tables[0]) == len(tables[1])
    for on, off in zip(*tables, strict=True):
        assert on == off


def test_a_refused_batch_stops_the_run_with_its_true_demand(tmp_path: Path) -> None:
    """The last row is the refused step; the run file says why."""
    result = replay_workload(LOAD, tmp_path, knobs=replace(KNOBS, write_req_capacity=3))
    rows = rows_of(tmp_path)
    assert not result.completed
    assert result.first_error is not None
    assert result.first_error[0] == rows[-1]["step"] == result.steps
    assert "bs=5 exceeds write_req_capacity=3" in result.first_error[1]
    assert (rows[-1]["bs"], rows[-1]["write_req_capacity"]) == (5, 3)
    assert rows[-1]["error"] == "bs-exceeds-write-req-capacity"
    assert rows[-1]["resident_reqs"] == 5
    on_file = run_file(tmp_path, result)
    assert on_file["status"] == "failed"
    assert "exceeds write_req_capacity" in on_file["error"]


def test_going_on_in_chunks_leaves_the_canaries_whole(tmp_path: Path) -> None:
    """A refused step has one more forward, whole and verified: later steps find nothing wrong."""
    result = replay_workload(LOAD, tmp_path, knobs=replace(KNOBS, write_req_capacity=3), on_error="continue")
    rows = rows_of(tmp_path)
    assert result.completed
    assert result.violations == 0
    assert result.finished_reqs == 16
    refused = [row for row in rows if row["error"]]
    ran = [row for row in rows if not row["error"]]
    assert [row["step"] for row in ran] == list(range(result.steps))
    assert all(row["verify_checked"] == row["verify_demand"] for row in ran)
    assert [row["step"] for row in refused] == [row["step"] for row in ran if row["forward"] == 1]
    assert [row["bs"] for row in refused] == [row["bs"] for row in ran if row["bs"] > 3]
    assert result.errors == len(refused) > 0


@pytest.mark.parametrize("overflow", ["skip", "rotate"])
def test_verify_overflow_is_recorded_with_the_true_demand(tmp_path: Path, overflow: Any) -> None:
    """Skip leaves those steps unverified; rotate checks a capacity's worth of them."""
    result = replay_workload(LOAD, tmp_path, knobs=replace(KNOBS, verify_capacity=300), overflow=overflow)
    rows = rows_of(tmp_path)
    over = [row for row in rows if row["verify_demand"] > 300]
    assert result.violations == 0
    assert 0 < len(over) < len(rows)
    assert {row["verify_planned"] for row in over} == {300}
    assert {row["verify_enabled"] for row in over} == {overflow == "rotate"}
    assert {row["verify_checked"] for row in over} == {300 if overflow == "rotate" else 0}


def test_faults_appear_as_violation_rows(tmp_path: Path) -> None:
    """With the step, the launch and the reason's name."""
    result = replay_workload(LOAD, tmp_path, knobs=KNOBS, faults=[Fault("kv-flip", 40)])
    table = ds.dataset(tmp_path / "violations", partitioning="hive").to_table().to_pylist()
    assert len(table) == result.violations > 0
    assert table[0]["step"] == result.struck[0].step
    assert {row["launch_tag"] for row in table} == {"TAIL_K_FULL"}
    assert {row["fail_reason"] for row in table} == {4}
    assert "REAL_KV" in table[0]["reasons"].upper()


def test_settings_that_contradict_each_other(tmp_path: Path) -> None:
    """One sentence, and nothing is created."""
    out = tmp_path / "none"
    for wrong in (
        {"faults": [Fault("kv-flip", 1)], "kernels": False},
        {"overflow": "drop"},
        {"on_error": "hope"},
        {"faults": [Fault("stale-swa", 1)]},
    ):
        with pytest.raises(SettingError):
            replay_workload(LOAD, out, knobs=KNOBS, **wrong)  # type: ignore[arg-type]
    assert not out.exists()


CONVERSATION = json.dumps(
    {"block_size": 64, "requests": [{"t": 0, "in": 130, "out": 9, "hash_ids": [1, 2]}, {"t": 3, "in": 190, "out": 5}]}
)


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_command_line(tmp_path: Path) -> None:
    """The answer on standard output, 0 when clean, 1 when a launch was refused."""
    workload, out = tmp_path / "talk", tmp_path / "out"
    workload.write_text(CONVERSATION)
    done = invoke("replay", workload, "--out", out, "--swa-window", 32, "--seed", 3, "--time-scale", 0.5)
    assert done.exit_code == 0, done.output
    assert "2 of 2 requests" in done.stdout
    assert "0 violations" in done.stdout
    done = invoke("replay", workload, "--out", out, "--inject", "kv-flip@2")
    assert done.exit_code == 1
    assert "injected kv-flip at step" in done.stdout


IMPOSSIBLE = {
    "slots": (
        ["--max-total-tokens", 2**40],
        "--max-total-tokens must be at most 2146435072 (slots and counts",
    ),
    "rows": (["--max-running-requests", 10**9], "the engine's buffers do not fit the memory: --max-total-tokens"),
    "entries": (["--verify-capacity", 10**13], "--verify-capacity must be at most 2147483647 (slots and counts are"),
    "window": (["--swa-window", 10**20], "--swa-window must be at most 2147483647"),
    "seed": (["--seed", "-1"], "seed must be a whole number of at least 0, got -1"),
    "clock": (["--time-scale", "1e308"], "time-scale 1e+308 stretches talk to inf s"),
    "running": (["--max-running-requests", 0], "--max-running-requests must be a whole number of at least 1, got 0"),
    "pool": (["--max-total-tokens", 100], "--max-total-tokens must hold the longest request, 195 tokens"),
    "limit": (["--limit", 0], "limit must be at least 1 request, got 0"),
    "time": (["--time-scale", "-1"], "time-scale must be a positive finite factor, got -1.0"),
    "inject": (["--inject", "rust@1"], "--inject takes KIND@STEP"),
    "swa": (["--inject", "stale-swa@1"], "--inject stale-swa needs a sliding-window group"),
}


@pytest.mark.parametrize(("options", "sentence"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_impossible_knobs_create_nothing(tmp_path: Path, options: list[Any], sentence: str) -> None:
    """The command line prints the error alone; nothing is written."""
    workload, out = tmp_path / "talk", tmp_path / "out"
    workload.write_text(CONVERSATION)
    done = invoke("replay", workload, "--out", out, *options)
    assert isinstance(done.exception, KvCanaryError)
    assert sentence in str(done.exception)
    assert not out.exists()
