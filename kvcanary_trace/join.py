"""The join of device halves and host halves of a step's rows, by key (step, forward, runner).

A host half belongs to all groups of its forward, so it meets several device halves. A half whose other half never comes
is given out alone after a while; what it lacks becomes null, never zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvcanary_trace.kernels.layout import ProbeWord

from .ring import ROW_WORDS, Words
from .schema import NOT_MEASURED, HostWord

Flags = npt.NDArray[np.bool_]
_Index = npt.NDArray[np.int64]

MAX_PENDING_ROWS: Final = 65_536
MAX_AGE_JOINS: Final = 4

_STEP, _FORWARD, _RUNNER = int(ProbeWord.STEP), int(ProbeWord.FORWARD), int(ProbeWord.RUNNER)
assert (_STEP, _FORWARD, _RUNNER) == (HostWord.STEP, HostWord.FORWARD, HostWord.RUNNER)  # one key for both halves
_DEVICE_ROWS = int(HostWord.DEVICE_ROWS)


@dataclass(frozen=True, slots=True)
class Joined:
    """Rows that are complete, or will never be.

    `device` and `host` are [n, 32] int64; where `has_device` or `has_host` is False, that half is all NOT_MEASURED.
    """

    device: Words
    host: Words
    has_device: Flags
    has_host: Flags

    def __len__(self) -> int:
        return len(self.device)


class Joiner:
    """Keeps halves until their other half comes. All methods belong to the drain thread."""

    def __init__(self, *, max_pending_rows: int = MAX_PENDING_ROWS, max_age_joins: int = MAX_AGE_JOINS) -> None:
        """Keep at most `max_pending_rows` of each half, for at most `max_age_joins` calls of `join`."""
        self._max_pending_rows = max_pending_rows
        self._max_age_joins = max_age_joins
        self._device, self._device_age = _no_rows(), _no_numbers()
        self._host, self._host_age, self._host_met = _no_rows(), _no_numbers(), _no_numbers()
        self.unmatched = 0
        """Halves given out alone although their other half should have come."""

    @property
    def pending(self) -> int:
        """Halves that wait for their other half."""
        return len(self._device) + int((self._host_met == 0).sum())

    def join(self, device: Words, host: Words, *, last: bool = False) -> Joined:
        """Match new halves with each other and with those that wait.

        Args:
            device: [n, 32] int64 rows of `ProbeWord`, new since the last call.
            host: [m, 32] int64 rows of `HostWord`, likewise.
            last: Nothing comes any more: give out all that waits.
        """
        rows = np.concatenate([self._device, device])
        age = np.concatenate([self._device_age + 1, np.zeros(len(device), np.int64)])
        halves = np.concatenate([self._host, host])
        half_age = np.concatenate([self._host_age + 1, np.zeros(len(host), np.int64)])
        met = np.concatenate([self._host_met, np.zeros(len(host), np.int64)])

        partner = _partners(rows, halves)
        found = partner >= 0
        met += np.bincount(partner[found], minlength=len(halves))

        alone = ~found & self._expired(age, ~found, last)
        expected = halves[:, _DEVICE_ROWS]
        known = expected != NOT_MEASURED
        complete = known & (met >= expected)
        over = ~complete & self._expired(half_age, ~complete, last)
        self.unmatched += int(alone.sum()) + int((over & ((met == 0) | known)).sum())
        host_only = (complete | over) & (met == 0)

        taken = found | alone
        self._device, self._device_age = rows[~taken], age[~taken]
        kept = ~(complete | over)
        self._host, self._host_age, self._host_met = halves[kept], half_age[kept], met[kept]
        return _joined(rows[taken], halves, partner[taken], halves[host_only])

    def _expired(self, age: _Index, waiting: Flags, last: bool) -> Flags:
        """Which of the waiting rows, oldest first, wait no longer."""
        if last:
            return np.ones(len(age), dtype=np.bool_)
        excess = int(waiting.sum()) - self._max_pending_rows
        old: Flags = age >= self._max_age_joins
        return old if excess <= 0 else old | (np.cumsum(waiting) <= excess)


def _partners(rows: Words, halves: Words) -> _Index:
    """For each device row the index of its host half, or -1."""
    if not len(halves) or not len(rows):
        return np.full(len(rows), -1, dtype=np.int64)
    step = np.concatenate([halves[:, _STEP], rows[:, _STEP]])
    forward = np.concatenate([_forward_key(halves), _forward_key(rows)])
    is_device = np.arange(len(step)) >= len(halves)
    order = np.lexsort((is_device, forward, step))  # stable: within a key, hosts then devices, each as they came
    step, forward = step[order], forward[order]
    begins = np.ones(len(order), dtype=np.bool_)
    begins[1:] = (step[1:] != step[:-1]) | (forward[1:] != forward[:-1])
    key = np.cumsum(begins) - 1
    start = np.flatnonzero(begins)
    num_hosts = np.bincount(key[order < len(halves)], minlength=len(start))
    at = np.flatnonzero(order >= len(halves))
    key_at = key[at]
    # The i-th device row of a key takes its i-th host half, or the last: one half for all groups, or one each.
    rank = np.minimum(at - start[key_at] - num_hosts[key_at], num_hosts[key_at] - 1)
    partner = np.full(len(rows), -1, dtype=np.int64)
    partner[order[at] - len(halves)] = np.where(rank >= 0, order[start[key_at] + np.maximum(rank, 0)], -1)
    return partner


def _forward_key(rows: Words) -> _Index:
    key: _Index = rows[:, _FORWARD] * 2 + rows[:, _RUNNER]
    return key


def _joined(rows: Words, halves: Words, partner: _Index, host_only: Words) -> Joined:
    num, extra = len(rows), len(host_only)
    device = np.full((num + extra, ROW_WORDS), NOT_MEASURED, dtype=np.int64)
    device[:num] = rows
    host = np.full((num + extra, ROW_WORDS), NOT_MEASURED, dtype=np.int64)
    has_host = np.ones(num + extra, dtype=np.bool_)
    has_host[:num] = partner >= 0
    host[:num][partner >= 0] = halves[partner[partner >= 0]]
    host[num:] = host_only
    return Joined(device, host, np.arange(num + extra) < num, has_host)


def _no_rows() -> Words:
    return np.empty((0, ROW_WORDS), dtype=np.int64)


def _no_numbers() -> _Index:
    return np.empty(0, dtype=np.int64)
