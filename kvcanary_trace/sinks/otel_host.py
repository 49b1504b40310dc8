"""The span that is current during `step()`: started on the engine's thread, ended by the drain thread with its facts.

Only a sampled step starts one, so that the others cost a random number and a look at the context.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from random import random
from time import time_ns as clock_ns
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.context import attach, detach, get_current
from opentelemetry.trace import get_current_span, set_span_in_context

from kvcanary_trace import names
from kvcanary_trace.lane import MODE_NAMES
from kvcanary_trace.schema import NOT_MEASURED, HostWord

from . import otel_names as n

if TYPE_CHECKING:
    from kvcanary_trace.steps import step

__all__ = ["HostSpans", "Opened", "Sampling", "sampling_of"]

_log: Final = logging.getLogger(names.LOGGER)

DEFAULT_RATE: Final = 0.01
_MAX_OPEN: Final = 4096

_MODE: Final = int(HostWord.MODE)
_HIGH: Final = int(HostWord.TRACE_ID_HIGH)
_LOW: Final = int(HostWord.TRACE_ID_LOW)
_SPAN: Final = int(HostWord.SPAN_ID)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which steps get a span of their own."""

    rate: float
    """Share of the steps that have no parent to follow."""
    follow_parent: bool
    """Whether a step inside a span does as that span does."""
    ask: bool = False
    """Whether the provider decides: the host's own sampler, which its variables configured."""


def sampling_of(environ: Mapping[str, str] | None = None, *, own: bool) -> Sampling:
    """What `OTEL_TRACES_SAMPLER` asks for; 1 % of the steps where it asks for nothing.

    Args:
        own: Whether the spans go to a provider of ours; a host's provider decides by itself when the variable is set.
    """
    environ = os.environ if environ is None else environ
    name = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower()
    if not name:
        return Sampling(DEFAULT_RATE, follow_parent=False)
    follow = name.startswith("parentbased_")
    kind = name.removeprefix("parentbased_")
    if kind == "always_on":
        sampling = Sampling(1.0, follow)
    elif kind == "always_off":
        sampling = Sampling(0.0, follow)
    elif kind == "traceidratio":
        try:
            rate = float(environ.get("OTEL_TRACES_SAMPLER_ARG", "1.0"))
        except ValueError:
            rate = -1.0
        if not 0.0 <= rate <= 1.0:
            _log.warning("OTEL_TRACES_SAMPLER_ARG must be a number from 0 to 1; sampling 1 %% of the steps instead")
            rate = DEFAULT_RATE
        sampling = Sampling(rate, follow)
    else:
        _log.warning(
            "OTEL_TRACES_SAMPLER must be always_on, always_off or traceidratio, also with parentbased_ before it, got "
            "%r; sampling 1 %% of the steps instead",
            name,
        )
        return Sampling(DEFAULT_RATE, follow_parent=False)
    return sampling if own else Sampling(1.0, follow_parent=False, ask=True)


class Opened:
    """A step's span: started, current, and to be ended by the drain thread."""

    __slots__ = ("age", "end_ns", "span", "start_ns", "token", "virtual")

    def __init__(self, span: Any, start_ns: int, virtual: bool) -> None:
        self.span = span
        self.virtual = virtual  # times are the engine's, not the clock's
        self.start_ns = start_ns
        self.end_ns: int | None = None  # None: the step still runs
        self.token: Any = None
        self.age = 0


class HostSpans:
    """`begin` and `end` are called on threads that step, the rest on the drain thread."""

    def __init__(self, tracer: Any, sampling: Sampling, run: str, rank: int) -> None:
        self._tracer = tracer
        self._rate = sampling.rate
        self._follow_parent = sampling.follow_parent
        self._attributes = {n.RUN: run, n.RANK: rank, n.KEPT: "sampled"}
        self._pid = os.getpid()
        self._has_failed = False
        self.open: dict[int, Opened] = {}
        """By span id."""

    def begin(self, step: step, parent: step | None) -> Opened | None:
        """Start the span of a step and make it current, if the step is sampled; put the ids into its host half."""
        try:
            return self._begin(step, step._half, parent)
        except Exception as error:  # a processor of the host's
            self._failed(error)
            return None

    def _begin(self, step: step, half: list[Any], parent: step | None) -> Opened | None:
        if half[_SPAN] != NOT_MEASURED:
            half[_HIGH] = half[_LOW] = half[_SPAN] = NOT_MEASURED  # a step object that is used again
        context = get_current()
        # Most engines step in no span at all: then the context is empty.
        ambient = get_current_span(context).get_span_context() if context else None
        if ambient is not None and not ambient.is_valid:
            ambient = None
        if parent is not None:
            wanted = parent._span is not None
        elif ambient is not None and (self._follow_parent or not ambient.trace_flags.sampled):
            wanted = bool(ambient.trace_flags.sampled)
        else:
            wanted = random() < self._rate
        if not wanted:
            if ambient is not None and ambient.trace_flags.sampled:
                _put_ids(half, ambient)  # what the drain thread links to, if it keeps the step
            return None
        return self._start(step, half)

    def _start(self, step: step, half: list[Any]) -> Opened | None:
        if len(self.open) >= _MAX_OPEN or os.getpid() != self._pid:
            return None
        start_ns = clock_ns() if step.time_ns is None else step.time_ns
        attributes = {**self._attributes, _STEP: step.step, n.attribute("mode"): MODE_NAMES[half[_MODE]]}
        span = self._tracer.start_span(n.SPAN_STEP, attributes=attributes, start_time=start_ns)
        context = span.get_span_context()
        if not span.is_recording() or not context.trace_flags.sampled:
            return None
        _put_ids(half, context)
        opened = Opened(span, start_ns, step.time_ns is not None)
        self.open[context.span_id] = opened
        opened.token = attach(set_span_in_context(span))
        return opened

    def end(self, opened: Opened, host_ns: int) -> None:
        """The step is over: its span is current no longer, and ends when its rows are drained."""
        opened.end_ns = opened.start_ns + host_ns if opened.virtual else clock_ns()
        detach(opened.token)

    def _failed(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            _log.warning("OpenTelemetry: the span of a step cannot be started, recording goes on", exc_info=error)

    def forget_old(self, max_age: int) -> None:
        """End spans whose rows never came: of steps that only bracket other forwards."""
        for span_id, opened in list(self.open.items()):
            if opened.end_ns is not None:
                opened.age += 1
                if opened.age > max_age:
                    del self.open[span_id]
                    opened.span.end(opened.end_ns)

    def close(self) -> None:
        """End all that is left, also of steps that still run."""
        self.forget_old(-1)
        for opened in self.open.values():
            opened.span.end()


_STEP: Final = n.attribute("step")


def _put_ids(half: list[Any], context: Any) -> None:
    trace_id, span_id = context.trace_id, context.span_id
    half[_HIGH] = _signed(trace_id >> 64)
    half[_LOW] = _signed(trace_id & _MASK)
    half[_SPAN] = _signed(span_id)


_MASK: Final = (1 << 64) - 1


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
