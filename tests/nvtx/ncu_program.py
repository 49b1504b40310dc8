"""The program that Nsight Compute profiles: some traced steps, with other kernels between, before and after them.

    python tests/nvtx/ncu_program.py [cuda|cpu] [DIR]

Prints how many steps it ran; each launches the plan's kernel once, so `kv_canary@plan/` selects as many kernels.
"""

from __future__ import annotations

import sys
import tempfile

import torch

import kvcanary_trace as kv_canary
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

STEPS = 5
BS, PREFIX = 8, 32


def main(device_name: str, directory: str) -> None:
    """Run a forward outside any session, to compile and allocate, and then STEPS traced ones."""
    device = torch.device(device_name)
    slots = torch.arange(1, BS * (PREFIX + 1) + 1, dtype=torch.int32, device=device).reshape(BS, PREFIX + 1)
    req_to_token = torch.cat([torch.zeros_like(slots[:1]), slots])
    verify_plan = VerifyPlan.allocate(verify_capacity=4096, device=device)
    write_plan = WritePlan.allocate(write_req_capacity=BS, device=device)
    rows = torch.arange(1, BS + 1, device=device)
    prefix_lens = torch.full((BS,), PREFIX, device=device)
    ones = torch.ones_like(prefix_lens)
    tokens, positions, out_slots = ones.clone(), prefix_lens.clone(), slots[:, PREFIX].long().contiguous()
    context = VerifyOrWriteContext(
        canary_buf=torch.zeros(BS * (PREFIX + 1) + 1, 32, dtype=torch.uint8, device=device),
        kernel_kind=CanaryLaunchTag.HEAD_K_FULL,
        violation_ring=torch.zeros(1024, 8, dtype=torch.int64, device=device),
        violation_write_index=torch.zeros(1, dtype=torch.int32, device=device),
        slot_run_counter=torch.zeros(1, dtype=torch.int64, device=device),
        kernel_run_counter=torch.zeros(1, dtype=torch.int64, device=device),
        real_kv_sources=(),
        real_kv_hash_mode=RealKvHashMode.NONE,
        enable_chain_position_assert=torch.zeros(1, dtype=torch.int32, device=device),
    )

    def forward() -> None:
        launch_canary_plan_kernels(
            verify_plan_out=verify_plan,
            write_plan_out=write_plan,
            req_pool_indices=rows,
            prefix_lens=prefix_lens,
            extend_seq_lens=ones,
            req_to_token=req_to_token,
            swa_window_size=0,
            full_to_swa_index_mapping=None,
            verify_capacity=4096,
            req_to_verify_expected_tokens=None,
            req_to_verify_expected_tokens_valid_lens=None,
            kv_token_id_vs_position_offset=0,
        )
        launch_canary_verify_kernel(context=context, plan=verify_plan, check_verify_expected_token=False)
        launch_canary_write_kernel(
            context=context,
            plan=write_plan,
            input_ids=tokens,
            positions=positions,
            out_cache_loc=out_slots,
            enable_write_input_assert=False,
            expected_input_tokens=None,
            expected_input_positions=None,
        )

    forward()
    busy = torch.rand(64, 64, device=device)
    with kv_canary.trace(directory, otel=False):
        for _ in range(STEPS):
            busy = busy @ busy  # the model's own kernels, in no range of ours
            with kv_canary.step(mode="decode"):
                busy = busy.relu()  # inside the step, outside the plan
                forward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(f"{STEPS} steps")


if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    if len(sys.argv) > 2:
        main(name, sys.argv[2])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(name, folder)
