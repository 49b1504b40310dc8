"""Tables of the prediction benchmark: tuned on first halves, scored on second halves, with intervals over runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from prediction_policies import CAPACITIES, GRIDS
from prediction_rows import SCHEDULES
from prediction_runs import BINS, Calibration, Half, RunScores
from prediction_scores import Tally

__all__ = ["print_report", "report"]

MAX_FALSE: Final = 2.0  # per 10 000 steps at risk
OURS: Final = ("horizon", "horizon, rows only")
_RESAMPLES: Final = 400


def _tally(runs: Sequence[RunScores], capacities: Sequence[str], policy: str, parameter: float, half: Half) -> Tally:
    total = Tally()
    for run in runs:
        for capacity in capacities:
            found = run.tallies.get((capacity, policy, parameter, half))
            if found is not None:
                total.merge(found)
    return total


def tuned(runs: Sequence[RunScores], capacities: Sequence[str], policy: str, max_false: float = MAX_FALSE) -> float:
    """The parameter with the highest recall, then lead, among those with few enough false claims on first halves.

    Where none has few enough, the one with the fewest that announces anything.
    """
    scores = {p: _tally(runs, capacities, policy, p, "first").scores() for p in GRIDS[policy]}
    useful = {p: s for p, s in scores.items() if s["recall"] > 0} or scores
    allowed = {p: s for p, s in scores.items() if s["false"] <= max_false and p in useful} or {
        min(useful, key=lambda p: useful[p]["false"]): {"recall": 0.0, "lead": 0.0}
    }
    return max(
        allowed, key=lambda p: (round(np.nan_to_num(allowed[p]["recall"]), 0), np.nan_to_num(allowed[p]["lead"]))
    )


def _intervals(runs: Sequence[RunScores], capacity: str, policy: str, parameter: float) -> dict[str, list[float]]:
    """90 % intervals over runs."""
    rng = np.random.default_rng(0)
    parts = [_tally([run], [capacity], policy, parameter, "second") for run in runs]
    drawn: dict[str, list[float]] = {"recall": [], "lead": [], "false": []}
    for _ in range(_RESAMPLES):
        total = Tally()
        for i in rng.integers(0, len(parts), len(parts)).tolist():
            total.merge(parts[i])
        scores = total.scores()
        for name, values in drawn.items():
            values.append(scores[name])
    return {name: [float(x) for x in np.nanpercentile(values, (5, 95))] for name, values in drawn.items()}


def report(free: Sequence[RunScores], tight: Sequence[RunScores]) -> dict[str, Any]:
    """Everything that is printed, as JSON."""
    capacities = tuple(CAPACITIES)
    ours = {policy: tuned(free, capacities, policy) for policy in OURS}
    table: list[dict[str, Any]] = []
    for capacity in capacities:
        for schedule in SCHEDULES:
            runs = [run for run in free if run.case.schedule == schedule]
            for policy in GRIDS:
                parameter = ours.get(policy) or tuned(runs, [capacity], policy)
                scores = _tally(runs, [capacity], policy, parameter, "second").scores()
                table.append(
                    {"capacity": capacity, "schedule": schedule, "policy": policy, "parameter": parameter}
                    | scores
                    | {"interval": _intervals(runs, capacity, policy, parameter)}
                )
    result: dict[str, Any] = {
        "table": table,
        "overall": {p: _tally(free, capacities, p, parameter, "second").scores() for p, parameter in ours.items()},
        "first_steps": {
            "horizon": _tally(free, capacities, "horizon", ours["horizon"], "start").scores(),
            "static": _tally(free, capacities, "static", 0.8, "start").scores(),
        },
        "workloads": {
            name: _tally(
                [r for r in free if r.case.workload == name], capacities, "horizon", ours["horizon"], "second"
            ).scores()
            for name in dict.fromkeys(run.case.workload for run in free)
        },
        "frontier": [
            {"schedule": schedule, "policy": policy, "parameter": p}
            | _tally([r for r in free if r.case.schedule == schedule], capacities, policy, p, "second").scores()
            for schedule in SCHEDULES
            for policy in GRIDS
            for p in GRIDS[policy]
        ],
        "calibration": _calibration(free),
        "retraction": _retraction(tight),
        "unchecked_jumps": sum(run.unchecked_jumps for run in free),
    }
    result["points"] = _points(result)
    return result


def _calibration(free: Sequence[RunScores]) -> dict[str, Any]:
    total, skill = Calibration(), {}
    for name in dict.fromkeys(run.case.workload for run in free):
        one = Calibration()
        for run in free:
            if run.case.workload == name:
                for part in run.calibration.values():
                    one.merge(part)
        base = one.breached.sum() / one.steps.sum()
        skill[name] = float(1 - one.squares / one.steps.sum() / (base * (1 - base))) if 0 < base < 1 else float("nan")
        total.merge(one)
    rows = []
    for i in range(len(BINS) - 1):
        if total.steps[i]:
            rows.append(
                {
                    "from": float(BINS[i]),
                    "to": float(BINS[i + 1]),
                    "share": float(total.steps[i] / total.steps.sum()),
                    "onsets": float(total.onsets[i]),
                    "claimed": float(total.claimed[i] / total.steps[i]),
                    "breached": float(total.breached[i] / total.steps[i]),
                }
            )
    return {"bins": rows, "brier_skill": skill}


def _retraction(tight: Sequence[RunScores]) -> list[dict[str, Any]]:
    out = []
    for schedule in SCHEDULES:
        runs = [run for run in tight if run.case.schedule == schedule]
        for policy in GRIDS:
            if runs:
                p = tuned(runs, ["retraction"], policy)
                out.append(
                    {"schedule": schedule, "policy": policy, "parameter": p}
                    | _tally(runs, ["retraction"], policy, p, "second").scores()
                )
    return out


def _points(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The points to reach: whether each holds, and by what figures."""
    by = {(row["capacity"], row["schedule"], row["policy"]): row for row in result["table"]}
    cells = [(capacity, schedule) for capacity in CAPACITIES for schedule in SCHEDULES]
    overall = result["overall"]["horizon"]
    recalls = {c: (by[(*c, "horizon")]["recall_seen"], by[(*c, "static")]["recall_seen"]) for c in cells}
    leads = {c: (by[(*c, "horizon")]["lead"], by[(*c, "static")]["lead"]) for c in cells}
    only = {c: by[(*c, "horizon, rows only")]["recall_seen"] for c in cells}
    bins = [b for b in result["calibration"]["bins"] if b["share"] >= 0.01 and b["onsets"] >= 30]
    off = max((abs(b["claimed"] - b["breached"]) for b in bins), default=float("nan"))
    skill = result["calibration"]["brier_skill"]
    need = {"prefill-first": 2.0, "mixed": 1.5}
    retraction = {(row["schedule"], row["policy"]): row for row in result["retraction"]}
    pairs = [
        (retraction[s, "horizon, full pool"], retraction[s, "static"]) for s in SCHEDULES if (s, "static") in retraction
    ]
    points = [
        (
            "1 false claims",
            overall["false"] <= MAX_FALSE,
            f"{overall['false']:.2f} in 10 000; never-breaching {overall['quiet_false']:.2f}",
        ),
        (
            "2 recall of non-jumps",
            all(ours >= 95 and ours >= theirs for ours, theirs in recalls.values()) and not result["unchecked_jumps"],
            ", ".join(f"{a:.1f} (static {b:.1f})" for a, b in recalls.values()),
        ),
        (
            "3 lead",
            all(ours >= need[c[1]] * theirs and ours > 0 for c, (ours, theirs) in leads.items()),
            ", ".join(f"{a:.0f} (static {b:.0f})" for a, b in leads.values()),
        ),
        ("4 rows only", all(x >= 90 for x in only.values()), ", ".join(f"{x:.1f}" for x in only.values())),
        (
            "5 calibration",
            off <= 0.05 and all(x > 0 for x in skill.values()),
            f"off by at most {off:.3f}; Brier skill " + ", ".join(f"{x:.2f}" for x in skill.values()),
        ),
        (
            "6 retraction",
            bool(pairs)
            and all(
                a["recall"] >= b["recall"] and a["lead"] >= b["lead"] and a["false"] <= max(b["false"], MAX_FALSE)
                for a, b in pairs
            ),
            "; ".join(f"{_brief(a)} (static {_brief(b)})" for a, b in pairs),
        ),
    ]
    return [{"point": name, "ok": bool(ok), "figures": figures} for name, ok, figures in points]


def _brief(scores: dict[str, Any]) -> str:
    """Recall, lead and false claims."""
    return f"{scores['recall']:.0f}/{scores['lead']:.0f}/{scores['false']:.1f}"


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['schedule']:15}{row['policy']:20}{row['parameter']:7g}"
        f"{row['recall']:7.1f} %{row['lead']:6.0f}{row['false']:7.2f}"
    )


def print_report(result: dict[str, Any]) -> None:
    """To standard output."""
    head = (
        f"{'policy':20}{'param':>7}{'onsets':>8}{'jumps':>6}{'recall %':>17}{'lead':>16}{'false/10k':>18}{'quiet':>7}"
    )
    last = None
    for row in result["table"]:
        if (row["capacity"], row["schedule"]) != last:
            last = (row["capacity"], row["schedule"])
            print(f"\n{row['capacity']}, {row['schedule']}\n{head}")
        recall, lead, false = (row["interval"][name] for name in ("recall", "lead", "false"))
        print(
            f"{row['policy']:20}{row['parameter']:7g}{row['onsets']:8.0f}{row['jumps']:6.0f}"
            f"{row['recall']:7.1f} {recall[0]:4.0f}-{recall[1]:<4.0f}{row['lead']:7.0f} {lead[0]:3.0f}-{lead[1]:<4.0f}"
            f"{row['false']:8.2f} {false[0]:4.2f}-{false[1]:4.2f}{row['quiet_false']:7.2f}"
        )
    print("\nby workload (horizon), and the first steps of all (horizon, static 0.8)")
    for name, s in [*result["workloads"].items(), *result["first_steps"].items()]:
        print(
            f"{name:32}{s['onsets']:7.0f} onsets {s['recall']:6.1f} % lead {s['lead']:4.0f} "
            f"false {s['false']:.2f} quiet {s['quiet_false']:.2f}"
        )
    print("\nfrontier, all capacities")
    for row in result["frontier"]:
        print(_line(row))
    print("\ncalibration, second halves: claimed, breached")
    for b in result["calibration"]["bins"]:
        print(
            f"{b['from']:5.2f}-{b['to']:.2f} {100 * b['share']:6.2f} % of steps {b['onsets']:6.0f} onsets "
            f"{b['claimed']:7.3f} {b['breached']:7.3f}"
        )
    print("Brier skill", {name: round(x, 3) for name, x in result["calibration"]["brier_skill"].items()})
    print("\nkv pool, breach = retraction")
    for row in result["retraction"]:
        print(_line(row))
    print()
    for point in result["points"]:
        print(f"{'ok    ' if point['ok'] else 'MISSED'} {point['point']:24}{point['figures']}")
