"""The coverage ledger: what share of the demanded entries was verified, and why the rest was not.

An entry counts as verified when every launch of its group had it in its plan. Slot 0 is the exception that rows cannot
show: such entries are in the plan but skipped by the kernel, so `slot_0` is unknown (null), never zero. Lost rows take
their demand with them: how many entries they held is unknown too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .findings import percent
from .sql import KEYS, Connection, Key, fetch, split

__all__ = ["REASONS", "Coverage", "Retried", "covered", "read_coverage", "read_retried", "total"]

REASONS: Final = {
    "overflow": "demand exceeded the verify capacity",
    "disabled": "verification was off",
    "error": "the step ended in an error",
    "not_launched": "planned, but no verify launch of every kind checked it",
    "not_measured": "nobody recorded whether it was checked",
}
"""Reason → what it means. `slot_0` and `lost_rows` stand beside them and have no count of entries."""

_UNKNOWN_SHARE: Final = 0.01

_REASON: Final = """CASE
    WHEN error IS NOT NULL THEN 'error'
    WHEN verify_demand > verify_capacity AND (NOT verify_enabled OR verify_checked IS NOT NULL) THEN 'overflow'
    WHEN NOT verify_enabled THEN 'disabled'
    WHEN verify_checked IS NULL THEN 'not_measured'
    ELSE 'not_launched' END"""
_NOT_VERIFIED: Final = "verify_demand > 0 AND (verify_checked IS NULL OR verify_checked < verify_demand)"


@dataclass(frozen=True, slots=True)
class Coverage:
    """Entries demanded and verified.

    Attributes:
        demanded: Sum of the rows' demand.
        verified: Those that were checked.
        unverified_by_reason: Entries by reason; None where a number cannot be known.
        rows_by_reason: Rows that had unverified entries, by reason.
        lost_rows: Rows that never reached the dataset.
    """

    demanded: int
    verified: int
    unverified_by_reason: Mapping[str, int | None]
    rows_by_reason: Mapping[str, int]
    lost_rows: int = 0

    @property
    def ratio(self) -> float | None:
        """Verified over demanded, of the entries about which it is known; None where that is not nearly all of them."""
        unknown = self.unverified_by_reason["not_measured"] or 0
        if not self.demanded or unknown > _UNKNOWN_SHARE * self.demanded:
            return None
        return self.verified / (self.demanded - unknown)

    @property
    def most(self) -> float | None:
        """What the ratio is at most: everything that is not known to be unverified over what was demanded."""
        return 1 - self.unverified / self.demanded if self.demanded else None

    @property
    def unverified(self) -> int:
        """Entries known not to have been verified."""
        return sum(self.unverified_by_reason[name] or 0 for name in REASONS if name != "not_measured")


@dataclass(frozen=True, slots=True)
class Retried:
    """Rows of one series that ended in an error and were done again in the same step, in chunks for instance.

    Attributes:
        steps: [rows] int64.
        demands: [rows] int64: entries that the second row demands again.
    """

    steps: NDArray[np.int64]
    demands: NDArray[np.int64]


def read_retried(connection: Connection, where: str) -> dict[Key, Retried]:
    """Errors that a later forward of the same step made good: same runner, group and demand, and no error."""
    errors = f"{where} {'AND' if where else 'WHERE'} error IS NOT NULL AND verify_demand > 0"
    low, high = connection.execute(f"SELECT min(step), max(step) FROM steps {errors}").fetchall()[0]
    if low is None:
        return {}
    columns = fetch(
        connection,
        f"SELECT {KEYS}, step, verify_demand FROM (SELECT * FROM steps {errors} AND coalesce(verify_checked, 0) = 0) "
        f"SEMI JOIN (SELECT * FROM steps WHERE step BETWEEN {low} AND {high} AND error IS NULL) AS again "
        f'USING (run, rank, runner, "group", step, verify_demand) ORDER BY {KEYS}, step',
    )
    return {
        key: Retried(rows["step"].astype(np.int64), rows["verify_demand"].astype(np.int64))
        for key, rows in split(columns)
    }


def covered(ledger: Coverage) -> str:
    """The share that was verified, for reading."""
    if ledger.ratio is not None:
        return percent(ledger.ratio)
    if ledger.unverified and ledger.most is not None:
        return f"at most {percent(ledger.most)}"
    return "unknown"


def read_coverage(
    connection: Connection, where: str, demanded: Mapping[Key, int], retried: Mapping[Key, Retried]
) -> dict[Key, Coverage]:
    """The ledger of each series. What was done again in the same step counts once.

    Args:
        connection: To the dataset.
        where: SQL condition on the rows, or nothing.
        demanded: Entries that each series demanded.
        retried: Errors that were made good.
    """
    # Only rows that were not wholly verified are classified: in a healthy run there are none.
    columns = fetch(
        connection,
        f"SELECT {KEYS}, {_REASON} AS reason, count(*) AS rows, "
        "sum(verify_demand - greatest(coalesce(verify_checked, 0), 0))::BIGINT AS entries "
        f"FROM steps {where} {'AND' if where else 'WHERE'} {_NOT_VERIFIED} GROUP BY ALL ORDER BY {KEYS}",
    )
    found = dict(split(columns))
    ledgers = {}
    for key, total_demanded in demanded.items():
        unverified: dict[str, int | None] = dict.fromkeys(REASONS, 0)
        rows = dict.fromkeys(REASONS, 0)
        part = found.get(key)
        if part is not None:
            for reason, count, entries in zip(part["reason"], part["rows"], part["entries"], strict=True):
                rows[str(reason)], unverified[str(reason)] = int(count), int(entries)
        again = retried.get(key)
        if again is not None:
            made_good = int(again.demands.sum())
            total_demanded -= made_good
            rows["error"] -= len(again.steps)
            unverified["error"] = (unverified["error"] or 0) - made_good
        verified = total_demanded - sum(value or 0 for value in unverified.values())
        ledgers[key] = Coverage(total_demanded, verified, _with_unknowns(unverified, 0), rows)
    return ledgers


def total(ledgers: Iterable[Coverage], lost_rows: int) -> Coverage:
    """The sum of ledgers, and the rows that were lost beside them."""
    ledgers = list(ledgers)
    unverified: dict[str, int | None] = {
        name: sum(one.unverified_by_reason[name] or 0 for one in ledgers) for name in REASONS
    }
    return Coverage(
        sum(one.demanded for one in ledgers),
        sum(one.verified for one in ledgers),
        _with_unknowns(unverified, lost_rows),
        {name: sum(one.rows_by_reason[name] for one in ledgers) for name in REASONS},
        lost_rows,
    )


def _with_unknowns(unverified: dict[str, int | None], lost_rows: int) -> dict[str, int | None]:
    return {**unverified, "slot_0": None, "lost_rows": None if lost_rows else 0}
