"""Advice: the smallest capacities that keep the probability of a breach below a target for the next N steps.

The highest demand of a block of steps is what matters, and blocks are nearly independent where single steps are not.
Above a high quantile of block maxima their excesses follow a generalised Pareto distribution (peaks over threshold);
the value that N further steps exceed with the target probability is read off its tail. Where settings of the engine
bound demand below that, the bound is the advice: no load can break it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcanary_trace.errors import DatasetError, SettingError
from kvcanary_trace.pressure.capacities import CAPACITIES
from kvcanary_trace.pressure.work import Bounds
from kvcanary_trace.schema import SCHEMA_VERSION

from .dataset import open_dataset
from .scenarios import MEMORY_BYTES
from .sql import fetch

__all__ = ["Advice", "Recommendation", "advised_value", "recommend"]

Floats: TypeAlias = NDArray[np.float64]

BLOCK_STEPS: Final = 500
_MIN_BLOCKS: Final = 8
_TAIL: Final = 0.25  # share of the blocks that is the tail
_MIN_TAIL: Final = 6
_MAX_SHAPE: Final = 0.3  # heavier tails than that come from too few blocks, not from serving
_FEW_BLOCKS_MARGIN: Final = 1.5
_ADVISED: Final = ("write_req", "write_entry", "verify", "kv_pool")
_FULL: Final = 0.98  # of a pool: past that, what it holds is no longer what is wanted of it


@dataclass(frozen=True, slots=True)
class Advice:
    """One capacity's smallest value.

    Attributes:
        capacity, group: Whose.
        value: What to set.
        current: What it is.
        ceiling: The most that the engine's settings allow, which no load can break; None where they do not say.
        flag: The engine's flag that sets it, or None where the engine derives it.
        peak_demand: Highest recorded.
        basis: How the value was found: bounded, tail, few-blocks, or clamped: the pool was full, so more was wanted.
        memory_bytes, current_memory_bytes: Of its buffers, None where it has none.
        reason: One sentence.
    """

    capacity: str
    group: str | None
    value: int
    current: int
    ceiling: int | None
    flag: str | None
    peak_demand: int
    basis: str
    memory_bytes: int | None
    current_memory_bytes: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Advice for all capacities of a dataset."""

    steps: int
    probability: float
    advice: tuple[Advice, ...]

    @property
    def flags(self) -> dict[str, int]:
        """As SGLang's flags, where one exists: the highest value of all that share it."""
        flags: dict[str, int] = {}
        for one in self.advice:
            if one.flag is not None:
                flags[one.flag] = max(one.value, flags.get(one.flag, 0))
        return flags

    def to_json(self) -> dict[str, Any]:
        """Every number, under the names of the command line's contract."""
        return {
            "schema": SCHEMA_VERSION,
            "steps": self.steps,
            "probability": self.probability,
            "capacities": [asdict(one) for one in self.advice],
            "flags": self.flags,
        }


def recommend(
    path: Path | str, *, steps: int = 1_000_000, probability: float = 0.01, until: int | None = None
) -> Recommendation:
    """Advise capacities from a recorded run.

    Args:
        path: The dataset's folder.
        steps: For how many further steps the advice is to hold.
        probability: Of a breach of one capacity within them, at most.
        until: Look at no later step.

    Raises:
        DatasetError, SchemaError: As `open_dataset`.
        SettingError: `steps` is not positive, or `probability` not between 0 and 1.
    """
    if steps < 1:
        raise SettingError(f"steps must be at least 1, got {steps}")
    if not 0 < probability < 1:
        raise SettingError(f"probability must be between 0 and 1, got {probability:g}")
    where = "" if until is None else f"WHERE step <= {int(until)}"
    dataset = open_dataset(path)
    bounds = Bounds.of(dict(dataset.runs[-1].engine))
    advice = []
    with dataset.connect() as connection:
        for one in CAPACITIES:
            if one.id not in _ADVISED:
                continue
            # The pool is the engine's: its rows of each group tell the same.
            grouping = '"group"' if one.grouped else 'NULL::VARCHAR AS "group"'
            found = fetch(
                connection,
                f'SELECT run, rank, runner, {grouping}, step // {BLOCK_STEPS} AS block, max("{one.demand}") AS demand, '
                f'arg_max("{one.limit}", step) AS current FROM steps {where} '
                f'GROUP BY ALL HAVING max("{one.demand}") IS NOT NULL AND max("{one.limit}") IS NOT NULL '
                'ORDER BY run, rank, runner, "group", block',
            )
            groups = [None if group != group else group for group in found["group"].tolist()]
            for group in dict.fromkeys(groups):
                mine = np.array([other == group for other in groups])
                peaks = np.asarray(found["demand"][mine], dtype=np.float64)
                current = int(found["current"][mine][-1])
                ceiling = bounds.ceiling(one.id)
                value, basis = advised_value(peaks, steps / BLOCK_STEPS, probability, ceiling, one.granule)
                if one.id == "kv_pool" and peaks.max() >= _FULL * current:
                    basis = "clamped"
                memory = MEMORY_BYTES.get(one.id)
                advice.append(
                    Advice(
                        capacity=one.id,
                        group=group,
                        value=value,
                        current=current,
                        ceiling=None if ceiling is None else math.ceil(ceiling),
                        flag=one.flag if one.direction == "raise" else None,
                        peak_demand=int(peaks.max()),
                        basis=basis,
                        memory_bytes=memory(value) if memory else None,
                        current_memory_bytes=memory(current) if memory else None,
                        reason=_reason(basis, value, current, int(peaks.max()), len(peaks), ceiling),
                    )
                )
    if not advice:
        raise DatasetError(f"{path} has no row that measured {', '.join(_ADVISED)}")
    return Recommendation(steps, probability, tuple(advice))


def advised_value(
    peaks: Floats, blocks_ahead: float, probability: float, ceiling: float | None = None, granule: int = 1
) -> tuple[int, str]:
    """The value that the highest demand of further blocks exceeds with a probability.

    Args:
        peaks: [blocks] highest demand of each block, at least one.
        blocks_ahead: How many blocks are to come.
        probability: Of an exceedance.
        ceiling: The most that settings allow, or None.
        granule: Round up to a multiple of it; a ceiling is taken as it is.

    Returns:
        The value, never below what was seen, and how it was found.
    """
    seen = float(peaks.max())
    if len(peaks) < _MIN_BLOCKS or seen <= 0:
        value, basis = _FEW_BLOCKS_MARGIN * seen, "few-blocks"
    else:
        value, basis = max(seen, _tail_value(np.sort(peaks), blocks_ahead, probability)), "tail"
    rounded = max(1, math.ceil(value / granule) * granule)
    if ceiling is not None and math.ceil(max(ceiling, seen)) <= rounded:
        return math.ceil(max(ceiling, seen)), "bounded"
    return rounded, basis


def _tail_value(peaks: Floats, blocks_ahead: float, probability: float) -> float:
    """Peaks over threshold: probability-weighted moments, which are stable for few excesses. `peaks` is sorted."""
    count = max(_MIN_TAIL, int(_TAIL * len(peaks)))
    count = min(count, len(peaks) - 1)
    threshold = float(peaks[-count - 1])
    excess = peaks[-count:] - threshold
    mean = float(excess.mean())
    if mean <= 0:
        return threshold
    weights = 1 - (np.arange(count) + 0.65) / count
    second = float((weights * excess).mean())
    shape = 2 - mean / (mean - 2 * second) if mean > 2 * second else 0.0
    # A tail that ends, read off few excesses, ends too early: over 150 blocks such advice broke four times as often as
    # promised. 1 / count is the shape of what an exponential tail predicts when its mean is known from count values.
    shape = min(max(shape, 1 / count), _MAX_SHAPE)
    scale = mean * (1 - shape)
    # Exceedances of the threshold to come are Poisson: 1 - exp(-rate * tail) = probability.
    tail = -math.log1p(-probability) / (blocks_ahead * count / len(peaks))
    if tail >= 1:
        return threshold
    return float(threshold + scale * (tail**-shape - 1) / shape)


def _reason(basis: str, value: int, current: int, peak: int, blocks: int, ceiling: float | None) -> str:
    change = "as it is" if value == current else f"{value / current - 1:+.0%}"
    if basis == "bounded" and ceiling is not None:
        return f"{change}: the engine's settings allow {int(ceiling):,} at most, so no load can break it"
    if basis == "clamped":
        return (
            f"{change}, at least: the pool was full, and what waited for it is not in what it held; record a larger one"
        )
    certain = "" if ceiling is None else f"; {int(ceiling):,}, the most that the settings allow, holds for any load"
    if basis == "few-blocks":
        few = f"{_FEW_BLOCKS_MARGIN:g} times the highest demand, {peak:,}, of only {blocks} blocks of steps"
        return f"{change}: {few}{certain}"
    return f"{change}: from the tail of {blocks:,} blocks of {BLOCK_STEPS} steps, the highest {peak:,}{certain}"
