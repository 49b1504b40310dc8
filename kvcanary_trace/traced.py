"""`traced(...)`: phases of an engine that has launchers of its own, recorded as rows without a change inside them.

    @kv_canary.traced("plan", bs=lambda batch: len(batch.reqs), verify_demand=lambda batch: sum(batch.prefix_lens))
    def plan(batch): ...

    @kv_canary.traced("verify", verify_checked=lambda batch: batch.checked)
    def verify(batch): ...

Facts are constants, or functions of the traced function's own arguments by name; they are asked after it returned, and
before it where it raises. Without a session a call costs one branch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from time import perf_counter_ns, time_ns
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

from kvcanary_trace.kernels.layout import ProbeWord

from . import names, steps
from .lane import GROUPS
from .schema import NOT_MEASURED
from .steps import known

if TYPE_CHECKING:
    from .lane import Lane
    from .session import Session

__all__ = ["Phase", "traced"]

Phase: TypeAlias = Literal["plan", "verify", "write"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_DURATION: Final = {"plan": ProbeWord.PLAN_NS, "verify": ProbeWord.VERIFY_NS, "write": ProbeWord.WRITE_NS}
_FACTS: Final = {
    word.name.lower(): int(word)
    for word in ProbeWord
    if ProbeWord.BS <= word <= ProbeWord.VIOLATIONS_NEW and word not in _DURATION.values()
}


def traced(phase: Phase, *, group: Literal["full", "swa"] = "full", **facts: Any) -> Callable[[_Function], _Function]:
    """Record calls of a function as one phase of a forward: its duration, an NVTX range, and what it demands.

    A plan opens the row; a second plan of the same group begins the next forward. A verify or write belongs to the
    row that is open for its group, or opens one. Give `kv_canary.step()` around them what only the engine knows.

    Args:
        phase: plan, verify or write.
        group: Buffer group that the function works on.
        **facts: Columns of the `steps` table (bs, verify_demand, verify_capacity, …): an int or a bool, or a function
            of arguments of the traced function, by their names. None is recorded as null.

    Raises:
        TypeError: a fact is no column that a phase can tell, or asks for an argument that the function lacks.
        ValueError: `phase` or `group` is unknown.
    """
    if phase not in _DURATION:
        raise ValueError(f"phase must be plan, verify or write, got {phase!r}")
    for name in facts:
        if name not in _FACTS:
            raise TypeError(f"a phase has no fact {name!r}; it has {', '.join(_FACTS)}")
    number = known("group", group, GROUPS)

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        asked = {name: _asker(name, fact, signature) for name, fact in facts.items()}

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            session = steps.open_session
            if session is None:
                return function(*args, **kwargs)
            call = _Call(session, phase, number, group)
            error: BaseException | None = None
            try:
                return function(*args, **kwargs)
            except BaseException as raised:
                error = raised
                raise
            finally:
                call.end(error, lambda: _values(signature, asked, args, kwargs))

        return wrapper  # type: ignore[return-value]

    return decorate


class _Call:
    """One call of a traced function. Nothing of it raises."""

    __slots__ = ("_lane", "_phase", "_row", "_session", "_t0_ns")

    def __init__(self, session: Session, phase: Phase, group: int, subject: str) -> None:
        self._session = session
        self._phase = phase
        self._row: list[Any] | None = None
        self._lane: Lane | None = None
        try:
            lane = session.lane()
            if phase == "plan":
                self._row = lane.begin_forward(group).new_row(group, None)
            else:
                open_row = lane.forward.row_of_group(group) if lane.forward is not None else None
                self._row = open_row or lane.begin_forward(group).new_row(group, None)
            if lane.ranges is not None:
                lane.ranges.push(phase, subject, None)
            self._lane = lane
        except Exception as error:
            session.failed(error)
        self._t0_ns = perf_counter_ns()

    def end(self, error: BaseException | None, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Add duration, facts and error to the row."""
        spent_ns = perf_counter_ns() - self._t0_ns
        row, lane = self._row, self._lane
        if row is None or lane is None:
            return
        try:
            if lane.ranges is not None:
                lane.ranges.pop()
            word = _DURATION[self._phase]
            row[word] = spent_ns if row[word] == NOT_MEASURED else row[word] + spent_ns
            if row[ProbeWord.TIME_NS] == NOT_MEASURED:
                row[ProbeWord.TIME_NS] = time_ns()
            if error is not None and lane.forward is not None:
                self._session.note_error(lane.forward, error)
            for name, value in facts().items():
                row[_FACTS[name]] = NOT_MEASURED if value is None else int(value)
        except Exception as failure:
            self._session.failed(failure)


def _asker(name: str, fact: Any, signature: inspect.Signature) -> Any:
    """The names that a fact asks for, with the fact; or the constant itself."""
    if not callable(fact):
        return fact
    wanted = tuple(inspect.signature(fact).parameters)
    if missing := [one for one in wanted if one not in signature.parameters]:
        raise TypeError(
            f"fact {name} asks for {', '.join(missing)}; the function has {', '.join(signature.parameters)}"
        )
    return wanted, fact


def _values(
    signature: inspect.Signature, asked: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return {
        name: fact[1](*(bound.arguments[one] for one in fact[0])) if isinstance(fact, tuple) else fact
        for name, fact in asked.items()
    }


assert set(_DURATION) == {names.PLAN, names.VERIFY, names.WRITE}
