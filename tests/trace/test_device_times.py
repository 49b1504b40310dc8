"""Durations that a device marks itself, and how far it had got when it stopped."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import launches
import pytest
import torch
from device_loop import BATCHES, Loop, rows_of

import kvcanary_trace as kv_canary
from kvcanary_trace import black_box
from kvcanary_trace.black_box import find_boxes
from kvcanary_trace.kernels.layout import NOT_MEASURED, Group, Phase, Progress, Runner, progress_code

record = pytest.importorskip("kvcanary_trace.kernels.triton_backend.record", reason="the marks are Triton kernels")

NAMES = ("plan_ns", "verify_ns", "write_ns")
LAST = "write of step 1,042, group full, target"
ON_HOST = pytest.mark.skipif(torch.cuda.is_available(), reason="the device has a clock of its own")


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock for the interpreter that counts how often it is read."""
    import triton.language as tl

    count = itertools.count(1000)
    monkeypatch.setattr(record, "_clock_ns", lambda: tl.full((), next(count), tl.int64))
    monkeypatch.setattr(record, "_fence_system", lambda: None)
    monkeypatch.setattr(record, "INTERPRETED", False)


def durations(directory: Path) -> list[tuple[int | None, ...]]:
    """plan, verify and write of each row, in order of steps."""
    found = sorted(launches.rows(directory), key=lambda row: row["step"])
    return [tuple(row[name] for name in NAMES) for row in found]


def traced(loop: Loop, directory: Path, device: str, **settings: Any) -> dict[str, Any]:
    """Run the loop with the device's rows and times. Returns the run file."""
    with kv_canary.trace(directory, device=device, device_rows=True, device_times=True, **settings) as session:
        session._observer.recorded_devices = frozenset({device})
        loop.run(loop.launch)
    assert session.stats.complete and session.stats.observer_errors == 0
    (path,) = (directory / "runs").glob("*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@ON_HOST
@pytest.mark.usefixtures("ticks")
def test_each_launch_is_between_two_marks(tmp_path: Path) -> None:
    """One tick a plan and one for each of two endpoints' launches; the group's first plan comes before its memory."""
    run = traced(Loop("cpu"), tmp_path, "cpu")
    assert durations(tmp_path) == [(None, 2, 2)] + [(1, 2, 2)] * (len(BATCHES) - 1)
    assert run["device_progress"] == {"cpu": LAST}


@ON_HOST
def test_without_a_clock_nothing_is_measured(tmp_path: Path) -> None:
    """The interpreter has none: durations are null, and the progress is there."""
    run = traced(Loop("cpu"), tmp_path, "cpu")
    assert durations(tmp_path) == [(None, None, None)] * len(BATCHES)
    assert run["device_progress"] == {"cpu": LAST}


@ON_HOST
def test_marks_change_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the durations, rows are the same; without the setting nothing is marked."""
    marks: Counter[str] = Counter()
    real = record.mark
    monkeypatch.setattr(record, "mark", lambda state: (marks.update(["mark"]), real(state)))
    traced(Loop("cpu"), tmp_path / "timed", "cpu")
    assert marks.total() == 1 + len(BATCHES) - 1 + 4 * len(BATCHES)  # one of them compiles
    marks.clear()
    with kv_canary.trace(tmp_path / "bare") as session:
        session._observer.recorded_devices = frozenset({"cpu"})
        loop = Loop("cpu")
        loop.run(loop.launch)
    assert rows_of(tmp_path / "timed") == rows_of(tmp_path / "bare") and not marks
    assert session.recorders[0].progress is None


@ON_HOST
def test_a_black_box_says_how_far_the_device_got(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The word lies in the ring's header, where another process finds it after a crash."""
    monkeypatch.setattr(black_box, "SHM", tmp_path)
    loop = Loop("cpu")
    with kv_canary.trace(tmp_path / "data", device_rows=True, device_times=True, black_box=True) as session:
        session._observer.recorded_devices = frozenset({"cpu"})
        with kv_canary.step(7, mode="decode"):
            loop.fill(0, 3)
            loop.plan(4)
            (box,) = find_boxes()
            assert {ring.progress for ring in box.rings()} == {None}
            loop.verify_and_write(loop.contexts[0], 4)
            got = Progress(7, Runner.TARGET, Group.FULL, Phase.WRITE)
            assert [ring.progress for ring in box.rings() if ring.by_device] == [got]
    assert session.stats.complete


@pytest.mark.parametrize("step", [0, -1, 2**31 + 5, 2**54])
def test_a_progress_word_is_read_back(step: int) -> None:
    """Every runner, group and phase, and none where nothing was marked."""
    for runner, group, phase in itertools.product(Runner, Group, Phase):
        word = (step << 8) | progress_code(runner, group, phase)
        assert Progress.of(word) == (step, runner, group, phase)
    assert Progress.of(NOT_MEASURED) is None


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("in_box", [False, True], ids=["pinned", "black box"])
def test_graphs_and_eager_steps_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_box: bool) -> None:
    """Graphs of two batch sizes with eager steps between, on a stream of their own, the host far ahead of the device.

    Numbers, demands and durations are each step's own, and nothing waits for the device.
    """
    if in_box:
        root = tmp_path / "shm"
        root.mkdir()
        monkeypatch.setattr(black_box, "SHM", root)
    loop = Loop("cuda")
    sleeps = 400_000_000
    stream = torch.cuda.Stream()
    wanted: list[tuple[int, int]] = []
    with (
        kv_canary.trace(
            tmp_path / "data", device="cuda", device_rows=True, device_times=True, black_box=in_box
        ) as session,
        torch.cuda.stream(stream),
    ):
        with kv_canary.step(1, mode="prefill"):
            loop.fill(0, 0)
            loop.launch(4)
        graphs = {}
        for launched in (4, 8):
            graphs[launched] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[launched], stream=stream):
                loop.launch(launched)
        fills = [torch.arange(1, 9).where(torch.arange(8) < active, 0).pin_memory() for active in range(9)]
        loop.fill(3, 8)
        stream.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(sleeps)
            for number in range(150):
                launched, active = (4, 3, 8)[number % 3], number % 4
                loop.reqs.copy_(fills[active], non_blocking=True)
                with kv_canary.step(2000 + 3 * number, mode="decode"):
                    if launched == 3:
                        loop.launch(4)
                    else:
                        graphs[launched].replay()
                wanted.append((2000 + 3 * number, active))
            ahead = torch.cuda.Event()
            ahead.record()
            assert not ahead.query()  # the device still sleeps
        finally:
            torch.cuda.set_sync_debug_mode("default")
        stream.synchronize()
        progress = session.recorders[0].progress
    assert session.stats.complete and session.stats.observer_errors == 0
    rows = sorted((row for row in launches.rows(tmp_path / "data") if row["step"] >= 2000), key=lambda row: row["step"])
    assert [(row["step"], row["bs"]) for row in rows] == wanted
    for row in rows:
        for name in NAMES:
            assert row[name] is not None and 0 < row[name] < 100_000_000, (row["step"], name, row[name])
    assert progress == Progress(wanted[-1][0], Runner.TARGET, Group.FULL, Phase.WRITE)
