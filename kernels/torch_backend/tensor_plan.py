"""Plan through torch's operations, on any device: every entry finds its request by binary search."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import PADDING_REQ_POOL_IDX
from .refusals import (
    map_refusal,
    offsets_refusal,
    prefix_refusal,
    row_refusal,
    token_row_refusal,
    token_width_refusal,
)


class _Batch(NamedTuple):
    """A batch's rows and, per request, where its entries start: in the row and among all entries."""

    rows: Tensor  # [bs] int64
    starts: Tensor  # [bs] int64
    offsets: Tensor  # [bs + 1] int64
    table: Tensor  # [max_reqs, width] int32
    mapping: Tensor | None
    pool: Tensor | None
    valid_lens: Tensor | None
    token_offset: int

    def translate(self, slots: Tensor) -> Tensor:
        """SWA slots; negative ones pass through."""
        if self.mapping is None:
            return slots
        return torch.where(slots < 0, slots, self.mapping[slots.clamp(0, self.mapping.shape[0] - 1)])

    def raw_slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Slots of the full pool at (row, position) pairs, -1 at position -1."""
        if self.table.numel() == 0:
            return torch.full_like(rows, -1)
        slots = self.table[rows, positions.clamp(min=0)].to(torch.int64)
        return torch.where(positions < 0, -1, slots)

    def entries(self, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """(owning request, position) of the entries [lo, hi)."""
        flat = torch.arange(lo, hi, device=self.rows.device)
        owner = torch.searchsorted(self.offsets[1:], flat, right=True)
        return owner, self.starts[owner] + flat - self.offsets[owner]


def _first(bad: Tensor) -> int | None:
    """Index of the first True."""
    return int(bad.to(torch.int32).argmax()) if bool(bad.any()) else None


def _check(batch: _Batch) -> int:
    """The demand, after refusing rows, prefixes, slots and tokens outside their tables."""
    demand = int(batch.offsets[-1])
    if demand == 0:
        return 0
    counts = batch.offsets.diff()
    live, ends = counts > 0, batch.starts + counts
    num_rows, width = batch.table.shape
    req = _first(live & ((batch.rows < 0) | (batch.rows >= num_rows)))
    if req is not None:
        raise row_refusal(req, int(batch.rows[req]), num_rows)
    req = _first(live & (ends > width))
    if req is not None:
        raise prefix_refusal(req, int(ends[req]), width)
    if batch.pool is not None and batch.valid_lens is not None:
        lo = (batch.starts + batch.token_offset).clamp(min=0)
        hi = torch.minimum(ends + batch.token_offset, batch.valid_lens)
        wanted = live & (lo < hi)
        req = _first(wanted & (batch.rows >= batch.pool.shape[0]))
        if req is not None:
            raise token_row_refusal(req, int(batch.rows[req]), batch.pool.shape[0])
        req = _first(wanted & (hi > batch.pool.shape[1]))
        if req is not None:
            raise token_width_refusal(req, int(hi[req]), batch.pool.shape[1])
    if batch.mapping is not None:
        owner, positions = batch.entries(0, demand)
        rows = batch.rows[owner]
        # In the order in which entries name slots: each its own, then its predecessor's.
        named = torch.stack((batch.raw_slots(rows, positions), batch.raw_slots(rows, positions - 1)), dim=1).flatten()
        place = _first(named >= batch.mapping.shape[0])
        if place is not None:
            raise map_refusal(int(named[place]), batch.mapping.shape[0])
    return demand


def _exclusive_sum(lengths: Tensor) -> Tensor:
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))


def _starts(prefixes: Tensor, window: int) -> Tensor:
    return (prefixes - window).clamp(min=0) if window > 0 else torch.zeros_like(prefixes)


def _store_entries(
    batch: _Batch, demand: int, outs: tuple[Tensor, Tensor, Tensor, Tensor], cursor: Tensor | None
) -> None:
    capacity = outs[0].shape[0]
    if demand <= capacity:
        _store_range(batch, 0, demand, outs)
        return
    assert cursor is not None
    lo = int(cursor) % demand
    to_end = min(capacity, demand - lo)
    _store_range(batch, lo, lo + to_end, outs)
    slots, tokens, positions, prev_slots = (out[to_end:] for out in outs)
    _store_range(batch, 0, capacity - to_end, (slots, tokens, positions, prev_slots))
    cursor.fill_((lo + capacity) % demand)


def _store_range(batch: _Batch, lo: int, hi: int, outs: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    if lo >= hi:
        return
    owner, positions = batch.entries(lo, hi)
    rows = batch.rows[owner]
    tokens = torch.full_like(positions, -1)
    if batch.pool is not None and batch.valid_lens is not None:
        place = positions + batch.token_offset
        known = (place >= 0) & (place < batch.valid_lens[owner])
        tokens[known] = batch.pool[rows[known], place[known]].to(torch.int64)
    slots = batch.translate(batch.raw_slots(rows, positions))
    prev_slots = batch.translate(batch.raw_slots(rows, positions - 1))
    for out, values in zip(outs, (slots, tokens, positions, prev_slots), strict=True):
        out[: hi - lo] = values


def _scan(
    req_pool_indices: Tensor,
    prefix_lens: Tensor,
    req_to_token: Tensor,
    full_to_swa_index_mapping: Tensor | None,
    swa_window_size: int,
    pool: Tensor | None = None,
    valid_lens: Tensor | None = None,
    token_offset: int = 0,
) -> tuple[_Batch, Tensor]:
    """The batch, and its prefixes with padding rows at 0."""
    prefixes = torch.where(req_pool_indices != PADDING_REQ_POOL_IDX, prefix_lens, 0).clamp(min=0)
    width = req_to_token.shape[1]
    req = _first(prefixes > width)  # before the sum, which absurd lengths would wrap
    if req is not None:
        raise prefix_refusal(req, int(prefixes[req]), width)
    starts = _starts(prefixes, swa_window_size)
    offsets = _exclusive_sum(prefixes - starts)
    batch = _Batch(
        req_pool_indices, starts, offsets, req_to_token, full_to_swa_index_mapping, pool, valid_lens, token_offset
    )
    return batch, prefixes


def _store_offsets(
    batch: _Batch,
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
    demand, capacity = _check(batch), out_verify_slot_indices.shape[0]
    if overflow_rotate or demand <= capacity:
        outs = (
            out_verify_slot_indices,
            out_verify_expected_tokens,
            out_verify_expected_positions,
            out_verify_prev_slot_indices,
        )
        _store_entries(batch, demand, outs, rotate_cursor)
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
    demand = _check(batch)
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
    batch = _Batch(
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
    _check(batch)
    outs = (
        out_verify_slot_indices,
        out_verify_expected_tokens,
        out_verify_expected_positions,
        out_verify_prev_slot_indices,
    )
    _store_entries(batch, demand, outs, rotate_cursor)
