"""One flush's `steps` batch as numpy columns, read as often as needed and converted once. Drain thread only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kvcanary_trace.arrow import integers, words
from kvcanary_trace.pressure.capacities import Capacity
from kvcanary_trace.schema import NOT_MEASURED

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

__all__ = ["Flags", "Ints", "StepRows"]

_NONE: Final = -1


class StepRows:
    """Columns of `steps`. Integers: NOT_MEASURED for null. Names: codes with -1 for null, and a text for each code."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch
        self._ints: dict[str, Ints] = {}
        self._names: dict[str, tuple[Ints, list[str]]] = {}
        self._forwards: Ints | None = None
        self._first: Ints | None = None
        self._series: list[tuple[str, str | None, Ints]] | None = None

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    def ints(self, name: str) -> Ints:
        """[n] int64; booleans as 0 and 1."""
        values = self._ints.get(name)
        if values is None:
            values = self._ints[name] = words(self.batch.column(name), NOT_MEASURED)
        return values

    def names(self, name: str) -> tuple[Ints, list[str]]:
        """[n] codes, and the text of each code."""
        found = self._names.get(name)
        if found is None:
            encoded = self.batch.column(name).dictionary_encode()
            found = self._names[name] = (words(encoded.indices, _NONE), encoded.dictionary.to_pylist())
        return found

    def has(self, name: str) -> Flags:
        """[n] whether a column of names is not null."""
        flags: Flags = self.names(name)[0] != _NONE
        return flags

    def forwards(self) -> Ints:
        """[n] one number for all rows of the same (step, forward, runner)."""
        if self._forwards is None:
            # Packed, since it is ten times faster than comparing three columns; no step has 4096 forwards.
            runner, _ = self.names("runner")
            key = (self.ints("step") << 14) + (np.minimum(self.ints("forward"), 4095) << 2) + runner
            _, self._first, inverse = np.unique(key, return_index=True, return_inverse=True)
            self._forwards = inverse.astype(np.int64).reshape(-1)
        return self._forwards

    def first_rows(self) -> Ints:
        """Indices of the first row of each forward: what the host half says once, groups repeat."""
        self.forwards()
        assert self._first is not None
        return np.sort(self._first)

    def series(self) -> list[tuple[str, str | None, Ints]]:
        """(runner, group, indices of its rows) for each of the few that there are."""
        if self._series is None:
            self._series = list(self._find_series())
        return self._series

    def _find_series(self) -> Iterator[tuple[str, str | None, Ints]]:
        runner, runner_names = self.names("runner")
        group, group_names = self.names("group")
        key = runner * (len(group_names) + 1) + group + 1
        for value in np.unique(key):
            rows = np.flatnonzero(key == value)
            code = int(group[rows[0]])
            yield runner_names[int(runner[rows[0]])], None if code == _NONE else group_names[code], rows

    def load(self, capacity: Capacity, rows: Ints) -> tuple[Ints, Ints, Ints]:
        """(rows, demand, limit) of those of `rows` where both are measured."""
        demand, limit = self.ints(capacity.demand)[rows], self.ints(capacity.limit)[rows]
        known = (demand != NOT_MEASURED) & (limit != NOT_MEASURED) & (limit > 0)
        return rows[known], demand[known], limit[known]

    def sum(self, name: str, rows: Ints) -> int:
        """Sum of what is measured."""
        values = self.ints(name)[rows]
        return int(values[values != NOT_MEASURED].sum())

    def dicts(self, rows: Ints) -> list[dict[str, Any]]:
        """Some rows as dicts of Python values; `time` in ns."""
        taken = self.batch.take(integers(rows))
        columns = {}
        for name in taken.schema.names:
            column = taken.column(name)
            columns[name] = (column.cast(pa.int64()) if name == "time" else column).to_pylist()
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
