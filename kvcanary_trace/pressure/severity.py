"""The severity ladder: info, warning from 0.8 utilisation, critical before a breach, breached after it.

High is not the same as rising: a plateau at 0.96 is a warning, because nothing says that it will break.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

Severity: TypeAlias = Literal["info", "warning", "critical", "breached"]

LADDER: Final[tuple[Severity, ...]] = ("info", "warning", "critical", "breached")
"""Mildest first."""

WARNING_UTILIZATION: Final = 0.8
"""From here on a capacity is worth a look, whatever the forecast says."""

HORIZON_STEPS: Final = 500
"""How far ahead a breach is announced."""

__all__ = ["HORIZON_STEPS", "LADDER", "WARNING_UTILIZATION", "Severity", "classify", "parse", "rank"]


def rank(severity: Severity) -> int:
    """Place on the ladder, from 0."""
    return LADDER.index(severity)


def parse(name: str) -> Severity:
    """The severity of that name.

    Raises:
        ValueError: `name` is not on the ladder.
    """
    for severity in LADDER:
        if severity == name:
            return severity
    raise ValueError(f"severity must be one of {', '.join(LADDER)}, got {name!r}")


def classify(peak_utilization: float, *, breached: bool = False, breach_forecast: bool = False) -> Severity:
    """The severity of one capacity.

    Args:
        peak_utilization: Demand over limit, at its highest; NaN where nobody measured it.
        breached: Whether demand has exceeded the limit.
        breach_forecast: Whether a breach is expected within `HORIZON_STEPS`.
    """
    if breached or peak_utilization > 1:
        return "breached"
    if breach_forecast:
        return "critical"
    return "warning" if peak_utilization >= WARNING_UTILIZATION else "info"
