"""A timeline as a Perfetto trace: TracePackets of TrackEvents, one after the other, nothing held back.

Field numbers are those of Perfetto's published `perfetto_trace.proto`; tests read the files with the `perfetto`
package's own classes. Times are Unix ns on Perfetto's BOOTTIME clock, and a clock snapshot says that REALTIME is equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, BinaryIO, Final

from . import export_protobuf as pb
from .export_timeline import Event, Instant, Process, Sample, Track

__all__ = ["PerfettoWriter"]

_SEQUENCE: Final = 1
_STATE_CLEARED: Final = 1
_NEEDS_STATE: Final = 2
_REALTIME, _BOOTTIME = 1, 6  # BuiltinClock
_SLICE_BEGIN, _SLICE_END, _INSTANT, _COUNTER = 1, 2, 3, 4  # TrackEvent.Type


class _Packet:
    """Fields of TracePacket."""

    CLOCK_SNAPSHOT = 6
    TIMESTAMP = 8
    SEQUENCE_ID = 10
    TRACK_EVENT = 11
    INTERNED_DATA = 12
    SEQUENCE_FLAGS = 13
    TRACK_DESCRIPTOR = 60


class _Event:
    """Fields of TrackEvent."""

    CATEGORY_IIDS = 3
    ANNOTATIONS = 4
    TYPE = 9
    NAME_IID = 10
    TRACK_UUID = 11
    DOUBLE_VALUE = 44
    FLOWS = 47
    ENDING_FLOWS = 48


class _Interned:
    """Fields of InternedData."""

    CATEGORIES = 1
    NAMES = 2
    ANNOTATION_NAMES = 3


class PerfettoWriter:
    """Writes events as they come. Memory grows with tracks and distinct names only."""

    def __init__(self, file: BinaryIO, begin_ns: int) -> None:
        """Begin a trace whose earliest event is at `begin_ns`."""
        self._file = file
        self._tracks: dict[Track, int] = {}
        self._processes: dict[Process, int] = {}
        self._uuids = 0
        self._iids: dict[tuple[int, str], int] = {}
        self._new_names: list[bytes] = []
        clocks = [pb.message(1, (pb.varint(1, clock), pb.varint(2, begin_ns))) for clock in (_BOOTTIME, _REALTIME)]
        self._packet(
            pb.message(_Packet.CLOCK_SNAPSHOT, clocks),
            pb.varint(_Packet.SEQUENCE_FLAGS, _STATE_CLEARED),
        )

    def add(self, event: Event) -> None:
        """Write one event, and before it the descriptors that it is the first to need."""
        uuid = pb.varint(_Event.TRACK_UUID, self._track(event.track))
        if isinstance(event, Sample):
            self._event(event.time_ns, _COUNTER, uuid, pb.double(_Event.DOUBLE_VALUE, event.value))
            return
        about = [
            uuid,
            pb.varint(_Event.NAME_IID, self._intern(_Interned.NAMES, event.name)),
            pb.varint(_Event.CATEGORY_IIDS, self._intern(_Interned.CATEGORIES, event.name)),
            *self._annotations(event.args),
        ]
        if isinstance(event, Instant):
            if event.flow is not None:
                about.append(pb.fixed64(_Event.ENDING_FLOWS, event.flow))
            self._event(event.time_ns, _INSTANT, *about)
        else:
            about += [pb.fixed64(_Event.FLOWS, flow) for flow in event.flows]
            self._event(event.begin_ns, _SLICE_BEGIN, *about)
            self._event(event.end_ns, _SLICE_END, uuid)

    def close(self) -> None:
        """Every packet is whole: there is nothing to add."""

    def _packet(self, *fields: bytes) -> None:
        self._file.write(pb.message(1, (*fields, pb.varint(_Packet.SEQUENCE_ID, _SEQUENCE))))

    def _event(self, time_ns: int, kind: int, *fields: bytes) -> None:
        packet = [
            pb.varint(_Packet.TIMESTAMP, time_ns),
            pb.message(_Packet.TRACK_EVENT, (pb.varint(_Event.TYPE, kind), *fields)),
            pb.varint(_Packet.SEQUENCE_FLAGS, _NEEDS_STATE),
        ]
        if self._new_names:
            packet.append(pb.message(_Packet.INTERNED_DATA, self._new_names))
            self._new_names = []
        self._packet(*packet)

    def _intern(self, field: int, name: str) -> int:
        """The number of a name, told to the reader with the next packet when it is new."""
        iid = self._iids.get((field, name))
        if iid is None:
            iid = self._iids[field, name] = len(self._iids) + 1
            self._new_names.append(pb.message(field, (pb.varint(1, iid), pb.text(2, name))))
        return iid

    def _annotations(self, args: Mapping[str, Any]) -> list[bytes]:
        found = []
        for name, value in args.items():
            key = pb.varint(1, self._intern(_Interned.ANNOTATION_NAMES, name))
            if isinstance(value, bool):
                told = pb.boolean(2, value)
            elif isinstance(value, int):
                told = pb.varint(4, value)
            elif isinstance(value, float):
                told = pb.double(5, value)
            else:
                told = pb.text(6, str(value))
            found.append(pb.message(_Event.ANNOTATIONS, (key, told)))
        return found

    # --- tracks -----------------------------------------------------------------------------------------------------

    def _track(self, track: Track) -> int:
        uuid = self._tracks.get(track)
        if uuid is None:
            parent = self._process(track.process)
            uuid = self._tracks[track] = self._uuid()
            fields = [pb.varint(1, uuid), pb.varint(5, parent), pb.text(2, track.name)]
            if track.unit is not None:
                fields.append(pb.message(8, (pb.text(6, track.unit),)))
            self._packet(pb.message(_Packet.TRACK_DESCRIPTOR, fields))
        return uuid

    def _process(self, process: Process) -> int:
        uuid = self._processes.get(process)
        if uuid is None:
            uuid = self._processes[process] = self._uuid()
            # Numbered, because the same process number may come from several hosts.
            about = pb.message(3, (pb.varint(1, len(self._processes)), pb.text(6, process.name)))
            self._packet(pb.message(_Packet.TRACK_DESCRIPTOR, (pb.varint(1, uuid), about)))
        return uuid

    def _uuid(self) -> int:
        self._uuids += 1
        return self._uuids
