"""The files of a dataset: sealed parts, checked by their footers, and live tails. A bad one is one clear sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvcanary_trace.errors import DatasetError, SchemaError
from kvcanary_trace.pressure.capacities import CAPACITIES
from kvcanary_trace.schema import SCHEMA_VERSION, STEPS, TABLES, Table

if TYPE_CHECKING:
    import pyarrow as pa

    from kvcanary_trace.sinks.live import LiveTail

__all__ = ["Part", "check_schema_version", "read_tails", "sealed_parts", "shared_constants", "unsealed"]

_PARTITION: Final = re.compile(r"run=(?P<run>[^/]+)/rank=(?P<rank>\d+)/[^/]+\.parquet$")
_OFTEN_CONSTANT: Final = frozenset({"runner", "group", "kind", *(capacity.limit for capacity in CAPACITIES)})


@dataclass(frozen=True, slots=True)
class Part:
    """One sealed Parquet file of the `steps` table, or of another one (then without a range of steps)."""

    path: Path
    run: str
    rank: int
    rows: int
    columns: frozenset[str]
    steps: tuple[int, int] | None = None
    constants: Mapping[str, int | str] = field(default_factory=dict)  # columns that hold this value in every row


def check_schema_version(path: Path, version: int) -> None:
    """Refuse what a newer version wrote.

    Raises:
        SchemaError: `version` is not known here.
    """
    if version > SCHEMA_VERSION:
        known = "1" if SCHEMA_VERSION == 1 else f"1 to {SCHEMA_VERSION}"
        raise SchemaError(f"{path} is schema {version}, this reader knows {known}; upgrade kvcanary-trace to read it")


def sealed_parts(root: Path, table: Table) -> Iterator[Part]:
    """All parts of a table, footers checked."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in sorted((root / table.name).rglob("*.parquet")):
        match = _PARTITION.search(path.relative_to(root).as_posix())
        if match is None:
            raise DatasetError(f"{path} is not where parts belong ({table.name}/run=<id>/rank=<n>/): move it away")
        try:
            with pq.ParquetFile(path) as file:
                metadata, schema = file.metadata, file.schema_arrow
        except (pa.ArrowException, OSError) as error:
            raise DatasetError(
                f"{path} is truncated or not a Parquet file ({' '.join(str(error).split())}); "
                "restore it, or move it away to analyse the rest"
            ) from error
        check_schema_version(path, _version_of(schema.metadata or {}))
        columns = frozenset(schema.names)
        lacking = [column.name for column in table.columns if column.key and column.name not in columns]
        if lacking:
            raise DatasetError(f"{path} is not a {table.name} file of kvcanary-trace: it has no column {lacking[0]!r}")
        for column in table.columns:
            got = schema.field(column.name).type if column.name in columns else column.type
            if not _compatible(got, column.type):
                raise SchemaError(f"{path} has column {column.name!r} as {got}, the record as {column.type}")
        run, rank, rows = match["run"], int(match["rank"]), metadata.num_rows
        if rows and table is STEPS:
            yield Part(path, run, rank, rows, columns, _step_range(path, metadata), _constants(metadata))
        else:
            yield Part(path, run, rank, rows, columns)


def _version_of(metadata: Mapping[bytes, bytes]) -> int:
    try:
        return int(metadata.get(b"kvcanary_trace.schema", b"1"))
    except ValueError:
        return 1


def _compatible(got: pa.DataType, want: pa.DataType) -> bool:
    """Whether a file's column can stand for the record's: the same kind, whatever its width."""
    import pyarrow as pa

    if pa.types.is_dictionary(got):
        got = got.value_type
    kinds = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_timestamp)
    text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    if any(kind(want) for kind in text):
        return any(kind(got) for kind in text) or pa.types.is_null(got)
    return pa.types.is_null(got) or any(kind(want) and kind(got) for kind in kinds)


def _step_range(path: Path, metadata: Any) -> tuple[int, int]:
    """Lowest and highest step, from the footer's statistics; read where a writer left them out."""
    index = metadata.schema.to_arrow_schema().get_field_index("step")
    statistics = [metadata.row_group(k).column(index).statistics for k in range(metadata.num_row_groups)]
    if any(one is None or not one.has_min_max for one in statistics):
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        low_high = pc.min_max(pq.read_table(path, columns=["step"], partitioning=None)["step"]).as_py()
        return int(low_high["min"]), int(low_high["max"])
    return min(int(one.min) for one in statistics), max(int(one.max) for one in statistics)


def _constants(metadata: Any) -> dict[str, int | str]:
    """Columns of a part whose statistics say that they hold one value and no null."""
    constants: dict[str, int | str] = {}
    first = metadata.row_group(0)
    for index in range(first.num_columns):
        name = first.column(index).path_in_schema
        if name not in _OFTEN_CONSTANT:
            continue
        values = set()
        for k in range(metadata.num_row_groups):
            one = metadata.row_group(k).column(index).statistics
            if one is None or not one.has_min_max or not one.has_null_count or one.null_count or one.min != one.max:
                break
            values.add(one.min)
        else:
            if len(values) == 1:
                constants[name] = values.pop()
    return constants


def shared_constants(parts: Sequence[Part]) -> dict[str, int | str]:
    """Those that all parts with rows agree on."""
    filled = [part.constants for part in parts if part.rows]
    if not filled:
        return {}
    return {name: value for name, value in filled[0].items() if all(other.get(name) == value for other in filled[1:])}


def read_tails(root: Path) -> list[tuple[LiveTail, pa.Table]]:
    """Live tails and their rows. A tail that is torn from its first byte on has none."""
    if not (root / "_live").is_dir():
        return []
    import pyarrow as pa

    from kvcanary_trace.sinks.live import live_tails, read_live

    tails = []
    known = {table.name: table for table in TABLES}
    for tail in live_tails(root):
        if tail.table not in known:
            continue
        try:
            rows = read_live(tail.path)
        except DatasetError:
            continue  # sealed and removed meanwhile, or killed before its first message was whole
        check_schema_version(tail.path, _version_of(rows.schema.metadata or {}))
        wanted = known[tail.table].arrow
        columns = [
            rows[field.name].cast(field.type) if field.name in rows.column_names else pa.nulls(len(rows), field.type)
            for field in wanted
        ]
        table = pa.Table.from_arrays(columns, names=wanted.names)
        table = table.append_column("run", pa.repeat(pa.scalar(tail.run), len(rows)))
        tails.append((tail, table.append_column("rank", pa.repeat(pa.scalar(tail.rank), len(rows)))))
    return tails


def unsealed(live: Sequence[tuple[LiveTail, pa.Table]], parts: Mapping[str, Sequence[Part]]) -> dict[str, pa.Table]:
    """Rows that no sealed part has, by table."""
    sealed = {part.path for of_table in parts.values() for part in of_table}
    rows: dict[str, list[pa.Table]] = {}
    for tail, table in live:
        if tail.sealed_path not in sealed:
            rows.setdefault(tail.table, []).append(table)
    if not rows:
        return {}
    import pyarrow as pa

    return {name: pa.concat_tables(tables) for name, tables in rows.items()}
