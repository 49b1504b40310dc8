"""A decode loop as an engine with CUDA graphs has it, for tests of the rows that a device publishes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import launches
import torch

import kvcanary_trace as kv_canary
from kvcanary_trace.kernels import CanaryLaunchTag, RealKvHashMode, VerifyOrWriteContext, VerifyPlan, WritePlan

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
        self.plan(launched)
        for context in self.contexts:
            self.verify_and_write(context, launched)

    def plan(self, launched: int) -> None:
        """One plan for both endpoints."""
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

    def verify_and_write(self, context: VerifyOrWriteContext, launched: int) -> None:
        """Both launches of one endpoint."""
        kv_canary.launch_canary_verify_kernel(context=context, plan=self.verify_plan, check_verify_expected_token=False)
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
