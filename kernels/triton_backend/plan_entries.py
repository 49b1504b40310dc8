"""The verify half of a plan: one entry per cached position, gathered in blocks and stored coalesced."""

from __future__ import annotations

import triton
import triton.language as tl

from ..layout import DUMMY_SLOT
from .plan_slots import translate, window_start

_DUMMY_SLOT: tl.constexpr = tl.constexpr(DUMMY_SLOT)


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
        slot = translate(slot, readable, map_ptr, map_len)
        prev_slot = translate(prev_slot, readable, map_ptr, map_len)
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
def store_entries(
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
                window_start(one_prefix, window) - one_begin + place,
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
                window_start(prefixes, window) + (entry - begins),
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
