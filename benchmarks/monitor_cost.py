"""What the live monitor costs the drain thread, a row, and how much it keeps.

    python benchmarks/monitor_cost.py [--json FILE]

Rows of a replay without kernels go through `Monitor.update` in flushes of 500, as they would at 1000 steps a second.
The bar: at most 20 µs a row, amortised. Memory is that of the monitor after a million rows against a thousand. Exits 1
when the bar is missed or the memory grows.
"""

from __future__ import annotations

import argparse
import json
import logging
import pickle
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds

from kvcanary_trace.monitor import Monitor
from kvcanary_trace.replay.knobs import EngineKnobs
from kvcanary_trace.replay.runner import replay_workload
from kvcanary_trace.replay.synthetic import bursty_workload
from kvcanary_trace.sinks.otel_rows import StepRows

BAR_US = 20.0
FLUSH_ROWS = 500


def rows_of(folder: Path) -> pa.RecordBatch:
    """A few thousand rows of a bursty load."""
    replay_workload(bursty_workload(600, seed=3), folder, knobs=EngineKnobs(), kernels=False)
    table = ds.dataset(folder / "steps", format="parquet", partitioning="hive").to_table().combine_chunks()
    return table.to_batches()[0]


def main() -> int:
    """Measure, print, compare with the bars."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        batch = rows_of(Path(folder))
    logging.getLogger("kvcanary_trace.pressure").setLevel(logging.CRITICAL)
    flushes = [batch.slice(at, FLUSH_ROWS) for at in range(0, len(batch) - FLUSH_ROWS, FLUSH_ROWS)]
    monitor = Monitor()
    rows, sizes, best_us = 0, [], float("inf")
    while rows < 1_000_000:
        began_s = time.perf_counter()
        for flush in flushes:
            monitor.update(StepRows(flush))
        taken = FLUSH_ROWS * len(flushes)
        best_us = min(best_us, 1e6 * (time.perf_counter() - began_s) / taken)
        rows += taken
        sizes.append(len(pickle.dumps((monitor._levels, monitor._estimators))))
    print(f"{best_us:.1f} µs a row, bar {BAR_US:.0f}")
    print(f"state: {sizes[0]:,} bytes after {taken:,} rows, {sizes[-1]:,} after {rows:,}")
    if options.json:
        options.json.write_text(json.dumps({"us_a_row": best_us, "bytes": sizes[-1], "rows": rows}))
    return int(best_us > BAR_US or sizes[-1] > 2 * sizes[0])


if __name__ == "__main__":
    sys.exit(main())
