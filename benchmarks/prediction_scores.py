"""What an alarm is worth: onsets, claims, lead, jumps, false claims, calibration.

Onset: demand exceeds the limit after at least `HORIZON` steps without; the horizon after an exceedance is not at risk.
Claim: "breach within the horizon". It stays open until the breach or until it expires; then it counts as false, and the
alarm may claim again. Lead: steps from claim to onset; an onset without an open claim has 0. Jump: an onset before
which running plus waiting work was below 0.9 of the limit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["HORIZON", "Claims", "Risk", "Tally", "claims", "next_breach", "risk"]

HORIZON: Final = 500
JUMP_WORK: Final = 0.9

Bools: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Risk:
    """Where a series can begin to breach.

    Attributes:
        onsets: [onsets] steps.
        jumps: [onsets] whether no alarm could have seen it.
        at_risk: [steps] whether a claim may begin there.
    """

    onsets: Ints
    jumps: Bools
    at_risk: Bools


def risk(breached: Bools, work: Floats, limit: float, begin: int, end: int) -> Risk:
    """Onsets and steps at risk from `begin` to `end`; what is before `begin` still counts as the past.

    Args:
        breached: [steps] whether the step exceeded the limit.
        work: [steps] running plus waiting work, in the limit's unit.
    """
    steps = len(breached)
    at = np.flatnonzero(breached)
    at_risk = np.zeros(steps, bool)
    at_risk[begin:end] = True
    if not len(at):
        return Risk(at, np.zeros(0, bool), at_risk)
    onsets = at[np.diff(at, prepend=at[0] - HORIZON - 1) > HORIZON]
    onsets = onsets[(onsets >= begin) & (onsets < end)]
    change = np.zeros(steps + HORIZON + 2, np.int64)
    change[at] += 1
    np.subtract.at(change, at + HORIZON + 1, 1)
    at_risk &= np.cumsum(change)[:steps] == 0
    before = np.maximum(onsets - 1, 0)
    jumps = (work[before] < JUMP_WORK * limit) | (onsets == 0)
    return Risk(onsets, jumps, at_risk)


def next_breach(breached: Bools) -> Bools:
    """[steps] whether a breach follows within the horizon."""
    total = np.concatenate(([0], np.cumsum(breached)))
    steps = np.arange(len(breached))
    later: Bools = total[np.minimum(steps + 1 + HORIZON, len(breached))] > total[np.minimum(steps + 1, len(breached))]
    return later


@dataclass(frozen=True, slots=True)
class Claims:
    """[onsets] lead of each onset, 0 where missed, and the number of false claims."""

    leads: Ints
    false: int


def claims(alarm: Bools, where: Risk, end: int) -> Claims:
    """Walk through a series. A claim that is open at `end` counts only when it has expired by then."""
    fired = np.flatnonzero(alarm & where.at_risk)
    leads = np.zeros(len(where.onsets), np.int64)
    false, at = 0, 0
    while True:
        i = int(np.searchsorted(fired, at))
        if i == len(fired):
            break
        begin = int(fired[i])
        j = int(np.searchsorted(where.onsets, begin, side="right"))
        if j < len(where.onsets) and where.onsets[j] <= begin + HORIZON:
            leads[j] = where.onsets[j] - begin
            at = int(where.onsets[j]) + 1
        else:
            at = begin + HORIZON
            false += at < end
    return Claims(leads, false)


@dataclass(slots=True)
class Tally:
    """Sums over series: what the tables show."""

    leads: list[Ints] = field(default_factory=list)
    jumps: list[Bools] = field(default_factory=list)
    false: int = 0
    at_risk: int = 0
    quiet_false: int = 0  # of runs that never breach
    quiet_at_risk: int = 0

    def add(self, found: Claims, where: Risk, quiet: bool) -> None:
        """Count one series; `quiet` when it never breaches."""
        at_risk = int(where.at_risk.sum())
        self.leads.append(found.leads)
        self.jumps.append(where.jumps)
        self.false += found.false
        self.at_risk += at_risk
        if quiet:
            self.quiet_false += found.false
            self.quiet_at_risk += at_risk

    def merge(self, other: Tally) -> None:
        """Count another tally's series too."""
        self.leads += other.leads
        self.jumps += other.jumps
        self.false += other.false
        self.at_risk += other.at_risk
        self.quiet_false += other.quiet_false
        self.quiet_at_risk += other.quiet_at_risk

    def scores(self) -> dict[str, float]:
        """Recall in %, over all onsets and over those that are not jumps; median lead; false claims per 10 000."""
        leads = np.concatenate(self.leads) if self.leads else np.zeros(0, np.int64)
        jumps = np.concatenate(self.jumps) if self.jumps else np.zeros(0, bool)
        seen = leads[~jumps] > 0
        return {
            "onsets": float(len(leads)),
            "jumps": float(jumps.sum()),
            "recall": 100 * float((leads > 0).mean()) if len(leads) else float("nan"),
            "recall_seen": 100 * float(seen.mean()) if len(seen) else float("nan"),
            "lead": float(np.median(leads)) if len(leads) else float("nan"),
            "false": 1e4 * self.false / self.at_risk if self.at_risk else float("nan"),
            "quiet_false": 1e4 * self.quiet_false / self.quiet_at_risk if self.quiet_at_risk else float("nan"),
        }
