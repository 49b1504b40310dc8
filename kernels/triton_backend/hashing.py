"""The canary's hashes, on blocks of uint64."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from ..layout import CHAIN_ANCHOR

_WORD_MASK: Final = 2**64 - 1
_MULTIPLIERS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _splitmix64_int(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MULTIPLIERS[0]) & _WORD_MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIERS[1]) & _WORD_MASK
    return value ^ (value >> 31)


_MUL_0: tl.constexpr = tl.constexpr(_MULTIPLIERS[0])
_MUL_1: tl.constexpr = tl.constexpr(_MULTIPLIERS[1])
HEAD_HASH: tl.constexpr = tl.constexpr(_splitmix64_int(CHAIN_ANCHOR))
"""What a chain head stores as its chain hash."""


@triton.jit
def splitmix64(value):
    """One splitmix64 step without the additive part, so 0 gives 0. `value` is uint64."""
    value = (value ^ (value >> 30)) * _MUL_0
    value = (value ^ (value >> 27)) * _MUL_1
    return value ^ (value >> 31)


@triton.jit
def mix3(prev_hash, token, position):
    """The chain hash that the successor of a slot stores. All uint64."""
    return splitmix64(splitmix64(splitmix64(prev_hash) ^ token) ^ position)


@triton.jit
def as_u64(value):
    """The same 64 bits, unsigned."""
    return value.to(tl.uint64, bitcast=True)


@triton.jit
def as_i64(value):
    """The same 64 bits, signed."""
    return value.to(tl.int64, bitcast=True)
