"""Fingerprints of real K/V bytes on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..buffers import RealKvSource, VerifyOrWriteContext
from ..hashing import absorb, splitmix64_
from ..layout import PARTIAL_READ_BYTES, REAL_KV_ALIGN_BYTES, RealKvHashMode
from .host_arrays import CHUNK, I64, U64, array, scratch
from .refusals import source_refusal

_FOLD_CACHE_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class _Source:
    """A source as 16-byte pairs of words; strides are in pairs."""

    pairs: U64  # [num_pairs, 2]
    num_rows: int
    page_size: int
    row_pairs: int
    token_pairs: int
    read_pairs: int

    @classmethod
    def of(cls, source: RealKvSource, mode: int) -> _Source:
        tensor = source.tensor.view(torch.uint8)
        num_rows, row_bytes = tensor.shape[0], tensor.stride(0)
        total_bytes = (num_rows - 1) * row_bytes + source.page_size * source.num_bytes_per_token if num_rows else 0
        flat = array(tensor.as_strided((total_bytes,), (1,)))
        read_bytes = PARTIAL_READ_BYTES if mode == RealKvHashMode.PARTIAL else source.read_bytes
        return cls(
            pairs=flat.view(np.uint64).reshape(-1, 2),
            num_rows=num_rows,
            page_size=source.page_size,
            row_pairs=row_bytes // REAL_KV_ALIGN_BYTES,
            token_pairs=source.num_bytes_per_token // REAL_KV_ALIGN_BYTES,
            read_pairs=read_bytes // REAL_KV_ALIGN_BYTES,
        )

    def first_pair(self, slots: I64, out: I64) -> None:
        page_size = self.page_size
        if page_size == 1:
            np.multiply(slots, self.row_pairs, out)
        elif self.row_pairs == page_size * self.token_pairs:
            np.multiply(slots, self.token_pairs, out)
        else:
            np.floor_divide(slots, page_size, out)
            # row * row_pairs + (slot - row * page_size) * token_pairs, in two multiplications
            np.multiply(out, self.row_pairs - page_size * self.token_pairs, out)
            out += slots * self.token_pairs


class Fingerprints:
    """The sources of one launch, ready to be folded. Without sources, or in mode NONE, `active` is False: all are 0."""

    def __init__(self, context: VerifyOrWriteContext) -> None:
        mode = int(context.real_kv_hash_mode)
        sources: Sequence[RealKvSource] = context.real_kv_sources if mode != RealKvHashMode.NONE else ()
        self._sources = [_Source.of(source, mode) for source in sources]
        self.active = bool(self._sources)
        read_bytes = max((source.read_pairs for source in self._sources), default=1) * REAL_KV_ALIGN_BYTES
        self.chunk = max(256, min(CHUNK, _FOLD_CACHE_BYTES // read_bytes))
        """Slots to fold at a time, so that the bytes of a chunk stay cached while its words are walked."""

    def check(self, max_slot: int) -> None:
        """Refuse a slot past a source's last row."""
        for i, source in enumerate(self._sources):
            if max_slot // source.page_size >= source.num_rows:
                raise source_refusal(max_slot, i, source.num_rows, source.page_size)

    def fold(self, slots: I64, out: U64) -> None:
        """Fold the bytes of each slot.

        Args:
            slots: [n] int64, each within every source, `n` at most CHUNK.
            out: [n] uint64. Out, the fingerprints.
        """
        for lo in range(0, len(slots), self.chunk):
            hi = lo + self.chunk
            self._fold_chunk(slots[lo:hi], out[lo:hi])

    def _fold_chunk(self, slots: I64, out: U64) -> None:
        n = len(slots)
        index = scratch.words("fold_index", n).view(np.int64)
        acc, tmp, pair = scratch.words("fold_acc", n), scratch.words("fold_tmp", n), scratch.words("fold_pair", n, 2)
        for i, source in enumerate(self._sources):
            source.first_pair(slots, index)
            source.pairs.take(index, axis=0, out=pair, mode="clip")
            np.copyto(acc, pair[:, 0])
            splitmix64_(acc, tmp)
            absorb(acc, pair[:, 1], tmp)
            for _ in range(1, source.read_pairs):
                np.add(index, 1, index)
                source.pairs.take(index, axis=0, out=pair, mode="clip")
                absorb(acc, pair[:, 0], tmp)
                absorb(acc, pair[:, 1], tmp)
            if i == 0:
                np.copyto(out, acc)
                splitmix64_(out, tmp)
            else:
                absorb(out, acc, tmp)
