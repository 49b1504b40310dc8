"""A small engine for tests of tracing: plans and contexts on the CPU, and launches that do as they are told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import torch

from kvcanary_trace.kernels import CanaryLaunchTag, RealKvHashMode, VerifyOrWriteContext, VerifyPlan, WritePlan, hooks

CPU = torch.device("cpu")


def nothing() -> None:
    """A launch that does nothing."""


class Engine:
    """Plans, a context and a ring of one group; each method is one observed launch."""

    def __init__(
        self,
        *,
        verify_capacity: int = 1000,
        write_req_capacity: int = 8,
        tag: CanaryLaunchTag = CanaryLaunchTag.HEAD_K_FULL,
        ring_rows: int = 16,
        window: int = 0,
    ) -> None:
        self.verify_plan = VerifyPlan.allocate(verify_capacity=verify_capacity, device=CPU)
        self.write_plan = WritePlan.allocate(write_req_capacity=write_req_capacity, device=CPU)
        self.window = window
        self.ring = torch.zeros(ring_rows, 8, dtype=torch.int64)
        self.index = torch.zeros(1, dtype=torch.int32)
        self.context = self.context_of(tag)

    def context_of(self, tag: CanaryLaunchTag) -> VerifyOrWriteContext:
        """A context over this engine's ring."""
        return VerifyOrWriteContext(
            canary_buf=torch.zeros(64, 32, dtype=torch.uint8),
            kernel_kind=tag,
            violation_ring=self.ring,
            violation_write_index=self.index,
            slot_run_counter=torch.zeros(1, dtype=torch.int64),
            kernel_run_counter=torch.zeros(1, dtype=torch.int64),
            real_kv_sources=(),
            real_kv_hash_mode=RealKvHashMode.NONE,
            enable_chain_position_assert=torch.ones(1, dtype=torch.int32),
        )

    def plan(
        self,
        reqs: list[int],
        prefix_lens: list[int],
        extend_lens: list[int],
        *,
        launch: Callable[[], None] | None = None,
    ) -> None:
        """Plan a batch; the stand-in launch clamps its demand as the kernel does."""
        capacity = self.verify_plan.verify_slot_indices.shape[0]

        def planned() -> None:
            lens = [min(p, self.window) if self.window > 0 else p for r, p in zip(reqs, prefix_lens, strict=True) if r]
            demand = sum(lens)
            self.verify_plan.verify_num_valid[0] = min(demand, capacity)
            self.verify_plan.enable[0] = int(demand <= capacity)

        call = hooks.PlanCall(
            self.verify_plan,
            self.write_plan,
            torch.tensor(reqs, dtype=torch.int64),
            torch.tensor(prefix_lens, dtype=torch.int64),
            torch.tensor(extend_lens, dtype=torch.int64),
            torch.zeros(max([*reqs, 0]) + 1, 4096, dtype=torch.int32),
            None,
            self.window,
            capacity,
        )
        hooks.observed(call, launch or planned)

    def verify(self, launch: Callable[[], None] = nothing, context: VerifyOrWriteContext | None = None) -> None:
        """Verify with the plan."""
        hooks.observed(hooks.VerifyCall(context or self.context, self.verify_plan), launch)

    def write(self, launch: Callable[[], None] = nothing) -> None:
        """Write with the plan."""
        hooks.observed(hooks.WriteCall(self.context, self.write_plan), launch)

    def forward(self, bs: int = 3, prefix_len: int = 10) -> None:
        """Plan, verify and write one token for each of `bs` requests."""
        self.plan(list(range(1, bs + 1)), [prefix_len] * bs, [1] * bs)
        self.verify()
        self.write()

    def violate(self, num: int = 1) -> None:
        """What a launch does that finds `num` violations; the words of each are 100 × its number + the word."""
        first = int(self.index[0])
        for number in range(first, first + num):
            if number < self.ring.shape[0]:
                self.ring[number] = torch.arange(8) + 100 * number
                self.ring[number, 0] = int(self.context.kernel_kind)
                self.ring[number, 7] = 3
        self.index[0] = first + num


def read(directory: Path | str, table: str = "steps") -> pa.Table:
    """All sealed rows of a table, in the order of their files; empty when there are none."""
    folder = Path(directory) / table
    if not folder.exists():
        return pa.table({})
    return ds.dataset(folder, format="parquet", partitioning="hive").to_table()


def rows(directory: Path | str, table: str = "steps") -> list[dict[str, Any]]:
    """The same as Python dicts."""
    return read(directory, table).to_pylist()
