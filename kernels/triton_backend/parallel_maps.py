"""The parallel chain's maps of a block of tokens, and their scan.

A token's map is that of the record before; the constant map to its seed's successor, where it is a request's first;
the identity, where the record before it was not stored. So the maps up to a token, composed, give what it stores, and
requests need no boundaries: nothing gets past a constant.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chains import PARALLEL_HEAD_HASH, compose, record_map
from .hashing import as_u64
from .records import POSITION, PREV_HASH, TOKEN, record_at


@triton.jit
def _owners(
    index,  # [BLOCK] int64
    offsets_ptr,
    num_reqs,
    num_tokens,
):
    """The request of each token, [BLOCK] int32: the last one that begins at or before it, any where none does."""
    base = tl.load(offsets_ptr)
    # A decode batch: one token a request, and the first guess is right.
    owner = tl.minimum(tl.maximum(index - base, 0), tl.maximum(num_reqs - 1, 0)).to(tl.int32)
    begin = tl.load(offsets_ptr + owner)
    end = tl.load(offsets_ptr + owner + 1)
    in_batch = (index >= base) & (index < tl.load(offsets_ptr + num_reqs)) & (index < num_tokens)
    missed = in_batch & ((begin > index) | (end <= index))
    if tl.max(missed.to(tl.int32), axis=0) != 0:
        reach = tl.full([], 1, tl.int32)
        while reach < num_reqs:
            reach = reach * 2
        owner = tl.zeros_like(owner)
        while reach > 1:
            reach = reach // 2
            later = owner + reach
            inside = later < num_reqs
            begins = tl.load(offsets_ptr + later, mask=inside, other=0)
            owner = tl.where(inside & (begins <= index), later, owner)
    return owner


@triton.jit
def token_maps(
    index,  # [BLOCK] int64
    words_ptr,
    offsets_ptr,
    seeds_ptr,
    input_ids_ptr,
    positions_ptr,
    cache_loc_ptr,
    num_reqs,
    num_tokens,
    slot_pairs,
    num_records,
    num_slots,
    PAIRED: tl.constexpr,
):
    """Everything a block knows of its tokens without the tokens before it.

    Returns:
        live, head: [BLOCK] bool. In the batch; the first of its request.
        begin, seed: [BLOCK] int64, of the token's request.
        multiplier, addend: [BLOCK] uint64, its map.
        last: [BLOCK] int64. The token's index, -1 where its map is the identity.
    """
    owner = _owners(index, offsets_ptr, num_reqs, num_tokens)
    begin = tl.maximum(tl.load(offsets_ptr + owner), 0)
    end = tl.where(owner < num_reqs, tl.load(offsets_ptr + owner + 1), 0)  # no request: no token
    live = (index >= begin) & (index < end) & (index < num_tokens)
    head = live & (index == begin)
    seed = tl.load(seeds_ptr + owner, mask=live, other=-1)

    # One map a lane: of the record before, or of the seed's.
    inner = live & ~head
    before_slot = tl.load(cache_loc_ptr + (index - 1), mask=inner, other=-1)
    moved = (before_slot >= 0) & (before_slot < num_slots)
    token = tl.load(input_ids_ptr + (index - 1), mask=moved, other=0)
    position = tl.load(positions_ptr + (index - 1), mask=moved, other=0)
    seeded = head & (seed >= 0) & (seed < num_records)
    seed_ptr = record_at(words_ptr, seed, slot_pairs, PAIRED)
    token = tl.where(head, tl.load(seed_ptr + TOKEN, mask=seeded, other=0), token)
    position = tl.where(head, tl.load(seed_ptr + POSITION, mask=seeded, other=0), position)
    seed_hash = as_u64(tl.load(seed_ptr + PREV_HASH, mask=seeded, other=0))

    multiplier, addend = record_map(as_u64(token), as_u64(position))
    anchor = tl.full(index.shape, PARALLEL_HEAD_HASH, tl.uint64)
    start = tl.where(seeded, multiplier * seed_hash + addend, anchor)
    one, zero = tl.full(index.shape, 1, tl.uint64), tl.zeros_like(addend)
    addend = tl.where(head, start, tl.where(moved, addend, zero))
    multiplier = tl.where(head, zero, tl.where(moved, multiplier, one))
    return live, head, begin, seed, multiplier, addend, tl.where(head | moved, index, -1)


@triton.jit
def scan_maps(multiplier, addend, last):
    """Each map after all before it, and the largest mark so far."""
    return tl.associative_scan((multiplier, addend, last), 0, compose)


@triton.jit
def last_of(values, BLOCK: tl.constexpr):
    """The last lane's value, as a scalar."""
    return tl.sum(tl.where(tl.arange(0, BLOCK) == BLOCK - 1, values, tl.zeros_like(values)), axis=0)


@triton.jit
def blocks_before(
    first_block,
    block,
    blocks_ptr,  # [3, num_blocks] int64: multipliers, addends and marks of whole blocks
    num_blocks,
    BLOCKS: tl.constexpr,
):
    """(hash, mark) before a block, from the blocks since `first_block`, of which the first holds a constant map."""
    value = tl.zeros([], tl.uint64)
    mark = tl.full([], -1, tl.int64)
    for start in range(first_block, block, BLOCKS):
        at = start + tl.arange(0, BLOCKS)
        before = at < block
        multiplier, addend, last = scan_maps(
            as_u64(tl.load(blocks_ptr + at, mask=before, other=1)),
            as_u64(tl.load(blocks_ptr + num_blocks + at, mask=before, other=0)),
            tl.load(blocks_ptr + 2 * num_blocks + at, mask=before, other=-1),
        )
        value = last_of(multiplier, BLOCKS) * value + last_of(addend, BLOCKS)
        mark = tl.maximum(mark, last_of(last, BLOCKS))
    return value, mark
