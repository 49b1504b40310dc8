"""Plan: which slots a forward verifies and where its new tokens chain from."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from . import hooks
from .backend import backend_for
from .buffers import VerifyPlan, WritePlan
from .checks import check_overflow, check_plan, check_plan_entries, check_plan_offsets
from .layout import VERIFY_OFFSETS_SCRATCH_LEN

Overflow: TypeAlias = Literal["skip", "rotate"]


def launch_canary_plan_kernels(
    *,
    verify_plan_out: VerifyPlan,
    write_plan_out: WritePlan,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    swa_window_size: int,
    full_to_swa_index_mapping: torch.Tensor | None,
    verify_capacity: int,
    req_to_verify_expected_tokens: torch.Tensor | None,
    req_to_verify_expected_tokens_valid_lens: torch.Tensor | None,
    kv_token_id_vs_position_offset: int,
    overflow: Overflow = "skip",
    rotate_cursor: torch.Tensor | None = None,
) -> None:
    """Fill both plans of one forward.

    Each active row (`req_pool_indices != 0`) has one verify entry per position in `[start, prefix_len)`, request after
    request, where start is 0, or `prefix_len - swa_window_size` under a window. When the entries outnumber
    `verify_capacity`, none is stored and `enable` is 0; with `overflow="rotate"` the `verify_capacity` entries that follow
    `rotate_cursor` are stored instead and the cursor moves on, so that an unchanged batch is verified whole in
    `ceil(demand / verify_capacity)` steps. Safe under CUDA graph capture: no readback.

    Args:
        verify_plan_out: Out. Entries past `verify_num_valid` keep what they held.
        write_plan_out: Out. `write_offsets` is written in full; seeds past the batch keep what they held.
        req_pool_indices: [bs] int64, rows of `req_to_token`; 0 is a padding row and contributes nothing.
        prefix_lens: [bs] int64, tokens before this forward.
        extend_seq_lens: [bs] int64, tokens of this forward.
        req_to_token: [max_reqs, max_seq_len] int32, slots.
        swa_window_size: Tokens of the sliding window; 0 or less for full attention.
        full_to_swa_index_mapping: int64, slot of the full pool → slot of the window's; applied whenever given. A negative
            slot passes through; a slot past the map is refused in torch, left out and counted in Triton.
        verify_capacity: Entries that `verify_plan_out` holds.
        req_to_verify_expected_tokens: [max_reqs, max_context] int32, known tokens, or None.
        req_to_verify_expected_tokens_valid_lens: [bs] int64, how many of a row are known.
        kv_token_id_vs_position_offset: Column of a position's token minus the position: 0, or 1 for a draft model.
        overflow: What to do when the demand exceeds `verify_capacity`.
        rotate_cursor: [1] int64, in and out, with `overflow="rotate"` only.

    Raises:
        ValueError: An argument is ill-shaped, ill-typed, misplaced or not contiguous, or the batch is too large. Nothing
            has been written then.

    Source:
        SGLang's `launch_canary_plan_kernels`, whose results these are. Oracle: `tests/oracle.py`.
    """

    def launch() -> None:
        check_plan(
            verify_plan_out=verify_plan_out,
            req_pool_indices=req_pool_indices,
            swa_window_size=swa_window_size,
            full_to_swa_index_mapping=full_to_swa_index_mapping,
            verify_capacity=verify_capacity,
        )
        device = verify_plan_out.verify_slot_indices.device
        scratch = torch.empty(VERIFY_OFFSETS_SCRATCH_LEN, dtype=torch.int64, device=device)
        entry_inputs = {
            "req_pool_indices": req_pool_indices,
            "prefix_lens": prefix_lens,
            "req_to_token": req_to_token,
            "full_to_swa_index_mapping": full_to_swa_index_mapping,
        }
        offsets_outputs = {
            "out_verify_offsets_scratch": scratch,
            "out_write_offsets": write_plan_out.write_offsets,
            "out_write_seed_slot_indices": write_plan_out.write_seed_slot_indices,
            "out_verify_num_valid": verify_plan_out.verify_num_valid,
            "out_verify_enable": verify_plan_out.enable,
            "out_write_num_valid_reqs": write_plan_out.write_num_valid_reqs,
        }
        entries = {
            **entry_inputs,
            "verify_offsets_scratch": scratch,
            "verify_enable": verify_plan_out.enable,
            "req_to_verify_expected_tokens": req_to_verify_expected_tokens,
            "req_to_verify_expected_tokens_valid_lens": req_to_verify_expected_tokens_valid_lens,
            "out_verify_slot_indices": verify_plan_out.verify_slot_indices,
            "out_verify_expected_tokens": verify_plan_out.verify_expected_tokens,
            "out_verify_expected_positions": verify_plan_out.verify_expected_positions,
            "out_verify_prev_slot_indices": verify_plan_out.verify_prev_slot_indices,
        }
        check_plan_offsets(**entry_inputs, extend_seq_lens=extend_seq_lens, **offsets_outputs)
        check_plan_entries(**entries)
        check_overflow(overflow, rotate_cursor, device)
        backend = backend_for(device)
        backend.refuse_unsafe_plan(
            **entry_inputs,
            extend_seq_lens=extend_seq_lens,
            swa_window_size=swa_window_size,
            req_to_verify_expected_tokens=req_to_verify_expected_tokens,
            req_to_verify_expected_tokens_valid_lens=req_to_verify_expected_tokens_valid_lens,
        )
        backend.plan_offsets(
            **entry_inputs,
            extend_seq_lens=extend_seq_lens,
            **offsets_outputs,
            swa_window_size=swa_window_size,
            verify_capacity=verify_capacity,
            overflow_rotate=overflow == "rotate",
        )
        backend.plan_entries(
            **entries,
            swa_window_size=swa_window_size,
            kv_token_id_vs_position_offset=kv_token_id_vs_position_offset,
            rotate_cursor=rotate_cursor if overflow == "rotate" else None,
        )

    if hooks.observer is None:
        launch()
        return
    call = hooks.PlanCall(
        verify_plan_out=verify_plan_out,
        write_plan_out=write_plan_out,
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        extend_seq_lens=extend_seq_lens,
        req_to_token=req_to_token,
        full_to_swa_index_mapping=full_to_swa_index_mapping,
        swa_window_size=swa_window_size,
        verify_capacity=verify_capacity,
    )
    hooks.observed(call, launch)


def launch_plan_offsets_kernel(
    *,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_swa_index_mapping: torch.Tensor | None,
    out_verify_offsets_scratch: torch.Tensor,
    out_write_offsets: torch.Tensor,
    out_write_seed_slot_indices: torch.Tensor,
    out_verify_num_valid: torch.Tensor,
    out_verify_enable: torch.Tensor,
    out_write_num_valid_reqs: torch.Tensor,
    swa_window_size: int,
    verify_capacity: int,
) -> None:
    """The first half of a plan: prefix sums of entries and tokens, seeds, `enable`.

    Inputs are those of `launch_canary_plan_kernels`.

    Args:
        out_verify_offsets_scratch: [>= 4097] int64. Out: first entry of each request; the unclamped demand at `[bs]`.
        out_write_offsets: [write_req_capacity + 1] int64. Out, words past `bs` are 0.
        out_write_seed_slot_indices: [write_req_capacity] int64. Out, seeds past `bs` keep what they held.
        out_verify_num_valid: [1] int32. Out, the demand clamped to `verify_capacity`.
        out_verify_enable: [1] int32. Out, 0 when the demand exceeds `verify_capacity`.
        out_write_num_valid_reqs: [1] int32. Out, `bs` as launched.

    Raises:
        ValueError: As `launch_canary_plan_kernels`.
    """
    inputs = {
        "req_pool_indices": req_pool_indices,
        "prefix_lens": prefix_lens,
        "extend_seq_lens": extend_seq_lens,
        "req_to_token": req_to_token,
        "full_to_swa_index_mapping": full_to_swa_index_mapping,
    }
    outputs = {
        "out_verify_offsets_scratch": out_verify_offsets_scratch,
        "out_write_offsets": out_write_offsets,
        "out_write_seed_slot_indices": out_write_seed_slot_indices,
        "out_verify_num_valid": out_verify_num_valid,
        "out_verify_enable": out_verify_enable,
        "out_write_num_valid_reqs": out_write_num_valid_reqs,
    }
    check_plan_offsets(**inputs, **outputs)
    backend = backend_for(out_verify_offsets_scratch.device)
    backend.refuse_unsafe_plan(**inputs, swa_window_size=swa_window_size)
    backend.plan_offsets(
        **inputs, **outputs, swa_window_size=swa_window_size, verify_capacity=verify_capacity, overflow_rotate=False
    )


def launch_plan_entries_kernel(
    *,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    req_to_token: torch.Tensor,
    full_to_swa_index_mapping: torch.Tensor | None,
    verify_offsets_scratch: torch.Tensor,
    verify_enable: torch.Tensor,
    req_to_verify_expected_tokens: torch.Tensor | None,
    req_to_verify_expected_tokens_valid_lens: torch.Tensor | None,
    out_verify_slot_indices: torch.Tensor,
    out_verify_expected_tokens: torch.Tensor,
    out_verify_expected_positions: torch.Tensor,
    out_verify_prev_slot_indices: torch.Tensor,
    kv_token_id_vs_position_offset: int,
    swa_window_size: int,
) -> None:
    """The second half of a plan: the entries themselves, unless `verify_enable` is 0.

    Inputs are those of `launch_canary_plan_kernels`; `verify_offsets_scratch` is what the first half filled; outputs are the
    entry tensors of a `VerifyPlan`.

    Raises:
        ValueError: As `launch_canary_plan_kernels`.
    """
    inputs = {
        "req_pool_indices": req_pool_indices,
        "prefix_lens": prefix_lens,
        "req_to_token": req_to_token,
        "full_to_swa_index_mapping": full_to_swa_index_mapping,
        "req_to_verify_expected_tokens": req_to_verify_expected_tokens,
        "req_to_verify_expected_tokens_valid_lens": req_to_verify_expected_tokens_valid_lens,
    }
    outputs = {
        "verify_offsets_scratch": verify_offsets_scratch,
        "verify_enable": verify_enable,
        "out_verify_slot_indices": out_verify_slot_indices,
        "out_verify_expected_tokens": out_verify_expected_tokens,
        "out_verify_expected_positions": out_verify_expected_positions,
        "out_verify_prev_slot_indices": out_verify_prev_slot_indices,
    }
    check_plan_entries(**inputs, **outputs)
    backend = backend_for(verify_offsets_scratch.device)
    backend.refuse_unsafe_plan(**inputs, extend_seq_lens=None, swa_window_size=swa_window_size)
    backend.plan_entries(
        **inputs,
        **outputs,
        swa_window_size=swa_window_size,
        kv_token_id_vs_position_offset=kv_token_id_vs_position_offset,
        rotate_cursor=None,
    )
