"""The engine model: first-come continuous batching over a paged KV pool, one forward step at a time.

`schedule()` admits requests, allocates slots and describes the step; after the kernels ran, `complete()` advances time,
finishes requests and frees what nobody needs. Per-request state lives in arrays by row, so that a decode step costs
the same handful of array operations whatever the batch size.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from .batch import Batch, StepClock
from .knobs import EngineKnobs, EngineSizes
from .pool import RowPool, SlotPool
from .radix import Node, RadixCache
from .swa import SlidingWindow
from .tokens import request_tokens
from .workloads import Request, Workload

__all__ = ["Engine", "EngineStats"]

Ints = npt.NDArray[np.int64]

# Share of the output still to come that admission keeps room for: it starts high, falls as decoding goes well, and a
# retraction puts it back up (SGLang's new-token ratio).
_RATIO_START: Final = 0.7
_RATIO_LEAST: Final = 0.1
_RATIO_STEPS: Final = 600


@dataclass(slots=True)
class _Waiting:
    """A queued request: new, or retracted with `prompt_len` tokens to bring back."""

    number: int
    request: Request
    prompt_len: int
    tokens: npt.NDArray[np.int32] | None = None
    tried_at: int = -1  # version of the cache at the last failed try, and what it found there
    prefix_len: int = 0


@dataclass(slots=True)
class _Running:
    """An admitted request."""

    number: int
    request: Request
    row: int
    prompt_len: int
    node: Node  # locked; its path holds the first `shared_len` tokens
    shared_len: int


@dataclass(slots=True)
class EngineStats:
    """Counts of one run so far."""

    steps: int = 0
    finished_reqs: int = 0
    retractions: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    evicted_tokens: int = 0


class Engine:
    """One engine over one workload. Deterministic: the same workload, knobs and clock give the same batches.

    Attributes:
        req_to_token: [num_rows, context_length] int32, KV slot of each (row, position); row 0 is padding.
        tokens: [num_rows, context_length] int32, token ids likewise, those still to be generated included.
        kv_lens: [num_rows] int64, tokens of each row that are in the pool.
        swa: The sliding-window group, or None.
        fills_input_ids: Whether batches carry `input_ids`; without kernels nobody reads them.
        tracks_rows: Whether changes of rows are noted for a copy of `req_to_token` on a device.
    """

    def __init__(
        self, workload: Workload, knobs: EngineKnobs, sizes: EngineSizes | None = None, clock: StepClock | None = None
    ) -> None:
        self.knobs = knobs
        self.sizes = sizes or EngineSizes.of(knobs, workload)
        self.clock = clock or StepClock()
        self.stats = EngineStats()
        self.now_s = 0.0
        shape = (self.sizes.num_rows, self.sizes.context_length)
        self.req_to_token = np.zeros(shape, np.int32)
        self.tokens = np.zeros(shape, np.int32)
        self.kv_lens = np.zeros(shape[0], np.int64)
        self.pool = SlotPool(self.sizes.pool_tokens, knobs.page_size)
        self.cache = RadixCache(knobs.page_size, self._free)
        self.swa: SlidingWindow | None = None
        if knobs.swa_window:
            self.swa = SlidingWindow(
                knobs.swa_window, self.sizes.pool_tokens, knobs.page_size, self.sizes.swa_pool_tokens
            )
        self._requests = workload.requests
        self._arrivals = [(r.arrival_s, i) for i, r in enumerate(workload.requests) if r.after < 0]
        heapq.heapify(self._arrivals)
        self._followers: dict[int, list[int]] = {}
        for i, request in enumerate(workload.requests):
            if request.after >= 0:
                self._followers.setdefault(request.after, []).append(i)
        self._waiting: deque[_Waiting] = deque()
        self._waiting_tokens = 0
        self._targets = np.zeros(shape[0], np.int64)  # tokens in the pool at which a row's request is done
        self._row_pool = RowPool(shape[0])
        self._by_row: list[_Running | None] = [None] * shape[0]
        self._ones = np.ones(shape[0], np.int64)
        self._rows = np.empty(0, np.int64)  # of decoding requests, in order of admission
        self._chunked: _Running | None = None  # the request whose prompt is half in
        self._prefilled: list[tuple[_Running, int]] = []  # this step's prefills and their new lengths
        self._decoded = self._rows  # rows that decode in this step
        self._resident_tokens = 0
        self._cache_version = 0
        self.fills_input_ids = True
        self.tracks_rows = False
        self._row_changes: list[tuple[int, int, int]] = []
        self._ratio = _RATIO_START

    # --- what others look at ------------------------------------------------------------------------------------------

    @property
    def kv_used(self) -> int:
        """KV slots held, evictable cache excluded."""
        return self.pool.capacity - self.pool.available - self.cache.evictable

    @property
    def decoding_rows(self) -> Ints:
        """Rows of the requests that decode."""
        return self._rows

    @property
    def num_resident(self) -> int:
        """Admitted requests that are not finished."""
        return len(self._rows) + (self._chunked is not None)

    def note_row_change(self, row: int, start: int, stop: int) -> None:
        """Slots of `req_to_token` changed other than by this step's tokens: a copy on a device must follow."""
        if self.tracks_rows:
            self._row_changes.append((row, start, stop))

    def take_row_changes(self) -> list[tuple[int, int, int]]:
        """Those changes since the last call, as (row, start, stop)."""
        changes, self._row_changes = self._row_changes, []
        return changes

    # --- a step -------------------------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """Build the next step's batch, or None when every request is done."""
        self._take_arrivals()
        if not (self._waiting or len(self._rows) or self._chunked):
            if not self._arrivals:
                return None
            self.now_s = max(self.now_s, self._arrivals[0][0])  # nothing to do until then
            self._take_arrivals()
        mixed = self.knobs.schedule == "mixed"
        decode: tuple[Ints, Ints, Ints] | None = None
        if mixed and len(self._rows):
            decode = self._decode()
            decode = decode if len(decode[0]) else None  # a prompt in progress may have pushed every one out
        self._prefilled = []
        prefills = self._prefills(self.knobs.chunked_prefill_size - (len(decode[0]) if decode else 0))
        if decode is None and not prefills:
            decode = self._decode()
        return self._batch(prefills, decode)

    def complete(self, batch: Batch) -> None:
        """The kernels are done with `batch`: let time pass, finish requests, free what nobody needs."""
        self.stats.steps += 1
        self.now_s += self.clock.duration_s(batch.num_tokens, batch.num_entries)
        rows = self._decoded
        if len(rows):
            self._ratio = max(_RATIO_LEAST, self._ratio - (_RATIO_START - _RATIO_LEAST) / _RATIO_STEPS)
            lens = batch.prefix_lens[batch.num_prefills :] + 1
            self.kv_lens[rows] = lens
            if self.swa is not None:
                gone = lens - self.swa.window - 1
                out = gone >= 0
                self.swa.leave(self.req_to_token[rows[out], gone[out]].astype(np.int64))
            done = lens >= self._targets[rows]
            if done.any():
                self._rows = rows[~done]  # every decoding request was in the batch
                for row in rows[done].tolist():
                    self._finish(self._at(row))
        started = [running for running, new_len in self._prefilled if self._prefill_done(running, new_len)]
        if started:
            self._rows = np.concatenate([self._rows, np.array([running.row for running in started], np.int64)])
        self._prefilled = []
        self._decoded = self._rows[:0]

    def _batch(self, prefills: list[tuple[_Running, int, Ints]], decode: tuple[Ints, Ints, Ints] | None) -> Batch:
        """Put prefills and decodes side by side, prefills first."""
        if decode is not None and not prefills:
            rows, prefix_lens, slots = decode
            extend_lens = self._ones[: len(rows)]
            positions, mode = prefix_lens, "decode"
            input_ids = self.tokens[rows, prefix_lens].astype(np.int64) if self.fills_input_ids else self._rows[:0]
        else:
            row_parts = [np.array([running.row for running, _, _ in prefills], np.int64)]
            prefix_parts = [np.array([start for _, start, _ in prefills], np.int64)]
            extend_parts = [np.array([len(slots) for _, _, slots in prefills], np.int64)]
            slot_parts = [slots for _, _, slots in prefills]
            position_parts = [np.arange(start, start + len(slots)) for _, start, slots in prefills]
            id_parts = [self.tokens[running.row, start : start + len(slots)] for running, start, slots in prefills]
            if decode is not None:
                row_parts.append(decode[0])
                prefix_parts.append(decode[1])
                extend_parts.append(np.ones(len(decode[0]), np.int64))
                slot_parts.append(decode[2])
                position_parts.append(decode[1])
                id_parts.append(self.tokens[decode[0], decode[1]])
            rows, prefix_lens = np.concatenate(row_parts), np.concatenate(prefix_parts)
            extend_lens, slots = np.concatenate(extend_parts), np.concatenate(slot_parts)
            positions, input_ids = np.concatenate(position_parts), np.concatenate(id_parts).astype(np.int64)
            mode = "prefill" if decode is None else "mixed"
        self._resident_tokens += len(slots)
        coming = self._chunked.prompt_len - int(self.kv_lens[self._chunked.row]) if self._chunked else 0
        if self._chunked:
            coming -= next((len(s) for running, _, s in prefills if running is self._chunked), 0)
        fresh = sum(running is not self._chunked for running, _, _ in prefills)
        return Batch(
            step=self.stats.steps,
            start_s=self.now_s,
            mode=mode,
            req_pool_indices=rows,
            prefix_lens=prefix_lens,
            extend_seq_lens=extend_lens,
            input_ids=input_ids,
            positions=positions,
            out_cache_loc=slots,
            num_prefills=len(prefills),
            resident_reqs=len(self._rows) + fresh + (self._chunked is not None),
            resident_tokens=self._resident_tokens,
            waiting_reqs=len(self._waiting),
            waiting_tokens=self._waiting_tokens + coming,
            kv_used=self.kv_used,
            kv_capacity=self.pool.capacity,
            num_entries=int(prefix_lens.sum()),
        )

    # --- arrivals and admission ---------------------------------------------------------------------------------------

    def _take_arrivals(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self.now_s:
            _, number = heapq.heappop(self._arrivals)
            request = self._requests[number]
            self._waiting.append(_Waiting(number, request, request.input_len))
            self._waiting_tokens += request.input_len

    def _prefills(self, budget: int) -> list[tuple[_Running, int, Ints]]:
        """This step's prefills within a token budget: (request, prefix, slots); the half-done prompt goes first."""
        prefills: list[tuple[_Running, int, Ints]] = []
        if self._chunked is not None:
            running = self._chunked
            taken = self._extend(running, budget)
            if taken is None:
                return []
            prefills.append(taken)
            budget -= len(taken[2])
            if int(self.kv_lens[running.row]) + len(taken[2]) >= running.prompt_len:
                self._chunked = None
        while self._chunked is None and self._waiting and budget > 0 and self._row_pool.available:
            admitted = self._admit(self._waiting[0], budget, alone=not (prefills or len(self._rows)))
            if admitted is None:
                break
            taken = self._extend(admitted, budget)
            assert taken is not None
            prefills.append(taken)
            budget -= len(taken[2])
            if taken[1] + len(taken[2]) < admitted.prompt_len:
                self._chunked = admitted
        return prefills

    def _admit(self, waiting: _Waiting, budget: int, alone: bool) -> _Running | None:
        """Take the head of the queue in, if it and what the running ones may still generate fit the pool."""
        request, page = waiting.request, self.knobs.page_size
        output_left = request.input_len + request.output_len - waiting.prompt_len
        reserved = self._reserved()

        def fits(prefix_len: int) -> bool:
            need = waiting.prompt_len - prefix_len + math.ceil(self._ratio * output_left) + page
            return need <= self.pool.available + self.cache.evictable - reserved

        if not alone and waiting.tried_at == self._cache_version and not fits(waiting.prefix_len):
            return None  # nothing that could help has changed since the last try
        if waiting.tokens is None:
            waiting.tokens = request_tokens(request, waiting.number)
        # The last prompt token is always computed: its output starts the generation.
        usable = (waiting.prompt_len - 1) // page * page
        namespace = (request.scope, -1) if request.scope >= 0 else (-1, waiting.number)
        prefix, node = self.cache.match(waiting.tokens[:usable], namespace)
        if self.swa is not None:
            keep = self.swa.usable_prefix(prefix, page)
            if keep < len(prefix):
                prefix, node = self.cache.match(waiting.tokens[:keep], namespace)
        self.cache.lock(node)
        first = min(waiting.prompt_len - len(prefix), budget)
        whole = first == waiting.prompt_len - len(prefix)
        swa_short = self.swa is not None and first > self._swa_room(len(prefix), prefix)
        if (first < page and not whole) or (not alone and (not fits(len(prefix)) or swa_short)):
            self.cache.unlock(node)
            waiting.tried_at, waiting.prefix_len = self._cache_version, len(prefix)
            return None
        self._waiting.popleft()
        self._waiting_tokens -= waiting.prompt_len
        row = self._row_pool.alloc()
        running = _Running(waiting.number, request, row, waiting.prompt_len, node, len(prefix))
        self._by_row[row] = running
        self.tokens[row, : request.total_len] = waiting.tokens
        self.req_to_token[row, : len(prefix)] = prefix
        self.note_row_change(row, 0, len(prefix))
        self.kv_lens[row] = len(prefix)
        self._targets[row] = request.input_len + request.output_len - 1
        if self.swa is not None:
            self.swa.enter(prefix[max(0, len(prefix) - self.swa.window) :])
        self._resident_tokens += len(prefix)
        self.stats.prefix_hit_tokens += len(prefix)
        self.stats.prompt_tokens += waiting.prompt_len
        return running

    def _reserved(self) -> int:
        """Tokens that running requests may still need: the rest of a half-done prompt, a share of outputs to come."""
        rows = self._rows
        to_come = self._ratio * float((self._targets[rows] - self.kv_lens[rows]).sum()) if len(rows) else 0.0
        for running, new_len in self._prefilled:
            to_come += self._ratio * float(self._targets[running.row] - new_len)
        return math.ceil(to_come)

    def _swa_room(self, prefix_len: int, prefix: Ints) -> int:
        """Window slots to be had once the prefix's window is claimed."""
        assert self.swa is not None
        return self.swa.pool.available + self.swa.evictable - min(prefix_len, self.swa.window)

    def _extend(self, running: _Running, budget: int) -> tuple[_Running, int, Ints] | None:
        """Allocate the next part of a prompt, whole pages unless it is the last part."""
        page, row = self.knobs.page_size, running.row
        start = int(self.kv_lens[row])
        count = min(running.prompt_len - start, budget)
        if start + count < running.prompt_len:
            count -= count % page
        if count <= 0:
            return None
        padded = -(-count // page) * page
        # Beside decodes of the same step a prompt waits for room; it retracts nobody who is in the batch.
        if not self._make_room(padded, count, may_retract=not len(self._decoded)):
            return None
        slots = self.pool.alloc_slots(padded)[:count]
        if self.swa is not None:
            self.swa.cover(slots)
        self.req_to_token[row, start : start + count] = slots
        self._prefilled.append((running, start + count))
        return running, start, slots

    def _decode(self) -> tuple[Ints, Ints, Ints]:
        """One token for each decoding request: (rows, prefixes, slots), after retractions if the pool is full."""
        page = self.knobs.page_size
        while True:
            rows = self._rows
            prefix_lens = self.kv_lens[rows]
            fresh = len(rows) if page == 1 else int(np.count_nonzero(prefix_lens % page == 0))
            if self._make_room(fresh * page, len(rows), may_retract=False):
                break
            self._retract()
        if page == 1:
            slots = self.pool.alloc_pages(len(rows))
        else:
            slots = self.req_to_token[rows, np.maximum(prefix_lens - 1, 0)].astype(np.int64) + 1
            slots[prefix_lens % page == 0] = self.pool.alloc_pages(fresh) * page
        if self.swa is not None:
            self.swa.cover(slots)
        self.req_to_token[rows, prefix_lens] = slots
        self._decoded = rows
        return rows, prefix_lens, slots

    # --- room ---------------------------------------------------------------------------------------------------------

    def _make_room(self, num_tokens: int, num_swa: int, *, may_retract: bool) -> bool:
        """Evict cache until the pool has room, then retract if that is allowed. False if there is no room.

        Args:
            num_tokens: Full slots wanted, in whole pages.
            num_swa: Window slots wanted.
            may_retract: Whether decoding requests may be sent back to the queue.
        """
        while True:
            short = num_tokens - self.pool.available
            if short > 0:
                self.stats.evicted_tokens += self.cache.evict(short)
                self._cache_version += 1
            swa_short = 0
            if self.swa is not None:
                swa_short = num_swa - self.swa.pool.available
                if swa_short > 0:
                    self.swa.evict(swa_short, self.cache)
                    swa_short = num_swa - self.swa.pool.available
            if num_tokens <= self.pool.available and swa_short <= 0:
                return True
            if not may_retract:
                return False
            if not len(self._rows):
                raise AssertionError("the pool is full and nobody is left to retract")
            self._retract()

    def _retract(self) -> None:
        """Send the decoding request that has generated least (longest prompt first) back to the head of the queue."""
        inputs = np.array([self._at(int(row)).request.input_len for row in self._rows])
        at = int(np.lexsort((-inputs, self.kv_lens[self._rows] - inputs))[0])
        running = self._at(int(self._rows[at]))
        row, kv_len = running.row, int(self.kv_lens[running.row])
        self._rows = self._rows[self._rows != row]
        self._release_window(row, kv_len)
        self._free(self._slots(row, running.shared_len, kv_len))
        self.cache.unlock(running.node)
        self._leave(running, kv_len)
        waiting = _Waiting(
            running.number, running.request, kv_len + 1, self.tokens[row, : running.request.total_len].copy()
        )
        self._waiting.appendleft(waiting)
        self._waiting_tokens += waiting.prompt_len
        self.stats.retractions += 1
        self._ratio = _RATIO_START

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _prefill_done(self, running: _Running, new_len: int) -> bool:
        """After a prefill: advance, and when the prompt is in, share it. True if the request goes on to decode."""
        row, old_len = running.row, int(self.kv_lens[running.row])
        self.kv_lens[row] = new_len
        if self.swa is not None:
            window = self.swa.window
            self.swa.leave(self._slots(row, max(0, old_len - window), max(0, new_len - window)))
        if new_len < running.prompt_len:
            return False
        if new_len >= self._targets[row]:
            self._finish(running)
            return False
        self._share(running, new_len)
        return True

    def _share(self, running: _Running, kv_len: int) -> None:
        """Put a prompt into the prefix cache and stand on it there."""
        aligned = kv_len - kv_len % self.knobs.page_size
        node = self._insert(running, aligned, kv_len)
        self.cache.lock(node)
        self.cache.unlock(running.node)
        running.node, running.shared_len = node, aligned

    def _finish(self, running: _Running) -> None:
        """A request is done: its tokens stay cached, its row is free, and who waited for it may come."""
        row, kv_len = running.row, int(self.kv_lens[running.row])
        aligned = kv_len - kv_len % self.knobs.page_size
        self._insert(running, aligned, kv_len)
        self._release_window(row, kv_len)
        self._free(self._slots(row, aligned, kv_len))
        self.cache.unlock(running.node)
        self._leave(running, kv_len)
        self.stats.finished_reqs += 1
        for number in self._followers.pop(running.number, ()):
            heapq.heappush(self._arrivals, (self.now_s + self._requests[number].think_s, number))

    def _insert(self, running: _Running, aligned: int, kv_len: int) -> Node:
        """Give the first `aligned` tokens to the cache; where it had them already, take its slots and free our own."""
        row, ours_from = running.row, running.shared_len
        namespace = (running.request.scope, -1) if running.request.scope >= 0 else (-1, running.number)
        tokens = self.tokens[row, :aligned]
        cached, node = self.cache.insert(tokens, self._slots(row, 0, aligned), namespace)
        self._cache_version += 1
        if cached > ours_from:
            theirs, _ = self.cache.match(tokens[:cached], namespace)
            ours = self._slots(row, ours_from, cached)
            if self.swa is not None:
                window_from = min(max(kv_len - self.swa.window - ours_from, 0), len(ours))
                self.swa.replace(ours, theirs[ours_from:], window_from)
            self.req_to_token[row, ours_from:cached] = theirs[ours_from:]
            self.note_row_change(row, ours_from, cached)
            self._free(ours)
        if self.swa is not None:
            self.swa.keep(self._slots(row, max(cached, ours_from), aligned))
        return node

    def _leave(self, running: _Running, kv_len: int) -> None:
        self._by_row[running.row] = None
        self.kv_lens[running.row] = 0
        self._row_pool.free(running.row)
        self._resident_tokens -= kv_len

    def _release_window(self, row: int, kv_len: int) -> None:
        if self.swa is not None:
            self.swa.leave(self._slots(row, max(0, kv_len - self.swa.window), kv_len))

    def _free(self, slots: Ints) -> None:
        """Full slots go back to the pool, and with them what the window group has of them."""
        if self.swa is not None:
            self.swa.drop(slots)
        self.pool.free_slots(slots)

    def _slots(self, row: int, start: int, stop: int) -> Ints:
        return self.req_to_token[row, start:stop].astype(np.int64)

    def _at(self, row: int) -> _Running:
        running = self._by_row[row]
        assert running is not None
        return running
