"""Fingerprints of a batch's new tokens, into the word of their records that no chain touches: a part of the serial
chain's launch, a launch of its own before the parallel chain's."""

from __future__ import annotations

import triton
import triton.language as tl

from .fold import SOURCE_SIZES, fold_sources
from .hashing import as_i64
from .records import REAL_KV_HASH, record_at


@triton.jit
def fold_tokens(
    rank,  # this program's place among those that fold
    num_ranks,
    words_ptr,
    offsets_ptr,
    cache_loc_ptr,
    num_reqs,
    num_tokens,
    slot_pairs,
    num_slots,
    row_words_0,
    page_size_0,
    token_words_0,
    num_words_0,
    row_words_1,
    page_size_1,
    token_words_1,
    num_words_1,
    row_words_2,
    page_size_2,
    token_words_2,
    num_words_2,
    row_words_3,
    page_size_3,
    token_words_3,
    num_words_3,
    address_0,
    address_1,
    address_2,
    address_3,
    PAIRED: tl.constexpr,
    NUM_SOURCES: tl.constexpr,
    PAGED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fold the bytes of the tokens' slots in blocks, every `num_ranks`-th block here."""
    begin = tl.maximum(tl.load(offsets_ptr), 0)
    end = tl.minimum(tl.load(offsets_ptr + num_reqs), num_tokens)
    first = begin + rank.to(tl.int64) * BLOCK
    step = num_ranks.to(tl.int64) * BLOCK
    for start in range(first, end, step):
        index = start + tl.arange(0, BLOCK)
        slot = tl.load(cache_loc_ptr + index, mask=index < end, other=-1)
        stored = (slot >= 0) & (slot < num_slots)
        real_kv_hash = fold_sources(
            slot,
            stored,
            row_words_0,
            page_size_0,
            token_words_0,
            num_words_0,
            row_words_1,
            page_size_1,
            token_words_1,
            num_words_1,
            row_words_2,
            page_size_2,
            token_words_2,
            num_words_2,
            row_words_3,
            page_size_3,
            token_words_3,
            num_words_3,
            address_0,
            address_1,
            address_2,
            address_3,
            NUM_SOURCES,
            PAGED,
            CHUNK,
            BLOCK,
        )
        # Two tokens of one slot store the same value here, so their order does not matter.
        tl.store(record_at(words_ptr, slot, slot_pairs, PAIRED) + REAL_KV_HASH, as_i64(real_kv_hash), mask=stored)


@triton.jit
def num_reqs_of(num_valid_reqs_ptr, req_capacity):
    """Requests of a batch: what the plan says, within its capacity."""
    return tl.maximum(tl.minimum(tl.load(num_valid_reqs_ptr), req_capacity), 0)


@triton.jit(do_not_specialize=["req_capacity", "num_tokens", "slot_pairs", "num_slots", *SOURCE_SIZES])
def _fold_tokens_kernel(
    canary_ptr,  # [num_records, ..] uint8, inout
    offsets_ptr,  # [req_capacity + 1] int64
    num_valid_reqs_ptr,  # [1] int32
    cache_loc_ptr,  # [num_tokens] int64
    req_capacity,
    num_tokens,
    slot_pairs,
    num_slots,
    row_words_0,
    page_size_0,
    token_words_0,
    num_words_0,
    row_words_1,
    page_size_1,
    token_words_1,
    num_words_1,
    row_words_2,
    page_size_2,
    token_words_2,
    num_words_2,
    row_words_3,
    page_size_3,
    token_words_3,
    num_words_3,
    address_0,
    address_1,
    address_2,
    address_3,
    PAIRED: tl.constexpr,
    NUM_SOURCES: tl.constexpr,
    PAGED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the new tokens' fingerprints. Grid: any number of programs."""
    fold_tokens(
        tl.program_id(0),
        tl.num_programs(0),
        canary_ptr.to(tl.pointer_type(tl.int64), bitcast=True),
        offsets_ptr,
        cache_loc_ptr,
        num_reqs_of(num_valid_reqs_ptr, req_capacity),
        num_tokens,
        slot_pairs,
        num_slots,
        row_words_0,
        page_size_0,
        token_words_0,
        num_words_0,
        row_words_1,
        page_size_1,
        token_words_1,
        num_words_1,
        row_words_2,
        page_size_2,
        token_words_2,
        num_words_2,
        row_words_3,
        page_size_3,
        token_words_3,
        num_words_3,
        address_0,
        address_1,
        address_2,
        address_3,
        PAIRED,
        NUM_SOURCES,
        PAGED,
        CHUNK,
        BLOCK,
    )
