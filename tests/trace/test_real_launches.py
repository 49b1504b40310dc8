"""The session around the real launchers: what the kernels did and what the rows say agree."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import CPU, Engine, rows
from opentelemetry.sdk.trace import TracerProvider

import kvcanary_trace as kv_canary
from kvcanary_trace.kernels import CanaryLaunchTag, RealKvHashMode, VerifyOrWriteContext, VerifyPlan, WritePlan


class Loop:
    """Requests of one token a step over real buffers, planned, verified and written by the public launchers."""

    def __init__(self, *, write_req_capacity: int = 4, verify_capacity: int = 64) -> None:
        self.verify_plan = VerifyPlan.allocate(verify_capacity=verify_capacity, device=CPU)
        self.write_plan = WritePlan.allocate(write_req_capacity=write_req_capacity, device=CPU)
        self.table = torch.arange(1, 8 * 32 + 1, dtype=torch.int32).reshape(8, 32)
        self.context = VerifyOrWriteContext(
            canary_buf=torch.zeros(8 * 32 + 1, 32, dtype=torch.uint8),
            kernel_kind=CanaryLaunchTag.TAIL_K_FULL,
            violation_ring=torch.zeros(16, 8, dtype=torch.int64),
            violation_write_index=torch.zeros(1, dtype=torch.int32),
            slot_run_counter=torch.zeros(1, dtype=torch.int64),
            kernel_run_counter=torch.zeros(1, dtype=torch.int64),
            real_kv_sources=(),
            real_kv_hash_mode=RealKvHashMode.NONE,
            enable_chain_position_assert=torch.ones(1, dtype=torch.int32),
        )

    def step(self, bs: int, length: int) -> None:
        """One decode step of requests 1..bs with `length` tokens each."""
        reqs = torch.arange(1, bs + 1)
        prefix_lens = torch.full((bs,), length)
        batch: dict[str, Any] = {
            "req_pool_indices": reqs,
            "prefix_lens": prefix_lens,
            "extend_seq_lens": torch.ones_like(reqs),
            "req_to_token": self.table,
        }
        kv_canary.launch_canary_plan_kernels(
            verify_plan_out=self.verify_plan,
            write_plan_out=self.write_plan,
            **batch,
            swa_window_size=0,
            full_to_swa_index_mapping=None,
            verify_capacity=self.verify_plan.verify_slot_indices.shape[0],
            req_to_verify_expected_tokens=None,
            req_to_verify_expected_tokens_valid_lens=None,
            kv_token_id_vs_position_offset=0,
        )
        kv_canary.launch_canary_verify_kernel(
            context=self.context, plan=self.verify_plan, check_verify_expected_token=False
        )
        kv_canary.launch_canary_write_kernel(
            context=self.context,
            plan=self.write_plan,
            input_ids=reqs + 100 * length,
            positions=prefix_lens,
            out_cache_loc=self.table[1 : bs + 1, length].long(),
            enable_write_input_assert=False,
            expected_input_tokens=None,
            expected_input_positions=None,
        )


def test_rows_and_kernels_agree(tmp_path: Path) -> None:
    """Clean steps, a flipped word, an overflow and a refusal: counters of the kernels and columns of the rows match."""
    loop = Loop()
    with kv_canary.trace(tmp_path) as session:
        for length in range(20):
            with kv_canary.step(mode="decode"):
                loop.step(4, length)
        checked = int(loop.context.slot_run_counter) - 4 * 20
        loop.context.canary_buf[int(loop.table[2, 3]), 8] ^= 1  # a stored position
        with kv_canary.step(mode="decode"):
            loop.step(3, 20)
        with pytest.raises(ValueError, match="bs=5 exceeds write_req_capacity=4"), kv_canary.step(mode="decode"):
            loop.step(5, 20)
    got = rows(tmp_path)
    assert session.stats.complete
    covered = [row for row in got[:20] if row["verify_enabled"]]
    assert sum(row["verify_checked"] for row in covered) == sum(row["verify_demand"] for row in covered) == checked
    overflowed = [row for row in got[:20] if not row["verify_enabled"]]
    assert [(row["verify_demand"], row["verify_checked"]) for row in overflowed] == [(68, 0), (72, 0), (76, 0)]
    assert got[20]["violations_new"] == int(loop.context.violation_write_index[0]) > 0
    found = rows(tmp_path, "violations")
    assert {row["step"] for row in found} == {20} and found[0]["launch_tag"] == "TAIL_K_FULL"
    assert (got[21]["error"], got[21]["bs"], got[21]["verify_demand"]) == ("bs-exceeds-write-req-capacity", 5, 100)


def test_what_a_step_costs(tmp_path: Path) -> None:
    """Loosely, for a busy machine (the bars stand in benchmarks/tracing_cost.py): a record is far below a span."""
    tracer = TracerProvider().get_tracer("test")

    def span() -> None:
        with tracer.start_as_current_span("step", attributes={"a": 1, "b": 2, "c": 3, "d": "x"}):
            pass

    def step() -> None:
        with kv_canary.step(mode="decode", kv_used=1, kv_capacity=2):
            pass

    engine = Engine()

    def least_ns(function: Any, calls: int = 50) -> int:
        times = []
        for _ in range(60):
            begin = time.perf_counter_ns()
            for _ in range(calls):
                function()
            times.append(time.perf_counter_ns() - begin)
        return min(times)

    with kv_canary.trace(tmp_path) as session:
        span_ns, step_ns = least_ns(span), least_ns(step)
        engine.forward()
    assert step_ns < 0.4 * span_ns
    assert session.stats.complete
