"""The flight recorder: fixed rows of int64 words in host memory, one producer, oldest row overwritten.

A row is published in three moves: word 0 becomes -seq, the row is filled and its last word becomes seq, word 0 becomes
seq. A reader reads the last word, copies the row, reads word 0 and takes the row only if both are the positive seq that
it expects. Without the invalidation first, a reader accepts torn rows. x86 keeps the order of these stores and loads;
inside one process the interpreter lock does so anywhere.

Rows are numbered from 1. Every row ends up in exactly one place: published = drained + overwritten + pending.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int64]

ROW_WORDS: Final = 32
_LAST: Final = ROW_WORDS - 1
_FIRST_READ_ROWS: Final = 256
_MAX_READ_ROWS: Final = 8192


class Ring:
    """A ring of `rows` rows of 32 words. `publish` belongs to one thread; a `RingReader` may live on another."""

    __slots__ = ("_buffer", "_cells", "_next", "_pack_into", "_size_words", "rows", "used_words", "words")

    def __init__(self, rows: int, words: Words | None = None, *, used_words: int = _LAST) -> None:
        """Make an empty ring, or lay one over existing memory.

        Args:
            rows: Rows kept, at least 2.
            words: [rows, 32] int64, C-contiguous and zero; allocated when None.
            used_words: Words that `publish` writes, the first included; the rest stays zero, but for the last.
        """
        if rows < 2:
            raise ValueError(f"a ring needs at least 2 rows, got {rows}")
        self.rows = rows
        self._size_words = rows * ROW_WORDS
        self.words: Words = np.zeros((rows, ROW_WORDS), dtype=np.int64) if words is None else words
        flat = memoryview(self.words.reshape(-1))  # type: ignore[arg-type]
        self._cells = flat.cast("B").cast("q")
        self._buffer = flat.cast("B")
        self.used_words = used_words
        self._pack_into = struct.Struct(f"={used_words}q").pack_into
        self._next = 1

    @property
    def published(self) -> int:
        """Rows published so far, overwritten ones included."""
        return self._next - 1

    def publish(self, row: list[Any]) -> int:
        """Put one row into the ring and return its number.

        Args:
            row: [used_words] int64 words; word 0 is the ring's own and is overwritten.

        Raises:
            struct.error: a word is no int64, or their number is wrong. Only the slot's old row is gone.
        """
        seq = self._next
        word = (seq - 1) * ROW_WORDS % self._size_words
        cells = self._cells
        cells[word] = row[0] = -seq
        self._pack_into(self._buffer, word << 3, *row)
        cells[word + _LAST] = seq
        self._next = seq + 1
        cells[word] = seq
        return seq


class RingReader:
    """Takes whole rows out of a ring, in order. All methods belong to one thread (the drain's) or one process."""

    def __init__(self, words: Words) -> None:
        """Read from the beginning of `words`, [rows, 32] int64, possibly mapped from another process."""
        self._words = words
        self._rows = words.shape[0]
        self.next_seq = 1
        self.drained = 0
        self.overwritten = 0
        self.last_lost_seq: int | None = None
        self._margin = 0
        self._skipped = False

    def read(self, max_rows: int = 1 << 20) -> Words:
        """All rows published since the last read, at most `max_rows`: [n, 32] int64, a copy."""
        parts: list[Words] = []
        taken, window = 0, _FIRST_READ_ROWS
        while taken < max_rows:
            part, more = self._read_window(min(window, max_rows - taken))
            if len(part):
                parts.append(part)
                taken += len(part)
            if not more:
                break
            window = min(2 * window, _MAX_READ_ROWS)
        self.drained += taken
        if not parts:
            return np.empty((0, ROW_WORDS), dtype=np.int64)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read_window(self, want: int) -> tuple[Words, bool]:
        """Rows of one contiguous stretch, and whether another look is worth it."""
        slot = (self.next_seq - 1) % self._rows
        stretch = self._words[slot : min(slot + want, self._rows)]
        last = stretch[:, _LAST].copy()
        rows = stretch.copy()
        first = stretch[:, 0].copy()
        expected = np.arange(self.next_seq, self.next_seq + len(rows), dtype=np.int64)
        whole = (first == expected) & (last == expected)
        count = len(whole) if whole.all() else int(whole.argmin())
        self.next_seq += count
        if count:
            self._skipped = False
        more = count == len(whole) or self._skip_lost((slot + count) % self._rows, int(first[count]))
        rows = rows[:count]
        rows[:, 0] = expected[:count]  # a copy taken before word 0 was read may still show the invalid mark
        return rows, more

    def _skip_lost(self, slot: int, found: int) -> bool:
        """Step over rows that are gone; `found` was word 0 where `next_seq` should be. False when nothing is lost."""
        if abs(found) < self.next_seq:
            return False  # not published yet
        if found == self.next_seq:
            return True  # finished while we looked: take it in the next look
        head = int(np.abs(self._words[:, 0]).max())
        if -found == self.next_seq:
            if head == self.next_seq:
                return False  # being written
            if int(self._words[slot, 0]) != found:
                return True  # finished while we looked
            target = self.next_seq + 1  # its writer was interrupted for good and went on with the next row
        else:
            # The oldest row that can still stand; further ahead each time that a writer at full speed took it from us.
            self._margin = min(2 * self._margin + 1, self._rows // 2) if self._skipped else 0
            self._skipped = True
            target = min(max(self.next_seq + 1, head - self._rows + 1 + self._margin), head)
        self.overwritten += target - self.next_seq
        self.last_lost_seq = target - 1
        self.next_seq = target
        return True

    def balance(self, published: int) -> tuple[int, int, int]:
        """(drained, overwritten, pending) rows; they sum to `published`."""
        return self.drained, self.overwritten, published - self.drained - self.overwritten
