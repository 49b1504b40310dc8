"""What one row costs on the device: probe and publish inside a CUDA graph, beside an empty kernel.

    python benchmarks/gpu_tracing_cost.py [--json FILE]

Medians of graph replays on one GPU. Every row that is published must equal the host's own probe of the same batch, or
nothing is timed. Exits 1 when a bar is missed or a row differs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

import torch
import triton

from kvcanary_trace.kernels import VerifyPlan, WritePlan
from kvcanary_trace.kernels.hooks import PlanCall
from kvcanary_trace.kernels.layout import NOT_MEASURED, PROBE_WORDS, ProbeWord
from kvcanary_trace.kernels.probe import read_plan_inputs
from kvcanary_trace.kernels.triton_backend.record import STATE_WORDS, probe, publish
from kvcanary_trace.ring import RingReader

BARS_US = {64: 4.0, 512: 4.0, 4096: 6.0}
PER_GRAPH, REPLAYS = 50, 60


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
    if path:
        with open(path, "w") as file:
            json.dump(result, file, indent=1)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
