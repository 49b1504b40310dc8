"""What entries and seeds share: where a window starts, translation to SWA slots, the count of what was left out."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def window_start(prefix_len, window):
    windowed = (window > 0) & (prefix_len > window)
    return tl.where(windowed, prefix_len - window, 0)


@triton.jit
def translate(slot, mask, map_ptr, map_len):
    """SWA translation: negative slots pass through, slots past the map read its last entry."""
    known = mask & (slot >= 0)
    return tl.where(known, tl.load(map_ptr + tl.minimum(slot, map_len - 1), mask=known, other=0), slot)


@triton.jit
def count_skipped(skipped_ptr, num_skipped):
    if num_skipped > 0:
        tl.atomic_add(skipped_ptr, num_skipped.to(tl.int64), sem="relaxed")
