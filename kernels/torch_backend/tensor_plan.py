"""Plan through torch's operations, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import PADDING_REQ_POOL_IDX
from .refusals import offsets_refusal
from .tensor_entries import Batch, check_entries, store_entries


def _exclusive_sum(lengths: Tensor) -> Tensor:
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))


def _starts(prefixes: Tensor, window: int) -> Tensor:
    return (prefixes - window).clamp(min=0) if window > 0 else torch.zeros_like(prefixes)


def _scan(
    req_pool_indices: Tensor,
    prefix_lens: Tensor,
    req_to_token: Tensor,
    full_to_swa_index_mapping: Tensor | None,
    swa_window_size: int,
    pool: Tensor | None = None,
    valid_lens: Tensor | None = None,
    token_offset: int = 0,
) -> tuple[Batch, Tensor]:
    """The batch, and its prefixes with padding rows at 0."""
    prefixes = torch.where(req_pool_indices != PADDING_REQ_POOL_IDX, prefix_lens, 0).clamp(min=0)
    starts = _starts(prefixes, swa_window_size)
    offsets = _exclusive_sum(prefixes - starts)
    batch = Batch(
        req_pool_indices, starts, offsets, req_to_token, full_to_swa_index_mapping, pool, valid_lens, token_offset
    )
    return batch, prefixes


def _store_offsets(
    batch: Batch,
    prefixes: Tensor,
    extend_seq_lens: Tensor,
    demand: int,
    out_write_offsets: Tensor,
    out_write_seed_slot_indices: Tensor,
    out_verify_num_valid: Tensor,
    out_verify_enable: Tensor,
    out_write_num_valid_reqs: Tensor,
    verify_capacity: int,
    overflow_rotate: bool,
) -> None:
    num_reqs = batch.rows.shape[0]
    extends = torch.where(batch.rows != PADDING_REQ_POOL_IDX, extend_seq_lens, 0).clamp(min=0)
    seeded = (extends > 0) & (prefixes > 0)
    seeds = batch.translate(batch.raw_slots(torch.where(seeded, batch.rows, 0), torch.where(seeded, prefixes - 1, -1)))
    out_write_offsets[: num_reqs + 1] = _exclusive_sum(extends)
    out_write_offsets[num_reqs + 1 :] = 0
    out_write_seed_slot_indices[:num_reqs] = torch.where(seeded, seeds, -1)
    out_verify_num_valid.fill_(min(demand, verify_capacity))
    out_verify_enable.fill_(1 if overflow_rotate or demand <= verify_capacity else 0)
    out_write_num_valid_reqs.fill_(num_reqs)


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
    """Both halves of a plan: everything is read and checked before anything is stored. The scratch is left alone."""
    batch, prefixes = _scan(
        req_pool_indices,
        prefix_lens,
        req_to_token,
        full_to_swa_index_mapping,
        swa_window_size,
        req_to_verify_expected_tokens,
        req_to_verify_expected_tokens_valid_lens,
        kv_token_id_vs_position_offset,
    )
    demand, capacity = check_entries(batch), out_verify_slot_indices.shape[0]
    if overflow_rotate or demand <= capacity:
        outs = (
            out_verify_slot_indices,
            out_verify_expected_tokens,
            out_verify_expected_positions,
            out_verify_prev_slot_indices,
        )
        store_entries(batch, demand, outs, rotate_cursor)
    _store_offsets(
        batch,
        prefixes,
        extend_seq_lens,
        demand,
        out_write_offsets,
        out_write_seed_slot_indices,
        out_verify_num_valid,
        out_verify_enable,
        out_write_num_valid_reqs,
        capacity,
        overflow_rotate,
    )


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
    """The first half of a plan. Arguments as `launch_plan_offsets_kernel` checks them."""
    batch, prefixes = _scan(req_pool_indices, prefix_lens, req_to_token, full_to_swa_index_mapping, swa_window_size)
    demand = check_entries(batch)
    out_verify_offsets_scratch[: batch.offsets.shape[0]] = batch.offsets
    _store_offsets(
        batch,
        prefixes,
        extend_seq_lens,
        demand,
        out_write_offsets,
        out_write_seed_slot_indices,
        out_verify_num_valid,
        out_verify_enable,
        out_write_num_valid_reqs,
        verify_capacity,
        overflow_rotate,
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
    """The second half of a plan. Arguments as `launch_plan_entries_kernel` checks them."""
    if not verify_enable.item():
        return
    offsets = verify_offsets_scratch[: req_pool_indices.shape[0] + 1]
    if int(offsets[0]) != 0 or bool((offsets.diff() < 0).any()):
        raise offsets_refusal("must rise from 0")
    batch = Batch(
        req_pool_indices,
        _starts(prefix_lens.clamp(min=0), swa_window_size),
        offsets,
        req_to_token,
        full_to_swa_index_mapping,
        req_to_verify_expected_tokens,
        req_to_verify_expected_tokens_valid_lens,
        kv_token_id_vs_position_offset,
    )
    demand, capacity = int(offsets[-1]), out_verify_slot_indices.shape[0]
    if demand > capacity and rotate_cursor is None:
        raise offsets_refusal(f"holds {demand} entries, more than the capacity of {capacity}, yet is enabled")
    check_entries(batch)
    outs = (
        out_verify_slot_indices,
        out_verify_expected_tokens,
        out_verify_expected_positions,
        out_verify_prev_slot_indices,
    )
    store_entries(batch, demand, outs, rotate_cursor)
