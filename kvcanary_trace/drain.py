"""The drain thread: reads all rings, joins the halves, makes Arrow batches and hands them to the sinks.

Everything slow happens here. A sink that fails is reported once and offered the same rows again; its backlog is
bounded, and what falls out of it is counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
import pyarrow as pa

from kvcanary_trace.kernels.layout import ProbeWord

from . import names
from .columns import requests_batch, steps_batch, violations_batch
from .join import Joiner
from .lane import Lane
from .monitor import Seen
from .ring import ROW_WORDS, Words
from .sinks import Sink
from .sinks.otel_rows import StepRows

if TYPE_CHECKING:
    from .session import Session

_log: Final = logging.getLogger(names.LOGGER)

RING_NUMBER_BIT: Final = 40
"""The `seq` column has the ring's number from this bit on, so that numbers of several threads stay apart."""

_CORE_SHARE: Final = 0.05
"""Of a core, that frequent turns may take: the interpreter lock is the engine's first."""

_BACKLOG_ROWS: Final = 262_144
_BACKLOG_BATCHES: Final = 1024

_Item = TypeVar("_Item")
Batches = Mapping[str, pa.RecordBatch]


class _Outlet:
    """One sink and what it has not taken yet. Drain thread only."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.backlog: deque[dict[str, pa.RecordBatch]] = deque()
        self.errors = 0
        self.rows_dropped = 0
        self.failing = False

    def offer(self, batches: dict[str, pa.RecordBatch]) -> None:
        """Give everything to the sink, oldest first; keep what it does not take."""
        self.backlog.append(batches)
        try:
            while self.backlog:
                self.sink.write(self.backlog[0])
                self.backlog.popleft()
            if self.failing:
                _log.warning("%s takes rows again; %d rows were dropped", self.name, self.rows_dropped)
            self.failing = False
        except Exception as error:
            self.report(error, "its rows are kept for a while and offered again")
            self._trim()

    def annotate(self, batches: dict[str, pa.RecordBatch], seen: Seen | None) -> None:
        """Let a sink that makes spans put their ids into new rows, before any sink is given them."""
        annotate = getattr(self.sink, "annotate", None)
        if annotate is not None:
            try:
                annotate(batches, seen)
            except Exception as error:
                self.report(error, "what it would have made of these rows is lost")

    def report(self, error: BaseException, consequence: str) -> None:
        """Count an error; put it into the log unless the one before is already there."""
        self.errors += 1
        if not self.failing:
            _log.warning("%s failed: %s: %s; %s", self.name, type(error).__name__, error, consequence)
        self.failing = True

    @property
    def name(self) -> str:
        """What the log calls the sink."""
        return type(self.sink).__name__

    def _trim(self) -> None:
        if self.backlog and not self.backlog[-1]:
            self.backlog.pop()  # a tick without rows is not worth keeping
        while len(self.backlog) > _BACKLOG_BATCHES or _num_rows(self.backlog) > _BACKLOG_ROWS:
            self.rows_dropped += _num_rows([self.backlog.popleft()])

    def close(self) -> None:
        """Close the sink; what it never took is dropped."""
        self.rows_dropped += _num_rows(self.backlog)
        try:
            self.sink.close()
        except Exception as error:
            self.report(error, "what it holds stays where it is")


def _num_rows(backlog: Iterable[Batches]) -> int:
    return sum(batch.num_rows for batches in backlog for batch in batches.values())


class Drain:
    """The thread and its state. `start`, `wake`, `flush` and `stop` belong to other threads, the rest to its own."""

    def __init__(self, session: Session, sinks: Sequence[Sink], wait_s: float, longest_wait_s: float) -> None:
        """Prepare the thread.

        Args:
            session: Whose rings.
            sinks: Where rows go; all open.
            wait_s: Seconds between turns, as long as turns take little of a core.
            longest_wait_s: The most that they are put off for that.
        """
        self._session = session
        self.outlets = [_Outlet(sink) for sink in sinks]
        self._wait_s = wait_s
        self._longest_wait_s = longest_wait_s
        self._turn_cpu_s = 0.0
        self._wake = threading.Event()
        self._turn = threading.Condition()
        self._turns = 0
        self._asked = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=names.DRAIN_THREAD, daemon=True)
        self.joiner = Joiner()
        self.rows = {"steps": 0, "violations": 0, "requests": 0}
        self.last_step: int | None = None
        self.last_lost_seq: int | None = None
        self.errors = 0
        self.published = self.drained = self.overwritten = self.host_overwritten = 0  # of lanes that are gone
        self.kept_back = False
        """Whether a sink ended without all of its rows, so that the rings still have what it lacks."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Flush soon; never blocks for long."""
        self._wake.set()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that is published by now went to the sinks; False when it took longer than `timeout_s`."""
        with self._turn:
            self._asked = max(self._asked, self._turns + 2 if self._busy else self._turns + 1)
            target = self._asked
            self._wake.set()
            return self._turn.wait_for(lambda: self._turns >= target or not self._thread.is_alive(), timeout_s)

    def stop(self) -> None:
        """Drain what is left, close the sinks and end the thread."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    _busy = False

    def _run(self) -> None:
        while not self._stopping:
            if self._asked <= self._turns:
                self._wake.wait(min(self._longest_wait_s, max(self._wait_s, self._turn_cpu_s / _CORE_SHARE)))
            self._wake.clear()
            begin_s = time.thread_time()
            self._take_turn(last=False)
            self._turn_cpu_s = time.thread_time() - begin_s
        self._take_turn(last=True)
        self._session.about_to_close()
        for outlet in self.outlets:
            outlet.close()
        self.kept_back = any(outlet.failing for outlet in self.outlets)

    def _take_turn(self, *, last: bool) -> None:
        with self._turn:
            self._busy = True
        try:
            batches = self._collect(last=last)
            seen = self._watch(batches)
            for outlet in self.outlets:
                outlet.annotate(batches, seen)
            for outlet in self.outlets:
                outlet.offer(dict(batches))
        except Exception as error:  # ours: never let the thread die
            self.errors += 1
            if self.errors == 1:
                _log.exception("a flush failed and its rows are lost: %s", error)
        box = self._session.black_box
        if box is not None:
            box.turn(safe=not any(outlet.failing for outlet in self.outlets))
        with self._turn:
            self._busy = False
            self._turns += 1
            self._turn.notify_all()

    def _watch(self, batches: Mapping[str, pa.RecordBatch]) -> Seen | None:
        """Let the monitor see new rows; what it cannot make anything of is recorded all the same."""
        monitor = self._session.monitor
        if monitor is None or "steps" not in batches:
            return None
        try:
            return monitor.update(StepRows(batches["steps"]))
        except Exception as error:
            self.errors += 1
            if self.errors == 1:
                _log.exception("capacities could not be watched: %s", error)
            return None

    def _collect(self, *, last: bool) -> dict[str, pa.RecordBatch]:
        """New rows of all tables."""
        host_parts: list[Words] = []
        device_parts: list[Words] = []
        for lane in self._session.lanes():
            gone = not lane.thread.is_alive()  # before the read: what it published is then all there
            # Host halves first: their rows were published before them, so none is missed below.
            host_parts.append(lane.host_reader.read())
            device = lane.device_reader.read()
            device[:, 0] += lane.number << RING_NUMBER_BIT
            device_parts.append(device)
            if gone:
                self._retire(lane)
        for recorder in self._session.recorders:
            device = recorder.read()
            device[:, 0] += recorder.number << RING_NUMBER_BIT
            device_parts.append(device)
        host = _concatenated(host_parts)
        device = _concatenated(device_parts)
        joined = self.joiner.join(device, host, last=last)
        batches: dict[str, pa.RecordBatch] = {}
        if len(joined):
            batches["steps"] = steps_batch(joined, self._session.messages)
            newest = int(np.where(joined.has_device, joined.device[:, ProbeWord.STEP], joined.host[:, 1]).max())
            self.last_step = newest if self.last_step is None else max(self.last_step, newest)
        details = self._session.details
        if violations := _take(details.violations):
            batches["violations"] = violations_batch(violations)
        if requests := _take(details.requests):
            batches["requests"] = requests_batch(requests)
        for name, batch in batches.items():
            self.rows[name] += batch.num_rows
        return batches

    def _retire(self, lane: Lane) -> None:
        """Let go of the rings of a thread that ended."""
        if lane.forward is not None:
            return  # an open forward is published when the session closes
        self.published += lane.device.published
        self.drained += lane.device_reader.drained
        self.overwritten += lane.device_reader.overwritten
        self.host_overwritten += lane.host_reader.overwritten
        if lane.device_reader.last_lost_seq is not None:
            self.last_lost_seq = lane.device_reader.last_lost_seq + (lane.number << RING_NUMBER_BIT)
        self._session.drop_lane(lane)


def _take(queue: deque[_Item]) -> list[_Item]:
    items = []
    while True:
        try:
            items.append(queue.popleft())
        except IndexError:
            return items


def _concatenated(parts: list[Words]) -> Words:
    filled = [part for part in parts if len(part)]
    if not filled:
        return np.empty((0, ROW_WORDS), dtype=np.int64)
    return filled[0] if len(filled) == 1 else np.concatenate(filled)
