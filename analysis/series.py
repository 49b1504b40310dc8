"""Utilisation over time, aggregated by DuckDB: for each series and capacity, maxima over buckets of steps.

A series is what one ring saw of one plan: (run, rank, runner, group, kind). Up to 20 000 buckets a rank; where a run
has fewer steps, a bucket is a step and nothing is lost. Memory does not grow with the number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcanary_trace.pressure.capacities import CAPACITIES, Capacity
from kvcanary_trace.pressure.forecast import Load
from kvcanary_trace.pressure.severity import HORIZON_STEPS, WARNING_UTILIZATION

from .quantiles import read_p99
from .sql import KEYS, Key, fetch, known, ratio, split

if TYPE_CHECKING:
    import duckdb

    from .dataset import Dataset

__all__ = [
    "LOAD_COLUMNS",
    "CapacitySeries",
    "Series",
    "Span",
    "load_before",
    "load_of",
    "read_loads",
    "read_series",
    "recent_steps",
]

Floats: TypeAlias = NDArray[np.float64]
Connection: TypeAlias = "duckdb.DuckDBPyConnection"

MAX_BUCKETS: Final = 20_000
_MAX_CELLS: Final = 200_000  # buckets over all ranks
_LOOK_BACK_STEPS: Final = 2 * HORIZON_STEPS
LOAD_COLUMNS: Final = (
    "write_entries",
    "resident_reqs",
    "resident_tokens",
    "waiting_reqs",
    "waiting_tokens",
    "kv_used",
    "kv_capacity",
)
"""What a forecast looks at beside a capacity's own demand and limit."""


@dataclass(frozen=True, slots=True)
class Span:
    """First and last step at which something held, and in how many rows."""

    first: int
    last: int
    rows: int


@dataclass(frozen=True, slots=True)
class CapacitySeries:
    """One capacity in one series.

    Attributes:
        utilization: [buckets] highest demand over limit in each bucket, NaN where nobody measured it.
        limits: [buckets, 2] lowest and highest limit.
        peak_demand, peak_limit: The row with the highest utilisation.
        high, breached: Where utilisation was at least the warning line, and where demand exceeded the limit.
    """

    capacity: Capacity
    utilization: Floats
    limits: Floats
    peak_utilization: float
    p99_utilization: float
    peak_demand: int
    peak_limit: int
    high: Span | None
    breached: Span | None

    @property
    def last_limit(self) -> int:
        """The limit that held last."""
        return int(self.limits[np.isfinite(self.limits[:, 1])][-1, 1])


@dataclass(frozen=True, slots=True)
class Series:
    """One series: its buckets in order of steps.

    Attributes:
        first_steps, last_steps: [buckets] int64.
        unverified: [buckets] int64, entries demanded and known not to be checked.
        demanded: Entries demanded in all, or None where nobody counted.
        rows: Rows in all.
        seqs: Rows with a ring number.
        seq_range: Lowest and highest ring number, or None.
        graph_known, graph_replayed: Rows that say whether a graph was replayed, and those that were.
        violations: Highest count of violations, or None where nobody counted.
        step_s: Mean seconds of a step, NaN where times are unknown.
        capacities: By id, only those that were measured.
    """

    key: Key
    first_steps: NDArray[np.int64]
    last_steps: NDArray[np.int64]
    unverified: NDArray[np.int64]
    demanded: int | None
    rows: int
    seqs: int
    seq_range: tuple[int, int] | None
    graph_known: int
    graph_replayed: int
    violations: int | None
    step_s: float
    capacities: Mapping[str, CapacitySeries]

    @property
    def steps(self) -> tuple[int, int]:
        """First and last step."""
        return int(self.first_steps[0]), int(self.last_steps[-1])

    def made_good(self, steps: NDArray[np.int64], entries: NDArray[np.int64]) -> Series:
        """The same without unverified entries that were verified in a second row of their step."""
        unverified = self.unverified.copy()
        np.subtract.at(unverified, np.searchsorted(self.first_steps, steps, side="right") - 1, entries)
        return replace(self, unverified=np.maximum(unverified, 0))


def read_series(connection: Connection, dataset: Dataset, until: int | None) -> list[Series]:
    """All series of a dataset, in order of their keys.

    Args:
        connection: To the dataset.
        dataset: What is connected to.
        until: Last step to look at, None for all.
    """
    low, high = dataset.step_range
    high = high if until is None else min(high, until)
    buckets = min(MAX_BUCKETS, max(500, _MAX_CELLS // max(1, len(dataset.runs))))
    width = max(1, -(-(high - low + 1) // buckets))
    where = "" if until is None else f"WHERE step <= {int(until)}"
    constants = {c.id: int(dataset.constants[c.limit]) for c in CAPACITIES if c.limit in dataset.constants}
    per_capacity = ", ".join(_measures(c, constants) for c in CAPACITIES)
    cells = dict(
        fetch(
            connection,
            f"""
        SELECT {KEYS}, (step - {low}) // {width} AS bucket, count(*) AS rows, min(step) AS first, max(step) AS last,
            min(epoch_ns(time)) AS first_ns, max(epoch_ns(time)) AS last_ns,
            count(seq) AS seqs, min(seq) AS seq_low, max(seq) AS seq_high,
            count(graph_replay) AS graph_known, count(*) FILTER (graph_replay) AS graph_replayed,
            sum(CASE WHEN verify_checked IS NULL AND verify_enabled AND error IS NULL THEN 0
                ELSE greatest(verify_demand - coalesce(verify_checked, 0), 0) END)::BIGINT AS unverified,
            sum(greatest(verify_demand, 0))::BIGINT AS demanded,
            {per_capacity}
        FROM steps {where} GROUP BY ALL ORDER BY {KEYS}, bucket""",
        )
    )
    for name, limit in constants.items():
        cells[f"low_{name}"] = cells[f"high_{name}"] = np.full(len(cells["run"]), limit)
        cells[f"peak_{name}"] = known(cells, f"demand_{name}") / max(1, limit)
    found = split(cells)
    p99 = read_p99(connection, found, where, [c for c in CAPACITIES if any(_varies(rows, c) for _, rows in found)])
    raised = [c for c in CAPACITIES if any(_at_least(rows, c, WARNING_UTILIZATION) for _, rows in found)]
    spans = _read_spans(connection, where, raised) if raised else {}
    return [_series(key, rows, p99, spans) for key, rows in found]


def read_loads(
    connection: Connection, series: Sequence[Series], capacities: Mapping[str, Capacity], *, steps_before: int = 0
) -> dict[Key, dict[str, Load]]:
    """The last rows of each series, for each of the given capacities: what a forecast looks at.

    Args:
        connection: To the dataset.
        series: All series.
        capacities: Of which to read demand and limit, by id.
        steps_before: Steps to read before those of `recent_steps`.
    """
    loads: dict[Key, dict[str, Load]] = {}
    for run in dict.fromkeys(one.key.run for one in series):
        ours = {one.key for one in series if one.key.run == run}
        begin, end = recent_steps(series, run)
        rows = fetch(
            connection,
            f"{_load_query()} WHERE run = ? AND step > {begin - steps_before} AND step <= {end} "
            f"ORDER BY {KEYS}, step, forward",
            [run],
        )
        for key, part in split(rows):
            if key in ours:
                loads[key] = {name: load_of(part, one) for name, one in capacities.items()}
    return loads


def recent_steps(series: Sequence[Series], run: str) -> tuple[int, int]:
    """The steps of a run that a forecast looks at row by row: after the first, up to the second."""
    last = [one.steps[1] for one in series if one.key.run == run]
    return min(last) - _LOOK_BACK_STEPS, max(last)


def load_before(connection: Connection, key: Key, capacity: Capacity, step: int) -> Load:
    """The rows of one series before a step."""
    rows = fetch(
        connection,
        f'{_load_query()} WHERE run = ? AND rank = ? AND runner = ? AND "group" IS NOT DISTINCT FROM ? '
        f"AND kind IS NOT DISTINCT FROM ? AND step > {step - _LOOK_BACK_STEPS} AND step < {step} "
        "ORDER BY step, forward",
        list(key),
    )
    return load_of(rows, capacity)


# --- pieces ----------------------------------------------------------------------------------------------------------


def _measures(capacity: Capacity, constants: Mapping[str, int]) -> str:
    """SQL of what is asked of each bucket. Where the limit never changes, the highest demand tells the rest."""
    name = capacity.id
    demand = f'min("{capacity.demand}") AS least_{name}, max("{capacity.demand}") AS demand_{name}'
    if name in constants:
        return f'{demand}, count("{capacity.demand}") AS known_{name}'
    return (
        f"{demand}, count({ratio(capacity)}) AS known_{name}, max({ratio(capacity)}) AS peak_{name}, "
        f'min("{capacity.limit}") AS low_{name}, max("{capacity.limit}") AS high_{name}'
    )


def _varies(rows: Mapping[str, Any], capacity: Capacity) -> bool:
    """Whether a capacity was measured and its demand or limit varied: only then is a quantile not the peak."""
    names = [f"{name}_{capacity.id}" for name in ("least", "demand", "low", "high")]
    least, most, low, high = (known(rows, name)[np.isfinite(known(rows, f"peak_{capacity.id}"))] for name in names)
    return len(least) > 0 and bool(np.nanmin(least) < np.nanmax(most) or np.nanmin(low) < np.nanmax(high))


def _at_least(rows: Mapping[str, Any], capacity: Capacity, line: float) -> bool:
    peak = known(rows, f"peak_{capacity.id}")
    return bool(np.isfinite(peak).any()) and float(np.nanmax(peak)) >= line


def _read_spans(
    connection: Connection, where: str, capacities: Sequence[Capacity]
) -> dict[Key, dict[str, tuple[Span | None, Span | None]]]:
    """Exact steps at which capacities were high, and at which they broke."""
    what = []
    for c in capacities:
        for name, test in (("high", f"{ratio(c)} >= {WARNING_UTILIZATION}"), ("broke", f'"{c.demand}" > "{c.limit}"')):
            what.append(
                f"min(step) FILTER ({test}) AS {name}_first_{c.id}, max(step) FILTER ({test}) AS {name}_last_{c.id}, "
                f"count(*) FILTER ({test}) AS {name}_rows_{c.id}"
            )
    high = " OR ".join(f"{ratio(c)} >= {WARNING_UTILIZATION}" for c in capacities)
    condition = f"{where} AND ({high})" if where else f"WHERE {high}"
    rows = fetch(connection, f"SELECT {KEYS}, {', '.join(what)} FROM steps {condition} GROUP BY ALL ORDER BY {KEYS}")

    def span(part: Mapping[str, Any], name: str, one: Capacity) -> Span | None:
        count = int(part[f"{name}_rows_{one.id}"][0])
        return (
            Span(int(part[f"{name}_first_{one.id}"][0]), int(part[f"{name}_last_{one.id}"][0]), count)
            if count
            else None
        )

    return {
        key: {c.id: (span(part, "high", c), span(part, "broke", c)) for c in capacities} for key, part in split(rows)
    }


def _series(
    key: Key,
    rows: Mapping[str, Any],
    p99: Mapping[Key, Mapping[str, float]],
    spans: Mapping[Key, Mapping[str, tuple[Span | None, Span | None]]],
) -> Series:
    capacities = {}
    for c in CAPACITIES:
        utilization = known(rows, f"peak_{c.id}")
        if not np.isfinite(utilization).any():
            continue
        at = int(np.nanargmax(utilization))
        peak = float(utilization[at])
        demand, limit = _peak_row(
            peak, *(float(known(rows, f"{name}_{c.id}")[at]) for name in ("demand", "low", "high"))
        )
        quantile = p99.get(key, {}).get(c.id, peak)
        high, breached = spans.get(key, {}).get(c.id, (None, None))
        capacities[c.id] = CapacitySeries(
            capacity=c,
            utilization=utilization,
            limits=np.stack([known(rows, f"low_{c.id}"), known(rows, f"high_{c.id}")], axis=1),
            peak_utilization=peak,
            p99_utilization=min(peak, peak if np.isnan(quantile) else quantile),
            peak_demand=demand,
            peak_limit=limit,
            high=high,
            breached=breached,
        )
    seqs, seq_low, seq_high = (known(rows, name) for name in ("seqs", "seq_low", "seq_high"))
    violations, demanded = known(rows, "demand_violation_ring"), known(rows, "demanded")
    first, last = np.asarray(rows["first"], np.int64), np.asarray(rows["last"], np.int64)
    return Series(
        key=key,
        first_steps=first,
        last_steps=last,
        unverified=np.nan_to_num(known(rows, "unverified")).astype(np.int64),
        demanded=int(np.nansum(demanded)) if np.isfinite(demanded).any() else None,
        rows=int(np.sum(rows["rows"])),
        seqs=int(seqs.sum()),
        seq_range=(int(np.nanmin(seq_low)), int(np.nanmax(seq_high))) if np.isfinite(seq_low).any() else None,
        graph_known=int(np.sum(rows["graph_known"])),
        graph_replayed=int(np.sum(rows["graph_replayed"])),
        violations=int(np.nanmax(violations)) if np.isfinite(violations).any() else None,
        step_s=_step_seconds(first, last, known(rows, "first_ns"), known(rows, "last_ns")),
        capacities=capacities,
    )


def _peak_row(peak: float, demand: float, low: float, high: float) -> tuple[int, int]:
    """(demand, limit) of the row with the highest utilisation, from its bucket's highest demand and its limits."""
    if low == high:
        return int(demand), int(low)
    # The limit changed within the bucket: utilisation times limit is whole for the limit that held.
    limit = low if abs(peak * low - round(peak * low)) < 1e-6 * low else high
    return round(peak * limit), int(limit)


def _step_seconds(first: NDArray[np.int64], last: NDArray[np.int64], first_ns: Floats, last_ns: Floats) -> float:
    """Mean duration of a recent step: over the buckets of the last steps, at least two of them."""
    recent = np.isfinite(first_ns) & np.isfinite(last_ns) & (last > last[-1] - _LOOK_BACK_STEPS)
    if not recent.any():
        return float("nan")
    steps = int(last[recent][-1] - first[recent][0])
    return float(last_ns[recent].max() - first_ns[recent].min()) / 1e9 / steps if steps > 0 else float("nan")


def _load_query() -> str:
    columns = dict.fromkeys([*(name for c in CAPACITIES for name in (c.demand, c.limit)), *LOAD_COLUMNS])
    names = ", ".join(f'"{name}"' for name in columns)
    return f"SELECT {KEYS}, step, mode = 'prefill' AS prefill, {names} FROM steps"


def load_of(rows: Mapping[str, Any], capacity: Capacity) -> Load:
    """Rows as the forecast wants them, those that did not measure this capacity left out."""
    limit = np.maximum(known(rows, capacity.limit), 1.0)
    kept = np.isfinite(limit)
    return Load(
        demand=known(rows, capacity.demand)[kept],
        limit=limit[kept],
        **{name: known(rows, name)[kept] for name in ("step", "prefill", *LOAD_COLUMNS)},
    )
