"""One thread's part of a session: its two rings and the forward that is open in it.

Each thread that steps or launches gets a lane of its own on first use, so that every ring has one producer and no
thread ever waits for another. The drain thread reads all lanes; the join does not care which lane a half came through.
"""

from __future__ import annotations

import threading
from time import time_ns as clock_ns
from typing import TYPE_CHECKING, Any, Final

from kvcanary_trace.kernels.layout import PROBE_WORDS, Group, ProbeWord, Runner

from .nvtx_ranges import Ranges
from .ring import ROW_WORDS, Ring, RingReader
from .schema import HOST_WORDS, NOT_MEASURED, HostWord, Mode

if TYPE_CHECKING:
    from kvcanary_trace.kernels.buffers import VerifyPlan, WritePlan

    from .session import Session
    from .steps import step

assert PROBE_WORDS == HOST_WORDS == ROW_WORDS

_DEVICE_WORDS: Final = ProbeWord.VIOLATIONS_NEW + 1
_HOST_WORDS: Final = HostWord.DEVICE_ROWS + 1

_NO_FACTS: Final = [NOT_MEASURED] * (_DEVICE_WORDS - ProbeWord.TIME_NS)
EMPTY_HALF: Final = [NOT_MEASURED] * _HOST_WORDS

MODE_NAMES: Final = tuple(mode.name.lower() for mode in Mode)
MODES: Final = {name: value for value, name in enumerate(MODE_NAMES)}
RUNNERS: Final = {runner.name.lower(): int(runner) for runner in Runner}
GROUPS: Final = {group.name.lower(): int(group) for group in Group}

_GROUP = int(ProbeWord.GROUP)
_TIME_NS = int(ProbeWord.TIME_NS)


class Forward:
    """A forward in progress: its key, and one open probe row for each plan that it launched.

    Until a row is published, its word 0 (the ring's own) holds its (VerifyPlan, WritePlan), and its recorder where the
    device publishes it.
    """

    __slots__ = ("error", "groups", "message", "number", "on_device", "rows", "runner", "step", "time_ns")

    step: int | None
    rows: list[list[Any]]

    def __init__(self, step: int, number: int, runner: int, time_ns: int | None) -> None:
        self.step = step
        self.number = number
        self.runner = runner
        self.time_ns = time_ns
        """Time to put into its rows, or None for the clock's."""
        self.groups = 0  # bits of the groups that were planned
        self.on_device = False  # whether a device publishes some of its rows
        self.rows = []
        self.error = NOT_MEASURED
        self.message = NOT_MEASURED

    def new_row(self, group: int, plan: VerifyPlan | None, write_plan: WritePlan | None = None) -> list[Any]:
        """Open a row of `group`, for launches with these plans."""
        row = [(plan, write_plan), self.step, self.number, self.runner, group, 0, *_NO_FACTS]
        self.groups |= 1 << group
        self.rows.append(row)
        return row

    def row_of_plan(self, plan: object) -> list[Any] | None:
        """The open row of this very plan, a VerifyPlan or a WritePlan."""
        for row in self.rows:
            plans: tuple[object, ...] = row[0]
            if plans[0] is plan or plans[1] is plan:
                return row
        return None

    def row_of_group(self, group: int) -> list[Any] | None:
        """The group's latest open row."""
        return next((row for row in reversed(self.rows) if row[_GROUP] == group), None)


assert [ProbeWord.STEP, ProbeWord.FORWARD, ProbeWord.RUNNER, ProbeWord.GROUP, ProbeWord.KIND] == [1, 2, 3, 4, 5]


class Lane:
    """Rings and open forward of one thread. All but `readers` and `number` belong to that thread."""

    __slots__ = (
        "device",
        "device_reader",
        "forward",
        "host",
        "host_reader",
        "in_range",
        "number",
        "probe_error",
        "publish_half",
        "publish_row",
        "ranges",
        "session",
        "spans",
        "step",
        "t0_ns",
        "thread",
    )

    def __init__(self, session: Session, number: int) -> None:
        self.session = session
        self.number = number
        self.thread = threading.current_thread()
        device, host = session.ring_memory("device", number), session.ring_memory("host", number)
        self.device = Ring(session.ring_rows, device and device.rows, used_words=_DEVICE_WORDS)
        self.host = Ring(session.ring_rows, host and host.rows, used_words=_HOST_WORDS)
        self.publish_row = self.device.publish
        self.publish_half = self.host.publish
        self.device_reader = RingReader(self.device.words)
        self.host_reader = RingReader(self.host.words)
        self.ranges = Ranges(session.nvtx_domain) if session.nvtx_domain is not None else None
        self.spans = session.host_spans
        self.forward: Forward | None = None
        self.step: step | None = None  # innermost step() of this thread; None: forwards begin by themselves
        self.t0_ns = 0
        self.in_range = False
        self.probe_error: Exception | None = None

    def begin_forward(self, group: int) -> Forward:
        """The forward that a new plan of `group` belongs to; a plan that repeats a group begins the next one."""
        forward = self.forward
        if forward is not None:
            if not forward.groups >> group & 1:
                return forward
            if self.step is not None:
                self.forward = self.step.next_forward(self)
                return self.forward
            self.end_implicit()
        self.forward = forward = Forward(next(self.session.step_numbers), 0, 0, None)
        for recorder in self.session.recorders:
            recorder.begin_step(forward.step)
        return forward

    def row_of(self, plan: object, group: int) -> list[Any] | None:
        """The open row that a launch with `plan` belongs to: the plan's own, else the group's latest."""
        forward = self.forward
        if forward is None:
            return None
        row = forward.row_of_plan(plan)
        if row is None and self.step is not None and self.step.earlier:
            row = next(filter(None, (earlier.row_of_plan(plan) for earlier in reversed(self.step.earlier))), None)
        return row if row is not None else forward.row_of_group(group)

    def end_implicit(self) -> None:
        """Publish the forward that began without a step()."""
        forward = self.forward
        if forward is not None and self.step is None:
            self.forward = None
            host: list[Any] = EMPTY_HALF.copy()
            host[_MODE] = 0
            self.publish(forward, host)

    def publish(self, forward: Forward, host: list[Any]) -> None:
        """Put a forward's rows and then its host half into the rings: a reader that sees the host half finds the rows.

        Args:
            forward: Its rows are final.
            host: Words of `EMPTY_HALF`; key, time, error and the number of rows are filled in here.
        """
        rows = forward.rows
        if forward.on_device:
            rows = [row for row in rows if len(row[0]) == _HOST_ROW]
        publish = self.publish_row
        time_ns = forward.time_ns
        if time_ns is not None:
            for row in rows:
                row[_TIME_NS] = time_ns
                publish(row)
        else:
            for row in rows:
                publish(row)
            time_ns = rows[0][_TIME_NS] if rows else clock_ns()
        host[1] = forward.step
        host[2] = forward.number
        host[3] = forward.runner
        host[4] = time_ns
        host[_ERROR] = forward.error
        host[_ERROR_MESSAGE] = forward.message
        # A device's rows come when it has got there; a replayed graph's are not even known to come.
        replay = not rows and self.session.recorders and host[_MODE] != _IDLE
        host[_DEVICE_ROWS] = NOT_MEASURED if forward.on_device or replay else len(rows)
        seq = self.publish_half(host)
        if not seq & 0x3FF and seq - self.host_reader.next_seq > self.session.ring_rows >> 2:
            self.session.wake()


_HOST_ROW: Final = 2  # plans of a row that no recorder has
_IDLE = int(Mode.IDLE)
_MODE = int(HostWord.MODE)
_ERROR = int(HostWord.ERROR)
_ERROR_MESSAGE = int(HostWord.ERROR_MESSAGE)
_DEVICE_ROWS = int(HostWord.DEVICE_ROWS)
assert [HostWord.STEP, HostWord.FORWARD, HostWord.RUNNER, HostWord.TIME_NS] == [1, 2, 3, 4]
