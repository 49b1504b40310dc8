"""What tracing costs an engine on the host, beside one OpenTelemetry SDK span with four attributes in the same run.

    python benchmarks/tracing_cost.py [--repeats N] [--json FILE]

Prints a table and one line of JSON. Exit 0: every bar holds; 1: a bar is missed, or rows were lost or wrong. Launches
are stand-ins that do nothing, so a figure is tracing's own cost; the repeats of all kinds are interleaved.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pyarrow.dataset as ds
import torch
from opentelemetry.sdk.trace import TracerProvider

import kvcanary_trace as kv_canary
from kvcanary_trace.kernels import CanaryLaunchTag, RealKvHashMode, VerifyOrWriteContext, VerifyPlan, WritePlan, hooks
from kvcanary_trace.kernels.layout import PROBE_WORDS, ProbeWord
from kvcanary_trace.kernels.probe import read_plan_inputs, read_verify_plan

CPU = torch.device("cpu")
STEPS = 1000
BAR_NO_SESSION_US = 1.0
BAR_RECORD_SPANS = 0.25
BAR_GROUP_SPANS = 0.6
BAR_STEPS_PER_S = 20_000


class Engine:
    """Plans and contexts of one group, and launches that do nothing."""

    def __init__(self, bs: int) -> None:
        self.verify_plan = VerifyPlan.allocate(verify_capacity=65_536, device=CPU)
        self.write_plan = WritePlan.allocate(write_req_capacity=256, device=CPU)
        self.context = VerifyOrWriteContext(
            canary_buf=torch.zeros(64, 32, dtype=torch.uint8),
            kernel_kind=CanaryLaunchTag.HEAD_K_FULL,
            violation_ring=torch.zeros(1024, 8, dtype=torch.int64),
            violation_write_index=torch.zeros(1, dtype=torch.int32),
            slot_run_counter=torch.zeros(1, dtype=torch.int64),
            kernel_run_counter=torch.zeros(1, dtype=torch.int64),
            real_kv_sources=(),
            real_kv_hash_mode=RealKvHashMode.NONE,
            enable_chain_position_assert=torch.ones(1, dtype=torch.int32),
        )
        self.reqs = torch.arange(1, bs + 1)
        self.prefix_lens = torch.full((bs,), 100)
        self.extend_lens = torch.ones(bs, dtype=torch.int64)
        self.table = torch.zeros(bs + 1, 256, dtype=torch.int32)

    def plan(self) -> None:
        """A plan launch, shaped like the public launcher."""

        def launch() -> None:
            pass

        if hooks.observer is None:
            launch()
            return
        call = hooks.PlanCall(
            self.verify_plan,
            self.write_plan,
            self.reqs,
            self.prefix_lens,
            self.extend_lens,
            self.table,
            None,
            0,
            65_536,
        )
        hooks.observed(call, launch)

    def verify(self) -> None:
        """A verify launch."""

        def launch() -> None:
            pass

        if hooks.observer is None:
            launch()
            return
        hooks.observed(hooks.VerifyCall(self.context, self.verify_plan), launch)

    def write(self) -> None:
        """A write launch."""

        def launch() -> None:
            pass

        if hooks.observer is None:
            launch()
            return
        hooks.observed(hooks.WriteCall(self.context, self.write_plan), launch)

    def group(self) -> None:
        """The launches of one group."""
        self.plan()
        self.verify()
        self.write()


def bare() -> None:
    """A launch with no tracing in it."""


def per_call_us(function: Callable[[], Any], calls: int = STEPS) -> float:
    """Mean time of one call, in µs."""
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - begin) / calls * 1e6


_ATTRIBUTES = {"kv_canary.step": 1, "kv_canary.mode": "decode", "kv_canary.bs": 32, "kv_canary.verify.demand": 3200}


def span_makers() -> tuple[Callable[[], None], Callable[[], None]]:
    """Create and end one span with four attributes: around a block, as engines do, and without making it current."""
    tracer = TracerProvider().get_tracer("benchmark")

    def current_span() -> None:
        with tracer.start_as_current_span("step", attributes=_ATTRIBUTES):
            pass

    def detached_span() -> None:
        tracer.start_span("step", attributes=_ATTRIBUTES).end()

    return current_span, detached_span


def recorder(session: Any) -> Callable[[], None]:
    """A step whose facts are known: key, NVTX, ring rows, no arithmetic."""

    lane = session.lane()
    first = int(ProbeWord.TIME_NS)
    facts = [time.time_ns(), 32, 32, 256, 32, 3200, 3200, 65_536, 1, 3200, 0, 100, 3200, 101, 256, 0, 1024]

    def record() -> None:
        with kv_canary.step(mode="decode", kv_used=100, kv_capacity=200, waiting_reqs=3):
            lane.forward.new_row(0, None)[first : first + len(facts)] = facts

    return record


def prober(engine: Engine) -> Callable[[], None]:
    """What one plan demands and decided, read from its tensors."""
    call = hooks.PlanCall(
        engine.verify_plan,
        engine.write_plan,
        engine.reqs,
        engine.prefix_lens,
        engine.extend_lens,
        engine.table,
        None,
        0,
        65_536,
    )
    row = [0] * PROBE_WORDS

    def probe() -> None:
        read_plan_inputs(call, row)
        read_verify_plan(call.verify_plan_out, row)

    return probe


def stepper(engine: Engine) -> Callable[[], None]:
    """A step with one group's launches."""

    def stepped() -> None:
        with kv_canary.step(mode="decode", kv_used=100, kv_capacity=200, waiting_reqs=3):
            engine.group()

    return stepped


def measure(repeats: int, directory: Path) -> dict[str, float]:
    """Medians over interleaved repeats, in µs."""
    engines = {bs: Engine(bs) for bs in (8, 32, 256)}
    current_span, detached_span = span_makers()
    times: dict[str, list[float]] = {}

    def time_of(name: str, function: Callable[[], Any]) -> None:
        times.setdefault(name, []).append(per_call_us(function))

    with kv_canary.trace(directory) as session:
        opened, observer = session, hooks.observer
        record = recorder(session)
        steps = {bs: stepper(engine) for bs, engine in engines.items()}
        for _ in range(repeats):
            hooks.observer = None
            time_of("bare call", bare)
            time_of("launcher, no session", engines[32].verify)
            time_of("three launchers, no session", engines[32].group)
            hooks.observer = observer
            time_of("span around a block", current_span)
            time_of("span, not current", detached_span)
            time_of("step record", record)
            for bs, stepped in steps.items():
                time_of(f"probe's arithmetic, bs {bs}", prober(engines[bs]))
                time_of(f"step with plan, verify, write, bs {bs}", stepped)
            session.flush()
    if not opened.stats.complete:
        raise SystemExit(f"rows were lost: {opened.stats}")
    return {name: median(values) for name, values in times.items()}


def keeps_up(directory: Path, seconds: float = 3.0) -> dict[str, float]:
    """Record at 20 000 steps a second for a while, with default settings, and count what arrives."""
    total = int(BAR_STEPS_PER_S * seconds)
    with kv_canary.trace(directory) as session:
        begin = time.perf_counter()
        for number in range(total):
            if number % 200 == 0:
                ahead = number / BAR_STEPS_PER_S - (time.perf_counter() - begin)
                if ahead > 0:
                    time.sleep(ahead)
            session.record(step=number, mode="decode", bs=32, verify_demand=100 * number, verify_capacity=65_536)
        took_s = time.perf_counter() - begin
    table = ds.dataset(directory / "steps", format="parquet").to_table(columns=["step", "verify_demand"])
    steps = table["step"].to_numpy()
    right = len(steps) == total and (table["verify_demand"].to_numpy() == 100 * steps).all()
    return {"steps": total, "steps_per_s": total / took_s, "lost": float(total - len(steps)), "right": float(right)}


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        us = measure(options.repeats, Path(folder) / "cost")
        flow = keeps_up(Path(folder) / "flow")
    span = us["span around a block"]
    no_session = us["launcher, no session"] - us["bare call"]
    group = us["step record"] + us["probe's arithmetic, bs 32"]
    bars = [
        ("no session: more per launcher call, µs", no_session, BAR_NO_SESSION_US),
        ("step record / span", us["step record"] / span, BAR_RECORD_SPANS),
        ("step record with probe, bs 32 / span", group / span, BAR_GROUP_SPANS),
        ("rows lost at 20 000 steps/s", flow["lost"] + (1.0 - flow["right"]), 0.0),
        ("20 000 steps/s / reached", BAR_STEPS_PER_S / flow["steps_per_s"], 1.05),
    ]
    print(f"{'measured':44} {'µs':>8} {'spans':>7}")
    for name, value in us.items():
        print(f"{name:44} {value:8.2f} {value / span:7.3f}")
    print(f"\n{'bar':44} {'got':>8} {'at most':>8}")
    for name, value, most in bars:
        print(f"{name:44} {value:8.3f} {most:8.3f}  {'ok' if value <= most else 'MISSED'}")
    result = {
        "benchmark": "tracing_cost",
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "us": us,
        "flow": flow,
        "bars": [{"name": name, "value": value, "at_most": most} for name, value, most in bars],
    }
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    return int(any(value > most for _, value, most in bars))


if __name__ == "__main__":
    sys.exit(main())
