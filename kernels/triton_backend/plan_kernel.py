"""The kernel behind all plan launches, and the one that moves a rotating window on.

One body serves three launches: offsets alone, entries alone, and both fused. Fused, every program scans the batch for
itself (a few kilobytes from L2), which costs less than a second launch that waits for the first.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from ..layout import PADDING_REQ_POOL_IDX
from .plan_entries import store_entries
from .plan_slots import count_skipped, window_start
from .plan_writes import store_write_plan

_PADDING: tl.constexpr = tl.constexpr(PADDING_REQ_POOL_IDX)
_MAX_LEN: tl.constexpr = tl.constexpr(2**48)
"""Lengths are clamped here before they are summed, so that 4096 absurd ones overflow the plan and never wrap int64."""

_PAST_ANY_ENTRY: tl.constexpr = tl.constexpr(2**62)

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
        num_entries = tl.where(active, prefix_len - window_start(prefix_len, window), 0)
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
            store_write_plan(
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
            num_skipped = store_entries(
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
            num_skipped = store_entries(
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
        count_skipped(skipped_ptr, num_skipped)


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
