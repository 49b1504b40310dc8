"""How fast the Parquet sink takes rows on one core, and how many bytes a row needs in a sealed part.

    python benchmarks/parquet_sink.py [--repeats N] [--json FILE]

The rows are those of a decode loop: a batch that drifts, demands that grow, measured times with jitter. Prints a table
and one line of JSON. Exit 0: every bar holds; 1: a bar is missed, or what is read back differs from what was written.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kvcanary_trace.columns import steps_batch
from kvcanary_trace.join import Joined
from kvcanary_trace.kernels.layout import ProbeWord
from kvcanary_trace.runfile import Run, new_run_id
from kvcanary_trace.schema import NOT_MEASURED, HostWord, Mode
from kvcanary_trace.sinks.parquet import ParquetSink

BAR_ROWS_PER_S = 400_000
BAR_BYTES_PER_ROW = 20.0
FLUSH_ROWS = 10_000
PART_ROWS = (3_000, 200_000)


def rows_like_a_loop(num: int, seed: int = 7) -> Joined:
    """[num] joined rows of a decode loop with two groups and some prefills in between."""
    rng = np.random.default_rng(seed)
    device = np.full((num, 32), NOT_MEASURED, dtype=np.int64)
    host = np.full((num, 32), NOT_MEASURED, dtype=np.int64)
    step = np.arange(num) // 2
    prefill = rng.random(num // 2 + 1)[step] < 0.1
    bs = np.clip(32 + np.cumsum(rng.integers(-1, 2, num // 2 + 1)), 1, 64)[step]
    prefix_sum = bs * 700 + np.cumsum(rng.integers(0, 64, num // 2 + 1))[step]
    facts = {
        ProbeWord.SEQ: np.arange(1, num + 1),
        ProbeWord.STEP: step,
        ProbeWord.FORWARD: 0,
        ProbeWord.RUNNER: 0,
        ProbeWord.GROUP: np.arange(num) % 2,
        ProbeWord.KIND: 0,
        ProbeWord.TIME_NS: 1_760_000_000_000_000_000 + np.cumsum(rng.integers(3_000_000, 9_000_000, num)),
        ProbeWord.BS: bs,
        ProbeWord.BS_LAUNCHED: 64,
        ProbeWord.WRITE_REQ_CAPACITY: 64,
        ProbeWord.WRITE_ENTRIES: np.where(prefill, rng.integers(64, 2048, num), bs),
        ProbeWord.VERIFY_DEMAND: prefix_sum,
        ProbeWord.VERIFY_PLANNED: prefix_sum,
        ProbeWord.VERIFY_CAPACITY: 600_000,
        ProbeWord.VERIFY_ENABLED: 1,
        ProbeWord.VERIFY_CHECKED: prefix_sum,
        ProbeWord.ENTRIES_SKIPPED: 0,
        ProbeWord.PREFIX_LEN_MAX: 4000 + step % 1000,
        ProbeWord.PREFIX_LEN_SUM: prefix_sum,
        ProbeWord.SEQ_LEN_MAX: 4001 + step % 1000,
        ProbeWord.REQ_TO_TOKEN_WIDTH: 32_768,
        ProbeWord.VIOLATIONS: 0,
        ProbeWord.VIOLATIONS_NEW: 0,
        ProbeWord.VIOLATION_RING_CAPACITY: 1024,
        ProbeWord.PLAN_NS: rng.integers(40_000, 48_000, num),
        ProbeWord.VERIFY_NS: rng.integers(400_000, 480_000, num),
        ProbeWord.WRITE_NS: rng.integers(30_000, 38_000, num),
    }
    for word, values in facts.items():
        device[:, word] = values
    per_step = {
        HostWord.STEP: step,
        HostWord.FORWARD: 0,
        HostWord.RUNNER: 0,
        HostWord.TIME_NS: device[:, ProbeWord.TIME_NS],
        HostWord.MODE: np.where(prefill, Mode.PREFILL, Mode.DECODE),
        HostWord.HOST_NS: rng.integers(3_000_000, 3_400_000, num // 2 + 1)[step],
        HostWord.KV_USED: prefix_sum,
        HostWord.KV_CAPACITY: 200_000,
        HostWord.RESIDENT_REQS: bs,
        HostWord.RESIDENT_TOKENS: prefix_sum,
        HostWord.WAITING_REQS: step // 50 % 30,
        HostWord.WAITING_TOKENS: step // 50 % 30 * 700,
    }
    for word, values in per_step.items():
        host[:, word] = values
    true = np.ones(num, dtype=np.bool_)
    return Joined(device, host, true, true)


def write_all(directory: Path, batches: list[pa.RecordBatch], part_rows: int) -> float:
    """Write the batches as a run of its own; seconds of this process's CPU."""
    sink = ParquetSink(directory, part_rows=part_rows)
    sink.open(Run(run=new_run_id(), rank=0))
    begin = time.process_time()
    for batch in batches:
        sink.write({"steps": batch})
    sink.close()
    return time.process_time() - begin


def sealed(directory: Path) -> tuple[int, int]:
    """(bytes, rows) of all sealed parts."""
    parts = sorted((directory / "steps").rglob("*.parquet"))
    return sum(part.stat().st_size for part in parts), sum(pq.read_metadata(part).num_rows for part in parts)


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    whole = steps_batch(rows_like_a_loop(options.rows), [])
    results, wrong = [], 0
    for part_rows in PART_ROWS:
        flush_rows = min(FLUSH_ROWS, part_rows)
        batches = [whole.slice(at, flush_rows) for at in range(0, options.rows, flush_rows)]
        seconds = []
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory() as folder:
                seconds.append(write_all(Path(folder), batches, part_rows))
                size, rows = sealed(Path(folder))
                parts = sorted((Path(folder) / "steps").rglob("*.parquet"))
                back = pa.concat_tables([pq.ParquetFile(part).read() for part in parts])
                wrong += not back.equals(pa.Table.from_batches([whole]))
        results.append({"part_rows": part_rows, "rows_per_s": rows / median(seconds), "bytes_per_row": size / rows})
    bars = [("rows/s, bar / reached, parts of 200 000", BAR_ROWS_PER_S / results[-1]["rows_per_s"], 1.0)]
    bars += [
        (f"bytes a row, parts of {result['part_rows']}", result["bytes_per_row"], BAR_BYTES_PER_ROW)
        for result in results
    ]
    bars.append(("runs that read back differently", float(wrong), 0.0))
    print(f"{'rows a part':>12} {'rows/s, one core':>18} {'bytes a row':>12}")
    for result in results:
        print(f"{result['part_rows']:12} {result['rows_per_s']:18,.0f} {result['bytes_per_row']:12.2f}")
    print(f"\n{'bar':44} {'got':>8} {'at most':>8}")
    for name, value, most in bars:
        print(f"{name:44} {value:8.3f} {most:8.3f}  {'ok' if value <= most else 'MISSED'}")
    result = {
        "benchmark": "parquet_sink",
        "machine": platform.processor() or platform.machine(),
        "pyarrow": pa.__version__,
        "results": results,
        "bars": [{"name": name, "value": value, "at_most": most} for name, value, most in bars],
    }
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    return int(any(value > most for _, value, most in bars))


if __name__ == "__main__":
    sys.exit(main())
