"""The dataset on disk: `DIR/<table>/run=<id>/rank=<n>/part-<k>.parquet`, live tails and the run file.

Rows go to the live tail first, in the same flush, and are sealed into Parquet every `part_rows` rows or `part_seconds`.
Nothing but sealed Parquet ever stands under `DIR/steps/`, so any reader of Hive-style folders takes it as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from kvcanary_trace import runfile
from kvcanary_trace.columns import DURATIONS
from kvcanary_trace.errors import DatasetError, RunExistsError
from kvcanary_trace.runfile import Run
from kvcanary_trace.schema import TABLES, Table

from .live import LIVE_DIR, Encoder, TailFile, decode, live_path, part_path

__all__ = ["DEFAULT_PART_ROWS", "DEFAULT_PART_SECONDS", "ParquetSink", "PartWriter", "write_part"]

DEFAULT_PART_ROWS: Final = 200_000
DEFAULT_PART_SECONDS: Final = 60.0

_ROW_GROUP_ROWS: Final = 65_536


_STATISTICS: Final = ("step", "time")
"""Columns that readers prune by. Statistics of all would be a tenth of a small part."""


class PartWriter:
    """Writes one sealed part: zstd, delta-packed integers, dictionary-packed names.

    Durations are plain: they are noise, of which differences have more bits than values.
    """

    def __init__(self, path: Path, schema: pa.Schema, metadata: Mapping[bytes, bytes]) -> None:
        self._metadata = dict(metadata)
        whole = [field.name for field in schema if _is_whole(field.type)]
        self._writer = pq.ParquetWriter(
            path,
            schema,
            compression="zstd",
            version="2.6",  # nanosecond timestamps
            use_dictionary=[field.name for field in schema if pa.types.is_string(field.type)],
            column_encoding={name: "PLAIN" if name in DURATIONS else "DELTA_BINARY_PACKED" for name in whole},
            write_statistics=[name for name in _STATISTICS if name in whole],
            data_page_size=1 << 20,
        )

    def write(self, table: pa.Table) -> None:
        """Append `table` as one row group."""
        self._writer.write_table(table, row_group_size=max(table.num_rows, 1))

    def close(self) -> None:
        """Write the footer."""
        self._writer.add_key_value_metadata(self._metadata)
        self._writer.close()


def _is_whole(column_type: pa.DataType) -> bool:
    return bool(pa.types.is_integer(column_type) or pa.types.is_timestamp(column_type))


def write_part(
    batches: Sequence[pa.RecordBatch], schema: pa.Schema, metadata: Mapping[bytes, bytes], temporary: Path, path: Path
) -> None:
    """Seal batches into one part: write `temporary`, then rename it to `path`.

    Args:
        batches: Rows in order; at least one batch.
        schema: Their schema, as the file shows it.
        metadata: What the file's key-value metadata has beside the schema's.
        temporary: A path in the same file system, outside the tables.
        path: Where the part appears, whole. Its folder is made.

    Raises:
        OSError: a file cannot be written; nothing appeared.
        RunExistsError: `path` already exists.
    """
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        writer = PartWriter(temporary, schema, metadata)
        try:
            for begin, end in _row_groups([batch.num_rows for batch in batches]):
                writer.write(pa.Table.from_batches(batches[begin:end]).cast(schema))
        finally:
            writer.close()
        _sync(temporary)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(temporary, path)  # unlike a rename, refuses to replace
        except FileExistsError:
            raise RunExistsError(f"{path} already exists and is not overwritten") from None
        except OSError:  # a file system without hard links
            os.rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _row_groups(rows: list[int]) -> list[tuple[int, int]]:
    """Ranges of batches that make one row group each."""
    groups, begin, count = [], 0, 0
    for at, num in enumerate(rows):
        count += num
        if count >= _ROW_GROUP_ROWS:
            groups.append((begin, at + 1))
            begin, count = at + 1, 0
    if begin < len(rows):
        groups.append((begin, len(rows)))
    return groups


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class _Part:
    """The unsealed part of one table: its rows as encoded messages, and the tail that holds the same on disk."""

    __slots__ = ("began_s", "encoder", "messages", "metadata", "number", "rows", "schema", "table", "tail")

    def __init__(self, table: Table, metadata: dict[bytes, bytes]) -> None:
        self.table = table
        self.schema = table.arrow
        self.metadata = metadata
        self.encoder = Encoder(self.schema.with_metadata({**(self.schema.metadata or {}), **metadata}))
        self.number = 0
        self.tail: TailFile | None = None
        self.messages: list[bytes] = []
        self.rows = 0
        self.began_s = 0.0


class ParquetSink:
    """Writes the tables of one run below `directory`. After `open`, all methods belong to the drain thread."""

    def __init__(
        self,
        directory: Path | str,
        *,
        part_rows: int = DEFAULT_PART_ROWS,
        part_seconds: float = DEFAULT_PART_SECONDS,
    ) -> None:
        """Seal a part when it has `part_rows` rows or is `part_seconds` old."""
        self.directory = Path(directory)
        self._part_rows = part_rows
        self._part_seconds = part_seconds
        self._parts: dict[str, _Part] = {}
        self._run: Run | None = None

    def open(self, run: Run) -> None:
        """Claim the run's name in the dataset.

        Raises:
            RunExistsError: the dataset already has this run and rank.
            DatasetError: the directory cannot be written.
        """
        if self._run is not None:
            raise DatasetError(f"this sink already writes run {self._run.run!r}; make one sink for each session")
        for table in TABLES:
            folder = part_path(self.directory, table.name, run.run, run.rank, 0).parent
            if folder.exists():
                raise RunExistsError(f"{self.directory} already has rows of run {run.run!r}, rank {run.rank}: {folder}")
        runfile.claim(self.directory, run)
        self._run = run
        metadata = {runfile.METADATA_KEY: json.dumps(run.brief(), default=str).encode()}
        self._parts = {table.name: _Part(table, metadata) for table in TABLES}

    def write(self, batches: Mapping[str, pa.RecordBatch]) -> None:
        """Seal what is due, then take all of `batches` or none.

        Raises:
            OSError: the disk does not take them; nothing was taken.
        """
        for part in self._parts.values():
            old = time.monotonic() - part.began_s >= self._part_seconds
            if part.messages and (part.rows >= self._part_rows or old):
                self._seal(part)
                runfile.write(self.directory, self._require_run())
        appended: list[tuple[_Part, bytes, int]] = []
        try:
            for name, batch in batches.items():
                if batch.num_rows:
                    appended.append(self._append(self._parts[name], batch))
        except OSError:
            for part, _, _ in appended:
                self._drop_tail(part)
            raise
        for part, message, rows in appended:
            if not part.messages:
                part.began_s = time.monotonic()
            part.messages.append(message)
            part.rows += rows

    def close(self) -> None:
        """Seal everything and write how the run ended.

        Raises:
            OSError: a part could not be sealed (its live tail still has it), or the run file could not be written.
        """
        errors: list[OSError] = []
        for part in self._parts.values():
            try:
                if part.messages:
                    self._seal(part)
            except OSError as error:
                errors.append(error)
            finally:
                if part.tail is not None:
                    part.tail.close()
        if self._run is not None:
            runfile.write(self.directory, self._run)
            self._remove_if_empty(self.directory / LIVE_DIR)
        if errors:
            raise errors[0]

    def _require_run(self) -> Run:
        assert self._run is not None, "open() comes first"
        return self._run

    def _append(self, part: _Part, batch: pa.RecordBatch) -> tuple[_Part, bytes, int]:
        message = part.encoder.encode(batch)
        if part.tail is not None and not part.tail.path.exists():
            self._drop_tail(part)  # somebody removed it; what it held is in `messages` still
        if part.tail is None:
            run = self._require_run()
            path = live_path(self.directory, part.table.name, run.run, run.rank, run.pid, part.number)
            path.unlink(missing_ok=True)
            tail = TailFile(path, part.encoder.header)
            try:
                for kept in part.messages:
                    tail.append(kept)
            except OSError:
                tail.remove()
                raise
            part.tail = tail
        part.tail.append(message)
        return part, message, batch.num_rows

    def _drop_tail(self, part: _Part) -> None:
        """Forget a tail on disk; the next append writes it anew from `messages`."""
        if part.tail is not None:
            part.tail.remove()
            part.tail = None

    def _seal(self, part: _Part) -> None:
        run = self._require_run()
        path = part_path(self.directory, part.table.name, run.run, run.rank, part.number)
        name = f"{part.table.name}.run={run.run}.rank={run.rank}.{run.pid}-{part.number:05d}.parquet.tmp"
        batches = [decode(message, part.schema) for message in part.messages]
        write_part(batches, part.schema, part.metadata, self.directory / LIVE_DIR / name, path)
        part.messages.clear()
        part.rows = 0
        part.number += 1
        self._drop_tail(part)

    @staticmethod
    def _remove_if_empty(folder: Path) -> None:
        with contextlib.suppress(OSError):  # other ranks write there
            folder.rmdir()
