"""Batches past write_req_capacity or 4096 rows equal one launch without a limit; rotating windows see every entry."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import POISON, SEEDS, Draw, PlanCase, assert_same_words, clone, plan_case, random_context

from kvcanary_trace import kernels
from kvcanary_trace.kernels import hooks
from kvcanary_trace.kernels.chunks import MAX_CHUNKED_REQS

pytestmark = pytest.mark.usefixtures("torch_path")
CPU = torch.device("cpu")
CASES = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def forward(context: Any, verify_plan: Any, write_plans: Any, tokens: dict[str, Any], verify: Any, write: Any) -> None:
    """Verify everything, then write everything."""
    verify(context=context, plan=verify_plan, check_verify_expected_token=True)
    for plan in write_plans:
        write(context=context, plan=plan, **tokens)


def tokens_of(case: PlanCase, draw: Draw, num_slots: int) -> dict[str, Any]:
    """Token arrays for what the case extends, some of it wrong; slots may come twice."""
    rows, extends = case.inputs["req_pool_indices"], case.inputs["extend_seq_lens"]
    total = int((extends.clamp(min=0) * (rows != 0)).sum())
    ids, positions = draw.ints(0, 9, total), draw.ints(0, 50, total)
    return {
        "input_ids": draw.tensor(ids),
        "positions": draw.tensor(positions),
        "out_cache_loc": draw.tensor(draw.ints(-1, num_slots - 1, total)),
        "enable_write_input_assert": True,
        "expected_input_tokens": draw.tensor(ids + draw.ints(0, 1, total)),
        "expected_input_positions": draw.tensor(positions),
    }


@CASES
@given(seed=SEEDS, capacity=st.integers(1, 5), overflow=st.sampled_from(["skip", "rotate"]))
def test_chunks_equal_one_launch(seed: int, capacity: int, overflow: str) -> None:
    """Verify plan, buffers, violations in order and slot counters; only the launches are more."""
    case = plan_case(seed)
    draw = Draw(seed, CPU)
    inputs = case.inputs | {"full_to_swa_index_mapping": None, "swa_window_size": 0}
    num_slots = max(1, int(inputs["req_to_token"].max()) + 1)
    inputs["req_to_token"] = inputs["req_to_token"].clamp(min=0)
    case = PlanCase(inputs, case.write_req_capacity, case.demand)
    context = random_context(draw, num_slots)
    tokens = tokens_of(case, draw, num_slots)
    more = {"overflow": overflow, "rotate_cursor": torch.tensor([seed]) if overflow == "rotate" else None}

    want_plan, want_write = case.run(oracle.plan_oracle, **{k: clone(v) for k, v in more.items()})
    want = clone(context)
    forward(want, want_plan, [want_write], tokens, oracle.verify_oracle, oracle.write_oracle)

    got_plan, _ = case.outputs()
    cursor = clone(more["rotate_cursor"])
    write_plans = kernels.plan_chunks(
        verify_plan_out=got_plan, write_req_capacity=capacity, **inputs, overflow=overflow, rotate_cursor=cursor
    )
    got = clone(context)
    verify, write = kernels.launch_canary_verify_kernel, kernels.launch_canary_write_kernel
    forward(got, got_plan, write_plans, tokens, verify, write)

    assert_same_words(got_plan, want_plan)
    bs = len(inputs["req_pool_indices"])
    assert len(write_plans) == max(1, -(-bs // capacity))
    assert all(plan.write_seed_slot_indices.shape[0] == capacity for plan in write_plans)
    assert sum(int(plan.write_num_valid_reqs) for plan in write_plans) == bs
    runs = int(got.kernel_run_counter - context.kernel_run_counter)
    assert runs == 1 + len(write_plans)
    got.kernel_run_counter.copy_(want.kernel_run_counter)
    assert_same_words(got, want)


def big_batch(num_reqs: int) -> dict[str, Any]:
    """More rows than one launch takes, three cached tokens each and one to write; every seventh pads."""
    rows = torch.arange(1, num_reqs + 1)
    table = torch.arange(4 * (num_reqs + 1), dtype=torch.int32).reshape(num_reqs + 1, 4)
    rows[::7] = 0
    return {
        "req_pool_indices": rows,
        "prefix_lens": torch.full((num_reqs,), 3),
        "extend_seq_lens": torch.full((num_reqs,), 1),
        "req_to_token": table,
        "swa_window_size": 0,
        "full_to_swa_index_mapping": None,
        "verify_capacity": 3 * num_reqs,
        "req_to_verify_expected_tokens": None,
        "req_to_verify_expected_tokens_valid_lens": None,
        "kv_token_id_vs_position_offset": 0,
    }


def test_more_rows_than_one_launch_takes() -> None:
    num_reqs = 4500
    inputs = big_batch(num_reqs)
    plan = kernels.VerifyPlan.allocate(verify_capacity=3 * num_reqs, device=CPU)
    whole = kernels.WritePlan.allocate(write_req_capacity=num_reqs, device=CPU)
    with pytest.raises(ValueError, match="at most bs=4096 reqs per launch, got bs=4500"):
        kernels.launch_canary_plan_kernels(verify_plan_out=plan, write_plan_out=whole, **inputs)
    write_plans = kernels.plan_chunks(verify_plan_out=plan, write_req_capacity=4096, **inputs)
    active = int((inputs["req_pool_indices"] != 0).sum())
    assert int(plan.verify_num_valid) == 3 * active
    assert [int(p.write_num_valid_reqs) for p in write_plans] == [4096, 404]
    assert int(write_plans[0].write_offsets[-1]) == int(write_plans[1].write_offsets[0])
    assert int(write_plans[1].write_offsets[404]) == active
    seeds = torch.cat([p.write_seed_slot_indices[: int(p.write_num_valid_reqs)] for p in write_plans])
    live = inputs["req_pool_indices"] != 0
    assert torch.equal(seeds[live], inputs["req_to_token"][inputs["req_pool_indices"][live], 2].long())
    assert (seeds[~live] == -1).all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"write_req_capacity": 0}, "plan_chunks write_req_capacity must be positive, got 0"),
        ({"req_pool_indices": torch.ones(MAX_CHUNKED_REQS + 1).long()}, f"at most bs={MAX_CHUNKED_REQS} reqs"),
        ({"prefix_lens": torch.tensor([9, 1])}, r"prefix_lens\[0\] is 9, past the end"),
        ({"verify_capacity": 5}, "verify_capacity=5 does not match"),
        ({"overflow": "rotate"}, "rotate_cursor is required"),
    ],
)
def test_refusals_leave_the_plan_alone(changed: dict[str, Any], message: str) -> None:
    inputs = {"write_req_capacity": 1} | big_batch(2) | {"req_pool_indices": torch.tensor([1, 2])} | changed
    plan = kernels.VerifyPlan.allocate(verify_capacity=6, device=CPU)
    for name in type(plan).__slots__:
        getattr(plan, name).fill_(-7)
    before = clone(plan)
    with pytest.raises(ValueError, match=f"kv-canary: .*{message}"):
        kernels.plan_chunks(verify_plan_out=plan, **inputs)
    assert_same_words(plan, before)


def test_one_observation_for_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The observer sees one plan call, with the batch whole and the capacity that it is held against."""
    seen: list[Any] = []

    class Observer:
        def begin(self, call: Any) -> None:
            seen.append(call)

        def end(self, call: Any, error: BaseException | None) -> None:
            assert error is None

    monkeypatch.setattr(hooks, "observer", Observer())
    plan = kernels.VerifyPlan.allocate(verify_capacity=27, device=CPU)
    kernels.plan_chunks(verify_plan_out=plan, write_req_capacity=4, **big_batch(9))
    (call,) = seen
    assert call.req_pool_indices.shape[0] == 9
    assert call.write_plan_out.write_seed_slot_indices.shape[0] == 4
    assert call.verify_plan_out is plan


# --- rotating windows -----------------------------------------------------------------------------------------------


@CASES
@given(seed=SEEDS, capacity=st.integers(1, 40), start=st.integers(-50, 500))
def test_every_entry_is_checked_in_time(seed: int, capacity: int, start: int) -> None:
    """In an unchanged batch each entry comes up within ceil(demand / capacity) launches, from any cursor."""
    case = plan_case(seed)
    case.inputs["verify_capacity"] = capacity
    cursor = torch.tensor([start])
    names = ("verify_slot_indices", "verify_expected_tokens", "verify_expected_positions", "verify_prev_slot_indices")
    all_entries = PlanCase(case.inputs | {"verify_capacity": max(case.demand, 1)}, case.write_req_capacity, case.demand)
    whole, _ = all_entries.run(kernels.launch_canary_plan_kernels)
    entries = list(zip(*(getattr(whole, name)[: case.demand].tolist() for name in names), strict=True))
    seen: list[Any] = []
    for _ in range(-(-case.demand // capacity)):
        plan, _ = case.run(kernels.launch_canary_plan_kernels, overflow="rotate", rotate_cursor=cursor)
        num_valid = int(plan.verify_num_valid)
        assert num_valid == min(case.demand, capacity)
        assert int(plan.enable) == 1
        seen += zip(*(getattr(plan, name)[:num_valid].tolist() for name in names), strict=True)
        assert all((getattr(plan, name)[num_valid:] == POISON).all() for name in names)
    if case.demand > capacity:
        first = start % case.demand
        assert seen == [entries[(first + i) % case.demand] for i in range(len(seen))]
        assert cursor.item() == (first + len(seen)) % case.demand
    else:
        assert cursor.item() == start
    assert set(seen) == set(entries)


@CASES
@given(seed=SEEDS)
def test_rotate_equals_the_oracle(seed: int) -> None:
    case = plan_case(seed)
    cursors = [torch.tensor([seed % 97]), torch.tensor([seed % 97])]
    launches = (kernels.launch_canary_plan_kernels, oracle.plan_oracle)
    got, want = (
        case.run(launch, overflow="rotate", rotate_cursor=cursor)
        for launch, cursor in zip(launches, cursors, strict=True)
    )
    for ours, wanted in zip(got, want, strict=True):
        assert_same_words(ours, wanted)
    assert cursors[0].item() == cursors[1].item()
