"""Spans of drained steps, made in the drain thread with explicit times: the sampled ones, and all that matter.

A sampled step's span was current while it ran and gets its facts here. A step under pressure, with an overflow, an
error or a violation gets a span of its own afterwards, linked to the context that it ran in.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags, set_span_in_context

from kvcanary_trace.monitor import Transition

from . import otel_names as n
from .otel_host import HostSpans, Opened
from .otel_logs import Found, Records
from .otel_rows import Flags, Ints, StepRows

__all__ = ["Kept", "SpanMaker"]

MAX_KEPT_PER_S: Final = 200
"""Steps that get a span afterwards, in the long run; a span with its children costs about 100 µs."""
MAX_KEPT_AT_ONCE: Final = 500
MAX_EVENTS: Final = 64
"""Violations told one by one on a span; the count is an attribute."""
_MAX_AGE_FLUSHES: Final = 8

_PRIORITIES: Final = ("error", "violation", "overflow", "pressure")
_EMPTY: Final = Context()


@dataclass(slots=True)
class Kept:
    """What became of a batch: ids and contexts of the kept spans, by row."""

    ids: dict[int, tuple[str, str]] = field(default_factory=dict)
    contexts: dict[int, Context] = field(default_factory=dict)


@dataclass(slots=True)
class _Unit:
    """One span to be: its rows, and why it is kept."""

    why: str
    rows: list[int]
    opened: Opened | None = None


class SpanMaker:
    """Drain thread only."""

    def __init__(self, tracer: Any, host: HostSpans, records: Records, run: str, rank: int) -> None:
        self._tracer = tracer
        self._host = host
        self._records = records
        self._common = {n.RUN: run, n.RANK: rank}
        self._allowance = float(MAX_KEPT_AT_ONCE)
        self._refilled_s = time.monotonic()
        self.refused = 0
        """Spans that the host's own sampler did not want."""
        self.thinned = 0
        """Steps worth a span that got none: there were too many at once."""

    def make(self, rows: StepRows, pressed: Flags, transitions: Sequence[Transition]) -> Kept:
        """Make the spans of new rows.

        Args:
            rows: New rows.
            pressed: [n] rows in which a capacity is at the warning threshold or above.
            transitions: Changes of severity in these rows.
        """
        kept = Kept()
        units = self._choose(rows, pressed, transitions)
        changes: dict[int, list[Transition]] = {}
        for transition in transitions:
            changes.setdefault(transition.row, []).append(transition)
        wanted = np.array(sorted({row for unit in units for row in unit.rows}), dtype=np.int64)
        facts = dict(zip(wanted.tolist(), rows.dicts(wanted) if len(wanted) else [], strict=True))
        for unit in units:
            span = self._make_unit(unit, [facts[row] for row in unit.rows], [changes.pop(row, []) for row in unit.rows])
            if span is None:
                continue
            context = span.get_span_context()
            ids = (f"{context.trace_id:032x}", f"{context.span_id:016x}")
            inside = set_span_in_context(span, _EMPTY)
            for row in unit.rows:
                kept.ids[row], kept.contexts[row] = ids, inside
        self._host.forget_old(_MAX_AGE_FLUSHES)
        return kept

    # --- which ------------------------------------------------------------------------------------------------------

    def _choose(self, rows: StepRows, pressed: Flags, transitions: Sequence[Transition]) -> list[_Unit]:
        num = len(rows)
        codes, ids = rows.names("span_id")
        opened = [self._host.open.get(int(text, 16)) for text in ids]
        sampled = np.array([one is not None for one in opened] + [False])[codes]  # code -1 is the last
        units: dict[int, _Unit] = {}
        for row in np.flatnonzero(sampled).tolist():
            unit = units.setdefault(int(codes[row]), _Unit("sampled", [], opened[codes[row]]))
            unit.rows.append(row)
        for code in units:
            self._host.open.pop(int(ids[code], 16), None)

        changed = np.zeros(num, dtype=np.bool_)
        changed[[transition.row for transition in transitions]] = True
        marks = (
            rows.has("error"),
            rows.ints("violations_new") > 0,
            rows.ints("verify_enabled") == 0,
            pressed | changed,
        )
        priority = np.select(list(marks), [0, 1, 2, 3], default=len(marks))
        forward = rows.forwards()
        best = np.full(int(forward.max()) + 1 if num else 0, len(marks))
        np.minimum.at(best, forward, priority)
        best[forward[sampled]] = len(marks)
        wanted = np.flatnonzero(best < len(marks))
        # The worst first; of the same kind, where something changed, then in the order in which they came.
        calm = np.ones(len(best), dtype=np.bool_)
        calm[forward[changed]] = False
        wanted = wanted[np.lexsort((wanted, calm[wanted], best[wanted]))]
        allowed = self._allow(len(wanted))
        self.thinned += len(wanted) - allowed
        return [*units.values(), *self._gather(forward, best, wanted[:allowed])]

    def _gather(self, forward: Ints, best: Ints, wanted: Ints) -> list[_Unit]:
        order = np.argsort(forward, kind="stable")
        begin = np.searchsorted(forward[order], wanted)
        end = np.searchsorted(forward[order], wanted, side="right")
        return [
            _Unit(_PRIORITIES[int(best[which])], order[first:last].tolist())
            for which, first, last in zip(wanted.tolist(), begin.tolist(), end.tolist(), strict=True)
        ]

    def _allow(self, number: int) -> int:
        now_s = time.monotonic()
        self._allowance = min(self._allowance + (now_s - self._refilled_s) * MAX_KEPT_PER_S, float(MAX_KEPT_AT_ONCE))
        self._refilled_s = now_s
        allowed = min(number, int(self._allowance))
        self._allowance -= allowed
        return allowed

    # --- how --------------------------------------------------------------------------------------------------------

    def _make_unit(self, unit: _Unit, facts: list[dict[str, Any]], changes: list[list[Transition]]) -> Any | None:
        first = facts[0]
        begins = [row["time"] - (row["plan_ns"] or 0) for row in facts]
        if unit.opened is None:
            start_ns = min(begins)
            end_ns = None if first["host_ns"] is None else start_ns + first["host_ns"]
            span = self._start(unit, first, start_ns)
            if span is None:
                return None
        else:
            span, start_ns = unit.opened.span, unit.opened.start_ns
            end_ns = unit.opened.end_ns
        span.set_attributes(step_attributes(facts))
        inside = set_span_in_context(span, _EMPTY)
        ends = [
            self._make_phases(row, max(begin_ns, start_ns), end_ns, inside)
            for row, begin_ns in zip(facts, begins, strict=True)
        ]
        for row, some in zip(facts, changes, strict=True):
            self._tell(span, inside, row, some)
        span.end(end_ns if end_ns is not None else max(ends))
        return span

    def _start(self, unit: _Unit, first: dict[str, Any], start_ns: int) -> Any | None:
        links = []
        if first["trace_id"] is not None and first["span_id"] is not None:
            # The span that was current around the step, or its own that ended before this row came.
            ran_in = SpanContext(
                int(first["trace_id"], 16), int(first["span_id"], 16), False, TraceFlags(TraceFlags.SAMPLED)
            )
            links.append(Link(ran_in))
        attributes = {**self._common, n.KEPT: unit.why}
        span = self._tracer.start_span(
            n.SPAN_STEP, context=_EMPTY, attributes=attributes, links=links, start_time=start_ns
        )
        if not span.is_recording():
            self.refused += 1
            return None
        return span

    def _make_phases(self, row: dict[str, Any], begin_ns: int, end_ns: int | None, inside: Context) -> int:
        """The children of one row, one after the other; returns when the last one ends."""
        for name, column in _PHASES:
            spent_ns = row[column]
            if spent_ns is None:
                continue
            done_ns = begin_ns + spent_ns
            if end_ns is not None:
                begin_ns, done_ns = min(begin_ns, end_ns), min(done_ns, end_ns)
            span = self._tracer.start_span(
                name, context=inside, attributes=phase_attributes(name, row), start_time=begin_ns
            )
            span.end(done_ns)
            begin_ns = done_ns
        return begin_ns

    def _tell(self, span: Any, inside: Context, row: dict[str, Any], changes: list[Transition]) -> None:
        """Events of one row, on the span and as log records."""
        found: list[Found] = self._records.errors(row)
        if found:
            span.set_attribute(n.ERROR_TYPE, row["error"])
            span.set_status(Status(StatusCode.ERROR, row["error_message"] or row["error"]))
        found += self._records.transitions(row["time"], row, changes)
        found += self._records.take_violations(row)
        for one in found[:MAX_EVENTS]:
            span.add_event(one.event, one.attributes, one.time_ns)
        for one in found:
            self._records.emit(one, inside)


_PHASES: Final = ((n.SPAN_PLAN, "plan_ns"), (n.SPAN_VERIFY, "verify_ns"), (n.SPAN_WRITE, "write_ns"))


def coverage(row: dict[str, Any]) -> float | None:
    """Share of the demanded entries that was verified; None where nobody knows."""
    demand, checked = row["verify_demand"], row["verify_checked"]
    if row["verify_enabled"] is False and checked is None:
        checked = 0
    if demand is None or checked is None:
        return None
    return 1.0 if demand == 0 else min(checked / demand, 1.0)


def step_attributes(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """What a step's span says; of several forwards, the first one's for each group."""
    attributes: dict[str, Any] = {}
    for row in facts:
        for name in n.STEP_COLUMNS:
            if row[name] is not None:
                attributes.setdefault(n.attribute(name), row[name])
        group = row["group"]
        if group is None:
            continue
        for name in n.GROUP_COLUMNS:
            if row[name] is not None:
                attributes.setdefault(n.attribute(name, group), row[name])
        covered = coverage(row)
        if covered is not None:
            attributes.setdefault(n.attribute("coverage", group), covered)
    return attributes


def phase_attributes(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """What a phase's span says."""
    columns = (*n.KEY_COLUMNS, *n.PHASE_COLUMNS[name])
    attributes = {n.attribute(column): row[column] for column in columns if row[column] is not None}
    covered = coverage(row) if name == n.SPAN_VERIFY else None
    if covered is not None:
        attributes[n.COVERAGE] = covered
    return attributes
