"""Advice on real workloads: computed from the first half of each replay, tried on the second.

Every case of `prediction_rows` is replayed with `--kernels off` and a pool that is never full; demand there does not
depend on the capacities under test. `advised_value` sees the highest demand of each block of 500 steps of the first
half, and is asked for the value that the second half exceeds with a probability of 5 %, once with the ceilings that the
engine's settings give and once with none. A case counts as broken when any later step exceeds its value.

Sixteen cases are then replayed again with what `recommend` advised, and their own rows must tell the same.

    python benchmarks/advice.py [--cache DIR] [--json FILE] [--no-replays]

Exit code 1 when a bar is missed: more cases of a group break than the target and its sampling error allow; more steps
of a workload's later part are past the advised value than the target; or a replay tells otherwise than rows laid over.
Where a load bursts as it never did before, no first half tells the second: docs/advice.md has what is missed and why.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from advice_replays import REPLAYS, replay_with_advice
from prediction_rows import CASES, MAX_RUNNING, Rows, read_rows

from kvcanary_trace.analysis.advice import BLOCK_STEPS, advised_value
from kvcanary_trace.pressure.capacities import CAPACITIES

TARGET: Final = 0.05
COLUMNS: Final = {"write_req": "bs", "write_entry": "write_entries", "verify": "verify_demand", "kv_pool": "kv_used"}
GRANULES: Final = {one.id: one.granule for one in CAPACITIES}
CEILINGS: Final[dict[str, float]] = {"write_req": MAX_RUNNING}


def try_case(rows: Rows, capacity: str, ceiling: float | None) -> dict[str, Any]:
    """One capacity of one replay: what was advised on the first half, and what came in the second."""
    demand = rows.columns[COLUMNS[capacity]]
    half = len(demand) // 2
    first, later = demand[:half], demand[half:]
    peaks = np.maximum.reduceat(first, np.arange(0, half, BLOCK_STEPS))
    value, basis = advised_value(peaks, len(later) / BLOCK_STEPS, TARGET, ceiling, GRANULES[capacity])
    return {
        "case": rows.case.name,
        "workload": rows.case.workload.split(".")[0],
        "published": rows.case.seed is None,
        "capacity": capacity,
        "ceiling": ceiling,
        "basis": basis,
        "value": value,
        "first_peak": float(first.max()),
        "later_peak": float(later.max()),
        "broken": bool(later.max() > value),
        "peak_broken": bool(later.max() > first.max()),
        "steps_past": int((later > value).sum()),
        "later_steps": len(later),
    }


def _rate(cases: list[dict[str, Any]]) -> float:
    unbounded = [one for one in cases if one["ceiling"] is None]
    return sum(one["steps_past"] for one in unbounded) / sum(one["later_steps"] for one in unbounded)


def upper_bound(cases: int) -> float:
    """The share of broken cases that a true share of TARGET exceeds once in twenty: its normal bound."""
    return TARGET + 1.645 * math.sqrt(TARGET * (1 - TARGET) / cases)


def _replay() -> list[dict[str, Any]]:
    """Replay with what was advised, and print what broke."""
    logging.getLogger("kvcanary_trace.pressure").setLevel(logging.CRITICAL)  # a breach here is a figure, not news
    begin = time.monotonic()
    done = [row for case in REPLAYS for row in replay_with_advice(case, TARGET)]
    print(f"{len(REPLAYS)} replays with what was advised; {time.monotonic() - begin:.0f} s")
    for one in done:
        same = "as laid over" if one["steps_broken"] == one["steps_expected"] else f"DIFFERS: {one['steps_expected']:,}"
        print(
            f"  {one['case']:56} {one['capacity']:10} {one['value']:>11,}  broken {one['steps_broken']:6,} of "
            f"{one['later_steps']:7,} steps, {same}"
        )
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-replays", action="store_true")
    args = parser.parse_args()
    begin = time.monotonic()
    found: list[dict[str, Any]] = []
    for case in CASES:
        rows = read_rows(case, args.cache)
        for capacity in COLUMNS:
            for ceiling in {None, CEILINGS.get(capacity)}:
                found.append(try_case(rows, capacity, ceiling))
    failed = False
    print(f"{len(CASES)} replays, target {TARGET:.0%} a capacity; {time.monotonic() - begin:.0f} s")
    print("arrivals   capacity     ceiling   broken    first half's peak broken  steps past  value / later peak")
    groups = sorted({(one["published"], one["capacity"], one["ceiling"] is not None) for one in found})
    for published, capacity, bounded in groups:
        mine = [
            one
            for one in found
            if (one["published"], one["capacity"], one["ceiling"] is not None) == (published, capacity, bounded)
        ]
        broken = sum(one["broken"] for one in mine)
        naive = sum(one["peak_broken"] for one in mine)
        past = sum(one["steps_past"] for one in mine) / sum(one["later_steps"] for one in mine)
        margin = statistics.median(one["value"] / one["later_peak"] for one in mine)
        holds = broken / len(mine) <= upper_bound(len(mine))
        failed |= not holds
        print(
            f"{'published' if published else 'resampled':10} {capacity:12} {'settings' if bounded else 'none':8} "
            f"{broken:3} of {len(mine):3}  {naive:3} of {len(mine):3}                {past:9.5%}  {margin:5.2f}   "
            f"{'ok' if holds else 'MISSED'}"
        )
    for one in found:
        if one["broken"] and one["ceiling"] is None:
            print(
                f"  broken: {one['case']}, {one['capacity']}: advised {one['value']:,} from a peak of "
                f"{one['first_peak']:,.0f}, then {one['later_peak']:,.0f}"
            )
    print("breach rate on the later part of each workload, without ceilings: steps past the advised value / all steps")
    for workload in sorted({one["workload"] for one in found}):
        rates = {
            capacity: _rate([one for one in found if (one["workload"], one["capacity"]) == (workload, capacity)])
            for capacity in COLUMNS
        }
        failed |= max(rates.values()) > TARGET
        print(f"  {workload:24} " + "  ".join(f"{capacity} {rate:8.4%}" for capacity, rate in rates.items()))
    replays = [] if args.no_replays else _replay()
    failed |= any(one["steps_broken"] != one["steps_expected"] for one in replays)
    if args.json:
        args.json.write_text(json.dumps({"target": TARGET, "cases": found, "replays": replays}, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
