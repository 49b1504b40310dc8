"""`trace()`: settings, sinks and the black box put together into the one open session of this process."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

from . import config, nvtx_ranges, steps
from .black_box import BlackBox
from .errors import SessionError, SettingError
from .listener import Callback
from .runfile import Run, check_run_id, new_run_id
from .session import Session, describe
from .sinks import Sink

__all__ = ["trace"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class trace:
    """Record what the canary does at every step, as a context manager that yields the `Session`, or as a decorator.

    Arguments that are None come from `KVCANARY_TRACE_*`, else from the default. One session is open at a time.

    Args:
        path_or_sink: Directory of the dataset, a `Sink`, or several of both; `KVCANARY_TRACE_DIR`, then `traces`.
        run: The run's id; a fresh one when None. A run that exists is never mixed or overwritten.
        rank: This process's rank; `KVCANARY_TRACE_RANK`, then `RANK`, then 0.
        flush_interval_s: Seconds after which a row is on disk at the latest.
        part_rows: Rows after which a part is sealed.
        part_seconds: Seconds after which a part is sealed.
        ring_rows: Rows that each ring keeps, 256 bytes each.
        detail: "requests" records each request of each step in a table of its own.
        write_entry_capacity: Tokens that the engine's buffers hold, for the rows' column.
        engine: Engine arguments, for the run file.
        capacities: For the run file; dicts with `capacity`, `group`, `value` and `origin`.
        nvtx: Whether to emit NVTX ranges when a tool listens.
        device_rows: Whether CUDA devices publish their rows themselves, from inside captured graphs too. Off by
            default: what its launches cost the host in eager steps has not been measured.
        device_times: Whether devices that publish their rows mark the time before and after each launch, for the
            durations of rows and, after a crash, for the phase that was completed last. Two tiny kernels a launch.
        black_box: Whether to keep the rings in `/dev/shm`, from where `kvcanary-trace recover` takes every published
            row after a crash, and where `kvcanary-trace watch` reads along.
        pressure: Whether to watch capacities while rows are drained, and log changes of their severity.
        on_pressure: Called with a `Transition` for each of them, on a thread of its own, within 0.1 s, or later by as
            much as keeps the drain thread below a twentieth of a core.
        otel: Whether to export by OpenTelemetry; when None, where the host set a provider or `OTEL_*` an endpoint.
        device: What the engine runs on, for the run file.

    Raises:
        SettingError: a setting is unknown, malformed or impossible.
        SessionError: on entering, when a session is already open.
        DatasetError: on entering, when the directory cannot be written or already has the run.
    """

    def __init__(
        self,
        path_or_sink: str | os.PathLike[str] | Sink | Sequence[str | os.PathLike[str] | Sink] | None = None,
        *,
        run: str | None = None,
        rank: int | None = None,
        flush_interval_s: float | None = None,
        part_rows: int | None = None,
        part_seconds: float | None = None,
        ring_rows: int | None = None,
        detail: Literal["requests"] | None = None,
        write_entry_capacity: int | None = None,
        engine: Mapping[str, Any] | None = None,
        capacities: Sequence[Mapping[str, Any]] | None = None,
        nvtx: bool | None = None,
        device_rows: bool | None = None,
        device_times: bool | None = None,
        black_box: bool | None = None,
        pressure: bool | None = None,
        on_pressure: Callback | None = None,
        otel: bool | None = None,
        device: str = "cpu",
    ) -> None:
        self._path_or_sink = path_or_sink
        arguments = {
            "dir": os.fspath(path_or_sink) if isinstance(path_or_sink, (str, os.PathLike)) else None,
            "run": run,
            "rank": rank,
            "flush_interval_s": flush_interval_s,
            "part_rows": part_rows,
            "part_seconds": part_seconds,
            "ring_rows": ring_rows,
            "detail": detail,
            "write_entry_capacity": write_entry_capacity,
            "nvtx": nvtx,
            "device_rows": device_rows,
            "device_times": device_times,
            "black_box": black_box,
            "pressure": pressure,
            "otel": otel,
        }
        self._on_pressure = on_pressure
        self._settings = config.resolve(arguments)
        if (asked := self._settings["run"].value) is not None:
            check_run_id(asked)
        self._engine = dict(engine or {})
        self._capacities = [dict(capacity) for capacity in capacities or ()]
        self._device = device
        self._session: Session | None = None

    def __enter__(self) -> Session:
        if steps.open_session is not None and steps.open_session.automatic:
            steps.open_session.close()
        if steps.open_session is not None:
            raise SessionError(
                f"a session is already open (run {steps.open_session.run_id}); sessions do not nest: close it first, "
                "or give its trace() several sinks"
            )
        value = {name: effective.value for name, effective in self._settings.items()}
        run = Run(
            run=value["run"] or new_run_id(),
            rank=value["rank"],
            world_size=max(value["world_size"], value["rank"] + 1),
            device=self._device,
            engine=self._engine,
            capacities=self._capacities,
            settings={name: {"value": e.value, "origin": e.origin} for name, e in self._settings.items()},
        )
        sinks = list(self._sinks(value))
        domain = nvtx_ranges.open_domain(value["nvtx"])
        counters = None
        if domain is not None:
            from .sinks.nvtx_counters import counters_of

            counters = counters_of(domain)
            if counters is not None:
                sinks.append(counters)
        black_box = None
        if value["black_box"]:
            folder = next((str(one.directory) for one in sinks if hasattr(one, "directory")), None)
            black_box = BlackBox(run, value["ring_rows"], folder)
        session = Session(sinks, self._settings, run, domain, self._on_pressure, black_box)
        if counters is not None:
            counters.device_rings = session.device_rings
        opened: list[Sink] = []
        try:
            for sink in sinks:
                sink.open(run)
                opened.append(sink)
        except BaseException as error:
            # What an earlier sink claimed must not say for ever that the run goes on.
            run.status, run.error, run.ended_ns = "failed", describe(error), time.time_ns()
            for sink in opened:
                with contextlib.suppress(Exception):
                    sink.close()
            if black_box is not None:
                black_box.remove()
            raise
        session.host_spans = next(filter(None, (getattr(sink, "host_spans", None) for sink in sinks)), None)
        session.open()
        self._session = session
        return session

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close(error)

    def _sinks(self, value: Mapping[str, Any]) -> Iterable[Sink]:
        from .sinks.parquet import ParquetSink

        given = self._path_or_sink
        if given is None:
            given = value["dir"]
        several = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
        if not several:
            raise SettingError("trace() needs at least one directory or sink, got an empty sequence")
        for one in several:
            if isinstance(one, (str, os.PathLike)):
                yield ParquetSink(Path(one), part_rows=value["part_rows"], part_seconds=value["part_seconds"])
            elif isinstance(one, Sink):
                yield one
            else:
                raise SettingError(f"a sink is a directory or has open, write and close, got {type(one).__name__}")
        if value["otel"] is not False and not any(type(one).__name__ == "OtelSink" for one in several):
            from .sinks import otel_setup

            if value["otel"] or otel_setup.is_configured():
                from .sinks.otel import OtelSink

                yield OtelSink(everything=bool(value["otel"]))

    def __call__(self, function: _Function) -> _Function:
        """Give each call of `function` a session of its own. Works for coroutine functions too."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def asynchronous(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await function(*args, **kwargs)

            return asynchronous  # type: ignore[return-value]

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]
