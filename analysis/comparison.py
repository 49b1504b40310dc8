"""Compare two runs: which distributions of demand, coverage and duration moved, by how much, and is it more than noise?

Steps follow each other and resemble each other, so a test over rows finds differences everywhere. Here the means of
batches are compared: each run is cut into batches that are long against its correlation, whose means are nearly
independent, and Welch's test is taken over those, with Holm's correction over all metrics. An effect has to be both
unlikely as noise and large enough to matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcanary_trace.errors import SettingError
from kvcanary_trace.schema import SCHEMA_VERSION

from .dataset import open_dataset
from .sql import fetch, known

__all__ = ["METRICS", "Comparison", "Move", "batch_means", "compare", "welch"]

Floats: TypeAlias = NDArray[np.float64]

METRICS: Final[Mapping[str, tuple[str, str, bool]]] = {
    # name: (SQL over the rows of a group, unit, whether more is worse)
    "bs": ("bs", "request", True),
    "verify_demand": ("verify_demand", "entry", True),
    "write_entries": ("write_entries", "token", True),
    "coverage": ("CASE WHEN verify_demand > 0 THEN verify_checked / verify_demand END", "1", False),
    "kv_used": ("kv_used", "token", True),
    "plan_ns": ("plan_ns", "ns", True),
    "verify_ns": ("verify_ns", "ns", True),
    "write_ns": ("write_ns", "ns", True),
    "host_ns": ("host_ns", "ns", True),
    "verify_ns_per_entry": ("CASE WHEN verify_checked > 0 THEN verify_ns / verify_checked END", "ns", True),
}

_BATCHES: Final = 24
_MIN_BATCHES: Final = 8
_MIN_ROWS: Final = 10  # a batch
_NO_SPREAD: Final = 99.0
"""The effect where both sides are constant and differ: as large as it takes."""


@dataclass(frozen=True, slots=True)
class Move:
    """One metric of one group, before and after.

    Attributes:
        metric, unit: What.
        group, mode: Rows of which buffer group and mode.
        before, after: Means over batches.
        p50, p99: (before, after) quantiles over rows.
        ratio: After over before, None where before is 0.
        effect: Difference of the means in standard deviations of batch means (Hedges' g).
        p_value: Holm-corrected over everything compared; None where there were too few batches.
        moved: Whether the difference is significant and large enough.
        worse: Whether it moved in the bad direction.
    """

    metric: str
    unit: str
    group: str | None
    mode: str | None
    before: float
    after: float
    p50: tuple[float, float]
    p99: tuple[float, float]
    ratio: float | None
    effect: float | None
    p_value: float | None
    moved: bool
    worse: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """What moved between two runs, largest effect first; `one_sided` names what only one of them has."""

    before: str
    after: str
    alpha: float
    min_ratio: float
    moves: tuple[Move, ...]
    one_sided: tuple[str, ...] = ()

    @property
    def worse(self) -> tuple[Move, ...]:
        """What moved in the bad direction."""
        return tuple(one for one in self.moves if one.worse)

    def to_json(self) -> dict[str, Any]:
        """Every number."""
        return {"schema": SCHEMA_VERSION, **asdict(self)}


def compare(
    before: Path | str,
    after: Path | str,
    *,
    before_run: str | None = None,
    after_run: str | None = None,
    alpha: float = 0.01,
    min_ratio: float = 0.05,
) -> Comparison:
    """Compare two datasets, or two runs of them.

    Args:
        before, after: Folders; they may be the same when runs are named.
        before_run, after_run: Run ids; None takes the dataset's latest run.
        alpha: Probability of calling noise a move, over everything compared.
        min_ratio: Least relative change of a mean that matters.

    Raises:
        DatasetError, SchemaError: As `open_dataset`.
        SettingError: A run is not there, both are the same, or a number makes no sense.
    """
    if not 0 < alpha < 1 or not min_ratio >= 0:
        raise SettingError(f"alpha must be between 0 and 1 and min_ratio at least 0, got {alpha:g} and {min_ratio:g}")
    old, new = _read(before, before_run), _read(after, after_run)
    if Path(before).resolve() == Path(after).resolve() and old[0] == new[0]:
        raise SettingError(f"both sides are run {old[0]} of {before}; name two runs, or two folders")
    found = []
    one_sided = [f"{_named(*key)}: only after" for key in new[1] if key not in old[1]]
    for key in old[1]:
        if key not in new[1]:
            one_sided.append(f"{_named(*key)}: only before")
            continue
        group, mode, metric = key
        a, b = old[1][key], new[1][key]
        means = batch_means(a), batch_means(b)
        effect, p = welch(*means) if min(map(len, means)) >= _MIN_BATCHES else (None, None)
        found.append((metric, group, mode, a, b, effect, p))
    corrected = _holm([p for *_, p in found])
    moves = []
    for (metric, group, mode, a, b, effect, _), p in zip(found, corrected, strict=True):
        _, unit, more_is_worse = METRICS[metric]
        x, y = float(a.mean()), float(b.mean())
        large = abs(y - x) > min_ratio * abs(x) if metric != "coverage" else abs(y - x) > 0.001
        moved = p is not None and p <= alpha and large
        moves.append(
            Move(
                metric=metric,
                unit=unit,
                group=group,
                mode=mode,
                before=x,
                after=y,
                p50=(float(np.quantile(a, 0.5)), float(np.quantile(b, 0.5))),
                p99=(float(np.quantile(a, 0.99)), float(np.quantile(b, 0.99))),
                ratio=y / x if x else None,
                effect=effect,
                p_value=p,
                moved=moved,
                worse=moved and (y > x) == more_is_worse,
            )
        )
    moves.sort(key=lambda one: (not one.worse, not one.moved, -abs(one.effect or 0.0)))
    return Comparison(old[0], new[0], alpha, min_ratio, tuple(moves), tuple(sorted(one_sided)))


def _named(group: str | None, mode: str | None, metric: str) -> str:
    return f"{metric} of {group or 'all'}, {mode or 'any mode'}"


def _read(path: Path | str, run: str | None) -> tuple[str, dict[tuple[str | None, str | None, str], Floats]]:
    """A run's id, and its values by (group, mode, metric) in order of the steps."""
    dataset = open_dataset(path)
    ids = sorted({one.run for one in dataset.runs}, key=lambda name: _started(dataset.runs, name))
    if run is not None and run not in ids:
        raise SettingError(f"{path} has no run {run!r}; it has {', '.join(ids)}")
    chosen = run if run is not None else ids[-1]
    columns = ", ".join(f'{sql} AS "{name}"' for name, (sql, _, _) in METRICS.items())
    with dataset.connect() as connection:
        rows = fetch(
            connection,
            f'SELECT "group", mode, {columns} FROM steps WHERE run = ? ORDER BY "group", mode, rank, step, forward',
            [chosen],
        )
    groups, modes = rows["group"], rows["mode"]
    changes = np.flatnonzero((groups[1:] != groups[:-1]) | (modes[1:] != modes[:-1])) + 1
    values: dict[tuple[str | None, str | None, str], Floats] = {}
    for begin, end in zip([0, *changes.tolist()], [*changes.tolist(), len(groups)], strict=True):
        group, mode = _text(groups[begin]), _text(modes[begin])
        for metric in METRICS:
            column = known(rows, metric)[begin:end]
            column = column[np.isfinite(column)]
            if len(column) >= _MIN_BATCHES * _MIN_ROWS:
                values[group, mode, metric] = column
    return chosen, values


def _text(value: Any) -> str | None:
    return None if value is None or value != value else str(value)


def _started(runs: Any, name: str) -> int:
    return min((one.started_ns or 0) for one in runs if one.run == name)


def batch_means(values: Floats, batches: int = _BATCHES) -> Floats:
    """Means of consecutive batches, fewer and longer until neighbours are no longer correlated.

    Args:
        values: [n] in their order.
        batches: Most batches.
    """
    while True:
        size = len(values) // batches
        means = values[: size * batches].reshape(batches, size).mean(axis=1) if size else values
        centred = means - means.mean()
        spread = float(centred @ centred)
        correlation = float(centred[1:] @ centred[:-1]) / spread if spread > 0 else 0.0
        if correlation < 2 / math.sqrt(len(means)) or batches <= _MIN_BATCHES:
            return means
        batches = max(_MIN_BATCHES, int(batches / 1.5))


def welch(a: Floats, b: Floats) -> tuple[float, float]:
    """Welch's test of two samples: effect size (Hedges' g, positive where `b` is larger) and two-sided p-value."""
    from scipy.special import stdtr  # its statistics module takes a second to import

    va, vb = float(a.var(ddof=1)) / len(a), float(b.var(ddof=1)) / len(b)
    difference = float(b.mean() - a.mean())
    if va + vb <= 1e-18 * max(1.0, difference * difference):
        return (
            (0.0, 1.0)
            if abs(difference) <= 1e-12 * max(1.0, abs(float(a.mean())))
            else (math.copysign(99.0, difference), 0.0)
        )
    freedom = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    t = difference / math.sqrt(va + vb)
    pooled = math.sqrt((a.var(ddof=1) * (len(a) - 1) + b.var(ddof=1) * (len(b) - 1)) / (len(a) + len(b) - 2))
    small = 1 - 3 / (4 * (len(a) + len(b)) - 9)
    return small * difference / pooled, 2 * float(stdtr(freedom, -abs(t)))


def _holm(p_values: list[float | None]) -> list[float | None]:
    """Step-down correction; None stays None."""
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, i) in enumerate(known):
        highest = max(highest, min(1.0, p * (len(known) - rank)))
        corrected[i] = highest
    return corrected
