"""The open session: its rings, its drain thread, and what users and the other parts call on it."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from kvcanary_trace.kernels import hooks
from kvcanary_trace.kernels.layout import ProbeWord

from . import config, names, steps
from .black_box import BlackBox, Half, RingMemory
from .drain import Drain
from .errors import SessionError
from .lane import EMPTY_HALF, GROUPS, MODES, RUNNERS, Forward, Lane
from .listener import Callback, Listener
from .monitor import Monitor
from .observer import Details, Observer
from .pressure.check import Shortfall, shortfalls
from .runfile import Run
from .schema import NOT_MEASURED, ErrorCode, HostWord
from .sinks import Sink
from .stats import TraceStats
from .steps import known

if TYPE_CHECKING:
    import torch

    from .device_rows import DeviceRecorder
    from .sinks.otel_host import HostSpans

__all__ = ["Session", "describe", "error_number"]

_log: Final = logging.getLogger(names.LOGGER)
_MAX_MESSAGES: Final = 4096
_MAX_COUNTED_STEP: Final = 1 << 62
"""A step number from here on is recorded, but counting on from it would leave int64."""
_MAX_MESSAGE_CHARS: Final = 1000
_CODES: Final = {member.code: number for number, member in enumerate(ErrorCode)}


class Session:
    """An open trace. `record`, `stats`, `flush` and `close` may be called on any thread."""

    def __init__(
        self,
        sinks: Sequence[Sink],
        settings: Mapping[str, config.Effective],
        run: Run,
        nvtx_domain: Any | None = None,
        on_pressure: Callback | None = None,
        black_box: BlackBox | None = None,
    ) -> None:
        """Prepare a session; `trace()` opens it."""
        self.run = run
        self.closed = False
        self.automatic = False
        """Whether nobody asked for it in the program: then it makes way for a session that somebody asks for."""
        self.ring_rows: int = settings["ring_rows"].value
        self.write_entry_capacity: int | None = settings["write_entry_capacity"].value
        self.nvtx_domain = nvtx_domain
        self.host_spans: HostSpans | None = None
        """Spans that are current during a step; `trace()` sets them where OpenTelemetry is on."""
        self.step_numbers = itertools.count()
        self.messages: list[str] = []
        self._message_numbers: dict[str, int] = {}
        self._violations_seen = dict.fromkeys(RUNNERS.values(), 0)
        self._observer_errors = 0
        self._largest_step = -1
        self.local = threading.local()
        self._lanes: list[Lane] = []
        self._lane_numbers = itertools.count()
        self.recorders: list[DeviceRecorder] = []
        """What publishes rows from devices; empty until something is planned on one."""
        self._no_recorder = False
        self.black_box = black_box
        """Shared memory that the rings live in, or None where they are this process's own."""
        self._pid = os.getpid()
        self._close_lock = threading.Lock()
        self._observer = Observer(
            self,
            requests=settings["detail"].value == "requests",
            device_rows=settings["device_rows"].value,
            device_times=settings["device_times"].value,
        )
        self._listener = Listener(on_pressure) if on_pressure is not None else None
        self.monitor: Monitor | None = None
        """Capacities as rows are drained, or None where nobody wants to know."""
        if settings["pressure"].value or on_pressure is not None:
            self.monitor = Monitor(run.engine, self._listener)
        # Half an interval: a row is on disk before it is a whole interval old.
        wait_s = settings["flush_interval_s"].value / 2
        self._drain = Drain(self, sinks, wait_s if on_pressure is None else min(wait_s, _PRESSURE_WAIT_S), wait_s)
        run.counters = self._counters

    # --- what users call --------------------------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        """The run's id in the dataset."""
        return self.run.run

    @property
    def stats(self) -> TraceStats:
        """What was recorded and lost so far; final once the session is closed."""
        drain, details = self._drain, self._observer.details
        lanes = self.lanes()
        readers = [(lane.device_reader, lane.number) for lane in lanes]
        readers += [(recorder.reader, recorder.number) for recorder in self.recorders]
        # Drained before published: a row is never counted as drained and not yet published.
        drained = drain.drained + sum(reader.drained for reader, _ in readers)
        overwritten = drain.overwritten + sum(reader.overwritten for reader, _ in readers)
        published = drain.published + sum(lane.device.published for lane in lanes)
        published += sum(recorder.published for recorder in self.recorders)
        lost = [r.last_lost_seq + (number << 40) for r, number in readers if r.last_lost_seq is not None]
        return TraceStats(
            run=self.run.run,
            steps=drain.rows["steps"],
            violations=drain.rows["violations"],
            requests=drain.rows["requests"],
            last_step=drain.last_step,
            published=published,
            drained=drained,
            pending=published - drained - overwritten,
            ring_overwritten=overwritten,
            host_ring_overwritten=drain.host_overwritten + sum(lane.host_reader.overwritten for lane in lanes),
            rows_dropped=sum(outlet.rows_dropped for outlet in drain.outlets) + details.requests_dropped,
            violations_lost=details.violations_lost,
            violations_lost_from=details.violations_lost_from,
            halves_unmatched=drain.joiner.unmatched,
            sink_errors=sum(outlet.errors for outlet in drain.outlets),
            observer_errors=self._observer_errors + drain.errors,
            last_lost_seq=lost[-1] if lost else drain.last_lost_seq,
            callback_errors=self._listener.errors if self._listener is not None else 0,
            callbacks_dropped=self._listener.dropped if self._listener is not None else 0,
        )

    def record(
        self,
        *,
        step: int,
        forward: int = 0,
        runner: Literal["target", "draft"] = "target",
        group: Literal["full", "swa"] = "full",
        mode: str = "unknown",
        bs: int | None = None,
        bs_launched: int | None = None,
        write_req_capacity: int | None = None,
        write_entries: int | None = None,
        verify_demand: int | None = None,
        verify_planned: int | None = None,
        verify_capacity: int | None = None,
        verify_enabled: bool | None = None,
        verify_checked: int | None = None,
        entries_skipped: int | None = None,
        prefix_len_max: int | None = None,
        prefix_len_sum: int | None = None,
        seq_len_max: int | None = None,
        req_to_token_width: int | None = None,
        violations: int | None = None,
        violation_ring_capacity: int | None = None,
        graph_replay: bool | None = None,
        write_entry_capacity: int | None = None,
        kv_used: int | None = None,
        kv_capacity: int | None = None,
        resident_reqs: int | None = None,
        resident_tokens: int | None = None,
        waiting_reqs: int | None = None,
        waiting_tokens: int | None = None,
        plan_ns: int | None = None,
        verify_ns: int | None = None,
        write_ns: int | None = None,
        host_ns: int | None = None,
        error: str | None = None,
        error_message: str | None = None,
        time_ns: int | None = None,
    ) -> None:
        """Record one whole row without kernels: names, units and meanings are those of the `steps` table.

        Args:
            error: Code of `schema.ErrorCode`; derived from `error_message` when only that is given.
            time_ns: Unix time in ns; the host's clock when None.

        Raises:
            ValueError: `mode`, `runner`, `group` or `error` is unknown.
            SessionError: the session is closed.
        """
        if self.closed:
            raise SessionError("record() on a closed session; rows belong inside the `with trace(...)` block")
        lane = self.lane()
        new = None
        number = known("runner", runner, RUNNERS)
        if violations is not None:
            seen = self._violations_seen[number]
            new = violations - seen if violations >= seen else violations
            self._violations_seen[number] = violations
        row_forward = Forward(step, forward, number, time.time_ns() if time_ns is None else time_ns)
        row = row_forward.new_row(known("group", group, GROUPS), None)
        row[_FIRST_FACT : _FIRST_FACT + len(_FACTS)] = [
            NOT_MEASURED if value is None else value
            for value in (
                bs,
                bs_launched,
                write_req_capacity,
                write_entries,
                verify_demand,
                verify_planned,
                verify_capacity,
                verify_enabled,
                verify_checked,
                entries_skipped,
                prefix_len_max,
                prefix_len_sum,
                seq_len_max,
                req_to_token_width,
                violations,
                violation_ring_capacity,
                plan_ns,
                verify_ns,
                write_ns,
                new,
            )
        ]
        if error_message is not None or error is not None:
            row_forward.error = error_number(error, error_message)
            row_forward.message = self._message_number(error_message)
        host: list[Any] = EMPTY_HALF.copy()
        host[_MODE] = known("mode", mode, MODES)
        if write_entry_capacity is None:
            write_entry_capacity = self.write_entry_capacity
        host[_FIRST_HOST_FACT : _FIRST_HOST_FACT + len(_HOST_FACTS)] = [
            NOT_MEASURED if value is None else value
            for value in (
                graph_replay,
                host_ns,
                write_entry_capacity,
                kv_used,
                kv_capacity,
                resident_reqs,
                resident_tokens,
                waiting_reqs,
                waiting_tokens,
            )
        ]
        self.saw_step(step)
        lane.publish(row_forward, host)

    def check(
        self, *, bs: int | None = None, tokens: int | None = None, verify: int | None = None, kv: int | None = None
    ) -> tuple[Shortfall, ...]:
        """What would not fit if this batch were launched: exact shortfalls with what to do, or an empty tuple.

        Limits are those of the latest rows, before the first row those that `trace(capacities=…)` was given; a capacity
        whose limit nobody knows is not looked at. Costs microseconds and may be called before every launch.

        Args:
            bs: Active requests.
            tokens: Tokens to write.
            verify: Verify entries: the sum of prefix lengths, cut to the window.
            kv: KV slots that are held afterwards.
        """
        given = {one["capacity"]: int(one["value"]) for one in self.run.capacities if one.get("value") is not None}
        if self.write_entry_capacity is not None:
            given["write_entry"] = self.write_entry_capacity
        limits = {**given, **(self.monitor.limits if self.monitor is not None else {})}
        return shortfalls(limits, {"write_req": bs, "write_entry": tokens, "verify": verify, "kv_pool": kv})

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every row published by now went to the sinks. For programs that may wait; engines need not.

        Returns:
            False when it took longer than `timeout_s`, or when there is nothing to wait for.
        """
        if self.closed or self._pid != os.getpid():
            return False
        return self._drain.flush(timeout_s)

    def close(self, error: BaseException | str | None = None) -> None:
        """Drain what is left, seal the files and end the run; `error` marks it as failed. Closing twice is harmless.

        `sys.exit()` and `sys.exit(0)` are no errors: the program ended as it meant to.
        """
        if isinstance(error, SystemExit) and not error.code:
            error = None
        if self._pid != os.getpid():
            return  # a forked child: the files are the parent's
        with self._close_lock:
            if self.closed:
                return
            if hooks.observer is self._observer:
                hooks.observer = None
            if steps.open_session is self:
                steps.open_session = None
            self._publish_open()
            for recorder in self.recorders:
                recorder.close()
            self.closed = True
        atexit.unregister(self._close_at_exit)
        self.run.status = "failed" if error is not None else "completed"
        self.run.error = None if error is None else error if isinstance(error, str) else describe(error)
        self._drain.stop()
        if self.black_box is not None and not self._drain.kept_back:
            self.black_box.remove()
        if self._listener is not None:
            self._listener.stop(_CALLBACK_TIMEOUT_S)

    # --- what the other parts call ----------------------------------------------------------------------------------

    @property
    def details(self) -> Details:
        """Violations and requests on their way to the drain thread."""
        return self._observer.details

    def open(self) -> None:
        """Become the session of this process. Sinks are open by now."""
        atexit.register(self._close_at_exit)
        if self._listener is not None:
            self._listener.start()
        self._drain.start()
        if self.black_box is not None:
            self.lane()  # its memory is made now, not in the first step
        steps.open_session = self
        hooks.observer = self._observer

    def lane(self) -> Lane:
        """The calling thread's lane."""
        try:
            lane: Lane = self.local.lane
        except AttributeError:
            lane = self.local.lane = Lane(self, next(self._lane_numbers))
            self._lanes.append(lane)
        return lane

    def recorder(self, device: torch.device, step_number: int | None) -> DeviceRecorder | None:
        """The recorder of a device, made when the first plan is launched there; None where it cannot be."""
        for recorder in self.recorders:
            if recorder.device == device:
                return recorder
        if self._no_recorder:
            return None
        try:
            from .device_rows import DeviceRecorder, is_capturing

            if is_capturing(device):
                return None  # nothing may be allocated now; the first eager forward makes it
            number = next(self._lane_numbers)
            memory = self.ring_memory("device", number, by_device=True)
            made = DeviceRecorder(device, number, self.ring_rows, memory, timed=self._observer.device_times)
            made.begin_step(step_number)
        except Exception as error:
            self._no_recorder = True
            _log.warning("rows of %s are without demands: %s: %s", device, type(error).__name__, error)
            return None
        self.recorders.append(made)
        return made

    def ring_memory(self, half: Half, number: int, *, by_device: bool = False) -> RingMemory | None:
        """Memory for a new ring: the black box's, or None for the process's own."""
        if self.black_box is None:
            return None
        try:
            return self.black_box.ring(half, number, self.ring_rows, by_device=by_device)
        except OSError as error:
            reason = error.strerror or error
            _log.warning("%s ring %d is not in the black box, a crash would lose its rows: %s", half, number, reason)
            return None

    def device_rings(self) -> set[int]:
        """Numbers of the rings whose rows carry a device's clock."""
        return {recorder.number for recorder in self.recorders}

    def lanes(self) -> list[Lane]:
        """All lanes that may still have rows."""
        return self._lanes.copy()

    def drop_lane(self, lane: Lane) -> None:
        """Forget a lane whose thread ended and whose rings are empty."""
        self._lanes.remove(lane)
        if self.black_box is not None:
            self.black_box.retire(lane.number)

    def wake(self) -> None:
        """Ask the drain thread to flush soon."""
        self._drain.wake()

    def saw_step(self, number: int) -> None:
        """Count on from a step number that the engine gave."""
        if self._largest_step < number < _MAX_COUNTED_STEP:
            self._largest_step = number
            self.step_numbers = itertools.count(number + 1)

    def failed(self, error: Exception) -> None:
        """Count an error of ours on the engine's path; the first one goes to the log."""
        self._observer_errors += 1
        if self._observer_errors == 1:
            _log.error("recording failed and goes on; further failures are only counted", exc_info=error)

    def note_error(self, forward: Forward, error: BaseException) -> None:
        """Put an exception of the engine or of a launcher into a forward; the first one stands."""
        if forward.error == NOT_MEASURED:
            message = describe(error)
            forward.error = error_number(None, message)
            forward.message = self._message_number(message)

    def note_refused(
        self, *, bs: int, write_entries: int, write_req_capacity: int | None, verify_capacity: int | None
    ) -> None:
        """Give the open step a row for a batch that the engine refused before it planned anything."""
        lane = self.lane()
        row = lane.begin_forward(0).new_row(0, None)
        row[ProbeWord.TIME_NS] = time.time_ns()
        row[ProbeWord.BS] = row[ProbeWord.BS_LAUNCHED] = bs
        row[ProbeWord.WRITE_ENTRIES] = write_entries
        for word, value in (
            (ProbeWord.WRITE_REQ_CAPACITY, write_req_capacity),
            (ProbeWord.VERIFY_CAPACITY, verify_capacity),
        ):
            if value is not None:
                row[word] = value

    def about_to_close(self) -> None:
        """All rows went to the sinks; the run file's last state is due."""
        self.run.ended_ns = time.time_ns()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _publish_open(self) -> None:
        """Publish what is open in every lane; threads that are in a step find the session closed when they end it."""
        for lane in self.lanes():
            try:
                if lane.step is not None:
                    lane.step.close_early(lane)
                else:
                    lane.end_implicit()
            except Exception as error:
                self.failed(error)

    def _message_number(self, message: str | None) -> int:
        if message is None:
            return int(NOT_MEASURED)
        number: int | None = self._message_numbers.get(message)
        if number is None:
            if len(self.messages) >= _MAX_MESSAGES:
                return int(NOT_MEASURED)
            self.messages.append(message[:_MAX_MESSAGE_CHARS])
            if self.black_box is not None:
                with contextlib.suppress(OSError):
                    self.black_box.add_message(self.messages[-1])
            number = self._message_numbers[message] = len(self.messages) - 1
        return number

    def _counters(self) -> dict[str, Any]:
        stats = self.stats
        return {
            "losses": {
                "ring_overwritten": stats.ring_overwritten,
                "host_ring_overwritten": stats.host_ring_overwritten,
                "rows_dropped": stats.rows_dropped,
                "violations_lost": stats.violations_lost,
                "violations_lost_from": stats.violations_lost_from,
                "halves_unmatched": stats.halves_unmatched,
                "sink_errors": stats.sink_errors,
                "observer_errors": stats.observer_errors,
                "last_lost_seq": stats.last_lost_seq,
            },
            "rows": {"steps": stats.steps, "violations": stats.violations, "requests": stats.requests},
            "last_step": stats.last_step,
            "device_progress": {
                str(recorder.device): str(recorder.progress) for recorder in self.recorders if recorder.progress
            },
        }

    def _close_at_exit(self) -> None:
        died_of = getattr(sys, "last_value", None)
        self.close(died_of if died_of is not None else None)

    def __repr__(self) -> str:
        return f"<Session {self.run.run} {'closed' if self.closed else 'open'}>"


def error_number(code: str | None, message: str | None) -> int:
    """The ring word of `code`, or of the code that `message` shows.

    Raises:
        ValueError: `code` is unknown.
    """
    return known("error", code if code is not None else ErrorCode.of(message or "").code, _CODES)


def describe(error: BaseException) -> str:
    """`Type: message`, or the message alone where it says whose it is."""
    try:
        text = str(error)
    except Exception:
        text = "(its message cannot be shown)"
    return text if text.startswith("kv-canary") else f"{type(error).__name__}: {text}" if text else type(error).__name__


_PRESSURE_WAIT_S: Final = 0.1
_CALLBACK_TIMEOUT_S: Final = 1.0

_FIRST_FACT: Final = int(ProbeWord.BS)
_FACTS: Final = [word for word in ProbeWord if ProbeWord.BS <= word <= ProbeWord.VIOLATIONS_NEW]
_FIRST_HOST_FACT: Final = int(HostWord.GRAPH_REPLAY)
_HOST_FACTS: Final = [word for word in HostWord if HostWord.GRAPH_REPLAY <= word <= HostWord.WAITING_TOKENS]
_MODE: Final = int(HostWord.MODE)
assert len(_FACTS) == 20 and len(_HOST_FACTS) == 9  # the order of the two tuples in record()


def _forget_in_child() -> None:
    """A forked child has no drain thread and must not touch the parent's files: it records nothing."""
    session = steps.open_session
    steps.open_session = None
    if session is not None:
        session.closed = True
        hooks.observer = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
