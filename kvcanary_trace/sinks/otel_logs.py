"""What is told as span events and as log records: violations, changes of severity, errors. Drain thread only."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from kvcanary_trace import names
from kvcanary_trace.monitor import Transition

from . import otel_names as n

__all__ = ["Found", "Records"]

_log: Final = logging.getLogger(names.LOGGER)

_MAX_PENDING: Final = 4096
_MAX_AGE_FLUSHES: Final = 16
_Key = tuple[int, int, str, str]


@dataclass(frozen=True, slots=True)
class Found:
    """One thing worth telling."""

    event: str
    severity: str  # INFO, WARN or ERROR
    time_ns: int
    body: str
    attributes: dict[str, Any]


class Records:
    """Makes them, keeps violations until the row of their step comes, and emits log records."""

    def __init__(self, logger: Any | None, run: str, rank: int) -> None:
        """Emit to `logger`, or only make them where it is None."""
        self._logger = logger
        self._common = {n.RUN: run, n.RANK: rank}
        self._pending: OrderedDict[_Key, tuple[int, list[dict[str, Any]]]] = OrderedDict()
        self._num_pending = 0
        self._flush = 0
        self.dropped = 0
        """Violations that waited in vain for room."""

    def note_violations(self, batch: pa.RecordBatch | None) -> None:
        """Keep new violations until their step's row comes, in this flush or a later one."""
        self._flush += 1
        if batch is None:
            return
        room = max(_MAX_PENDING - self._num_pending, 0)
        self.dropped += max(batch.num_rows - room, 0)
        taken = batch.slice(0, room)
        columns = {name: taken.column(name) for name in taken.schema.names}
        columns["time"] = columns["time"].cast(pa.int64())
        lists = {name: column.to_pylist() for name, column in columns.items()}
        for values in zip(*lists.values(), strict=True):
            row = dict(zip(lists, values, strict=True))
            self._pending.setdefault(_key(row), (self._flush, []))[1].append(row)
            self._num_pending += 1

    def take_violations(self, row: dict[str, Any]) -> list[Found]:
        """The violations that the step of this row found."""
        if not self._pending:
            return []
        _, rows = self._pending.pop(_key(row), (0, []))
        self._num_pending -= len(rows)
        return [self._violation(one) for one in rows]

    def tell_old(self, *, last: bool = False) -> None:
        """Emit violations whose step got no span."""
        while self._pending:
            key, (noted, rows) = next(iter(self._pending.items()))
            if not last and self._flush - noted < _MAX_AGE_FLUSHES:
                return
            del self._pending[key]
            self._num_pending -= len(rows)
            for row in rows:
                self.emit(self._violation(row), None)

    def _violation(self, row: dict[str, Any]) -> Found:
        columns = (*n.KEY_COLUMNS, *n.VIOLATION_COLUMNS)
        attributes = {n.attribute(name): row[name] for name in columns if row[name] is not None}
        body = f"{row['launch_tag']} found {row['reasons']} at slot {row['slot']}, position {row['position']}"
        return Found(n.EVENT_VIOLATION, "ERROR", row["time"], body, {**self._common, **attributes})

    def errors(self, row: dict[str, Any]) -> list[Found]:
        """The error of a row, if it has one."""
        if row["error"] is None:
            return []
        attributes = {n.attribute(name): row[name] for name in n.KEY_COLUMNS if row[name] is not None}
        attributes[n.ERROR_TYPE] = row["error"]
        if row["error_message"] is not None:
            attributes[n.attribute("error_message")] = row["error_message"]
        body = row["error_message"] or row["error"]
        return [Found(n.EVENT_ERROR, "ERROR", row["time"], body, {**self._common, **attributes})]

    def transitions(self, time_ns: int, row: dict[str, Any], changes: Sequence[Transition]) -> list[Found]:
        """Changes of severity at a row."""
        return [self._transition(time_ns, row["step"], change) for change in changes]

    def _transition(self, time_ns: int, step: int, change: Transition) -> Found:
        attributes = {
            n.attribute("step"): step,
            n.CAPACITY: change.capacity.id,
            n.SEVERITY_BEFORE: change.before,
            n.SEVERITY: change.after,
            n.DEMAND: change.demand,
            n.LIMIT: change.limit,
            n.UTILIZATION: change.utilization,
        }
        for name, value in (("runner", change.runner), ("group", change.group)):
            if value is not None:
                attributes[n.attribute(name)] = value
        if change.probability is not None:
            attributes[n.PROBABILITY] = change.probability
        if change.after == "critical" and change.steps is not None:
            attributes[n.STEPS_TO_BREACH] = change.steps
            if change.seconds is not None:
                attributes[n.SECONDS_TO_BREACH] = change.seconds
        severity = {"info": "INFO", "warning": "WARN", "critical": "WARN"}.get(change.after, "ERROR")
        return Found(n.EVENT_PRESSURE, severity, time_ns, str(change), {**self._common, **attributes})

    def emit(self, found: Found, context: Any | None) -> None:
        """One log record, in the context of a span where there is one."""
        if self._logger is None:
            return
        try:
            from opentelemetry._logs import LogRecord, SeverityNumber
            from opentelemetry.context import Context

            self._logger.emit(
                LogRecord(
                    timestamp=found.time_ns,
                    context=context if context is not None else Context(),
                    severity_number=SeverityNumber[found.severity],
                    severity_text=found.severity,
                    body=found.body,
                    attributes=found.attributes,
                    event_name=found.event,
                )
            )
        except (ImportError, TypeError, AttributeError) as error:  # the API of logs is younger than the others
            self._logger = None
            _log.warning("OpenTelemetry logs are off: %s; pip install 'opentelemetry-sdk>=1.37' for them", error)


def _key(row: dict[str, Any]) -> _Key:
    return row["step"], row["forward"], row["runner"], row["group"]
