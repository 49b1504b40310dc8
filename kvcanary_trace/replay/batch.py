"""What one forward step asks of the kernels, and how long it takes in virtual time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Batch", "StepClock"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepClock:
    """Virtual time of a step: `base_s + token_s x tokens + entry_s x entries`, the same on every machine.

    Tokens are those written this step; entries are the tokens of all prefixes, which attention reads.
    The defaults are in the range of an 8B model on one data-centre GPU.
    """

    base_s: float = 11e-3
    token_s: float = 70e-6
    entry_s: float = 20e-9

    def duration_s(self, tokens: int, entries: int) -> float:
        """Seconds that a step takes."""
        return self.base_s + self.token_s * tokens + self.entry_s * entries


@dataclass(slots=True)
class Batch:
    """One forward step.

    Attributes:
        step: Number of the step, from 0.
        start_s: Virtual seconds from the workload's start.
        mode: prefill, decode or mixed.
        req_pool_indices: [bs] int64, rows of `req_to_token`.
        prefix_lens: [bs] int64, tokens before this step.
        extend_seq_lens: [bs] int64, tokens of this step.
        input_ids: [tokens] int64.
        positions: [tokens] int64, in the sequence.
        out_cache_loc: [tokens] int64, KV slots.
        num_prefills: Leading requests that prefill; the others decode.
        resident_reqs: Requests that the engine runs, this step's new ones included.
        resident_tokens: Their tokens, this step's included.
        waiting_reqs: Requests queued.
        waiting_tokens: Their prompt tokens, and those of admitted prompts that are still to come.
        kv_used: KV slots held, evictable cache excluded.
        kv_capacity: KV slots in the pool.
        num_entries: Tokens of all prefixes: what a full-attention canary verifies.
    """

    step: int
    start_s: float
    mode: str
    req_pool_indices: Ints
    prefix_lens: Ints
    extend_seq_lens: Ints
    input_ids: Ints
    positions: Ints
    out_cache_loc: Ints
    num_prefills: int
    resident_reqs: int
    resident_tokens: int
    waiting_reqs: int
    waiting_tokens: int
    kv_used: int
    kv_capacity: int
    num_entries: int

    @property
    def bs(self) -> int:
        """Requests in the batch."""
        return len(self.req_pool_indices)

    @property
    def num_tokens(self) -> int:
        """Tokens written."""
        return len(self.out_cache_loc)

    def window_entries(self, window: int) -> int:
        """What a sliding-window canary verifies."""
        return int(np.minimum(self.prefix_lens, window).sum())
