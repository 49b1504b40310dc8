"""Plan kernels: scan the batch into offsets, then gather one verify entry per cached position.

One kernel body serves three launches: offsets alone, entries alone, and both fused. Fused, every program scans the
batch for itself (a few kilobytes from L2), which costs less than a second launch that waits for the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from ..layout import DUMMY_SLOT, PADDING_REQ_POOL_IDX
from .device import INTERPRETED, num_multiprocessors, skipped_entries
from .launch import launch

if TYPE_CHECKING:
    from torch import Tensor

_PADDING: tl.constexpr = tl.constexpr(PADDING_REQ_POOL_IDX)
_DUMMY_SLOT: tl.constexpr = tl.constexpr(DUMMY_SLOT)
_MAX_LEN: tl.constexpr = tl.constexpr(2**48)
"""Lengths are clamped here before they are summed, so that 4096 absurd ones overflow the plan and never wrap int64."""

_MIN_BLOCK: Final = 16
_PAST_ANY_ENTRY: tl.constexpr = tl.constexpr(2**62)

_SMALL_BLOCK: Final = 16 if INTERPRETED else 256
_BLOCK: Final = 64 if INTERPRETED else 1024
_PROGRAMS_PER_SM: Final = 2
_REGISTER_MAX_REQS: Final = 4096
"""Up to here every program holds the scan of the whole batch in registers; past it, it searches the stored one."""


@triton.jit
def _window_start(prefix_len, window):
    windowed = (window > 0) & (prefix_len > window)
    return tl.where(windowed, prefix_len - window, 0)


@triton.jit
def _translate(slot, mask, map_ptr, map_len):
    """SWA translation: negative slots pass through, slots past the map read its last entry."""
    known = mask & (slot >= 0)
    return tl.where(known, tl.load(map_ptr + tl.minimum(slot, map_len - 1), mask=known, other=0), slot)


@triton.jit
def _count_skipped(skipped_ptr, num_skipped):
    if num_skipped > 0:
        tl.atomic_add(skipped_ptr, num_skipped.to(tl.int64), sem="relaxed")


@triton.jit
def _store_write_plan(
    row,  # [BLOCK_REQS] int64: req_pool_indices
    prefix_len,  # [BLOCK_REQS] int64
    extend_len,  # [BLOCK_REQS] int64: 0 for padding rows
    req,  # [BLOCK_REQS] int32
    req_to_token_ptr,
    map_ptr,
    write_offsets_ptr,
    seeds_ptr,
    num_valid_reqs_ptr,
    skipped_ptr,
    num_reqs,
    num_rows,
    row_width,
    row_stride,
    map_len,
    write_offsets_len,
    HAS_MAP: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
):
    """Store write offsets (the tail zeroed), seeds and the number of requests."""
    in_batch = req < num_reqs
    ends = tl.cumsum(extend_len, axis=0)
    tl.store(write_offsets_ptr, tl.zeros([], tl.int64))
    tl.store(write_offsets_ptr + 1 + req, ends, mask=in_batch)
    for first in range(0, write_offsets_len, BLOCK_REQS):
        tail = first + req
        zero = tl.zeros_like(ends)
        tl.store(write_offsets_ptr + tail, zero, mask=(tail > num_reqs) & (tail < write_offsets_len))

    wants_seed = (extend_len > 0) & (prefix_len > 0)
    readable = wants_seed & (row >= 0) & (row < num_rows) & (prefix_len <= row_width)
    seed = tl.load(req_to_token_ptr + row * row_stride + (prefix_len - 1), mask=readable, other=-1).to(tl.int64)
    skipped = wants_seed & ~readable
    if HAS_MAP:
        skipped = skipped | (readable & (seed >= map_len))
        seed = _translate(seed, readable, map_ptr, map_len)
    tl.store(seeds_ptr + req, seed, mask=in_batch)
    tl.store(num_valid_reqs_ptr, num_reqs)
    _count_skipped(skipped_ptr, tl.sum(skipped.to(tl.int32), axis=0))


@triton.jit
def _gather_entries(
    place,  # [BLOCK] int64: where the entries are stored
    position,  # [BLOCK] int64
    live,  # [BLOCK] bool
    row,  # [BLOCK] int64, or one for all, and so pool_len
    pool_len,
    req_to_token_ptr,
    map_ptr,
    pool_ptr,
    slots_ptr,
    tokens_ptr,
    positions_ptr,
    prev_slots_ptr,
    num_rows,
    row_width,
    row_stride,
    map_len,
    pool_rows,
    pool_width,
    pool_stride,
    token_offset,
    HAS_MAP: tl.constexpr,
    HAS_POOL: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
):
    """Gather and store a block of entries, all of them if FULL. Returns how many had to be skipped, int32."""
    # Folded into one limit, which is one value where the row is: broadcasting masks would cost a register each.
    row_end = tl.where((row >= 0) & (row < num_rows), row_width, 0)
    readable = live & (position < row_end)
    token_ptr = req_to_token_ptr + row * row_stride + position
    slot = tl.load(token_ptr, mask=readable, other=_DUMMY_SLOT).to(tl.int64)
    prev_slot = tl.load(token_ptr - 1, mask=readable & (position > 0), other=-1).to(tl.int64)
    skipped = live & ~readable
    if HAS_MAP:
        skipped = skipped | (readable & ((slot >= map_len) | (prev_slot >= map_len)))
        slot = _translate(slot, readable, map_ptr, map_len)
        prev_slot = _translate(prev_slot, readable, map_ptr, map_len)
    expected = tl.full([BLOCK], -1, tl.int64)
    if HAS_POOL:
        pool_pos = position + token_offset
        wanted = readable & (pool_pos >= 0) & (pool_pos < pool_len)
        known = wanted & (pool_pos < tl.where(row < pool_rows, pool_width, 0))
        expected = tl.load(pool_ptr + row * pool_stride + pool_pos, mask=known, other=-1).to(tl.int64)
        skipped = skipped | (wanted & ~known)
    if FULL:
        # Without a mask two words store as one.
        tl.store(slots_ptr + place, slot)
        tl.store(tokens_ptr + place, expected)
        tl.store(positions_ptr + place, position)
        tl.store(prev_slots_ptr + place, prev_slot)
    else:
        tl.store(slots_ptr + place, slot, mask=live)
        tl.store(tokens_ptr + place, expected, mask=live)
        tl.store(positions_ptr + place, position, mask=live)
        tl.store(prev_slots_ptr + place, prev_slot, mask=live)
    return tl.sum(skipped.to(tl.int32), axis=0)


@triton.jit
def _store_entries(
    rank,  # this program's place among those that store entries; below 0 it stores none
    num_ranks,
    num_stored,
    demand,
    cursor,
    ends,  # [BLOCK_REQS] int64: the entries up to each request's last, unless SEARCH
    req,  # [BLOCK_REQS] int32
    req_pool_indices_ptr,
    prefix_lens_ptr,
    req_to_token_ptr,
    map_ptr,
    pool_ptr,
    pool_lens_ptr,
    offsets_ptr,
    slots_ptr,
    tokens_ptr,
    positions_ptr,
    prev_slots_ptr,
    num_reqs,
    num_rows,
    row_width,
    row_stride,
    map_len,
    pool_rows,
    pool_width,
    pool_stride,
    token_offset,
    window,
    ROTATE: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_POOL: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
    SEARCH: tl.constexpr,
    SEARCH_LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the entries in blocks, every `num_ranks`-th block here. Returns how many had to be skipped, int32."""
    num_skipped = tl.zeros([], tl.int32)
    first = tl.where(rank < 0, num_stored, rank.to(tl.int64) * BLOCK)
    step = num_ranks.to(tl.int64) * BLOCK
    for start in range(first, num_stored, step):
        place = start + tl.arange(0, BLOCK)
        live = place < num_stored
        is_whole = False
        owner = tl.zeros([], tl.int32)
        if not SEARCH:
            # Requests that end up to the block's start, and before its end, counted in one reduction.
            ended = (ends <= start).to(tl.int32) + ((ends < start + BLOCK).to(tl.int32) << 16)
            num_ended = tl.sum(ended, axis=0)
            owner = num_ended & 0xFFFF
            is_whole = (start + BLOCK <= num_stored) & (owner == num_ended >> 16)
        if is_whole:
            # Long prefixes fill whole blocks: one request owns all of it, and nothing has to be searched.
            one_prefix = tl.load(prefix_lens_ptr + owner)
            one_pool_len = tl.zeros([], tl.int64)
            if HAS_POOL:
                one_pool_len = tl.load(pool_lens_ptr + owner)
            one_begin = tl.max(tl.where(ends <= start, ends, 0), axis=0)
            num_skipped += _gather_entries(
                place,
                _window_start(one_prefix, window) - one_begin + place,
                live,
                tl.load(req_pool_indices_ptr + owner),
                one_pool_len,
                req_to_token_ptr,
                map_ptr,
                pool_ptr,
                slots_ptr,
                tokens_ptr,
                positions_ptr,
                prev_slots_ptr,
                num_rows,
                row_width,
                row_stride,
                map_len,
                pool_rows,
                pool_width,
                pool_stride,
                token_offset,
                HAS_MAP,
                HAS_POOL,
                BLOCK,
                True,
            )
        else:
            entry = place
            if ROTATE:
                entry = place + cursor
                entry = tl.where(entry >= demand, entry - demand, entry)
            if SEARCH:
                # The owner is the last request that starts at or before the entry.
                owners = tl.zeros([BLOCK], tl.int32)
                for level in tl.static_range(SEARCH_LEVELS):
                    later = owners + (BLOCK_REQS >> (level + 1))
                    reached = live & (later < num_reqs)
                    begins = tl.load(offsets_ptr + later, mask=reached, other=0)
                    owners = tl.where(reached & (begins <= entry), later, owners)
            else:
                # Count the requests that end at each entry and sum up, instead of searching entry by entry.
                ends_here = (req < num_reqs) & (ends > start) & (ends < start + BLOCK)
                counts = tl.histogram((ends - start).to(tl.int32), BLOCK, mask=ends_here)
                owners = owner + tl.cumsum(counts, axis=0)
            prefixes = tl.load(prefix_lens_ptr + owners, mask=live, other=0)
            pool_lens = tl.zeros([BLOCK], tl.int64)
            if HAS_POOL:
                pool_lens = tl.load(pool_lens_ptr + owners, mask=live, other=0)
            begins = tl.load(offsets_ptr + owners, mask=live, other=0)
            num_skipped += _gather_entries(
                place,
                _window_start(prefixes, window) + (entry - begins),
                live,
                tl.load(req_pool_indices_ptr + owners, mask=live, other=0),
                pool_lens,
                req_to_token_ptr,
                map_ptr,
                pool_ptr,
                slots_ptr,
                tokens_ptr,
                positions_ptr,
                prev_slots_ptr,
                num_rows,
                row_width,
                row_stride,
                map_len,
                pool_rows,
                pool_width,
                pool_stride,
                token_offset,
                HAS_MAP,
                HAS_POOL,
                BLOCK,
                False,
            )
    return num_skipped


_SIZES: Final = [
    "num_reqs",
    "num_rows",
    "row_width",
    "row_stride",
    "map_len",
    "pool_rows",
    "pool_width",
    "pool_stride",
    "token_offset",
    "window",
    "capacity",
    "write_offsets_len",
]
"""Not specialised on: a size that is 1 or a multiple of 16 must not compile anew in the middle of traffic."""


@triton.jit(do_not_specialize=_SIZES)
def _plan_kernel(
    req_pool_indices_ptr,  # [num_reqs] int64
    prefix_lens_ptr,  # [num_reqs] int64
    extend_lens_ptr,  # [num_reqs] int64
    req_to_token_ptr,  # [num_rows, row_width] int32, rows row_stride apart
    map_ptr,  # [map_len] int64, full slot -> SWA slot
    pool_ptr,  # [pool_rows, pool_width] int32, expected tokens, rows pool_stride apart
    pool_lens_ptr,  # [num_reqs] int64
    cursor_ptr,  # [1] int64, where a rotating window starts
    offsets_ptr,  # [>= num_reqs + 1] int64: starts of the requests' entries, then the demand; out if OFFSETS
    write_offsets_ptr,  # [write_offsets_len] int64, out
    seeds_ptr,  # [write_offsets_len - 1] int64, out
    num_valid_ptr,  # [1] int32, out
    enable_ptr,  # [1] int32, out if OFFSETS
    num_valid_reqs_ptr,  # [1] int32, out
    slots_ptr,  # [capacity] int64, out, and so the next three
    tokens_ptr,
    positions_ptr,
    prev_slots_ptr,
    skipped_ptr,  # [1] int64, inout
    num_reqs,
    num_rows,
    row_width,
    row_stride,
    map_len,
    pool_rows,
    pool_width,
    pool_stride,
    token_offset,
    window,
    capacity,
    write_offsets_len,
    OFFSETS: tl.constexpr,
    ENTRIES: tl.constexpr,
    ROTATE: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_POOL: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
    SEARCH: tl.constexpr,
    SEARCH_LEVELS: tl.constexpr,
    SMALL_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Plan a batch. Grid: (1,) for offsets alone, any number for entries alone, at least 2 fused."""
    program = tl.program_id(0)
    if OFFSETS:
        req = tl.arange(0, BLOCK_REQS)
        in_batch = req < num_reqs
        row = tl.load(req_pool_indices_ptr + req, mask=in_batch, other=_PADDING)
        prefix_len = tl.load(prefix_lens_ptr + req, mask=in_batch, other=0)
        active = row != _PADDING
        num_entries = tl.where(active, prefix_len - _window_start(prefix_len, window), 0)
        num_entries = tl.minimum(tl.maximum(num_entries, 0), _MAX_LEN)
        ends = tl.cumsum(num_entries, axis=0)
        # Every program stores the same words, so that each can read what it stored itself.
        tl.store(offsets_ptr, tl.zeros([], tl.int64))
        tl.store(offsets_ptr + 1 + req, ends, mask=in_batch)
        demand = tl.sum(num_entries, axis=0)
        overflows = demand > capacity
        if program == 0:
            enable = tl.where(overflows, 1 if ROTATE else 0, 1)
            tl.store(enable_ptr, enable.to(tl.int32))
            tl.store(num_valid_ptr, tl.minimum(demand, capacity).to(tl.int32))
            extend_len = tl.load(extend_lens_ptr + req, mask=in_batch, other=0)
            extend_len = tl.minimum(tl.maximum(tl.where(active, extend_len, 0), 0), _MAX_LEN)
            _store_write_plan(
                row,
                prefix_len,
                extend_len,
                req,
                req_to_token_ptr,
                map_ptr,
                write_offsets_ptr,
                seeds_ptr,
                num_valid_reqs_ptr,
                skipped_ptr,
                num_reqs,
                num_rows,
                row_width,
                row_stride,
                map_len,
                write_offsets_len,
                HAS_MAP,
                BLOCK_REQS,
            )
        num_stored = tl.where(overflows, capacity if ROTATE else 0, demand)
        if ENTRIES:
            tl.debug_barrier()
    else:
        req = tl.arange(0, BLOCK_REQS)
        ends = tl.load(offsets_ptr + 1 + req, mask=req < num_reqs, other=_PAST_ANY_ENTRY)
        demand = tl.load(offsets_ptr + num_reqs)
        overflows = demand > capacity
        enable = tl.load(enable_ptr)
        num_stored = tl.where(overflows, capacity if ROTATE else 0, demand)
        num_stored = tl.where(enable != 0, num_stored, 0)

    if ENTRIES:
        cursor = tl.zeros([], tl.int64)
        if ROTATE:  # noqa: SIM102 a branch of the compiler, then one of the device
            if overflows:
                cursor = tl.load(cursor_ptr) % demand
                cursor = tl.where(cursor < 0, cursor + demand, cursor)
        # Fused, the first program has the write plan to store and takes no entries.
        rank = program - 1 if OFFSETS else program
        num_ranks = tl.num_programs(0) - 1 if OFFSETS else tl.num_programs(0)
        # Small blocks while they can spread over all programs at once, large ones to amortise what a block costs.
        if num_stored <= num_ranks.to(tl.int64) * SMALL_BLOCK:
            num_skipped = _store_entries(
                rank,
                num_ranks,
                num_stored,
                demand,
                cursor,
                ends,
                req,
                req_pool_indices_ptr,
                prefix_lens_ptr,
                req_to_token_ptr,
                map_ptr,
                pool_ptr,
                pool_lens_ptr,
                offsets_ptr,
                slots_ptr,
                tokens_ptr,
                positions_ptr,
                prev_slots_ptr,
                num_reqs,
                num_rows,
                row_width,
                row_stride,
                map_len,
                pool_rows,
                pool_width,
                pool_stride,
                token_offset,
                window,
                ROTATE,
                HAS_MAP,
                HAS_POOL,
                BLOCK_REQS,
                SEARCH,
                SEARCH_LEVELS,
                SMALL_BLOCK,
            )
        else:
            num_skipped = _store_entries(
                rank,
                num_ranks,
                num_stored,
                demand,
                cursor,
                ends,
                req,
                req_pool_indices_ptr,
                prefix_lens_ptr,
                req_to_token_ptr,
                map_ptr,
                pool_ptr,
                pool_lens_ptr,
                offsets_ptr,
                slots_ptr,
                tokens_ptr,
                positions_ptr,
                prev_slots_ptr,
                num_reqs,
                num_rows,
                row_width,
                row_stride,
                map_len,
                pool_rows,
                pool_width,
                pool_stride,
                token_offset,
                window,
                ROTATE,
                HAS_MAP,
                HAS_POOL,
                BLOCK_REQS,
                SEARCH,
                SEARCH_LEVELS,
                BLOCK,
            )
        _count_skipped(skipped_ptr, num_skipped)


@triton.jit(do_not_specialize=["num_reqs", "capacity"])
def _advance_cursor_kernel(
    cursor_ptr,  # [1] int64, inout
    offsets_ptr,  # [> num_reqs] int64
    num_reqs,
    capacity,
):
    """Move a rotating window on by one capacity, modulo demand; a plan that fitted leaves it alone. Grid: (1,)."""
    demand = tl.load(offsets_ptr + num_reqs)
    if demand > capacity:
        cursor = (tl.load(cursor_ptr) % demand + capacity) % demand
        tl.store(cursor_ptr, tl.where(cursor < 0, cursor + demand, cursor))


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
