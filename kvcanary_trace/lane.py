"""One thread's part of a session: its two rings and the forward that is open in it.

Each thread that steps or launches gets a lane of its own on first use, so that every ring has one producer and no
thread ever waits for another. The drain thread reads all lanes; the join does not care which lane a half came through.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from kvcanary_trace.kernels.layout import PROBE_WORDS, Group, ProbeWord, Runner

from .nvtx_ranges import Ranges
from .ring import ROW_WORDS, Ring, RingReader
from .schema import HOST_WORDS, NOT_MEASURED, HostWord, Mode

if TYPE_CHECKING:
    from kvcanary_trace.kernels.buffers import VerifyPlan, WritePlan

    from .session import Session
    from .steps import step

assert PROBE_WORDS == HOST_WORDS == ROW_WORDS

EMPTY_ROW: Final = [NOT_MEASURED] * ROW_WORDS

MODE_NAMES: Final = tuple(mode.name.lower() for mode in Mode)
MODES: Final = {name: value for value, name in enumerate(MODE_NAMES)}
RUNNERS: Final = {runner.name.lower(): int(runner) for runner in Runner}
GROUPS: Final = {group.name.lower(): int(group) for group in Group}

_GROUP = int(ProbeWord.GROUP)
_TIME_NS = int(ProbeWord.TIME_NS)


class Forward:
    """A forward in progress: its key, and one open probe row for each plan that it launched."""

    __slots__ = ("error", "groups", "message", "number", "plans", "rows", "runner", "step", "time_ns", "writes")

    def __init__(self, step: int, number: int, runner: int, time_ns: int | None) -> None:
        self.step = step
        self.number = number
        self.runner = runner
        self.time_ns = time_ns
        """Time to put into its rows, or None for the clock's."""
        self.groups = 0  # bits of the groups that were planned
        self.plans: list[VerifyPlan | None] = []
        self.writes: list[WritePlan | None] = []
        self.rows: list[list[int]] = []
        self.error = NOT_MEASURED
        self.message = NOT_MEASURED

    def new_row(self, group: int, plan: VerifyPlan | None, write_plan: WritePlan | None = None) -> list[int]:
        """Open a row of `group`, for launches with these plans."""
        row = EMPTY_ROW.copy()
        row[1] = self.step
        row[2] = self.number
        row[3] = self.runner
        row[4] = group
        row[5] = 0
        self.groups |= 1 << group
        self.plans.append(plan)
        self.writes.append(write_plan)
        self.rows.append(row)
        return row

    def row_of_plan(self, plan: object) -> list[int] | None:
        """The open row of this very plan, a VerifyPlan or a WritePlan."""
        for at, row in enumerate(self.rows):
            if self.plans[at] is plan or self.writes[at] is plan:
                return row
        return None

    def row_of_group(self, group: int) -> list[int] | None:
        """The group's latest open row."""
        for row in reversed(self.rows):
            if row[_GROUP] == group:
                return row
        return None


assert [ProbeWord.STEP, ProbeWord.FORWARD, ProbeWord.RUNNER, ProbeWord.GROUP, ProbeWord.KIND] == [1, 2, 3, 4, 5]


class Lane:
    """Rings and open forward of one thread. All but `readers` and `number` belong to that thread."""

    __slots__ = (
        "device",
        "device_reader",
        "forward",
        "host",
        "host_reader",
        "number",
        "probe_error",
        "ranges",
        "session",
        "step",
        "t0_ns",
        "thread",
    )

    def __init__(self, session: Session, number: int) -> None:
        self.session = session
        self.number = number
        self.thread = threading.current_thread()
        self.device = Ring(session.ring_rows)
        self.host = Ring(session.ring_rows)
        self.device_reader = RingReader(self.device.words)
        self.host_reader = RingReader(self.host.words)
        self.ranges = Ranges(session.nvtx_domain) if session.nvtx_domain is not None else None
        self.forward: Forward | None = None
        self.step: step | None = None  # innermost step() of this thread; None: forwards begin by themselves
        self.t0_ns = 0
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
        return forward

    def row_of(self, plan: object, group: int) -> list[int] | None:
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
            self.publish(forward, [NOT_MEASURED] * ROW_WORDS)

    def publish(self, forward: Forward, host: list[int]) -> None:
        """Put a forward's rows and then its host half into the rings: a reader that sees the host half finds the rows.

        Args:
            forward: Its rows are final.
            host: [HOST_WORDS] words; key, time, error and the number of rows are filled in here.
        """
        rows = forward.rows
        now_ns = forward.time_ns
        publish = self.device.publish
        for row in rows:
            if now_ns is not None:
                row[_TIME_NS] = now_ns
            publish(row)
        host[1] = forward.step
        host[2] = forward.number
        host[3] = forward.runner
        host[4] = rows[0][_TIME_NS] if rows else (time.time_ns() if now_ns is None else now_ns)
        host[_ERROR] = forward.error
        host[_ERROR_MESSAGE] = forward.message
        host[_DEVICE_ROWS] = len(rows)
        if host[_MODE] == NOT_MEASURED:
            host[_MODE] = 0
        seq = self.host.publish(host)
        if not seq & 0x3FF and seq - self.host_reader.next_seq > self.session.ring_rows >> 2:
            self.session.wake()


_MODE = int(HostWord.MODE)
_ERROR = int(HostWord.ERROR)
_ERROR_MESSAGE = int(HostWord.ERROR_MESSAGE)
_DEVICE_ROWS = int(HostWord.DEVICE_ROWS)
assert [HostWord.STEP, HostWord.FORWARD, HostWord.RUNNER, HostWord.TIME_NS] == [1, 2, 3, 4]
