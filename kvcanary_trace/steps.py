"""`step()`: one forward step of the engine, as a context manager or a decorator. Without a session it does nothing."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from time import perf_counter_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from . import names
from .lane import EMPTY_ROW, MODE_NAMES, MODES, RUNNERS, Forward, Lane
from .schema import NOT_MEASURED, HostWord

if TYPE_CHECKING:
    from .session import Session

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

_UPDATABLE: Final = (
    "mode",
    "graph_replay",
    "kv_used",
    "kv_capacity",
    "resident_reqs",
    "resident_tokens",
    "waiting_reqs",
    "waiting_tokens",
    "time_ns",
)


class step:
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

    __slots__ = (
        "_forward",
        "_forwards",
        "_lane",
        "_nested",
        "_parent",
        "_pushed",
        "_t0_ns",
        "earlier",
        "graph_replay",
        "kv_capacity",
        "kv_used",
        "mode",
        "resident_reqs",
        "resident_tokens",
        "runner",
        "step",
        "time_ns",
        "waiting_reqs",
        "waiting_tokens",
    )

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
        self._lane: Lane | None = None
        self._nested: bool
        self._forward: Forward
        self._forwards: list[int]
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        if runner not in RUNNERS:
            raise ValueError(f"runner must be one of {', '.join(RUNNERS)}, got {runner!r}")
        self.step = step
        self.mode = MODES[mode]
        self.runner = RUNNERS[runner]
        self.graph_replay = graph_replay
        self.kv_used = kv_used
        self.kv_capacity = kv_capacity
        self.resident_reqs = resident_reqs
        self.resident_tokens = resident_tokens
        self.waiting_reqs = waiting_reqs
        self.waiting_tokens = waiting_tokens
        self.time_ns = time_ns

    def update(self, **values: Any) -> None:
        """Set values that only the inside of the step knows, by the names of the arguments; they replace those given.

        Raises:
            TypeError: a name is none of them.
            ValueError: `mode` is unknown.
        """
        for name, value in values.items():
            if name not in _UPDATABLE:
                raise TypeError(f"a step has no value {name!r}; it has {', '.join(_UPDATABLE)}")
            if name == "mode":
                if value not in MODES:
                    raise ValueError(f"mode must be one of {', '.join(MODES)}, got {value!r}")
                value = MODES[value]
            setattr(self, name, value)

    def __enter__(self) -> step:
        session = open_session
        if session is None:
            return self
        try:
            self._enter(session)
        except Exception as error:
            session.failed(error)
        return self

    def _enter(self, session: Session) -> None:
        lane = session.lane()
        parent = lane.step
        number = self.step
        if parent is None:
            if lane.forward is not None:
                lane.end_implicit()
            if number is None:
                number = next(session.step_numbers)
            else:
                session.saw_step(number)
            forwards = self._forwards = [0, 0]
        else:
            parent._nested = True
            outer = parent._forwards
            if number is None or number == parent._forward.step:
                number, forwards = parent._forward.step, outer
            else:
                session.saw_step(number)
                forwards = [0, 0]
            self._forwards = forwards
        self._nested = False
        self.earlier: list[Forward] = []
        self._parent = (parent, lane.forward)
        runner = self.runner
        self._forward = lane.forward = Forward(number, forwards[runner], runner, self.time_ns)
        forwards[runner] += 1
        lane.step = self
        self._lane = lane
        ranges = lane.ranges
        if ranges is not None:
            self._pushed = True
            ranges.push(names.STEP, MODE_NAMES[self.mode], self.resident_reqs)
        else:
            self._pushed = False
        self._t0_ns = perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        lane = self._lane
        if lane is None:
            return
        self._lane = None
        try:
            self._exit(lane, error)
        except Exception as failure:
            lane.session.failed(failure)

    def _exit(self, lane: Lane, error: BaseException | None) -> None:
        host_ns = perf_counter_ns() - self._t0_ns
        if self._pushed and lane.ranges is not None:
            lane.ranges.pop()
        forward = lane.forward
        lane.step, lane.forward = self._parent
        session = lane.session
        if session.closed or forward is None:
            return
        if error is not None and forward.error == NOT_MEASURED:
            session.note_error(forward, error)
        if self._nested and not forward.rows and forward.error == NOT_MEASURED:
            return  # only a bracket around other forwards
        for earlier in self.earlier:
            earlier.time_ns = self.time_ns
            lane.publish(earlier, self._host_half(lane, host_ns))
        forward.time_ns = self.time_ns
        lane.publish(forward, self._host_half(lane, host_ns))

    def _host_half(self, lane: Lane, host_ns: int) -> list[int]:
        """The words that this object knows; None stays NOT_MEASURED."""
        host = EMPTY_ROW.copy()
        host[_MODE] = self.mode
        host[_HOST_NS] = host_ns
        if (value := lane.session.write_entry_capacity) is not None:
            host[_WRITE_ENTRY_CAPACITY] = value
        if (value := self.graph_replay) is not None:
            host[_GRAPH_REPLAY] = value
        if (value := self.kv_used) is not None:
            host[_KV_USED] = value
        if (value := self.kv_capacity) is not None:
            host[_KV_CAPACITY] = value
        if (value := self.resident_reqs) is not None:
            host[_RESIDENT_REQS] = value
        if (value := self.resident_tokens) is not None:
            host[_RESIDENT_TOKENS] = value
        if (value := self.waiting_reqs) is not None:
            host[_WAITING_REQS] = value
        if (value := self.waiting_tokens) is not None:
            host[_WAITING_TOKENS] = value
        return host

    def next_forward(self, lane: Lane) -> Forward:
        """Begin the next forward of the same step; called when a plan repeats a group.

        The one before stays open: its verify and write launches may still come.
        """
        forward = lane.forward
        assert forward is not None
        if len(self.earlier) >= _MAX_OPEN_FORWARDS:
            lane.publish(self.earlier.pop(0), self._host_half(lane, NOT_MEASURED))
        self.earlier.append(forward)
        number = self._forwards[self.runner]
        self._forwards[self.runner] += 1
        return Forward(forward.step, number, self.runner, self.time_ns)

    def close_early(self, lane: Lane) -> None:
        """Publish what is known so far; the session closes while the block still runs."""
        forwards = [*self.earlier, *([lane.forward] if lane.forward is not None else [])]
        self.earlier = []
        for forward in forwards:
            if forward.rows:
                lane.publish(forward, self._host_half(lane, NOT_MEASURED))

    def _again(self) -> step:
        """A fresh object with the same arguments, for each call of a decorated function."""
        twin = object.__new__(type(self))
        twin._lane = None
        twin.runner = self.runner
        twin.step = self.step
        for name in _UPDATABLE:
            setattr(twin, name, getattr(self, name))
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
