"""What a recording lost: the counters of its run file, and ring numbers that are missing from the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .dataset import Dataset
from .series import Series

__all__ = ["Losses", "read_losses"]

MEANINGS: Final = {
    "ring_overwritten": "rows overwritten in the device ring before they were drained",
    "host_ring_overwritten": "rows overwritten in the host ring",
    "rows_dropped": "rows that a failing sink did not take",
    "violations_lost": "violations whose detail no longer fitted the ring",
    "halves_unmatched": "rows with one half missing",
    "sink_errors": "errors of a sink",
    "observer_errors": "errors while observing a launch",
    "rows_missing": "ring numbers without a row in the dataset",
}
"""Counter → what it counts. Counters that a newer session adds keep their own name."""

_NOT_COUNTS: Final = ("last_lost_seq", "violations_lost_from")
_MADE_GOOD: Final = "sink_errors"
"""A sink that failed was offered its rows again: what it never took is counted as rows_dropped."""

_ROWS: Final = ("ring_overwritten", "host_ring_overwritten", "rows_dropped")


@dataclass(frozen=True, slots=True)
class Losses:
    """One rank's losses.

    Attributes:
        counters: From the run file, plus `rows_missing` from the rows. None: not known.
        last_lost_seq: Highest ring number that is known to be lost, or None.
        violations_lost_from: Step from which on violations have no detail, or None.
    """

    counters: Mapping[str, int | None]
    last_lost_seq: int | None = None
    violations_lost_from: int | None = None

    @property
    def any(self) -> bool:
        """Whether anything was lost. Errors of a sink that took its rows later lost nothing."""
        return any(count for name, count in self.counters.items() if name != _MADE_GOOD)

    @property
    def only_detail(self) -> bool:
        """Whether nothing but the detail of violations was lost: every figure of a row is there."""
        return self.any and not any(
            count for name, count in self.counters.items() if name not in (_MADE_GOOD, "violations_lost")
        )

    @property
    def rows(self) -> int:
        """Rows that never reached the dataset: what the rings and sinks counted, or what the numbers show."""
        counted = sum(self.counters.get(name) or 0 for name in _ROWS)
        return max(counted, self.counters.get("rows_missing") or 0)

    @property
    def sentence(self) -> str:
        """What was lost, in words."""
        return ", ".join(
            f"{count:,} {MEANINGS.get(name, name)}{self._since(name)}" for name, count in self.counters.items() if count
        )

    def _since(self, name: str) -> str:
        if name != "violations_lost" or self.violations_lost_from is None:
            return ""
        return f" from step {self.violations_lost_from:,} on"


def read_losses(dataset: Dataset, series: Sequence[Series], until: int | None) -> dict[tuple[str, int], Losses]:
    """Losses of each rank.

    Args:
        dataset: With its run files.
        series: All series, with their ring numbers.
        until: Last step looked at, or None for all.
    """
    losses = {}
    for run in dataset.runs:
        ours = [one for one in series if (one.key.run, one.key.rank) == (run.run, run.rank) and one.seq_range]
        missing: int | None = None
        # Seen from an earlier step, rows of groups that were still to come would look lost.
        if ours and until is None:
            low = min(one.seq_range[0] for one in ours if one.seq_range)
            high = max(one.seq_range[1] for one in ours if one.seq_range)
            missing = max(0, high - low + 1 - sum(one.seqs for one in ours))
        counters = {name: value for name, value in run.losses.items() if name not in _NOT_COUNTS}
        losses[run.run, run.rank] = Losses(
            {**counters, "rows_missing": missing},
            run.losses.get("last_lost_seq"),
            run.losses.get("violations_lost_from"),
        )
    return losses
