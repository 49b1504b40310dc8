"""What the estimator remembers, read back from files: the run before the rows that a forecast looks at one by one.

The live estimator has seen the whole run and remembers 10 000 steps. Here it gets the highest demand of each, of
prefills and of other rows apart: at most 20 000 rows a series. Of many series it gets those of its blocks of 25 steps,
which is what the live one takes when rows come too fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvcanary_trace.pressure.capacities import BY_ID
from kvcanary_trace.pressure.horizon import BLOCK_STEPS, MEMORY_STEPS
from kvcanary_trace.pressure.horizon_table import CALIBRATED
from kvcanary_trace.pressure.work import Load

from .series import LOAD_COLUMNS, Series, load_of, recent_steps
from .sql import KEYS, Connection, Key, fetch, split

__all__ = ["read_history"]

_TRACKED: Final = ("step", *LOAD_COLUMNS)
_MOST_STEPWISE: Final = 8
"""Series of which each step is read: a tenth of a second each."""


def read_history(connection: Connection, series: Sequence[Series]) -> dict[Key, dict[str, Load]]:
    """The steps before those of `read_loads`, only their highest demands, for each calibrated capacity.

    Args:
        connection: To the dataset.
        series: All series.
    """
    found: dict[Key, dict[str, Load]] = {}
    bucket = 1 if len(series) <= _MOST_STEPWISE else BLOCK_STEPS
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
                f'AND "{one.demand}" IS NOT NULL GROUP BY {KEYS}, prefill, step // {bucket} '
                f"ORDER BY {KEYS}, step",
                [run],
            )
            for key, part in split(rows):
                if key in ours:
                    found.setdefault(key, {})[name] = load_of(part, one)
    return found
