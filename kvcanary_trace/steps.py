"""`step()`: one forward step of the engine, as a context manager or a decorator. Without a session it does nothing."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from time import perf_counter_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from . import names
from .errors import SessionError
from .lane import EMPTY_HALF, MODE_NAMES, MODES, RUNNERS, Forward, Lane
from .schema import NOT_MEASURED, HostWord

if TYPE_CHECKING:
    from .session import Session
    from .sinks.otel_host import Opened

_Function = TypeVar("_Function", bound=Callable[..., Any])

open_session: Session | None = None
"""The session of this process; `session.py` sets it."""

_MODE = int(HostWord.MODE)
_GRAPH_REPLAY = int(HostWord.GRAPH_REPLAY)
_HOST_NS = int(HostWord.HOST_NS)
_WRITE_ENTRY_CAPACITY = int(HostWord.WRITE_ENTRY_CAPACITY)
_KV_USED = int(HostWord.KV_USED)
_KV_CAPACITY = int(HostWord.KV_CAPACITY)
_RESIDENT_REQS = int(HostWord.RESIDENT_REQS)
_RESIDENT_TOKENS = int(HostWord.RESIDENT_TOKENS)
_WAITING_REQS = int(HostWord.WAITING_REQS)
_WAITING_TOKENS = int(HostWord.WAITING_TOKENS)

_MAX_OPEN_FORWARDS: Final = 64
_TAIL: Final = EMPTY_HALF[_WAITING_TOKENS + 1 :]

_UPDATABLE: Final = {
    "graph_replay": _GRAPH_REPLAY,
    "kv_used": _KV_USED,
    "kv_capacity": _KV_CAPACITY,
    "resident_reqs": _RESIDENT_REQS,
    "resident_tokens": _RESIDENT_TOKENS,
    "waiting_reqs": _WAITING_REQS,
    "waiting_tokens": _WAITING_TOKENS,
}
assert EMPTY_HALF.index(NOT_MEASURED, _MODE) == _MODE and list(_UPDATABLE.values()) == [6, *range(9, 15)]


def known(what: str, name: object, numbers: Mapping[str, int]) -> int:
    """The number of a name.

    Raises:
        ValueError: the name is none of them.
    """
    if not isinstance(name, str) or name not in numbers:
        raise ValueError(f"{what} must be one of {', '.join(numbers)}, got {name!r}")
    return numbers[name]


class step(Forward):
    """One forward step. Values that are None are recorded as null, never as zero.

    Inside another `step()` of the same thread it is one more forward of that step, as speculative decoding has them.
    Values known only inside are given to `update` of the object that the block yields.

    Args:
        step: Number of the step; counted by the session when None.
        mode: What the forward does: prefill, decode, mixed, target_verify, draft_extend, idle or unknown.
        runner: Whose forward it is: target or draft.
        graph_replay: Whether it is a CUDA-graph replay.
        kv_used: KV slots held, evictable cache excluded.
        kv_capacity: KV slots in the pool.
        resident_reqs: Requests that the engine runs.
        resident_tokens: Their tokens so far.
        waiting_reqs: Requests queued.
        waiting_tokens: Their tokens.
        time_ns: Unix time in ns to record, for engines on a virtual clock; the host's clock when None.

    Raises:
        ValueError: `mode` or `runner` is unknown.
    """

    __slots__ = ("_given", "_half", "_lane", "_outer", "_span", "_t0_ns", "_used", "earlier")

    _lane: Lane | None
    _outer: tuple[step | None, Forward | None]
    _span: Opened | None
    _used: list[int] | None
    earlier: list[Forward] | None

    def __init__(
        self,
        step: int | None = None,
        *,
        mode: str = "unknown",
        runner: Literal["target", "draft"] = "target",
        graph_replay: bool | None = None,
        kv_used: int | None = None,
        kv_capacity: int | None = None,
        resident_reqs: int | None = None,
        resident_tokens: int | None = None,
        waiting_reqs: int | None = None,
        waiting_tokens: int | None = None,
        time_ns: int | None = None,
    ) -> None:
        try:
            mode_number = MODES[mode]
            self.runner = RUNNERS[runner]
        except (KeyError, TypeError):
            known("mode", mode, MODES)
            known("runner", runner, RUNNERS)
            raise
        self._lane = None
        self._given = step
        self.time_ns = time_ns
        # The words of a host half, in their order.
        self._half = [
            0,
            0,
            0,
            0,
            0,
            mode_number,
            NOT_MEASURED if graph_replay is None else graph_replay,
            NOT_MEASURED,
            NOT_MEASURED,
            NOT_MEASURED if kv_used is None else kv_used,
            NOT_MEASURED if kv_capacity is None else kv_capacity,
            NOT_MEASURED if resident_reqs is None else resident_reqs,
            NOT_MEASURED if resident_tokens is None else resident_tokens,
            NOT_MEASURED if waiting_reqs is None else waiting_reqs,
            NOT_MEASURED if waiting_tokens is None else waiting_tokens,
            *_TAIL,
        ]

    def update(self, **values: Any) -> None:
        """Set values that only the inside of the step knows, by the names of the arguments; they replace those given.

        Raises:
            TypeError: a name is none of them.
            ValueError: `mode` is unknown.
        """
        for name, value in values.items():
            if name == "mode":
                self._half[_MODE] = known("mode", value, MODES)
            elif name == "time_ns":
                self.time_ns = value
            elif name in _UPDATABLE:
                self._half[_UPDATABLE[name]] = NOT_MEASURED if value is None else value
            else:
                raise TypeError(f"a step has no value {name!r}; it has mode, time_ns, {', '.join(_UPDATABLE)}")

    def __enter__(self) -> step:
        session = open_session
        if session is None:
            return self
        try:
            try:
                lane: Lane = session.local.lane
            except AttributeError:
                lane = session.lane()
            self._outer = (parent, forward) = (lane.step, lane.forward)
            self.groups = self.number = 0
            self.rows = []
            self.error = self.message = NOT_MEASURED
            self._used = self.earlier = self._span = None
            if parent is not None:
                self._enter_inside(session, parent)
            else:
                if forward is not None:
                    lane.end_implicit()
                    self._outer = (None, None)
                if self._given is None:
                    self.step = next(session.step_numbers)
                else:
                    self.step = self._given
                    session.saw_step(self._given)
            if lane.ranges is not None:
                half = self._half
                resident = half[_RESIDENT_REQS]
                name = names.STEP_REPLAY if half[_GRAPH_REPLAY] == 1 else names.STEP
                lane.ranges.push(name, MODE_NAMES[half[_MODE]], None if resident == NOT_MEASURED else int(resident))
            lane.step = lane.forward = self
            self._lane = lane
            if lane.spans is not None:
                self._span = lane.spans.begin(self, parent)
            self.on_device = False
            for recorder in session.recorders:
                recorder.begin_step(self.step)
            self._t0_ns = perf_counter_ns()
        except Exception as error:
            session.failed(error)
        return self

    def _enter_inside(self, session: Session, parent: step) -> None:
        """Become one more forward of the step around this one, unless a number of its own says otherwise."""
        self._used = parent._numbers_used()
        if self._given is None or self._given == parent.step:
            self.step = parent.step
            self.number = self._used[self.runner]
            self._used[self.runner] += 1
        else:
            self._used = None
            self.step = self._given
            session.saw_step(self._given)

    def _numbers_used(self) -> list[int]:
        """Forwards numbered so far in this step, by runner; shared by all that are inside it."""
        if self._used is None:
            self._used = [0, 0]
            self._used[self.runner] = 1
        return self._used

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        lane = self._lane
        if lane is None:
            return
        try:
            host_ns = perf_counter_ns() - self._t0_ns
            self._lane = None
            if lane.ranges is not None:
                lane.ranges.pop()
            if self._span is not None and lane.spans is not None:
                lane.spans.end(self._span, host_ns)
            session = lane.session
            if lane.step is self:
                last = lane.forward
                lane.step, lane.forward = self._outer
            else:
                last = self._leave_between(lane)
                session.failed(_overlap(self.step))
            for recorder in session.recorders:
                recorder.end_step()
            if session.closed or last is None:
                return
            if error is not None:
                session.note_error(last, error)
            if self.earlier is not None:
                for forward in self.earlier:
                    forward.time_ns = self.time_ns
                    lane.publish(forward, self._host_half(lane, host_ns))
                last.time_ns = self.time_ns
            if self._used is not None and self._outer[0] is None and not last.rows and last.error == NOT_MEASURED:
                return  # only a bracket around other forwards
            half = self._half
            half[_HOST_NS] = host_ns
            if session.write_entry_capacity is not None:
                half[_WRITE_ENTRY_CAPACITY] = session.write_entry_capacity
            lane.publish(last, half)
        except Exception as failure:
            lane.session.failed(failure)

    def _leave_between(self, lane: Lane) -> Forward | None:
        """End this step although others that began after it on this thread still run, and return its latest forward.

        Coroutines that share a thread do this. Their launches go to whichever step
        began last, which may be the wrong one.
        """
        inner = lane.step
        while inner is not None and inner._outer[0] is not self:
            inner = inner._outer[0]
        if inner is None:
            return None
        forward = inner._outer[1]
        inner._outer = self._outer
        return forward

    def _host_half(self, lane: Lane, host_ns: int) -> list[Any]:
        """This object's host half; publishing copies it."""
        half = self._half
        half[_HOST_NS] = host_ns
        capacity = lane.session.write_entry_capacity
        if capacity is not None:
            half[_WRITE_ENTRY_CAPACITY] = capacity
        return half

    def next_forward(self, lane: Lane) -> Forward:
        """Begin the next forward of the same step; called when a plan repeats a group.

        The one before stays open: its verify and write launches may still come.
        """
        forward = lane.forward
        assert forward is not None and self.step is not None
        if self.earlier is None:
            self.earlier = []
        if len(self.earlier) >= _MAX_OPEN_FORWARDS:
            lane.publish(self.earlier.pop(0), self._host_half(lane, NOT_MEASURED))
        self.earlier.append(forward)
        used = self._numbers_used()
        number = used[self.runner]
        used[self.runner] += 1
        return Forward(self.step, number, self.runner, self.time_ns)

    def close_early(self, lane: Lane) -> None:
        """Publish what is known so far; the session closes while the block still runs."""
        forwards = [*(self.earlier or ()), *([lane.forward] if lane.forward is not None else [])]
        self.earlier = None
        for forward in forwards:
            if forward.rows:
                lane.publish(forward, self._host_half(lane, NOT_MEASURED))

    def _again(self) -> step:
        """A fresh object with the same arguments, for each call of a decorated function."""
        twin = object.__new__(type(self))
        twin._lane = None
        twin._given = self._given
        twin.runner = self.runner
        twin.time_ns = self.time_ns
        twin._half = self._half.copy()
        return twin

    def __call__(self, function: _Function) -> _Function:
        """Make each call of `function` a step. Works for coroutine functions too."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def asynchronous(*args: Any, **kwargs: Any) -> Any:
                with self._again():
                    return await function(*args, **kwargs)

            return asynchronous  # type: ignore[return-value]

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if open_session is None:
                return function(*args, **kwargs)
            with self._again():
                return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]


def _overlap(number: int | None) -> SessionError:
    return SessionError(
        f"step {number} ended before a step that began after it on the same thread: launches of overlapping steps "
        "may be recorded under the wrong one; await nothing inside a step, or give each step a thread"
    )
