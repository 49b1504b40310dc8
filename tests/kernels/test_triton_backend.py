"""The Triton backend against SGLang's reference and the oracle, word for word.

Without a CUDA device the kernels run in Triton's interpreter, a few hundred cases of each kind; under `-m gpu` the same
cases run on the device, and more of them. The interpreter runs programs one after another: what rests on atomics is
proven on the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import HAS_CUDA
from oracle import plan_oracle
from peer import Peer, load_peer
from strategies import PlanCase, VerifyCase, WriteCase, assert_same_words, clone, plan_case, verify_case, write_case
from torch import Tensor

from kvcanary_trace import kernels
from kvcanary_trace.kernels import VerifyOrWriteContext, triton_backend
from kvcanary_trace.kernels.backend import use_backend

BLOCK = 34
BLOCKS = 25 if HAS_CUDA else 5
ROOMY_RING_ROWS = 4096


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


@pytest.fixture(scope="module")
def peer() -> Peer:
    return load_peer()


def skipped(device: torch.device) -> int:
    return int(triton_backend.skipped_entries(device))


def on_cpu(context: VerifyOrWriteContext) -> VerifyOrWriteContext:
    parts = {name: getattr(context, name) for name in type(context).__slots__}
    return type(context)(**{name: part.cpu() if isinstance(part, Tensor) else part for name, part in parts.items()})


def with_roomy_ring(context: VerifyOrWriteContext) -> VerifyOrWriteContext:
    """A copy whose ring takes every violation of a launch, and whose counter starts at 0."""
    copy = clone(context)
    parts = {name: getattr(copy, name) for name in type(copy).__slots__}
    parts["violation_ring"] = copy.violation_ring.new_full((ROOMY_RING_ROWS, 8), -7)
    parts["violation_write_index"] = torch.zeros_like(copy.violation_write_index)
    return type(copy)(**parts)


def rows(ring: Tensor, first: int, last: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(row) for row in ring[first:last].tolist())


def assert_same_context(
    case: VerifyCase | WriteCase, ours: VerifyOrWriteContext, launch: Any, label: str
) -> VerifyOrWriteContext:
    """Everything but the ring word for word; the ring as a multiset, of which a full ring holds any part."""
    want = case.run(launch)
    for name in ("canary_buf", "violation_write_index", "slot_run_counter", "kernel_run_counter"):
        assert torch.equal(getattr(ours, name).cpu(), getattr(want, name).cpu()), f"{label} {name}"
    before = int(case.context.violation_write_index)
    room = want.violation_ring.shape[0]
    after = min(int(want.violation_write_index), room)
    roomy = type(case)(**{**vars(case), "context": with_roomy_ring(case.context)})
    everything = rows(roomy.run(launch).violation_ring, 0, int(want.violation_write_index) - before)
    got = rows(ours.violation_ring, before, max(after, before))
    assert got <= everything and got.total() == max(after - before, 0), f"{label} ring"
    untouched = ours.violation_ring.cpu()
    assert torch.equal(untouched[:before], case.context.violation_ring.cpu()[:before]), f"{label} earlier rows"
    assert torch.equal(untouched[after:], case.context.violation_ring.cpu()[after:]), f"{label} later rows"
    return want


def plan_in_one_launch(
    case: PlanCase, overflow: str = "skip", cursor: Tensor | None = None
) -> tuple[kernels.VerifyPlan, kernels.WritePlan]:
    verify_plan, write_plan = case.outputs()
    inputs = dict(case.inputs)
    inputs.pop("verify_capacity")
    triton_backend.plan(
        **inputs,
        verify_offsets_scratch=torch.full((4097,), -99, device=inputs["req_pool_indices"].device),
        out_write_offsets=write_plan.write_offsets,
        out_write_seed_slot_indices=write_plan.write_seed_slot_indices,
        out_write_num_valid_reqs=write_plan.write_num_valid_reqs,
        out_verify_num_valid=verify_plan.verify_num_valid,
        out_verify_enable=verify_plan.enable,
        out_verify_slot_indices=verify_plan.verify_slot_indices,
        out_verify_expected_tokens=verify_plan.verify_expected_tokens,
        out_verify_expected_positions=verify_plan.verify_expected_positions,
        out_verify_prev_slot_indices=verify_plan.verify_prev_slot_indices,
        overflow_rotate=overflow == "rotate",
        rotate_cursor=cursor,
    )
    return verify_plan, write_plan


@pytest.mark.peer
@pytest.mark.parametrize("block", range(BLOCKS))
def test_plan_equals_the_peer(peer: Peer, device: torch.device, block: int) -> None:
    """Two launches and one, poison included."""
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        want = plan_case(seed).run(peer.plan_ref.launch_canary_plan_kernels_torch_reference)
        case = plan_case(seed, device=device)
        for got in (case.run(kernels.launch_canary_plan_kernels), plan_in_one_launch(case)):
            for ours, theirs in zip(got, want, strict=True):
                assert_same_words(ours, theirs, label=f"seed {seed}")


@pytest.mark.peer
@pytest.mark.parametrize("block", range(BLOCKS))
def test_write_equals_the_peer(peer: Peer, device: torch.device, block: int) -> None:
    """Buffers, counters and violations, with skipped tokens, wrong inputs and every kind of source."""
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        case = write_case(seed, device=device, many=seed % 20 == 3)
        got = case.run(kernels.launch_canary_write_kernel)
        assert_same_context(case, got, peer.write_ref.launch_canary_write_kernel_torch_reference, f"seed {seed}")


@pytest.mark.peer
@pytest.mark.parametrize("block", range(BLOCKS))
def test_verify_equals_the_peer(peer: Peer, device: torch.device, block: int) -> None:
    """Violations and counters on clean and spoilt buffers; the buffer is only read."""
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        case = verify_case(seed, kernels.launch_canary_write_kernel, device=device, many=seed % 20 == 3)
        got = case.run(kernels.launch_canary_verify_kernel)
        assert_same_context(case, got, peer.verify_ref.launch_canary_verify_kernel_torch_reference, f"seed {seed}")
        assert torch.equal(got.canary_buf, case.context.canary_buf)


def test_slots_past_the_map_read_its_last_entry_and_count(device: torch.device) -> None:
    """As on the peer's device: clamped, which for the peer's map, that ends in -1, leaves the entry out of verify."""
    counted = 0
    for seed in range(60):
        case = plan_case(seed, device=device, out_of_map=True)
        before = skipped(device)
        got = case.run(kernels.launch_canary_plan_kernels)
        if case.demand <= case.inputs["verify_capacity"]:
            assert skipped(device) > before, f"seed {seed}"
            counted += 1
        want = plan_case(seed, out_of_map=True).run(plan_oracle)
        for ours, theirs in zip(got, want, strict=True):
            assert_same_words(ours, theirs, label=f"seed {seed}")
    assert counted > 10


def test_a_rotating_window_checks_every_entry(device: torch.device) -> None:
    """Entries and cursor follow the oracle over enough steps to wrap around, in two launches and in one."""
    rotated = 0
    for seed in range(10):
        case = plan_case(seed, device=device)
        cursors = [torch.tensor([seed % 5 - 2], device=where) for where in (device, device, "cpu")]
        for _ in range(4):
            two = case.run(kernels.launch_canary_plan_kernels, overflow="rotate", rotate_cursor=cursors[0])
            one = plan_in_one_launch(case, "rotate", cursors[1])
            want = plan_case(seed).run(plan_oracle, overflow="rotate", rotate_cursor=cursors[2])
            for got in (two, one):
                for ours, theirs in zip(got, want, strict=True):
                    assert_same_words(ours, theirs, label=f"seed {seed}")
            assert cursors[0].item() == cursors[1].item() == cursors[2].item(), f"seed {seed}"
            rotated += case.demand > case.inputs["verify_capacity"]
    assert rotated > 8


@pytest.mark.parametrize("length", [2**31 - 1, 2**40, 2**62, 2**63 - 1], ids=["31", "40", "62", "63"])
def test_demand_past_two_to_the_31_overflows_and_never_wraps(device: torch.device, length: int) -> None:
    """Four absurd prefixes: the plan is off, full, and stores nothing."""
    case = plan_case(3, device=device)
    rows_, width = torch.arange(1, 5, device=device), 8
    case.inputs.update(
        req_pool_indices=rows_,
        prefix_lens=torch.full_like(rows_, length),
        extend_seq_lens=torch.ones_like(rows_),
        req_to_token=torch.zeros(5, width, dtype=torch.int32, device=device),
        swa_window_size=0,
        full_to_swa_index_mapping=None,
        verify_capacity=100,
        req_to_verify_expected_tokens=None,
        req_to_verify_expected_tokens_valid_lens=None,
    )
    case.write_req_capacity = 4
    before = skipped(device)
    for verify_plan, write_plan in (case.run(kernels.launch_canary_plan_kernels), plan_in_one_launch(case)):
        assert verify_plan.enable.item() == 0
        assert verify_plan.verify_num_valid.item() == 100
        assert (verify_plan.verify_slot_indices == case.outputs()[0].verify_slot_indices).all()
        assert write_plan.write_offsets.tolist() == [0, 1, 2, 3, 4]
        assert write_plan.write_seed_slot_indices.tolist() == [-1] * 4
    assert skipped(device) == before + 8  # the seeds lie past the rows


def test_entries_outside_a_row_or_the_pool_are_left_out_and_counted(device: torch.device) -> None:
    """A prefix past the row's width, a row past the table, a valid length past the pool's width."""
    case = plan_case(3, device=device)
    case.inputs.update(
        req_pool_indices=torch.tensor([1, 9, 2], device=device),
        prefix_lens=torch.tensor([6, 2, 4], device=device),
        extend_seq_lens=torch.tensor([1, 1, 1], device=device),
        req_to_token=torch.arange(1, 13, dtype=torch.int32, device=device).view(3, 4),
        swa_window_size=0,
        full_to_swa_index_mapping=None,
        verify_capacity=12,
        req_to_verify_expected_tokens=torch.arange(9, dtype=torch.int32, device=device).view(3, 3),
        req_to_verify_expected_tokens_valid_lens=torch.tensor([3, 3, 4], device=device),
        kv_token_id_vs_position_offset=0,
    )
    case.write_req_capacity = 3
    before = skipped(device)
    verify_plan, write_plan = case.run(kernels.launch_canary_plan_kernels)
    assert verify_plan.verify_num_valid.item() == 12
    assert verify_plan.verify_slot_indices.tolist() == [5, 6, 7, 8, 0, 0, 0, 0, 9, 10, 11, 12]
    assert verify_plan.verify_expected_tokens.tolist() == [3, 4, 5, -1, -1, -1, -1, -1, 6, 7, 8, -1]
    assert write_plan.write_seed_slot_indices.tolist() == [-1, -1, 12]
    # 2 positions past the row, 2 of the row past the table, 1 token past the pool, 2 seeds.
    assert skipped(device) == before + 7


def test_verify_leaves_out_slots_outside_the_buffer_or_a_source(device: torch.device) -> None:
    """Neither read nor reported: counted."""
    case = verify_case(11, kernels.launch_canary_write_kernel, device=device)
    num_slots = case.context.canary_buf.shape[0]
    outside = [-1, -(2**40), num_slots, 2**40, 2**62]
    plan = clone(case.plan)
    slots = torch.tensor([*outside, 1, 1], device=device)
    prev_slots = torch.tensor([0] * len(outside) + [num_slots, 2**50], device=device)
    zeros = torch.zeros_like(slots)
    plan = type(plan)(
        verify_slot_indices=slots,
        verify_expected_tokens=zeros,
        verify_expected_positions=zeros,
        verify_prev_slot_indices=prev_slots,
        verify_num_valid=torch.tensor([7], dtype=torch.int32, device=device),
        enable=torch.ones(1, dtype=torch.int32, device=device),
    )
    before = skipped(device)
    got = case.run(kernels.launch_canary_verify_kernel, plan=plan)
    assert skipped(device) == before + 7
    assert got.violation_write_index.item() == case.context.violation_write_index.item()
    assert got.slot_run_counter.item() == case.context.slot_run_counter.item() + 7


def test_write_leaves_out_slots_seeds_and_offsets_outside(device: torch.device) -> None:
    """What can be stored is stored, as if the rest had been skipped."""
    seed = next(seed for seed in range(100) if write_case(seed).inputs["out_cache_loc"].shape[0] > 20)
    case = write_case(seed, device=device)
    num_slots = case.context.canary_buf.shape[0]
    num_tokens = case.inputs["out_cache_loc"].shape[0]
    plan = kernels.WritePlan(
        write_offsets=torch.tensor([0, 5, 20, num_tokens + 3], device=device),
        write_seed_slot_indices=torch.tensor([num_slots + 7, -1, -1], device=device),
        write_num_valid_reqs=torch.tensor([3], dtype=torch.int32, device=device),
    )
    loc = torch.arange(1, num_tokens + 1, device=device)
    loc[[2, 17]] = torch.tensor([num_slots, 2**40], device=device)
    before = skipped(device)
    got = case.run(kernels.launch_canary_write_kernel, plan=plan, out_cache_loc=loc)
    assert skipped(device) == before + 2 + 1 + 3
    loc[[2, 17]] = -1
    plan.write_offsets[3] = num_tokens
    plan.write_seed_slot_indices[0] = -1
    want = case.run(kernels.launch_canary_write_kernel, plan=plan, out_cache_loc=loc)
    for name in ("canary_buf", "slot_run_counter", "kernel_run_counter"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


@pytest.mark.parametrize("count", [1, 2, 3, 15, 16, 17, 31, 33, 48])
def test_long_chains_equal_short_launches(device: torch.device, count: int) -> None:
    """A chain walked in groups stores what one launch a token stores, around every group boundary."""
    case = write_case(5, device=device, many=True)
    num_slots = max(count + 2, case.context.canary_buf.shape[0])
    parts = {name: getattr(case.context, name) for name in type(case.context).__slots__}
    parts["canary_buf"] = torch.full((num_slots, 32), 0x5A, dtype=torch.uint8, device=device)
    parts["real_kv_sources"] = ()
    context = type(case.context)(**parts)
    tokens = torch.arange(count, device=device) * 7919
    slots = torch.randperm(num_slots - 1, generator=torch.Generator().manual_seed(count))[:count].to(device) + 1

    def write(into: VerifyOrWriteContext, first: int, last: int, seed_slot: int) -> None:
        kernels.launch_canary_write_kernel(
            context=into,
            plan=kernels.WritePlan(
                write_offsets=torch.tensor([0, last - first], device=device),
                write_seed_slot_indices=torch.tensor([seed_slot], device=device),
                write_num_valid_reqs=torch.tensor([1], dtype=torch.int32, device=device),
            ),
            input_ids=tokens[first:last].contiguous(),
            positions=torch.arange(first, last, device=device),
            out_cache_loc=slots[first:last].contiguous(),
            enable_write_input_assert=False,
            expected_input_tokens=None,
            expected_input_positions=None,
        )

    whole, stepwise = clone(context), clone(context)
    write(whole, 0, count, -1)
    for at in range(count):
        write(stepwise, at, at + 1, -1 if at == 0 else int(slots[at - 1]))
    assert torch.equal(whole.canary_buf, stepwise.canary_buf)
    assert whole.slot_run_counter.item() == stepwise.slot_run_counter.item()
