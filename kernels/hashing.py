"""The canary's hash, once for all that calculates on the host or through torch.

Hashing is on unsigned 64-bit values, with logical shifts and multiplication modulo 2**64. Three kinds of number carry
them: Python integers (kept below 2**64 by hand), numpy's uint64 (which wraps and shifts as wanted) and torch's int64
(which wraps as wanted, but whose right shift copies the sign).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .layout import CHAIN_ANCHOR

__all__ = [
    "ANCHOR_HASH",
    "U64_MASK",
    "absorb",
    "as_u64",
    "chain_hash",
    "mix3_int",
    "mix3_tensor",
    "signed",
    "splitmix64_",
    "splitmix64_int",
    "splitmix64_tensor",
]

U64_MASK: Final = (1 << 64) - 1
_MULTIPLIER_1: Final = 0xBF58476D1CE4E5B9
_MULTIPLIER_2: Final = 0x94D049BB133111EB


def signed(value: int) -> int:
    """The int64 with the bits of `value`."""
    value &= U64_MASK
    return value - (1 << 64) if value >> 63 else value


# --- Python integers ------------------------------------------------------------------------------------------------


def splitmix64_int(x: int) -> int:
    """Mix an unsigned 64-bit integer. 0 gives 0: there is no additive step."""
    x = ((x ^ (x >> 30)) * _MULTIPLIER_1) & U64_MASK
    x = ((x ^ (x >> 27)) * _MULTIPLIER_2) & U64_MASK
    return x ^ (x >> 31)


def mix3_int(a: int, b: int, c: int) -> int:
    """Mix three integers, any sign, into an unsigned one."""
    return splitmix64_int(splitmix64_int(splitmix64_int(a & U64_MASK) ^ (b & U64_MASK)) ^ (c & U64_MASK))


ANCHOR_HASH: Final = splitmix64_int(CHAIN_ANCHOR)
"""What a chain head stores as the hash of everything before it."""


def chain_hash(prev_hash: int, tokens: list[int], positions: list[int], out: list[int]) -> int:
    """Walk one chain: append to `out` what each token stores, return what the one after them would.

    Args:
        prev_hash: Unsigned hash of everything before the first token.
        tokens: Token ids, in [-2**63, 2**63).
        positions: As many positions.
        out: Unsigned hashes are appended here, one per token.
    """
    mask, m1, m2 = U64_MASK, _MULTIPLIER_1, _MULTIPLIER_2
    append = out.append
    x = prev_hash
    for token, position in zip(tokens, positions, strict=True):
        append(x)
        x = ((x ^ (x >> 30)) * m1) & mask
        x = ((x ^ (x >> 27)) * m2) & mask
        x ^= (x >> 31) ^ (token & mask)
        x = ((x ^ (x >> 30)) * m1) & mask
        x = ((x ^ (x >> 27)) * m2) & mask
        x ^= (x >> 31) ^ (position & mask)
        x = ((x ^ (x >> 30)) * m1) & mask
        x = ((x ^ (x >> 27)) * m2) & mask
        x ^= x >> 31
    return x


# --- numpy, in place ------------------------------------------------------------------------------------------------

_U64 = np.uint64
_M1, _M2 = _U64(_MULTIPLIER_1), _U64(_MULTIPLIER_2)
_S30, _S27, _S31 = _U64(30), _U64(27), _U64(31)


def splitmix64_(x: NDArray[np.uint64], tmp: NDArray[np.uint64]) -> None:
    """Mix every word of `x` in place; `tmp` is scratch of the same shape."""
    np.right_shift(x, _S30, tmp)
    np.bitwise_xor(x, tmp, x)
    np.multiply(x, _M1, x)
    np.right_shift(x, _S27, tmp)
    np.bitwise_xor(x, tmp, x)
    np.multiply(x, _M2, x)
    np.right_shift(x, _S31, tmp)
    np.bitwise_xor(x, tmp, x)


def absorb(acc: NDArray[np.uint64], word: NDArray[np.uint64], tmp: NDArray[np.uint64]) -> None:
    """`acc = splitmix64(acc ^ word)`, in place."""
    np.bitwise_xor(acc, word, acc)
    splitmix64_(acc, tmp)


# --- torch, on any device -------------------------------------------------------------------------------------------

_M1_SIGNED, _M2_SIGNED = signed(_MULTIPLIER_1), signed(_MULTIPLIER_2)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def splitmix64_tensor(x: Tensor) -> Tensor:
    """Mix every int64 of `x` as the unsigned value of the same bits."""
    x = (x ^ _shift_right(x, 30)) * _M1_SIGNED
    x = (x ^ _shift_right(x, 27)) * _M2_SIGNED
    return x ^ _shift_right(x, 31)


def mix3_tensor(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Mix three int64 tensors of one shape."""
    return splitmix64_tensor(splitmix64_tensor(splitmix64_tensor(a) ^ b) ^ c)


def as_u64(values: NDArray[Any]) -> NDArray[np.uint64]:
    """An int64 array's own memory, read as unsigned."""
    return values.view(_U64)
