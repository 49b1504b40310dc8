"""What recording costs with a GPU: probe, publish and marks inside a CUDA graph, and a traced step on the host.

    python benchmarks/gpu_tracing_cost.py [--json FILE]

On the device, medians of graph replays beside an empty kernel; every row that is published must equal the host's own
probe of the same batch, or nothing is timed. On the host, medians of rounds of steps with and without a session, by
turns, from captured graphs and eagerly, with synchronisation an error and allocations counted. Exits 1 when a bar is
missed or a row differs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from device_loop import Loop

import kvcanary_trace as kv_canary
from kvcanary_trace.kernels import VerifyPlan, WritePlan
from kvcanary_trace.kernels.hooks import PlanCall
from kvcanary_trace.kernels.layout import NOT_MEASURED, PROBE_WORDS, Phase, ProbeWord
from kvcanary_trace.kernels.probe import read_plan_inputs
from kvcanary_trace.kernels.triton_backend.record import STATE_WORDS, mark, probe, publish, span
from kvcanary_trace.ring import RingReader

BARS_US = {64: 4.0, 512: 4.0, 4096: 6.0}
MARK_BAR_US = 0.9
HOST_BAR_US = 15.0
PER_GRAPH, REPLAYS = 50, 60
STEPS, ROUNDS = 200, 15


@triton.jit
def _empty_kernel(x_ptr):
    pass


def graph_us(launch) -> float:  # type: ignore[no-untyped-def]
    """Median time of one `launch` inside a graph of many, in microseconds."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(PER_GRAPH):
            launch()
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / PER_GRAPH)
    return statistics.median(times)


def make_call(bs: int) -> PlanCall:
    """A decode batch with a quarter of padding rows."""
    reqs = torch.arange(1, bs + 1, device="cuda")
    reqs[: bs // 4] = 0
    return PlanCall(
        verify_plan_out=VerifyPlan.allocate(verify_capacity=1 << 20, device="cuda"),
        write_plan_out=WritePlan.allocate(write_req_capacity=bs, device="cuda"),
        req_pool_indices=reqs,
        prefix_lens=torch.randint(1, 1000, (bs,), device="cuda"),
        extend_seq_lens=torch.ones(bs, dtype=torch.int64, device="cuda"),
        req_to_token=torch.zeros(8, 4096, dtype=torch.int32, device="cuda"),
        full_to_swa_index_mapping=None,
        swa_window_size=0,
        verify_capacity=1 << 20,
    )


def check(call: PlanCall, row) -> bool:  # type: ignore[no-untyped-def]
    """Whether a published row says what the host's probe says."""
    expected = [NOT_MEASURED] * PROBE_WORDS
    cpu = {name: getattr(call, name).cpu() for name in ("req_pool_indices", "prefix_lens", "extend_seq_lens")}
    read_plan_inputs(call._replace(**cpu), expected)
    words = (ProbeWord.BS, ProbeWord.VERIFY_DEMAND, ProbeWord.WRITE_ENTRIES, ProbeWord.SEQ_LEN_MAX)
    return all(int(row[word]) == expected[word] for word in words)


def measure_marks(result: dict) -> int:  # type: ignore[type-arg]
    """A mark before a launch, one after it, and what both say of an empty kernel. Returns bars missed."""
    state = torch.zeros(STATE_WORDS, dtype=torch.int64, device="cuda")
    scratch = torch.zeros(PROBE_WORDS, dtype=torch.int64, device="cuda")
    progress = torch.zeros(1, dtype=torch.int64, pin_memory=True)

    def after() -> None:
        span(state, scratch, progress, runner=0, group=0, phase=Phase.VERIFY)

    def around() -> None:
        mark(state)
        _empty_kernel[(1,)](scratch)
        after()

    figures = {"mark_us": graph_us(lambda: mark(state)), "span_us": graph_us(after), "bar_us": MARK_BAR_US}
    around()
    scratch.zero_()
    per_launch = graph_us(around)
    torch.cuda.synchronize()
    launches = 1 + PER_GRAPH * REPLAYS
    figures["around_empty_us"] = per_launch
    figures["said_of_empty_us"] = int(scratch[ProbeWord.VERIFY_NS]) / launches / 1000
    result["marks"] = figures
    missed = max(figures["mark_us"], figures["span_us"]) > MARK_BAR_US
    print(
        f"a mark before {figures['mark_us']:.2f} us, after {figures['span_us']:.2f} us, bar {MARK_BAR_US} us"
        f"{'  MISSED' if missed else ''}; an empty kernel between takes {figures['said_of_empty_us']:.2f} us by them"
    )
    return int(missed)


def host_us(steps: Callable[[], None]) -> float:
    """Host time of one round of steps, in microseconds a step; the device is idle before and drained after."""
    torch.cuda.synchronize()
    begin = perf_counter()
    steps()
    spent = perf_counter() - begin
    torch.cuda.synchronize()
    return spent / STEPS * 1e6


def measure_host(result: dict) -> int:  # type: ignore[type-arg]
    """Steps with a session beside steps without one, from a graph and eagerly. Returns bars missed."""
    missed = 0
    result["host"] = {}
    for timed in (False, True):
        loop = Loop("cuda")
        loop.fill(0, 4)
        loop.launch(8)
        torch.cuda.synchronize()
        bare = torch.cuda.CUDAGraph()
        with torch.cuda.graph(bare):
            loop.launch(8)
        kinds: dict[str, tuple[Callable[[], None], list[float], list[float]]] = {}
        with tempfile.TemporaryDirectory() as folder:
            # What a step costs without a session comes first in each round, and the session is closed for it.
            for round_ in range(ROUNDS):
                for name, launch in (("graph", bare.replay), ("eager", lambda loop=loop: loop.launch(8))):
                    kinds.setdefault(name, (launch, [], []))[1].append(host_us(lambda launch=launch: _steps(launch)))
                with kv_canary.trace(
                    Path(folder) / str(round_), device="cuda", device_rows=True, device_times=timed
                ) as session:
                    for number in (1, 2):
                        with kv_canary.step(number):
                            loop.launch(8)
                    torch.cuda.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        loop.launch(8)
                    graph.replay()
                    torch.cuda.synchronize()
                    for name, launch in (("graph", graph.replay), ("eager", lambda loop=loop: loop.launch(8))):
                        _steps(launch)
                        allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
                        with _no_sync():
                            kinds[name][2].append(host_us(lambda launch=launch: _steps(launch)))
                        new = torch.cuda.memory_stats()["allocation.all.allocated"] - allocated
                        if new:
                            print(f"host, {name}: {new} device allocations in {STEPS} traced steps  MISSED")
                            missed += 1
                if session.stats.observer_errors:
                    print("host: recording failed")
                    missed += 1
        for name, (_, without, traced) in kinds.items():
            more = statistics.median(after - before for before, after in zip(without, traced, strict=True))
            over = more > HOST_BAR_US
            # The bar is for a step beyond its launches; marks are launches that somebody asked for.
            counted = over and not timed
            missed += counted
            key = f"{name}{', device times' if timed else ''}"
            result["host"][key] = {"bare_us": statistics.median(without), "more_us": more, "bar_us": HOST_BAR_US}
            print(
                f"host, {key}: {statistics.median(without):.1f} us a step bare, {more:+.1f} us traced, bar "
                f"{HOST_BAR_US:.0f} us{'  MISSED' if counted else ''}"
            )
    return missed


def _steps(launch: Callable[[], None]) -> None:
    for number in range(STEPS):
        with kv_canary.step(1000 + number, mode="decode"):
            launch()


class _no_sync:
    """Any synchronisation with the device raises; not for those that `host_us` asks for itself."""

    def __enter__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_sync_debug_mode("default")


def main() -> int:
    """Measure, print, compare with the bars."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    path = parser.parse_args().json
    cell = torch.zeros(1, dtype=torch.int64, device="cuda")
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "empty_kernel_us": graph_us(lambda: _empty_kernel[(1,)](cell)),
        "rows": {},
    }
    print(f"{result['gpu']}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"empty kernel {result['empty_kernel_us']:.2f} us")
    missed = 0
    for bs, bar in BARS_US.items():
        call = make_call(bs)
        state, scratch = (
            torch.zeros(STATE_WORDS, dtype=torch.int64, device="cuda"),
            torch.zeros(PROBE_WORDS, dtype=torch.int64, device="cuda"),
        )
        ring = torch.zeros(65536, PROBE_WORDS, dtype=torch.int64, pin_memory=True)
        published = torch.zeros(1, dtype=torch.int64, device="cuda")
        violations = torch.zeros(1, dtype=torch.int32, device="cuda")
        bound = {"step": cell, "state": state, "scratch": scratch, "runner": 0, "group": 0, "kind": 0}
        sink = {
            "violation_write_index": violations,
            "violation_ring_capacity": 1024,
            "published": published,
            "ring": ring,
        }

        def both(call=call, bound=bound, scratch=scratch, sink=sink) -> None:  # type: ignore[no-untyped-def]
            probe(call, **bound)
            publish(scratch, **sink)

        both()
        torch.cuda.synchronize()
        if not check(call, RingReader(ring.numpy()).read()[0]):
            print(f"bs {bs}: the row differs from the host's probe")
            return 1
        figures = {
            "both_us": graph_us(both),
            "probe_us": graph_us(lambda call=call, bound=bound: probe(call, **bound)),
            "publish_us": graph_us(lambda scratch=scratch, sink=sink: publish(scratch, **sink)),
            "bar_us": bar,
        }
        result["rows"][bs] = figures
        missed += figures["both_us"] > bar
        print(
            f"rows {bs:5}: probe {figures['probe_us']:.2f} us, publish {figures['publish_us']:.2f} us, "
            f"both {figures['both_us']:.2f} us, bar {bar:.1f} us{'  MISSED' if figures['both_us'] > bar else ''}"
        )
    missed += measure_marks(result) + measure_host(result)
    if path:
        with open(path, "w") as file:
            json.dump(result, file, indent=1)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
