"""Warming up compiles what traffic launches, and leaves the contexts alone."""

from __future__ import annotations

import pytest
import torch
from strategies import assert_same_words, clone, plan_case, verify_case, write_case

from kvcanary_trace import kernels
from kvcanary_trace.kernels.backend import use_backend
from kvcanary_trace.kernels.prepare import warmup
from kvcanary_trace.kernels.triton_backend import launch


def test_warming_up_counts_its_launches_and_touches_nothing() -> None:
    """Two sizes of batch, maps and pools; two contexts with and without checks, verify and write each."""
    contexts = [write_case(seed).context for seed in (1, 2)]
    before = [clone(context) for context in contexts]
    with use_backend("torch"):
        assert warmup(contexts, device="cpu", max_reqs=16) == 2 * 2 * 2 + 2 * 2 * 2
        assert warmup((), device="cpu", max_reqs=1, swa=False, expected_tokens=False) == 1
    for context, old in zip(contexts, before, strict=True):
        assert_same_words(context, old)


@pytest.mark.parametrize("max_reqs", [0, 4097])
def test_a_batch_that_no_launch_takes_is_refused(max_reqs: int) -> None:
    """Before anything is launched."""
    with pytest.raises(ValueError, match=rf"max_reqs must be in \[1, 4096\], got {max_reqs}"):
        warmup(device="cpu", max_reqs=max_reqs)


@pytest.mark.gpu
def test_nothing_compiles_after_warming_up() -> None:
    """Aligned launches of every case find their kernel; a capture needs no compiler either."""
    with use_backend("triton"):
        writes = [write_case(seed, device="cuda") for seed in range(30)]
        warmup([case.context for case in writes], max_reqs=64)
        compiled = len(launch._compiled)
        assert compiled > 0
        for seed in range(30):
            plan_case(seed, device="cuda").run(kernels.launch_canary_plan_kernels)
            writes[seed].run(kernels.launch_canary_write_kernel)
        for case in writes:
            verify_case(1, kernels.launch_canary_write_kernel, device="cuda").run(
                kernels.launch_canary_verify_kernel, context=clone(case.context)
            )
        assert len(launch._compiled) == compiled
        torch.cuda.synchronize()
