"""Appending rows to the violation ring: of a whole block of entries with one atomic, or one row."""

from __future__ import annotations

import triton
import triton.language as tl

from ..layout import VIOLATION_WORDS, ViolationField

_WORDS: tl.constexpr = tl.constexpr(VIOLATION_WORDS)
_LAUNCH_TAG: tl.constexpr = tl.constexpr(int(ViolationField.LAUNCH_TAG))
_SLOT: tl.constexpr = tl.constexpr(int(ViolationField.SLOT))
_POSITION: tl.constexpr = tl.constexpr(int(ViolationField.POSITION))
_TOKEN: tl.constexpr = tl.constexpr(int(ViolationField.TOKEN))
_EXPECTED_TOKEN: tl.constexpr = tl.constexpr(int(ViolationField.EXPECTED_TOKEN))
_CHAIN_HASH: tl.constexpr = tl.constexpr(int(ViolationField.CHAIN_HASH))
_EXPECTED_AUX: tl.constexpr = tl.constexpr(int(ViolationField.EXPECTED_AUX))
_FAIL_REASON: tl.constexpr = tl.constexpr(int(ViolationField.FAIL_REASON))


@triton.jit
def append_violations(
    ring_ptr,  # [ring_rows, VIOLATION_WORDS] int64, out: filled once, never overwritten
    write_index_ptr,  # [1] int32, inout: goes on counting past the end
    ring_rows,
    launch_tag,
    reasons,  # [BLOCK] int64: FailReason bits, 0 where the entry is clean
    slot,  # [BLOCK] int64, and so the rest
    position,
    token,
    expected_token,
    chain_hash,
    expected_aux,
):
    """Append a row for every entry with a reason. The counter rises before the rows are filled."""
    bad = reasons != 0
    num_bad = tl.sum(bad.to(tl.int32), axis=0)
    if num_bad > 0:
        first = tl.atomic_add(write_index_ptr, num_bad, sem="relaxed").to(tl.int64)
        row = first + tl.cumsum(bad.to(tl.int32), axis=0) - 1
        # A counter that wrapped past 2**31 is negative: count on, store nothing.
        fits = bad & (row >= 0) & (row < ring_rows)
        row_ptr = ring_ptr + row * _WORDS
        tl.store(row_ptr + _LAUNCH_TAG, tl.zeros_like(slot) + launch_tag, mask=fits)
        tl.store(row_ptr + _SLOT, slot, mask=fits)
        tl.store(row_ptr + _POSITION, position, mask=fits)
        tl.store(row_ptr + _TOKEN, token, mask=fits)
        tl.store(row_ptr + _EXPECTED_TOKEN, expected_token, mask=fits)
        tl.store(row_ptr + _CHAIN_HASH, chain_hash, mask=fits)
        tl.store(row_ptr + _EXPECTED_AUX, expected_aux, mask=fits)
        tl.store(row_ptr + _FAIL_REASON, reasons, mask=fits)


@triton.jit
def append_violation(
    ring_ptr,
    write_index_ptr,
    ring_rows,
    launch_tag,
    reason,
    slot,
    position,
    token,
    expected_token,
    chain_hash,
    expected_aux,
):
    """Append one row. Everything is a scalar."""
    row = tl.atomic_add(write_index_ptr, 1, sem="relaxed").to(tl.int64)
    if (row >= 0) & (row < ring_rows):
        row_ptr = ring_ptr + row * _WORDS
        tl.store(row_ptr + _LAUNCH_TAG, launch_tag)
        tl.store(row_ptr + _SLOT, slot)
        tl.store(row_ptr + _POSITION, position)
        tl.store(row_ptr + _TOKEN, token)
        tl.store(row_ptr + _EXPECTED_TOKEN, expected_token)
        tl.store(row_ptr + _CHAIN_HASH, chain_hash)
        tl.store(row_ptr + _EXPECTED_AUX, expected_aux)
        tl.store(row_ptr + _FAIL_REASON, reason)
