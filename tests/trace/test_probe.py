"""The host probe: demand from the inputs, whatever padding and clamping hide."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import CPU

from kvcanary_trace.kernels import VerifyPlan, WritePlan, probe
from kvcanary_trace.kernels.hooks import PlanCall
from kvcanary_trace.kernels.layout import NOT_MEASURED, PROBE_WORDS, ProbeWord

ROW = st.tuples(st.sampled_from([0, 0, 1, 2, 9]), st.integers(-3, 50), st.integers(-3, 9))


def measure(batch: list[tuple[int, int, int]], window: int) -> dict[str, int]:
    """The row of a batch of (req_pool_idx, prefix, extend)."""
    columns = list(zip(*batch, strict=True)) or [(), (), ()]
    reqs, prefixes, extends = (torch.tensor(column, dtype=torch.int64) for column in columns)
    call = PlanCall(
        VerifyPlan.allocate(verify_capacity=5, device=CPU),
        WritePlan.allocate(write_req_capacity=3, device=CPU),
        reqs,
        prefixes,
        extends,
        torch.zeros(10, 64, dtype=torch.int32),
        None,
        window,
        5,
    )
    row = [NOT_MEASURED] * PROBE_WORDS
    probe.read_plan_inputs(call, row)
    return {word.name: row[word] for word in ProbeWord if row[word] != NOT_MEASURED}


@pytest.mark.parametrize("list_max", [0, 1000], ids=["arrays", "lists"])
@settings(max_examples=150, deadline=None)
@given(batch=st.lists(ROW, max_size=12), window=st.integers(-1, 60))
def test_equals_the_definition(list_max: int, batch: list[tuple[int, int, int]], window: int) -> None:
    """Both ways of counting agree with one request at a time."""
    active = [(max(prefix, 0), max(extend, 0)) for req, prefix, extend in batch if req != 0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "_LIST_MAX_REQS", list_max)
        got = measure(batch, window)
    assert got == {
        "BS": len(active),
        "BS_LAUNCHED": len(batch),
        "WRITE_REQ_CAPACITY": 3,
        "WRITE_ENTRIES": sum(extend for _, extend in active),
        "VERIFY_DEMAND": sum(min(prefix, window) if window > 0 else prefix for prefix, _ in active),
        "VERIFY_CAPACITY": 5,
        "PREFIX_LEN_MAX": max([prefix for prefix, _ in active], default=0),
        "PREFIX_LEN_SUM": sum(prefix for prefix, _ in active),
        "SEQ_LEN_MAX": max([prefix + extend for prefix, extend in active], default=0),
        "REQ_TO_TOKEN_WIDTH": 64,
    }


@pytest.mark.parametrize("num", [3, 300])
def test_demand_past_two_to_the_31_does_not_wrap(num: int) -> None:
    """Shared prefixes may sum past what the plan can hold."""
    got = measure([(1, 2**31 - 1, 1)] * num, 0)
    assert got["VERIFY_DEMAND"] == got["PREFIX_LEN_SUM"] == num * (2**31 - 1)
    assert got["SEQ_LEN_MAX"] == 2**31


@pytest.mark.parametrize(("num_valid", "enable", "planned", "enabled"), [(3, 1, 3, 1), (9, 0, 5, 0), (-2, 7, 0, 1)])
def test_what_a_plan_decided(num_valid: int, enable: int, planned: int, enabled: int) -> None:
    """Clamped to what the plan holds."""
    plan = VerifyPlan.allocate(verify_capacity=5, device=CPU)
    plan.verify_num_valid[0], plan.enable[0] = num_valid, enable
    row = [NOT_MEASURED] * PROBE_WORDS
    row[ProbeWord.VERIFY_CAPACITY] = 5
    probe.read_verify_plan(plan, row)
    assert (row[ProbeWord.VERIFY_PLANNED], row[ProbeWord.VERIFY_ENABLED]) == (planned, enabled)


def test_tensors_of_another_device_are_not_read() -> None:
    """Shapes stand in the row; demands stay unmeasured, and nothing synchronises."""
    meta = torch.empty(4, dtype=torch.int64, device="meta")
    call = PlanCall(
        VerifyPlan.allocate(verify_capacity=5, device=torch.device("meta")),
        WritePlan.allocate(write_req_capacity=3, device=torch.device("meta")),
        meta,
        meta,
        meta,
        torch.empty(10, 64, dtype=torch.int32, device="meta"),
        None,
        0,
        5,
    )
    row = [NOT_MEASURED] * PROBE_WORDS
    probe.read_plan_inputs(call, row)
    probe.read_verify_plan(call.verify_plan_out, row)
    assert {word.name for word in ProbeWord if row[word] != NOT_MEASURED} == {
        "BS_LAUNCHED",
        "WRITE_REQ_CAPACITY",
        "VERIFY_CAPACITY",
        "REQ_TO_TOKEN_WIDTH",
    }
