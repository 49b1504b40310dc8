"""Read a trace with whatever you already use: DuckDB, pandas, Arrow, Polars. A dataset is plain Hive-style Parquet.

    python examples/02_read_a_trace.py [DIR]

Without DIR, a small trace is written first, by an engine that records its own rows without our kernels.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp

import duckdb
import pyarrow.compute as pc
import pyarrow.dataset as ds

from kvcanary_trace.analysis import analyze, load


def make_trace(directory: Path) -> None:
    """Record 400 steps of an imagined engine whose prefixes grow until they no longer fit the verify plan."""
    import kvcanary_trace as kv_canary

    with kv_canary.trace(directory) as session:
        for step in range(400):
            bs, prefix = 4 + step // 25, 100 + 2 * step
            demand, capacity = bs * prefix, 16_000
            session.record(
                step=step,
                mode="decode",
                bs=bs,
                bs_launched=32,
                write_req_capacity=32,
                write_entries=bs,
                verify_demand=demand,
                verify_planned=min(demand, capacity),
                verify_capacity=capacity,
                verify_enabled=demand <= capacity,
                verify_checked=demand if demand <= capacity else 0,
                prefix_len_max=prefix,
                prefix_len_sum=demand,
                seq_len_max=prefix + 1,
                req_to_token_width=4096,
                violations=0,
            )


def with_duckdb(directory: Path) -> None:
    """SQL over the files. Utilisation is a quotient of two columns; null is *not measured*, never zero."""
    files = f"{directory}/steps/*/*/*.parquet"
    query = """
        SELECT run, rank, "group", count(*) AS steps,
               max(verify_demand / verify_capacity) AS peak,
               count(*) FILTER (NOT verify_enabled) AS unverified
        FROM read_parquet(?, hive_partitioning = true) GROUP BY ALL ORDER BY ALL"""
    connection = duckdb.connect()
    connection.execute("SET enable_progress_bar = false")
    for run, rank, group, steps, peak, unverified in connection.execute(query, [files]).fetchall():
        print(f"DuckDB : {run} rank {rank} {group}: {steps} steps, verify peak {peak:.0%}, {unverified} unverified")


def with_arrow(directory: Path) -> None:
    """Arrow reads only the columns and rows that are asked for; units and meanings are in the fields' metadata."""
    steps = ds.dataset(directory / "steps", partitioning="hive")
    field = steps.schema.field("verify_demand")
    print(f"Arrow  : verify_demand is in {field.metadata[b'unit'].decode()}: {field.metadata[b'meaning'].decode()}")
    over = steps.to_table(
        columns=["step", "verify_demand"], filter=pc.field("verify_demand") > pc.field("verify_capacity")
    )
    first = pc.min(over["step"]).as_py()
    print(
        f"Arrow  : {over.num_rows} rows past the verify capacity" + (f", from step {first} on" if over.num_rows else "")
    )


def with_pandas(directory: Path) -> None:
    """pandas, through `load`: it also takes the rows that a running or killed process has not sealed yet."""
    frame = load(directory, columns=["step", "mode", "bs", "verify_demand", "run", "rank"]).to_pandas()
    print(f"pandas : {len(frame)} rows; by mode:")
    print(frame.groupby("mode")[["bs", "verify_demand"]].max().to_string())


def with_polars(directory: Path) -> None:
    """Polars, lazily."""
    import polars as pl

    steps = pl.scan_parquet(f"{directory}/steps/**/*.parquet", hive_partitioning=True)
    quantile = steps.select((pl.col("bs") / pl.col("write_req_capacity")).quantile(0.99)).collect().item()
    print(f"Polars : 99 % of the rows fill the write plan to {quantile:.0%} or less")


def with_analysis(directory: Path) -> None:
    """Typed values instead of rows: what `kvcanary-trace analyze` prints."""
    result = analyze(directory)
    for finding in result.findings:
        if finding.severity != "info":
            print(f"{finding.severity:9} {finding.subject}: {finding.reason}")
    if result.coverage.ratio is not None:
        print(f"coverage {result.coverage.ratio:.1%} of {result.coverage.demanded:,} entries")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        traces = Path(sys.argv[1])
    else:
        traces = Path(mkdtemp(prefix="traces-"))
        make_trace(traces)
    with_duckdb(traces)
    with_arrow(traces)
    if find_spec("pandas"):
        with_pandas(traces)
    if find_spec("polars"):
        with_polars(traces)
    with_analysis(traces)
