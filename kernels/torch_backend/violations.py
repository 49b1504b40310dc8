"""Appending to a violation ring: filled once, counted on for ever."""

from __future__ import annotations

import torch
from torch import Tensor

from ..buffers import VerifyOrWriteContext


def append_violations(context: VerifyOrWriteContext, rows: Tensor) -> None:
    """Store as many rows as the ring still has room for, and count them all.

    Args:
        context: Where `violation_ring` and `violation_write_index` are.
        rows: [n, VIOLATION_WORDS] int64, words of `ViolationField`, on the ring's device.
    """
    ring, counter = context.violation_ring, context.violation_write_index
    num_rows = rows.shape[0]
    if num_rows == 0:
        return
    used = int(counter.item())
    room = min(num_rows, ring.shape[0] - used) if used >= 0 else 0  # below 0: the int32 counter went round
    if room > 0:
        ring[used : used + room] = rows[:room]
    counter.add_(torch.tensor(num_rows, dtype=counter.dtype, device=counter.device))
