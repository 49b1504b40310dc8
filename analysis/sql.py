"""The few pieces of SQL that every query over a dataset shares, and its answers as numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcanary_trace.pressure.capacities import Capacity

if TYPE_CHECKING:
    import duckdb

__all__ = ["KEYS", "Columns", "Connection", "Key", "fetch", "known", "ratio", "split"]

Columns: TypeAlias = "Mapping[str, NDArray[Any]]"
Connection: TypeAlias = "duckdb.DuckDBPyConnection"

KEYS: Final = 'run, rank, runner, "group", kind'
"""What names a series, as SQL."""


class Key(NamedTuple):
    """What names a series: what one ring saw of one plan."""

    run: str
    rank: int
    runner: str
    group: str | None
    kind: str | None


def ratio(capacity: Capacity) -> str:
    """SQL of a capacity's utilisation: null where demand or limit was not measured; a limit of 0 counts as 1."""
    # Not greatest(limit, 1): that is 1 where the limit is null.
    return f'("{capacity.demand}" / CASE WHEN "{capacity.limit}" < 1 THEN 1 ELSE "{capacity.limit}" END)'


def fetch(connection: Connection, query: str, values: Sequence[Any] = ()) -> Columns:
    """A query's columns; numbers with a null in them become float64 with NaN, texts keep None."""
    columns = connection.execute(query, list(values)).fetchnumpy()
    return {name: _plain(column) for name, column in columns.items()}


def _plain(column: Any) -> Any:
    if isinstance(column, np.ma.MaskedArray):
        if column.dtype.kind in "biuf":
            return np.ma.filled(column.astype(np.float64), np.nan) if np.ma.is_masked(column) else column.data
        texts = np.array(column.data, dtype=object)
        texts[np.ma.getmaskarray(column)] = None
        return texts
    return column


def known(rows: Columns, name: str) -> NDArray[np.float64]:
    """A numeric column as float64, NaN where it is null."""
    return np.asarray(rows[name], dtype=np.float64)


def split(columns: Columns) -> list[tuple[Key, Columns]]:
    """Rows ordered by key → one block of columns for each key."""
    rows = len(columns["run"])
    if not rows:
        return []
    names = [columns[name] for name in ("run", "rank", "runner", "group", "kind")]
    changes = np.zeros(rows, bool)
    changes[0] = True
    for values in names:
        changes[1:] |= values[1:] != values[:-1]
    begins = np.flatnonzero(changes).tolist()
    blocks: list[tuple[Key, Columns]] = []
    for begin, end in zip(begins, [*begins[1:], rows], strict=True):
        run, rank, runner, group, kind = (values[begin] for values in names)
        key = Key(str(run), int(rank), str(runner), _text(group), _text(kind))
        blocks.append((key, {name: values[begin:end] for name, values in columns.items()}))
    return blocks


def _text(value: Any) -> str | None:
    return None if value is None or value != value else str(value)
