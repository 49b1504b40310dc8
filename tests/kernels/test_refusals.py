"""Every refusal of the plan, verify and write launchers: its first sentence, in order, with nothing written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from strategies import Draw, assert_same_words, clone, plan_case, random_context, verify_plan_of, write_case

from kvcanary_trace import kernels

CPU = torch.device("cpu")


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack((tensor, tensor), dim=-1)[..., 0]


def changed(value: Any, **parts: Any) -> Any:
    """A copy of a plan or context with some tensors replaced."""
    return type(value)(**{name: getattr(value, name) for name in type(value).__slots__} | parts)


def changed_by(value: Any, name: str, change: Any) -> Any:
    return changed(value, **{name: change(getattr(value, name))})


# --- plan -----------------------------------------------------------------------------------------------------------

LONG = torch.ones(4097, dtype=torch.int64)
PLAN_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "window without map": (
        {"swa_window_size": 3, "full_to_swa_index_mapping": None},
        "launch_canary_plan_kernels requires full_to_swa_index_mapping when swa_window_size > 0",
    ),
    "too many rows": (
        {"req_pool_indices": LONG, "prefix_lens": LONG, "extend_seq_lens": LONG},
        "launch_canary_plan_kernels supports at most bs=4096 reqs per launch, got bs=4097. ",
    ),
    "capacity": (
        {"verify_capacity": 4},
        "launch_canary_plan_kernels verify_capacity=4 does not match verify_plan_out.verify_slot_indices.shape[0]=",
    ),
    "more rows than the plan": (
        {name: torch.ones(9, dtype=torch.int64) for name in ("req_pool_indices", "prefix_lens", "extend_seq_lens")},
        "bs=9 exceeds write_req_capacity=5",
    ),
    "tokens without lengths": (
        {"req_to_verify_expected_tokens": torch.zeros(3, 4, dtype=torch.int32)},
        "launch_plan_entries_kernel requires req_to_verify_expected_tokens_valid_lens when "
        "req_to_verify_expected_tokens is set",
    ),
    "tokens of another type": (
        {
            "req_to_verify_expected_tokens": torch.zeros(3, 4, dtype=torch.int64),
            "req_to_verify_expected_tokens_valid_lens": torch.zeros(2, dtype=torch.int64),
        },
        "req_to_verify_expected_tokens must have dtype torch.int32, got torch.int64",
    ),
    "tokens strided": (
        {
            "req_to_verify_expected_tokens": torch.zeros(4, 3, dtype=torch.int32).t(),
            "req_to_verify_expected_tokens_valid_lens": torch.zeros(2, dtype=torch.int64),
        },
        "req_to_verify_expected_tokens must be contiguous",
    ),
    "too few lengths": (
        {
            "req_to_verify_expected_tokens": torch.zeros(3, 4, dtype=torch.int32),
            "req_to_verify_expected_tokens_valid_lens": torch.zeros(1, dtype=torch.int64),
        },
        "req_to_verify_expected_tokens_valid_lens length must be 2, got 1",
    ),
    "rotate without cursor": ({"overflow": "rotate"}, "rotate_cursor is required when overflow='rotate'"),
    "cursor without rotate": ({"rotate_cursor": torch.zeros(1)}, "rotate_cursor must be None when overflow='skip'"),
    "unknown overflow": ({"overflow": "clamp"}, "overflow must be 'skip' or 'rotate', got 'clamp'"),
    "cursor of another type": (
        {"overflow": "rotate", "rotate_cursor": torch.zeros(1, dtype=torch.int32)},
        "rotate_cursor must have dtype torch.int64, got torch.int32",
    ),
    "device": ({"req_pool_indices": torch.ones(2, dtype=torch.int64, device="meta")}, "req_pool_indices must be on"),
    "no batch": ({"req_pool_indices": torch.tensor(1)}, "req_pool_indices must be 1-D, got shape ()"),
}


def plan_arguments() -> dict[str, Any]:
    return {
        "req_pool_indices": torch.tensor([1, 2]),
        "prefix_lens": torch.tensor([2, 1]),
        "extend_seq_lens": torch.tensor([1, 1]),
        "req_to_token": torch.ones(3, 4, dtype=torch.int32),
        "swa_window_size": 0,
        "full_to_swa_index_mapping": None,
        "verify_capacity": 6,
        "req_to_verify_expected_tokens": None,
        "req_to_verify_expected_tokens_valid_lens": None,
        "kv_token_id_vs_position_offset": 0,
    }


@pytest.mark.parametrize(("fault", "message"), PLAN_FAULTS.values(), ids=PLAN_FAULTS)
def test_plan(fault: dict[str, Any], message: str) -> None:
    plans = (
        kernels.VerifyPlan.allocate(verify_capacity=6, device=CPU),
        kernels.WritePlan.allocate(write_req_capacity=5, device=CPU),
    )
    for plan in plans:
        for name in type(plan).__slots__:
            getattr(plan, name).fill_(-7)
    before = [clone(plan) for plan in plans]
    with pytest.raises(ValueError) as caught:
        kernels.launch_canary_plan_kernels(
            verify_plan_out=plans[0], write_plan_out=plans[1], **plan_arguments() | fault
        )
    assert str(caught.value).startswith(f"kv-canary: {message}")
    for plan, was in zip(plans, before, strict=True):
        assert_same_words(plan, was)


@pytest.mark.parametrize("name", ["verify_expected_tokens", "verify_expected_positions", "verify_prev_slot_indices"])
def test_plan_outputs_of_another_shape(name: str) -> None:
    case = plan_case(5)
    verify_plan, write_plan = case.outputs()
    for change, message in (
        (strided, "must be contiguous"),
        (lambda tensor: torch.cat((tensor, tensor)), "length must be"),
        (lambda tensor: tensor.int(), "must have dtype torch.int64"),
    ):
        odd = changed_by(verify_plan, name, change)
        if odd.verify_slot_indices.shape[0] == 1 and change is strided:
            continue
        with pytest.raises(ValueError, match=f"kv-canary: out_{name} {message}"):
            kernels.launch_canary_plan_kernels(verify_plan_out=odd, write_plan_out=write_plan, **case.inputs)


# --- verify and write -----------------------------------------------------------------------------------------------


def source(tensor: torch.Tensor) -> kernels.RealKvSource:
    return kernels.RealKvSource(tensor=tensor, page_size=1, num_bytes_per_token=16, read_bytes=16)


def bad_sources() -> dict[str, tuple[tuple[kernels.RealKvSource, ...], str]]:
    good = source(torch.zeros(50, 16, dtype=torch.uint8))
    return {
        "five": ((good,) * 5, "at most 4 RealKvSource entries supported by the CUDA ABI, got 5"),
        "unpacked": (
            (good, source(torch.zeros(50, 32, dtype=torch.uint8)[:, ::2])),
            "real_kv_sources[1].tensor rows must be packed (stride(-1) == 1), got strides (32, 2)",
        ),
        "3-D": (
            (source(torch.zeros(50, 16, 2, dtype=torch.uint8)),),
            "real_kv_sources[0].tensor (viewed as uint8) must be 2-D, got 3-D",
        ),
        "elsewhere": (
            (source(torch.zeros(50, 16, dtype=torch.uint8, device="meta")),),
            "real_kv_sources[0].tensor must be on canary_buf's device cpu, got meta",
        ),
    }


CONTEXT_FAULTS: dict[str, tuple[str, Any, str]] = {
    "buffer strided": (
        "canary_buf",
        lambda t: torch.zeros(50, 64, dtype=torch.uint8)[:, ::2],
        "canary_buf must be contig",
    ),
    "buffer type": (
        "canary_buf",
        lambda t: t.view(torch.int8),
        "canary_buf must have dtype torch.uint8, got torch.int8",
    ),
    "buffer 1-D": ("canary_buf", lambda t: t.flatten(), "canary_buf must be 2-D"),
    "slots too short": (
        "canary_buf",
        lambda t: torch.zeros(50, 24, dtype=torch.uint8),
        "canary_buf slot stride must hold at least 4 int64 fields, got 3",
    ),
    "odd slots": (
        "canary_buf",
        lambda t: torch.zeros(50, 36, dtype=torch.uint8),
        "canary_buf slots must start at mult",
    ),
    "ring strided": (
        "violation_ring",
        lambda t: torch.zeros(4, 16).long()[:, ::2],
        "violation_ring must be contiguous",
    ),
    "ring type": ("violation_ring", lambda t: t.int(), "violation_ring must have dtype torch.int64, got torch.int32"),
    "ring width": ("violation_ring", lambda t: torch.zeros(4, 7).long(), "violation_ring rows must be 8 words"),
    "index": ("violation_write_index", lambda t: t.long(), "violation_write_index must have dtype torch.int32"),
    "counter": ("slot_run_counter", lambda t: torch.zeros(2).long(), "slot_run_counter length must be 1, got 2"),
    "runs": ("kernel_run_counter", lambda t: t.int(), "kernel_run_counter must have dtype torch.int64"),
    "mode": ("real_kv_hash_mode", lambda t: 3, "real_kv_hash_mode must be 0 (NONE), 1 (PARTIAL) or 2 (ALL), got 3"),
    "flag": ("enable_chain_position_assert", lambda t: t.long(), "enable_chain_position_assert must have dtype"),
}


def odd_contexts() -> dict[str, tuple[kernels.VerifyOrWriteContext, str]]:
    good = changed(random_context(Draw(3, "cpu"), 50), real_kv_sources=())
    faults = {
        name: (changed_by(good, part, change), message) for name, (part, change, message) in CONTEXT_FAULTS.items()
    }
    faults |= {
        name: (changed(good, real_kv_sources=sources), message) for name, (sources, message) in bad_sources().items()
    }
    first = changed(faults["ring strided"][0], real_kv_sources=faults["five"][0].real_kv_sources)
    return faults | {"two faults": (first, faults["five"][1])}


ODD = odd_contexts()


@pytest.mark.parametrize("fault", ODD)
def test_contexts(fault: str) -> None:
    """Verify and write refuse the same contexts, before they write."""
    odd, message = ODD[fault]
    case = write_case(9)
    plan = verify_plan_of(Draw(1, "cpu"), [(1, -1, 0, -1)])
    before = clone(odd)
    for launch in (
        lambda: kernels.launch_canary_verify_kernel(context=odd, plan=plan, check_verify_expected_token=False),
        lambda: kernels.launch_canary_write_kernel(context=odd, plan=case.plan, **case.inputs),
    ):
        with pytest.raises(ValueError) as caught:
            launch()
        assert str(caught.value).startswith(f"kv-canary: {message}")
    assert_same_words(odd, before)


@pytest.mark.parametrize("name", kernels.VerifyPlan.__slots__)
def test_verify_plans(name: str) -> None:
    context = changed(random_context(Draw(3, "cpu"), 50), real_kv_sources=())
    plan = verify_plan_of(Draw(1, "cpu"), [(1, -1, 0, -1)] * 3)
    faults: list[tuple[Any, str]] = [(lambda t: t.float(), "must have dtype"), (lambda t: t[None], "must be 1-D")]
    if plan.verify_slot_indices.shape == getattr(plan, name).shape:
        faults.append((strided, "must be contiguous"))
    for change, message in faults:
        before = clone(context)
        with pytest.raises(ValueError, match=f"kv-canary: plan.{name} {message}"):
            kernels.launch_canary_verify_kernel(
                context=context, plan=changed_by(plan, name, change), check_verify_expected_token=False
            )
        assert_same_words(context, before)


WRITE_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "assert without tokens": (
        {"enable_write_input_assert": True},
        "expected input tensors are required when enable_write_input_assert=True",
    ),
    "tokens without assert": (
        {"expected_input_tokens": torch.zeros(6, dtype=torch.int64)},
        "expected input tensors must be None when enable_write_input_assert=False",
    ),
    "ids strided": ({"input_ids": strided(torch.arange(6))}, "input_ids must be contiguous"),
    "positions strided": ({"positions": strided(torch.arange(6))}, "positions must be contiguous"),
    "positions before a short array": (
        {"positions": strided(torch.arange(6)), "input_ids": torch.arange(5)},
        "positions must be contiguous",
    ),
    "slots strided": ({"out_cache_loc": strided(torch.arange(6))}, "out_cache_loc must be contiguous"),
    "ids type": ({"input_ids": torch.arange(6, dtype=torch.int32)}, "input_ids must have dtype torch.int64, got"),
    "positions short": ({"positions": torch.arange(5)}, "positions length must be 6, got 5"),
    "slots elsewhere": (
        {"out_cache_loc": torch.zeros(6, dtype=torch.int64, device="meta")},
        "out_cache_loc must be on",
    ),
    "expected short": (
        {
            "enable_write_input_assert": True,
            "expected_input_tokens": torch.arange(6),
            "expected_input_positions": torch.arange(7),
        },
        "expected_input_positions length must be 6, got 7",
    ),
    "offsets": (
        {"short_offsets": True},
        "plan.write_offsets length must be 2, got 1",
    ),
}


@pytest.mark.parametrize(("fault", "message"), WRITE_FAULTS.values(), ids=WRITE_FAULTS)
def test_write(fault: dict[str, Any], message: str) -> None:
    context = changed(random_context(Draw(3, "cpu"), 50), real_kv_sources=())
    plan = kernels.WritePlan(
        write_offsets=torch.tensor([0, 6]),
        write_seed_slot_indices=torch.tensor([-1]),
        write_num_valid_reqs=torch.tensor([1], dtype=torch.int32),
    )
    fault = dict(fault)
    if fault.pop("short_offsets", False):
        plan = changed(plan, write_offsets=torch.tensor([0]))
    good = {
        "input_ids": torch.arange(6),
        "positions": torch.arange(6),
        "out_cache_loc": torch.arange(6),
        "enable_write_input_assert": False,
        "expected_input_tokens": None,
        "expected_input_positions": None,
    }
    before = clone(context)
    with pytest.raises(ValueError) as caught:
        kernels.launch_canary_write_kernel(context=context, plan=plan, **good | fault)
    assert str(caught.value).startswith(f"kv-canary: {message}")
    assert_same_words(context, before)


# --- what is no tensor at all ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [None, [1, 2], 3, "x"], ids=repr)
def test_what_is_no_tensor_is_named(wrong: Any) -> None:
    """Lists, numbers and nothing: a TypeError that names the argument, and outputs untouched."""
    case = plan_case(5)
    plans = case.outputs()
    good = {"verify_plan_out": plans[0], "write_plan_out": plans[1], **case.inputs}
    before = clone(plans[0]), clone(plans[1])
    for name in ("verify_plan_out", "write_plan_out", "req_pool_indices", "prefix_lens", "req_to_token"):
        with pytest.raises(TypeError, match=f"^kv-canary: {name} must be a "):
            kernels.launch_canary_plan_kernels(**{**good, name: wrong})
    for plan, was in zip(plans, before, strict=True):
        assert_same_words(plan, was)
    context = changed(random_context(Draw(3, "cpu"), 50), real_kv_sources=())
    verify_plan = verify_plan_of(Draw(1, "cpu"), [(1, -1, 0, -1)])
    for parts, name in (
        ({"context": wrong}, "context"),
        ({"plan": wrong}, "plan"),
        ({"context": changed(context, violation_ring=wrong)}, r"context\.violation_ring"),
    ):
        arguments = {"context": context, "plan": verify_plan, "check_verify_expected_token": False, **parts}
        with pytest.raises(TypeError, match=f"^kv-canary: {name} must be a "):
            kernels.launch_canary_verify_kernel(**arguments)
    tokens = write_case(9)
    with pytest.raises(TypeError, match=r"^kv-canary: input_ids must be a "):
        kernels.launch_canary_write_kernel(
            context=tokens.context, plan=tokens.plan, **{**tokens.inputs, "input_ids": wrong}
        )
