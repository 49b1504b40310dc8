"""Plan on the host: prefix sums over the batch, then each request's row copied into the entries."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..layout import PADDING_REQ_POOL_IDX
from .host_arrays import CHUNK, I64, array
from .refusals import (
    map_refusal,
    offsets_refusal,
    prefix_refusal,
    row_refusal,
    token_row_refusal,
    token_width_refusal,
)

_COPY_MIN_MEAN: Final = 48
"""Mean entries per request from which one slice copy per request (about 1 µs) beats a gather (about 10 ns an entry)."""


class _Table:
    """Rows of slots, and the map to SWA slots if there is one."""

    def __init__(self, req_to_token: Tensor, mapping: Tensor | None) -> None:
        table: NDArray[np.int32] = array(req_to_token)
        self.num_rows, self.width = table.shape
        self.flat = table.reshape(-1)
        self.map: I64 | None = None if mapping is None else array(mapping)

    def translate(self, slots: I64) -> None:
        """Map slots in place; negative ones pass through."""
        if self.map is None or not len(slots):
            return
        negative = slots < 0
        if negative.any():
            np.copyto(slots, self.map.take(np.maximum(slots, 0), mode="clip"), where=~negative)
        else:
            slots[:] = self.map.take(slots, mode="clip")

    def at(self, rows: I64, positions: I64) -> I64:
        """Raw slots at (row, position) pairs, -1 at position -1."""
        slots = np.full(len(rows), -1, dtype=np.int64)
        inside = positions >= 0
        slots[inside] = self.flat[rows[inside] * self.width + positions[inside]]
        return slots


class _Tokens:
    """The pool of expected tokens, and how much of each request's row counts."""

    def __init__(self, pool: Tensor, valid_lens: Tensor, offset: int) -> None:
        table: NDArray[np.int32] = array(pool)
        self.num_rows, self.width = table.shape
        self.flat = table.reshape(-1)
        self.valid_lens: I64 = array(valid_lens)
        self.offset = offset


class _Entries:
    """The verify entries of a batch, by flat index: request after request, position after position."""

    def __init__(self, table: _Table, rows: I64, starts: I64, offsets: I64, tokens: _Tokens | None) -> None:
        self._table, self._tokens = table, tokens
        self.demand = int(offsets[-1])
        counts = np.diff(offsets)
        self._req = np.flatnonzero(counts)
        self._row, self._start = rows[self._req], starts[self._req]
        self._first, self._count = offsets[self._req], counts[self._req]
        self._last = self._first + self._count
        self._copy = self.demand >= _COPY_MIN_MEAN * len(self._req)
        self._base = self._row * table.width + self._start - self._first  # flat entry + base = place in the table

    def check(self) -> None:
        """Refuse rows and tokens outside their tables, and slots outside the map (which means reading every slot)."""
        if not len(self._req):
            return
        table, ends = self._table, self._start + self._count
        outside = (self._row < 0) | (self._row >= table.num_rows)
        if outside.any():
            i = int(outside.argmax())
            raise row_refusal(int(self._req[i]), int(self._row[i]), table.num_rows)
        if int(ends.max()) > table.width:
            i = int((ends > table.width).argmax())
            raise prefix_refusal(int(self._req[i]), int(ends[i]), table.width)
        if self._tokens is not None:
            self._check_tokens(self._tokens, ends)
        if table.map is not None:
            self._check_map(len(table.map))

    def _check_tokens(self, tokens: _Tokens, ends: I64) -> None:
        lo = np.maximum(self._start + tokens.offset, 0)
        hi = np.minimum(ends + tokens.offset, tokens.valid_lens[self._req])
        wanted = lo < hi
        outside = wanted & (self._row >= tokens.num_rows)
        if outside.any():
            i = int(outside.argmax())
            raise token_row_refusal(int(self._req[i]), int(self._row[i]), tokens.num_rows)
        too_far = wanted & (hi > tokens.width)
        if too_far.any():
            i = int(too_far.argmax())
            raise token_width_refusal(int(self._req[i]), int(hi[i]), tokens.width)

    def _check_map(self, map_len: int) -> None:
        heads = self._table.at(self._row, self._start - 1)
        fine = int(heads.max()) < map_len
        raw = np.empty(min(CHUNK, self.demand), dtype=np.int64)
        for lo in range(0, self.demand, CHUNK):
            part = raw[: min(CHUNK, self.demand - lo)]
            self._gather(lo, lo + len(part), part, None)
            if int(part.max()) >= map_len or not fine:
                self._refuse_map(heads, map_len)

    def _refuse_map(self, heads: I64, map_len: int) -> None:
        for i, head in enumerate(heads.tolist()):
            raw = np.empty(self._count[i], dtype=np.int64)
            self._gather(int(self._first[i]), int(self._last[i]), raw, None)
            for slot in (int(raw[0]), head, *raw[1:].tolist()):  # the order in which entries name slots
                if slot >= map_len:
                    raise map_refusal(slot, map_len)

    def _touched(self, lo: int, hi: int) -> slice:
        """The requests that own the entries [lo, hi)."""
        if lo == 0 and hi == self.demand:
            return slice(0, len(self._req))
        first = int(np.searchsorted(self._last, lo, side="right"))
        return slice(first, int(np.searchsorted(self._first, hi, side="left")))

    def _gather(self, lo: int, hi: int, slots: I64, positions: I64 | None) -> None:
        """Raw slots (and positions) of the entries [lo, hi)."""
        reqs = self._touched(lo, hi)
        first, last = self._first[reqs], self._last[reqs]
        flat = self._table.flat
        if self._copy:
            steps = _steps(int(self._count[reqs].max()))
            rows = zip(
                first.tolist(), last.tolist(), self._base[reqs].tolist(), self._start[reqs].tolist(), strict=True
            )
            for begin, end, base, start in rows:
                a, b = max(begin, lo), min(end, hi)
                slots[a - lo : b - lo] = flat[a + base : b + base]
                if positions is not None:
                    np.add(steps[a - begin : b - begin], start, positions[a - lo : b - lo])
            return
        counts = np.minimum(last, hi) - np.maximum(first, lo)
        entry = np.arange(lo, hi)
        slots[:] = flat.take(np.repeat(self._base[reqs], counts) + entry)
        if positions is not None:
            np.add(np.repeat(self._start[reqs] - first, counts), entry, positions)

    def store(self, lo: int, hi: int, slots: I64, tokens: I64, positions: I64, prev_slots: I64) -> None:
        """Store the entries [lo, hi); the outputs are as long."""
        if lo >= hi:
            return
        table = self._table
        self._gather(lo, hi, slots, positions)
        for a in range(0, hi - lo, CHUNK):
            table.translate(slots[a : a + CHUNK])
        prev_slots[1:] = slots[:-1]
        # A request's first entry, and the first one stored, have their predecessor elsewhere.
        reqs = self._touched(lo, hi)
        places = np.maximum(self._first[reqs], lo)
        heads = table.at(self._row[reqs], self._start[reqs] + places - self._first[reqs] - 1)
        table.translate(heads)
        prev_slots[places - lo] = heads
        tokens.fill(-1)
        if self._tokens is not None:
            self._store_tokens(self._tokens, lo, hi, tokens)

    def _store_tokens(self, pool: _Tokens, lo: int, hi: int, tokens: I64) -> None:
        reqs = self._touched(lo, hi)
        first, last, start, row = self._first[reqs], self._last[reqs], self._start[reqs], self._row[reqs]
        shift = first - start  # position + shift = flat entry
        # Entries whose token is known: those at positions [-offset, valid_len - offset).
        begin = np.maximum(np.maximum(first, lo), shift - pool.offset)
        end = np.minimum(np.minimum(last, hi), pool.valid_lens[self._req[reqs]] - pool.offset + shift)
        base = row * pool.width + pool.offset - shift
        known = begin < end
        begin, end, base = begin[known], end[known], base[known]
        if self._copy:
            for a, b, c in zip(begin.tolist(), end.tolist(), base.tolist(), strict=True):
                tokens[a - lo : b - lo] = pool.flat[a + c : b + c]
            return
        counts = end - begin
        place = np.arange(int(counts.sum())) + np.repeat(begin - np.cumsum(counts) + counts, counts)
        tokens[place - lo] = pool.flat.take(place + np.repeat(base, counts))


_step_cache: I64 = np.arange(CHUNK)


def _steps(length: int) -> I64:
    """[>= length] 0, 1, 2, …; read only."""
    global _step_cache
    if len(_step_cache) < length:
        _step_cache = np.arange(2 * length)
    return _step_cache


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
        table: _Table,
        swa_window_size: int,
    ) -> None:
        self.rows: I64 = array(req_pool_indices)
        self.num_reqs = len(self.rows)
        active = self.rows != PADDING_REQ_POOL_IDX
        prefixes = np.maximum(array(prefix_lens), 0) * active
        extends = np.maximum(array(extend_seq_lens), 0) * active
        if self.num_reqs and int(prefixes.max()) > table.width:
            req = int((prefixes > table.width).argmax())
            raise prefix_refusal(req, int(prefixes[req]), table.width)
        self.starts = _starts(prefixes, swa_window_size)
        self.verify_offsets = _exclusive_sum(prefixes - self.starts)
        self.write_offsets = _exclusive_sum(extends)
        self.demand = int(self.verify_offsets[-1])
        seeded = np.flatnonzero((extends > 0) & (prefixes > 0))
        self._seeded, self._seed_rows, self._seed_positions = seeded, self.rows[seeded], prefixes[seeded] - 1

    def seeds(self, table: _Table) -> I64:
        """[num_reqs] slot before each request's first token, -1 where there is none. The rows have been checked."""
        seeds = np.full(self.num_reqs, -1, dtype=np.int64)
        slots = table.at(self._seed_rows, self._seed_positions)
        table.translate(slots)
        seeds[self._seeded] = slots
        return seeds


def _exclusive_sum(lengths: I64) -> I64:
    sums = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=sums[1:])
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


def _store_entries(entries: _Entries, outs: list[Tensor], rotate_cursor: Tensor | None) -> None:
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
    table = _Table(req_to_token, full_to_swa_index_mapping)
    offsets = _Offsets(
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        extend_seq_lens=extend_seq_lens,
        table=table,
        swa_window_size=swa_window_size,
    )
    tokens = _tokens(
        req_to_verify_expected_tokens, req_to_verify_expected_tokens_valid_lens, kv_token_id_vs_position_offset
    )
    entries = _Entries(table, offsets.rows, offsets.starts, offsets.verify_offsets, tokens)
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


def _tokens(pool: Tensor | None, valid_lens: Tensor | None, offset: int) -> _Tokens | None:
    return None if pool is None or valid_lens is None else _Tokens(pool, valid_lens, offset)


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
    table = _Table(req_to_token, full_to_swa_index_mapping)
    offsets = _Offsets(
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        extend_seq_lens=extend_seq_lens,
        table=table,
        swa_window_size=swa_window_size,
    )
    _Entries(table, offsets.rows, offsets.starts, offsets.verify_offsets, None).check()
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
    table = _Table(req_to_token, full_to_swa_index_mapping)
    entries = _Entries(table, rows, _starts(prefixes, swa_window_size), offsets, tokens)
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
