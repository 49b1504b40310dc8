"""What a workload is: requests with arrival times, lengths and block hashes; and how load is shaped by seed.

A reader per format stands in `readers.py`, the generator in `synthetic.py`. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from kvcanary_trace.errors import SettingError

__all__ = ["EPOCH_NS", "Request", "Workload", "shape_workload"]

EPOCH_NS: Final = 1_700_000_000_000_000_000
"""Where virtual time starts when a workload has no date of its own (2023-11-14 22:13:20 UTC)."""

MAX_SPAN_S: Final = 1e9
"""How long a workload may be, some 30 years: int64 ns since 1970 end in 2262."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request of a workload. Text is not known: tokens are derived from block hashes, or are the request's own.

    Attributes:
        arrival_s: Seconds from the workload's start. In a closed loop, the earliest possible arrival.
        input_len: Prompt tokens, at least 1.
        output_len: Generated tokens, at least 1: a request that generates nothing is not one for an engine.
        block_hashes: [num_blocks] int64. Equal hashes at equal depth mean the same prompt up to and including that
            block; empty where the workload publishes none. Tokens past the last block are the request's own.
        block_size: Tokens a block, 0 without hashes.
        scope: Where hashes mean something: requests of different scopes never share. -1: of this request alone.
        after: Index of the request that must finish first (closed loop), or -1.
        think_s: Seconds between that finish and this arrival.
    """

    arrival_s: float
    input_len: int
    output_len: int
    block_hashes: npt.NDArray[np.int64]
    block_size: int = 0
    scope: int = -1
    after: int = -1
    think_s: float = 0.0

    @property
    def total_len(self) -> int:
        """Prompt and generated tokens."""
        return self.input_len + self.output_len


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, and where they came from."""

    name: str
    format: str
    requests: tuple[Request, ...]
    start_ns: int = EPOCH_NS

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return max((request.total_len for request in self.requests), default=0)


def shape_workload(
    workload: Workload, *, limit: int | None = None, time_scale: float = 1.0, seed: int | None = None
) -> Workload:
    """Take the first requests, draw their arrivals anew, and stretch or compress time.

    Args:
        workload: As read.
        limit: Requests to keep, from the first; None keeps all.
        time_scale: Factor on every gap and think time, above 0: 0.5 offers twice the load.
        seed: None keeps the published arrivals. A number draws the gaps between open-loop arrivals with replacement
            from the workload's own gaps (the same rate and burstiness, another order); the same seed, the same draw.
            Requests of a closed loop arrive when their predecessor is done, so their think times are shuffled instead.

    Raises:
        SettingError: `limit` is below 1, `seed` is below 0, or `time_scale` is not a positive finite number or makes
            the workload longer than `MAX_SPAN_S`.
    """
    if limit is not None and limit < 1:
        raise SettingError(f"limit must be at least 1 request, got {limit}")
    if not (time_scale > 0 and np.isfinite(time_scale)):
        raise SettingError(f"time-scale must be a positive finite factor, got {time_scale}")
    if seed is not None and seed < 0:
        raise SettingError(f"seed must be a whole number of at least 0, got {seed}")
    requests = list(workload.requests[:limit])
    if seed is not None:
        requests = _resampled(requests, np.random.default_rng(seed))
    if time_scale != 1.0:
        requests = [
            replace(request, arrival_s=request.arrival_s * time_scale, think_s=request.think_s * time_scale)
            for request in requests
        ]
    span_s = max(request.arrival_s for request in requests) + sum(request.think_s for request in requests)
    if not span_s <= MAX_SPAN_S:
        raise SettingError(
            f"time-scale {time_scale:g} stretches {workload.name} to {span_s:.3g} s; a replay's clock holds "
            f"{MAX_SPAN_S:g} s"
        )
    return replace(workload, requests=tuple(requests))


def _resampled(requests: list[Request], rng: np.random.Generator) -> list[Request]:
    """Open-loop gaps drawn anew, closed-loop think times shuffled."""
    open_loop = [i for i, request in enumerate(requests) if request.after < 0]
    closed = [i for i, request in enumerate(requests) if request.after >= 0]
    if len(open_loop) > 1:
        arrivals = np.array([requests[i].arrival_s for i in open_loop])
        gaps = rng.choice(np.diff(arrivals), size=len(open_loop) - 1)
        drawn = arrivals[0] + np.concatenate(([0.0], np.cumsum(gaps)))
        for i, arrival_s in zip(open_loop, drawn.tolist(), strict=True):
            requests[i] = replace(requests[i], arrival_s=arrival_s)
    if closed:
        think = rng.permutation([requests[i].think_s for i in closed])
        for i, think_s in zip(closed, think.tolist(), strict=True):
            requests[i] = replace(requests[i], think_s=think_s)
    return requests
