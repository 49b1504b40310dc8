"""A timeline through NVTXW, by which Nsight Systems takes events that were collected elsewhere.

The backend, a shared library of the tool's, decides where the events go. Steps and phases become push/pop ranges of
domain `kv_canary`, violations marks, utilisation counters; each track is a stream and a scope of its own, and the times
are those of the rows, Unix ns.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvcanary_trace import names
from kvcanary_trace.errors import SettingError

from .export_timeline import Event, Instant, Sample, Track

__all__ = ["NvtxwWriter"]

_BATCH_EVENTS: Final = 4096
_FACTS: Final = ("step", "forward", "bs", "slot", "position")
"""Integers of an event that go along with it; one that is not measured is left out, and gets a schema without it."""

_VIOLATION_COLOR: Final = 0xFFD55E00


class NvtxwWriter:
    """Writes batches of events. Memory is bounded by tracks times the size of a batch."""

    def __init__(self, backend: Path, session: str, config: Sequence[str]) -> None:
        """Load the backend and begin a session.

        Args:
            backend: Path of the tool's shared library.
            session: Name of the session; tools may name a file by it.
            config: Options of the backend, `key=value` each.

        Raises:
            SettingError: nvtx is too old, or the library is no backend, or it refuses the session.
        """
        try:
            self._nvtx, self._writer = import_module("nvtx"), import_module("nvtx.writer")
        except ImportError as error:
            raise SettingError(
                f"--format nvtxw needs the NVTXW writer of nvtx 0.2.16 or newer ({error}): pip install 'nvtx>=0.2.16'"
            ) from None
        self._batches: dict[tuple[Track, tuple[str, ...]], list[tuple[int, ...]]] = {}
        self._streams: dict[Track, Any] = {}
        self._open = ExitStack()
        try:
            self._backend = self._writer.load_backend(backend)
            self._open.callback(self._backend.close)
            self._session = self._open.enter_context(
                self._writer.Session(session, backend=self._backend, config="\n".join(config) or None)
            )
            self._domain = self._session.get_domain(names.DOMAIN)
        except (OSError, self._writer.WriterError) as error:
            self._open.close()
            raise SettingError(
                f"--backend {backend} is no NVTXW backend that works here: {error}; give the library that comes with "
                "the tool, such as Nsight Systems' own"
            ) from None

    def add(self, event: Event) -> None:
        """Take one event; it is written with the batch of its track."""
        if isinstance(event, Sample):
            self._put(event.track, (), (event.time_ns, event.value))
            return
        facts = tuple(name for name in _FACTS if isinstance(event.args.get(name), int))
        known = tuple(event.args[name] for name in facts)
        about = (
            self._domain.get_registered_string(event.name).handle,
            self._domain.get_category_id(event.name),
            names.COLORS.get(event.name, _VIOLATION_COLOR),
        )
        times = (event.time_ns,) if isinstance(event, Instant) else (event.begin_ns, event.end_ns)
        self._put(event.track, facts, (*times, *about, *known))

    def close(self) -> None:
        """Write what is left and end the session: the backend finishes its file.

        Raises:
            SettingError: the backend failed.
        """
        try:
            with self._open:
                for (track, facts), rows in self._batches.items():
                    self._write(track, facts, rows)
        except self._writer.WriterError as error:
            raise SettingError(f"the NVTXW backend failed: {error}") from None

    def _put(self, track: Track, facts: tuple[str, ...], row: tuple[Any, ...]) -> None:
        rows = self._batches.setdefault((track, facts), [])
        rows.append(row)
        if len(rows) >= _BATCH_EVENTS:
            try:
                self._write(track, facts, rows)
            except self._writer.WriterError as error:
                with suppress(self._writer.WriterError):
                    self._open.close()
                raise SettingError(f"the NVTXW backend failed: {error}") from None
            rows.clear()

    def _write(self, track: Track, facts: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
        if not rows:
            return
        stream = self._stream(track)
        if track.unit is not None:
            times = np.array([row[0] for row in rows], dtype=np.int64)
            values = np.array([row[1] for row in rows], dtype=np.float64)
            stream.write_counter_batch(self._counter(track), values, timestamps=times, ordering=self._ordering(times))
            return
        marks = track.name == f"{names.VIOLATION}s"
        schema = self._schema(marks, facts)
        batch = np.array(rows, dtype=schema.dtype)
        stream.write_event_batch(schema, batch, ordering=self._ordering(batch[schema.dtype.names[0]]))

    def _ordering(self, times: Any) -> Any:
        kinds = self._nvtx.BatchOrdering
        return kinds.SORTED if np.all(times[1:] >= times[:-1]) else kinds.UNSORTED

    def _stream(self, track: Track) -> Any:
        stream = self._streams.get(track)
        if stream is None:
            # Slashes and brackets are the path's own; ours have none.
            path = f"{track.process.run}/rank[{track.process.rank}]/{track.name}"
            made = self._session.create_stream(
                path,
                domain=self._domain,
                scope=self._domain.get_scope(path),
                time_domain_id=self._nvtx.TimestampType.CPU_CLOCK_GETTIME_REALTIME,
            )
            stream = self._streams[track] = self._open.enter_context(made)
        return stream

    def _counter(self, track: Track) -> Any:
        semantics = self._nvtx.CounterSemantics(
            unit=track.unit, min=0.0, interpolation=self._nvtx.CounterInterpolation.UNTIL_NEXT
        )
        path = f"{track.process.run}/rank[{track.process.rank}]"
        return self._domain.get_counter(track.name, float, semantics=semantics, scope=self._domain.get_scope(path))

    def _schema(self, marks: bool, facts: tuple[str, ...]) -> Any:
        field, kind, kinds = self._nvtx.numpy_dtype, self._nvtx.EntryKind, self._nvtx.PayloadEntryType
        times: list[tuple[str, Any]] = (
            [("time", field(np.int64, entry_kind=kind.MARK))]
            if marks
            else [
                ("begin", field(np.int64, entry_kind=kind.RANGE_BEGIN)),
                ("end", field(np.int64, entry_kind=kind.RANGE_END)),
            ]
        )
        about = [
            ("message", field(np.uint64, entry_kind=kind.MESSAGE, entry_type=kinds.REGISTERED_STRING)),
            ("category", field(np.uint32, entry_type=kinds.CATEGORY)),
            ("color", field(np.uint32, entry_type=kinds.COLOR_ARGB)),
        ]
        dtype = np.dtype([*times, *about, *((name, np.dtype(np.int64)) for name in facts)])
        events = self._nvtx.EventKind
        return self._domain.get_schema(dtype, kind=events.MARK if marks else events.RANGE_PUSHPOP)
