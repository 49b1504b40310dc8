"""Live tails: rows that no sealed Parquet part has yet, as append-only Arrow IPC streams with a checksum per batch.

`DIR/_live/<table>.run=<id>.rank=<n>.<pid>-<k>.arrows` becomes `DIR/<table>/run=<id>/rank=<n>/part-<k>.parquet` when it
is sealed. Each message of the stream ends its metadata with a trailer that Arrow's readers ignore as padding: a mark,
the CRC-32 of everything else in the message, and its length. So any Arrow reader can open a tail, and ours knows which
batches are whole. Whatever follows a torn batch is left alone: nothing is appended after one.
"""

from __future__ import annotations

import errno
import os
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from kvcanary_trace.errors import DatasetError

LIVE_DIR: Final = "_live"

_CONTINUATION: Final = 0xFFFF_FFFF
_PREFIX: Final = struct.Struct("<II")  # continuation, bytes of metadata
_TRAILER: Final = struct.Struct("<8sIIQ")  # mark, CRC-32, zero, bytes of the body
_MARK: Final = b"kvcanary"
_COMPRESSED_ROWS: Final = 512
"""Smaller batches are kept as they are: to compress eighty small buffers takes twenty times as long as to copy them."""
_NAME: Final = re.compile(
    r"(?P<table>[a-z]+)\.run=(?P<run>[^.]+)\.rank=(?P<rank>\d+)\.(?P<pid>\d+)-(?P<part>\d+)\.arrows"
)


@dataclass(frozen=True, slots=True)
class LiveTail:
    """One live tail's file and what its name says."""

    path: Path
    table: str
    run: str
    rank: int
    pid: int
    part: int

    @property
    def sealed_path(self) -> Path:
        """The Parquet part that this tail becomes."""
        return part_path(self.path.parent.parent, self.table, self.run, self.rank, self.part)


def live_path(directory: Path, table: str, run: str, rank: int, pid: int, part: int) -> Path:
    """Where the live tail of part `part` stands."""
    return directory / LIVE_DIR / f"{table}.run={run}.rank={rank}.{pid}-{part:05d}.arrows"


def part_path(directory: Path, table: str, run: str, rank: int, part: int) -> Path:
    """Where the sealed part `part` stands."""
    return directory / table / f"run={run}" / f"rank={rank}" / f"part-{part:05d}.parquet"


def live_tails(directory: Path | str) -> list[LiveTail]:
    """All tails of a dataset that no sealed part replaces, in order."""
    tails = []
    for path in sorted((Path(directory) / LIVE_DIR).glob("*.arrows")):
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        tail = LiveTail(path, match["table"], match["run"], int(match["rank"]), int(match["pid"]), int(match["part"]))
        # A part appears before its tail goes: for a moment, or for good after a crash, both stand.
        if not tail.sealed_path.exists():
            tails.append(tail)
    return tails


class Encoder:
    """Turns batches of one schema into messages with a checksum."""

    def __init__(self, schema: pa.Schema) -> None:
        """Encode batches of `schema`; `header` is the message that begins each file."""
        self.header = _with_checksum(schema.serialize().to_pybytes())
        self._schema = schema
        self._options = pa.ipc.IpcWriteOptions(compression="lz4" if pa.Codec.is_available("lz4") else None)

    def encode(self, batch: pa.RecordBatch) -> bytes:
        """One message; `header` and messages one after the other are a tail."""
        if batch.num_rows < _COMPRESSED_ROWS:
            return _with_checksum(batch.serialize().to_pybytes())
        # A stream of its own for each batch; its schema message is dropped. In memory of Arrow's: a file of Python's
        # would ask for the interpreter's lock, which the engine needs, at each of two hundred writes.
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self._schema, options=self._options) as stream:
            stream.write_batch(batch)
        data = sink.getvalue().to_pybytes()
        begin = _message_bytes(data, 0)
        return _with_checksum(data[begin : begin + _message_bytes(data, begin)])


def _message_bytes(data: bytes, begin: int) -> int:
    """Length of the message that begins at `begin`, written by Arrow itself."""
    _, metadata_bytes = _PREFIX.unpack_from(data, begin)
    body = pa.ipc.read_message(pa.py_buffer(data)[begin:]).body
    return _PREFIX.size + int(metadata_bytes) + (body.size if body is not None else 0)


def _with_checksum(message: bytes) -> bytes:
    _, metadata_bytes = _PREFIX.unpack_from(message)
    metadata = message[_PREFIX.size : _PREFIX.size + metadata_bytes]
    body = message[_PREFIX.size + metadata_bytes :]
    trailer = _TRAILER.pack(_MARK, zlib.crc32(body, zlib.crc32(metadata)), 0, len(body))
    prefix = _PREFIX.pack(_CONTINUATION, metadata_bytes + _TRAILER.size)
    return b"".join((prefix, metadata, trailer, body))


def decode(messages: bytes, schema: pa.Schema) -> pa.RecordBatch:
    """The batch of one message of an `Encoder`."""
    return pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(messages)), schema)


class TailFile:
    """One tail on disk. A batch reaches the kernel in one write, so a killed process tears at most the last."""

    def __init__(self, path: Path, header: bytes) -> None:
        """Create the file, which must not exist, and write the header.

        Raises:
            OSError: the file cannot be made.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.size_bytes = 0
        try:
            self.append(header)
        except OSError:
            self.remove()
            raise

    def append(self, message: bytes) -> None:
        """Append one message, whole or not at all.

        Raises:
            OSError: it could not be written, or the file is gone from its folder.
        """
        if os.fstat(self._fd).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "live tail was removed while it was written", str(self.path))
        try:
            left = memoryview(message)
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            self.cut(self.size_bytes)
            raise
        self.size_bytes += len(message)

    def cut(self, size_bytes: int) -> None:
        """Take back what was appended after `size_bytes`."""
        os.ftruncate(self._fd, size_bytes)
        self.size_bytes = size_bytes

    def close(self) -> None:
        """Close the file, leaving it where it stands."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        """Close the file and delete it, if it is still there."""
        self.close()
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class LiveRead:
    """What a tail holds: its whole batches, and how many bytes after them are torn."""

    schema: pa.Schema
    batches: tuple[pa.RecordBatch, ...]
    torn_bytes: int

    @property
    def table(self) -> pa.Table:
        """All whole batches as one table."""
        return pa.Table.from_batches(self.batches, self.schema)


def read_live(path: Path | str) -> pa.Table:
    """All complete batches of a live tail, checksums verified; a torn end is left out.

    Raises:
        DatasetError: the file cannot be read, or does not even begin like a live tail.
    """
    return scan_live(path).table


def scan_live(path: Path | str) -> LiveRead:
    """Like `read_live`, and says how much of the end is torn.

    Raises:
        DatasetError: the file cannot be read, or does not even begin like a live tail.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DatasetError(f"cannot read live tail {path}: {error.strerror or error}") from error
    messages = _whole_messages(data)
    begin, end = next(messages, (0, 0))
    if end == 0:
        raise DatasetError(f"{path} is no live tail: its first message is torn or has no checksum of ours")
    whole = pa.py_buffer(data)
    schema = pa.ipc.read_schema(whole[begin:end])
    batches = []
    for begin, end in messages:
        batches.append(pa.ipc.read_record_batch(pa.ipc.read_message(whole[begin:end]), schema))
    return LiveRead(schema, tuple(batches), len(data) - end)


def _whole_messages(data: bytes) -> Iterator[tuple[int, int]]:
    """(begin, end) of each message from the start on, up to the first that is torn."""
    begin = 0
    while begin + _PREFIX.size <= len(data):
        continuation, metadata_bytes = _PREFIX.unpack_from(data, begin)
        body = begin + _PREFIX.size + metadata_bytes
        if continuation != _CONTINUATION or metadata_bytes < _TRAILER.size or body > len(data):
            return
        mark, checksum, zero, body_bytes = _TRAILER.unpack_from(data, body - _TRAILER.size)
        end = body + body_bytes
        if mark != _MARK or zero != 0 or end > len(data):
            return
        metadata = memoryview(data)[begin + _PREFIX.size : body - _TRAILER.size]
        if zlib.crc32(memoryview(data)[body:end], zlib.crc32(metadata)) != checksum:
            return
        yield begin, end
        begin = end
