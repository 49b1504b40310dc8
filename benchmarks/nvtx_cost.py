"""What NVTX costs while a tool is attached: counters in the drain thread, and ranges on the engine's thread.

    python benchmarks/nvtx_cost.py [--repeats N] [--json FILE]

The tool is the tests' own (tests/nvtx/injection.c, compiled here), which does nothing when it is asked to log nowhere:
what is measured is ours and nvtx's part, the least that any tool adds to. Counters are compared with the Parquet sink
given the same batches in turn, ranges with one span of the OpenTelemetry SDK. Without a tool there is no counters sink
and no range at all. Prints a table and one line of JSON. Exit 0: every bar holds; 1: a bar is missed, or samples were
lost; 2: it could not run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent
FLUSHES = (20, 1_000, 10_000)
BAR_OF_PARQUET = 1.5  # at the largest flush: time of the counters over that of the Parquet sink
BAR_ROWS_PER_S = 20_000  # of these the counters may take a tenth of a core
BAR_CORE = 0.1
STEPS = 2_000


def load(path: Path) -> Any:
    """A module from its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def counters_beside_parquet(repeats: int, folder: Path) -> list[dict[str, float]]:
    """Seconds a row of both sinks, given the same batches in turn."""
    from kvcanary_trace import nvtx_ranges
    from kvcanary_trace.columns import steps_batch
    from kvcanary_trace.runfile import Run, new_run_id
    from kvcanary_trace.sinks.nvtx_counters import counters_of
    from kvcanary_trace.sinks.parquet import ParquetSink

    rows_like_a_loop = load(ROOT / "benchmarks" / "parquet_sink.py").rows_like_a_loop
    domain = nvtx_ranges.open_domain(True)
    assert domain is not None, "the tool is not attached"
    counters = counters_of(domain)
    assert counters is not None
    results = []
    for flush_rows in FLUSHES:
        batch = steps_batch(rows_like_a_loop(flush_rows), [])
        parquet = ParquetSink(folder / str(flush_rows))
        parquet.open(Run(run=new_run_id(), rank=0))
        turns = max(1, 20_000 // flush_rows)
        times: dict[str, list[float]] = {"counters": [], "parquet": []}
        before = counters.samples
        for _ in range(repeats + 1):
            for name, sink in (("counters", counters), ("parquet", parquet)):
                begin = time.perf_counter()
                for _ in range(turns):
                    sink.write({"steps": batch})
                times[name].append((time.perf_counter() - begin) / turns)
        parquet.close()
        # Six capacities are measured in each row, the pool once for both groups of a step.
        samples = (counters.samples - before) / ((repeats + 1) * turns * flush_rows)
        flush_s = {name: median(of[1:]) for name, of in times.items()}
        results.append(
            {
                "flush_rows": flush_rows,
                "samples_per_row": samples,
                "counters_us_per_flush": flush_s["counters"] * 1e6,
                "counters_us_per_row": flush_s["counters"] / flush_rows * 1e6,
                "parquet_us_per_row": flush_s["parquet"] / flush_rows * 1e6,
                "of_parquet": flush_s["counters"] / flush_s["parquet"],
            }
        )
    return results


def ranges_of_a_step(repeats: int) -> dict[str, float]:
    """Microseconds that the four ranges of a step take on the engine's thread, beside an OpenTelemetry span."""
    from opentelemetry.sdk.trace import TracerProvider

    from kvcanary_trace import names, nvtx_ranges

    ranges = nvtx_ranges.Ranges(nvtx_ranges.open_domain(True))
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("nvtx_cost")
    inner = ((names.PLAN, "full"), (names.VERIFY, "HEAD_K_FULL"), (names.WRITE, "HEAD_K_FULL"))
    attributes = {"step": 1, "bs": 2, "group": "full", "mode": "decode"}
    times: dict[str, list[float]] = {"ranges": [], "span": []}
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        for bs in range(STEPS):
            ranges.push(names.STEP, "decode", bs)
            for name, subject in inner:
                ranges.push(name, subject, bs)
                ranges.pop()
            ranges.pop()
        times["ranges"].append((time.perf_counter() - begin) / STEPS * 1e6)
        begin = time.perf_counter()
        for _ in range(STEPS):
            tracer.start_span("step", attributes=attributes).end()
        times["span"].append((time.perf_counter() - begin) / STEPS * 1e6)
    return {"four_ranges_us": median(times["ranges"][1:]), "span_us": median(times["span"][1:])}


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            tool = load(ROOT / "tests" / "nvtx" / "conftest.py").compiled(
                "injection.c", folder, "nvtx3/nvToolsExtCounters.h"
            )
        except BaseException as error:  # pytest's skip is none of Exception
            print(f"no tool: {error}", file=sys.stderr)
            return 2
        # Before nvtx is first used: it looks for a tool once.
        os.environ["NVTX_INJECTION64_PATH"] = str(tool)
        os.environ.pop("KVCANARY_NVTX_LOG", None)
        counters = counters_beside_parquet(options.repeats, folder)
        ranges = ranges_of_a_step(options.repeats)
    print(f"{'rows/flush':>10} {'samples/row':>11} {'µs/flush':>9} {'µs/row':>7} {'Parquet µs/row':>14} {'ratio':>6}")
    for one in counters:
        print(
            f"{one['flush_rows']:>10,} {one['samples_per_row']:>11.2f} {one['counters_us_per_flush']:>9.0f} "
            f"{one['counters_us_per_row']:>7.2f} {one['parquet_us_per_row']:>14.2f} {one['of_parquet']:>6.2f}"
        )
    print(
        f"four ranges of a step: {ranges['four_ranges_us']:.1f} µs on the engine's thread; one OpenTelemetry span: "
        f"{ranges['span_us']:.1f} µs"
    )
    large = [one for one in counters if one["flush_rows"] >= 1_000]
    core = max(one["counters_us_per_row"] for one in large) * 1e-6 * BAR_ROWS_PER_S
    missed = []
    if large[-1]["of_parquet"] > BAR_OF_PARQUET:
        missed.append(f"counters take more than {BAR_OF_PARQUET} of the Parquet sink")
    if core > BAR_CORE:
        missed.append(f"counters of {BAR_ROWS_PER_S:,} rows/s take {core:.2f} of a core, more than {BAR_CORE}")
    if any(one["samples_per_row"] != 5.5 for one in large):
        missed.append("samples are missing")
    print(
        f"{BAR_ROWS_PER_S:,} rows/s: {core:.3f} of a core for the counters; " + ("; ".join(missed) or "every bar holds")
    )
    result = {
        "benchmark": "nvtx_cost",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "counters": counters,
        "ranges": ranges,
        "core_at_20000_rows_per_s": core,
        "missed": missed,
    }
    print(json.dumps(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
