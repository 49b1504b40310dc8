"""The capacities that can break, written down once: demand, limit, what happens past it, and which knob moves it.

Column names are those of `kvcanary_trace.schema.STEPS`; a name that the record does not have fails at import.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from kvcanary_trace.schema import STEPS, ErrorCode

Direction: TypeAlias = Literal["raise", "lower"]

__all__ = ["BY_ID", "CAPACITIES", "Capacity", "capacity_of_error"]


@dataclass(frozen=True, slots=True)
class Capacity:
    """One capacity of the canary or of the engine under it."""

    id: str
    rule: str  # stable id of its findings
    title: str
    demand: str  # column of `steps`
    limit: str  # column of `steps`
    consequence: str  # what happens when demand exceeds the limit
    levers: tuple[str, ...]  # knobs of the engine that move it; empty: there is none
    direction: Direction  # what to do with the first flag
    advice: str  # the remedy in words, also where no flag exists
    granule: int  # a recommended value is a multiple of this
    grouped: bool = True  # counted for each buffer group; else once for the engine
    trended: bool = True  # a slope says something about its future
    errors: tuple[ErrorCode, ...] = ()  # codes that mean that it broke

    def __post_init__(self) -> None:
        for name in (self.demand, self.limit):
            if name not in {column.name for column in STEPS.columns}:
                raise ValueError(f"capacity {self.id}: the record has no column {name!r}")

    @property
    def unit(self) -> str:
        """What its demand counts: request, token, entry or violation."""
        return STEPS[self.demand].unit.strip("{}")

    @property
    def flag(self) -> str | None:
        """The knob to turn first, or None where the engine has none."""
        return self.levers[0] if self.levers else None

    def remedy_value(self, need: float, limit: float, target_utilization: float) -> int:
        """The value to give the knob, so that `need` fills at most `target_utilization` of the limit.

        Where the limit itself cannot move (`direction` is lower), it is the limit: demand has to stay within it.
        """
        if self.direction == "lower":
            return int(limit)
        return math.ceil(max(need, 1.0) / target_utilization / self.granule) * self.granule


CAPACITIES: Final = (
    Capacity(
        "write_req",
        rule="write-req-capacity",
        title="requests a write plan holds",
        demand="bs",
        limit="write_req_capacity",
        consequence="the engine raises RuntimeError before the launch, a launcher ValueError",
        levers=("--cuda-graph-max-bs-decode", "--max-running-requests"),
        direction="raise",
        advice="the capacity is the larger of the largest graph batch and the request pool: raise either",
        granule=8,
        errors=(ErrorCode.BS_EXCEEDS_WRITE_REQ_CAPACITY,),
    ),
    Capacity(
        "plan_block",
        rule="plan-block-limit",
        title="rows of one plan launch",
        demand="bs_launched",
        limit="plan_block_limit",
        consequence="the first launch raises ValueError",
        levers=("--max-running-requests",),
        direction="lower",
        advice="the limit is fixed: lower the request pool, or launch through plan_chunks",
        granule=1,
        trended=False,
        errors=(ErrorCode.BS_EXCEEDS_PLAN_BLOCK,),
    ),
    Capacity(
        "write_entry",
        rule="write-entry-capacity",
        title="tokens written in one forward",
        demand="write_entries",
        limit="write_entry_capacity",
        consequence="the engine raises RuntimeError",
        levers=("--chunked-prefill-size", "--max-prefill-tokens"),
        direction="lower",
        advice="let one forward write fewer tokens",
        granule=1,
        trended=False,  # step tokens jump from half to over in one step
        errors=(ErrorCode.WRITE_ENTRIES_EXCEED_CAPACITY,),
    ),
    Capacity(
        "verify",
        rule="verify-capacity",
        title="entries verified in one step",
        demand="verify_demand",
        limit="verify_capacity",
        consequence="the step goes unverified",
        levers=(),
        direction="raise",
        advice='no flag sets it, it follows the KV pool; our launchers can check a part (overflow="rotate")',
        granule=1024,
    ),
    Capacity(
        "violation_ring",
        rule="violation-ring-capacity",
        title="violations kept in detail",
        demand="violations",
        limit="violation_ring_capacity",
        consequence="later violations are counted, their detail is lost",
        levers=("SGLANG_KV_CANARY_RING_CAPACITY",),
        direction="raise",
        advice="repair the cause of the violations first; a larger ring keeps more of them",
        granule=1024,
    ),
    Capacity(
        "req_to_token",
        rule="req-to-token-width",
        title="tokens of one request",
        demand="seq_len_max",
        limit="req_to_token_width",
        consequence="reads and writes leave the row of req_to_token",
        levers=("--context-length",),
        direction="raise",
        advice="rows are as wide as the context length",
        granule=1024,
    ),
    Capacity(
        "kv_pool",
        rule="kv-pool-capacity",
        title="KV slots held",
        demand="kv_used",
        limit="kv_capacity",
        consequence="running requests are retracted, or queued ones wait",
        levers=("--max-total-tokens", "--mem-fraction-static"),
        direction="raise",
        advice="a larger pool, or fewer requests at once",
        granule=1024,
        grouped=False,
    ),
)
"""Every capacity of the design, in the order in which a step meets them."""

BY_ID: Final = {capacity.id: capacity for capacity in CAPACITIES}


def capacity_of_error(code: str) -> Capacity | None:
    """The capacity whose breach an error code of a row tells, or None for other errors."""
    return next((one for one in CAPACITIES if any(error.code == code for error in one.errors)), None)
