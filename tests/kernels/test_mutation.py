"""A clean buffer gives no violation; one changed word gives exactly those that the contract names."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from strategies import SEEDS, clean_buffer, clone, verify_plan_of

from kvcanary_trace import kernels
from kvcanary_trace.kernels import FailReason, RealKvSource
from kvcanary_trace.kernels.layout import CHAIN_NAMES, ChainName, SlotField, ViolationField

pytestmark = pytest.mark.usefixtures("torch_path")
CASES = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
CHAINS = st.sampled_from(CHAIN_NAMES)
FLIPS = st.integers(0, 63).map(lambda bit: 1 << bit if bit < 63 else -(2**63))


def with_ring(context: kernels.VerifyOrWriteContext, rows: int) -> kernels.VerifyOrWriteContext:
    parts = {name: getattr(context, name) for name in type(context).__slots__}
    return type(context)(**parts | {"violation_ring": torch.zeros(rows, 8, dtype=torch.int64)})


def violations(context: kernels.VerifyOrWriteContext) -> list[tuple[int, FailReason]]:
    """(slot, reasons) of every violation in the ring."""
    rows = context.violation_ring[: int(context.violation_write_index)]
    return [(int(row[ViolationField.SLOT]), FailReason(int(row[ViolationField.FAIL_REASON]))) for row in rows]


@CASES
@given(seed=SEEDS, chain=CHAINS)
def test_a_clean_buffer_is_clean(seed: int, chain: ChainName) -> None:
    draw, context, entries = clean_buffer(seed, kernels.launch_canary_write_kernel, chain=chain)
    before = clone(context)
    plan = verify_plan_of(draw, entries)
    kernels.launch_canary_verify_kernel(context=context, plan=plan, check_verify_expected_token=True)
    assert int(context.violation_write_index) == 0
    assert torch.equal(context.violation_ring, before.violation_ring)
    assert int(context.slot_run_counter - before.slot_run_counter) == len(entries)
    assert int(context.kernel_run_counter - before.kernel_run_counter) == 1


@CASES
@given(
    seed=SEEDS,
    where=st.integers(0, 10**6),
    word=st.sampled_from(SlotField),
    flip=FLIPS,
    check=st.booleans(),
    chain=CHAINS,
)
def test_one_changed_word(seed: int, where: int, word: SlotField, flip: int, check: bool, chain: ChainName) -> None:
    """The slot itself, by the word's own check; its successors, where the word is part of the chain."""
    draw, context, entries = clean_buffer(seed, kernels.launch_canary_write_kernel, chain=chain)
    context = with_ring(context, 64)
    slot = where % context.canary_buf.shape[0]
    context.canary_buf.view(torch.int64)[slot, word] ^= flip
    chain, wanted = FailReason.VERIFY_CHAIN_HASH_MISMATCH, []
    for entry_slot, token, _, prev_slot in entries:
        reasons = FailReason(0)
        if entry_slot == slot:
            if word == SlotField.TOKEN and check and token != -1:
                reasons |= FailReason.VERIFY_TOKEN_MISMATCH
            elif word == SlotField.POSITION:
                reasons |= FailReason.VERIFY_POSITION_MISMATCH
            elif word == SlotField.PREV_HASH and prev_slot != 0:
                reasons |= chain
            elif word == SlotField.REAL_KV_HASH:
                reasons |= FailReason.VERIFY_REAL_KV_HASH_MISMATCH
        if prev_slot == slot != 0 and word != SlotField.REAL_KV_HASH:
            reasons |= chain
        if reasons:
            wanted.append((entry_slot, reasons))
    plan = verify_plan_of(draw, entries)
    kernels.launch_canary_verify_kernel(context=context, plan=plan, check_verify_expected_token=check)
    assert violations(context) == wanted


@CASES
@given(seed=SEEDS, where=st.integers(0, 10**6), column=st.integers(0, 63), flip=st.integers(1, 255))
def test_one_changed_byte_of_real_kv(seed: int, where: int, column: int, flip: int) -> None:
    """A byte inside the fingerprint's reach is seen on its slot alone; one outside is not."""
    draw, context, entries = clean_buffer(seed, kernels.launch_canary_write_kernel)
    assume(entries)
    num_slots = context.canary_buf.shape[0]
    data = torch.randint(0, 256, (num_slots, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    source = RealKvSource(tensor=data, page_size=1, num_bytes_per_token=64, read_bytes=48)
    parts = {name: getattr(context, name) for name in type(context).__slots__}
    mode = kernels.RealKvHashMode(1 + seed % 2)
    context = with_ring(type(context)(**parts | {"real_kv_sources": (source,), "real_kv_hash_mode": mode}), 64)
    tokens = torch.tensor([token for _, token, _, _ in entries])
    slots = torch.tensor([slot for slot, *_ in entries])
    write_plan = kernels.WritePlan(
        write_offsets=torch.tensor([0, len(entries)]),
        write_seed_slot_indices=torch.tensor([-1]),
        write_num_valid_reqs=torch.tensor([1], dtype=torch.int32),
    )
    kernels.launch_canary_write_kernel(
        context=context,
        plan=write_plan,
        input_ids=tokens,
        positions=torch.arange(len(entries)),
        out_cache_loc=slots,
        enable_write_input_assert=False,
        expected_input_tokens=None,
        expected_input_positions=None,
    )
    data[where % num_slots, column] ^= flip
    chained = zip(slots.tolist(), tokens.tolist(), range(len(entries)), [-1, *slots.tolist()], strict=False)
    plan = verify_plan_of(draw, list(chained))
    kernels.launch_canary_verify_kernel(context=context, plan=plan, check_verify_expected_token=True)
    reach = 16 if mode == kernels.RealKvHashMode.PARTIAL else 48
    seen = column < reach and where % num_slots in slots.tolist()
    wanted = [(where % num_slots, FailReason.VERIFY_REAL_KV_HASH_MISMATCH)] if seen else []
    assert violations(context) == wanted


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_the_ring_fills_once_and_counts_on(rows: int) -> None:
    """More violations than rows: the first are kept, all are counted, nothing past the ring is touched."""
    draw, context, entries = clean_buffer(3, kernels.launch_canary_write_kernel, many=True)
    assert len(entries) > 8
    guarded = torch.full((rows + 2, 8), -77)
    parts = {name: getattr(context, name) for name in type(context).__slots__}
    context = type(context)(**parts | {"violation_ring": guarded[1:-1]})
    moved = [(slot, token, position + 1, prev) for slot, token, position, prev in entries]
    plan = verify_plan_of(draw, moved)
    for launches in (1, 2):
        kernels.launch_canary_verify_kernel(context=context, plan=plan, check_verify_expected_token=False)
        assert int(context.violation_write_index) == launches * len(entries)
    assert guarded[0].eq(-77).all() and guarded[-1].eq(-77).all()
    kept = guarded[1:-1, ViolationField.SLOT].tolist()
    assert kept == [slot for slot, *_ in entries][:rows]


@pytest.mark.parametrize(("enable", "num_valid", "counted"), [(0, 4, 0), (1, 0, 0), (1, -2, 0), (2, 4, 4), (1, 99, 6)])
def test_what_counts_as_run(enable: int, num_valid: int, counted: int) -> None:
    """Disabled or empty launches count as launches; entries are clamped to the plan's capacity; slot 0 is counted."""
    draw, context, _ = clean_buffer(11, kernels.launch_canary_write_kernel)
    before = clone(context)
    plan = verify_plan_of(draw, [(0, -1, 9, 5)] * 6, num_valid=num_valid, enable=enable)
    kernels.launch_canary_verify_kernel(context=context, plan=plan, check_verify_expected_token=True)
    assert int(context.kernel_run_counter - before.kernel_run_counter) == 1
    assert int(context.slot_run_counter - before.slot_run_counter) == counted
    assert int(context.violation_write_index) == 0
