"""OpenTelemetry: metrics of all rows, spans of the steps that matter, log records of what went wrong.

Everything is made in the drain thread and exported in threads of our own: an engine never waits for a collector.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from kvcanary_trace import names
from kvcanary_trace.arrow import strings

if TYPE_CHECKING:
    from kvcanary_trace.monitor import Seen
    from kvcanary_trace.runfile import Run

    from .otel_host import HostSpans

__all__ = ["OtelSink", "OtelStats"]

_log: Final = logging.getLogger(names.LOGGER)

DEFAULT_SHUTDOWN_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class OtelStats:
    """What was exported and what was not. Spans, log records and metrics count only our own exports, not a host's."""

    spans: int = 0
    log_records: int = 0
    metrics: int = 0
    """Collections, each of all metrics."""
    spans_dropped: int = 0
    """Their queue was full, the other side did not take them, or the shutdown's deadline passed."""
    log_records_dropped: int = 0
    metrics_dropped: int = 0
    spans_refused: int = 0
    """Steps that the host's own sampler did not want."""
    steps_thinned: int = 0
    """Steps worth a span that got none: there were too many at once."""
    durations_skipped: int = 0
    """Measurements left out of histograms: there were too many at once."""


class OtelSink:
    """A sink for `trace()`, which opens one by itself where OpenTelemetry is configured.

    Uses the providers that the host set, and never replaces them; where there are none, private ones export by OTLP as
    the standard `OTEL_*` variables say. `open` never raises: what is missing is one sentence in the log.
    """

    def __init__(self, *, everything: bool = True, shutdown_s: float = DEFAULT_SHUTDOWN_S) -> None:
        """Prepare a sink.

        Args:
            everything: Whether signals without any configuration go to the default endpoint.
            shutdown_s: Seconds that `close` may take.
        """
        self.shutdown_s = shutdown_s
        self.host_spans: HostSpans | None = None
        """For `step()`: spans that are current while a step runs."""
        self._everything = everything
        self._providers: Any = None
        self._run: Run | None = None
        self._metrics: Any = None
        self._spans: Any = None
        self._records: Any = None
        self._annotated = False

    def open(self, run: Run) -> None:
        """Find or make the providers and start the export threads; without OpenTelemetry, do nothing from here on."""
        from .otel_setup import NEEDED

        self._run = run
        try:
            self._open(run)
        except ImportError as error:
            _log.warning("OpenTelemetry is off, tracing goes on without it: %s; %s", error, NEEDED)
            self._turn_off()
        except Exception as error:  # half-installed packages and exporters raise all sorts
            _log.warning("OpenTelemetry is off, tracing goes on without it: %s: %s", type(error).__name__, error)
            self._turn_off()

    def _open(self, run: Run) -> None:
        from .otel_export import Troubles
        from .otel_host import HostSpans, sampling_of
        from .otel_logs import Records
        from .otel_metrics import Metrics
        from .otel_setup import open_providers
        from .otel_spans import SpanMaker

        providers = self._providers = open_providers(run, troubles=Troubles(), everything=self._everything)
        self._records = Records(providers.logger, run.run, run.rank)
        if providers.meter_provider is not None:
            own = "metrics" in providers.exports or bool(providers.servers)
            self._metrics = Metrics(providers.meter_provider, run.rank, self._losses, own=own)
        if providers.tracer is not None:
            sampling = sampling_of(own=providers.own_tracer)
            self.host_spans = HostSpans(providers.tracer, sampling, run.run, run.rank)
            self._spans = SpanMaker(providers.tracer, self.host_spans, self._records, run.run, run.rank)
        for exports in providers.exports.values():
            exports.start()

    def _turn_off(self) -> None:
        self.host_spans = self._metrics = self._spans = self._records = None

    @property
    def stats(self) -> OtelStats:
        """What was exported so far, and what was not."""
        counts: dict[str, int] = {}
        for what, exports in (self._providers.exports if self._providers is not None else {}).items():
            counts[what] = exports.exported
            counts[f"{what}_dropped"] = exports.lost + getattr(exports, "dropped", 0)
        if self._spans is not None:
            counts["spans_refused"] = self._spans.refused
            counts["steps_thinned"] = self._spans.thinned
        if self._metrics is not None:
            counts["durations_skipped"] = self._metrics.durations_skipped
        if self._records is not None:
            counts["log_records_dropped"] = counts.get("log_records_dropped", 0) + self._records.dropped
        return OtelStats(**counts)

    def annotate(self, batches: dict[str, pa.RecordBatch], seen: Seen | None = None) -> None:
        """Make spans, metrics and log records of new rows, and put ids of kept spans into them.

        Called on the drain thread before any sink is given the batches, which may be replaced in the dict.

        Args:
            batches: New rows.
            seen: What the monitor made of them; None where it is off: nothing is told of pressure then.
        """
        self._annotated = True
        if self._records is None:
            return
        from .otel_rows import StepRows

        violations = batches.get("violations")
        self._records.note_violations(violations)
        rows = seen.rows if seen is not None else StepRows(batches["steps"]) if "steps" in batches else None
        contexts: Mapping[int, Any] = {}
        if rows is not None and len(rows):
            pressed = seen.pressed if seen is not None else rows.ints("step") < 0
            transitions = seen.transitions if seen is not None else []
            if self._spans is not None:
                kept = self._spans.make(rows, pressed, transitions)
                contexts = kept.contexts
                if kept.ids:
                    batches["steps"] = with_ids(rows.batch, kept.ids)
            else:
                self._tell_without_spans(rows, transitions)
        self._records.tell_old()
        if self._metrics is not None:
            self._metrics.take(rows, violations, contexts)

    def _tell_without_spans(self, rows: Any, transitions: list[Any]) -> None:
        import numpy as np

        times, steps = rows.ints("time"), rows.ints("step")
        for change in transitions:
            row = {"step": int(steps[change.row])}
            for found in self._records.transitions(int(times[change.row]), row, [change]):
                self._records.emit(found, None)
        failed = rows.first_rows()
        failed = failed[rows.has("error")[failed]]
        for row in rows.dicts(np.asarray(failed)) if len(failed) else ():
            for found in self._records.errors(row):
                self._records.emit(found, None)

    def write(self, batches: Mapping[str, pa.RecordBatch]) -> None:
        """Take new rows, unless `annotate` already did."""
        if not self._annotated:
            self.annotate(dict(batches))
        self._annotated = False

    def close(self) -> None:
        """Export what is left within `shutdown_s`, and let go of the host's providers."""
        if self._records is not None:
            self._records.tell_old(last=True)
        if self.host_spans is not None:
            self.host_spans.close()
        if self._providers is not None:
            if self._providers.exports:
                from .otel_export import stop_all

                stop_all(list(self._providers.exports.values()), self.shutdown_s)
            for server in self._providers.servers:
                server.shutdown()
                server.server_close()
        if self._metrics is not None:
            self._metrics.close()

    def _losses(self) -> dict[str, int]:
        """Counters of the run file and of this sink; any thread."""
        assert self._run is not None
        counters: Mapping[str, Any] = self._run.counters().get("losses", {})
        told = {name: value for name, value in counters.items() if name in _RUN_LOSSES and isinstance(value, int)}
        stats = self.stats
        told.update({name: getattr(stats, name) for name in _OWN_LOSSES})
        return told


_RUN_LOSSES: Final = frozenset(
    {
        "ring_overwritten",
        "host_ring_overwritten",
        "rows_dropped",
        "violations_lost",
        "halves_unmatched",
        "sink_errors",
        "observer_errors",
    }
)
_OWN_LOSSES: Final = (
    "spans_dropped",
    "log_records_dropped",
    "metrics_dropped",
    "spans_refused",
    "steps_thinned",
    "durations_skipped",
)


def with_ids(batch: pa.RecordBatch, ids: Mapping[int, tuple[str, str]]) -> pa.RecordBatch:
    """The batch with trace and span ids in some of its rows."""
    columns = {name: batch.column(name) for name in batch.schema.names}
    for at, name in enumerate(("trace_id", "span_id")):
        values = columns[name].to_pylist()
        for row, pair in ids.items():
            values[row] = pair[at]
        columns[name] = strings(values)
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=batch.schema)
