"""The 99th percentile of utilisation: exact in small datasets, to a thousandth in large ones, in bounded memory.

In a large dataset exact quantiles would hold every value in memory and a sketch takes seconds. A sample of a hundredth
of the rows tells where the top few percent begin; only rows from there on go into histograms of thousandths, and if the
sample misled, all of them do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np

from kvcanary_trace.pressure.capacities import Capacity

from .sql import KEYS, Columns, Connection, Key, fetch, known, ratio, split

__all__ = ["read_p99"]

Bins: TypeAlias = "Mapping[int, int]"

QUANTILE: Final = 0.99
_SAMPLED_QUANTILE: Final = 0.97
_EXACT_ROWS: Final = 1_000_000
_BINS: Final = 1000  # for each unit of utilisation
_MAX_BIN: Final = 30_000


def read_p99(
    connection: Connection, cells: Sequence[tuple[Key, Columns]], where: str, capacities: Sequence[Capacity]
) -> dict[Key, dict[str, float]]:
    """The 99th percentile of each capacity's utilisation, over the rows of a series that measured it.

    Args:
        connection: To the dataset.
        cells: The series' buckets, with the number of rows that measured each capacity.
        where: SQL condition on the rows, or nothing.
        capacities: Those worth a look.
    """
    if not capacities:
        return {}
    counts = {key: {c.id: int(rows[f"known_{c.id}"].sum()) for c in capacities} for key, rows in cells}
    if sum(int(rows["rows"].sum()) for _, rows in cells) <= _EXACT_ROWS:
        return _exact(connection, where, capacities)
    floors = _floors(connection, where, capacities)
    bins = _histograms(connection, where, capacities, floors)
    result: dict[Key, dict[str, float]] = {}
    misled: set[str] = set()
    for key, of_key in counts.items():
        result[key] = {}
        for c in capacities:
            found = _from_top(bins.get(key, {}).get(c.id, {}), of_key[c.id], floors.get(c.id, 0.0))
            if found is not None:
                result[key][c.id] = found
            elif of_key[c.id]:
                misled.add(c.id)
    if misled:
        again = [c for c in capacities if c.id in misled]
        for key, of_series in _histograms(connection, where, again, {}).items():
            for name, values in of_series.items():
                found = _from_top(values, counts[key][name], 0.0)
                if found is not None:
                    result[key][name] = found
    return result


def _exact(connection: Connection, where: str, capacities: Sequence[Capacity]) -> dict[Key, dict[str, float]]:
    what = ", ".join(f"quantile_cont({ratio(c)}, {QUANTILE}) AS p99_{c.id}" for c in capacities)
    rows = fetch(connection, f"SELECT {KEYS}, {what} FROM steps {where} GROUP BY ALL ORDER BY {KEYS}")
    exact = {key: {c.id: float(known(part, f"p99_{c.id}")[0]) for c in capacities} for key, part in split(rows)}
    return {key: {name: value for name, value in values.items() if np.isfinite(value)} for key, values in exact.items()}


def _floors(connection: Connection, where: str, capacities: Sequence[Capacity]) -> dict[str, float]:
    """For each capacity a utilisation that a few percent of each series' rows reach, by a sample."""
    columns = ", ".join(dict.fromkeys(f'"{name}"' for c in capacities for name in (c.demand, c.limit)))
    what = ", ".join(f"quantile_disc({ratio(c)}, {_SAMPLED_QUANTILE}) AS floor_{c.id}" for c in capacities)
    sample = f"SELECT {KEYS}, {columns} FROM steps {where} USING SAMPLE 1 PERCENT (system, 7)"
    rows = fetch(connection, f"SELECT {KEYS}, {what} FROM ({sample}) GROUP BY ALL ORDER BY {KEYS}")
    floors = {}
    for c in capacities:
        values = known(rows, f"floor_{c.id}")
        if np.isfinite(values).any():
            floors[c.id] = float(np.nanmin(values))
    return floors


def _histograms(
    connection: Connection, where: str, capacities: Sequence[Capacity], floors: Mapping[str, float]
) -> dict[Key, dict[str, Bins]]:
    """Rows in each thousandth of utilisation, at least of those rows that reach the floor."""
    bins = ", ".join(f"histogram(least({_BINS} * {ratio(c)}, {_MAX_BIN})::INTEGER)" for c in capacities)
    reaches = " OR ".join(f"{ratio(c)} >= {floors.get(c.id, 0.0)!r}" for c in capacities)
    condition = f"{where} AND ({reaches})" if where else f"WHERE {reaches}"
    cursor = connection.execute(f"SELECT {KEYS}, {bins} FROM steps {condition} GROUP BY ALL")
    return {
        Key(*row[:5]): {c.id: values for c, values in zip(capacities, row[5:], strict=True) if values}
        for row in cursor.fetchall()
    }


def _from_top(bins: Bins, count: int, floor: float) -> float | None:
    """The quantile of `count` values of which the bins hold all from `floor` on; None if it lies lower."""
    left = count - int(np.ceil(QUANTILE * count)) + 1  # how manieth from the top
    for value in sorted(bins, reverse=True):
        if value / _BINS < floor - 0.5 / _BINS:
            return None
        left -= bins[value]
        if left <= 0:
            return value / _BINS
    return None
