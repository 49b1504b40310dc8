"""What tracing adds to a replay of a real workload: the same steps with a session and without, interleaved.

    python benchmarks/replay_overhead.py [--workload FILE] [--limit N] [--rounds N] [--json FILE]

The bar: the median of traced rounds is at most 1.05 times the median of bare ones. Times are the process's own CPU time, all
threads together, so that neighbours on a shared machine do not count; wall times are printed beside them. Exits 1 when the
bar is missed, when a traced round lost a row, or when rounds differ in what they verified.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from kvcanary_trace import step, trace
from kvcanary_trace.replay.canary import Canary
from kvcanary_trace.replay.engine import Engine
from kvcanary_trace.replay.knobs import EngineKnobs, EngineSizes
from kvcanary_trace.replay.readers import read_workload
from kvcanary_trace.replay.workloads import Workload, shape_workload

BAR = 1.05
WORKLOAD = Path(__file__).resolve().parents[2] / "shared" / "workloads" / "azure_llm_2023_conv.csv"


@dataclass(frozen=True, slots=True)
class Round:
    """One replay."""

    cpu_s: float
    wall_s: float
    steps: int
    entries: int
    lost: bool


def replay_once(load: Workload, out: Path | None) -> Round:
    """Every step of a workload through the kernels; traced into `out`, or bare when None."""
    knobs = EngineKnobs()
    engine = Engine(load, knobs, EngineSizes.of(knobs, load))
    canary = Canary(engine, torch.device("cpu"), "skip")
    entries = 0
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    with trace(out) if out is not None else nullcontext() as session, canary.one_thread():
        while (batch := engine.schedule()) is not None:
            with step(batch.step, mode=batch.mode, kv_used=batch.kv_used, kv_capacity=batch.kv_capacity):
                canary.run(batch, None)
            entries += batch.num_entries
            engine.complete(batch)
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    return Round(cpu_s, wall_s, engine.stats.steps, entries, session is not None and not session.stats.complete)


def main() -> int:
    """Measure, print, compare with the bar."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", type=Path, default=WORKLOAD)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load = shape_workload(read_workload(args.workload), limit=args.limit, time_scale=1.0, seed=None)
    torch.set_num_threads(1)
    bare, traced = [], []
    with tempfile.TemporaryDirectory() as folder:
        replay_once(load, None)
        for number in range(args.rounds):
            bare.append(replay_once(load, None))
            traced.append(replay_once(load, Path(folder) / str(number)))
    same = len({(one.steps, one.entries) for one in (*bare, *traced)}) == 1
    lost = any(one.lost for one in traced)
    medians = {
        name: statistics.median(getattr(one, name) for one in traced)
        / statistics.median(getattr(one, name) for one in bare)
        for name in ("cpu_s", "wall_s")
    }
    print(
        f"{load.name}, {args.limit} requests, {bare[0].steps:,} steps, {bare[0].entries:,} entries, {args.rounds} rounds"
    )
    print(f"{'':10}{'bare':>10}{'traced':>10}{'ratio':>8}")
    for name, label in (("cpu_s", "CPU, s"), ("wall_s", "wall, s")):
        columns = [statistics.median(getattr(one, name) for one in rounds) for rounds in (bare, traced)]
        print(f"{label:10}{columns[0]:10.2f}{columns[1]:10.2f}{medians[name]:8.3f}")
    ok = medians["cpu_s"] <= BAR and same and not lost
    print(
        f"bar: CPU ratio at most {BAR}: {'ok' if ok else 'MISSED'}{'' if same else ', rounds differ'}{', rows lost' if lost else ''}"
    )
    if args.json is not None:
        args.json.write_text(json.dumps({"ratios": medians, "bar": BAR, "ok": ok, "steps": bare[0].steps}, indent=1))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
