"""Where KV slots come from: a page allocator whose page 0 is the dummy's, and a stack of `req_to_token` rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["RowPool", "SlotPool"]

Slots = npt.NDArray[np.int64]


class SlotPool:
    """Pages of KV slots, handed out last in, first out, so that freed slots are soon overwritten.

    Slots run from `page_size` to `page_size + capacity - 1`; those below belong to page 0, as does the dummy slot 0.
    """

    def __init__(self, capacity: int, page_size: int = 1) -> None:
        if capacity < page_size or capacity % page_size:
            raise ValueError(f"capacity must be a positive multiple of page_size={page_size}, got {capacity}")
        self.capacity = capacity
        self.page_size = page_size
        num_pages = capacity // page_size
        # The top of the stack is its end: page 1 leaves first.
        self._stack = np.arange(num_pages, 0, -1, dtype=np.int64)
        self._num_free = num_pages

    @property
    def available(self) -> int:
        """Free tokens."""
        return self._num_free * self.page_size

    @property
    def free_pages(self) -> Slots:
        """The free pages (a view; changes with the next call)."""
        return self._stack[: self._num_free]

    def alloc_pages(self, num_pages: int) -> Slots:
        """Take pages off the stack.

        Raises:
            ValueError: Fewer are free; nothing is taken.
        """
        if num_pages > self._num_free:
            raise ValueError(f"asked for {num_pages} pages, {self._num_free} are free")
        self._num_free -= num_pages
        pages: Slots = self._stack[self._num_free : self._num_free + num_pages][::-1].copy()
        return pages

    def alloc_slots(self, num_tokens: int) -> Slots:
        """Slots of whole new pages, in order; `num_tokens` is a multiple of the page size."""
        pages = self.alloc_pages(num_tokens // self.page_size)
        if self.page_size == 1:
            return pages
        slots: Slots = np.add.outer(pages * self.page_size, np.arange(self.page_size, dtype=np.int64)).reshape(-1)
        return slots

    def free_slots(self, slots: Slots) -> None:
        """Give whole pages back; a page counts as given with its first slot, so a partly filled last page is fine."""
        pages = slots if self.page_size == 1 else slots[slots % self.page_size == 0] // self.page_size
        if self._num_free + len(pages) > len(self._stack):
            raise ValueError(f"freed {len(pages)} pages with {self._num_free} of {len(self._stack)} free already")
        self._stack[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)


class RowPool:
    """Rows 1… of `req_to_token`, the one freed last first; row 0 stays padding."""

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows - 1, 0, -1))

    @property
    def available(self) -> int:
        """Free rows."""
        return len(self._free)

    def alloc(self) -> int:
        """Take a row."""
        return self._free.pop()

    def free(self, row: int) -> None:
        """Give a row back."""
        self._free.append(row)
