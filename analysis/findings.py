"""A finding: one thing that an operator would act on.

Every measured capacity gives one; and so do lost rows, violations, errors, unverified steps, fallbacks to eager,
missing ranks and limits that changed.

Computing returns values and shows nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvcanary_trace.pressure.severity import LADDER, Severity, rank

__all__ = ["Breach", "Finding", "Remedy", "worst_first"]


@dataclass(frozen=True, slots=True)
class Breach:
    """A breach to come; null where nothing is known.

    `probability` is that of a breach within 500 steps, from the calibrated estimator. `low` and `high` are 10 % and
    90 % of the steps until it, should it come: the estimator's, or those of a slope that says when. `used` is what it
    was told from: `queue`, running and waiting work as the engine gave it, or `rows`, running work rebuilt from demand.
    """

    steps: int | None = None
    seconds: float | None = None
    low: int | None = None
    high: int | None = None
    probability: float | None = None
    used: Literal["queue", "rows"] | None = None


@dataclass(frozen=True, slots=True)
class Remedy:
    """What to set; a flag of None says that the engine has no knob for it."""

    value: int
    flag: str | None


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that an operator would act on.

    Attributes:
        rule: Stable id, such as `verify-capacity`.
        severity: Its place on the ladder.
        capacity: Id of the capacity, None where it is not about one.
        group: Buffer group, None where it concerns all or none.
        rank: None where it concerns the run as a whole.
        steps: First and last step concerned, inclusive; None where no step is.
        peak_utilization, p99_utilization: Demand over limit; None where it is not about a capacity.
        headroom: Limit minus demand at the peak, in the capacity's unit; negative past the limit.
        breach: The breach to come, or None.
        reason: One sentence.
        remedy: What to set, or None.
        run, runner, kind: Where it was found.
    """

    rule: str
    severity: Severity
    reason: str
    run: str
    capacity: str | None = None
    group: str | None = None
    rank: int | None = None
    runner: str | None = None
    kind: str | None = None
    steps: tuple[int, int] | None = None
    peak_utilization: float | None = None
    p99_utilization: float | None = None
    headroom: int | None = None
    breach: Breach | None = None
    remedy: Remedy | None = None

    @property
    def subject(self) -> str:
        """The capacity or the rule, and of which group, runner and kind where that is not plain."""
        where = [self.group] if self.group is not None else []
        where += ["draft"] if self.runner == "draft" else []
        where += ["sweep"] if self.kind == "sweep" else []
        name = self.capacity or self.rule
        return f"{name} ({', '.join(where)})" if where else name

    def to_json(self) -> dict[str, Any]:
        """The names that scripts may rely on, in the design's order, then where it was found."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "capacity": self.capacity,
            "group": self.group,
            "rank": self.rank,
            "steps": list(self.steps) if self.steps is not None else None,
            "peak_utilization": self.peak_utilization,
            "p99_utilization": self.p99_utilization,
            "headroom": self.headroom,
            "breach": None
            if self.breach is None
            else {
                name: getattr(self.breach, name) for name in ("steps", "seconds", "low", "high", "probability", "used")
            },
            "reason": self.reason,
            "remedy": None if self.remedy is None else {"value": self.remedy.value, "flag": self.remedy.flag},
            "run": self.run,
            "runner": self.runner,
            "kind": self.kind,
        }


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Most severe first, then the fullest, then in a stable order."""
    return tuple(
        sorted(
            findings,
            key=lambda one: (
                -rank(one.severity),
                -(one.peak_utilization or 0.0),
                one.run,
                one.rank or 0,
                one.rule,
                one.group or "",
                one.runner or "",
            ),
        )
    )


def count_by_severity(findings: Iterable[Finding]) -> Mapping[Severity, int]:
    """How many there are of each, worst first."""
    counts: dict[Severity, int] = dict.fromkeys(reversed(LADDER), 0)
    for one in findings:
        counts[one.severity] += 1
    return counts


def percent(ratio: float) -> str:
    """A ratio for reading: never rounded up to 100 % when it is below, nor down to it when it is above."""
    if math.isnan(ratio):
        return "unknown"
    digits = 0 if ratio >= 0.1 else 1
    text = f"{100 * ratio:.{digits}f}"
    if (ratio < 1 and float(text) >= 100) or (ratio > 1 and float(text) <= 100):
        text = f"{100 * ratio:.2f}"
        if ratio < 1 and float(text) >= 100:
            text = "99.99"
    return f"{text} %"


def at_steps(first: int, last: int) -> str:
    """A range of steps for reading."""
    return f"at step {first:,}" if first == last else f"between steps {first:,} and {last:,}"
