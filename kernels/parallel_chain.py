"""The parallel chain: one affine map a record, so that a prefix scan computes what a serial walk would.

A record (token, position) is the map `h -> multiplier * h + addend` modulo 2**64, both from the canary's mixer:

    addend     = splitmix64(splitmix64(token ^ TOKEN_SALT) ^ position)
    multiplier = splitmix64(addend ^ MULTIPLIER_SALT) | 1

Maps compose to maps, and composition is associative. `docs/parallel-chain.md` has the collision bounds, and why the
multiplier must depend on the record. The same three kinds of number as in `hashing` carry it.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from torch import Tensor

from .hashing import U64_MASK, absorb, signed, splitmix64_, splitmix64_int, splitmix64_tensor
from .layout import PARALLEL_CHAIN_ANCHOR

__all__ = [
    "MULTIPLIER_SALT",
    "PARALLEL_ANCHOR_HASH",
    "TOKEN_SALT",
    "maps_",
    "maps_tensor",
    "scan_int",
    "scan_tensor",
    "step_int",
    "step_tensor",
]

TOKEN_SALT: Final = 0x6A09E667F3BCC909
MULTIPLIER_SALT: Final = 0xBB67AE8584CAA73B
"""Fractional parts of the square roots of 2 and 3. The mixer leaves 0 alone; token 0 at position 0 must not be 0."""

PARALLEL_ANCHOR_HASH: Final = splitmix64_int(PARALLEL_CHAIN_ANCHOR)
"""What a head of the parallel chain stores as the hash of everything before it."""

# --- Python integers ------------------------------------------------------------------------------------------------


def step_int(prev_hash: int, token: int, position: int) -> int:
    """The hash after one record, unsigned; token and position may have any sign."""
    addend = splitmix64_int(splitmix64_int((token ^ TOKEN_SALT) & U64_MASK) ^ (position & U64_MASK))
    multiplier = splitmix64_int(addend ^ MULTIPLIER_SALT) | 1
    return (multiplier * prev_hash + addend) & U64_MASK


def scan_int(multipliers: list[int], addends: list[int]) -> list[int]:
    """What each map gives after all before it, from 0 on, unsigned."""
    value, out = 0, []
    for multiplier, addend in zip(multipliers, addends, strict=True):
        value = (multiplier * value + addend) & U64_MASK
        out.append(value)
    return out


# --- numpy, in place ------------------------------------------------------------------------------------------------

_U64Array = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]
_TOKEN_SALT, _MULTIPLIER_SALT, _ONE = np.uint64(TOKEN_SALT), np.uint64(MULTIPLIER_SALT), np.uint64(1)


def maps_(tokens: _U64Array, positions: _U64Array, multipliers: _U64Array, addends: _U64Array, tmp: _U64Array) -> None:
    """The maps of records.

    Args:
        tokens: [n] uint64.
        positions: [n] uint64.
        multipliers: [n] uint64, out.
        addends: [n] uint64, out.
        tmp: [n] uint64, scratch.
    """
    np.bitwise_xor(tokens, _TOKEN_SALT, addends)
    splitmix64_(addends, tmp)
    absorb(addends, positions, tmp)
    np.bitwise_xor(addends, _MULTIPLIER_SALT, multipliers)
    splitmix64_(multipliers, tmp)
    np.bitwise_or(multipliers, _ONE, multipliers)


# --- torch, on any device -------------------------------------------------------------------------------------------


def maps_tensor(tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(multipliers, addends) of records, [n] int64 each."""
    addends = splitmix64_tensor(splitmix64_tensor(tokens ^ signed(TOKEN_SALT)) ^ positions)
    return splitmix64_tensor(addends ^ signed(MULTIPLIER_SALT)) | 1, addends


def step_tensor(prev_hashes: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    """The hash after each record, int64."""
    multipliers, addends = maps_tensor(tokens, positions)
    return multipliers * prev_hashes + addends


def scan_tensor(multipliers: Tensor, addends: Tensor) -> Tensor:
    """[n] int64 what each map gives after all before it, from 0 on: a doubling scan."""
    reach = 1
    while reach < addends.shape[0]:
        later, later_multipliers = addends[reach:], multipliers[reach:]
        addends, multipliers = addends.clone(), multipliers.clone()
        addends[reach:] = later_multipliers * addends[:-reach] + later
        multipliers[reach:] = later_multipliers * multipliers[:-reach]
        reach *= 2
    return addends
