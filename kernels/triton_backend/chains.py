"""Both chain definitions, on blocks of uint64: what a record's successor stores, and the parallel chain's maps."""

from __future__ import annotations

import triton
import triton.language as tl

from ..parallel_chain import MULTIPLIER_SALT, PARALLEL_ANCHOR_HASH, TOKEN_SALT
from .hashing import HEAD_HASH, mix3, splitmix64

_TOKEN_SALT: tl.constexpr = tl.constexpr(TOKEN_SALT)
_MULTIPLIER_SALT: tl.constexpr = tl.constexpr(MULTIPLIER_SALT)
PARALLEL_HEAD_HASH: tl.constexpr = tl.constexpr(PARALLEL_ANCHOR_HASH)
"""What a head of the parallel chain stores as its chain hash."""


@triton.jit
def record_map(token, position):
    """(multiplier, addend) of a record in the parallel chain. All uint64."""
    addend = splitmix64(splitmix64(token ^ _TOKEN_SALT) ^ position)
    return splitmix64(addend ^ _MULTIPLIER_SALT) | 1, addend


@triton.jit
def compose(multiplier, addend, last, next_multiplier, next_addend, next_last):
    """The map that does one and then the next, and the larger of two marks: associative, and not commutative."""
    return multiplier * next_multiplier, next_multiplier * addend + next_addend, tl.maximum(last, next_last)


@triton.jit
def successor(prev_slot, prev_hash, token, position, PARALLEL: tl.constexpr):
    """The chain hash that follows a record, the anchor's where `prev_slot` is below 0. All else uint64."""
    if PARALLEL:
        multiplier, addend = record_map(token, position)
        following = multiplier * prev_hash + addend
        return tl.where(prev_slot < 0, tl.full(prev_slot.shape, PARALLEL_HEAD_HASH, tl.uint64), following)
    else:  # noqa: RET505 a branch of the compiler: it must not go on past it
        following = mix3(prev_hash, token, position)
        return tl.where(prev_slot < 0, tl.full(prev_slot.shape, HEAD_HASH, tl.uint64), following)
