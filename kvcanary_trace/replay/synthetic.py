"""A bursty workload made from a seed: for the demo, and for tests that need pressure on demand."""

from __future__ import annotations

import numpy as np

from kvcanary_trace.errors import SettingError

from .workloads import Request, Workload

__all__ = ["bursty_workload"]

_BLOCK = 64


def bursty_workload(
    num_requests: int = 160,
    *,
    seed: int = 0,
    burst_every_s: float = 8.0,
    quiet_rate_per_s: float = 2.0,
    input_len: int = 600,
    output_len: int = 120,
    shared_share: float = 0.5,
) -> Workload:
    """Quiet arrivals with bursts that grow: each burst brings a few more requests at once than the one before.

    Lengths are log-normal around `input_len` and `output_len` tokens. A `shared_share` of the requests begins with one
    of four system prompts of eight blocks, so that the prefix cache has something to share. Same seed, same workload.

    Raises:
        SettingError: A count or rate is not positive.
    """
    if num_requests < 1 or input_len < 1 or output_len < 1:
        raise SettingError(
            f"a workload needs at least 1 request of 1 token, got {num_requests} of {input_len} in, {output_len} out"
        )
    if not (burst_every_s > 0 and quiet_rate_per_s > 0):
        raise SettingError(
            f"burst_every_s and quiet_rate_per_s must be positive, got {burst_every_s}, {quiet_rate_per_s}"
        )
    rng = np.random.default_rng(seed)
    arrivals = _arrivals(num_requests, rng, burst_every_s, quiet_rate_per_s)
    inputs = np.clip(rng.lognormal(np.log(input_len), 0.6, num_requests), 8, 8 * input_len).astype(int)
    outputs = np.clip(rng.lognormal(np.log(output_len), 0.7, num_requests), 1, 8 * output_len).astype(int)
    shared = rng.random(num_requests) < shared_share
    prompts = rng.integers(0, 4, num_requests)
    requests = []
    for i in range(num_requests):
        blocks = -(-int(inputs[i]) // _BLOCK)
        hashes = ((i + 1) << 32) + np.arange(blocks, dtype=np.int64)
        if shared[i]:
            head = min(blocks, 8)
            hashes[:head] = 1_000 * prompts[i] + np.arange(head)
        requests.append(Request(float(arrivals[i]), int(inputs[i]), int(outputs[i]), hashes, _BLOCK, scope=0))
    return Workload(f"synthetic-{seed}", "synthetic", tuple(requests))


def _arrivals(num_requests: int, rng: np.random.Generator, burst_every_s: float, quiet_rate_per_s: float) -> np.ndarray:
    """Arrival times in seconds, sorted: a Poisson stream plus bursts of 4, 8, 12, … at once."""
    quiet = np.cumsum(rng.exponential(1 / quiet_rate_per_s, num_requests))
    bursts = [
        np.full(4 * k, k * burst_every_s) + rng.random(4 * k) * 0.2
        for k in range(1, 1 + int(np.ceil(np.sqrt(num_requests))))
    ]
    return np.sort(np.concatenate([quiet, *bursts]))[:num_requests]
