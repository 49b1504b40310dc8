"""Replay of real workloads on the CPU: wall time, peak memory and verify throughput, against the bars.

    python benchmarks/replay.py [--workloads DIR] [--only azure mooncake coding] [--json FILE]

Each workload runs as a process of its own, so that peak memory is its own. Bars are for 2 cores with default knobs:
PARTIAL fingerprints, HEAD and TAIL, tracing on. Exit code 1 if one is missed, or if a clean replay has a violation.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WORKLOADS = Path(__file__).resolve().parents[2] / "shared" / "workloads"
MIN_ENTRIES_PER_S = 6e6  # per endpoint
CASES: dict[str, dict[str, Any]] = {
    "azure": {"file": "azure_llm_2023_conv.csv", "limit": 1000, "wall_s": 120, "peak_bytes": 2 << 30},
    "mooncake": {"file": "mooncake_conversation.jsonl", "limit": 100, "wall_s": 240, "peak_bytes": None},
    "coding": {"file": "coding_conversations/trace_0095.json", "limit": None, "wall_s": 60, "peak_bytes": None},
}


def measure(name: str, workloads: Path) -> dict[str, Any]:
    """Run one workload here and return its figures."""
    import pyarrow.dataset as ds
    import torch

    from kvcanary_trace.replay.readers import read_workload
    from kvcanary_trace.replay.runner import replay_workload
    from kvcanary_trace.replay.workloads import shape_workload

    torch.set_num_threads(1)
    case = CASES[name]
    load = shape_workload(read_workload(workloads / case["file"]), limit=case["limit"])
    with tempfile.TemporaryDirectory() as folder:
        started_s = time.perf_counter()
        result = replay_workload(load, Path(folder), progress=False)
        wall_s = time.perf_counter() - started_s
        steps = ds.dataset(Path(folder) / "steps", partitioning="hive")
        rows = steps.to_table(columns=["plan_ns", "verify_ns", "write_ns"])
    stages = {column: sum(value or 0 for value in rows[column].to_pylist()) / 1e9 for column in rows.column_names}
    return {
        "workload": name,
        "requests": result.finished_reqs,
        "steps": result.steps,
        "rows": rows.num_rows,
        "entries": result.entries,
        "violations": result.violations,
        "wall_s": round(wall_s, 2),
        "plan_s": round(stages["plan_ns"], 2),
        "verify_s": round(stages["verify_ns"], 2),
        "write_s": round(stages["write_ns"], 2),
        "entries_per_s_per_endpoint": round(2 * result.entries / stages["verify_ns"]) if stages["verify_ns"] else None,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def missed_bars(figures: dict[str, Any]) -> list[str]:
    """What the figures of one workload fall short of."""
    case, missed = CASES[figures["workload"]], []
    if figures["violations"]:
        missed.append(f"{figures['violations']} violations in a clean replay")
    if figures["rows"] != figures["steps"]:
        missed.append(f"{figures['rows']} rows for {figures['steps']} steps")
    if figures["wall_s"] > case["wall_s"]:
        missed.append(f"took {figures['wall_s']} s, bar {case['wall_s']} s")
    if case["peak_bytes"] and figures["peak_bytes"] > case["peak_bytes"]:
        missed.append(f"peak {figures['peak_bytes'] >> 20} MiB, bar {case['peak_bytes'] >> 20} MiB")
    if (figures["entries_per_s_per_endpoint"] or 0) < MIN_ENTRIES_PER_S:
        missed.append(f"{figures['entries_per_s_per_endpoint']} entries/s per endpoint, bar {MIN_ENTRIES_PER_S:.0f}")
    return missed


def main() -> int:
    """Measure each case in a child process and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=Path, default=WORKLOADS)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.workloads)))
        return 0
    report: dict[str, Any] = {"cores": os.cpu_count(), "machine": platform.machine(), "results": [], "missed": {}}
    widths = {"steps": 8, "entries": 14, "wall s": 8, "plan s": 8, "verify s": 9, "write s": 8, "M/s": 7, "MiB": 6}
    print("workload  " + "".join(f"{title:>{width}}" for title, width in widths.items()))
    for name in options.only:
        command = [sys.executable, __file__, "--measure", name, "--workloads", str(options.workloads)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        figures = json.loads(done.stdout)
        report["results"].append(figures)
        if missed := missed_bars(figures):
            report["missed"][name] = missed
        rate = (figures["entries_per_s_per_endpoint"] or 0) / 1e6
        print(
            f"{name:10}{figures['steps']:8,}{figures['entries']:14,}{figures['wall_s']:8.1f}{figures['plan_s']:8.1f}"
            f"{figures['verify_s']:9.1f}{figures['write_s']:8.1f}{rate:7.1f}{figures['peak_bytes'] >> 20:6}",
            flush=True,
        )
    for name, missed in report["missed"].items():
        print(f"MISSED {name}: {'; '.join(missed)}")
    text = json.dumps(report, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text)
    return 1 if report["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
