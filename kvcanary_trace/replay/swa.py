"""The sliding-window group's slots: a second pool behind `full_to_swa_index_mapping`.

A token has a window slot while some running request has it within its window, and afterwards as long as the prefix
cache keeps it and nobody needs the room. Windows are counted per token, since requests with a common prefix share
tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .pool import SlotPool
from .radix import RadixCache

__all__ = ["SlidingWindow"]

Slots = npt.NDArray[np.int64]


class SlidingWindow:
    """Window slots of one run; allocated token by token, slot 0 reserved.

    Attributes:
        mapping: [pool_tokens + page_size + 1] int64. Full slot → window slot; 0 where there is none, last entry -1.
    """

    def __init__(self, window: int, pool_tokens: int, page_size: int, swa_pool_tokens: int) -> None:
        self.window = window
        self.pool = SlotPool(swa_pool_tokens)
        num_slots = pool_tokens + page_size
        self.mapping = np.zeros(num_slots + 1, np.int64)
        self.mapping[-1] = -1
        self._users = np.zeros(num_slots, np.int32)  # requests that have the token within their window
        self._cached = np.zeros(num_slots, bool)  # the prefix cache owns the full slot
        self.evictable = 0  # window slots of cached tokens that nobody's window holds

    def cover(self, slots: Slots) -> None:
        """Give new tokens a window slot and their request's claim."""
        self.mapping[slots] = self.pool.alloc_slots(len(slots))
        self._users[slots] = 1

    def enter(self, slots: Slots) -> None:
        """Claim cached tokens for one more request's window; all of them have window slots."""
        self.evictable -= int(np.count_nonzero(self._users[slots] == 0))
        self._users[slots] += 1

    def leave(self, slots: Slots) -> None:
        """Drop one claim per item of `slots`, which may repeat. Unclaimed tokens of no cache lose their window slot."""
        np.subtract.at(self._users, slots, 1)
        idle = slots[self._users[slots] == 0]
        if len(idle) > 1:
            idle = np.unique(idle)
        cached = self._cached[idle]
        self.evictable += int(np.count_nonzero(cached))
        self._unmap(idle[~cached])

    def keep(self, slots: Slots) -> None:
        """The prefix cache now owns these full slots. Their request still claims those within its window."""
        self._cached[slots] = True
        self.evictable += int(np.count_nonzero((self._users[slots] == 0) & (self.mapping[slots] > 0)))

    def drop(self, slots: Slots) -> None:
        """These full slots are being freed; nobody's window holds them any more."""
        mapped = slots[self.mapping[slots] > 0]
        self.evictable -= int(np.count_nonzero(self._cached[mapped]))
        self._cached[slots] = False
        self._users[slots] = 0
        self._unmap(mapped)

    def replace(self, ours: Slots, theirs: Slots, claimed_from: int) -> None:
        """A request's tokens turn out to be cached under `theirs`: hand over claims, and window slots it lacks.

        Args:
            ours: [n] full slots of the request, about to be freed.
            theirs: [n] full slots of the cache, same tokens.
            claimed_from: Index from which the request's window holds them; n for none.
        """
        give = (self.mapping[theirs] == 0) & (self.mapping[ours] > 0)
        self.mapping[theirs[give]] = self.mapping[ours[give]]
        self.mapping[ours[give]] = 0
        self.evictable += int(np.count_nonzero(self._users[theirs[give]] == 0))
        self.enter(theirs[claimed_from:])
        self._users[ours] = 0

    def usable_prefix(self, slots: Slots, page_size: int) -> int:
        """Longest prefix of cached tokens, in whole pages, whose last window is still there to go on from."""
        if not len(slots):
            return 0
        index = np.arange(len(slots))
        gap = np.maximum.accumulate(np.where(self.mapping[slots] > 0, -1, index))
        ends = index + 1
        usable = (index - gap >= np.minimum(self.window, ends)) & (ends % page_size == 0)
        found = np.flatnonzero(usable)
        return int(found[-1]) + 1 if len(found) else 0

    def evict(self, num_tokens: int, cache: RadixCache) -> None:
        """Take window slots of cached tokens outside every window, least recently used first; a twentieth at least."""
        todo = min(max(num_tokens, self.pool.capacity // 20), self.evictable)
        for node in sorted(cache.nodes(), key=lambda node: node.last_use):
            if todo <= 0:
                break
            idle = node.slots[(self._users[node.slots] == 0) & (self.mapping[node.slots] > 0)][:todo]
            self._unmap(idle)
            self.evictable -= len(idle)
            todo -= len(idle)

    def _unmap(self, slots: Slots) -> None:
        self.pool.free_slots(self.mapping[slots])
        self.mapping[slots] = 0
