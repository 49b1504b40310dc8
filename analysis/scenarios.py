"""What another capacity would have meant: from the recorded, unclamped demand, without running anything again.

For each value: steps and rows past it, entries unverified when such steps are skipped and when they are checked in part
(`overflow="rotate"`), and the memory that the buffers take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from kvcanary_trace.errors import DatasetError, SettingError
from kvcanary_trace.pressure.capacities import BY_ID, Capacity
from kvcanary_trace.schema import SCHEMA_VERSION

from .dataset import open_dataset
from .sql import fetch

__all__ = ["MEMORY_BYTES", "Scenario", "WhatIf", "what_if"]

MEMORY_BYTES: Final[Mapping[str, Callable[[int], int]]] = {
    # Four int64 an entry; a count and a switch, int32 each.
    "verify": lambda value: 32 * value + 8,
    # Offsets (one more) and seeds of the write plan, int64, and its int32 count; four int64 of plan inputs a row.
    "write_req": lambda value: 16 * value + 12 + 32 * value,
    # Expected token and position, int64.
    "write_entry": lambda value: 16 * value,
    # Eight int64 a violation.
    "violation_ring": lambda value: 64 * value,
}
"""Capacity → bytes of its buffers, for one group of one forward; others have no buffers of the canary's own."""

_POINTS: Final = 24
_LOWEST, _HIGHEST = 0.4, 1.25  # of the highest demand


@dataclass(frozen=True, slots=True)
class Scenario:
    """What one value would have meant.

    Attributes:
        value: The capacity.
        is_current: Whether it is the one that the run had last.
        steps_past: Steps of a rank with such a row: how many would have failed or gone unverified.
        rows_past: Rows whose demand exceeds it, one for each runner and group.
        share_past: Of all rows that measured it.
        unverified_skip: Share of the demanded entries that go unverified when such steps are skipped; verify only.
        unverified_rotate: The same when each such step checks as many as fit; verify only.
        memory_bytes: Of the buffers that it sizes, or None where it sizes none of the canary's own.
    """

    value: int
    is_current: bool
    steps_past: int
    rows_past: int
    share_past: float
    unverified_skip: float | None
    unverified_rotate: float | None
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The scenarios of one capacity, smallest value first."""

    capacity: str
    group: str | None
    steps: int
    rows: int
    peak_demand: int
    current: int
    scenarios: tuple[Scenario, ...]

    def to_json(self) -> dict[str, Any]:
        """Every number."""
        return {"schema": SCHEMA_VERSION, **asdict(self)}


def what_if(
    path: Path | str,
    capacity: str = "verify",
    values: Sequence[int] = (),
    *,
    group: str | None = None,
    until: int | None = None,
) -> WhatIf:
    """Lay other values of a capacity over the recorded demand.

    Args:
        path: The dataset's folder.
        capacity: Id of a capacity.
        values: To try; when empty, a ladder around the highest demand. The current value is always among them.
        group: Rows of this buffer group only; None takes all.
        until: Look at no later step.

    Raises:
        DatasetError, SchemaError: As `open_dataset`; or no row measured the capacity.
        SettingError: The capacity is unknown or a value is not positive.
    """
    if capacity not in BY_ID:
        raise SettingError(f"capacity must be one of {', '.join(BY_ID)}, got {capacity!r}")
    if bad := [value for value in values if value < 1]:
        raise SettingError(f"a capacity must be at least 1, got {bad[0]}")
    one = BY_ID[capacity]
    where = f'WHERE "{one.demand}" IS NOT NULL AND "{one.limit}" IS NOT NULL'
    arguments: list[Any] = []
    if group is not None:
        where += ' AND "group" = ?'
        arguments.append(group)
    if until is not None:
        where += " AND step <= ?"
        arguments.append(until)
    with open_dataset(path).connect() as connection:
        whole = fetch(
            connection,
            f'SELECT count(*) AS n, max("{one.demand}") AS peak, sum("{one.demand}")::DOUBLE AS total, '
            f'arg_max("{one.limit}", step) AS current FROM steps {where}',
            arguments,
        )
        rows = int(whole["n"][0])
        if not rows:
            raise DatasetError(f"{path} has no row that measured {capacity}{f' of group {group}' if group else ''}")
        peak, current, total = int(whole["peak"][0]), int(whole["current"][0]), float(whole["total"][0])
        tried = sorted({*(values or _ladder(one, peak)), current})
        asked = ", ".join(
            f'count(*) FILTER ("{one.demand}" > {value}) AS past_{i}, '
            f'sum("{one.demand}") FILTER ("{one.demand}" > {value})::DOUBLE AS skipped_{i}'
            for i, value in enumerate(tried)
        )
        found = fetch(connection, f"SELECT {asked} FROM steps {where}", arguments)
        counts = ", ".join(f"count(*) FILTER (demand > {value}) AS past_{i}" for i, value in enumerate(tried))
        in_steps = fetch(
            connection,
            f'SELECT count(*) AS n, {counts} FROM (SELECT max("{one.demand}") AS demand FROM steps {where} '
            "GROUP BY run, rank, step)",
            arguments,
        )
    scenarios = []
    for i, value in enumerate(tried):
        past = int(found[f"past_{i}"][0])
        skipped = float(found[f"skipped_{i}"][0]) if past else 0.0
        verifies = capacity == "verify"
        scenarios.append(
            Scenario(
                value=value,
                is_current=value == current,
                steps_past=int(in_steps[f"past_{i}"][0]),
                rows_past=past,
                share_past=past / rows,
                unverified_skip=(skipped / total if total else 0.0) if verifies else None,
                unverified_rotate=((skipped - past * value) / total if total else 0.0) if verifies else None,
                memory_bytes=MEMORY_BYTES[capacity](value) if capacity in MEMORY_BYTES else None,
            )
        )
    return WhatIf(capacity, group, int(in_steps["n"][0]), rows, peak, current, tuple(scenarios))


def _ladder(capacity: Capacity, peak: int) -> list[int]:
    """Round values around the highest demand."""
    granule = capacity.granule if peak > 8 * capacity.granule else 1
    low, high = _LOWEST * max(peak, 1), _HIGHEST * max(peak, 1)
    steps = [low + (high - low) * i / (_POINTS - 1) for i in range(_POINTS)]
    return sorted({max(1, math.ceil(value / granule) * granule) for value in steps})
