"""Rows that a device publishes itself: the same as the host's, eagerly and from captured graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from device_loop import BATCHES, Loop, rows_of

import kvcanary_trace as kv_canary
from kvcanary_trace import device_rows

pytest.importorskip("triton", reason="the device's probe is a Triton kernel")
from kvcanary_trace.kernels import triton_backend


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the device")
def test_device_rows_equal_host_rows(tmp_path: Path) -> None:
    """The same loop, its rows taken by the host's probe and by the device's in the interpreter."""
    # The device's probe reads the Triton backend's counter, which lives as long as the process; torch's stays 0.
    triton_backend.skipped_entries(torch.device("cpu")).zero_()
    with kv_canary.trace(tmp_path / "host"):
        loop = Loop("cpu")
        loop.run(loop.launch)
    with kv_canary.trace(tmp_path / "device") as session:
        session._observer.recorded_devices = frozenset({"cpu"})
        loop = Loop("cpu")
        loop.run(loop.launch)
    assert session.recorders
    assert session.stats.complete
    assert session.stats.published == session.stats.drained == len(BATCHES)
    host, device = rows_of(tmp_path / "host"), rows_of(tmp_path / "device")
    assert [row["bs"] for row in device] == [active for _, active in BATCHES]
    assert device == host


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the device")
def test_plans_without_step_are_steps_of_their_own(tmp_path: Path) -> None:
    """A row is published when its group is planned again, or when the session closes."""
    with kv_canary.trace(tmp_path) as session:
        session._observer.recorded_devices = frozenset({"cpu"})
        loop = Loop("cpu")
        for number in range(3):
            loop.fill(number, 2)
            loop.launch(4)
    assert [(row["step"], row["forward"], row["bs"]) for row in rows_of(tmp_path)] == [(0, 0, 2), (1, 0, 2), (2, 0, 2)]
    assert session.stats.complete


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the device")
def test_rows_that_wait_never_cross_into_a_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An eager row published by a graph would come again with every replay; a captured one has not run yet."""
    capturing = False
    monkeypatch.setattr(device_rows, "is_capturing", lambda device: capturing)
    with kv_canary.trace(tmp_path) as session:
        session._observer.recorded_devices = frozenset({"cpu"})
        loop = Loop("cpu")
        for number, capturing in enumerate((False, False, True, False)):
            loop.fill(number, 1 + number)
            loop.plan(4)
            if not capturing:
                loop.verify_and_write(loop.contexts[0], 4)
    # Of the eager row that waited when the capture began nothing is known; the captured forward is not published.
    assert [row["bs"] for row in rows_of(tmp_path)] == [1, None, None, 4]
    assert session.stats.published == 2


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_graph_rows_equal_eager_rows(tmp_path: Path) -> None:
    """A decode loop replayed from graphs of two batch sizes has the rows of the same loop run eagerly; no sync."""
    loop = Loop("cuda")
    with kv_canary.trace(tmp_path / "eager", device="cuda", device_rows=True) as eager:
        loop.run(loop.launch)
    loop = Loop("cuda")
    graphs: dict[int, torch.cuda.CUDAGraph] = {}
    with kv_canary.trace(tmp_path / "graph", device="cuda", device_rows=True) as session:
        with kv_canary.step(1, mode="prefill"):
            loop.fill(0, 0)
            loop.launch(4)
        torch.cuda.synchronize()
        for launched in (4, 8):
            graphs[launched] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[launched]):
                loop.launch(launched)
        loop.index.zero_()

        def replay(launched: int) -> None:
            torch.cuda.set_sync_debug_mode("error")
            try:
                graphs[launched].replay()
            finally:
                torch.cuda.set_sync_debug_mode("default")

        loop.run(replay)
    wanted = rows_of(tmp_path / "eager")
    found = [row for row in rows_of(tmp_path / "graph") if row["step"] >= 1000]
    assert [row["bs"] for row in wanted] == [active for _, active in BATCHES]
    assert found == wanted
    assert eager.stats.complete and session.stats.ring_overwritten == 0
