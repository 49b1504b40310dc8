"""A timeline in Chrome's JSON trace event format, which Perfetto, chrome://tracing and Speedscope open.

Times are microseconds since the first event, written with three decimals: a Unix time in microseconds would lose its
nanoseconds in a double. `otherData` has the Unix time that 0 stands for.
"""

from __future__ import annotations

import json
from typing import Any, BinaryIO, Final

from .export_timeline import Event, Instant, Process, Sample, Slice, Track

__all__ = ["ChromeWriter"]

_EXACT: Final = 1 << 53
"""From here on a JSON reader may round an integer."""

_json: Final = json.JSONEncoder(allow_nan=False).encode


class ChromeWriter:
    """Writes events as they come. Memory grows with tracks only."""

    def __init__(self, file: BinaryIO, begin_ns: int) -> None:
        """Begin a trace whose earliest event is at `begin_ns`."""
        self._file = file
        self._begin_ns = begin_ns
        self._threads: dict[Track, tuple[int, int]] = {}
        self._processes: dict[Process, int] = {}
        self._instants: dict[Track, int] = {}
        self._names: dict[str, str] = {}
        self._comma = b"\n"
        head = {"clock_begin_unix_ns": str(begin_ns), "producer": "kvcanary-trace"}
        self._file.write(f'{{"displayTimeUnit": "ns", "otherData": {_json(head)}, "traceEvents": ['.encode())

    def add(self, event: Event) -> None:
        """Write one event, and before it the names that it is the first to need."""
        if isinstance(event, Sample):
            pid = self._process(event.track.process)
            self._write("C", event.time_ns, pid, 0, event.track.name, f', "args": {{"ratio": {_json(event.value)}}}')
            return
        pid, tid = self._thread(event.track)
        if isinstance(event, Slice):
            self._slice(event.begin_ns, event.end_ns, pid, tid, event)
            for flow in event.flows:
                self._flow("s", event.begin_ns, pid, tid, flow)
        else:
            # An arrow binds to a slice, and slices of a track must not overlap: one nanosecond each, in turn.
            begin_ns = max(event.time_ns, self._instants.get(event.track, event.time_ns))
            self._instants[event.track] = begin_ns + 1
            self._slice(begin_ns, begin_ns + 1, pid, tid, event)
            if event.flow is not None:
                self._flow("f", begin_ns, pid, tid, event.flow, ', "bp": "e"')

    def close(self) -> None:
        """End the JSON document."""
        self._file.write(b"\n]}\n")

    def _slice(self, begin_ns: int, end_ns: int, pid: int, tid: int, event: Slice | Instant) -> None:
        args = {name: _exact(value) for name, value in event.args.items()}
        name = self._quoted(event.name)
        more = f', "dur": {_microseconds(end_ns - begin_ns)}, "cat": {name}, "args": {_json(args)}'
        self._write("X", begin_ns, pid, tid, event.name, more)

    def _flow(self, phase: str, time_ns: int, pid: int, tid: int, number: int, more: str = "") -> None:
        self._write(phase, time_ns, pid, tid, "written by", f', "cat": "violation", "id": {number}{more}')

    def _write(self, phase: str, time_ns: int, pid: int, tid: int, name: str, more: str) -> None:
        self._put(
            f'{{"ph": "{phase}", "name": {self._quoted(name)}, "ts": {_microseconds(time_ns - self._begin_ns)}, '
            f'"pid": {pid}, "tid": {tid}{more}}}'
        )

    def _put(self, event: str) -> None:
        self._file.write(self._comma + event.encode())
        self._comma = b",\n"

    def _quoted(self, name: str) -> str:
        quoted = self._names.get(name)
        if quoted is None:
            quoted = self._names[name] = _json(name)
        return quoted

    # --- tracks -----------------------------------------------------------------------------------------------------

    def _thread(self, track: Track) -> tuple[int, int]:
        found = self._threads.get(track)
        if found is None:
            pid = self._process(track.process)
            found = self._threads[track] = (pid, len(self._threads) + 1)
            self._name("thread_name", *found, track.name)
        return found

    def _process(self, process: Process) -> int:
        pid = self._processes.get(process)
        if pid is None:
            # Numbered, because the same process number may come from several hosts.
            pid = self._processes[process] = len(self._processes) + 1
            self._name("process_name", pid, 0, process.name)
        return pid

    def _name(self, what: str, pid: int, tid: int, name: str) -> None:
        self._put(_json({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}))


def _microseconds(time_ns: int) -> str:
    sign, time_ns = ("-", -time_ns) if time_ns < 0 else ("", time_ns)
    return f"{sign}{time_ns // 1000}.{time_ns % 1000:03d}"


def _exact(value: Any) -> Any:
    """Integers that a double cannot hold as text."""
    return str(value) if isinstance(value, int) and not -_EXACT < value < _EXACT else value
