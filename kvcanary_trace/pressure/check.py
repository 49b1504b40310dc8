"""Will this batch fit? The exact shortfall of each capacity, and what to change, before anything is launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcanary_trace.pressure.capacities import BY_ID

__all__ = ["Shortfall", "shortfalls"]


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A capacity that a batch would outgrow.

    Attributes:
        capacity: Its id.
        demand, limit: In the capacity's unit.
        consequence: What the engine does when it launches the batch all the same.
        remedy: What to set, and what to do with this batch.
    """

    capacity: str
    demand: int
    limit: int
    consequence: str
    remedy: str

    @property
    def missing(self) -> int:
        """How much the limit lacks."""
        return self.demand - self.limit

    def __str__(self) -> str:
        unit = BY_ID[self.capacity].unit
        return (
            f"{self.capacity}: {self.demand:,} of {self.limit:,}, {self.missing:,} {unit} too many: "
            f"{self.consequence}; {self.remedy}"
        )


_NOW = {
    "write_req": "or split this batch (plan_chunks)",
    "plan_block": "or split this batch (plan_chunks)",
    "write_entry": "or prefill fewer tokens at once",
    "verify": 'or launch with overflow="rotate"',
    "kv_pool": "or admit fewer requests",
    "req_to_token": "or refuse the request",
}


def shortfalls(limits: Mapping[str, int], demands: Mapping[str, int | None]) -> tuple[Shortfall, ...]:
    """Capacities that a batch outgrows, in the order in which a step meets them.

    Args:
        limits: Capacity → limit, where known.
        demands: Capacity → what the batch wants of it; None is not looked at.

    Raises:
        ValueError: a capacity is unknown or a demand negative.
    """
    found = []
    for name, demand in demands.items():
        if name not in BY_ID:
            raise ValueError(f"capacity must be one of {', '.join(BY_ID)}, got {name!r}")
        if demand is not None and demand < 0:
            raise ValueError(f"a demand on {name} must be at least 0, got {demand}")
    for name, capacity in BY_ID.items():
        demand, limit = demands.get(name), limits.get(name)
        if demand is None or limit is None or demand <= limit:
            continue
        raised = capacity.remedy_value(demand, limit, 1.0)
        lever = f"{capacity.direction} {capacity.flag} to {raised}" if capacity.flag else capacity.advice
        remedy = f"{lever} {_NOW[name]}" if name in _NOW else lever
        found.append(Shortfall(name, demand, limit, capacity.consequence, remedy))
    return tuple(found)
