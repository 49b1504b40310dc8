"""The torch backend on a CUDA device, and batches past 4096 rows on the device's own backend: equal to the CPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from strategies import assert_same_words, plan_case, verify_case, words, write_case

from kvcanary_trace import kernels
from kvcanary_trace.kernels.backend import use_backend

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(40))
def test_torch_backend(seed: int) -> None:
    with use_backend("torch"):
        pairs: list[tuple[Any, Any]] = []
        for device in ("cpu", "cuda"):
            write = write_case(seed, device=device, serial=seed % 4 == 0, many=seed % 8 == 1)
            verify = verify_case(seed, kernels.launch_canary_write_kernel, device=device)
            pairs.append(
                (
                    *plan_case(seed, device=device).run(kernels.launch_canary_plan_kernels),
                    write.run(kernels.launch_canary_write_kernel),
                    verify.run(kernels.launch_canary_verify_kernel),
                )
            )
    for on_cpu, on_cuda in zip(*pairs, strict=True):
        assert_same_words(on_cuda, on_cpu)


@pytest.mark.parametrize("num_reqs", [4097, 6000, 16_384])
@pytest.mark.parametrize("captured", [False, True])
def test_batches_past_one_launch(num_reqs: int, captured: bool) -> None:
    """`plan_chunks` on the device, eagerly and from a replayed graph, fills what the CPU fills."""
    generator = torch.Generator().manual_seed(num_reqs)
    rows = torch.randperm(num_reqs, generator=generator) + 1
    rows[::9] = 0
    inputs = {
        "req_pool_indices": rows,
        "prefix_lens": torch.randint(0, 9, (num_reqs,), generator=generator),
        "extend_seq_lens": torch.randint(0, 3, (num_reqs,), generator=generator),
        "req_to_token": torch.randint(0, 10**6, (num_reqs + 1, 8), generator=generator).int(),
    }
    rest: dict[str, Any] = {
        "swa_window_size": 0,
        "full_to_swa_index_mapping": None,
        "verify_capacity": 8 * num_reqs,
        "req_to_verify_expected_tokens": None,
        "req_to_verify_expected_tokens_valid_lens": None,
        "kv_token_id_vs_position_offset": 0,
        "write_req_capacity": 4096,
    }
    filled = []
    for device in ("cpu", "cuda"):
        plan = kernels.VerifyPlan.allocate(verify_capacity=8 * num_reqs, device=torch.device(device))
        for name in ("verify_slot_indices", "verify_expected_tokens", "verify_expected_positions"):
            getattr(plan, name).fill_(-5)
        plan.verify_prev_slot_indices.fill_(-5)
        there = {name: tensor.to(device) for name, tensor in inputs.items()}
        write_plans = kernels.plan_chunks(verify_plan_out=plan, **there, **rest)
        if device == "cuda" and captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                write_plans = kernels.plan_chunks(verify_plan_out=plan, **there, **rest)
            plan.verify_slot_indices.fill_(-5)
            graph.replay()
        torch.cuda.synchronize()
        filled.append((plan, write_plans))
    (plan, write_plans), (plan_there, write_plans_there) = filled
    assert_same_words(plan_there, plan)
    assert len(write_plans) == len(write_plans_there)
    for mine, theirs in zip(write_plans, write_plans_there, strict=True):
        count = int(mine.write_num_valid_reqs)
        got, want = words(theirs), words(mine)
        assert torch.equal(got["write_offsets"][: count + 1], want["write_offsets"][: count + 1])
        assert torch.equal(got["write_seed_slot_indices"][:count], want["write_seed_slot_indices"][:count])
        assert torch.equal(got["write_num_valid_reqs"], want["write_num_valid_reqs"])
