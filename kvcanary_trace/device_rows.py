"""Rows that a CUDA device publishes itself, so that they come from inside captured graphs too, where no Python runs.

A recorder owns what the device writes to: a cell with the step's number, a scratch row and a state for each (runner,
group), and a ring in pinned host memory, which the drain thread reads without ever synchronising. All of it lives as
long as the session, because captured graphs keep the addresses.

Outside a capture a row is published when its step ends or its group is planned again. Inside one nobody can tell which
launch will be the last, so the last one of the group's forward before is taken for it; a graph that is captured without
any forward before publishes after each write, and the ring then has rows of one key that only the last of is whole.

Where device times are asked for, a mark stands before and after each launch: the row then has durations, and a word in
host memory says which phase the device completed last, which is all that is known of a step in which it dies.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from kvcanary_trace.kernels.hooks import Call, PlanCall, WriteCall
from kvcanary_trace.kernels.layout import NOT_MEASURED, PROBE_WORDS, Phase, ProbeWord, Progress

from . import names
from .black_box import HeaderWord
from .ring import RingReader, Words

if TYPE_CHECKING:
    from kvcanary_trace.kernels.buffers import VerifyOrWriteContext

    from .black_box import RingMemory

_log: Final = logging.getLogger(names.LOGGER)

_MAX_STEPS_AHEAD: Final = 65_536
"""Steps that the host may run ahead of the device: each has a pinned cell of its own until the device has read it."""

_CLOSE_TIMEOUT_S: Final = 5.0


_OF_LAUNCHES: Final = (
    ProbeWord.VERIFY_CHECKED,
    ProbeWord.VIOLATIONS,
    ProbeWord.VIOLATIONS_NEW,
    ProbeWord.VIOLATION_RING_CAPACITY,
)
"""Words that a row lacks when its plan was followed by no launch."""


class _Group:
    """Device memory and bookkeeping of one (runner, group)."""

    __slots__ = ("captured", "context", "group", "last", "last_launch", "marked", "plans", "runner", "scratch", "state")

    def __init__(self, device: torch.device, state_words: int, runner: int, group: int) -> None:
        self.runner = runner
        self.group = group
        self.captured = False  # whether its row that waits is part of a graph
        self.marked = False  # whether a mark stands before the launch to come
        self.scratch = torch.zeros(PROBE_WORDS, dtype=torch.int64, device=device)
        self.state = torch.full((state_words,), -1, dtype=torch.int64, device=device)
        self.plans: tuple[Any, Any] | None = None  # of the row that waits to be published
        self.context: VerifyOrWriteContext | None = None  # of its latest launch
        self.last_launch: tuple[type, int] | None = None
        self.last: tuple[type, int] | None = None  # last launch of the forward before


class DeviceRecorder:
    """One device's rows. `reader` belongs to the drain thread, the rest to the thread that launches."""

    def __init__(
        self,
        device: torch.device,
        number: int,
        ring_rows: int,
        memory: RingMemory | None = None,
        *,
        timed: bool = False,
    ) -> None:
        """Allocate; not inside a capture.

        Args:
            device: Where the launches run.
            number: Of the ring, for the `seq` column.
            ring_rows: Rows of 256 bytes.
            memory: Page-aligned shared memory to keep the ring in; pinned memory when None.
            timed: Whether to mark the device's time before and after each launch.

        Raises:
            RuntimeError: the shared memory cannot be registered with the device.
        """
        from kvcanary_trace.kernels.triton_backend import record

        pinned = device.type == "cuda"
        self._record = record
        self.device = device
        self.number = number
        self._step = torch.full((1,), -1, dtype=torch.int64, device=device)
        self._cells = torch.zeros(_MAX_STEPS_AHEAD, dtype=torch.int64, pin_memory=pinned)
        self._cell_words = self._cells.numpy()
        self._cell_views = tuple(self._cells.split(1))  # type: ignore[no-untyped-call]
        self._next_cell = 0
        self._published = torch.zeros(1, dtype=torch.int64, device=device)
        self.timed = timed
        if memory is None:
            self._ring = torch.zeros(ring_rows, PROBE_WORDS, dtype=torch.int64, pin_memory=pinned)
            self._progress = torch.full((1,), NOT_MEASURED, dtype=torch.int64, pin_memory=pinned)
        else:
            self._ring = torch.from_numpy(memory.rows)
            self._progress = torch.from_numpy(memory.header[HeaderWord.PROGRESS :][:1])
            if pinned:
                _register(memory)
        self._progress_words = self._progress.numpy()
        self._no_violations = torch.zeros(1, dtype=torch.int32, device=device)
        self._groups: dict[tuple[int, int], _Group] = {}
        self._violations = 0
        self._warned = False
        self.reader = RingReader(self._ring.numpy())

    # --- the launching thread ---------------------------------------------------------------------------------------

    def begin_step(self, number: int | None) -> None:
        """Put the step's number on the stream, behind everything launched so far; never inside a capture."""
        if self._capturing():
            return
        at = self._next_cell
        self._next_cell = (at + 1) % _MAX_STEPS_AHEAD
        self._cell_words[at] = -1 if number is None else number
        self._step.copy_(self._cell_views[at], non_blocking=True)

    def before_plan(self, runner: int, group: int) -> None:
        """Mark the time, where times are asked for; a group's first plan is not timed, its memory comes after it."""
        mine = self._groups.get((runner, group))
        if mine is not None and self.timed:
            self._publish(mine)
            self._record.mark(mine.state)
            mine.marked = True

    def before_launch(self, call: Call) -> None:
        """Mark the time before a verify or write launch, where times are asked for."""
        mine = self._group_of(call[1]) if self.timed else None
        if mine is not None:
            self._record.mark(mine.state)
            mine.marked = True

    def after_plan(self, call: PlanCall, runner: int, group: int) -> None:
        """Probe a plan that has just been launched."""
        key = (runner, group)
        mine = self._groups.get(key)
        if mine is None:
            if self._capturing():
                if not self._warned:
                    self._warned = True
                    _log.warning(
                        "a CUDA graph is captured before any forward ran outside one: its rows will be missing; "
                        "run one forward eagerly first, inside the session"
                    )
                return
            mine = self._groups[key] = _Group(self.device, self._record.STATE_WORDS, runner, group)
            self._record.warmup(call, step=self._step, state=mine.state, scratch=mine.scratch, timed=self.timed)
            mine.state.fill_(-1)
        else:
            self._publish(mine)
            mine.last = mine.last_launch
        mine.plans = (call.verify_plan_out, call.write_plan_out)
        mine.captured = self._capturing()
        mine.context = mine.last_launch = None
        self._record.probe(
            call,
            step=self._step,
            state=mine.state,
            scratch=mine.scratch,
            runner=runner,
            group=group,
            kind=0,
            marked=mine.marked,
        )
        mine.marked = False

    def after_launch(self, call: Call) -> None:
        """Note a verify or write launch; inside a capture, publish after the one that is taken for the last."""
        context, plan = call  # type: ignore[misc]
        mine = self._group_of(plan)
        if mine is None:
            return
        if mine.marked:
            mine.marked = False
            phase = Phase.WRITE if isinstance(call, WriteCall) else Phase.VERIFY
            self._record.span(
                mine.state, mine.scratch, self._progress, runner=mine.runner, group=mine.group, phase=phase
            )
        mine.context = context
        mine.last_launch = (type(call), int(context.kernel_kind))
        if self._capturing() and (
            mine.last_launch == mine.last if mine.last is not None else isinstance(call, WriteCall)
        ):
            self._publish(mine, keep=mine.last is None)

    def end_step(self) -> None:
        """Publish the rows of an eager step."""
        if not self._capturing():
            for mine in self._groups.values():
                self._publish(mine)

    def close(self) -> None:
        """Publish what is left and give the device some seconds to finish; a broken context is left alone."""
        try:
            self.end_step()
            if self.device.type == "cuda":
                _wait_for(torch.cuda.current_stream(self.device), _CLOSE_TIMEOUT_S)
        except RuntimeError as error:
            got = self.progress
            where = f", it completed the {got} last" if got is not None else ""
            _log.warning("the device no longer answers%s; rows published before are kept: %s", where, error)

    @property
    def progress(self) -> Progress | None:
        """The last phase that the device completed, as far as it marks them; readable after the device has died."""
        return Progress.of(int(self._progress_words[0]))

    def _group_of(self, plan: object) -> _Group | None:
        """The group whose row waits for launches with this plan."""
        for mine in self._groups.values():
            if mine.plans is not None and any(plan is one for one in mine.plans):
                return mine
        return None

    def _publish(self, mine: _Group, *, keep: bool = False) -> None:
        if mine.plans is None:
            return
        if mine.captured != self._capturing():
            # A captured forward's row comes with its replays; an eager one's must not come with every replay.
            mine.plans = None
            return
        context = mine.context
        self._record.publish(
            mine.scratch,
            violation_write_index=self._no_violations if context is None else context.violation_write_index,
            violation_ring_capacity=0 if context is None else context.violation_ring.shape[0],
            published=self._published,
            ring=self._ring,
        )
        if not keep:
            mine.plans = None

    def _capturing(self) -> bool:
        return is_capturing(self.device)

    # --- the drain thread -------------------------------------------------------------------------------------------

    def read(self) -> Words:
        """Rows published since the last read, with the violations that each adds."""
        rows = self.reader.read()
        if len(rows):
            totals = rows[:, ProbeWord.VIOLATIONS]
            rows[:, ProbeWord.VIOLATIONS_NEW] = np.maximum(np.diff(totals, prepend=self._violations), 0)
            self._violations = int(totals[-1])
            planned_only = rows[:, ProbeWord.VIOLATION_RING_CAPACITY] == 0
            for word in _OF_LAUNCHES:
                rows[planned_only, word] = NOT_MEASURED
        return rows

    @property
    def published(self) -> int:
        """Rows that the device has published so far, as far as the host can see without asking it."""
        return int(np.maximum(self._ring.numpy()[:, ProbeWord.SEQ_END], 0).max(initial=0))


def _register(memory: RingMemory) -> None:
    """Let the device write to a ring's shared memory, for the rest of the process: captured graphs keep the address."""
    portable_and_mapped = 3
    size = memory.header.nbytes + memory.rows.nbytes
    status = torch.cuda.cudart().cudaHostRegister(memory.header.ctypes.data, size, portable_and_mapped)  # type: ignore[no-untyped-call]
    if int(status) != 0:
        raise RuntimeError(f"cudaHostRegister of {size >> 20} MiB of shared memory failed with {int(status)}")


def is_capturing(device: torch.device) -> bool:
    """Whether the calling thread's stream is being captured into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _wait_for(stream: torch.cuda.Stream, timeout_s: float) -> None:
    """Wait until a stream is empty, at most `timeout_s`; polls, because a wait of CUDA's own has no limit."""
    import time

    deadline = time.monotonic() + timeout_s
    while not stream.query():
        if time.monotonic() > deadline:
            _log.warning("the device is still busy after %.0f s; rows that it publishes later are lost", timeout_s)
            return
        time.sleep(0.001)
