"""Buffers, sources and tables past 2**31 bytes on the device: what lies at their far end is read and written there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from strategies import assert_same_words
from torch import Tensor

from kvcanary_trace import kernels
from kvcanary_trace.kernels import CanaryLaunchTag, RealKvHashMode, RealKvSource, VerifyOrWriteContext
from kvcanary_trace.kernels.backend import use_backend
from kvcanary_trace.kernels.layout import CHAIN_NAMES, ChainName

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
PAST = 2**31
COUNT = 3000
GIB = 2**30


@pytest.fixture(autouse=True)
def roomy_device() -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 40 * GIB:
        pytest.skip(f"needs 40 GiB of free device memory, {free / GIB:.1f} there")


def context_of(num_slots: int, chain: ChainName, *, token_bytes: int, page_size: int) -> VerifyOrWriteContext:
    """A buffer and a source of `num_slots`; only the last pages of the source are not 0."""
    pages = num_slots // page_size
    source = torch.zeros(pages, page_size * token_bytes, dtype=torch.uint8, device=DEVICE)
    noise = torch.Generator(DEVICE).manual_seed(3)
    tail = source[-(2 * COUNT // page_size + 2) :]
    tail.copy_(torch.randint(0, 255, tail.shape, dtype=torch.uint8, device=DEVICE, generator=noise))
    return VerifyOrWriteContext(
        canary_buf=torch.zeros(num_slots, 32, dtype=torch.uint8, device=DEVICE),
        kernel_kind=CanaryLaunchTag.HEAD_K_FULL,
        violation_ring=torch.full((64, 8), -7, device=DEVICE),
        violation_write_index=torch.zeros(1, dtype=torch.int32, device=DEVICE),
        slot_run_counter=torch.zeros(1, dtype=torch.int64, device=DEVICE),
        kernel_run_counter=torch.zeros(1, dtype=torch.int64, device=DEVICE),
        real_kv_sources=(
            RealKvSource(tensor=source, page_size=page_size, num_bytes_per_token=token_bytes, read_bytes=token_bytes),
        ),
        real_kv_hash_mode=RealKvHashMode.ALL,
        enable_chain_position_assert=torch.ones(1, dtype=torch.int32, device=DEVICE),
        chain=chain,
    )


def moved(context: VerifyOrWriteContext, by: int, page_size: int) -> VerifyOrWriteContext:
    """The same without its first `by` slots, in tensors of its own: small enough for any index."""
    source = context.real_kv_sources[0]
    parts = {name: getattr(context, name) for name in type(context).__slots__}
    parts |= {
        "canary_buf": context.canary_buf[by:].clone(),
        "violation_ring": context.violation_ring.clone(),
        "violation_write_index": context.violation_write_index.clone(),
        "slot_run_counter": context.slot_run_counter.clone(),
        "kernel_run_counter": context.kernel_run_counter.clone(),
        "real_kv_sources": (replace(source, tensor=source.tensor[by // page_size :].clone()),),
    }
    return VerifyOrWriteContext(**parts)


def write_and_verify(context: VerifyOrWriteContext, slots: Tensor, spoilt: int) -> None:
    """One request in `slots`, in order; the slot of entry `spoilt` is spoilt between its write and its check."""
    count = slots.shape[0]
    tokens, positions = torch.arange(count, device=DEVICE) * 31, torch.arange(count, device=DEVICE)
    kernels.launch_canary_write_kernel(
        context=context,
        plan=kernels.WritePlan(
            write_offsets=torch.tensor([0, count], device=DEVICE),
            write_seed_slot_indices=torch.tensor([-1], device=DEVICE),
            write_num_valid_reqs=torch.tensor([1], dtype=torch.int32, device=DEVICE),
        ),
        input_ids=tokens,
        positions=positions,
        out_cache_loc=slots,
        enable_write_input_assert=False,
        expected_input_tokens=None,
        expected_input_positions=None,
    )
    context.canary_buf.view(torch.int64)[slots[spoilt], 3] ^= 1
    kernels.launch_canary_verify_kernel(
        context=context,
        plan=kernels.VerifyPlan(
            verify_slot_indices=slots,
            verify_expected_tokens=tokens,
            verify_expected_positions=positions,
            verify_prev_slot_indices=torch.cat((slots.new_full((1,), -1), slots[:-1])),
            verify_num_valid=torch.tensor([count], dtype=torch.int32, device=DEVICE),
            enable=torch.ones(1, dtype=torch.int32, device=DEVICE),
        ),
        check_verify_expected_token=True,
    )


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chain", CHAIN_NAMES)
def test_slots_at_the_far_end(chain: ChainName, page_size: int) -> None:
    """As the same slots of a small buffer; a buffer of 2.3 GB and a source of 9.2 GB."""
    num_slots = (PAST // 32 + 2**22) // 16 * 16
    far = context_of(num_slots, chain, token_bytes=128, page_size=page_size)
    assert far.canary_buf.nbytes > PAST
    assert far.real_kv_sources[0].tensor.nbytes > 4 * PAST
    first = num_slots - 2 * COUNT // 16 * 16
    near = moved(far, first, page_size)
    slots = torch.randperm(num_slots - first, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(5))[:COUNT]
    slots[slots == 0] = int(slots[-1])
    slots = slots[: COUNT - 1].contiguous()
    with use_backend("triton"):
        write_and_verify(far, slots + first, 1234)
    with use_backend("torch"):
        write_and_verify(near, slots, 1234)
    assert int(near.violation_write_index) == 1
    near.violation_ring[0, 1] += first
    assert not far.canary_buf[:first].any()
    far = moved(far, first, page_size)
    assert_same_words(far, near)


def test_a_table_and_a_map_past_the_range() -> None:
    """Rows of `req_to_token` and of the expected tokens past 2**31 entries, and a map past 2**31 bytes."""
    width = 2**29
    rows = torch.arange(1, 6, device=DEVICE)
    table = torch.zeros(6, width, dtype=torch.int32, device=DEVICE)
    assert table.numel() > PAST
    map_len = PAST // 8 + 1000
    table[1:, :COUNT] = torch.arange(map_len - 1 - 5 * COUNT, map_len - 1, device=DEVICE).view(5, COUNT).int()
    prefix = torch.full((5,), COUNT, device=DEVICE)

    def plan(table: Tensor, rows: Tensor, tokens: Tensor) -> kernels.VerifyPlan:
        out = kernels.VerifyPlan.allocate(verify_capacity=5 * COUNT, device=DEVICE)
        for name in type(out).__slots__:
            getattr(out, name).fill_(-77)
        kernels.launch_canary_plan_kernels(
            verify_plan_out=out,
            write_plan_out=kernels.WritePlan.allocate(write_req_capacity=5, device=DEVICE),
            req_pool_indices=rows,
            prefix_lens=prefix,
            extend_seq_lens=torch.ones_like(prefix),
            req_to_token=table,
            swa_window_size=COUNT,
            full_to_swa_index_mapping=mapping,
            verify_capacity=5 * COUNT,
            req_to_verify_expected_tokens=tokens,
            req_to_verify_expected_tokens_valid_lens=prefix,
            kv_token_id_vs_position_offset=0,
        )
        return out

    mapping = torch.zeros(map_len, device=DEVICE, dtype=torch.int64)
    mapping[-5 * COUNT - 1 :] = torch.arange(5 * COUNT + 1, device=DEVICE) + 7
    tokens = table ^ 5
    with use_backend("triton"):
        far = plan(table, rows, tokens)
    small = table[:, :COUNT].contiguous()
    with use_backend("torch"):
        near = plan(small, rows, small ^ 5)
    assert int(near.verify_num_valid) == 5 * COUNT
    assert int(near.verify_slot_indices.min()) >= 7
    assert_same_words(far, near)
