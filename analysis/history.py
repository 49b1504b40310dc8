"""What the estimator remembers, read back from files: the run before the rows that a forecast looks at one by one.

The live estimator has seen the whole run and remembers 10 000 steps. Of few series it gets the rows of these, at most
20 000; of many the highest demand of each block of 25 steps, of prefills and of other rows apart, which is nearly what
the live one takes when rows come too fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from kvcanary_trace.pressure.capacities import BY_ID
from kvcanary_trace.pressure.horizon import BLOCK_STEPS, MEMORY_STEPS
from kvcanary_trace.pressure.horizon_table import CALIBRATED
from kvcanary_trace.pressure.work import Load

from .series import LOAD_COLUMNS, Series, load_of, read_loads, recent_steps
from .sql import KEYS, Connection, Key, fetch, split

__all__ = ["read_loads_and_history"]

_TRACKED: Final = ("step", *LOAD_COLUMNS)
_MOST_STEPWISE: Final = 8
"""Series of which each row is read: a twentieth of a second each."""

Loads: TypeAlias = "dict[Key, dict[str, Load]]"


def read_loads_and_history(connection: Connection, series: Sequence[Series]) -> tuple[Loads, Loads]:
    """The last rows of each series for each capacity, and the same with what the estimator remembers before them."""
    if len(series) > _MOST_STEPWISE:
        loads, earlier = read_loads(connection, series, BY_ID), _highs(connection, series)
        whole = {
            key: {name: load.after(earlier[key][name]) for name, load in ours.items() if name in earlier.get(key, {})}
            for key, ours in loads.items()
        }
        return loads, {key: {**ours, **whole[key]} for key, ours in loads.items()}
    whole = read_loads(connection, series, BY_ID, steps_before=MEMORY_STEPS)
    begins = {one.key: recent_steps(series, one.key.run)[0] for one in series}
    loads = {key: {name: load.since(begins[key]) for name, load in ours.items()} for key, ours in whole.items()}
    return loads, whole


def _highs(connection: Connection, series: Sequence[Series]) -> Loads:
    """Highest demands of blocks of steps, for each calibrated capacity."""
    found: Loads = {}
    for run in dict.fromkeys(one.key.run for one in series):
        ours = {one.key for one in series if one.key.run == run}
        end, _ = recent_steps(series, run)
        for name in CALIBRATED:
            one = BY_ID[name]
            columns = dict.fromkeys((*_TRACKED, one.limit))
            columns.pop(one.demand, None)
            kept = ", ".join(f'arg_max_null("{column}", "{one.demand}") AS "{column}"' for column in columns)
            rows = fetch(
                connection,
                f'SELECT {KEYS}, mode = \'prefill\' AS prefill, max("{one.demand}") AS "{one.demand}", {kept} '
                f"FROM steps WHERE run = ? AND step > {end - MEMORY_STEPS} AND step <= {end} "
                f'AND "{one.demand}" IS NOT NULL GROUP BY {KEYS}, prefill, step // {BLOCK_STEPS} '
                f"ORDER BY {KEYS}, step",
                [run],
            )
            for key, part in split(rows):
                if key in ours:
                    found.setdefault(key, {})[name] = load_of(part, one)
    return found
