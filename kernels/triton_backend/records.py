"""Canary records in memory: where a slot's is, and how its words are stored."""

from __future__ import annotations

import triton
import triton.language as tl

from ..layout import SlotField
from .hashing import as_i64

TOKEN: tl.constexpr = tl.constexpr(int(SlotField.TOKEN))
POSITION: tl.constexpr = tl.constexpr(int(SlotField.POSITION))
PREV_HASH: tl.constexpr = tl.constexpr(int(SlotField.PREV_HASH))
REAL_KV_HASH: tl.constexpr = tl.constexpr(int(SlotField.REAL_KV_HASH))


@triton.jit
def record_at(words_ptr, slot, slot_pairs, PAIRED: tl.constexpr):
    """Address of a slot's record; records lie a whole number of word pairs apart if PAIRED."""
    # A buffer of 2**32 records is larger than any device: one 32 x 32 -> 64 bit product addresses it.
    offset = slot.to(tl.uint32).to(tl.uint64) * slot_pairs.to(tl.uint32).to(tl.uint64)
    if PAIRED:
        offset = tl.multiple_of(offset * 2, 2)
    return words_ptr + offset


@triton.jit
def _store_pair(ptr, first, second, live, PAIRED: tl.constexpr):
    if PAIRED:
        # Two neighbouring words go as one store of 16 bytes.
        pair_ptr = ptr[:, None] + tl.arange(0, 2)[None, :]
        tl.store(pair_ptr, tl.join(first, second), mask=live[:, None])
    else:
        tl.store(ptr, first, mask=live)
        tl.store(ptr + 1, second, mask=live)


@triton.jit
def store_record(
    words_ptr, slot, slot_pairs, token, position, chain, live, HAS_SOURCES: tl.constexpr, PAIRED: tl.constexpr
):
    """Store a record in the order of its words: TOKEN POSITION PREV_HASH REAL_KV_HASH, the last by the fold if any."""
    record_ptr = record_at(words_ptr, slot, slot_pairs, PAIRED)
    _store_pair(record_ptr + TOKEN, token, position, live, PAIRED)
    if HAS_SOURCES:
        tl.store(record_ptr + PREV_HASH, as_i64(chain), mask=live)
    else:
        _store_pair(record_ptr + PREV_HASH, as_i64(chain), tl.zeros_like(token), live, PAIRED)
