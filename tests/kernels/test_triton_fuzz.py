"""120 000 fuzzed launches through plan, write and verify on the device, every word as the torch backend has it.

A device goes round between processes by time slices, so that a few of them are faster than many. Their number and that
of the rounds come from KVCANARY_FUZZ_PROCESSES and KVCANARY_FUZZ_ROUNDS; no round begins after KVCANARY_FUZZ_SECONDS,
and a run that this cut short says how far it came.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
from conftest import HAS_CUDA
from fuzz_rounds import fuzz

ROUNDS = int(os.environ.get("KVCANARY_FUZZ_ROUNDS", 20_000 if HAS_CUDA else 200))
LIMIT_S = float(os.environ.get("KVCANARY_FUZZ_SECONDS", "inf"))
PROCESSES = int(os.environ.get("KVCANARY_FUZZ_PROCESSES", 4 if HAS_CUDA else 1))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param("cpu", marks=pytest.mark.skipif(HAS_CUDA, reason="the interpreter is for machines without CUDA")),
    ],
)
def test_rounds_equal_the_torch_backend(device: str) -> None:
    share = -(-ROUNDS // PROCESSES)
    ranges = [(first, min(first + share, ROUNDS)) for first in range(0, ROUNDS, share)]
    if len(ranges) == 1:
        results = [fuzz(*ranges[0], device, LIMIT_S)]
    else:
        with ProcessPoolExecutor(len(ranges), mp_context=multiprocessing.get_context("spawn")) as pool:
            firsts, lasts = zip(*ranges, strict=True)
            results = list(pool.map(fuzz, firsts, lasts, [device] * len(ranges), [LIMIT_S] * len(ranges)))
    rounds, launches, violations = (sum(result[part] for result in results) for part in range(3))
    found = [line for result in results for line in result[3]]
    print(f"{rounds} of {ROUNDS} rounds, {launches} launches, {violations} violations, {len(found)} rounds that differ")
    assert not found, "\n".join(found[:20])
    assert launches == 6 * rounds
    assert violations > rounds // 10
