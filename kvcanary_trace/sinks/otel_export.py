"""Exports in threads of our own: bounded queues, counted drops, one warning, and a deadline at the end.

The SDK's batch processors wait up to 30 s at shutdown, count nothing that an application can read, warn for each batch,
and export a parent's telemetry once more from a forked child. These do none of it, and take the same `OTEL_*` settings.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Generic, TypeVar

from opentelemetry import context as otel_context
from opentelemetry.sdk._logs import LogRecordProcessor
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.trace import SpanProcessor

from kvcanary_trace import names

__all__ = ["Exporting", "LogQueue", "MetricExports", "SpanQueue", "Troubles"]

_log: Final = logging.getLogger(names.LOGGER)
_Item = TypeVar("_Item")

_EXIT_SHARE: Final = 0.8
"""Share of the deadline after which an export that still runs is asked to give up."""

_here: Final = threading.local()
"""`_here.words` in a thread that exports for us: what the exporter wanted to log, for our one warning."""


class _Hush(logging.Filter):
    """Keeps what exporters log about our exports out of the log; the host's own exports keep theirs."""

    def filter(self, record: logging.LogRecord) -> bool:
        words: list[str] | None = getattr(_here, "words", None)
        if words is None:
            return True
        words[:] = [record.getMessage()]
        return False


_hush: Final = _Hush()


def _quieten(exporter: Any) -> None:
    modules = {
        kind.__module__ for kind in type(exporter).__mro__ if kind.__module__.startswith("opentelemetry.exporter")
    }
    for name in (*modules, "opentelemetry.exporter.otlp.common.http", "urllib3.connectionpool"):
        logging.getLogger(name).addFilter(_hush)  # adding it again changes nothing


class Troubles:
    """One warning for all exports of a session; what follows is only counted."""

    def __init__(self) -> None:
        self._warned = threading.Event()

    def report(self, what: str, reason: str) -> None:
        """Say once that telemetry does not arrive."""
        if not self._warned.is_set():
            self._warned.set()
            _log.warning(
                "OpenTelemetry: %s cannot be exported: %s; what does not fit is dropped and counted, recording goes on",
                what,
                reason,
            )


class Exporting:
    """A thread that exports. `stop_by` is called by the drain thread, the rest as subclasses say."""

    def __init__(self, what: str, exporter: Any, interval_s: float, troubles: Troubles) -> None:
        self.what = what
        self.exported = 0
        """Items that were accepted."""
        self.lost = 0
        """Items that the other side did not take, or that were left at the deadline."""
        self._exporter = exporter
        self._interval_s = interval_s
        self._troubles = troubles
        self._wake = threading.Event()
        self._stopping = False
        self._abandoned = False
        self._in_flight = 0
        self._counting = True  # until the deadline counts what is left as lost
        self._books = threading.Lock()  # an item is queued, in flight, exported or lost, and never two or none of them
        _quieten(exporter)
        self._thread = threading.Thread(target=self._run, name=f"{names.DOMAIN}-otel-{what}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def ask_to_stop(self) -> None:
        """Export what is left and end."""
        self._stopping = True
        self._wake.set()

    def stop_by(self, deadline_s: float) -> None:
        """Wait for the end of the thread until `time.monotonic()` is `deadline_s`; then leave it alone."""
        self.ask_to_stop()
        left_s = max(deadline_s - time.monotonic(), 0.0)
        self._thread.join(left_s * _EXIT_SHARE)
        if self._thread.is_alive():
            self._abandoned = True
            # Ends the exporter's own waits between retries. In a thread: it may wait for a lock that an export holds.
            threading.Thread(target=self._shut_exporter, name=f"{names.DOMAIN}-otel-shutdown", daemon=True).start()
            self._thread.join(max(deadline_s - time.monotonic(), 0.0))
        if self._thread.is_alive():
            with self._books:
                self._counting = False
                self.lost += self.left
            self._troubles.report(self.what, "the receiver did not answer before the deadline of the shutdown")

    @property
    def left(self) -> int:
        """Items not exported yet."""
        return self._in_flight

    def _run(self) -> None:
        _here.words = []
        # Whoever instruments HTTP clients must not trace our exports.
        otel_context.attach(otel_context.set_value(_SUPPRESS, True))
        while not self._stopping:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            if not self._stopping:
                self._turn(last=False)
        self._turn(last=True)
        if not self._abandoned:
            self._shut_exporter()

    def _turn(self, *, last: bool) -> None:
        raise NotImplementedError

    def _export(self, item: Any, count: int, **more: Any) -> None:
        words: list[str] = _here.words
        words.clear()
        try:
            done = self._exporter.export(item, **more)
            succeeded, reason = getattr(done, "name", "") == "SUCCESS", "".join(words)
        except Exception as error:
            succeeded, reason = False, f"{type(error).__name__}: {error}"
        with self._books:
            self._in_flight = 0
            if not self._counting:
                return
            if succeeded:
                self.exported += count
            else:
                self.lost += count
        if not succeeded:
            self._troubles.report(self.what, reason or "the exporter gave no reason")

    def _shut_exporter(self) -> None:
        try:
            _here.words = []
            self._exporter.shutdown()
        except Exception as error:
            _log.debug("shutting down the exporter of %s failed", self.what, exc_info=error)


_SUPPRESS: Final = getattr(otel_context, "_SUPPRESS_INSTRUMENTATION_KEY", "suppress_instrumentation")


class _Queue(Exporting, Generic[_Item]):
    """A bounded queue before an exporter. What does not fit is dropped and counted: `put` never waits."""

    def __init__(
        self, what: str, exporter: Any, troubles: Troubles, *, max_items: int, max_batch: int, interval_s: float
    ) -> None:
        super().__init__(what, exporter, interval_s, troubles)
        self._items: deque[_Item] = deque()
        self._max_items = max_items
        self._max_batch = min(max_batch, max_items)
        self.dropped = 0
        """Items that found the queue full."""

    def put(self, item: _Item) -> None:
        """Queue one item; any thread."""
        if len(self._items) >= self._max_items or self._stopping:
            self.dropped += 1
            return
        self._items.append(item)
        if len(self._items) >= self._max_batch and not self._wake.is_set():
            self._wake.set()

    @property
    def left(self) -> int:
        return len(self._items) + self._in_flight

    def _turn(self, *, last: bool) -> None:
        while self._items and not self._abandoned:
            with self._books:
                self._in_flight = count = min(len(self._items), self._max_batch)
                batch = [self._items.popleft() for _ in range(count)]
            self._export(batch, count)
            if self._stopping and not last:
                return


class SpanQueue(_Queue[Any], SpanProcessor):
    """Spans that ended, on their way out."""

    def on_end(self, span: Any) -> None:
        """Take a span; the thread that ends it."""
        if span.context is not None and span.context.trace_flags.sampled:
            self.put(span)

    def shutdown(self) -> None:
        """Nothing: `stop_by` does it."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Export soon."""
        self._wake.set()
        return True


class LogQueue(_Queue[Any], LogRecordProcessor):
    """Log records on their way out."""

    def on_emit(self, log_record: Any) -> None:
        """Take a record; the thread that emits it."""
        self.put(log_record)

    emit = on_emit  # the name before opentelemetry-sdk 1.35

    def shutdown(self) -> None:
        """Nothing: `stop_by` does it."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Export soon."""
        self._wake.set()
        return True


class MetricExports(Exporting):
    """Collects and exports all metrics at an interval, and once at the end."""

    def __init__(self, exporter: Any, troubles: Troubles, *, interval_s: float, timeout_s: float) -> None:
        super().__init__("metrics", exporter, interval_s, troubles)
        self._timeout_ms = timeout_s * 1e3
        self.reader = _Reader(exporter, self)

    def _turn(self, *, last: bool) -> None:
        try:
            self.reader.collect(timeout_millis=self._timeout_ms)
        except Exception as error:
            self.lost += 1
            self._troubles.report(self.what, f"{type(error).__name__}: {error}")

    def take(self, data: Any) -> None:
        """Export one collection; the thread that collects."""
        if data is not None and getattr(_here, "words", None) is not None:
            self._in_flight = 1
            self._export(data, 1, timeout_millis=self._timeout_ms)

    def wake(self) -> None:
        """Export soon."""
        self._wake.set()


class _Reader(MetricReader):
    """The SDK's side of `MetricExports`."""

    def __init__(self, exporter: Any, exports: MetricExports) -> None:
        super().__init__(
            preferred_temporality=getattr(exporter, "_preferred_temporality", None),
            preferred_aggregation=getattr(exporter, "_preferred_aggregation", None),
        )
        self._exports = exports

    def _receive_metrics(self, metrics_data: Any, timeout_millis: float = 10_000, **_: Any) -> None:
        self._exports.take(metrics_data)

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Export soon."""
        self._exports.wake()
        return True

    def shutdown(self, timeout_millis: float = 30_000, **_: Any) -> None:
        """Nothing: `stop_by` does it."""


def number_of(variable: str, default: float, low: float, high: float = 1e9) -> float:
    """A number from the environment, or `default` where it is missing or makes no sense."""
    try:
        value = float(os.environ.get(variable, ""))
    except ValueError:
        return default
    return value if low <= value <= high else default


def stop_all(exports: Sequence[Exporting], shutdown_s: float) -> None:
    """End all of them at once, within `shutdown_s` over all."""
    deadline_s = time.monotonic() + shutdown_s
    for one in exports:
        one.ask_to_stop()
    for one in exports:
        one.stop_by(deadline_s)
