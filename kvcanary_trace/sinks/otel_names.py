"""Every span, metric, event and attribute that the OpenTelemetry sink emits, with its UCUM unit: written down once.

Units and meanings of attributes are those of the record's columns; units of capacities are those of their demand. The
tables of `docs/opentelemetry.md`, the dashboard and the alert rules are checked against this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from kvcanary_trace import names
from kvcanary_trace.pressure.capacities import CAPACITIES, Capacity
from kvcanary_trace.schema import STEPS, VIOLATIONS

__all__ = ["ATTRIBUTES", "EVENTS", "METRICS", "SCOPE", "SPANS", "Attribute", "Metric", "attribute"]

SCOPE: Final = "kvcanary_trace"
"""Name of the tracer, the meter and the logger."""

_D: Final = names.DOMAIN

SPAN_STEP: Final = f"{_D}.{names.STEP}"
SPAN_PLAN: Final = f"{_D}.{names.PLAN}"
SPAN_VERIFY: Final = f"{_D}.{names.VERIFY}"
SPAN_WRITE: Final = f"{_D}.{names.WRITE}"

SPANS: Final = {
    SPAN_STEP: "one step() or, made afterwards, one forward that is worth keeping",
    SPAN_PLAN: "the plan launch of one group",
    SPAN_VERIFY: "the verify launches of one group, one after the other",
    SPAN_WRITE: "the write launches of one group, one after the other",
}

EVENT_VIOLATION: Final = f"{_D}.violation"
EVENT_PRESSURE: Final = f"{_D}.pressure"
EVENT_ERROR: Final = f"{_D}.error"

EVENTS: Final = {
    EVENT_VIOLATION: "a slot did not hold what it should; span event, and log record of severity ERROR",
    EVENT_PRESSURE: "a capacity's severity changed; span event, and log record of INFO, WARN or ERROR",
    EVENT_ERROR: "the forward ended with an error; span event, and log record of severity ERROR",
}


def attribute(column: str, group: str | None = None) -> str:
    """Name of the attribute that holds a column, on a step's span with the group that it speaks for."""
    return f"{_D}.{column}" if group is None else f"{_D}.{group}.{column}"


@dataclass(frozen=True, slots=True)
class Attribute:
    """One attribute. With `grouped`, a step's span has it once a group, as `kv_canary.<group>.<name>`."""

    name: str
    unit: str  # UCUM; "1" for ratios and flags, "" for names
    meaning: str
    grouped: bool = False


RUN: Final = attribute("run")
RANK: Final = attribute("rank")
KEPT: Final = attribute("kept")
COVERAGE: Final = attribute("coverage")
PHASE: Final = attribute("phase")
CAPACITY: Final = attribute("capacity")
UTILIZATION: Final = attribute("utilization")
PROBABILITY: Final = attribute("probability")
STEPS_TO_BREACH: Final = attribute("steps_to_breach")
SECONDS_TO_BREACH: Final = attribute("seconds_to_breach")
SEVERITY: Final = attribute("severity")
SEVERITY_BEFORE: Final = attribute("severity_before")
DEMAND: Final = attribute("demand")
LIMIT: Final = attribute("limit")
OUTCOME: Final = attribute("outcome")
REASON: Final = attribute("reason")
REASONS: Final = attribute("reasons")
LOSS: Final = attribute("loss")
ERROR_TYPE: Final = "error.type"

STEP_COLUMNS: Final = (
    "step",
    "forward",
    "runner",
    "kind",
    "mode",
    "graph_replay",
    "bs",
    "bs_launched",
    "kv_used",
    "kv_capacity",
    "resident_reqs",
    "resident_tokens",
    "waiting_reqs",
    "waiting_tokens",
)
"""Columns on a step's span that all groups share."""

GROUP_COLUMNS: Final = (
    "write_req_capacity",
    "plan_block_limit",
    "write_entries",
    "write_entry_capacity",
    "verify_demand",
    "verify_planned",
    "verify_capacity",
    "verify_enabled",
    "verify_checked",
    "prefix_len_max",
    "prefix_len_sum",
    "seq_len_max",
    "req_to_token_width",
    "violations",
    "violations_new",
    "violation_ring_capacity",
)
"""Columns on a step's span with their group in the name."""

PHASE_COLUMNS: Final = {
    SPAN_PLAN: (
        "bs",
        "bs_launched",
        "write_req_capacity",
        "verify_demand",
        "verify_planned",
        "verify_capacity",
        "verify_enabled",
    ),
    SPAN_VERIFY: ("verify_demand", "verify_planned", "verify_checked", "violations_new"),
    SPAN_WRITE: ("write_entries", "write_entry_capacity"),
}
"""Columns on the span of a phase; it also has the key (step, forward, runner, group)."""

VIOLATION_COLUMNS: Final = (
    "launch_tag",
    "slot",
    "position",
    "token",
    "expected_token",
    "chain_hash",
    "expected_aux",
    "reasons",
)
"""Columns on the event and the log record of a violation."""

KEY_COLUMNS: Final = ("step", "forward", "runner", "group")

ATTRIBUTES: Final = (
    Attribute(RUN, "", "run id, as in the dataset's paths"),
    Attribute(RANK, "{rank}", "rank of this process"),
    *(Attribute(attribute(name), STEPS[name].unit, STEPS[name].meaning) for name in (*STEP_COLUMNS, "group")),
    *(Attribute(attribute(name), STEPS[name].unit, STEPS[name].meaning, True) for name in GROUP_COLUMNS),
    Attribute(COVERAGE, "1", "entries checked over entries that should be verified; 1 when there were none", True),
    Attribute(KEPT, "", "why the span exists: sampled, pressure, overflow, violation or error"),
    Attribute(ERROR_TYPE, "", STEPS["error"].meaning),
    Attribute(attribute("error_message"), "", "its message"),
    *(Attribute(attribute(name), VIOLATIONS[name].unit, VIOLATIONS[name].meaning) for name in VIOLATION_COLUMNS),
    Attribute(CAPACITY, "", "id of the capacity"),
    Attribute(DEMAND, "", "demand on the capacity, in its own unit"),
    Attribute(LIMIT, "", "the capacity's limit, in its own unit"),
    Attribute(UTILIZATION, "1", "demand over limit"),
    Attribute(PROBABILITY, "1", "of a breach within 500 steps, where the capacity's forecast is calibrated"),
    Attribute(STEPS_TO_BREACH, "{step}", "until a breach, should it come within 500 steps: half of them came by then"),
    Attribute(SECONDS_TO_BREACH, "s", "the same at the recent pace of steps"),
    Attribute(SEVERITY, "", "info, warning, critical or breached"),
    Attribute(SEVERITY_BEFORE, "", "the severity before the transition"),
    Attribute(PHASE, "", "plan, verify or write"),
    Attribute(OUTCOME, "", "verified or unverified"),
    Attribute(REASON, "", "why a step went unverified: overflow or error"),
    Attribute(LOSS, "", "what was lost: a counter of the run file, or one of this sink's own"),
)

Kind = Literal["gauge", "counter", "observable_counter", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One instrument and the attributes of its series; each also has `kv_canary.rank`."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    attributes: tuple[str, ...]


def _of_capacity(capacity: Capacity) -> tuple[Metric, ...]:
    unit = STEPS[capacity.demand].unit
    by = (attribute("runner"), attribute("group")) if capacity.grouped else ()
    return (
        Metric(demand_name(capacity), "gauge", unit, f"{capacity.title}: demand of the latest row", by),
        Metric(limit_name(capacity), "gauge", unit, f"{capacity.title}: limit", by),
        Metric(headroom_name(capacity), "gauge", unit, f"{capacity.title}: limit less demand; negative past it", by),
    )


def demand_name(capacity: Capacity) -> str:
    """Its gauge of demand."""
    return f"{_D}.{capacity.id}.demand"


def limit_name(capacity: Capacity) -> str:
    """Its gauge of the limit."""
    return f"{_D}.{capacity.id}.limit"


def headroom_name(capacity: Capacity) -> str:
    """Its gauge of headroom."""
    return f"{_D}.{capacity.id}.headroom"


_SERIES = (attribute("runner"), attribute("group"))

UTILIZATION_METRIC: Final = Metric(
    f"{_D}.capacity.utilization", "gauge", "1", "demand over limit, latest row", (CAPACITY, *_SERIES)
)
PEAK_METRIC: Final = Metric(
    f"{_D}.capacity.peak_utilization",
    "gauge",
    "1",
    "highest demand over limit in the last minute",
    (CAPACITY, *_SERIES),
)
STEPS_METRIC: Final = Metric(f"{_D}.steps", "counter", "{step}", "steps recorded", (attribute("mode"),))
UNVERIFIED_METRIC: Final = Metric(
    f"{_D}.unverified_steps", "counter", "{step}", "steps of a group that went unverified", (REASON, *_SERIES)
)
ENTRIES_METRIC: Final = Metric(
    f"{_D}.entries",
    "counter",
    "{entry}",
    "entries that should be verified, by what became of them",
    (OUTCOME, *_SERIES),
)
VIOLATIONS_METRIC: Final = Metric(
    f"{_D}.violations", "counter", "{violation}", "violations found, by reasons; without detail: unrecorded", (REASONS,)
)
ERRORS_METRIC: Final = Metric(f"{_D}.errors", "counter", "{error}", "forwards that ended with an error", (ERROR_TYPE,))
STEP_DURATION_METRIC: Final = Metric(
    f"{_D}.step.duration", "histogram", "s", "duration of step() on the host", (attribute("mode"),)
)
PHASE_DURATION_METRIC: Final = Metric(
    f"{_D}.phase.duration", "histogram", "s", "duration of a phase of one group", (PHASE, attribute("group"))
)
LOSSES_METRIC: Final = Metric(
    f"{_D}.losses", "observable_counter", "{item}", "what was recorded or made and did not arrive", (LOSS,)
)

METRICS: Final = (
    UTILIZATION_METRIC,
    PEAK_METRIC,
    *(metric for capacity in CAPACITIES for metric in _of_capacity(capacity)),
    STEPS_METRIC,
    UNVERIFIED_METRIC,
    ENTRIES_METRIC,
    VIOLATIONS_METRIC,
    ERRORS_METRIC,
    STEP_DURATION_METRIC,
    PHASE_DURATION_METRIC,
    LOSSES_METRIC,
)

DURATION_BUCKETS_S: Final = tuple(
    mantissa * 10.0**exponent for exponent in range(-5, 1) for mantissa in (1.0, 2.5, 5.0)
)
"""Upper bounds of explicit buckets, where a reader cannot take exponential ones."""
