"""The parallel chain on the Triton backend: the oracle's words, scans across blocks, the other chain told once.

As in `test_triton_backend`: Triton's interpreter without a CUDA device, with blocks of a few tokens; the same cases and
more of them under `-m gpu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from conftest import HAS_CUDA
from strategies import POISON, Draw, WriteCase, assert_same_words, clean_buffer, clone, verify_case, verify_plan_of
from strategies import write_case as any_write_case
from torch import Tensor

from kvcanary_trace import kernels
from kvcanary_trace.kernels import CanaryLaunchTag, RealKvHashMode, VerifyOrWriteContext, WritePlan, triton_backend
from kvcanary_trace.kernels.backend import use_backend
from kvcanary_trace.kernels.layout import CHAIN_NAMES, FailReason, SlotField, ViolationField

BLOCK = 20
BLOCKS = 25 if HAS_CUDA else 2
LENGTHS = [1, 255, 256, 257, 1023, 1024, 1025, 5000, 16_384, 40_000] if HAS_CUDA else [1, 7, 8, 9, 16, 17, 33, 70]
OTHER = {"serial": "parallel", "parallel": "serial"}


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(HAS_CUDA, reason="the interpreter is for machines without CUDA")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where the kernels run, with every launcher on the Triton backend."""
    with use_backend("triton"):
        yield torch.device(request.param)


def roomy(case: Any) -> Any:
    """The case with a ring that takes every violation, so that rows compare whatever their order."""
    context = case.context
    ring = context.violation_ring.new_full((4096, 8), POISON)
    case.context = replace(context, violation_ring=ring, violation_write_index=context.violation_write_index * 0)
    return case


def write_case(seed: int, **kind: Any) -> WriteCase:
    case: WriteCase = roomy(any_write_case(seed, many=seed % 20 == 3, chain="parallel", **kind))
    return case


def one_long_batch(
    device: torch.device | str, lengths: list[int], *, seed: int = 0, skip: float = 0.0, base: int = 0
) -> WriteCase:
    """Requests one behind the other, odd ones seeded, without sources; `base` tokens before the first are others'."""
    draw = Draw(seed, device)
    total = sum(lengths)
    slots = draw.rng.permutation(np.arange(1, total + len(lengths) + 1))
    seeds = [int(slots[total + req]) if req % 2 else -1 for req in range(len(lengths))]
    loc = slots[:total].copy()
    loc[draw.rng.random(total) < skip] = -1
    positions = np.concatenate([np.arange(length) + 5 for length in lengths]) if total else np.zeros(0)
    buffer = draw.tensor(draw.wild(total + len(lengths) + 2, 4)).view(torch.uint8)
    buffer.view(torch.int64)[:, SlotField.POSITION] = 4
    context = VerifyOrWriteContext(
        canary_buf=buffer,
        kernel_kind=CanaryLaunchTag.HEAD_K_FULL,
        violation_ring=draw.tensor(np.full((total + 8, 8), POISON)),
        violation_write_index=draw.tensor([0], torch.int32),
        slot_run_counter=draw.tensor([3]),
        kernel_run_counter=draw.tensor([4]),
        real_kv_sources=(),
        real_kv_hash_mode=RealKvHashMode.NONE,
        enable_chain_position_assert=draw.tensor([1], torch.int32),
        chain="parallel",
    )
    plan = WritePlan(
        write_offsets=draw.tensor(base + np.concatenate(([0], np.cumsum(lengths)))),
        write_seed_slot_indices=draw.tensor(seeds),
        write_num_valid_reqs=draw.tensor([len(lengths)], torch.int32),
    )
    inputs = {
        "input_ids": draw.tensor(np.concatenate((draw.ints(0, 9, base), draw.ints(0, 2**17, total)))),
        "positions": draw.tensor(np.concatenate((draw.ints(0, 9, base), positions))),
        "out_cache_loc": draw.tensor(np.concatenate((np.full(base, 1), loc))),
        "enable_write_input_assert": False,
        "expected_input_tokens": None,
        "expected_input_positions": None,
    }
    return WriteCase(context, plan, inputs, serial=False)


def on_torch(case: WriteCase) -> VerifyOrWriteContext:
    with use_backend("torch"):
        return case.run(kernels.launch_canary_write_kernel)


# --- write ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", range(BLOCKS))
def test_write_equals_the_oracle(device: torch.device, block: int) -> None:
    """Buffers, counters and violations, with skipped tokens, wrong inputs and every kind of source."""
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        got = write_case(seed, device=device).run(kernels.launch_canary_write_kernel)
        want = write_case(seed).run(oracle.write_oracle)
        assert_same_words(got, want, label=f"seed {seed}", unordered_ring=True)


@pytest.mark.parametrize("length", LENGTHS)
def test_one_chain_across_blocks(device: torch.device, length: int) -> None:
    """One prefill, around every size where blocks, and blocks of blocks, begin."""
    case = one_long_batch(device, [length])
    assert_same_words(case.run(kernels.launch_canary_write_kernel), on_torch(case))


@pytest.mark.parametrize("skip", [0.0, 0.3, 0.9], ids=["whole", "gaps", "mostly gaps"])
@pytest.mark.parametrize("seed", range(12 if HAS_CUDA else 3))
def test_many_chains_across_blocks(device: torch.device, seed: int, skip: float) -> None:
    """Requests of very different lengths, none at all among them; tokens left out over whole blocks; later chunks."""
    scale = 600 if HAS_CUDA else 12
    lengths = np.random.default_rng(seed).integers(0, 4 * scale, size=7)
    lengths[[1, 4]] = [0, 1]
    case = one_long_batch(device, lengths.tolist(), seed=seed, skip=skip, base=seed % 3 * scale)
    got, want = case.run(kernels.launch_canary_write_kernel), on_torch(case)
    assert_same_words(got, want, unordered_ring=True)
    assert int(want.violation_write_index) > 0 or skip < 0.5  # a gap's successor does not follow the one before


@pytest.mark.parametrize("num_reqs", [1, 8, 40, 1500] if HAS_CUDA else [1, 8, 20])
def test_decode_batches(device: torch.device, num_reqs: int) -> None:
    """One token a request; padding rows behind them add none."""
    case = one_long_batch(device, [1] * num_reqs + [0] * 3)
    tail = {name: torch.cat((value, value[:3])) for name, value in case.inputs.items() if isinstance(value, Tensor)}
    case.inputs.update(tail)
    assert_same_words(case.run(kernels.launch_canary_write_kernel), on_torch(case))


def test_no_requests_and_no_tokens(device: torch.device) -> None:
    """Stale offsets behind the last request are not read; a launch counts as one."""
    case = one_long_batch(device, [9, 5])
    case.plan.write_num_valid_reqs.zero_()
    got = case.run(kernels.launch_canary_write_kernel)
    assert torch.equal(got.canary_buf, case.context.canary_buf)
    assert (got.slot_run_counter.item(), got.kernel_run_counter.item()) == (3, 5)
    empty = one_long_batch(device, [0])
    got = empty.run(kernels.launch_canary_write_kernel)
    assert torch.equal(got.canary_buf, empty.context.canary_buf)
    assert got.kernel_run_counter.item() == 5


def test_slots_seeds_and_offsets_outside_are_left_out_and_counted(device: torch.device) -> None:
    """As under the serial chain."""
    case = one_long_batch(device, [5, 15, 8])
    num_slots, num_tokens = case.context.canary_buf.shape[0], 28
    plan, loc = clone(case.plan), case.inputs["out_cache_loc"].clone()
    plan.write_offsets[3] = num_tokens + 3
    plan.write_seed_slot_indices[1] = num_slots + 7
    loc[[2, 17]] = torch.tensor([num_slots, 2**40], device=device)
    before = int(triton_backend.skipped_entries(device))
    got = case.run(kernels.launch_canary_write_kernel, plan=plan, out_cache_loc=loc)
    assert int(triton_backend.skipped_entries(device)) == before + 2 + 1 + 3
    loc[[2, 17]] = -1
    plan.write_offsets[3] = num_tokens
    plan.write_seed_slot_indices[1] = -1
    want = case.run(kernels.launch_canary_write_kernel, plan=plan, out_cache_loc=loc)
    assert_same_words(got, want)


# --- verify ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", CHAIN_NAMES)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_verify_equals_the_oracle(device: torch.device, block: int, chain: str) -> None:
    """Buffers of the parallel chain, read as such and as the serial one, clean and spoilt."""
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        case, there = (
            roomy(verify_case(seed, oracle.write_oracle, many=seed % 20 == 3, chain="parallel")) for _ in range(2)
        )
        case.context = replace(case.context, chain=chain)
        want = case.run(oracle.verify_oracle)
        there.context = to_device(case.context, device)
        there.plan = to_device(case.plan, device)
        got = there.run(kernels.launch_canary_verify_kernel)
        assert_same_words(got, want, label=f"seed {seed}", unordered_ring=True)


def to_device(value: Any, device: torch.device) -> Any:
    parts = {name: getattr(value, name) for name in type(value).__slots__}
    if "real_kv_sources" in parts:
        parts["real_kv_sources"] = tuple(to_device(source, device) for source in parts["real_kv_sources"])
    return type(value)(**{name: part.to(device) if isinstance(part, Tensor) else part for name, part in parts.items()})


@pytest.mark.parametrize("wrong_from", [0.0, 0.5, 0.99], ids=["all", "half", "the last few"])
@pytest.mark.parametrize("chain", CHAIN_NAMES)
def test_the_other_chain_is_told_once_over_many_blocks(device: torch.device, chain: str, wrong_from: float) -> None:
    """The first such entry of the plan, whichever programs met the rest; by a window's plan too, which has no heads."""
    length = 20_000 if HAS_CUDA else 400
    case = one_long_batch(device, [length])
    case.context = replace(case.context, chain=chain)  # type: ignore[arg-type]
    context = on_torch(case)
    slots = case.inputs["out_cache_loc"].tolist()
    columns = zip(slots, case.inputs["input_ids"].tolist(), range(5, length + 5), [-1, *slots[:-1]], strict=True)
    entries = list(columns)[1:]
    first = int(wrong_from * len(entries))
    read = replace(context, chain=OTHER[chain])  # type: ignore[arg-type]
    words = read.canary_buf.view(torch.int64).cpu()
    for slot, _, _, prev in entries[:first]:
        words[slot, SlotField.PREV_HASH] = oracle.int64(oracle.successor(words, prev, OTHER[chain] == "parallel"))
    slot, token, position, prev = entries[first]
    words[slot, SlotField.PREV_HASH] = oracle.int64(oracle.successor(words, prev, chain == "parallel"))
    for slot, _, _, prev in entries[first + 1 :]:
        words[slot, SlotField.PREV_HASH] = oracle.int64(oracle.successor(words, prev, chain == "parallel"))
    read.canary_buf.copy_(words.view(torch.uint8))
    plan = verify_plan_of(Draw(0, device), entries)
    for launches in (1, 2):
        kernels.launch_canary_verify_kernel(context=read, plan=plan, check_verify_expected_token=True)
        assert int(read.violation_write_index) == launches
    row = read.violation_ring[0].tolist()
    slot = entries[first][0]
    assert row[ViolationField.FAIL_REASON] == FailReason.VERIFY_WRONG_CHAIN
    assert row[ViolationField.SLOT] == slot
    assert row[ViolationField.POSITION] == position and row[ViolationField.TOKEN] == token
    assert row[ViolationField.EXPECTED_TOKEN] == -1
    assert row[ViolationField.CHAIN_HASH] == int(words[slot, SlotField.PREV_HASH]) != row[ViolationField.EXPECTED_AUX]
    assert torch.equal(read.violation_ring[1], read.violation_ring[0])


def test_a_full_ring_counts_the_other_chain(device: torch.device) -> None:
    """No row beyond the ring, and the counter goes on."""
    _, context, entries = clean_buffer(
        3, kernels.launch_canary_write_kernel, device=device, many=True, chain="parallel"
    )
    ring = torch.full((3, 8), POISON, device=device)
    read = replace(context, chain="serial", violation_ring=ring[:0])
    plan = verify_plan_of(Draw(0, device), entries)
    kernels.launch_canary_verify_kernel(context=read, plan=plan, check_verify_expected_token=False)
    assert int(read.violation_write_index) == 1
    assert (ring == POISON).all()


# --- on a device alone ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[700], [16_384], [3000, 1, 0, 5000]], ids=["alone", "prefill", "mixed"])
def test_a_replayed_graph_follows_its_inputs(lengths: list[int]) -> None:
    """Captured once, refilled in place, and right each time; nothing of an earlier replay is left in the scratch."""
    with use_backend("triton"):
        case = one_long_batch("cuda", lengths)
        context = clone(case.context)
        launch = {"context": context, "plan": case.plan, **case.inputs}
        kernels.launch_canary_write_kernel(**launch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernels.launch_canary_write_kernel(**launch)
        for seed in range(1, 6):
            fresh = one_long_batch("cuda", lengths, seed=seed)
            for name, tensor in fresh.inputs.items():
                if isinstance(tensor, Tensor):
                    case.inputs[name].copy_(tensor)
            case.plan.write_seed_slot_indices.copy_(fresh.plan.write_seed_slot_indices)
            for name in ("canary_buf", "violation_write_index", "slot_run_counter", "kernel_run_counter"):
                getattr(context, name).copy_(getattr(fresh.context, name))
            graph.replay()
            torch.cuda.synchronize()
            assert_same_words(context, on_torch(fresh), label=f"seed {seed}")


@pytest.mark.gpu
def test_launches_on_two_streams_share_no_scratch() -> None:
    """The same two prefills over and over, side by side."""
    with use_backend("triton"):
        cases = [one_long_batch("cuda", [9000 + 4000 * at], seed=at) for at in range(2)]
        wants = [on_torch(case) for case in cases]
        streams = [torch.cuda.Stream() for _ in cases]
        torch.cuda.synchronize()
        for _ in range(20):
            contexts = [clone(case.context) for case in cases]
            torch.cuda.synchronize()
            for case, context, stream in zip(cases, contexts, streams, strict=True):
                with torch.cuda.stream(stream):
                    kernels.launch_canary_write_kernel(context=context, plan=case.plan, **case.inputs)
            torch.cuda.synchronize()
            for context, want in zip(contexts, wants, strict=True):
                assert_same_words(context, want)
