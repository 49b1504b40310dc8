"""Rows that a device publishes itself: the same as the host's, eagerly and from captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import launches
import pytest
import torch

import kvcanary_trace as kv_canary
from kvcanary_trace.kernels import CanaryLaunchTag, RealKvHashMode, VerifyOrWriteContext, VerifyPlan, WritePlan

pytest.importorskip("triton", reason="the device's probe is a Triton kernel")
from kvcanary_trace.kernels import triton_backend

MAX_REQS, WIDTH, SLOTS = 8, 64, 512
TIMING = {"seq", "time", "plan_ns", "verify_ns", "write_ns", "host_ns", "run", "rank", "graph_replay"}
BATCHES = [(4, 3), (8, 5), (4, 0), (8, 8), (4, 4), (8, 1), (4, 2)]
"""(launched rows, active rows) of each step."""


class Loop:
    """A decode loop over static tensors, as an engine with CUDA graphs has it: two groups of launches share a plan."""

    def __init__(self, device: str, verify_capacity: int = 60) -> None:
        self.device = torch.device(device)
        self.verify_plan = VerifyPlan.allocate(verify_capacity=verify_capacity, device=device)
        self.write_plan = WritePlan.allocate(write_req_capacity=MAX_REQS, device=device)
        self.ring = torch.zeros(16, 8, dtype=torch.int64, device=device)
        self.index = torch.zeros(1, dtype=torch.int32, device=device)
        tags = (CanaryLaunchTag.HEAD_K_FULL, CanaryLaunchTag.TAIL_K_FULL)
        self.contexts = [self.context_of(tag) for tag in tags]
        rows = torch.arange(1, (MAX_REQS + 1) * WIDTH + 1).reshape(MAX_REQS + 1, WIDTH) % SLOTS
        self.req_to_token = rows.to(torch.int32).to(device)
        for name in ("reqs", "prefixes", "extends", "ids", "positions", "slots"):
            setattr(self, name, torch.zeros(MAX_REQS, dtype=torch.int64, device=device))

    def context_of(self, tag: CanaryLaunchTag) -> VerifyOrWriteContext:
        """One endpoint's buffer, with the ring that both share."""
        return VerifyOrWriteContext(
            canary_buf=torch.zeros(SLOTS, 32, dtype=torch.uint8, device=self.device),
            kernel_kind=tag,
            violation_ring=self.ring,
            violation_write_index=self.index,
            slot_run_counter=torch.zeros(1, dtype=torch.int64, device=self.device),
            kernel_run_counter=torch.zeros(1, dtype=torch.int64, device=self.device),
            real_kv_sources=(),
            real_kv_hash_mode=RealKvHashMode.NONE,
            enable_chain_position_assert=torch.zeros(1, dtype=torch.int32, device=self.device),
        )

    def fill(self, number: int, active: int) -> None:
        """Put one step's batch into the static tensors."""
        reqs = torch.arange(1, MAX_REQS + 1)
        reqs[active:] = 0
        self.reqs.copy_(reqs)
        self.prefixes.copy_(torch.arange(MAX_REQS) * 2 + number)
        self.extends.fill_(1)
        self.slots.copy_(torch.arange(MAX_REQS) + 100 + 8 * number)

    def launch(self, launched: int) -> None:
        """Plan, then verify and write both endpoints."""
        kv_canary.launch_canary_plan_kernels(
            verify_plan_out=self.verify_plan,
            write_plan_out=self.write_plan,
            req_pool_indices=self.reqs[:launched],
            prefix_lens=self.prefixes[:launched],
            extend_seq_lens=self.extends[:launched],
            req_to_token=self.req_to_token,
            swa_window_size=0,
            full_to_swa_index_mapping=None,
            verify_capacity=self.verify_plan.verify_slot_indices.shape[0],
            req_to_verify_expected_tokens=None,
            req_to_verify_expected_tokens_valid_lens=None,
            kv_token_id_vs_position_offset=0,
        )
        for context in self.contexts:
            kv_canary.launch_canary_verify_kernel(
                context=context, plan=self.verify_plan, check_verify_expected_token=False
            )
            kv_canary.launch_canary_write_kernel(
                context=context,
                plan=self.write_plan,
                input_ids=self.ids[:launched],
                positions=self.positions[:launched],
                out_cache_loc=self.slots[:launched],
                enable_write_input_assert=False,
                expected_input_tokens=None,
                expected_input_positions=None,
            )

    def run(self, launch: Callable[[int], None]) -> None:
        """Every batch, one step each; numbers far apart, so that a wrong one shows."""
        for number, (launched, active) in enumerate(BATCHES):
            self.fill(number, active)
            with kv_canary.step(1000 + 7 * number, mode="decode", kv_used=active):
                launch(launched)


def rows_of(directory: Path) -> list[dict[str, Any]]:
    """Rows without what no two runs share."""
    found = sorted(launches.rows(directory), key=lambda row: row["step"])
    return [{name: value for name, value in row.items() if name not in TIMING} for row in found]


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
