"""What lies outside a buffer, a map, a table or a source is refused before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from strategies import POISON, assert_same_words, clone, verify_plan_of

from kvcanary_trace import kernels
from kvcanary_trace.kernels import RealKvHashMode, RealKvSource, VerifyOrWriteContext, VerifyPlan, WritePlan

pytestmark = pytest.mark.usefixtures("torch_path")
CPU = torch.device("cpu")


def poisoned(*plans: Any) -> tuple[Any, ...]:
    for plan in plans:
        for name in type(plan).__slots__:
            getattr(plan, name).fill_(-77)
    return plans


def plan_inputs(**changed: Any) -> dict[str, Any]:
    return {
        "req_pool_indices": torch.tensor([1, 0, 2]),
        "prefix_lens": torch.tensor([4, 3, 2]),
        "extend_seq_lens": torch.tensor([1, 1, 2]),
        "req_to_token": torch.arange(18, dtype=torch.int32).reshape(3, 6),
        "swa_window_size": 0,
        "full_to_swa_index_mapping": None,
        "verify_capacity": 8,
        "req_to_verify_expected_tokens": None,
        "req_to_verify_expected_tokens_valid_lens": None,
        "kv_token_id_vs_position_offset": 0,
    } | changed


TOKENS = torch.zeros(3, 4, dtype=torch.int32)
PLAN_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "prefix past its row": ({"prefix_lens": torch.tensor([4, 9, 7])}, r"prefix_lens\[2\] is 7, past the end of .* 6"),
    "absurd prefixes": (
        {
            "req_pool_indices": torch.tensor([1, 1, 2, 2]),
            "prefix_lens": torch.full((4,), 2**62),  # sums to 2**64, which wraps to 0
            "extend_seq_lens": torch.ones(4, dtype=torch.int64),
        },
        r"prefix_lens\[0\] is 4611686018427387904",
    ),
    "row past the table": ({"req_pool_indices": torch.tensor([1, 0, 3])}, r"req_pool_indices\[2\] is 3, outside .* 3"),
    "negative row": ({"req_pool_indices": torch.tensor([-1, 0, 2])}, r"req_pool_indices\[0\] is -1"),
    "slot past the map": ({"full_to_swa_index_mapping": torch.arange(13)}, r"SWA slot 13 is outside .* length 13"),
    "slot past the map, overflowing": (
        {"full_to_swa_index_mapping": torch.arange(9), "swa_window_size": 2, "verify_capacity": 1},
        r"SWA slot 9 is outside full_to_swa_index_mapping length 9",
    ),
    "predecessor of a window past the map": (
        {
            "full_to_swa_index_mapping": torch.arange(16),
            "swa_window_size": 1,
            "req_to_token": torch.tensor([[0] * 6, [1, 1, 99, 1, 1, 1], [1] * 6], dtype=torch.int32),
        },
        r"SWA slot 99 is outside",
    ),
    "expected tokens past their row": (
        {
            "req_to_verify_expected_tokens": TOKENS[:, :3],
            "req_to_verify_expected_tokens_valid_lens": torch.tensor([4, 9, 2]),
        },
        r"valid_lens\[0\] asks for 4 tokens of a row of 3",
    ),
    "no row of expected tokens": (
        {
            "req_to_verify_expected_tokens": TOKENS[:2],
            "req_to_verify_expected_tokens_valid_lens": torch.tensor([1, 1, 1]),
        },
        r"req_pool_indices\[2\] is 2, outside req_to_verify_expected_tokens of 2 rows",
    ),
}


@pytest.mark.parametrize(("changed", "message"), PLAN_FAULTS.values(), ids=PLAN_FAULTS)
@pytest.mark.parametrize("overflow", ["skip", "rotate"])
def test_plan(changed: dict[str, Any], message: str, overflow: str) -> None:
    inputs = plan_inputs(**{k: v.contiguous() if isinstance(v, torch.Tensor) else v for k, v in changed.items()})
    plans = poisoned(
        VerifyPlan.allocate(verify_capacity=inputs["verify_capacity"], device=CPU),
        WritePlan.allocate(write_req_capacity=4, device=CPU),
    )
    before = [clone(plan) for plan in plans]
    cursor = torch.tensor([1]) if overflow == "rotate" else None
    with pytest.raises(ValueError, match="^kv-canary: .*" + message):
        kernels.launch_canary_plan_kernels(
            verify_plan_out=plans[0], write_plan_out=plans[1], **inputs, overflow=overflow, rotate_cursor=cursor
        )
    for plan, was in zip(plans, before, strict=True):
        assert_same_words(plan, was)
    assert cursor is None or cursor.item() == 1


def test_plan_reads_nothing_that_does_not_count() -> None:
    """Padding rows, empty prefixes and tokens that are not valid may hold anything."""
    inputs = plan_inputs(
        req_pool_indices=torch.tensor([0, 99, 1]),
        prefix_lens=torch.tensor([10**9, 0, 4]),
        req_to_verify_expected_tokens=TOKENS[:2, :3].contiguous(),
        req_to_verify_expected_tokens_valid_lens=torch.tensor([99, 99, 3]),
    )
    plans = poisoned(
        VerifyPlan.allocate(verify_capacity=8, device=CPU), WritePlan.allocate(write_req_capacity=3, device=CPU)
    )
    kernels.launch_canary_plan_kernels(verify_plan_out=plans[0], write_plan_out=plans[1], **inputs)
    assert plans[0].verify_num_valid.item() == 4


def context(**changed: Any) -> VerifyOrWriteContext:
    parts: dict[str, Any] = {
        "canary_buf": torch.full((8, 32), 3, dtype=torch.uint8),
        "kernel_kind": kernels.CanaryLaunchTag.HEAD_K_FULL,
        "violation_ring": torch.full((4, 8), POISON),
        "violation_write_index": torch.zeros(1, dtype=torch.int32),
        "slot_run_counter": torch.zeros(1, dtype=torch.int64),
        "kernel_run_counter": torch.zeros(1, dtype=torch.int64),
        "real_kv_sources": (),
        "real_kv_hash_mode": RealKvHashMode.ALL,
        "enable_chain_position_assert": torch.ones(1, dtype=torch.int32),
    }
    return VerifyOrWriteContext(**parts | changed)


def source(rows: int, page_size: int = 1) -> RealKvSource:
    tensor = torch.zeros(rows, 16 * page_size, dtype=torch.uint8)
    return RealKvSource(tensor=tensor, page_size=page_size, num_bytes_per_token=16, read_bytes=16)


def verify(canary: VerifyOrWriteContext, *entries: tuple[int, int]) -> None:
    """Verify (slot, previous slot) entries."""
    from strategies import Draw

    plan = verify_plan_of(Draw(0, "cpu"), [(slot, -1, 5, prev) for slot, prev in entries])
    kernels.launch_canary_verify_kernel(context=canary, plan=plan, check_verify_expected_token=False)


def write(canary: VerifyOrWriteContext, slots: list[int], seed: int = -1, num_tokens: int | None = None) -> None:
    """Write one request's tokens to `slots`."""
    length = len(slots) if num_tokens is None else num_tokens
    plan = WritePlan(
        write_offsets=torch.tensor([0, length]),
        write_seed_slot_indices=torch.tensor([seed]),
        write_num_valid_reqs=torch.tensor([1], dtype=torch.int32),
    )
    kernels.launch_canary_write_kernel(
        context=canary,
        plan=plan,
        input_ids=torch.arange(len(slots)),
        positions=torch.arange(len(slots)),
        out_cache_loc=torch.tensor(slots),
        enable_write_input_assert=False,
        expected_input_tokens=None,
        expected_input_positions=None,
    )


LAUNCH_FAULTS: dict[str, tuple[Callable[[VerifyOrWriteContext], None], dict[str, Any], str]] = {
    "verify, slot past the buffer": (
        lambda c: verify(c, (1, -1), (8, -1)),
        {},
        "verify_slot_indices has slot 8, .* 8 sl",
    ),
    "verify, negative slot": (lambda c: verify(c, (1, -1), (-1, -1)), {}, "verify_slot_indices has slot -1"),
    "verify, predecessor past": (lambda c: verify(c, (1, -1), (2, 9)), {}, "verify_prev_slot_indices has slot 9"),
    "verify, slot past a source": (
        lambda c: verify(c, (1, -1), (6, 1)),
        {"real_kv_sources": (source(8), source(3, page_size=2))},
        r"slot 6 is outside real_kv_sources\[1\], which has 3 rows of 2 slots",
    ),
    "write, slot past the buffer": (lambda c: write(c, [1, 8]), {}, "out_cache_loc has slot 8"),
    "write, seed past the buffer": (lambda c: write(c, [1, 2], seed=8), {}, "write_seed_slot_indices has slot 8"),
    "write, slot past a source": (
        lambda c: write(c, [1, 7]),
        {"real_kv_sources": (source(7),)},
        r"slot 7 is outside real_kv_sources\[0\]",
    ),
    "write, offsets past the tokens": (
        lambda c: write(c, [1, 2], num_tokens=3),
        {},
        r"gives request 0 the tokens \[0, 3\), outside input_ids of 2",
    ),
}


@pytest.mark.parametrize(("launch", "changed", "message"), LAUNCH_FAULTS.values(), ids=LAUNCH_FAULTS)
def test_verify_and_write(launch: Callable[..., None], changed: dict[str, Any], message: str) -> None:
    canary = context(**changed)
    before = clone(canary)
    with pytest.raises(ValueError, match="^kv-canary: .*" + message):
        launch(canary)
    assert_same_words(canary, before)


def test_what_is_skipped_is_not_read() -> None:
    """The dummy slot's predecessor, and the seed of a request whose tokens are all left out, may be anything."""
    canary = context(real_kv_sources=(source(3),))
    verify(canary, (0, 99))
    verify(canary, (0, 99), (0, 2**62))
    write(canary, [-1, -2], seed=99)
    assert canary.kernel_run_counter.item() == 3
    assert canary.violation_write_index.item() == 0
    assert kernels.torch_backend.skipped_entries(CPU).item() == 0  # type: ignore[attr-defined]


def test_a_dummy_slot_among_others_is_not_checked() -> None:
    """Its predecessor may lie anywhere, and it gives no violation; the entry beside it does."""
    canary = context()
    verify(canary, (1, -1), (0, 99), (2, 0))
    assert canary.violation_write_index.item() == 2
    assert canary.violation_ring[:2, 1].tolist() == [1, 2]


def test_empty_shapes() -> None:
    """No requests, no tokens, no slots."""
    plans = poisoned(
        VerifyPlan.allocate(verify_capacity=2, device=CPU), WritePlan.allocate(write_req_capacity=2, device=CPU)
    )
    none = torch.empty(0, dtype=torch.int64)
    inputs = plan_inputs(req_pool_indices=none, prefix_lens=none, extend_seq_lens=none, verify_capacity=2)
    kernels.launch_canary_plan_kernels(verify_plan_out=plans[0], write_plan_out=plans[1], **inputs)
    assert (plans[0].verify_num_valid.item(), plans[0].enable.item()) == (0, 1)
    assert plans[1].write_offsets.tolist() == [0, 0, 0]
    assert plans[1].write_num_valid_reqs.item() == 0
    assert plans[1].write_seed_slot_indices.tolist() == [-77, -77]
    canary = context(canary_buf=torch.empty(0, 32, dtype=torch.uint8))
    verify(canary, (0, -1))
    kernels.launch_canary_verify_kernel(context=canary, plan=plans[0], check_verify_expected_token=True)
    assert canary.slot_run_counter.item() == 1


def test_entries_refuse_offsets_of_another_batch() -> None:
    inputs = plan_inputs()
    plans = poisoned(VerifyPlan.allocate(verify_capacity=8, device=CPU))
    before = clone(plans[0])
    for offsets, message in (
        ([0, 4, 4, 9], "holds 9 entries"),
        ([0, 4, 3, 4], "must rise"),
        ([1, 4, 4, 4], "must rise"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.launch_plan_entries_kernel(
                **{k: v for k, v in inputs.items() if k not in ("extend_seq_lens", "verify_capacity")},
                verify_offsets_scratch=torch.tensor(offsets),
                verify_enable=torch.ones(1, dtype=torch.int32),
                out_verify_slot_indices=plans[0].verify_slot_indices,
                out_verify_expected_tokens=plans[0].verify_expected_tokens,
                out_verify_expected_positions=plans[0].verify_expected_positions,
                out_verify_prev_slot_indices=plans[0].verify_prev_slot_indices,
            )
    assert_same_words(plans[0], before)
