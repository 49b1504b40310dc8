"""What a session does at each launch: host probe, durations, violations, NVTX ranges. Nothing here raises or blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from importlib import import_module
from time import perf_counter_ns, time_ns
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvcanary_trace.kernels.hooks import Call, PlanCall, VerifyCall, WriteCall
from kvcanary_trace.kernels.layout import CanaryLaunchTag, ProbeWord
from kvcanary_trace.kernels.probe import read_plan_inputs, read_verify_plan

from . import names
from .lane import GROUPS, Forward, Lane
from .schema import NOT_MEASURED

if TYPE_CHECKING:
    import torch

    from kvcanary_trace.kernels.buffers import VerifyOrWriteContext

    from .session import Session

_KIND = int(ProbeWord.KIND)
_TIME_NS = int(ProbeWord.TIME_NS)
_RUNNER = int(ProbeWord.RUNNER)
_GROUP = int(ProbeWord.GROUP)
_BS = int(ProbeWord.BS)
_VERIFY_PLANNED = int(ProbeWord.VERIFY_PLANNED)
_VERIFY_CAPACITY = int(ProbeWord.VERIFY_CAPACITY)
_VERIFY_ENABLED = int(ProbeWord.VERIFY_ENABLED)
_VERIFY_CHECKED = int(ProbeWord.VERIFY_CHECKED)
_VIOLATIONS = int(ProbeWord.VIOLATIONS)
_VIOLATIONS_NEW = int(ProbeWord.VIOLATIONS_NEW)
_VIOLATION_RING_CAPACITY = int(ProbeWord.VIOLATION_RING_CAPACITY)
_ENTRIES_SKIPPED = int(ProbeWord.ENTRIES_SKIPPED)
_PLAN_NS = int(ProbeWord.PLAN_NS)
_VERIFY_NS = int(ProbeWord.VERIFY_NS)
_WRITE_NS = int(ProbeWord.WRITE_NS)

_TAG_GROUP: Final = tuple(int(tag.group) for tag in sorted(CanaryLaunchTag))
_TAG_KIND: Final = tuple(int(tag.kind) for tag in sorted(CanaryLaunchTag))
_TAG_NAME: Final = tuple(tag.name for tag in sorted(CanaryLaunchTag))
_GROUP_NAMES: Final = tuple(GROUPS)

_MAX_WATCHED_RINGS: Final = 64
_MAX_DETAIL_ROWS: Final = 65_536


class _WatchedRing:
    """A violation ring that launches of this session write to, and how far we have seen it."""

    __slots__ = ("index", "rows", "seen", "total")

    def __init__(self, index: torch.Tensor, rows: torch.Tensor) -> None:
        self.index = index  # held, so that its id stays its own
        self.rows = rows
        # A view read by numpy costs a tenth of `index.item()`, which goes through torch's dispatcher at every launch.
        self.total: Callable[[int], int] = index.numpy().item
        self.seen: int = self.total(0)


class Details:
    """Rows that are too many or too rare for a ring, handed from launching threads to the drain thread.

    `violations`: (step, forward, runner, group, time in ns, number of the first, [n, 8] int64 rows). `requests`: (step,
    forward, runner, group, window, three [bs] arrays). Bounded: what does not fit is counted.
    """

    def __init__(self) -> None:
        self.violations: deque[tuple[int, int, int, int, int, int, Any]] = deque()
        self.requests: deque[tuple[int, int, int, int, int, Any, Any, Any]] = deque()
        self.violations_lost = 0
        self.requests_dropped = 0
        self.violations_lost_from: int | None = None
        """Step from which on violations are without detail, or None."""


class Observer:
    """A session's `hooks.LaunchObserver`. Called on whatever thread launches; each has its own lane."""

    def __init__(
        self, session: Session, *, requests: bool, device_rows: bool = False, device_times: bool = False
    ) -> None:
        self._session = session
        self._local = session.local
        self._requests = requests
        self._backend_for: Callable[[torch.device], Any] | None = None
        self._rings: dict[int, _WatchedRing] = {}
        self.recorded_devices = frozenset({"cuda"} if device_rows else ())
        """Types of devices that publish their own rows."""
        self.device_times = device_times
        """Whether they mark the time around each launch."""
        self.details = Details()

    def begin(self, call: Call) -> None:
        """Read what the launch demands, open its range, start its clock."""
        try:
            try:
                lane: Lane = self._local.lane
            except AttributeError:
                lane = self._session.lane()
            if call.__class__ is PlanCall:
                self._begin_plan(lane, call)  # type: ignore[arg-type]
            else:
                context, _ = call  # type: ignore[misc]
                if id(context.violation_write_index) not in self._rings:
                    self._watch(context)
                if lane.ranges is not None:
                    self._push(lane, call)  # type: ignore[arg-type]
                if self.device_times:
                    for recorder in self._session.recorders:
                        recorder.before_launch(call)
            lane.t0_ns = perf_counter_ns()
        except Exception as error:
            self._session.failed(error)

    def end(self, call: Call, error: BaseException | None) -> None:
        """Add what the launch did to the row that it belongs to."""
        t1_ns = perf_counter_ns()
        session = self._session
        try:
            lane: Lane = self._local.lane
            if lane.in_range and lane.ranges is not None:
                lane.in_range = False
                lane.ranges.pop()
            if session.closed:
                return
            spent_ns = t1_ns - lane.t0_ns
            if call.__class__ is PlanCall:
                forward = lane.forward
                if forward is None:
                    return
                row = forward.rows[-1]
                row[_TIME_NS] = time_ns() if forward.time_ns is None else forward.time_ns
                if error is None:
                    plan = call[0]
                    read_verify_plan(plan, row)
                    if plan.enable.device.type in self.recorded_devices:
                        self._hand_over(call, forward, row)  # type: ignore[arg-type]
                    elif plan.enable.is_cpu:
                        row[_PLAN_NS] = spent_ns
                        row[_ENTRIES_SKIPPED] = self._skipped_entries(plan.enable.device)
                    if lane.probe_error is not None:
                        session.failed(lane.probe_error)
                lane.probe_error = None
            else:
                self._end_launch(lane, call, spent_ns, error)  # type: ignore[arg-type]
            if error is not None and lane.forward is not None:
                session.note_error(lane.forward, error)
        except Exception as failure:
            session.failed(failure)

    def _hand_over(self, call: PlanCall, forward: Forward, row: list[Any]) -> None:
        """Let the device record the plan: its inputs are there, and the host must not wait for them."""
        recorder = self._session.recorder(call.verify_plan_out.enable.device, forward.step)
        if recorder is not None:
            recorder.after_plan(call, forward.runner, row[_GROUP])
            row[0] = (*row[0], recorder)
            forward.on_device = True

    def _skipped_entries(self, device: torch.device) -> int:
        """Entries that our kernels left out so far on a device of the host."""
        if self._backend_for is None:
            # Torch is loaded by now; a session without kernels never needs it.
            self._backend_for = import_module("kvcanary_trace.kernels.backend").backend_for
        return int(self._backend_for(device).skipped_entries(device).item())

    def _begin_plan(self, lane: Lane, call: PlanCall) -> None:
        group = 1 if call[6] is not None or call[7] > 0 else 0
        row = lane.begin_forward(group).new_row(group, call[0], call[1])
        try:
            read_plan_inputs(call, row)
            if self._requests:
                self._note_requests(call, row)
        except Exception as error:
            # Malformed arguments: the launch refuses them with a better message than ours.
            lane.probe_error = error
        if lane.ranges is not None:
            lane.ranges.push(names.PLAN, _GROUP_NAMES[group], _payload(row))
            lane.in_range = True
        if self.device_times:
            for recorder in self._session.recorders:
                if recorder.device == call.verify_plan_out.enable.device:
                    recorder.before_plan(row[_RUNNER], group)

    def _end_launch(self, lane: Lane, call: VerifyCall | WriteCall, spent_ns: int, error: BaseException | None) -> None:
        context, plan = call
        tag = context.kernel_kind
        forward = lane.forward
        row = None
        if forward is not None:
            row = forward.row_of_plan(plan) or lane.row_of(plan, _TAG_GROUP[tag])
        if row is None:
            row = self._adopt(lane, call)
        if len(row[0]) > 2:
            row[0][2].after_launch(call)
            return
        on_host = context.violation_write_index.is_cpu  # else the time is that of an asynchronous launch
        if call.__class__ is VerifyCall:
            row[_KIND] = _TAG_KIND[tag]
            if on_host:
                before = row[_VERIFY_NS]
                row[_VERIFY_NS] = spent_ns if before == NOT_MEASURED else before + spent_ns
            # The plan's own words, read when it was planned: nobody changes a plan between that and its launches.
            planned = row[_VERIFY_PLANNED]
            if planned != NOT_MEASURED:
                checked = planned if error is None and row[_VERIFY_ENABLED] else 0
                before = row[_VERIFY_CHECKED]
                if before == NOT_MEASURED or checked < before:
                    row[_VERIFY_CHECKED] = checked
        elif on_host:
            before = row[_WRITE_NS]
            row[_WRITE_NS] = spent_ns if before == NOT_MEASURED else before + spent_ns
        watched = self._rings.get(id(context.violation_write_index))
        if watched is not None:
            total = watched.total(0)
            if total != watched.seen or row[_VIOLATIONS] == NOT_MEASURED or row[_VIOLATIONS] != total:
                self._read_violations(watched, total, row)

    def _adopt(self, lane: Lane, call: VerifyCall | WriteCall) -> list[Any]:
        """A row for a launch whose plan we did not see: made before the session opened, or by somebody else."""
        context, plan = call
        group = _TAG_GROUP[context.kernel_kind]
        forward = lane.forward if lane.forward is not None else lane.begin_forward(group)
        if call.__class__ is WriteCall:
            row = forward.new_row(group, None, plan)  # type: ignore[arg-type]
        else:
            row = forward.new_row(group, plan)  # type: ignore[arg-type]
            row[_VERIFY_CAPACITY] = plan.verify_slot_indices.shape[0]  # type: ignore[union-attr]
            read_verify_plan(plan, row)  # type: ignore[arg-type]
        row[_TIME_NS] = time_ns() if forward.time_ns is None else forward.time_ns
        return row

    # --- violations -------------------------------------------------------------------------------------------------

    def _watch(self, context: VerifyOrWriteContext) -> None:
        """Start to watch a ring; what it holds by now is not this session's."""
        index = context.violation_write_index
        if not index.is_cpu:
            return
        if len(self._rings) >= _MAX_WATCHED_RINGS:
            self._rings.pop(next(iter(self._rings)), None)
        self._rings[id(index)] = _WatchedRing(index, context.violation_ring)

    def _read_violations(self, watched: _WatchedRing, total: int, row: list[Any]) -> None:
        capacity = watched.rows.shape[0]
        if row[_VIOLATIONS] == NOT_MEASURED:
            row[_VIOLATIONS], row[_VIOLATION_RING_CAPACITY], row[_VIOLATIONS_NEW] = total, capacity, 0
        elif total * row[_VIOLATION_RING_CAPACITY] >= row[_VIOLATIONS] * capacity:  # the fullest ring speaks for a row
            row[_VIOLATIONS], row[_VIOLATION_RING_CAPACITY] = total, capacity
        seen = watched.seen
        if total != seen:
            watched.seen = total
            if total < seen:
                seen = 0  # somebody emptied the ring: what it holds now is new
            if total > seen:
                row[_VIOLATIONS_NEW] += total - seen
                self._note_violations(watched, row, seen, total, capacity)

    def _note_violations(self, watched: _WatchedRing, row: list[Any], seen: int, total: int, capacity: int) -> None:
        details = self.details
        kept = min(total, capacity)
        lost = total - max(seen, kept)
        if lost > 0:
            details.violations_lost += lost
            if details.violations_lost_from is None:
                details.violations_lost_from = row[1]
        if kept > seen:
            if len(details.violations) >= _MAX_DETAIL_ROWS:
                details.violations_lost += kept - seen
                return
            rows = watched.rows[seen:kept].numpy().copy()
            details.violations.append((row[1], row[2], row[3], row[4], row[_TIME_NS], seen, rows))

    # --- requests ---------------------------------------------------------------------------------------------------

    def _note_requests(self, call: PlanCall, row: list[Any]) -> None:
        if not call.req_pool_indices.is_cpu:
            return
        details = self.details
        if len(details.requests) >= _MAX_DETAIL_ROWS:
            details.requests_dropped += call.req_pool_indices.shape[0]
            return
        parts = (call.req_pool_indices, call.prefix_lens, call.extend_seq_lens)
        copies = [part.numpy().astype(np.int64, copy=True) for part in parts]
        details.requests.append((row[1], row[2], row[3], row[4], call.swa_window_size, *copies))

    def _push(self, lane: Lane, call: VerifyCall | WriteCall) -> None:  # type: ignore[valid-type]
        context, plan = call
        tag = context.kernel_kind
        row = lane.row_of(plan, _TAG_GROUP[tag])
        name = names.VERIFY if call.__class__ is VerifyCall else names.WRITE
        assert lane.ranges is not None
        lane.ranges.push(name, _TAG_NAME[tag], _payload(row) if row is not None else None)
        lane.in_range = True


def _payload(row: list[Any]) -> int | None:
    bs = row[_BS]
    # NVTX takes Python's own integers only.
    return None if bs == NOT_MEASURED else int(bs)
