"""The device's probe and publish: the same words as the host's probe, under graph replay too, seen without a sync."""

from __future__ import annotations

import pytest
import torch

from kvcanary_trace.kernels import VerifyPlan, WritePlan
from kvcanary_trace.kernels.hooks import PlanCall
from kvcanary_trace.kernels.layout import NOT_MEASURED, PROBE_WORDS, ProbeWord
from kvcanary_trace.kernels.probe import read_plan_inputs, read_verify_plan
from kvcanary_trace.ring import RingReader

record = pytest.importorskip("kvcanary_trace.kernels.triton_backend.record", reason="needs triton")

ON_CPU = pytest.param(
    "cpu", id="interpreter", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a device")
)
ON_GPU = pytest.param("cuda", id="gpu", marks=pytest.mark.gpu)
POISON = -77

HOST_WORDS = [
    ProbeWord.BS,
    ProbeWord.BS_LAUNCHED,
    ProbeWord.WRITE_REQ_CAPACITY,
    ProbeWord.WRITE_ENTRIES,
    ProbeWord.VERIFY_DEMAND,
    ProbeWord.VERIFY_PLANNED,
    ProbeWord.VERIFY_CAPACITY,
    ProbeWord.VERIFY_ENABLED,
    ProbeWord.PREFIX_LEN_MAX,
    ProbeWord.PREFIX_LEN_SUM,
    ProbeWord.SEQ_LEN_MAX,
    ProbeWord.REQ_TO_TOKEN_WIDTH,
]


class Recorder:
    """One group's device memory and its ring."""

    def __init__(self, device: str, rows: int = 8) -> None:
        self.step = torch.full((1,), POISON, device=device)
        self.state = torch.full((record.STATE_WORDS,), POISON, device=device)
        self.scratch = torch.full((PROBE_WORDS,), POISON, device=device)
        self.published = torch.zeros(1, dtype=torch.int64, device=device)
        self.violations = torch.full((1,), 3, dtype=torch.int32, device=device)
        self.ring = torch.zeros(rows, PROBE_WORDS, dtype=torch.int64, pin_memory=device == "cuda")
        self.reader = RingReader(self.ring.numpy())

    def launch(self, call: PlanCall) -> None:
        """Probe and publish one row."""
        record.probe(call, step=self.step, state=self.state, scratch=self.scratch, runner=1, group=1, kind=0)
        record.publish(
            self.scratch,
            violation_write_index=self.violations,
            violation_ring_capacity=1024,
            published=self.published,
            ring=self.ring,
        )


def make_call(device: str, num_reqs: int, *, seed: int = 0, window: int = 0, long: bool = False) -> PlanCall:
    """A batch with padding rows, negative lengths and an overflowed plan."""
    gen = torch.Generator().manual_seed(seed)
    plan = VerifyPlan.allocate(verify_capacity=100, device=device)
    for name in VerifyPlan.__dataclass_fields__:  # what a probe or a copy reads must have been written by somebody
        getattr(plan, name).zero_()
    plan.verify_num_valid.fill_(100 if seed % 2 else 60)
    plan.enable.fill_(seed % 2)
    reqs = torch.randint(0, 4, (num_reqs,), generator=gen)
    prefixes = torch.randint(-3, 2**40 if long else 300, (num_reqs,), generator=gen)
    extends = torch.randint(-2, 9, (num_reqs,), generator=gen)
    return PlanCall(
        verify_plan_out=plan,
        write_plan_out=WritePlan.allocate(write_req_capacity=num_reqs + 3, device=device),
        req_pool_indices=reqs.to(device),
        prefix_lens=prefixes.to(device),
        extend_seq_lens=extends.to(device),
        req_to_token=torch.zeros(4, 77, dtype=torch.int32, device=device),
        full_to_swa_index_mapping=None,
        swa_window_size=window,
        verify_capacity=100,
    )


def host_words(call: PlanCall) -> list[int]:
    """What the host's probe says of the same launch."""
    cpu = call._replace(
        req_pool_indices=call.req_pool_indices.cpu(),
        prefix_lens=call.prefix_lens.cpu(),
        extend_seq_lens=call.extend_seq_lens.cpu(),
    )
    row = [NOT_MEASURED] * PROBE_WORDS
    read_plan_inputs(cpu, row)
    plan = call.verify_plan_out
    read_verify_plan(
        VerifyPlan(
            **{name: getattr(plan, name).cpu() for name in VerifyPlan.__dataclass_fields__},
        ),
        row,
    )
    return [row[word] for word in HOST_WORDS]


@pytest.mark.parametrize("device", [ON_CPU, ON_GPU])
@pytest.mark.parametrize("num_reqs", [1, 31, 33, 200, 4096])
@pytest.mark.parametrize("window", [0, 128])
def test_row_equals_host_probe(num_reqs: int, window: int, device: str) -> None:
    """Every demand and capacity, word for word, with padding rows and past 2**31 entries."""
    for seed in range(3):
        call = make_call(device, num_reqs, seed=seed, window=window, long=seed == 2)
        recorder = Recorder(device)
        recorder.step.fill_(5)
        recorder.launch(call)
        if device == "cuda":
            torch.cuda.synchronize()
        (row,) = recorder.reader.read()
        assert [int(row[word]) for word in HOST_WORDS] == host_words(call)
        assert (row[ProbeWord.STEP], row[ProbeWord.FORWARD], row[ProbeWord.RUNNER], row[ProbeWord.GROUP]) == (
            5,
            0,
            1,
            1,
        )
        assert row[ProbeWord.VIOLATIONS] == 3
        enabled, planned = row[ProbeWord.VERIFY_ENABLED], row[ProbeWord.VERIFY_PLANNED]
        assert row[ProbeWord.VERIFY_CHECKED] == (planned if enabled else 0)
        assert row[ProbeWord.PLAN_NS] == NOT_MEASURED


@pytest.mark.parametrize("device", [ON_CPU, ON_GPU])
def test_forwards_are_counted_within_a_step_and_the_ring_goes_round(device: str) -> None:
    """Three forwards a step are 0, 1, 2; a lapped ring loses the oldest rows and says how many.

    A ring of four holds three: the row to come is already invalid.
    """
    recorder = Recorder(device, rows=4)
    call = make_call(device, 5)
    for step in range(2):
        recorder.step.fill_(step)
        for _ in range(3):
            recorder.launch(call)
    if device == "cuda":
        torch.cuda.synchronize()
    rows = recorder.reader.read()
    keys = [(int(row[ProbeWord.STEP]), int(row[ProbeWord.FORWARD])) for row in rows]
    assert keys == [(1, 0), (1, 1), (1, 2)]
    assert recorder.reader.balance(int(recorder.published)) == (3, 3, 0)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_graph_replay_far_ahead_without_sync() -> None:
    """Step numbers stay right while the host runs 200 replays ahead, with nothing synchronised."""
    recorder = Recorder("cuda", rows=512)
    calls = [make_call("cuda", num_reqs, seed=1) for num_reqs in (4, 64)]
    for call in calls:
        recorder.launch(call)
    torch.cuda.synchronize()
    graphs = []
    for call in calls:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorder.launch(call)
        graphs.append(graph)
    cells = torch.arange(1000, 1200, dtype=torch.int64).pin_memory()
    before = int(recorder.published)
    recorder.reader.read()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        torch.cuda._sleep(200_000_000)
        for i in range(200):
            recorder.step.copy_(cells[i : i + 1], non_blocking=True)
            graphs[i % 2].replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    done = torch.cuda.Event()
    done.record()
    assert not done.query()  # the host is ahead: the device still sleeps
    done.synchronize()
    rows = recorder.reader.read()
    assert rows[:, ProbeWord.STEP].tolist() == list(range(1000, 1200))
    assert rows[:, ProbeWord.BS_LAUNCHED].tolist() == [4, 64] * 100
    assert rows[:, ProbeWord.SEQ].tolist() == list(range(before + 1, before + 201))
    times = rows[:, ProbeWord.TIME_NS]
    assert (times[1:] >= times[:-1]).all()
