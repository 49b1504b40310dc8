"""Our kernels beside SGLang 0.5.23's CUDA kernels on one GPU: byte equality first, then CUDA-graph replay medians.

SGLang's wheel is never installed: give the folder it was unpacked into. `apache-tvm-ffi==0.1.11` and nvcc build it.

    python benchmarks/gpu_kernels.py --peer DIR [--grid bars|full] [--json FILE] [--budget-s 300]
    python benchmarks/gpu_kernels.py --grid parallel     # the parallel chain alone, which SGLang does not have

Exit code 1 when an output differs or a bar is missed, 2 when something is missing to run at all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kvcanary_trace.kernels import (
    CanaryLaunchTag,
    RealKvHashMode,
    RealKvSource,
    VerifyOrWriteContext,
    VerifyPlan,
    WritePlan,
    launch_canary_plan_kernels,
    launch_canary_verify_kernel,
    launch_canary_write_kernel,
)
from kvcanary_trace.kernels.backend import use_backend

DEVICE = torch.device("cuda")
RING_ROWS = 1024
MARGIN_RATIO, MARGIN_US = 1.05, 0.2
"""At every point of the grid ours may take this much of the peer's time, or this much more."""


@dataclass(frozen=True)
class Kv:
    """How the fingerprint is set up: sources of one context."""

    name: str
    mode: RealKvHashMode
    num_sources: int
    token_bytes: int


NONE = Kv("none", RealKvHashMode.NONE, 0, 0)
PARTIAL = Kv("PARTIAL 1x128B", RealKvHashMode.PARTIAL, 1, 128)
ALL_SMALL = Kv("ALL 4x64B", RealKvHashMode.ALL, 4, 64)
ALL_LARGE = Kv("ALL 4x1024B", RealKvHashMode.ALL, 4, 1024)


@dataclass(frozen=True)
class Point:
    """One batch to run; bars are ratios to the peer, by kernel."""

    bs: int
    prefix: int
    extend: int
    kv: Kv = NONE
    window: int = 0
    kernels: tuple[str, ...] = ("plan", "verify", "write")
    bars: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        window = f" window {self.window}" if self.window else ""
        return f"bs {self.bs} prefix {self.prefix} extend {self.extend}{window} {self.kv.name}"


BARS = [
    Point(1, 64, 1, bars={"plan": 0.6}),
    Point(8, 64, 1, bars={"plan": 0.6}),
    Point(32, 1024, 1, bars={"plan": 0.6}),
    Point(256, 64, 1, bars={"plan": 0.6}),
    Point(1024, 16, 1, bars={"plan": 0.6}),
    Point(256, 4096, 1, bars={"plan": 0.5, "verify": 0.6}),
    Point(256, 4096, 1, PARTIAL, kernels=("verify", "write")),
    Point(256, 4096, 1, ALL_LARGE, kernels=("verify", "write"), bars={"verify": 0.4}),
    Point(1, 0, 4096, bars={"write": 0.48}),
    Point(1, 0, 4096, PARTIAL, kernels=("write",), bars={"write": 0.2}),
    Point(1, 0, 4096, ALL_LARGE, kernels=("write",), bars={"write": 0.006}),
    Point(8, 0, 512, ALL_LARGE, kernels=("write",), bars={"write": 0.01}),
]

PARALLEL_BARS_US = [
    (Point(1, 0, 16_384), 15.0),
    (Point(1, 0, 4096), None),
    (Point(1, 0, 65_536), None),
    (Point(1, 0, 16_384, PARTIAL), None),
    (Point(8, 0, 2048), None),
    (Point(256, 1024, 1), None),
    (Point(1024, 16, 1), None),
]
"""Writes under the parallel chain, and what they may take. A scan in one program took 25 us for the first."""


def full_grid() -> list[Point]:
    """Every batch of the grid whose slots fit, shuffled, so that a budget cuts off a fair sample."""
    points = [
        Point(bs, prefix, extend, kv, window)
        for kv in (NONE, PARTIAL, ALL_SMALL, ALL_LARGE)
        for bs in (1, 8, 32, 256, 1024)
        for prefix in (0, 1, 128, 1024, 4096, 16384)
        for extend in (1, 16, 512, 4096, 16384)
        for window in (0, 128)
        if bs * extend <= 16384 and bs * prefix <= 4_194_304
    ]
    random.Random(7).shuffle(points)
    return points


class Peer:
    """SGLang's launchers, built from an unpacked wheel behind stand-ins for the packages they import."""

    def __init__(self, root: Path) -> None:
        root = root.resolve()
        jit = root / "sglang/kernels/jit"
        if not (jit / "csrc/kv_canary").is_dir():
            raise FileNotFoundError(f"{root} is no unpacked SGLang wheel: it lacks {jit}/csrc/kv_canary")
        if "CUDA_HOME" not in os.environ and (nvcc := shutil.which("nvcc")):
            os.environ["CUDA_HOME"] = str(Path(nvcc).resolve().parents[1])
        for name in (
            "sglang",
            "sglang.kernels",
            "sglang.kernels.jit",
            "sglang.kernels.ops",
            "sglang.kernels.ops.kv_canary",
        ):
            package = types.ModuleType(name)
            package.__path__ = [str(root.joinpath(*name.split(".")))]
            sys.modules[name] = package
        stand_in = types.ModuleType("sglang.kernels.jit.utils")
        stand_in.cache_once = cache  # type: ignore[attr-defined]
        stand_in.make_cpp_args = lambda *flags: ", ".join(str(flag).lower() for flag in flags)  # type: ignore[attr-defined]
        library = self._build(jit)
        stand_in.load_jit = lambda name, *args, cuda_wrappers, **_: types.SimpleNamespace(  # type: ignore[attr-defined]
            **{export: library[f"{export}_{'_'.join(''.join(args).split(', '))}"] for export, _ in cuda_wrappers}
        )
        sys.modules["sglang.kernels.jit.utils"] = stand_in
        from sglang.kernels.ops.kv_canary.plan.api import launch_canary_plan_kernels as plan
        from sglang.kernels.ops.kv_canary.verify import launch_canary_verify_kernel as verify
        from sglang.kernels.ops.kv_canary.write import launch_canary_write_kernel as write

        self.plan, self.verify, self.write = plan, verify, write

    @staticmethod
    def _build(jit: Path) -> Any:
        import tvm_ffi.cpp

        exports = {"canary_write_step_cuda_": "canary::canary_write_step_cuda"}
        for a in ("false", "true"):
            exports[f"canary_verify_step_cuda_{a}"] = f"canary::CanaryVerifyKernel<{a}>::run"
            for b in ("false", "true"):
                exports[f"plan_entries_{a}_{b}"] = f"PlanEntriesKernel<{a}, {b}>::run"
        lines = [f'#include "{jit}/csrc/kv_canary/canary_{part}.cuh"' for part in ("plan_entries", "verify", "write")]
        lines.append("namespace sglang {")
        lines += [f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({name}, ({kernel}));" for name, kernel in exports.items()]
        lines.append("}")
        major, minor = torch.cuda.get_device_capability()
        os.environ.setdefault("TVM_FFI_CUDA_ARCH_LIST", f"{major}.{minor}a" if major == 9 else f"{major}.{minor}")
        flags = [f"-DSGL_CUDA_ARCH={major * 100 + minor * 10}", "-std=c++20", "-O3", "--expt-relaxed-constexpr"]
        return tvm_ffi.cpp.load_inline(
            "kv_canary_peer",
            cuda_sources="\n".join(lines),
            extra_cflags=["-std=c++20", "-O3"],
            extra_cuda_cflags=flags,
            extra_include_paths=[str(jit / "include")],
        )


class Batch:
    """Tensors of one point; what a side writes is its own."""

    def __init__(self, point: Point) -> None:
        self.point = point
        generator = torch.Generator(DEVICE).manual_seed(7)
        bs, length = point.bs, point.prefix + point.extend
        self.num_slots = num_slots = bs * length + 1
        slots = torch.randperm(num_slots - 1, device=DEVICE, generator=generator) + 1
        self.req_pool_indices = torch.arange(1, bs + 1, device=DEVICE)
        self.prefix_lens = torch.full((bs,), point.prefix, device=DEVICE)
        self.extend_seq_lens = torch.full((bs,), point.extend, device=DEVICE)
        self.req_to_token = torch.zeros(bs + 1, length, dtype=torch.int32, device=DEVICE)
        self.req_to_token[1:] = slots.view(bs, length).int()
        self.mapping = torch.arange(num_slots + 1, device=DEVICE) if point.window else None
        self.input_ids = torch.randint(0, 150_000, (bs * point.extend,), device=DEVICE, generator=generator)
        self.positions = (torch.arange(point.extend, device=DEVICE) + point.prefix).repeat(bs)
        self.out_cache_loc = self.req_to_token[1:, point.prefix :].reshape(-1).long()
        kv = point.kv
        self.sources = tuple(
            RealKvSource(
                tensor=torch.randint(
                    -(2**63), 2**63 - 1, (num_slots, kv.token_bytes // 8), device=DEVICE, generator=generator
                ).view(torch.uint8),
                page_size=1,
                num_bytes_per_token=kv.token_bytes,
                read_bytes=kv.token_bytes,
            )
            for _ in range(kv.num_sources)
        )
        entries = bs * (min(point.prefix, point.window) if point.window else point.prefix)
        self.capacity = max(entries, 1)
        self.sides = {name: Side(self) for name in ("ours", "peer")}

    def plan_args(self, side: Side) -> dict[str, Any]:
        return {
            "verify_plan_out": side.verify_plan,
            "write_plan_out": side.write_plan,
            "req_pool_indices": self.req_pool_indices,
            "prefix_lens": self.prefix_lens,
            "extend_seq_lens": self.extend_seq_lens,
            "req_to_token": self.req_to_token,
            "swa_window_size": self.point.window,
            "full_to_swa_index_mapping": self.mapping,
            "verify_capacity": self.capacity,
            "req_to_verify_expected_tokens": None,
            "req_to_verify_expected_tokens_valid_lens": None,
            "kv_token_id_vs_position_offset": 0,
        }

    def write_args(self, side: Side) -> dict[str, Any]:
        return {
            "context": side.context,
            "plan": side.write_plan,
            "input_ids": self.input_ids,
            "positions": self.positions,
            "out_cache_loc": self.out_cache_loc,
            "enable_write_input_assert": False,
            "expected_input_tokens": None,
            "expected_input_positions": None,
        }

    def fill_prefix(self) -> None:
        """Write clean records behind the prefixes, in slices that both sides can write, with our kernels."""
        bs, prefix = self.point.bs, self.point.prefix
        if not prefix:
            return
        side = self.sides["ours"]
        plan = WritePlan.allocate(write_req_capacity=bs, device=DEVICE)
        plan.write_offsets.copy_(torch.arange(bs + 1, device=DEVICE) * prefix)
        plan.write_seed_slot_indices.fill_(-1)
        plan.write_num_valid_reqs.fill_(bs)
        count = bs * prefix
        launch_canary_write_kernel(
            context=side.context,
            plan=plan,
            input_ids=torch.randint(0, 150_000, (count,), device=DEVICE),
            positions=torch.arange(prefix, device=DEVICE).repeat(bs),
            out_cache_loc=self.req_to_token[1:, :prefix].reshape(-1).long(),
            enable_write_input_assert=False,
            expected_input_tokens=None,
            expected_input_positions=None,
        )
        self.sides["peer"].context.canary_buf.copy_(side.context.canary_buf)
        for each in self.sides.values():
            each.reset()


class Side:
    """Outputs of one side."""

    def __init__(self, batch: Batch) -> None:
        self.verify_plan = VerifyPlan.allocate(verify_capacity=batch.capacity, device=DEVICE)
        self.write_plan = WritePlan.allocate(write_req_capacity=batch.point.bs, device=DEVICE)
        self.context = VerifyOrWriteContext(
            canary_buf=torch.full((batch.num_slots, 32), 0x5A, dtype=torch.uint8, device=DEVICE),
            kernel_kind=CanaryLaunchTag.TAIL_K_FULL,
            violation_ring=torch.full((RING_ROWS, 8), -7, device=DEVICE),
            violation_write_index=torch.zeros(1, dtype=torch.int32, device=DEVICE),
            slot_run_counter=torch.zeros(1, dtype=torch.int64, device=DEVICE),
            kernel_run_counter=torch.zeros(1, dtype=torch.int64, device=DEVICE),
            real_kv_sources=batch.sources,
            real_kv_hash_mode=batch.point.kv.mode,
            enable_chain_position_assert=torch.ones(1, dtype=torch.int32, device=DEVICE),
        )
        self.reset()

    def reset(self) -> None:
        """Poison the plan, clear the counters."""
        for tensor in (self.verify_plan, self.write_plan):
            for name in tensor.__dataclass_fields__:
                getattr(tensor, name).fill_(-99)
        context = self.context
        for counter in (context.violation_write_index, context.slot_run_counter, context.kernel_run_counter):
            counter.zero_()

    def outputs(self) -> dict[str, torch.Tensor]:
        context = self.context
        held = {name: getattr(self.verify_plan, name) for name in self.verify_plan.__dataclass_fields__}
        held |= {name: getattr(self.write_plan, name) for name in self.write_plan.__dataclass_fields__}
        names = ("canary_buf", "violation_write_index", "slot_run_counter", "kernel_run_counter")
        return held | {name: getattr(context, name) for name in names}


def graph_of(launch: Callable[[], None], copies: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            launch()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, copies: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / copies


def compare(launches: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Median time of a launch of each side, replays interleaved."""
    took = {}
    for name, launch in launches.items():
        launch()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        launch()
        torch.cuda.synchronize()
        took[name] = (time.perf_counter() - begin) * 1e6
    longest = max(took.values())
    copies = 40 if longest < 1000 else 5 if longest < 10_000 else 1
    rounds = 15 if longest < 20_000 else 3
    graphs = {name: graph_of(launch, copies) for name, launch in launches.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for graph in graphs.values():
        replay_us(graph, copies)
    for _ in range(rounds):
        for name, graph in graphs.items():
            times[name].append(replay_us(graph, copies))
    return {name: statistics.median(values) for name, values in times.items()}


def host_us(launch: Callable[[], None], count: int = 200) -> float:
    """Host time of an eager launch: median of batches small enough that the queue never fills."""
    for _ in range(20):
        launch()
    batches = []
    for _ in range(9):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            launch()
        batches.append((time.perf_counter() - begin) * 1e6 / count)
    torch.cuda.synchronize()
    return statistics.median(batches)


def launches_of(batch: Batch, peer: Peer | None, kernel: str) -> dict[str, Callable[[], None]]:
    ours, theirs = batch.sides["ours"], batch.sides["peer"]
    verify_args = {"check_verify_expected_token": False}
    both: dict[str, Callable[[], None]]
    if kernel == "plan":
        both = {"ours": lambda: launch_canary_plan_kernels(**batch.plan_args(ours))}
        if peer:
            both["peer"] = lambda: peer.plan(**batch.plan_args(theirs))
    elif kernel == "verify":
        both = {"ours": lambda: launch_canary_verify_kernel(context=ours.context, plan=ours.verify_plan, **verify_args)}
        if peer:
            both["peer"] = lambda: peer.verify(context=theirs.context, plan=theirs.verify_plan, **verify_args)
    else:
        both = {"ours": lambda: launch_canary_write_kernel(**batch.write_args(ours))}
        if peer:
            both["peer"] = lambda: peer.write(**batch.write_args(theirs))
    return both


def differences(batch: Batch, peer: Peer) -> list[str]:
    """Names of outputs that differ after plan, verify and write by both sides, and whether the batch was clean."""
    batch.fill_prefix()
    for kernel in ("plan", "verify", "write"):
        for launch in launches_of(batch, peer, kernel).values():
            launch()
    ours, theirs = batch.sides["ours"].outputs(), batch.sides["peer"].outputs()
    wrong = [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]
    if int(batch.sides["ours"].context.violation_write_index) != 0:
        wrong.append("violations in a clean batch")
    return wrong


def run(points: list[Point], peer: Peer, budget_s: float) -> tuple[list[dict[str, Any]], bool]:
    rows: list[dict[str, Any]] = []
    failed = False
    begin = time.monotonic()
    for number, point in enumerate(points):
        if time.monotonic() - begin > budget_s:
            print(f"stopped by --budget-s after {number} of {len(points)} points")
            break
        batch = Batch(point)
        wrong = differences(batch, peer)
        if wrong:
            print(f"DIFFERS {point.name}: {', '.join(wrong)}")
            failed = True
        for kernel in point.kernels:
            times = compare(launches_of(batch, peer, kernel))
            ours, theirs = times["ours"], times["peer"]
            bar = point.bars.get(kernel)
            holds = ours <= theirs * bar if bar else ours <= max(theirs * MARGIN_RATIO, theirs + MARGIN_US)
            failed |= not holds
            rows.append(
                {"work": point.name, "kernel": kernel, "ours_us": ours, "peer_us": theirs, "bar": bar, "ok": holds}
            )
            print(
                f"{kernel:6} {point.name:48} peer {theirs:10.2f} us  ours {ours:9.2f} us  "
                f"{ours / theirs:6.4f}x  bar {bar or '-'}  {'ok' if holds else 'MISSED'}",
                flush=True,
            )
        del batch
    return rows, failed


def run_parallel() -> tuple[list[dict[str, Any]], bool]:
    """Writes under the parallel chain beside our serial ones; the torch backend's buffers compared first."""
    rows: list[dict[str, Any]] = []
    failed = False
    for point, bar_us in PARALLEL_BARS_US:
        batch = Batch(point)
        batch.fill_prefix()
        launch_canary_plan_kernels(**batch.plan_args(batch.sides["ours"]))
        serial = batch.write_args(batch.sides["ours"])
        contexts = [replace(batch.sides["ours"].context, chain="parallel", canary_buf=buf) for buf in _buffers(batch)]
        launch_canary_write_kernel(**serial | {"context": contexts[0]})
        with use_backend("torch"):
            launch_canary_write_kernel(**serial | {"context": contexts[1]})
        same = torch.equal(contexts[0].canary_buf, contexts[1].canary_buf)
        if not same:
            print(f"DIFFERS {point.name}: canary_buf")
        times = compare(
            {
                "parallel": lambda given=serial | {"context": contexts[0]}: launch_canary_write_kernel(**given),
                "serial": lambda given=serial: launch_canary_write_kernel(**given),
            }
        )
        took, walked = times["parallel"], times["serial"]
        holds = same and (bar_us is None or took <= bar_us)
        failed |= not holds
        rows.append(
            {
                "work": point.name,
                "kernel": "write, parallel chain",
                "ours_us": took,
                "ours_serial_us": walked,
                "bar_us": bar_us,
                "ok": holds,
            }
        )
        print(
            f"parallel {point.name:46} serial {walked:9.2f} us  parallel {took:9.2f} us  bar {bar_us or '-'}  "
            f"{'ok' if holds else 'MISSED'}",
            flush=True,
        )
    return rows, failed


def _buffers(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Two copies of a batch's buffer: one for each backend."""
    buf = batch.sides["ours"].context.canary_buf
    return buf.clone(), buf.clone()


def copy_ceiling_gbps() -> float:
    """Bytes read plus written per second of a large device copy, in GB/s."""
    source = torch.empty(2**29, dtype=torch.int64, device=DEVICE)
    target = torch.empty_like(source)
    graph = graph_of(lambda: torch.neg(source, out=target), 5)
    replay_us(graph, 5)
    return 2 * source.nbytes / statistics.median(replay_us(graph, 5) for _ in range(5)) / 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="folder of an unpacked SGLang 0.5.23 wheel")
    parser.add_argument("--grid", choices=("bars", "full", "parallel"), default="bars")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--budget-s", type=float, default=300.0)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_kernels needs a CUDA device", file=sys.stderr)
        return 2
    if args.peer is None and args.grid != "parallel":
        print("gpu_kernels compares with SGLang: --peer DIR, or --grid parallel", file=sys.stderr)
        return 2
    import triton

    begin = time.monotonic()
    peer = Peer(args.peer) if args.peer else None
    versions = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    print(versions, f"peer built in {time.monotonic() - begin:.0f} s" if peer else "")
    ceiling = copy_ceiling_gbps()
    print(f"copy ceiling {ceiling:.0f} GB/s")
    rows: list[dict[str, Any]] = []
    host: dict[str, dict[str, float]] = {}
    failed = False
    if peer and args.grid != "parallel":
        rows, failed = run(BARS if args.grid == "bars" else full_grid(), peer, args.budget_s)
        small = Batch(Point(32, 64, 1, PARTIAL))
        failed |= bool(differences(small, peer))
        host = {
            kernel: {side: host_us(launch) for side, launch in launches_of(small, peer, kernel).items()}
            for kernel in ("plan", "verify", "write")
        }
        for kernel, sides in host.items():
            print(f"eager host time {kernel:6} peer {sides['peer']:6.1f} us  ours {sides['ours']:6.1f} us")
    if args.grid != "full":
        parallel, missed_bar = run_parallel()
        rows += parallel
        failed |= missed_bar
    missed = [row for row in rows if not row["ok"]]
    print(f"{len(rows) - len(missed)} of {len(rows)} hold")
    if args.json:
        args.json.write_text(
            json.dumps({"versions": versions, "copy_gbps": ceiling, "rows": rows, "host_us": host}, indent=1)
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
