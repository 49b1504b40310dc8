"""The verify entries of a batch on the host: checked, then gathered from the requests' rows."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .host_arrays import CHUNK, I64, array
from .refusals import map_refusal, prefix_refusal, row_refusal, token_row_refusal, token_width_refusal

_COPY_MIN_MEAN: Final = 48
"""Mean entries per request from which one slice copy per request (about 1 µs) beats a gather (about 10 ns an entry)."""


class Table:
    """Rows of slots, and the map to SWA slots if there is one."""

    def __init__(self, req_to_token: Tensor, mapping: Tensor | None) -> None:
        table: NDArray[np.int32] = array(req_to_token)
        self.num_rows, self.width = table.shape
        self.flat = table.reshape(-1)
        self.map: I64 | None = None if mapping is None else array(mapping)

    def translate(self, slots: I64) -> None:
        """Map slots in place; negative ones pass through."""
        if self.map is None or not len(slots):
            return
        negative = slots < 0
        if negative.any():
            np.copyto(slots, self.map.take(np.maximum(slots, 0), mode="clip"), where=~negative)
        else:
            slots[:] = self.map.take(slots, mode="clip")

    def at(self, rows: I64, positions: I64) -> I64:
        """Raw slots at (row, position) pairs, -1 at position -1."""
        slots: I64 = self.flat.take(rows * self.width + positions, mode="clip").astype(np.int64)
        slots[positions < 0] = -1
        return slots


class Tokens:
    """The pool of expected tokens, and how much of each request's row counts."""

    def __init__(self, pool: Tensor, valid_lens: Tensor, offset: int) -> None:
        table: NDArray[np.int32] = array(pool)
        self.num_rows, self.width = table.shape
        self.flat = table.reshape(-1)
        self.valid_lens: I64 = array(valid_lens)
        self.offset = offset


class Entries:
    """The verify entries of a batch, by flat index: request after request, position after position."""

    def __init__(self, table: Table, rows: I64, starts: I64, offsets: I64, tokens: Tokens | None) -> None:
        self._table, self._tokens = table, tokens
        self.demand = int(offsets[-1])
        counts = offsets[1:] - offsets[:-1]
        self._req = counts.nonzero()[0]
        self._row, self._start = rows[self._req], starts[self._req]
        self._first, self._count = offsets[self._req], counts[self._req]
        self._last = self._first + self._count
        self._copy = self.demand >= _COPY_MIN_MEAN * len(self._req)
        self._base = self._row * table.width + self._start - self._first  # flat entry + base = place in the table

    def check(self) -> None:
        """Refuse rows and tokens outside their tables, and slots outside the map (which means reading every slot)."""
        if not len(self._req):
            return
        table, ends = self._table, self._start + self._count
        outside = (self._row < 0) | (self._row >= table.num_rows)
        if outside.any():
            i = int(outside.argmax())
            raise row_refusal(int(self._req[i]), int(self._row[i]), table.num_rows)
        if int(ends.max()) > table.width:
            i = int((ends > table.width).argmax())
            raise prefix_refusal(int(self._req[i]), int(ends[i]), table.width)
        if self._tokens is not None:
            self._check_tokens(self._tokens, ends)
        if table.map is not None:
            self._check_map(len(table.map))

    def _check_tokens(self, tokens: Tokens, ends: I64) -> None:
        lo = np.maximum(self._start + tokens.offset, 0)
        hi = np.minimum(ends + tokens.offset, tokens.valid_lens[self._req])
        wanted = lo < hi
        outside = wanted & (self._row >= tokens.num_rows)
        if outside.any():
            i = int(outside.argmax())
            raise token_row_refusal(int(self._req[i]), int(self._row[i]), tokens.num_rows)
        too_far = wanted & (hi > tokens.width)
        if too_far.any():
            i = int(too_far.argmax())
            raise token_width_refusal(int(self._req[i]), int(hi[i]), tokens.width)

    def _check_map(self, map_len: int) -> None:
        heads = self._table.at(self._row, self._start - 1)
        fine = int(heads.max()) < map_len
        raw = np.empty(min(CHUNK, self.demand), dtype=np.int64)
        for lo in range(0, self.demand, CHUNK):
            part = raw[: min(CHUNK, self.demand - lo)]
            self._gather(lo, lo + len(part), part, None)
            if int(part.max()) >= map_len or not fine:
                self._refuse_map(heads, map_len)

    def _refuse_map(self, heads: I64, map_len: int) -> None:
        for i, head in enumerate(heads.tolist()):
            raw = np.empty(self._count[i], dtype=np.int64)
            self._gather(int(self._first[i]), int(self._last[i]), raw, None)
            for slot in (int(raw[0]), head, *raw[1:].tolist()):  # the order in which entries name slots
                if slot >= map_len:
                    raise map_refusal(slot, map_len)

    def _touched(self, lo: int, hi: int) -> slice:
        """The requests that own the entries [lo, hi)."""
        if lo == 0 and hi == self.demand:
            return slice(0, len(self._req))
        first = int(np.searchsorted(self._last, lo, side="right"))
        return slice(first, int(np.searchsorted(self._first, hi, side="left")))

    def _gather(self, lo: int, hi: int, slots: I64, positions: I64 | None) -> None:
        """Raw slots (and positions) of the entries [lo, hi)."""
        reqs = self._touched(lo, hi)
        first, last = self._first[reqs], self._last[reqs]
        flat = self._table.flat
        if self._copy:
            steps = _steps(int(self._count[reqs].max()))
            rows = zip(
                first.tolist(), last.tolist(), self._base[reqs].tolist(), self._start[reqs].tolist(), strict=True
            )
            for begin, end, base, start in rows:
                a, b = max(begin, lo), min(end, hi)
                slots[a - lo : b - lo] = flat[a + base : b + base]
                if positions is not None:
                    np.add(steps[a - begin : b - begin], start, positions[a - lo : b - lo])
            return
        counts = np.minimum(last, hi) - np.maximum(first, lo)
        entry = np.arange(lo, hi)
        slots[:] = flat.take(self._base[reqs].repeat(counts) + entry)
        if positions is not None:
            np.add((self._start[reqs] - first).repeat(counts), entry, positions)

    def store(self, lo: int, hi: int, slots: I64, tokens: I64, positions: I64, prev_slots: I64) -> None:
        """Store the entries [lo, hi); the outputs are as long."""
        if lo >= hi:
            return
        table = self._table
        self._gather(lo, hi, slots, positions)
        for a in range(0, hi - lo, CHUNK):
            table.translate(slots[a : a + CHUNK])
        prev_slots[1:] = slots[:-1]
        # A request's first entry, and the first one stored, have their predecessor elsewhere.
        reqs = self._touched(lo, hi)
        places = np.maximum(self._first[reqs], lo)
        heads = table.at(self._row[reqs], self._start[reqs] + places - self._first[reqs] - 1)
        table.translate(heads)
        prev_slots[places - lo] = heads
        tokens.fill(-1)
        if self._tokens is not None:
            self._store_tokens(self._tokens, lo, hi, tokens)

    def _store_tokens(self, pool: Tokens, lo: int, hi: int, tokens: I64) -> None:
        reqs = self._touched(lo, hi)
        first, last, start, row = self._first[reqs], self._last[reqs], self._start[reqs], self._row[reqs]
        shift = first - start  # position + shift = flat entry
        # Entries whose token is known: those at positions [-offset, valid_len - offset).
        begin = np.maximum(np.maximum(first, lo), shift - pool.offset)
        end = np.minimum(np.minimum(last, hi), pool.valid_lens[self._req[reqs]] - pool.offset + shift)
        base = row * pool.width + pool.offset - shift
        known = begin < end
        begin, end, base = begin[known], end[known], base[known]
        if self._copy:
            for a, b, c in zip(begin.tolist(), end.tolist(), base.tolist(), strict=True):
                tokens[a - lo : b - lo] = pool.flat[a + c : b + c]
            return
        counts = end - begin
        place = np.arange(int(counts.sum())) + np.repeat(begin - np.cumsum(counts) + counts, counts)
        tokens[place - lo] = pool.flat.take(place + np.repeat(base, counts))


_step_cache: I64 = np.arange(CHUNK)


def _steps(length: int) -> I64:
    """[>= length] 0, 1, 2, …; read only."""
    global _step_cache
    if len(_step_cache) < length:
        _step_cache = np.arange(2 * length)
    return _step_cache
