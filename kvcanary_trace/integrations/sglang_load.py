"""What SGLang's scheduler knows of running and queued work, read in microseconds. Unknown is None, never 0."""

from __future__ import annotations

import logging
from typing import Any, Final

from kvcanary_trace import names

__all__ = ["SchedulerLoad"]

_log: Final = logging.getLogger(names.LOGGER)

_MAX_SUMMED: Final = 256
"""Queued requests whose tokens are summed anew in one step; a longer queue is followed as it grows at its end."""


class SchedulerLoad:
    """Reads one scheduler at each step."""

    def __init__(self) -> None:
        self._queue: tuple[int, int, int] | None = None  # first and last request, length
        self._queued_tokens: int | None = None
        self._warned = False

    def read(self, scheduler: Any, batch: Any) -> dict[str, int]:
        """Values for `step()`; what this scheduler does not tell is left out.

        Args:
            scheduler: SGLang's `Scheduler`.
            batch: The `ScheduleBatch` that it is about to run.
        """
        try:
            values = {**self._resident(scheduler, batch), **self._waiting(scheduler), **_pool(scheduler)}
        except Exception as error:
            if not self._warned:
                self._warned = True
                _log.warning(
                    "running and queued work of SGLang's scheduler is not recorded: %s: %s", type(error).__name__, error
                )
            return {}
        return {name: value for name, value in values.items() if value is not None}

    def _resident(self, scheduler: Any, batch: Any) -> dict[str, int | None]:
        running = scheduler.running_batch
        reqs = len(running.reqs)
        tokens = _tokens(running)
        if batch is not running and not batch.forward_mode.is_mixed() and not batch.forward_mode.is_decode():
            reqs += len(batch.reqs)  # prompts that join the running ones; a mixed batch has both in it
            more = _tokens(batch)
            tokens = None if tokens is None or more is None else tokens + more
        elif batch is not running:
            reqs, tokens = len(batch.reqs), _tokens(batch)
        return {"resident_reqs": reqs, "resident_tokens": tokens}

    def _waiting(self, scheduler: Any) -> dict[str, int | None]:
        queue = scheduler.waiting_queue
        return {"waiting_reqs": len(queue), "waiting_tokens": self._tokens_of_queue(queue)}

    def _tokens_of_queue(self, queue: Any) -> int | None:
        """Their tokens so far. Most steps leave a queue alone or append to it; only a changed head is summed anew."""
        if not queue:
            self._queue, self._queued_tokens = None, 0
            return 0
        first, last, length = id(queue[0]), id(queue[-1]), len(queue)
        known = self._queue
        if known == (first, last, length):
            return self._queued_tokens
        grown = known is not None and known[0] == first and known[2] < length
        if known is not None and grown and self._queued_tokens is not None and id(queue[known[2] - 1]) == known[1]:
            self._queued_tokens += sum(_prompt(req) for req in queue[known[2] :])
        elif length <= _MAX_SUMMED:
            self._queued_tokens = sum(_prompt(req) for req in queue)
        else:
            self._queued_tokens = None
        self._queue = (first, last, length)
        return self._queued_tokens


def _prompt(req: Any) -> int:
    """Tokens that a queued request brings; a retracted one brings its output too."""
    return len(req.origin_input_ids) + len(req.output_ids)


def _tokens(batch: Any) -> int | None:
    """Tokens of a batch's requests so far: from the lengths on the host, which cost no synchronisation."""
    if not batch.reqs:
        return 0
    lengths = getattr(batch, "seq_lens_cpu", None)
    if lengths is not None and len(lengths) == len(batch.reqs):
        return int(lengths.sum())
    total = getattr(batch, "seq_lens_sum", None)
    return total if isinstance(total, int) else None


def _pool(scheduler: Any) -> dict[str, int | None]:
    capacity = getattr(scheduler, "max_total_num_tokens", None)
    allocator = getattr(scheduler, "token_to_kv_pool_allocator", None)
    cache = getattr(scheduler, "tree_cache", None)
    if not isinstance(capacity, int) or allocator is None:
        return {}
    free = allocator.available_size()
    evictable = cache.evictable_size() if cache is not None and hasattr(cache, "evictable_size") else 0
    if not isinstance(free, int) or not isinstance(evictable, int):
        return {}  # pools with several kinds of slots tell tuples
    return {"kv_used": capacity - free - evictable, "kv_capacity": capacity}
