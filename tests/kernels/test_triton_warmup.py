"""Warming up compiles what traffic launches, and leaves the contexts alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from strategies import assert_same_words, clone, plan_case, verify_case, write_case

from kvcanary_trace import kernels
from kvcanary_trace.kernels.backend import use_backend
from kvcanary_trace.kernels.layout import CHAIN_NAMES, ChainName
from kvcanary_trace.kernels.prepare import warmup
from kvcanary_trace.kernels.triton_backend import launch

TOKENS = ("input_ids", "positions", "out_cache_loc")


def test_warming_up_counts_its_launches_and_touches_nothing() -> None:
    """Two sizes of batch, maps and pools; two contexts with and without checks, verify and write each."""
    contexts = [write_case(seed).context for seed in (1, 2)]
    before = [clone(context) for context in contexts]
    with use_backend("torch"):
        assert warmup(contexts, device="cpu", max_reqs=16) == 2 * 2 * 2 + 2 * 2 * 2
        assert warmup((), device="cpu", max_reqs=1, swa=False, expected_tokens=False) == 1
        parallel = replace(contexts[0], chain="parallel")  # its write has a variant for long batches
        assert warmup([parallel], device="cpu", max_reqs=1, swa=False, expected_tokens=False) == 1 + 3
    for context, old in zip(contexts, before, strict=True):
        assert_same_words(context, old)


@pytest.mark.parametrize("max_reqs", [0, 4097])
def test_a_batch_that_no_launch_takes_is_refused(max_reqs: int) -> None:
    """Before anything is launched."""
    with pytest.raises(ValueError, match=rf"max_reqs must be in \[1, 4096\], got {max_reqs}"):
        warmup(device="cpu", max_reqs=max_reqs)


@pytest.mark.gpu
@pytest.mark.parametrize("chain", CHAIN_NAMES)
def test_nothing_compiles_after_warming_up(chain: ChainName) -> None:
    """Aligned launches of every case find their kernel; a capture needs no compiler either."""
    with use_backend("triton"):
        writes = [write_case(seed, device="cuda", chain=chain) for seed in range(30)]
        warmup([case.context for case in writes], max_reqs=64)
        compiled = len(launch._compiled)
        assert compiled > 0
        for seed in range(30):
            plan_case(seed, device="cuda").run(kernels.launch_canary_plan_kernels)
            writes[seed].run(kernels.launch_canary_write_kernel)
        for case in writes:
            verify_case(1, kernels.launch_canary_write_kernel, device="cuda", chain=chain).run(
                kernels.launch_canary_verify_kernel, context=clone(case.context)
            )
        zeros = writes[0].inputs["input_ids"].new_zeros(3000)
        without = {"enable_write_input_assert": False, "expected_input_tokens": None, "expected_input_positions": None}
        writes[0].run(kernels.launch_canary_write_kernel, **dict.fromkeys(TOKENS, zeros), **without)
        assert len(launch._compiled) == compiled
        torch.cuda.synchronize()
