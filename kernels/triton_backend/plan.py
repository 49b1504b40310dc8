"""Plan launches: how many programs, blocks and warps a batch takes, and which variant of the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton

from .device import INTERPRETED, num_multiprocessors, skipped_entries
from .launch import launch
from .plan_kernel import _advance_cursor_kernel, _plan_kernel

if TYPE_CHECKING:
    from torch import Tensor

_MIN_BLOCK: Final = 16
_SMALL_BLOCK: Final = 16 if INTERPRETED else 256
_BLOCK: Final = 64 if INTERPRETED else 1024
_PROGRAMS_PER_SM: Final = 2
_REGISTER_MAX_REQS: Final = 4096
"""Up to here every program holds the scan of the whole batch in registers; past it, it searches the stored one."""


def _block_reqs(num_reqs: int) -> int:
    return max(16, triton.next_power_of_2(num_reqs))


def _warps(block_reqs: int) -> int:
    return 4 if block_reqs < 512 else 8 if block_reqs <= _REGISTER_MAX_REQS else 32


def _num_programs(num_reqs: int, row_width: int, window: int, capacity: int, device: torch.device) -> int:
    """Programs for the most entries that this shape can store: the true number is known on the device alone."""
    most = num_reqs * min(row_width, window) if window > 0 else num_reqs * row_width
    blocks = triton.cdiv(min(most, capacity), _SMALL_BLOCK)
    return max(1, min(blocks, _PROGRAMS_PER_SM * num_multiprocessors(device) - 1))


def plan_offsets(
    *,
    req_pool_indices: Tensor,
    prefix_lens: Tensor,
    extend_seq_lens: Tensor,
    req_to_token: Tensor,
    full_to_swa_index_mapping: Tensor | None,
    out_verify_offsets_scratch: Tensor,
    out_write_offsets: Tensor,
    out_write_seed_slot_indices: Tensor,
    out_verify_num_valid: Tensor,
    out_verify_enable: Tensor,
    out_write_num_valid_reqs: Tensor,
    swa_window_size: int,
    verify_capacity: int,
    overflow_rotate: bool,
) -> None:
    """Scan a batch into offsets, seeds and totals. Arguments as `launch_plan_offsets_kernel` checks them.

    `out_write_offsets` is written in full, its tail zeroed. No allocation, no readback.
    """
    num_reqs = req_pool_indices.shape[0]
    mapping = full_to_swa_index_mapping
    unused = req_pool_indices
    block_reqs = _block_reqs(num_reqs)
    launch(
        _plan_kernel,
        1,
        (
            req_pool_indices,
            prefix_lens,
            extend_seq_lens,
            req_to_token,
            unused if mapping is None else mapping,
            unused,
            unused,
            unused,
            out_verify_offsets_scratch,
            out_write_offsets,
            out_write_seed_slot_indices,
            out_verify_num_valid,
            out_verify_enable,
            out_write_num_valid_reqs,
            unused,
            unused,
            unused,
            unused,
            skipped_entries(req_pool_indices.device),
        ),
        (
            num_reqs,
            req_to_token.shape[0],
            req_to_token.shape[1],
            req_to_token.stride(0),
            0 if mapping is None else mapping.shape[0],
            0,
            0,
            0,
            0,
            swa_window_size,
            verify_capacity,
            out_write_offsets.shape[0],
        ),
        (),
        (True, False, overflow_rotate, mapping is not None, False, block_reqs, False, 0, _MIN_BLOCK, _MIN_BLOCK),
        _warps(block_reqs),
    )


def plan_entries(
    *,
    req_pool_indices: Tensor,
    prefix_lens: Tensor,
    req_to_token: Tensor,
    full_to_swa_index_mapping: Tensor | None,
    verify_offsets_scratch: Tensor,
    verify_enable: Tensor,
    out_verify_slot_indices: Tensor,
    out_verify_expected_tokens: Tensor,
    out_verify_expected_positions: Tensor,
    out_verify_prev_slot_indices: Tensor,
    swa_window_size: int,
    req_to_verify_expected_tokens: Tensor | None,
    req_to_verify_expected_tokens_valid_lens: Tensor | None,
    kv_token_id_vs_position_offset: int,
    rotate_cursor: Tensor | None,
) -> None:
    """Store the verify entries that the offsets describe. Arguments as `launch_plan_entries_kernel` checks them.

    An entry that cannot be read is stored as the dummy slot, which verify skips, and counted in `skipped_entries`.
    """
    num_reqs = req_pool_indices.shape[0]
    capacity = out_verify_slot_indices.shape[0]
    unused = req_pool_indices
    _launch_entries(
        _num_programs(num_reqs, req_to_token.shape[1], swa_window_size, capacity, req_pool_indices.device),
        req_pool_indices,
        prefix_lens,
        unused,
        req_to_token,
        full_to_swa_index_mapping,
        req_to_verify_expected_tokens,
        req_to_verify_expected_tokens_valid_lens,
        rotate_cursor,
        verify_offsets_scratch,
        (unused, unused, unused, verify_enable, unused),
        (
            out_verify_slot_indices,
            out_verify_expected_tokens,
            out_verify_expected_positions,
            out_verify_prev_slot_indices,
        ),
        kv_token_id_vs_position_offset,
        swa_window_size,
        0,
        False,
        rotate_cursor is not None,
    )
    _advance_cursor(rotate_cursor, verify_offsets_scratch, num_reqs, capacity)


def plan(
    *,
    req_pool_indices: Tensor,
    prefix_lens: Tensor,
    extend_seq_lens: Tensor,
    req_to_token: Tensor,
    full_to_swa_index_mapping: Tensor | None,
    verify_offsets_scratch: Tensor,
    out_write_offsets: Tensor,
    out_write_seed_slot_indices: Tensor,
    out_verify_num_valid: Tensor,
    out_verify_enable: Tensor,
    out_write_num_valid_reqs: Tensor,
    out_verify_slot_indices: Tensor,
    out_verify_expected_tokens: Tensor,
    out_verify_expected_positions: Tensor,
    out_verify_prev_slot_indices: Tensor,
    swa_window_size: int,
    req_to_verify_expected_tokens: Tensor | None,
    req_to_verify_expected_tokens_valid_lens: Tensor | None,
    kv_token_id_vs_position_offset: int,
    overflow_rotate: bool,
    rotate_cursor: Tensor | None,
) -> None:
    """`plan_offsets` and `plan_entries` in one launch (a second, tiny one moves a rotating window on)."""
    num_reqs = req_pool_indices.shape[0]
    capacity = out_verify_slot_indices.shape[0]
    device = req_pool_indices.device
    if num_reqs > _REGISTER_MAX_REQS:
        plan_offsets(
            req_pool_indices=req_pool_indices,
            prefix_lens=prefix_lens,
            extend_seq_lens=extend_seq_lens,
            req_to_token=req_to_token,
            full_to_swa_index_mapping=full_to_swa_index_mapping,
            out_verify_offsets_scratch=verify_offsets_scratch,
            out_write_offsets=out_write_offsets,
            out_write_seed_slot_indices=out_write_seed_slot_indices,
            out_verify_num_valid=out_verify_num_valid,
            out_verify_enable=out_verify_enable,
            out_write_num_valid_reqs=out_write_num_valid_reqs,
            swa_window_size=swa_window_size,
            verify_capacity=capacity,
            overflow_rotate=overflow_rotate,
        )
        plan_entries(
            req_pool_indices=req_pool_indices,
            prefix_lens=prefix_lens,
            req_to_token=req_to_token,
            full_to_swa_index_mapping=full_to_swa_index_mapping,
            verify_offsets_scratch=verify_offsets_scratch,
            verify_enable=out_verify_enable,
            out_verify_slot_indices=out_verify_slot_indices,
            out_verify_expected_tokens=out_verify_expected_tokens,
            out_verify_expected_positions=out_verify_expected_positions,
            out_verify_prev_slot_indices=out_verify_prev_slot_indices,
            swa_window_size=swa_window_size,
            req_to_verify_expected_tokens=req_to_verify_expected_tokens,
            req_to_verify_expected_tokens_valid_lens=req_to_verify_expected_tokens_valid_lens,
            kv_token_id_vs_position_offset=kv_token_id_vs_position_offset,
            rotate_cursor=rotate_cursor,
        )
        return
    _launch_entries(
        1 + _num_programs(num_reqs, req_to_token.shape[1], swa_window_size, capacity, device),
        req_pool_indices,
        prefix_lens,
        extend_seq_lens,
        req_to_token,
        full_to_swa_index_mapping,
        req_to_verify_expected_tokens,
        req_to_verify_expected_tokens_valid_lens,
        rotate_cursor,
        verify_offsets_scratch,
        (
            out_write_offsets,
            out_write_seed_slot_indices,
            out_verify_num_valid,
            out_verify_enable,
            out_write_num_valid_reqs,
        ),
        (
            out_verify_slot_indices,
            out_verify_expected_tokens,
            out_verify_expected_positions,
            out_verify_prev_slot_indices,
        ),
        kv_token_id_vs_position_offset,
        swa_window_size,
        out_write_offsets.shape[0],
        True,
        overflow_rotate,
    )
    _advance_cursor(rotate_cursor, verify_offsets_scratch, num_reqs, capacity)


def _launch_entries(
    num_programs: int,
    req_pool_indices: Tensor,
    prefix_lens: Tensor,
    extend_lens: Tensor,
    req_to_token: Tensor,
    mapping: Tensor | None,
    pool: Tensor | None,
    pool_lens: Tensor | None,
    cursor: Tensor | None,
    offsets: Tensor,
    offset_outputs: tuple[Tensor, ...],
    entry_outputs: tuple[Tensor, ...],
    token_offset: int,
    window: int,
    write_offsets_len: int,
    with_offsets: bool,
    rotates: bool,
) -> None:
    num_reqs = req_pool_indices.shape[0]
    block_reqs = _block_reqs(num_reqs)
    unused = req_pool_indices
    launch(
        _plan_kernel,
        num_programs,
        (
            req_pool_indices,
            prefix_lens,
            extend_lens,
            req_to_token,
            unused if mapping is None else mapping,
            unused if pool is None else pool,
            unused if pool_lens is None else pool_lens,
            unused if cursor is None else cursor,
            offsets,
            *offset_outputs,
            *entry_outputs,
            skipped_entries(req_pool_indices.device),
        ),
        (
            num_reqs,
            req_to_token.shape[0],
            req_to_token.shape[1],
            req_to_token.stride(0),
            0 if mapping is None else mapping.shape[0],
            0 if pool is None else pool.shape[0],
            0 if pool is None else pool.shape[1],
            0 if pool is None else pool.stride(0),
            token_offset,
            window,
            entry_outputs[0].shape[0],
            write_offsets_len,
        ),
        (),
        (
            with_offsets,
            True,
            rotates,
            mapping is not None,
            pool is not None,
            block_reqs,
            rotates or block_reqs > _REGISTER_MAX_REQS,
            block_reqs.bit_length() - 1,
            _SMALL_BLOCK,
            _BLOCK,
        ),
        _warps(block_reqs),
    )


def _advance_cursor(cursor: Tensor | None, offsets: Tensor, num_reqs: int, capacity: int) -> None:
    # A launch of its own: every program of the plan reads the cursor, and none may move it under the others.
    if cursor is not None:
        launch(_advance_cursor_kernel, 1, (cursor, offsets), (num_reqs, capacity), (), (), 1)
