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


_OF_EACH_PACKET: Final = pb.varint(_Packet.SEQUENCE_ID, _SEQUENCE)
_OF_EACH_EVENT: Final = pb.varint(_Packet.SEQUENCE_FLAGS, _NEEDS_STATE) + _OF_EACH_PACKET
_TYPE: Final = {kind: pb.varint(_Event.TYPE, kind) for kind in (_SLICE_BEGIN, _SLICE_END, _INSTANT, _COUNTER)}
_MAX_REMEMBERED: Final = 65_536


class PerfettoWriter:
    """Writes events as they come. Memory grows with tracks and distinct names only."""

    def __init__(self, file: BinaryIO, begin_ns: int) -> None:
        """Begin a trace whose earliest event is at `begin_ns`."""
        self._write = file.write
        self._tracks: dict[Track, bytes] = {}
        self._processes: dict[Process, int] = {}
        self._uuids = 0
        self._iids: dict[tuple[int, str], int] = {}
        self._new_names: list[bytes] = []
        self._titles: dict[str, bytes] = {}
        self._remembered: dict[tuple[str, type, Any], bytes] = {}
        clocks = [pb.message(1, (pb.varint(1, clock), pb.varint(2, begin_ns))) for clock in (_BOOTTIME, _REALTIME)]
        self._packet(
            pb.message(_Packet.CLOCK_SNAPSHOT, clocks),
            pb.varint(_Packet.SEQUENCE_FLAGS, _STATE_CLEARED),
            _OF_EACH_PACKET,
        )

    def add(self, event: Event) -> None:
        """Write one event, and before it the descriptors that it is the first to need."""
        track = self._tracks.get(event.track) or self._new_track(event.track)
        if isinstance(event, Sample):
            self._event(event.time_ns, _COUNTER, track, pb.double(_Event.DOUBLE_VALUE, event.value))
            return
        title = self._titles.get(event.name) or self._new_title(event.name)
        about = self._annotations(event.args)
        if isinstance(event, Instant):
            if event.flow is not None:
                about.append(pb.fixed64(_Event.ENDING_FLOWS, event.flow))
            self._event(event.time_ns, _INSTANT, track, title, *about)
        else:
            about += [pb.fixed64(_Event.FLOWS, flow) for flow in event.flows]
            self._event(event.begin_ns, _SLICE_BEGIN, track, title, *about)
            self._event(event.end_ns, _SLICE_END, track)

    def close(self) -> None:
        """Every packet is whole: there is nothing to add."""

    def _packet(self, *fields: bytes) -> None:
        self._write(pb.message(1, fields))

    def _event(self, time_ns: int, kind: int, *fields: bytes) -> None:
        names = b""
        if self._new_names:
            names = pb.message(_Packet.INTERNED_DATA, self._new_names)
            self._new_names = []
        event = pb.message(_Packet.TRACK_EVENT, (_TYPE[kind], *fields))
        self._packet(pb.varint(_Packet.TIMESTAMP, time_ns), event, names, _OF_EACH_EVENT)

    def _intern(self, field: int, name: str) -> int:
        """The number of a name, told to the reader with the next packet when it is new."""
        iid = self._iids.get((field, name))
        if iid is None:
            iid = self._iids[field, name] = len(self._iids) + 1
            self._new_names.append(pb.message(field, (pb.varint(1, iid), pb.text(2, name))))
        return iid

    def _new_title(self, name: str) -> bytes:
        """Name and category of an event."""
        title = pb.varint(_Event.NAME_IID, self._intern(_Interned.NAMES, name))
        title += pb.varint(_Event.CATEGORY_IIDS, self._intern(_Interned.CATEGORIES, name))
        self._titles[name] = title
        return title

    def _annotations(self, args: Mapping[str, Any]) -> list[bytes]:
        """Most values of a step are those of the step before: limits, modes, small counts."""
        if len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.clear()
        remembered = self._remembered
        found = []
        for name, value in args.items():
            key = (name, value.__class__, value)  # the class: True equals 1, and is told otherwise
            told = remembered.get(key)
            if told is None:
                told = remembered[key] = self._annotation(name, value)
            found.append(told)
        return found

    def _annotation(self, name: str, value: Any) -> bytes:
        if isinstance(value, bool):
            told = pb.boolean(2, value)
        elif isinstance(value, int):
            told = pb.varint(4, value)
        elif isinstance(value, float):
            told = pb.double(5, value)
        else:
            told = pb.text(6, str(value))
        return pb.message(_Event.ANNOTATIONS, (pb.varint(1, self._intern(_Interned.ANNOTATION_NAMES, name)), told))

    # --- tracks -----------------------------------------------------------------------------------------------------

    def _new_track(self, track: Track) -> bytes:
        """The field that puts an event on this track."""
        parent = self._process(track.process)
        uuid = self._uuid()
        fields = [pb.varint(1, uuid), pb.varint(5, parent), pb.text(2, track.name)]
        if track.unit is not None:
            fields.append(pb.message(8, (pb.text(6, track.unit),)))
        self._packet(pb.message(_Packet.TRACK_DESCRIPTOR, fields), _OF_EACH_PACKET)
        self._tracks[track] = pb.varint(_Event.TRACK_UUID, uuid)
        return self._tracks[track]

    def _process(self, process: Process) -> int:
        uuid = self._processes.get(process)
        if uuid is None:
            uuid = self._processes[process] = self._uuid()
            # Numbered, because the same process number may come from several hosts.
            about = pb.message(3, (pb.varint(1, len(self._processes)), pb.text(6, process.name)))
            self._packet(pb.message(_Packet.TRACK_DESCRIPTOR, (pb.varint(1, uuid), about)), _OF_EACH_PACKET)
        return uuid

    def _uuid(self) -> int:
        self._uuids += 1
        return self._uuids
