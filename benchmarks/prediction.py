"""Alarms before the error: how many breaches are announced, how early, and how often for nothing.

    python benchmarks/prediction.py [--jobs N] [--json FILE] [--cache DIR] [--only WORD] [--fit]

Replays every workload without kernels under both schedulers, three time scales, published and resampled arrivals; lays
12 limits from 0.5 to 1.6 times the most that the run demanded over bs, verify and kv pool; and scores causal alarms
from rows. Parameters are tuned on the first half of each run and scored on the second. `--fit` refits the probability
table of the estimator to the first halves and writes it. Exits 1 when one of the points to reach is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from prediction_fit import fit_table, table_source
from prediction_report import print_report, report
from prediction_rows import CASES, Case, read_rows, tight_pools
from prediction_runs import RunScores, score_run, score_tight

TABLE = Path(__file__).resolve().parents[1] / "kvcanary_trace" / "pressure" / "horizon_table.py"


def work(case: Case, cache: Path | None, fit: bool) -> tuple[RunScores, list[RunScores]]:
    """One replay, and those of the same load with a pool that is too small."""
    started_s = time.perf_counter()
    rows = read_rows(case, cache)
    found = score_run(rows, fit)
    tight = [] if fit else [score_tight(read_rows(one, cache)) for one in tight_pools(rows)]
    print(f"{case.name}: {len(rows)} steps, {time.perf_counter() - started_s:.0f} s", file=sys.stderr, flush=True)
    return found, tight


def run_all(cases: Iterable[Case], cache: Path | None, fit: bool, jobs: int) -> list[tuple[RunScores, list[RunScores]]]:
    """Every case, in processes of their own."""
    each = partial(work, cache=cache, fit=fit)
    if jobs == 1:
        return [each(case) for case in cases]
    with ProcessPoolExecutor(jobs) as pool:
        return list(pool.map(each, cases))


def main() -> int:
    """Replay, score, print, compare with the points to reach."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cache", type=Path, help="folder that keeps rows between calls")
    parser.add_argument("--only", default="", help="replay only cases whose name has this word")
    parser.add_argument("--fit", action="store_true")
    args = parser.parse_args()
    started_s = time.perf_counter()
    if args.cache:
        args.cache.mkdir(parents=True, exist_ok=True)
    cases = [case for case in CASES if args.only in case.name]
    found = run_all(cases, args.cache, args.fit, args.jobs)
    if args.fit:
        samples = np.concatenate([part for one, _ in found for part in one.samples])
        steps = sum(one.steps for one, _ in found)
        provenance = (
            f"Fitted {datetime.now(timezone.utc):%Y-%m-%d} to {len(samples):,} steps at risk, drawn from the first\n"
            f"halves of {len(cases)} replays ({steps:,} steps) of the Azure 2023, Mooncake and coding-conversation\n"
            "traces; see docs/prediction.md."
        )
        TABLE.write_text(table_source(*fit_table(samples), provenance))
        print(f"wrote {TABLE}")
        return 0
    result: dict[str, Any] = report([one for one, _ in found], [one for _, tight in found for one in tight])
    result["about"] = {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cases": len(cases),
        "steps": sum(one.steps for one, _ in found),
        "wall_s": round(time.perf_counter() - started_s),
    }
    print_report(result)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1))
    return 0 if all(point["ok"] for point in result["points"]) else 1


if __name__ == "__main__":
    sys.exit(main())
