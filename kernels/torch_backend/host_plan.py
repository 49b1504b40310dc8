"""Plan on the host: prefix sums over the batch, then each request's row copied into the entries."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ..layout import PADDING_REQ_POOL_IDX
from .host_arrays import I64, array
from .host_entries import Entries, Table, Tokens
from .refusals import offsets_refusal


def _starts(prefix_lens: I64, window: int) -> I64:
    return np.maximum(prefix_lens - window, 0) if window > 0 else np.zeros_like(prefix_lens)


class _Offsets:
    """Prefix sums, seeds and totals of a batch, before any of it is stored."""

    def __init__(
        self,
        *,
        req_pool_indices: Tensor,
        prefix_lens: Tensor,
        extend_seq_lens: Tensor,
        swa_window_size: int,
    ) -> None:
        self.rows: I64 = array(req_pool_indices)
        self.num_reqs = len(self.rows)
        active = self.rows != PADDING_REQ_POOL_IDX
        prefixes = np.maximum(array(prefix_lens), 0) * active
        extends = np.maximum(array(extend_seq_lens), 0) * active
        self.starts = _starts(prefixes, swa_window_size)
        self.verify_offsets = _exclusive_sum(prefixes - self.starts)
        self.write_offsets = _exclusive_sum(extends)
        self.demand = int(self.verify_offsets[-1])
        seeded = ((extends > 0) & (prefixes > 0)).nonzero()[0]
        self._seeded, self._seed_rows, self._seed_positions = seeded, self.rows[seeded], prefixes[seeded] - 1

    def seeds(self, table: Table) -> I64:
        """[num_reqs] slot before each request's first token, -1 where there is none. The rows have been checked."""
        seeds = np.full(self.num_reqs, -1, dtype=np.int64)
        slots = table.at(self._seed_rows, self._seed_positions)
        table.translate(slots)
        seeds[self._seeded] = slots
        return seeds


def _exclusive_sum(lengths: I64) -> I64:
    sums = np.zeros(len(lengths) + 1, dtype=np.int64)
    lengths.cumsum(out=sums[1:])
    return sums


def _store_offsets(
    offsets: _Offsets,
    seeds: I64,
    out_write_offsets: Tensor,
    out_write_seed_slot_indices: Tensor,
    out_verify_num_valid: Tensor,
    out_verify_enable: Tensor,
    out_write_num_valid_reqs: Tensor,
    verify_capacity: int,
    overflow_rotate: bool,
) -> None:
    num_reqs, overflow = offsets.num_reqs, offsets.demand > verify_capacity
    write_offsets = array(out_write_offsets)
    write_offsets[: num_reqs + 1] = offsets.write_offsets
    write_offsets[num_reqs + 1 :] = 0
    array(out_write_seed_slot_indices)[:num_reqs] = seeds
    array(out_verify_num_valid)[0] = verify_capacity if overflow else offsets.demand
    array(out_verify_enable)[0] = 0 if overflow and not overflow_rotate else 1
    array(out_write_num_valid_reqs)[0] = num_reqs


def _store_entries(entries: Entries, outs: list[Tensor], rotate_cursor: Tensor | None) -> None:
    """Store all entries, or on overflow the window that the cursor says."""
    slots, tokens, positions, prev_slots = (array(out) for out in outs)
    capacity, demand = len(slots), entries.demand
    if demand <= capacity:
        entries.store(0, demand, slots[:demand], tokens[:demand], positions[:demand], prev_slots[:demand])
        return
    assert rotate_cursor is not None
    cursor = array(rotate_cursor)
    lo = int(cursor[0]) % demand
    to_end = min(capacity, demand - lo)
    entries.store(lo, lo + to_end, slots[:to_end], tokens[:to_end], positions[:to_end], prev_slots[:to_end])
    wrapped = capacity - to_end
    entries.store(0, wrapped, slots[to_end:], tokens[to_end:], positions[to_end:], prev_slots[to_end:])
    cursor[0] = (lo + capacity) % demand


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
    table = Table(req_to_token, full_to_swa_index_mapping)
    offsets = _Offsets(
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        extend_seq_lens=extend_seq_lens,
        swa_window_size=swa_window_size,
    )
    tokens = _tokens(
        req_to_verify_expected_tokens, req_to_verify_expected_tokens_valid_lens, kv_token_id_vs_position_offset
    )
    entries = Entries(table, offsets.rows, offsets.starts, offsets.verify_offsets, tokens)
    entries.check()
    seeds = offsets.seeds(table)
    capacity = out_verify_slot_indices.shape[0]
    if overflow_rotate or offsets.demand <= capacity:
        outs = [
            out_verify_slot_indices,
            out_verify_expected_tokens,
            out_verify_expected_positions,
            out_verify_prev_slot_indices,
        ]
        _store_entries(entries, outs, rotate_cursor)
    _store_offsets(
        offsets,
        seeds,
        out_write_offsets,
        out_write_seed_slot_indices,
        out_verify_num_valid,
        out_verify_enable,
        out_write_num_valid_reqs,
        capacity,
        overflow_rotate,
    )


def _tokens(pool: Tensor | None, valid_lens: Tensor | None, offset: int) -> Tokens | None:
    return None if pool is None or valid_lens is None else Tokens(pool, valid_lens, offset)


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
    table = Table(req_to_token, full_to_swa_index_mapping)
    offsets = _Offsets(
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        extend_seq_lens=extend_seq_lens,
        swa_window_size=swa_window_size,
    )
    Entries(table, offsets.rows, offsets.starts, offsets.verify_offsets, None).check()
    seeds = offsets.seeds(table)
    array(out_verify_offsets_scratch)[: offsets.num_reqs + 1] = offsets.verify_offsets
    _store_offsets(
        offsets,
        seeds,
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
    rows: I64 = array(req_pool_indices)
    offsets: I64 = array(verify_offsets_scratch)[: len(rows) + 1]
    if offsets[0] != 0 or (np.diff(offsets) < 0).any():
        raise offsets_refusal("must rise from 0")
    prefixes = np.maximum(array(prefix_lens), 0)
    tokens = _tokens(
        req_to_verify_expected_tokens, req_to_verify_expected_tokens_valid_lens, kv_token_id_vs_position_offset
    )
    table = Table(req_to_token, full_to_swa_index_mapping)
    entries = Entries(table, rows, _starts(prefixes, swa_window_size), offsets, tokens)
    capacity = out_verify_slot_indices.shape[0]
    if entries.demand > capacity and rotate_cursor is None:
        raise offsets_refusal(f"holds {entries.demand} entries, more than the capacity of {capacity}, yet is enabled")
    entries.check()
    outs = [
        out_verify_slot_indices,
        out_verify_expected_tokens,
        out_verify_expected_positions,
        out_verify_prev_slot_indices,
    ]
    _store_entries(entries, outs, rotate_cursor)
