"""Byte for byte against SGLang 0.5.23's reference: plans, violations, counters and buffers over generated cases.

500 seeds each of plan, verify and write on the torch backend (host path), a share of them on its path for other devices
and under Triton's interpreter, whose own tests go further.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peer import Peer, load_peer
from strategies import VerifyCase, WriteCase, assert_same_words, plan_case, verify_case, write_case

from kvcanary_trace import kernels
from kvcanary_trace.kernels import torch_backend
from kvcanary_trace.kernels.backend import use_backend

pytestmark = pytest.mark.peer

BLOCK = 50
HOST_BLOCKS, SHARED_BLOCKS = 10, 2


@contextmanager
def running_on(name: str) -> Iterator[None]:
    """Launch on the torch backend's host path, on its path for other devices, or on Triton."""
    patch = pytest.MonkeyPatch()
    if name == "torch-any-device":
        patch.setattr(torch_backend, "_on_host", lambda tensor: False)
    try:
        with use_backend("torch" if name.startswith("torch") else "triton"):
            yield
    finally:
        patch.undo()


def _blocks() -> list[Any]:
    blocks = [("torch", block) for block in range(HOST_BLOCKS)]
    blocks += [("torch-any-device", block) for block in range(SHARED_BLOCKS)]
    return [pytest.param(name, block, id=f"{name}-{block}") for name, block in blocks]


@pytest.fixture(scope="module")
def peer() -> Peer:
    return load_peer()


def _seeds(block: int) -> range:
    return range(block * BLOCK, (block + 1) * BLOCK)


@pytest.mark.parametrize(("backend", "block"), _blocks())
def test_plan_equals_the_peer(peer: Peer, backend: str, block: int) -> None:
    """Every word of both plans, poison included, on padding rows, windows, maps, expected tokens and overflow."""
    for seed in _seeds(block):
        case = plan_case(seed)
        want = case.run(peer.plan_ref.launch_canary_plan_kernels_torch_reference)
        with running_on(backend):
            got = case.run(kernels.launch_canary_plan_kernels)
        for ours, theirs in zip(got, want, strict=True):
            assert_same_words(ours, theirs, label=f"seed {seed}")


@pytest.mark.parametrize("backend", ["torch", "torch-any-device"])
def test_slots_out_of_the_map_are_refused_alike(peer: Peer, backend: str) -> None:
    """The same sentence, and plans untouched, also where the demand overflows."""
    for seed in range(100):
        case = plan_case(seed, out_of_map=True)
        plans, untouched = case.outputs(), case.outputs()
        with pytest.raises(ValueError, match="is outside full_to_swa_index_mapping") as theirs:
            case.run(peer.plan_ref.launch_canary_plan_kernels_torch_reference)
        with running_on(backend), pytest.raises(ValueError, match="kv-canary: SWA slot") as ours:
            kernels.launch_canary_plan_kernels(verify_plan_out=plans[0], write_plan_out=plans[1], **case.inputs)
        assert str(ours.value) == str(theirs.value), f"seed {seed}"
        for plan, before in zip(plans, untouched, strict=True):
            assert_same_words(plan, before, label=f"seed {seed}")


def _write_case(seed: int) -> WriteCase:
    return write_case(seed, serial=seed % 5 == 4, many=seed % 10 == 3)


@pytest.mark.parametrize(("backend", "block"), _blocks())
def test_write_equals_the_peer(peer: Peer, backend: str, block: int) -> None:
    """Buffers, violations in order and counters; a fifth of the cases depends on the order of requests."""
    for seed in _seeds(block):
        case = _write_case(seed)
        want = case.run(peer.write_ref.launch_canary_write_kernel_torch_reference)
        with running_on(backend):
            got = case.run(kernels.launch_canary_write_kernel)
        assert_same_words(got, want, label=f"seed {seed}")


def _verify_case(seed: int) -> VerifyCase:
    return verify_case(seed, kernels.launch_canary_write_kernel, many=seed % 10 == 3)


@pytest.mark.parametrize(("backend", "block"), _blocks())
def test_verify_equals_the_peer(peer: Peer, backend: str, block: int) -> None:
    """Violations in order, ring overflow, counters; the buffer is only read."""
    for seed in _seeds(block):
        case = _verify_case(seed)
        want = case.run(peer.verify_ref.launch_canary_verify_kernel_torch_reference)
        with running_on(backend):
            got = case.run(kernels.launch_canary_verify_kernel)
        assert_same_words(got, want, label=f"seed {seed}")
        assert torch.equal(got.canary_buf, case.context.canary_buf)


def test_cases_reach_every_corner() -> None:
    """The generators do produce what the comparison claims to cover."""
    plans = [plan_case(seed) for seed in range(500)]
    assert any((case.inputs["req_pool_indices"] == 0).any() for case in plans)
    assert any(case.demand > case.inputs["verify_capacity"] for case in plans)
    assert any(case.inputs["swa_window_size"] > 0 for case in plans)
    assert {case.inputs["kv_token_id_vs_position_offset"] for case in plans} == {-1, 0, 1}
    assert any(case.inputs["req_to_verify_expected_tokens"] is not None for case in plans)
    writes = [_write_case(seed) for seed in range(500)]
    assert {len(case.context.real_kv_sources) for case in writes} == {0, 1, 2, 3, 4}
    sources = [source for case in writes for source in case.context.real_kv_sources]
    assert any(not source.tensor.is_contiguous() for source in sources)
    assert any(source.page_size > 1 for source in sources)
    contexts = [_verify_case(seed).context for seed in range(100)]
    assert any(context.violation_write_index.item() >= context.violation_ring.shape[0] for context in contexts)
