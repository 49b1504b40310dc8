"""trace() and step(): what becomes a row, in every way that a session can be used, end or fail."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from launches import Engine, read, rows

import kvcanary_trace as kv_canary
from kvcanary_trace.kernels import CanaryLaunchTag, hooks


def run_file(directory: Path) -> dict[str, Any]:
    (path,) = (directory / "runs").glob("*.json")
    return dict(json.loads(path.read_text()))


def test_a_step_becomes_a_row(tmp_path: Path) -> None:
    """Every column that the host can know holds what happened; the rest is null, not zero."""
    engine = Engine(verify_capacity=100)
    with (
        kv_canary.trace(tmp_path, write_entry_capacity=2048) as session,
        kv_canary.step(7, mode="decode", kv_used=40, waiting_reqs=2) as step,
    ):
        engine.plan([1, 0, 3], [10, 99, 20], [1, 5, 2])
        engine.verify()
        engine.write()
        step.update(kv_capacity=400, resident_tokens=31, waiting_reqs=3)
    (row,) = rows(tmp_path)
    assert session.stats.complete and session.stats.steps == 1
    expected = {
        "step": 7,
        "forward": 0,
        "runner": "target",
        "group": "full",
        "kind": "forward",
        "seq": 1,
        "mode": "decode",
        "graph_replay": None,
        "bs": 2,
        "bs_launched": 3,
        "write_req_capacity": 8,
        "plan_block_limit": 4096,
        "write_entries": 3,
        "write_entry_capacity": 2048,
        "verify_demand": 30,
        "verify_planned": 30,
        "verify_capacity": 100,
        "verify_enabled": True,
        "verify_checked": 30,
        "entries_skipped": 0,
        "prefix_len_max": 20,
        "prefix_len_sum": 30,
        "seq_len_max": 22,
        "req_to_token_width": 4096,
        "violations": 0,
        "violations_new": 0,
        "violation_ring_capacity": 16,
        "kv_used": 40,
        "kv_capacity": 400,
        "resident_reqs": None,
        "resident_tokens": 31,
        "waiting_reqs": 3,
        "waiting_tokens": None,
        "error": None,
        "error_message": None,
        "trace_id": None,
        "span_id": None,
    }
    assert {name: row[name] for name in expected} == expected
    assert all(row[name] > 0 for name in ("plan_ns", "verify_ns", "write_ns", "host_ns"))
    assert row["run"] == session.run_id and row["rank"] == 0


def test_padding_says_nothing_about_load(tmp_path: Path) -> None:
    """A batch of 3 in a buffer of 256 is launched as 256: the row has both."""
    engine = Engine(write_req_capacity=256)
    with kv_canary.trace(tmp_path), kv_canary.step():
        engine.plan([5, 6, 7] + [0] * 253, [10] * 3 + [0] * 253, [1] * 256)
    (row,) = rows(tmp_path)
    assert (row["bs"], row["bs_launched"], row["write_req_capacity"], row["write_entries"]) == (3, 256, 256, 3)


def test_overflow_of_one_group_leaves_the_other_covered(tmp_path: Path) -> None:
    """The true demand of the overflowed group, and the other group of the same step with its own figures."""
    full = Engine(verify_capacity=100)
    swa = Engine(verify_capacity=100, window=4, tag=CanaryLaunchTag.HEAD_K_SWA)
    with kv_canary.trace(tmp_path), kv_canary.step(mode="decode"):
        for engine in (full, swa):
            engine.forward(bs=5, prefix_len=1000)
    by_group = {row["group"]: row for row in rows(tmp_path)}
    names = ("verify_demand", "verify_planned", "verify_enabled", "verify_checked", "prefix_len_sum")
    assert [by_group["full"][name] for name in names] == [5000, 100, False, 0, 5000]
    assert [by_group["swa"][name] for name in names] == [20, 20, True, 20, 5000]
    assert {row["step"] for row in by_group.values()} == {0}


def test_the_least_checked_launch_of_a_group_counts(tmp_path: Path) -> None:
    """HEAD is verified, TAIL raises: the group was not checked."""
    engine = Engine()

    def fail() -> None:
        raise RuntimeError("tail broke")

    with kv_canary.trace(tmp_path), kv_canary.step():
        engine.plan([1], [10], [1])
        engine.verify()
        with pytest.raises(RuntimeError, match="tail broke"):
            engine.verify(fail, engine.context_of(CanaryLaunchTag.TAIL_K_FULL))
    (row,) = rows(tmp_path)
    assert (row["verify_planned"], row["verify_checked"], row["error"]) == (10, 0, "other")
    assert row["error_message"] == "RuntimeError: tail broke"


def test_without_step_a_repeated_plan_begins_the_next_step(tmp_path: Path) -> None:
    """Each group once, then again: two steps with two groups each; close() publishes the last."""
    full, swa = Engine(), Engine(window=4, tag=CanaryLaunchTag.HEAD_K_SWA)
    with kv_canary.trace(tmp_path):
        for _ in range(2):
            full.forward()
            swa.forward()
    assert [(row["step"], row["group"], row["mode"]) for row in rows(tmp_path)] == [
        (0, "full", "unknown"),
        (0, "swa", "unknown"),
        (1, "full", "unknown"),
        (1, "swa", "unknown"),
    ]


def test_forwards_of_one_step(tmp_path: Path) -> None:
    """A plan that repeats a group inside step() is the next forward; a nested step() is a forward of the same step."""
    engine = Engine()
    with kv_canary.trace(tmp_path), kv_canary.step(3, mode="target_verify"):
        engine.forward(bs=1)
        engine.forward(bs=2)
        for bs in (3, 4):
            with kv_canary.step(runner="draft", mode="draft_extend"):
                engine.forward(bs=bs)
    got = {(row["step"], row["runner"], row["forward"], row["bs"], row["mode"]) for row in rows(tmp_path)}
    assert got == {
        (3, "target", 0, 1, "target_verify"),
        (3, "target", 1, 2, "target_verify"),
        (3, "draft", 0, 3, "draft_extend"),
        (3, "draft", 1, 4, "draft_extend"),
    }


def test_launches_find_the_row_of_their_plan(tmp_path: Path) -> None:
    """Two plans, then their verifies, then their writes, as chunks do it: each row has its own launches."""
    first, second = Engine(), Engine()
    with kv_canary.trace(tmp_path), kv_canary.step():
        first.plan([1], [10], [1])
        second.plan([1, 2], [20, 20], [1, 1])
        first.verify(lambda: first.violate(2))
        second.verify()
        first.write()
        second.write()
    by_bs = {row["bs"]: row for row in rows(tmp_path)}
    assert by_bs[1]["verify_checked"] == 10 and by_bs[2]["verify_checked"] == 40
    assert by_bs[1]["violations_new"] == 2 and by_bs[2]["violations_new"] == 0
    assert by_bs[1]["write_ns"] is not None and by_bs[2]["write_ns"] is not None


def test_sweeps_are_marked(tmp_path: Path) -> None:
    """A sweep verifies by a plan of its own, which nobody saw being made: demand stays null."""
    engine = Engine(tag=CanaryLaunchTag.SWEEP_K_SWA)
    engine.verify_plan.verify_num_valid[0] = 12
    with kv_canary.trace(tmp_path), kv_canary.step():
        engine.verify()
    (row,) = rows(tmp_path)
    assert (row["kind"], row["group"], row["verify_checked"], row["verify_demand"]) == ("sweep", "swa", 12, None)


def test_a_refused_plan_has_its_true_demand(tmp_path: Path) -> None:
    """bs exceeds the write plan: the row carries the demand, the stable code and the message; the error passes."""
    engine = Engine(write_req_capacity=2)
    message = "kv-canary: bs=3 exceeds write_req_capacity=2"

    def refuse() -> None:
        raise ValueError(message)

    with pytest.raises(ValueError, match="exceeds write_req_capacity"), kv_canary.trace(tmp_path), kv_canary.step(9):
        engine.plan([1, 2, 3], [100, 200, 300], [1, 1, 1], launch=refuse)
    (row,) = rows(tmp_path)
    assert (row["step"], row["bs"], row["verify_demand"], row["write_req_capacity"]) == (9, 3, 600, 2)
    assert (row["error"], row["error_message"]) == ("bs-exceeds-write-req-capacity", message)
    assert (row["verify_planned"], row["verify_enabled"]) == (None, None)
    assert run_file(tmp_path)["status"] == "failed" and run_file(tmp_path)["error"] == message


def test_malformed_arguments_are_the_launchers_business(tmp_path: Path) -> None:
    """A plan of nonsense is refused by the launcher; the session records what it can and counts no error of its own."""
    with kv_canary.trace(tmp_path) as session:
        call = hooks.PlanCall(None, None, None, None, None, None, None, 0, 1)  # type: ignore[arg-type]

        def refuse() -> None:
            raise TypeError("no tensors")

        with pytest.raises(TypeError, match="no tensors"):
            hooks.observed(call, refuse)
    assert session.stats.observer_errors == 0
    assert rows(tmp_path)[0]["error_message"] == "TypeError: no tensors"


def test_violations_are_decoded(tmp_path: Path) -> None:
    """Old violations are not this session's; new ones carry the key of the step that found them."""
    engine = Engine(ring_rows=4)
    engine.violate(1)
    with kv_canary.trace(tmp_path) as session:
        for new in (0, 2, 0, 5):
            with kv_canary.step(mode="decode"):
                engine.plan([1], [10], [1])
                engine.verify(lambda new=new: engine.violate(new))  # type: ignore[misc]
                engine.write()
    assert [(row["violations"], row["violations_new"]) for row in rows(tmp_path)] == [(1, 0), (3, 2), (3, 0), (8, 5)]
    found = rows(tmp_path, "violations")
    assert [(row["step"], row["number"], row["slot"]) for row in found] == [(1, 1, 101), (1, 2, 201), (3, 3, 301)]
    assert found[0]["launch_tag"] == "HEAD_K_FULL"
    assert found[0]["reasons"] == "VERIFY_CHAIN_HASH_MISMATCH|VERIFY_POSITION_MISMATCH"
    assert session.stats.violations_lost == 4 and session.stats.violations_lost_from == 3
    assert run_file(tmp_path)["losses"]["violations_lost"] == 4


def test_violations_after_the_ring_was_emptied_are_new(tmp_path: Path) -> None:
    """An engine reads its ring and sets it back; three violations of the next launch are three, not fewer than none."""
    engine = Engine()
    with kv_canary.trace(tmp_path):
        for found in (5, 3):
            with kv_canary.step():
                engine.plan([1], [3], [1])
                engine.verify(lambda found=found: engine.violate(found))  # type: ignore[misc]
            engine.index.zero_()
    assert [row["violations_new"] for row in rows(tmp_path)] == [5, 3]
    assert [row["step"] for row in rows(tmp_path, "violations")] == [0] * 5 + [1] * 3


def test_requests_in_detail(tmp_path: Path) -> None:
    """One row per active request, with its share of the demand."""
    engine = Engine(window=15)
    with kv_canary.trace(tmp_path, detail="requests"), kv_canary.step(4):
        engine.plan([5, 0, 7], [10, 0, 20], [1, 1, 3])
    assert [
        (r["step"], r["row"], r["req_pool_idx"], r["prefix_len"], r["extend_len"], r["verify_entries"])
        for r in rows(tmp_path, "requests")
    ] == [(4, 0, 5, 10, 1, 10), (4, 2, 7, 20, 3, 15)]


def test_record_writes_a_whole_row(tmp_path: Path) -> None:
    """Without kernels: values in, the same values out; violations_new follows from the totals."""
    with kv_canary.trace(tmp_path) as session:
        for number, total in enumerate((0, 3, 3)):
            for group in ("full", "swa"):
                session.record(
                    step=number, group=group, mode="mixed", bs=4, kv_used=number, violations=total, time_ns=10**18
                )
        session.record(step=9, error_message="kv-canary: bs=9 exceeds write_req_capacity=8", mode="decode")
    got = rows(tmp_path)
    assert [(row["step"], row["group"], row["kv_used"], row["violations_new"]) for row in got[:6]] == [
        (0, "full", 0, 0),
        (0, "swa", 0, 0),
        (1, "full", 1, 3),
        (1, "swa", 1, 0),
        (2, "full", 2, 0),
        (2, "swa", 2, 0),
    ]
    assert got[0]["time"].value == 10**18
    assert got[6]["error"] == "bs-exceeds-write-req-capacity" and got[6]["bs"] is None


@pytest.mark.parametrize("bad", [{"mode": "fast"}, {"runner": "other"}, {"group": "half"}, {"error": "oops"}])
def test_record_refuses_unknown_names(bad: dict[str, str], tmp_path: Path) -> None:
    """The accepted ones are listed."""
    with kv_canary.trace(tmp_path) as session, pytest.raises(ValueError, match="must be one of"):
        session.record(step=0, **bad)  # type: ignore[arg-type]


def test_step_without_a_session_does_nothing() -> None:
    """As block, nested, and as decorator; bad names are still refused, so that a typo shows before the first trace."""
    with kv_canary.step(mode="decode") as step, kv_canary.step(runner="draft"):
        step.update(kv_used=3)
    with pytest.raises(ValueError, match="mode must be one of unknown, prefill"):
        kv_canary.step(mode="fast")
    with pytest.raises(TypeError, match="no value 'kv_free'"):
        kv_canary.step().update(kv_free=3)


def test_decorators(tmp_path: Path) -> None:
    """Each call of a traced function is a run, each call of a stepped one a step; coroutines too."""
    engine = Engine()

    @kv_canary.step(mode="decode")
    def decode() -> str:
        engine.forward()
        return "text"

    @kv_canary.step(mode="prefill")
    async def prefill() -> None:
        engine.forward()

    @kv_canary.trace(tmp_path)
    def serve() -> str:
        asyncio.run(prefill())
        return decode() + decode()

    assert decode() == "text"
    assert serve() == "texttext" and serve() == "texttext"
    assert len(list((tmp_path / "runs").iterdir())) == 2
    assert sorted((row["step"], row["mode"]) for row in rows(tmp_path)) == 2 * [(0, "prefill")] + 2 * [
        (1, "decode")
    ] + 2 * [(2, "decode")]


def test_threads_have_lanes_of_their_own(tmp_path: Path) -> None:
    """Eight threads step at once: no row lost, no row mixed, steps counted once for all, rings of the dead let go."""

    def serve(bs: int) -> None:
        engine = Engine()
        for _ in range(50):
            with kv_canary.step(mode="decode", kv_used=bs):
                engine.forward(bs=bs)

    with kv_canary.trace(tmp_path) as session:
        threads = [threading.Thread(target=serve, args=(bs,)) for bs in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert session.flush(30) and session.flush(30)
        assert not session.lanes()
    got = rows(tmp_path)
    assert len(got) == 400 and session.stats.published == 400
    assert sorted(row["step"] for row in got) == list(range(400))
    assert all(row["bs"] == row["kv_used"] for row in got)
    assert len({row["seq"] for row in got}) == 400


def test_sessions_do_not_nest(tmp_path: Path) -> None:
    """The second is refused by name of the first, which goes on."""
    with kv_canary.trace(tmp_path) as session:
        with pytest.raises(kv_canary.SessionError, match=f"already open .*{session.run_id}"):
            kv_canary.trace(tmp_path / "other").__enter__()
        with kv_canary.step():
            pass
    assert session.stats.steps == 1
    assert not (tmp_path / "other").exists()
    with pytest.raises(kv_canary.SessionError, match="closed session"):
        session.record(step=1)


@pytest.mark.parametrize("error", [RuntimeError("engine on fire"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_seals_and_marks_the_run(error: BaseException, tmp_path: Path) -> None:
    """Whatever ends the block: files are sealed, the run file says so, the exception passes."""
    sessions = []

    def serve() -> None:
        with kv_canary.trace(tmp_path) as session:
            sessions.append(session)
            with kv_canary.step():
                pass
            raise error

    with pytest.raises(type(error)):
        serve()
    (session,) = sessions
    file = run_file(tmp_path)
    assert file["status"] == "failed" and file["error"].startswith(type(error).__name__)
    assert file["rows"]["steps"] == 1 and file["ended_ns"] >= file["started_ns"]
    assert len(rows(tmp_path)) == 1 and not (tmp_path / "_live").exists()
    assert session.closed and hooks.observer is None


@pytest.mark.parametrize("code", [None, 0])
def test_a_program_that_ends_as_it_meant_to_is_no_failure(code: int | None, tmp_path: Path) -> None:
    """`sys.exit()` in the block."""
    with pytest.raises(SystemExit), kv_canary.trace(tmp_path):
        raise SystemExit(code)
    assert (run_file(tmp_path)["status"], run_file(tmp_path)["error"]) == ("completed", None)


def test_overlapping_steps_of_one_thread_are_counted_and_leave_no_trace(tmp_path: Path) -> None:
    """Coroutines interleave on one thread: that is said once, and later steps have their own numbers again."""
    engine = Engine()
    with kv_canary.trace(tmp_path) as session:
        first, second = kv_canary.step(1, mode="prefill"), kv_canary.step(2, mode="decode")
        first.__enter__()
        engine.forward(bs=1)
        second.__enter__()
        first.__exit__(None, None, None)
        engine.forward(bs=2)
        second.__exit__(None, None, None)
        with kv_canary.step(3):
            engine.forward(bs=3)
        with kv_canary.step():
            engine.forward(bs=4)
    got = [(row["step"], row["mode"], row["bs"]) for row in rows(tmp_path)]
    assert got == [(1, "prefill", 1), (2, "decode", 2), (3, "unknown", 3), (4, "unknown", 4)]
    assert session.stats.observer_errors == 1 and session.stats.halves_unmatched == 0


def test_a_huge_step_number_does_not_end_the_counting(tmp_path: Path) -> None:
    """The largest int64 is recorded; what the session counts by itself stays within int64."""
    with kv_canary.trace(tmp_path) as session:
        for number in (5, 2**63 - 1, None):
            with kv_canary.step(number):
                pass
    assert sorted(row["step"] for row in rows(tmp_path)) == [5, 6, 2**63 - 1]
    assert session.stats.observer_errors == 0


def test_an_exception_in_a_step_is_its_error(tmp_path: Path) -> None:
    """An engine's own error, with a code where we know one."""
    with kv_canary.trace(tmp_path):
        with pytest.raises(MemoryError), kv_canary.step():
            raise MemoryError("out of memory")
        with pytest.raises(RuntimeError), kv_canary.step():
            raise RuntimeError("tokens 9 exceeds write_entry_capacity=8")
        with kv_canary.step():
            pass
    assert [(row["error"], row["error_message"]) for row in rows(tmp_path)] == [
        ("other", "MemoryError: out of memory"),
        ("write-entries-exceed-capacity", "RuntimeError: tokens 9 exceeds write_entry_capacity=8"),
        (None, None),
    ]


def test_the_session_closes_inside_a_step(tmp_path: Path) -> None:
    """What is known by then is kept; the step ends quietly."""
    engine = Engine()
    with kv_canary.trace(tmp_path) as session, kv_canary.step(5, mode="decode"):
        engine.forward(bs=2)
        session.close()
        engine.forward(bs=3)
    assert [(row["step"], row["bs"], row["mode"]) for row in rows(tmp_path)] == [(5, 2, "decode")]


def test_an_existing_run_is_never_touched(tmp_path: Path) -> None:
    """Neither by the same name nor by the same name with another letter case of rank; another rank is welcome."""
    with kv_canary.trace(tmp_path, run="night") as session:
        session.record(step=1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(kv_canary.RunExistsError, match="already has"):
        kv_canary.trace(tmp_path, run="night").__enter__()
    (tmp_path / "runs" / "night.0.json").unlink()
    with pytest.raises(kv_canary.RunExistsError, match="already has rows of run 'night'"):
        kv_canary.trace(tmp_path, run="night").__enter__()
    assert hooks.observer is None
    with kv_canary.trace(tmp_path, run="night", rank=1) as session:
        session.record(step=2)
    after = {path: path.read_bytes() for path in before if path.exists()}
    assert all(before[path] == text for path, text in after.items())
    assert sorted((row["rank"], row["step"]) for row in rows(tmp_path)) == [(0, 1), (1, 2)]


def test_a_sink_that_does_not_open_leaves_no_run_that_goes_on(tmp_path: Path) -> None:
    """The sink before it claimed the run: its file says that the run failed and why."""
    with kv_canary.trace(tmp_path / "taken", run="night") as session:
        session.record(step=1)
    with pytest.raises(kv_canary.RunExistsError, match="taken"):
        kv_canary.trace([tmp_path / "free", tmp_path / "taken"], run="night").__enter__()
    file = run_file(tmp_path / "free")
    assert file["status"] == "failed" and "taken" in file["error"] and file["ended_ns"] is not None
    assert run_file(tmp_path / "taken")["status"] == "completed" and hooks.observer is None


@pytest.mark.parametrize("run", ["1st", "a/b", "a.b", "x" * 101, "run 1"])
def test_run_ids_that_cannot_be_paths(run: str, tmp_path: Path) -> None:
    """Refused before anything is made."""
    with pytest.raises(kv_canary.SettingError, match="run must start with a letter"):
        kv_canary.trace(tmp_path / "d", run=run)
    assert not (tmp_path / "d").exists()


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """A file in the way is one clear error, and no session is left open."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(kv_canary.DatasetError, match="cannot"):
        kv_canary.trace(tmp_path / "file").__enter__()
    assert (tmp_path / "file").read_text() == "mine"
    with kv_canary.trace(tmp_path / "good"):
        pass


def test_our_own_failures_stay_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug in the probe is counted and logged once; launches run, steps end, other rows come."""
    engine = Engine()
    ran: list[int] = []

    def broken(*_: object) -> None:
        raise ZeroDivisionError("bug")

    with kv_canary.trace(tmp_path) as session, caplog.at_level(logging.WARNING):
        with monkeypatch.context() as patch:
            patch.setattr("kvcanary_trace.observer.read_verify_plan", broken)
            for _ in range(3):
                with kv_canary.step():
                    engine.plan([1], [1], [1], launch=lambda: ran.append(1))
        with kv_canary.step(kv_used=2.5):  # type: ignore[arg-type]
            pass
        with kv_canary.step(mode="idle"):
            pass
    assert ran == [1, 1, 1]
    assert session.stats.observer_errors == 4
    assert sum("recording failed" in record.message for record in caplog.records) == 1
    assert rows(tmp_path)[-1]["mode"] == "idle"


def test_arrow_types_follow_the_schema(tmp_path: Path) -> None:
    """Sealed files have exactly the record's columns, types, units and meanings."""
    import pyarrow.parquet as pq

    from kvcanary_trace.schema import STEPS

    with kv_canary.trace(tmp_path) as session:
        session.record(step=1)
    (part,) = (tmp_path / "steps").rglob("*.parquet")
    schema = pq.read_schema(part)
    assert schema.equals(STEPS.arrow, check_metadata=True)
    brief = json.loads(pq.read_metadata(part).metadata[b"kvcanary_trace.run"])
    assert brief["run"] == session.run_id and brief["pid"] == os.getpid()
    assert read(tmp_path).num_rows == 1
