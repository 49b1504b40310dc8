"""Trace your own serving loop: the canary's launchers under `kv_canary.trace()`, then ask what will break.

    python examples/01_trace_a_loop.py [DIR]

The loop below is a toy engine: requests arrive, prefill 24 tokens, decode one token a step and leave after 60. Its
canary buffers are sized for 12 requests, and arrivals grow towards that, so the analysis has something to announce.
"""

from __future__ import annotations

import sys

import torch

import kvcanary_trace as kv_canary
from kvcanary_trace.analysis import analyze
from kvcanary_trace.kernels import (
    CanaryLaunchTag,
    RealKvHashMode,
    VerifyOrWriteContext,
    VerifyPlan,
    WritePlan,
    launch_canary_plan_kernels,
    launch_canary_verify_kernel,
    launch_canary_write_kernel,
)

CPU = torch.device("cpu")
POOL_TOKENS, MAX_REQS, MAX_LEN = 4096, 32, 256
PREFILL, LIFE = 24, 60

verify_plan = VerifyPlan.allocate(verify_capacity=3 * POOL_TOKENS, device=CPU)
write_plan = WritePlan.allocate(write_req_capacity=12, device=CPU)
context = VerifyOrWriteContext(
    canary_buf=torch.zeros(POOL_TOKENS + 1, 32, dtype=torch.uint8),
    kernel_kind=CanaryLaunchTag.HEAD_K_FULL,
    violation_ring=torch.zeros(1024, 8, dtype=torch.int64),
    violation_write_index=torch.zeros(1, dtype=torch.int32),
    slot_run_counter=torch.zeros(1, dtype=torch.int64),
    kernel_run_counter=torch.zeros(1, dtype=torch.int64),
    real_kv_sources=(),
    real_kv_hash_mode=RealKvHashMode.NONE,
    enable_chain_position_assert=torch.ones(1, dtype=torch.int32),
)
req_to_token = torch.zeros(MAX_REQS + 1, MAX_LEN, dtype=torch.int32)  # row 0 is padding
free_slots = list(range(POOL_TOKENS, 0, -1))  # slot 0 is the dummy slot
free_rows = list(range(MAX_REQS, 0, -1))
length: dict[int, int] = {}  # row of req_to_token → tokens so far


def forward(rows: list[int], extend: int, mode: str) -> None:
    """One forward step: give slots to the new tokens, then plan, verify and write."""
    slots, positions = [], []
    for row in rows:
        for position in range(length[row], length[row] + extend):
            slots.append(free_slots.pop())
            positions.append(position)
            req_to_token[row, position] = slots[-1]
    prefix_lens = torch.tensor([length[row] for row in rows])
    with kv_canary.step(
        mode=mode, resident_reqs=len(length), kv_used=POOL_TOKENS - len(free_slots), kv_capacity=POOL_TOKENS
    ):
        launch_canary_plan_kernels(
            verify_plan_out=verify_plan,
            write_plan_out=write_plan,
            req_pool_indices=torch.tensor(rows),
            prefix_lens=prefix_lens,
            extend_seq_lens=torch.full_like(prefix_lens, extend),
            req_to_token=req_to_token,
            swa_window_size=0,
            full_to_swa_index_mapping=None,
            verify_capacity=3 * POOL_TOKENS,
            req_to_verify_expected_tokens=None,
            req_to_verify_expected_tokens_valid_lens=None,
            kv_token_id_vs_position_offset=0,
        )
        launch_canary_verify_kernel(context=context, plan=verify_plan, check_verify_expected_token=False)
        launch_canary_write_kernel(
            context=context,
            plan=write_plan,
            input_ids=torch.randint(32_000, (len(slots),)),
            positions=torch.tensor(positions),
            out_cache_loc=torch.tensor(slots),
            enable_write_input_assert=False,
            expected_input_tokens=None,
            expected_input_positions=None,
        )
    for row in rows:
        length[row] += extend


def serve(arrivals: list[int]) -> None:
    """Run the toy engine until every request has left; `arrivals[i]` requests arrive before step i."""
    for new in [*arrivals, *[0] * LIFE]:
        rows = [free_rows.pop() for _ in range(new)]
        length.update(dict.fromkeys(rows, 0))
        if rows:
            forward(rows, PREFILL, "prefill")
        if length:
            forward(sorted(length), 1, "decode")
        for row in [row for row, tokens in length.items() if tokens >= LIFE]:
            free_slots.extend(req_to_token[row, : length.pop(row)].tolist())
            free_rows.append(row)


if __name__ == "__main__":
    traces = sys.argv[1] if len(sys.argv) > 1 else "traces"
    with kv_canary.trace(traces) as session:
        serve([1 if step % max(3, 12 - step // 12) == 0 else 0 for step in range(150)])
    print(session.stats)
    for finding in analyze(traces).findings:
        print(f"{finding.severity:9} {finding.capacity or finding.rule}: {finding.reason}")
