"""The verify entries of a batch through torch's operations: every entry finds its request by binary search."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .refusals import map_refusal, prefix_refusal, row_refusal, token_row_refusal, token_width_refusal


class Batch(NamedTuple):
    """A batch's rows and, per request, where its entries start: in the row and among all entries."""

    rows: Tensor  # [bs] int64
    starts: Tensor  # [bs] int64
    offsets: Tensor  # [bs + 1] int64
    table: Tensor  # [max_reqs, width] int32
    mapping: Tensor | None
    pool: Tensor | None
    valid_lens: Tensor | None
    token_offset: int

    def translate(self, slots: Tensor) -> Tensor:
        """SWA slots; negative ones pass through."""
        if self.mapping is None:
            return slots
        return torch.where(slots < 0, slots, self.mapping[slots.clamp(0, self.mapping.shape[0] - 1)])

    def raw_slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Slots of the full pool at (row, position) pairs, -1 at position -1."""
        if self.table.numel() == 0:
            return torch.full_like(rows, -1)
        slots = self.table[rows, positions.clamp(min=0)].to(torch.int64)
        return torch.where(positions < 0, -1, slots)

    def entries(self, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """(owning request, position) of the entries [lo, hi)."""
        flat = torch.arange(lo, hi, device=self.rows.device)
        owner = torch.searchsorted(self.offsets[1:], flat, right=True)
        return owner, self.starts[owner] + flat - self.offsets[owner]


def first_true(bad: Tensor) -> int | None:
    """Index of the first True."""
    return int(bad.to(torch.int32).argmax()) if bool(bad.any()) else None


def check_entries(batch: Batch) -> int:
    """The demand, after refusing rows, prefixes, slots and tokens outside their tables."""
    counts = batch.offsets.diff()
    live, ends = counts > 0, batch.starts + counts
    if not bool(live.any()):
        return 0
    num_rows, width = batch.table.shape
    req = first_true(live & ((batch.rows < 0) | (batch.rows >= num_rows)))
    if req is not None:
        raise row_refusal(req, int(batch.rows[req]), num_rows)
    req = first_true(live & (ends > width))
    if req is not None:
        raise prefix_refusal(req, int(ends[req]), width)
    if batch.pool is not None and batch.valid_lens is not None:
        lo = (batch.starts + batch.token_offset).clamp(min=0)
        hi = torch.minimum(ends + batch.token_offset, batch.valid_lens)
        wanted = live & (lo < hi)
        req = first_true(wanted & (batch.rows >= batch.pool.shape[0]))
        if req is not None:
            raise token_row_refusal(req, int(batch.rows[req]), batch.pool.shape[0])
        req = first_true(wanted & (hi > batch.pool.shape[1]))
        if req is not None:
            raise token_width_refusal(req, int(hi[req]), batch.pool.shape[1])
    demand = int(batch.offsets[-1])
    if batch.mapping is not None:
        owner, positions = batch.entries(0, demand)
        rows = batch.rows[owner]
        # In the order in which entries name slots: each its own, then its predecessor's.
        named = torch.stack((batch.raw_slots(rows, positions), batch.raw_slots(rows, positions - 1)), dim=1).flatten()
        place = first_true(named >= batch.mapping.shape[0])
        if place is not None:
            raise map_refusal(int(named[place]), batch.mapping.shape[0])
    return demand


def store_entries(
    batch: Batch, demand: int, outs: tuple[Tensor, Tensor, Tensor, Tensor], cursor: Tensor | None
) -> None:
    capacity = outs[0].shape[0]
    if demand <= capacity:
        _store_range(batch, 0, demand, outs)
        return
    assert cursor is not None
    lo = int(cursor) % demand
    to_end = min(capacity, demand - lo)
    _store_range(batch, lo, lo + to_end, outs)
    slots, tokens, positions, prev_slots = (out[to_end:] for out in outs)
    _store_range(batch, 0, capacity - to_end, (slots, tokens, positions, prev_slots))
    cursor.fill_((lo + capacity) % demand)


def _store_range(batch: Batch, lo: int, hi: int, outs: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    if lo >= hi:
        return
    owner, positions = batch.entries(lo, hi)
    rows = batch.rows[owner]
    tokens = torch.full_like(positions, -1)
    if batch.pool is not None and batch.valid_lens is not None:
        place = positions + batch.token_offset
        known = (place >= 0) & (place < batch.valid_lens[owner])
        tokens[known] = batch.pool[rows[known], place[known]].to(torch.int64)
    slots = batch.translate(batch.raw_slots(rows, positions))
    prev_slots = batch.translate(batch.raw_slots(rows, positions - 1))
    for out, values in zip(outs, (slots, tokens, positions, prev_slots), strict=True):
        out[: hi - lo] = values
