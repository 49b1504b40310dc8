"""When a breach is claimed, does it come within the 10 % to 90 % of steps that are told with the claim?

    python benchmarks/prediction_intervals.py [--limit REQUESTS] [--json FILE]

Replays of every workload under both schedulers, published and resampled arrivals, limits of 0.6 to 0.95 of what each
run demanded. For every onset, rows of the 500 steps before it at which the estimator claims a breach are given to
`forecast` as `analyze` gives them, with nothing of what comes later: the share of intervals that hold the true
distance, that it came sooner or later, the median error of the middle and the median width. `slope`: a slope says when
(its interval was fitted to these very runs); `table`: the estimator's table does (fitted to first halves).
Exits 1 when the share of either source over all workloads is below 0.7 or above 0.95.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from prediction_policies import CAPACITIES
from prediction_rows import CASES, Rows, read_rows
from prediction_scores import HORIZON, risk

from kvcanary_trace.pressure.estimator import claims, states_over
from kvcanary_trace.pressure.forecast import Bounds, Load, forecast

LIMITS = (0.6, 0.7, 0.8, 0.9, 0.95)
ROWS_AN_ONSET = 8
MEMORY = 3000
"""Rows before the claim that the estimator is given: what it averages rises over, nearly."""


def load_of(rows: Rows, capacity: str, limit: float) -> Load:
    """A replay as `forecast` takes it; its pool is none of what may be known, as limits are laid over afterwards."""
    columns = rows.columns
    n = len(rows)
    unknown = np.full(n, np.nan)
    names = ("write_entries", "resident_reqs", "resident_tokens", "waiting_reqs", "waiting_tokens")
    return Load(
        step=np.arange(n, dtype=float),
        demand=columns[CAPACITIES[capacity]],
        limit=np.full(n, limit),
        prefill=(columns["mode"] == 0).astype(float),
        kv_used=unknown,
        kv_capacity=unknown,
        **{name: columns[name] for name in names},
    )


def part(load: Load, begin: int, end: int) -> Load:
    """Rows [begin, end)."""
    return Load(**{name: getattr(load, name)[begin:end] for name in Load.__slots__})


def measure(rows: Rows, found: dict[str, list[dict[str, Any]]]) -> None:
    """Add what is told at sampled rows before each onset of one replay, and what came."""
    rng = np.random.default_rng(len(rows))
    for capacity in ("write_req", "verify"):
        top = CAPACITIES[capacity]
        for limit in np.floor(np.array(LIMITS) * rows.columns[top].max()).tolist():
            load = load_of(rows, capacity, limit)
            breached = load.demand > limit
            if not breached.any():
                continue
            likely = states_over(capacity, load).probability(load.limit)
            claimed = claims(capacity, likely, load.demand / limit)
            for onset in risk(breached, load.demand, limit, 0, len(rows)).onsets.tolist():
                at = np.flatnonzero(claimed[max(0, onset - HORIZON) : onset]) + max(0, onset - HORIZON)
                for row in rng.choice(at, min(ROWS_AN_ONSET, len(at)), replace=False).tolist():
                    recent = part(load, max(0, row - 1000), row + 1)
                    peak = float(load.demand[: max(0, row - 1000)].max(initial=0.0)) / limit
                    told = forecast(
                        capacity, recent, Bounds(), history=part(load, max(0, row - MEMORY), row + 1), earlier_peak=peak
                    )
                    if told.steps is None or told.outlook is None or told.cause != "likely":
                        continue
                    found["slope" if told.trend is not None else "table"].append(
                        {
                            "steps": told.steps, "low": told.low, "high": told.high, "truth": onset - row,
                            "table": (told.outlook.low, told.outlook.steps, told.outlook.high),
                            "workload": rows.case.workload.split(".")[0], "capacity": capacity,
                        }
                    )  # fmt: skip


def main() -> int:
    """Measure, print, compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=int, default=6000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for case in CASES:
        measure(read_rows(case, None, args.limit), found)
        print(f"{case.name}: {', '.join(f'{len(v)} by {k}' for k, v in found.items())} so far", file=sys.stderr)
    failed = False
    heads = "".join(f"{head:>8}" for head in ("claims", "inside", "sooner", "later"))
    print(f"{'source':8}{'workload':24}{heads}{'median error':>14}{'width':>8}")
    for source, told in sorted(found.items()):
        for workload in [*sorted({one["workload"] for one in told}), "all"]:
            ours = [one for one in told if workload in (one["workload"], "all")]
            low, high, truth, middle = (np.array([one[x] for one in ours]) for x in ("low", "high", "truth", "steps"))
            low, high = np.maximum(1, np.floor(low)), np.maximum(1, np.ceil(high))
            inside = float(((low <= truth) & (truth <= high)).mean())
            print(
                f"{source:8}{workload:24}{len(ours):>8}{inside:>8.2f}{float((truth < low).mean()):>8.2f}"
                f"{float((truth > high).mean()):>8.2f}{float(np.median(np.abs(middle - truth))):>8.0f}"
                f"{float(np.median(high - low)):>8.0f}"
            )
            failed |= workload == "all" and not 0.7 <= inside <= 0.95
    if args.json is not None:
        args.json.write_text(json.dumps(found))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
