"""Chunk sizes and the switches between fast paths change nothing but speed."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from strategies import assert_same_words, plan_case, verify_case, write_case

from kvcanary_trace import kernels
from kvcanary_trace.kernels.torch_backend import host_chain, host_entries, host_fold, host_verify, host_write
from kvcanary_trace.kernels.torch_backend.host_arrays import CHUNK

SMALL = {
    "chunk": [(module, "CHUNK", 5) for module in (host_entries, host_fold, host_verify, host_write)],
    "gather": [(host_verify, "_GATHER_MAX_ENTRIES", 0), (host_entries, "_COPY_MIN_MEAN", 10**9)],
    "copy": [(host_verify, "_GATHER_MAX_ENTRIES", 10**9), (host_entries, "_COPY_MIN_MEAN", 0)],
    "lockstep": [(host_chain, "_LOCKSTEP_MIN_REQS", 2), (host_write, "_FEW_SLOTS", -1)],
    "walk": [(host_chain, "_LOCKSTEP_MIN_REQS", 10**9), (host_write, "_FEW_SLOTS", 10**9)],
    "fold by words": [(host_fold, "_FOLD_CACHE_BYTES", 1)],
}


@pytest.fixture(params=SMALL, autouse=True)
def threshold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in SMALL[request.param]:
        monkeypatch.setattr(module, name, value)
    if request.param == "chunk":  # the chunks walked side by side with the other switches
        monkeypatch.setattr(host_verify, "_GATHER_MAX_ENTRIES", 2)


@pytest.mark.parametrize("block", range(3))
def test_results_stay(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        case = plan_case(seed)
        for overflow in ({}, {"overflow": "rotate"}):
            got, want = (
                case.run(launch, **overflow, **({"rotate_cursor": torch.tensor([seed])} if overflow else {}))
                for launch in (kernels.launch_canary_plan_kernels, oracle.plan_oracle)
            )
            for ours, wanted in zip(got, want, strict=True):
                assert_same_words(ours, wanted, label=f"seed {seed}")
        write = write_case(seed, serial=seed % 4 == 0, many=seed % 2 == 1)
        assert_same_words(
            write.run(kernels.launch_canary_write_kernel), write.run(oracle.write_oracle), label=f"seed {seed}"
        )
        verify = verify_case(seed, kernels.launch_canary_write_kernel, many=seed % 2 == 1)
        assert_same_words(
            verify.run(kernels.launch_canary_verify_kernel), verify.run(oracle.verify_oracle), label=f"seed {seed}"
        )


def big_batch(num_reqs: int, length: int) -> dict[str, Any]:
    table = torch.arange(1, num_reqs * length + 1, dtype=torch.int32).reshape(num_reqs, length)
    return {
        "req_pool_indices": torch.arange(1, num_reqs + 1),
        "prefix_lens": torch.full((num_reqs,), length),
        "extend_seq_lens": torch.zeros(num_reqs, dtype=torch.int64),
        "req_to_token": torch.cat((torch.zeros(1, length, dtype=torch.int32), table)),
        "swa_window_size": 0,
        "full_to_swa_index_mapping": torch.arange(num_reqs * length + 1),
        "verify_capacity": num_reqs * length,
        "req_to_verify_expected_tokens": None,
        "req_to_verify_expected_tokens_valid_lens": None,
        "kv_token_id_vs_position_offset": 0,
    }


def test_more_entries_than_a_chunk_of_true_size() -> None:
    """Past one chunk, against arithmetic rather than the slow oracle."""
    num_reqs, length = 3, CHUNK // 2
    inputs = big_batch(num_reqs, length)
    verify_plan = kernels.VerifyPlan.allocate(verify_capacity=num_reqs * length, device=torch.device("cpu"))
    write_plan = kernels.WritePlan.allocate(write_req_capacity=num_reqs, device=torch.device("cpu"))
    kernels.launch_canary_plan_kernels(verify_plan_out=verify_plan, write_plan_out=write_plan, **inputs)
    flat = torch.arange(num_reqs * length)
    assert torch.equal(verify_plan.verify_slot_indices, flat + 1)
    assert torch.equal(verify_plan.verify_expected_positions, flat % length)
    assert torch.equal(verify_plan.verify_prev_slot_indices, torch.where(flat % length == 0, -1, flat))
    assert (verify_plan.verify_expected_tokens == -1).all()
