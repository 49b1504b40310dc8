"""Datasets written by hand, straight from the schema: what an analysis is tested on without a session or a kernel."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kvcanary_trace.kernels.layout import MAX_REQS_PER_LAUNCH
from kvcanary_trace.schema import STEPS, VIOLATIONS, Table

START_NS = 1_700_000_000_000_000_000
STEP_NS = 20_000_000


def steps_table(rows: int, **columns: Any) -> pa.Table:
    """A `steps` table: a healthy decode loop of 3 requests in a plan of 256, with `columns` in place of the defaults.

    Args:
        rows: Number of rows.
        columns: Name → one value, or one for each row; None is null.
    """
    step = np.arange(rows)
    values: dict[str, Any] = {
        "step": step,
        "forward": 0,
        "runner": "target",
        "group": "full",
        "kind": "forward",
        "seq": step + 1,
        "mode": "decode",
        "bs": 3,
        "bs_launched": 256,
        "write_req_capacity": 256,
        "plan_block_limit": MAX_REQS_PER_LAUNCH,
        "write_entries": 3,
        "verify_demand": 3000,
        "verify_capacity": 60_000,
        "verify_enabled": True,
        "entries_skipped": 0,
        "prefix_len_max": 1000,
        "prefix_len_sum": 3000,
        "seq_len_max": 1001,
        "req_to_token_width": 8192,
        "violations": 0,
        "violations_new": 0,
        "violation_ring_capacity": 1024,
        **columns,
    }
    if "time" not in values:
        values["time"] = START_NS + np.asarray(values["step"], dtype=np.int64) * STEP_NS
    demand = np.broadcast_to(np.asarray(values["verify_demand"]), (rows,))
    capacity = np.broadcast_to(np.asarray(values["verify_capacity"]), (rows,))
    if demand.dtype != object and capacity.dtype != object:
        values.setdefault("verify_planned", np.minimum(demand, capacity))
        if "verify_enabled" not in columns:
            values["verify_enabled"] = demand <= capacity
    enabled = np.broadcast_to(np.asarray(values["verify_enabled"], dtype=bool), (rows,))
    if "verify_checked" not in values and "verify_planned" in values:
        values["verify_checked"] = np.where(enabled, values["verify_planned"], 0)
    return _table(STEPS, rows, values)


def violations_table(rows: int, **columns: Any) -> pa.Table:
    """A `violations` table."""
    values = {"step": 0, "forward": 0, "runner": "target", "group": "full", "number": np.arange(rows), **columns}
    return _table(VIOLATIONS, rows, values)


def _table(table: Table, rows: int, values: Mapping[str, Any]) -> pa.Table:
    unknown = set(values) - {column.name for column in table.columns}
    assert not unknown, f"no such column: {unknown}"
    arrays = []
    for field in table.arrow:
        value = values.get(field.name)
        if isinstance(value, np.ndarray | list):
            assert len(value) == rows, f"{field.name}: {len(value)} values for {rows} rows"
            array = pa.array(value if isinstance(value, list) else value.tolist())
        else:
            array = pa.array([value] * rows)
        kind = pa.int64() if pa.types.is_timestamp(field.type) else field.type
        arrays.append(array.cast(kind).cast(field.type))
    return pa.Table.from_arrays(arrays, schema=table.arrow)


def write_part(
    root: Path, table: pa.Table, *, name: str = "steps", run: str = "r1", rank: int = 0, part: int = 0
) -> Path:
    """Write one sealed part."""
    folder = root / name / f"run={run}" / f"rank={rank}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"part-{part:05d}.parquet"
    pq.write_table(table, path, compression="zstd")
    return path


def write_run(root: Path, *, run: str = "r1", rank: int = 0, **what: Any) -> Path:
    """Write a run file: completed without losses, with `what` in place of the defaults."""
    folder = root / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{run}.{rank}.json"
    losses = dict.fromkeys(
        (
            "ring_overwritten",
            "host_ring_overwritten",
            "rows_dropped",
            "violations_lost",
            "halves_unmatched",
            "sink_errors",
            "observer_errors",
        ),
        0,
    )
    whole = {
        "schema": 1, "run": run, "rank": rank, "status": "completed", "error": None, "started_ns": START_NS,
        "ended_ns": START_NS + 10**9, "host": "here", "pid": 1, "device": "cpu", "versions": {}, "argv": [],
        "engine": {}, "settings": {}, "capacities": [], "world_size": 1,
        "losses": {**losses, "last_lost_seq": None}, "rows": {}, "last_step": None, **what,
    }  # fmt: skip
    path.write_text(json.dumps(whole))
    return path


def dataset(root: Path, table: pa.Table, **run: Any) -> Path:
    """A dataset of one run of one rank."""
    write_part(root, table)
    write_run(root, **run)
    return root
