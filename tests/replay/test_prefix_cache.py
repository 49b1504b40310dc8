"""The prefix cache and the pools against plain models: no slot is lost, owned twice, or freed while locked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary_trace.replay.pool import RowPool, SlotPool
from kvcanary_trace.replay.radix import RadixCache


def key(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def held(cache: RadixCache) -> list[int]:
    """Slots of every node, in no order."""
    return [slot for node in cache.nodes() for slot in node.slots.tolist()]


def sums(cache: RadixCache) -> tuple[int, int]:
    """Tokens that are locked and not, recounted."""
    locked = sum(len(node.tokens) for node in cache.nodes() if node.locks)
    return locked, sum(len(node.tokens) for node in cache.nodes() if not node.locks)


def test_match_splits_and_keeps_locks() -> None:
    """A partial match cuts a node; the lock below also holds the new upper half."""
    cache = RadixCache(1, lambda slots: None)
    _, node = cache.insert(key(1, 2, 3, 4), np.arange(10, 14), "a")
    cache.lock(node)
    slots, upper = cache.match(key(1, 2, 9), "a")
    assert slots.tolist() == [10, 11]
    assert upper.locks == 1
    assert (cache.protected, cache.evictable) == (4, 0)
    cache.unlock(node)
    assert (cache.protected, cache.evictable) == (0, 4)
    with pytest.raises(ValueError, match="nobody holds"):
        cache.unlock(node)


def test_namespaces_and_pages_keep_apart() -> None:
    """Equal tokens of another namespace are not shared, nor is part of a page."""
    cache = RadixCache(4, lambda slots: None)
    cache.insert(np.arange(8, dtype=np.int32), np.arange(4, 12), "a")
    assert len(cache.match(np.arange(8, dtype=np.int32), "b")[0]) == 0
    assert len(cache.match(key(0, 1, 2, 3, 4, 5, 9, 9), "a")[0]) == 4
    assert len(cache.match(np.arange(7, dtype=np.int32), "a")[0]) == 4


def test_eviction_is_least_recently_used_and_spares_locks() -> None:
    """Old unlocked leaves go first; a locked path stays; a parent goes after its last child."""
    freed: list[int] = []
    cache = RadixCache(1, lambda slots: freed.extend(slots.tolist()))
    cache.insert(key(1, 2), np.array([10, 11]), "a")
    cache.insert(key(1, 3), np.array([12, 13]), "a")  # slot 12 stays the caller's: token 1 is cached under 10
    _, kept = cache.insert(key(7, 8), np.array([14, 15]), "a")
    cache.lock(kept)
    cache.match(key(1, 2), "a")
    assert cache.evict(1) == 1
    assert freed == [13]
    assert cache.evict(100) == 2
    assert freed == [13, 11, 10]
    assert sorted(held(cache)) == [14, 15]


def random_tokens(draw_from: int = 3) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, draw_from), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from(["put", "lock", "unlock", "evict", "match"]), random_tokens()), max_size=40),
)
def test_cache_conserves_slots(page_size: int, steps: list[tuple[str, list[int]]]) -> None:
    """Any mix of calls: each slot is in the pool or in one node, counters recount, locked tokens keep their slots."""
    pool = SlotPool(60 * page_size, page_size)
    cache = RadixCache(page_size, pool.free_slots)
    locked = []
    content: dict[int, tuple[int, ...]] = {}  # slot → the prefix it was written for
    for what, tokens in steps:
        whole = np.repeat(np.array(tokens, np.int32), page_size)
        if what == "put":
            short = len(whole) - pool.available
            if short > 0:
                cache.evict(short)
            if pool.available < len(whole):
                continue
            slots = pool.alloc_slots(len(whole))
            content.update({int(slot): tuple(whole[: i + 1]) for i, slot in enumerate(slots)})
            cached, _ = cache.insert(whole, slots, "n")
            pool.free_slots(slots[:cached])
        elif what == "lock":
            slots, node = cache.match(whole, "n")
            cache.lock(node)
            locked.append((node, whole[: len(slots)], slots))
        elif what == "unlock" and locked:
            cache.unlock(locked.pop()[0])
        elif what == "evict":
            cache.evict(len(tokens))
        elif what == "match":
            slots, _ = cache.match(whole, "n")
            assert [content[int(slot)] for slot in slots] == [tuple(whole[: i + 1]) for i in range(len(slots))]
        for _, prefix, slots in locked:
            assert cache.match(prefix, "n")[0].tolist() == slots.tolist()
        assert sums(cache) == (cache.protected, cache.evictable)
        free = (pool.free_pages[:, None] * page_size + np.arange(page_size)).reshape(-1).tolist()
        assert sorted(free + held(cache)) == list(range(page_size, page_size + pool.capacity))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(1, 5), max_size=30))
def test_pool_hands_out_each_page_once(page_size: int, sizes: list[int]) -> None:
    """Slots are aligned, distinct, never of page 0, and all come back."""
    pool = SlotPool(20 * page_size, page_size)
    out: list[np.ndarray] = []
    for size in sizes:
        if size * page_size > pool.available:
            with pytest.raises(ValueError, match="are free"):
                pool.alloc_slots(size * page_size)
            pool.free_slots(out.pop(0))
            continue
        slots = pool.alloc_slots(size * page_size)
        assert slots[0] % page_size == 0
        assert slots.min() >= page_size
        out.append(slots)
        taken = np.concatenate(out)
        assert len(np.unique(taken)) == len(taken) == pool.capacity - pool.available
    for slots in out:
        pool.free_slots(slots)
    assert pool.available == pool.capacity
    with pytest.raises(ValueError, match="freed 1 pages"):
        pool.free_slots(np.array([page_size]))


def test_rows_start_at_one() -> None:
    """Row 0 is padding; the lowest rows are used first."""
    rows = RowPool(4)
    assert [rows.alloc(), rows.alloc(), rows.alloc()] == [1, 2, 3]
    rows.free(2)
    assert rows.alloc() == 2
    with pytest.raises(ValueError, match="multiple of page_size"):
        SlotPool(10, 4)
