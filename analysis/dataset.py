"""Open a dataset: sealed Parquet parts, live tails, run files. One clear sentence for whatever cannot be read.

DuckDB does the reading; past the footers nothing is loaded here.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvcanary_trace.errors import DatasetError
from kvcanary_trace.schema import STEPS, TABLES, Table

from .files import Part, check_schema_version, read_tails, sealed_parts, shared_constants, unsealed

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

__all__ = ["Dataset", "Run", "load", "open_dataset"]

_MEMORY_LIMIT: Final = "700MB"
_MAX_THREADS: Final = 4  # each reads row groups of its own: memory, not only speed


@dataclass(frozen=True, slots=True)
class Run:
    """One rank of a run, as its run file tells it. Without the file only `run` and `rank` are known."""

    run: str
    rank: int
    status: str | None = None
    error: str | None = None
    host: str | None = None
    pid: int | None = None
    device: str | None = None
    started_ns: int | None = None
    ended_ns: int | None = None
    world_size: int = 1
    last_step: int | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    capacities: tuple[Mapping[str, Any], ...] = ()
    losses: Mapping[str, int | None] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read a run file.

        Raises:
            DatasetError: It is not one.
            SchemaError: It is newer than this package.
        """
        try:
            what = json.loads(path.read_text())
            check_schema_version(path, int(what["schema"]))
            return cls(
                run=str(what["run"]),
                rank=int(what["rank"]),
                world_size=int(what.get("world_size") or 1),
                engine=what.get("engine") or {},
                versions=what.get("versions") or {},
                capacities=tuple(what.get("capacities") or ()),
                losses=what.get("losses") or {},
                **{
                    name: what.get(name)
                    for name in ("status", "error", "host", "pid", "device", "started_ns", "ended_ns", "last_step")
                },
            )
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise DatasetError(f"{path} is not a run file of kvcanary-trace: {error!r}") from error


class Dataset:
    """An opened dataset: what is in it, and connections to query it.

    Tables are views of the record's columns plus `run` and `rank`, in any order of rows; `steps` is always there.
    """

    def __init__(
        self,
        path: Path,
        runs: tuple[Run, ...],
        parts: Mapping[str, tuple[Part, ...]],
        tails: Mapping[str, pa.Table],
    ) -> None:
        self.path = path
        self.runs = runs
        self.parts = parts
        self.tails = tails

    @property
    def rows(self) -> int:
        """Rows of `steps`."""
        tail = self.tails.get(STEPS.name)
        return sum(part.rows for part in self.parts[STEPS.name]) + (tail.num_rows if tail is not None else 0)

    @property
    def step_range(self) -> tuple[int, int]:
        """Lowest and highest step."""
        ranges = [part.steps for part in self.parts[STEPS.name] if part.steps is not None]
        tail = self.tails.get(STEPS.name)
        if tail is not None and tail.num_rows:
            import pyarrow.compute as pc

            low_high = pc.min_max(tail["step"]).as_py()
            ranges.append((low_high["min"], low_high["max"]))
        return min(low for low, _ in ranges), max(high for _, high in ranges)

    @property
    def constants(self) -> Mapping[str, int | str]:
        """Limits and names that hold one value in every row of `steps`."""
        tail = self.tails.get(STEPS.name)
        return {} if tail is not None and tail.num_rows else shared_constants(self.parts[STEPS.name])

    @property
    def missing_ranks(self) -> dict[str, list[int]]:
        """Run → ranks of its world that left no run file and no rows."""
        missing = {}
        for run in dict.fromkeys(one.run for one in self.runs):
            ranks = [one for one in self.runs if one.run == run]
            absent = set(range(max(one.world_size for one in ranks))) - {one.rank for one in ranks}
            if absent:
                missing[run] = sorted(absent)
        return missing

    @contextmanager
    def connect(self) -> Iterator[duckdb.DuckDBPyConnection]:
        """A DuckDB connection with a view for each table of the dataset.

        Raises:
            DatasetError: A file turns out to be damaged while it is read.
        """
        import os

        import duckdb

        threads = min(_MAX_THREADS, os.cpu_count() or 1)
        connection = duckdb.connect(
            config={
                "threads": threads,
                "memory_limit": _MEMORY_LIMIT,
                "preserve_insertion_order": False,
                "temp_directory": tempfile.gettempdir(),
            }
        )
        try:
            connection.execute("SET enable_progress_bar = false")
            for table in TABLES:
                self._create_view(connection, table)
            yield connection
        except duckdb.Error as error:
            raise DatasetError(self._blame(error)) from error
        finally:
            connection.close()

    def _create_view(self, connection: duckdb.DuckDBPyConnection, table: Table) -> None:
        names = [column.name for column in table.columns]
        sources = []
        # Files of one set of columns are read together: an older file may lack a column that a newer one has.
        by_columns: dict[frozenset[str], list[Part]] = {}
        for part in self.parts[table.name]:
            by_columns.setdefault(part.columns, []).append(part)
        for columns, parts in by_columns.items():
            files = ", ".join(_quoted(_glob_escaped(str(part.path))) for part in parts)
            constants = shared_constants(parts)
            selected = []
            for name in names:
                if name not in columns:
                    selected.append(f'NULL::{_sql_type(table, name)} AS "{name}"')
                elif name in constants:
                    # Limits hardly ever change: as a literal one is folded into every expression, and never decoded.
                    value = constants[name]
                    literal = _quoted(value) if isinstance(value, str) else str(value)
                    selected.append(f'{literal}::{_sql_type(table, name)} AS "{name}"')
                else:
                    selected.append(f'"{name}"')
            sources.append(
                f"SELECT {', '.join(selected)}, run, rank FROM read_parquet([{files}], hive_partitioning = true, "
                "hive_types = {'run': VARCHAR, 'rank': BIGINT})"
            )
        tail = self.tails.get(table.name)
        if tail is not None and tail.num_rows:
            connection.register(f"_live_{table.name}", tail)
            columns_sql = ", ".join(f'"{name}"' for name in [*names, "run", "rank"])
            sources.append(f"SELECT {columns_sql} FROM _live_{table.name}")
        if not sources:
            nulls = ", ".join(f'NULL::{_sql_type(table, name)} AS "{name}"' for name in names)
            sources.append(f"SELECT {nulls}, NULL::VARCHAR AS run, NULL::BIGINT AS rank WHERE false")
        connection.execute(f"CREATE VIEW {table.name} AS {' UNION ALL '.join(sources)}")

    def _blame(self, error: Exception) -> str:
        """One sentence that names the damaged file, if it is one."""
        text = " ".join(str(error).split())
        for parts in self.parts.values():
            for part in parts:
                if str(part.path) in text:
                    return f"{part.path} is damaged: {text}; restore it, or move it away to analyse the rest"
        return f"cannot query {self.path}: {text}"


def open_dataset(path: Path | str) -> Dataset:
    """Open the dataset in a folder.

    Raises:
        DatasetError: There is none, it has no rows yet, or a file of it is foreign or truncated.
        SchemaError: A file is of a newer schema than this package knows.
    """
    root = Path(path)
    if not root.exists():
        raise DatasetError(f"{root} does not exist; give the folder that trace() or replay wrote to")
    if not root.is_dir():
        raise DatasetError(f"{root} is a file; give the folder that trace() or replay wrote to")
    runs = {(run.run, run.rank): run for run in (Run.read(file) for file in sorted((root / "runs").glob("*.json")))}
    # Tails first: one that is sealed meanwhile is then seen twice, and dropped, instead of not at all.
    live = read_tails(root)
    parts = {table.name: tuple(sealed_parts(root, table)) for table in TABLES}
    tails = unsealed(live, parts)
    for part in parts[STEPS.name]:
        runs.setdefault((part.run, part.rank), Run(part.run, part.rank))
    tail = tails.get(STEPS.name)
    if tail is not None:
        for key in {
            (row["run"], row["rank"])
            for row in tail.select(["run", "rank"]).group_by(["run", "rank"]).aggregate([]).to_pylist()
        }:
            runs.setdefault(key, Run(*key))
    dataset = Dataset(root, tuple(runs[key] for key in sorted(runs)), parts, tails)
    if not dataset.rows:
        if runs:
            names = ", ".join(sorted({run for run, _ in runs}))
            raise DatasetError(f"{root} has no recorded steps yet, only the run files of {names}")
        raise DatasetError(f"{root} holds no trace: no steps/ and no runs/ that kvcanary-trace wrote")
    return dataset


def load(path: Path | str, table: str = "steps", columns: list[str] | None = None) -> pa.Table:
    """One table of a dataset as Arrow, `run` and `rank` included, ordered by run, rank and step.

    Args:
        path: The dataset's folder.
        table: steps, violations or requests.
        columns: Only these; None takes all.

    Raises:
        DatasetError, SchemaError: As `open_dataset`.
        ValueError: There is no such table or column.
    """
    known = {one.name: [column.name for column in one.columns] + ["run", "rank"] for one in TABLES}
    if table not in known:
        raise ValueError(f"table must be one of {', '.join(known)}, got {table!r}")
    unknown = [name for name in columns or () if name not in known[table]]
    if unknown:
        raise ValueError(f"{table} has no column {unknown[0]!r}; it has {', '.join(known[table])}")
    selected = ", ".join(f'"{name}"' for name in columns or known[table])
    with open_dataset(path).connect() as connection:
        query = f"SELECT {selected} FROM {table} ORDER BY run, rank, step, forward"
        return connection.sql(query).to_arrow_table()


def _sql_type(table: Table, name: str) -> str:
    """DuckDB's name of a column's type."""
    import pyarrow as pa

    kind = table[name].type
    if pa.types.is_boolean(kind):
        return "BOOLEAN"
    if pa.types.is_timestamp(kind):
        return "TIMESTAMPTZ"
    return "BIGINT" if pa.types.is_integer(kind) else "VARCHAR"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _glob_escaped(path: str) -> str:
    """A path that DuckDB takes as it is, whatever signs its folders have."""
    return re.sub(r"([*?\[])", r"[\1]", path)
