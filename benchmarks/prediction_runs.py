"""Scores of one replay under every capacity, limit, policy and parameter; first and second half apart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from prediction_fit import sample
from prediction_policies import CAPACITIES, GRIDS, alarms, states_of
from prediction_rows import Case, Rows
from prediction_scores import HORIZON, Risk, Tally, claims, next_breach, risk

__all__ = ["BINS", "Calibration", "Key", "RunScores", "score_run", "score_tight"]

Floats: TypeAlias = NDArray[np.float64]
Half: TypeAlias = Literal["first", "second", "start"]
Key: TypeAlias = tuple[str, str, float, Half]  # capacity, policy, parameter, half

LIMITS: Final = np.linspace(0.5, 1.6, 12)  # in parts of the most that the run demanded
START_STEPS: Final = 1000
BINS: Final = np.concatenate(([0.0, 0.01, 0.03], np.arange(0.1, 1.01, 0.1)))


@dataclass(slots=True)
class Calibration:
    """Sums over steps at risk: by bin of probability, and for the Brier score."""

    steps: Floats = field(default_factory=lambda: np.zeros(len(BINS) - 1))
    claimed: Floats = field(default_factory=lambda: np.zeros(len(BINS) - 1))
    breached: Floats = field(default_factory=lambda: np.zeros(len(BINS) - 1))
    onsets: Floats = field(default_factory=lambda: np.zeros(len(BINS) - 1))
    squares: float = 0.0
    in_range: float = 0.0  # breaches that came within the 10 % to 90 % of steps that were told
    timed: float = 0.0

    def add(self, p: Floats, follows: NDArray[np.bool_], where: Risk) -> None:
        """Count one series; `p` and `follows` are of every step."""
        at = np.flatnonzero(where.at_risk)
        bins = np.clip(np.searchsorted(BINS, p, side="right") - 1, 0, len(BINS) - 2)
        n = len(BINS) - 1
        self.steps += np.bincount(bins[at], minlength=n)
        self.claimed += np.bincount(bins[at], p[at], minlength=n)
        self.breached += np.bincount(bins[at], follows[at], minlength=n)
        self.squares += float(((p[at] - follows[at]) ** 2).sum())
        for onset in where.onsets.tolist():
            begin = max(0, onset - HORIZON)
            self.onsets[np.unique(bins[begin:onset][where.at_risk[begin:onset]])] += 1

    def merge(self, other: Calibration) -> None:
        """Count another's steps too."""
        for name in ("steps", "claimed", "breached", "onsets", "squares"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class RunScores:
    """What one replay yields."""

    case: Case
    steps: int
    tallies: dict[Key, Tally] = field(default_factory=dict)
    calibration: dict[str, Calibration] = field(default_factory=dict)
    samples: list[Floats] = field(default_factory=list)
    unchecked_jumps: int = 0  # jumps that the batch itself, looked at before its launch, would not show

    def count(self, key: Key, alarm: NDArray[np.bool_], where: Risk, end: int, quiet: bool) -> None:
        """Walk one series with one alarm."""
        self.tallies.setdefault(key, Tally()).add(claims(alarm, where, end), where, quiet)


def score_run(rows: Rows, fit: bool) -> RunScores:
    """All of one replay with a pool that is never full. With `fit`, only samples for the fit are drawn."""
    out = RunScores(rows.case, len(rows))
    rng = np.random.default_rng(len(rows))
    middle, end = len(rows) // 2, len(rows)
    parts: dict[Half, tuple[int, int]] = {"first": (0, middle), "second": (middle, end), "start": (0, START_STEPS)}
    for capacity in CAPACITIES:
        states = states_of(rows, capacity)
        calibration = out.calibration.setdefault(capacity, Calibration())
        for limit in np.floor(LIMITS * states.demand.max()).tolist():
            breached = states.demand > limit
            where = {half: risk(breached, states.work, limit, *span) for half, span in parts.items()}
            if fit:
                out.samples.append(sample(states, where["first"], breached, limit, rng))
                continue
            quiet = not breached.any()
            for policy, (score, sign) in alarms(states, limit).items():
                for parameter in GRIDS[policy]:
                    alarm = score >= sign * parameter
                    for half, (_, stop) in parts.items():
                        if half != "start" or policy in ("static", "horizon"):
                            out.count((capacity, policy, parameter, half), alarm, where[half], stop, quiet)
                if policy == "horizon":
                    calibration.add(score, next_breach(breached), where["second"])
            found = where["second"]
            out.unchecked_jumps += int((states.demand[found.onsets[found.jumps]] <= limit).sum())
    return out


def score_tight(rows: Rows) -> RunScores:
    """A replay with a pool that is too small: a breach is a step in which requests were retracted."""
    out = RunScores(rows.case, len(rows))
    middle, end = len(rows) // 2, len(rows)
    states = states_of(rows, "kv_pool")
    limit = float(rows.case.pool_tokens)
    breached = rows.columns["retracted"] > 0
    parts: dict[Half, tuple[int, int]] = {"first": (0, middle), "second": (middle, end)}
    for policy, (score, sign) in alarms(states, limit).items():
        for parameter in GRIDS[policy]:
            for half, span in parts.items():
                where = risk(breached, states.work, limit, *span)
                out.count(
                    ("retraction", policy, parameter, half),
                    score >= sign * parameter,
                    where,
                    span[1],
                    not breached.any(),
                )
    return out
