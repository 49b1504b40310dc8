"""Batches with more requests than a write plan has rows for, or than one launch takes."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from . import hooks
from .buffers import VerifyPlan, WritePlan
from .checks import check_capacity, refusal
from .plan import Overflow, run_plan

__all__ = ["MAX_CHUNKED_REQS", "plan_chunks"]

MAX_CHUNKED_REQS: Final = 16_384
"""Rows of one batch: a Triton program scans them all in its registers."""


def plan_chunks(
    *,
    verify_plan_out: VerifyPlan,
    write_req_capacity: int,
    req_pool_indices: Tensor,
    prefix_lens: Tensor,
    extend_seq_lens: Tensor,
    req_to_token: Tensor,
    swa_window_size: int,
    full_to_swa_index_mapping: Tensor | None,
    verify_capacity: int,
    req_to_verify_expected_tokens: Tensor | None,
    req_to_verify_expected_tokens_valid_lens: Tensor | None,
    kv_token_id_vs_position_offset: int,
    overflow: Overflow = "skip",
    rotate_cursor: Tensor | None = None,
) -> tuple[WritePlan, ...]:
    """Plan a batch of any size: one verify plan for all of it, and a write plan per `write_req_capacity` requests.

    ```python
    write_plans = plan_chunks(verify_plan_out=verify_plan, write_req_capacity=64, **inputs)
    launch_canary_verify_kernel(context=context, plan=verify_plan, check_verify_expected_token=False)
    for write_plan in write_plans:
        launch_canary_write_kernel(context=context, plan=write_plan, **tokens_of_the_whole_batch)
    ```

    Verify once, then write with every plan in turn, each time with the whole batch's token arrays (the plans' offsets
    go on from one to the next). Buffers, violations and slot counters are then those of one launch without a limit;
    `kernel_run_counter` counts the write launches that there were. `verify_capacity` holds for the batch as a whole.
    Nothing is read back, and a session records one step row, with the batch's true size.

    Args:
        verify_plan_out: Out, as `launch_canary_plan_kernels` fills it.
        write_req_capacity: Requests per write plan, at least 1.
        req_pool_indices: [bs] int64, `bs` at most 16 384; this and the rest as in `launch_canary_plan_kernels`.
        prefix_lens: [bs] int64.
        extend_seq_lens: [bs] int64.
        req_to_token: [max_reqs, max_seq_len] int32.
        swa_window_size: Positions verified per request; 0 and below: all.
        full_to_swa_index_mapping: [map_len] int64, or None.
        verify_capacity: `verify_plan_out.verify_slot_indices.shape[0]`.
        req_to_verify_expected_tokens: [rows, width] int32, or None.
        req_to_verify_expected_tokens_valid_lens: [bs] int64, required with the tokens.
        kv_token_id_vs_position_offset: Added to a position to find its token.
        overflow: "skip" or "rotate".
        rotate_cursor: [1] int64, required for "rotate".

    Returns:
        At least one write plan, each of `write_req_capacity` rows, on the batch's device. They are views of one
        allocation, and stay valid as long as any is held.

    Raises:
        ValueError: as `launch_canary_plan_kernels`; nothing has been written.
    """
    check_capacity("plan_chunks write_req_capacity", write_req_capacity)
    if req_pool_indices.ndim != 1:
        raise refusal(f"req_pool_indices must be 1-D, got shape {tuple(req_pool_indices.shape)}")
    num_reqs, device = req_pool_indices.shape[0], req_pool_indices.device
    num_chunks = max(1, -(-num_reqs // write_req_capacity))
    whole = WritePlan.allocate(write_req_capacity=num_chunks * write_req_capacity, device=device)
    chunks = tuple(
        _chunk(whole, first, num_reqs, write_req_capacity) for first in _firsts(num_chunks, write_req_capacity)
    )

    def launch() -> None:
        run_plan(
            verify_plan_out=verify_plan_out,
            write_plan_out=whole,
            req_pool_indices=req_pool_indices,
            prefix_lens=prefix_lens,
            extend_seq_lens=extend_seq_lens,
            req_to_token=req_to_token,
            swa_window_size=swa_window_size,
            full_to_swa_index_mapping=full_to_swa_index_mapping,
            verify_capacity=verify_capacity,
            req_to_verify_expected_tokens=req_to_verify_expected_tokens,
            req_to_verify_expected_tokens_valid_lens=req_to_verify_expected_tokens_valid_lens,
            kv_token_id_vs_position_offset=kv_token_id_vs_position_offset,
            overflow=overflow,
            rotate_cursor=rotate_cursor,
            max_reqs=MAX_CHUNKED_REQS,
        )

    call = hooks.PlanCall(
        verify_plan_out,
        chunks[0],  # its capacity is the one that the batch is held against
        req_pool_indices,
        prefix_lens,
        extend_seq_lens,
        req_to_token,
        full_to_swa_index_mapping,
        swa_window_size,
        verify_capacity,
    )
    hooks.observed(call, launch)
    return chunks


def _firsts(num_chunks: int, write_req_capacity: int) -> range:
    return range(0, num_chunks * write_req_capacity, write_req_capacity)


def _chunk(whole: WritePlan, first: int, num_reqs: int, write_req_capacity: int) -> WritePlan:
    """Requests [first, first + write_req_capacity) of a plan: its offsets go on, so its tokens are the batch's own."""
    last = first + write_req_capacity
    num_valid = max(0, min(num_reqs, last) - first)
    return WritePlan(
        write_offsets=whole.write_offsets[first : last + 1],
        write_seed_slot_indices=whole.write_seed_slot_indices[first:last],
        write_num_valid_reqs=torch.full((1,), num_valid, dtype=torch.int32, device=whole.write_offsets.device),
    )
