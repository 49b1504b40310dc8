"""The canary's hashes over arrays: numpy uint64 for host memory, torch int64 for any device.

`splitmix64` is Steele, Lea and Flood's finaliser without its additive step, so 0 hashes to 0. numpy has unsigned words and
in-place operators, so the host path shifts logically and reuses its scratch; torch has only int64, so its shifts are masked.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from .layout import CHAIN_ANCHOR

Words: TypeAlias = npt.NDArray[np.uint64]

MASK: Final = (1 << 64) - 1
MULTIPLIERS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS: Final = (30, 27, 31)

_MUL_1, _MUL_2 = (np.uint64(m) for m in MULTIPLIERS)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = (np.uint64(s) for s in SHIFTS)


def splitmix64_int(x: int) -> int:
    """`splitmix64` of one unsigned 64-bit integer."""
    x = ((x ^ (x >> SHIFTS[0])) * MULTIPLIERS[0]) & MASK
    x = ((x ^ (x >> SHIFTS[1])) * MULTIPLIERS[1]) & MASK
    return x ^ (x >> SHIFTS[2])


ANCHOR_HASH: Final = splitmix64_int(CHAIN_ANCHOR)
"""What a chain head stores as its `prev_hash`."""


def mix3_int(a: int, b: int, c: int) -> int:
    """`mix3` of three unsigned 64-bit integers."""
    return splitmix64_int(splitmix64_int(splitmix64_int(a) ^ b) ^ c)


def splitmix64_(x: Words, scratch: Words) -> Words:
    """`splitmix64` of every word of `x`, in place; `scratch` has its shape."""
    np.right_shift(x, _SHIFT_1, out=scratch)
    np.bitwise_xor(x, scratch, out=x)
    np.multiply(x, _MUL_1, out=x)
    np.right_shift(x, _SHIFT_2, out=scratch)
    np.bitwise_xor(x, scratch, out=x)
    np.multiply(x, _MUL_2, out=x)
    np.right_shift(x, _SHIFT_3, out=scratch)
    np.bitwise_xor(x, scratch, out=x)
    return x


def mix3_(a: Words, b: Words, c: Words, scratch: Words) -> Words:
    """`mix3(a, b, c)` word by word, into `a`."""
    splitmix64_(a, scratch)
    np.bitwise_xor(a, b, out=a)
    splitmix64_(a, scratch)
    np.bitwise_xor(a, c, out=a)
    return splitmix64_(a, scratch)


def _signed(x: int) -> int:
    """The int64 with the bits of an unsigned word."""
    return x - (1 << 64) if x >> 63 else x


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & (MASK >> bits)


def splitmix64_tensor(x: torch.Tensor) -> torch.Tensor:
    """`splitmix64` of every int64 of a tensor on any device."""
    x = (x ^ _shift_right(x, SHIFTS[0])) * _signed(MULTIPLIERS[0])
    x = (x ^ _shift_right(x, SHIFTS[1])) * _signed(MULTIPLIERS[1])
    return x ^ _shift_right(x, SHIFTS[2])


def mix3_tensor(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """`mix3(a, b, c)` word by word, on any device."""
    return splitmix64_tensor(splitmix64_tensor(splitmix64_tensor(a) ^ b) ^ c)


ANCHOR_HASH_INT64: Final = _signed(ANCHOR_HASH)
