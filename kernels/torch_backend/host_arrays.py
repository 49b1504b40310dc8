"""Zero-copy numpy views of CPU tensors, and the scratch that the host kernels work in."""

from __future__ import annotations

import threading
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

I64: TypeAlias = NDArray[np.int64]
U64: TypeAlias = NDArray[np.uint64]
Bools: TypeAlias = NDArray[np.bool_]

CHUNK: Final = 32_768
"""Entries worked on at a time: a dozen scratch arrays of this length stay in the cache, and numpy's cost per call
(about 1 µs) is spread over enough entries not to show. Half and double of it were slower by a tenth."""


def array(tensor: Tensor) -> NDArray[Any]:
    """The tensor's memory as a numpy array of its own dtype."""
    return tensor.numpy()


def slot_words(canary_buf: Tensor) -> U64:
    """[num_slots, words_per_slot] view of a canary buffer."""
    return array(canary_buf).view(np.uint64)


class Scratch(threading.local):
    """Arrays that a thread's host kernels reuse: fresh ones of this size would page-fault on every launch."""

    def __init__(self) -> None:
        self._held: dict[str, U64] = {}

    def words(self, name: str, length: int, width: int = 1) -> U64:
        """An uninitialised [length] array (or [length, width], if wider), `length` at most CHUNK."""
        held = self._held.get(name)
        if held is None:
            held = self._held[name] = np.empty((CHUNK, width) if width > 1 else CHUNK, dtype=np.uint64)
        return held[:length]


scratch: Final = Scratch()
