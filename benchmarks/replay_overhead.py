"""What tracing adds to a replay of a real workload: the same steps with a session and without, by turns.

    python benchmarks/replay_overhead.py [--workload FILE] [--limit N] [--rounds N] [--everything] [--json FILE]

Two engines walk through the same workload in one process, one traced and one bare, twenty steps each at a time:
whatever the machine does to one it does to the other. The bar: the median over rounds of traced time / bare time is at
most 1.05. Times are CPU times, with the drain thread's and those of opening and closing the session among the traced
ones; wall times are printed beside them. Exits 1 when the bar is missed, when a traced round lost a row, or when the
two verified differently.

`--everything`: the black box, a pressure callback and OpenTelemetry too, exported over HTTP to a receiver in a process
of its own that takes all it is given.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from kvcanary_trace import step, trace
from kvcanary_trace.kernels import hooks
from kvcanary_trace.replay.canary import Canary
from kvcanary_trace.replay.engine import Engine
from kvcanary_trace.replay.knobs import EngineKnobs, EngineSizes
from kvcanary_trace.replay.readers import read_workload
from kvcanary_trace.replay.workloads import Workload, shape_workload

BAR = 1.05
TURN_STEPS = 20
FLUSH_S = 2.0
"""Twice the default: the drain thread's clock also runs while the bare engine has its turn."""
WORKLOAD = Path(__file__).resolve().parents[2] / "shared" / "workloads" / "azure_llm_2023_conv.csv"


@dataclass(frozen=True, slots=True)
class Round:
    """Both replays once. Times in seconds, bare first."""

    cpu_s: tuple[float, float]
    wall_s: tuple[float, float]
    steps: int
    entries: int
    ok: bool


class Replay:
    """One engine on its way through the workload, and what its steps took."""

    def __init__(self, load: Workload, *, traced: bool) -> None:
        knobs = EngineKnobs()
        self.traced = traced
        self.engine = Engine(load, knobs, EngineSizes.of(knobs, load))
        self.canary = Canary(self.engine, torch.device("cpu"), "skip")
        self.entries = 0
        self.cpu_s = self.wall_s = 0.0

    def advance(self) -> bool:
        """Take a turn; False when the workload is done."""
        engine, canary = self.engine, self.canary
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        for _ in range(TURN_STEPS):
            batch = engine.schedule()
            if batch is None:
                break
            state = {"mode": batch.mode, "kv_used": batch.kv_used, "kv_capacity": batch.kv_capacity}
            with step(batch.step, **state) if self.traced else nullcontext():
                canary.run(batch, None)
            self.entries += batch.num_entries
            engine.complete(batch)
        self.wall_s += time.perf_counter() - wall_s
        self.cpu_s += time.thread_time() - cpu_s
        return batch is not None


RECEIVER = """
import http.server
class Accepts(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Accepts)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def receiver() -> Iterator[None]:
    """An OTLP endpoint on loopback, named in the environment."""
    process = subprocess.Popen([sys.executable, "-c", RECEIVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{process.stdout.readline().strip()}"
    try:
        yield
    finally:
        process.kill()
        process.communicate()


@contextmanager
def unobserved() -> Iterator[None]:
    """Launches in here are as they are without a session."""
    seat, hooks.observer = hooks.observer, None
    try:
        yield
    finally:
        hooks.observer = seat


def replay_both(load: Workload, out: Path, everything: bool) -> Round:
    """Every step of the workload through the kernels, twice: traced into `out`, and bare."""
    bare, traced = Replay(load, traced=False), Replay(load, traced=True)
    all_cpu_s, own_cpu_s = time.process_time(), time.thread_time()
    opened_s = time.thread_time()
    more_parts = {"black_box": True, "otel": True, "on_pressure": lambda change: None} if everything else {}
    with trace(out, flush_interval_s=FLUSH_S, **more_parts) as session, traced.canary.one_thread():
        traced.cpu_s += time.thread_time() - opened_s
        more = True
        while more:
            with unobserved():
                more = bare.advance()
            more = traced.advance() or more
        closing_s, closing_wall_s = time.thread_time(), time.perf_counter()
    traced.cpu_s += time.thread_time() - closing_s
    traced.wall_s += time.perf_counter() - closing_wall_s
    traced.cpu_s += time.process_time() - all_cpu_s - (time.thread_time() - own_cpu_s)  # the drain thread's
    return Round(
        cpu_s=(bare.cpu_s, traced.cpu_s),
        wall_s=(bare.wall_s, traced.wall_s),
        steps=traced.engine.stats.steps,
        entries=traced.entries,
        ok=session.stats.complete and (bare.entries, bare.engine.stats) == (traced.entries, traced.engine.stats),
    )


def main() -> int:
    """Measure, print, compare with the bar."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", type=Path, default=WORKLOAD)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--everything", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load = shape_workload(read_workload(args.workload), limit=args.limit, time_scale=1.0, seed=None)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, receiver() if args.everything else nullcontext():
        replay_both(load, Path(folder) / "warm-up", args.everything)
        rounds = [replay_both(load, Path(folder) / str(number), args.everything) for number in range(args.rounds)]
    steps, entries = rounds[0].steps, rounds[0].entries
    print(f"{load.name}, {args.limit} requests, {steps:,} steps, {entries:,} entries, {args.rounds} rounds")
    print(f"{'':10}{'bare':>10}{'traced':>10}{'ratio':>8}")
    ratios = {}
    for name, label in (("cpu_s", "CPU, s"), ("wall_s", "wall, s")):
        pairs = [getattr(one, name) for one in rounds]
        ratios[name] = statistics.median(traced / bare for bare, traced in pairs)
        bare, traced = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{label:10}{bare:10.2f}{traced:10.2f}{ratios[name]:8.3f}")
    same = all(one.ok for one in rounds)
    ok = ratios["cpu_s"] <= BAR and same
    print(f"bar: CPU ratio at most {BAR}: {'ok' if ok else 'MISSED'}{'' if same else ', rounds differ or lost rows'}")
    if args.json is not None:
        args.json.write_text(json.dumps({"ratios": ratios, "bar": BAR, "ok": ok, "steps": steps}, indent=1))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
