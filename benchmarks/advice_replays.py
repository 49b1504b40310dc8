"""Advice tried end to end: record a replay, take `recommend` on its first half, and replay with what was advised.

What `benchmarks/advice.py` lays over rows is here done by the engine model itself: the second replay runs with the
advised write and verify capacities, and its own rows tell which steps were refused or went unverified.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import duckdb
from prediction_rows import FREE_POOL_TOKENS, MAX_RUNNING, SCALES, SCHEDULES, WORKLOADS, Case

from kvcanary_trace.analysis import recommend
from kvcanary_trace.replay.knobs import EngineKnobs
from kvcanary_trace.replay.readers import read_workload
from kvcanary_trace.replay.runner import replay_workload
from kvcanary_trace.replay.workloads import shape_workload

__all__ = ["REPLAYS", "replay_with_advice"]

REPLAYS: Final = tuple(
    Case(workload, schedule, scales[1], seed)
    for workload, scales in SCALES.items()
    for schedule, seed in ((schedule, seed) for schedule in SCHEDULES for seed in (None, 1))
)
"""Every workload under both schedulers at its middle time scale, published and resampled arrivals."""


def replay_with_advice(case: Case, target: float) -> list[dict[str, Any]]:
    """Two replays of one case.

    Args:
        case: What to replay.
        target: Probability of a breach in the later half that the advice is asked for.

    Returns:
        For write_req and verify: the advised value, later steps that broke, and how many the first replay's rows say.
    """
    load = shape_workload(read_workload(WORKLOADS / case.workload), time_scale=case.time_scale, seed=case.seed)
    knobs = EngineKnobs(max_running_requests=MAX_RUNNING, max_total_tokens=FREE_POOL_TOKENS, schedule=case.schedule)
    with tempfile.TemporaryDirectory() as folder:
        free, tried = Path(folder, "free"), Path(folder, "tried")
        steps = replay_workload(load, free, knobs=knobs, kernels=False, progress=False).steps
        half = steps // 2
        advised = {
            one.capacity: one.value
            for one in recommend(free, steps=steps - half, probability=target, until=half - 1).advice
        }
        asked = {"write_req": "bs", "verify": "verify_demand"}
        expected = {
            name: _count(free, f"step >= {half} AND {column} > {advised[name]}") for name, column in asked.items()
        }
        knobs = replace(knobs, write_req_capacity=advised["write_req"], verify_capacity=advised["verify"])
        replay_workload(load, tried, knobs=knobs, kernels=False, on_error="continue", progress=False)
        broke = {
            "write_req": _count(tried, f"step >= {half} AND error IS NOT NULL"),
            "verify": _count(tried, f"step >= {half} AND verify_enabled = false"),
        }
    return [
        {
            "case": case.name,
            "workload": case.workload.split(".")[0],
            "published": case.seed is None,
            "capacity": name,
            "value": advised[name],
            "later_steps": steps - half,
            "steps_broken": broke[name],
            "steps_expected": expected[name],
        }
        for name in asked
    ]


def _count(root: Path, condition: str) -> int:
    files = f"{root}/steps/*/*/*.parquet"
    ((count,),) = duckdb.sql(f"SELECT count(DISTINCT step) FROM '{files}' WHERE {condition}").fetchall()
    return int(count)
