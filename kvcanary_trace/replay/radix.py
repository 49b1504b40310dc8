"""The prefix cache: a radix tree over token pages, with reference counts and least-recently-used eviction.

A node owns the KV slots of its tokens. Requests lock the path they stand on; what nobody locks is evictable, leaves
first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator

import numpy as np
import numpy.typing as npt

__all__ = ["Node", "RadixCache"]

Tokens = npt.NDArray[np.int32]
Slots = npt.NDArray[np.int64]
_NO_SLOTS: Slots = np.empty(0, np.int64)


class Node:
    """A run of tokens below its parent's: `tokens[i]` is kept in `slots[i]`."""

    __slots__ = ("children", "key", "last_use", "locks", "parent", "slots", "tokens")

    def __init__(self, parent: Node | None, key: Hashable, tokens: Tokens, slots: Slots) -> None:
        self.parent = parent
        self.key = key  # under which the parent has it
        self.tokens = tokens
        self.slots = slots
        self.children: dict[Hashable, Node] = {}
        self.locks = 0
        self.last_use = 0


class RadixCache:
    """Prefix cache over a slot pool.

    Every length that goes in or comes out is a multiple of `page_size`. A namespace keeps apart what must never share.

    Args:
        page_size: Tokens a page.
        free: Called with the slots of an evicted node.
    """

    def __init__(self, page_size: int, free: Callable[[Slots], None]) -> None:
        self.page_size = page_size
        self._free = free
        self.root = Node(None, None, np.empty(0, np.int32), _NO_SLOTS)
        self.root.locks = 1
        self.evictable = 0  # tokens of nodes that nobody locks
        self.protected = 0  # tokens of locked nodes
        self._clock = 0
        self._heap: list[tuple[int, int, Node]] = []  # leaves, by last use; stale items are dropped when popped
        self._tie = 0

    # --- look-up ------------------------------------------------------------------------------------------------------

    def match(self, tokens: Tokens, namespace: Hashable) -> tuple[Slots, Node]:
        """Longest cached prefix of `tokens`, in whole pages, and the node it ends at (split there if need be)."""
        self._clock += 1
        node, found, at = self.root, [], 0
        while True:
            child = self._child(node, tokens, at, namespace)
            if child is None:
                break
            same = self._common(child.tokens, tokens, at)
            if same < len(child.tokens):
                child = self._split(child, same)
            child.last_use = self._clock
            found.append(child.slots)
            at += same
            node = child
        self._offer(node)
        return (np.concatenate(found) if found else _NO_SLOTS), node

    def insert(self, tokens: Tokens, slots: Slots, namespace: Hashable) -> tuple[int, Node]:
        """Keep `slots` for `tokens` (whole pages), unlocked. Returns how many leading tokens were cached already, under
        other slots perhaps, and the node of the last token; the caller still owns the slots of those leading tokens."""
        cached, node = self.match(tokens, namespace)
        done = len(cached)
        if done < len(tokens):
            key = self._key(tokens, done, node, namespace)
            child = Node(node, key, tokens[done:].copy(), slots[done:].copy())
            child.last_use = self._clock
            node.children[key] = child
            self.evictable += len(child.tokens)
            self._offer(child)
            node = child
        return done, node

    # --- locks and eviction -------------------------------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        """Keep a node and everything above it."""
        at: Node | None = node
        while at is not None and at is not self.root:
            if at.locks == 0:
                self.evictable -= len(at.tokens)
                self.protected += len(at.tokens)
            at.locks += 1
            at = at.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        at: Node | None = node
        while at is not None and at is not self.root:
            if at.locks <= 0:
                raise ValueError("unlocked a node of the prefix cache that nobody holds")
            at.locks -= 1
            if at.locks == 0:
                self.protected -= len(at.tokens)
                self.evictable += len(at.tokens)
                self._offer(at)
            at = at.parent

    def evict(self, num_tokens: int) -> int:
        """Free the least recently used unlocked leaves until `num_tokens` are freed or none is left; tokens freed."""
        freed = 0
        while freed < num_tokens and self._heap:
            last_use, _, node = heapq.heappop(self._heap)
            if node.locks or node.children or node.last_use != last_use or node.parent is None:
                continue
            parent = node.parent
            del parent.children[node.key]
            node.parent = None
            freed += len(node.tokens)
            self.evictable -= len(node.tokens)
            self._free(node.slots)
            self._offer(parent)
        return freed

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, in no promised order."""
        todo = list(self.root.children.values())
        while todo:
            node = todo.pop()
            yield node
            todo.extend(node.children.values())

    # --- inside -------------------------------------------------------------------------------------------------------

    def _offer(self, node: Node) -> None:
        """Put a node on the eviction heap if it could go now."""
        if node is not self.root and not node.locks and not node.children:
            self._tie += 1
            heapq.heappush(self._heap, (node.last_use, self._tie, node))

    def _key(self, tokens: Tokens, at: int, node: Node, namespace: Hashable) -> Hashable:
        page = tokens[at : at + self.page_size].tobytes()
        return (namespace, page) if node is self.root else page

    def _child(self, node: Node, tokens: Tokens, at: int, namespace: Hashable) -> Node | None:
        if not node.children or at + self.page_size > len(tokens):
            return None
        return node.children.get(self._key(tokens, at, node, namespace))

    def _common(self, ours: Tokens, tokens: Tokens, at: int) -> int:
        """Leading tokens in common, in whole pages."""
        most = min(len(ours), len(tokens) - at)
        differ = ours[:most] != tokens[at : at + most]
        first = int(differ.argmax()) if most else 0
        same = first if most and differ[first] else most
        return same - same % self.page_size

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two; returns the upper half, which has the lower one as its only child."""
        parent = node.parent
        assert parent is not None
        upper = Node(parent, node.key, node.tokens[:at], node.slots[:at])
        upper.locks, upper.last_use = node.locks, node.last_use
        parent.children[node.key] = upper
        node.tokens, node.slots = node.tokens[at:], node.slots[at:]
        node.parent = upper
        node.key = node.tokens[: self.page_size].tobytes()
        upper.children[node.key] = node
        return upper
