"""Fingerprints through torch's operations, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..buffers import VerifyOrWriteContext
from ..hashing import splitmix64_tensor
from ..layout import PARTIAL_READ_BYTES, WORD_BYTES, RealKvHashMode
from .refusals import source_refusal


def slot_words(context: VerifyOrWriteContext) -> Tensor:
    """[num_slots, words_per_slot] int64 view of the canary buffer."""
    return context.canary_buf.view(torch.int64)


def fingerprints(context: VerifyOrWriteContext, slots: Tensor) -> Tensor:
    """[n] int64 folds of the real K/V bytes of each slot.

    Raises:
        ValueError: a slot lies past a source's last row.
    """
    total = torch.zeros_like(slots)
    mode = int(context.real_kv_hash_mode)
    if mode == RealKvHashMode.NONE or not len(slots):
        return total
    max_slot = int(slots.max())
    for i, source in enumerate(context.real_kv_sources):
        rows, page_size, token_bytes = source.tensor.shape[0], source.page_size, source.num_bytes_per_token
        if max_slot // page_size >= rows:
            raise source_refusal(max_slot, i, rows, page_size)
        read_bytes = PARTIAL_READ_BYTES if mode == RealKvHashMode.PARTIAL else source.read_bytes
        first = slots % page_size * token_bytes
        columns = first[:, None] + torch.arange(read_bytes, device=slots.device)
        data = source.tensor.view(torch.uint8)[(slots // page_size)[:, None], columns]
        read = data.view(torch.int64)  # [n, read_bytes // 8]
        acc = torch.zeros_like(slots)
        for word in range(read_bytes // WORD_BYTES):
            acc = splitmix64_tensor(acc ^ read[:, word])
        total = splitmix64_tensor(total ^ acc)
    return total
