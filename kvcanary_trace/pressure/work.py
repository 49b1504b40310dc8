"""Work that an engine runs and has queued, and how much of a capacity it will want.

A step's own demand is blind while prefills run: a batch of two may stand beside two hundred running requests. What the
engine already runs and has queued is not. But a queue is no demand yet: what the engine can admit at once is bounded by
its request limit and by the free slots of its pool, so a long queue before a full engine is no breach to come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["SHARING_SEEN", "Bounds", "Committed", "Load", "committed", "current_load", "work_load"]

Floats: TypeAlias = NDArray[np.float64]

SHARING_SEEN: Final = 1.2
"""Above this many tokens a slot, prefixes are evidently shared, and queued prompts may cost no slots at all."""


@dataclass(frozen=True, slots=True)
class Load:
    """One series of rows, in order of (step, forward). All arrays are [rows] float64; NaN where nobody measured.

    Attributes:
        step: Engine steps, not decreasing.
        demand, limit: In the capacity's unit.
        prefill: Whether the forward holds new prompts only (1.0) and so leaves running requests out.
        write_entries: Tokens that it writes.
        resident_reqs, resident_tokens: What the engine runs, this step's new requests included.
        waiting_reqs, waiting_tokens: What is queued, and what is still to come of prompts in progress.
        kv_used, kv_capacity: Slots of the pool, evictable cache excluded.
    """

    step: Floats
    demand: Floats
    limit: Floats
    prefill: Floats
    write_entries: Floats
    resident_reqs: Floats
    resident_tokens: Floats
    waiting_reqs: Floats
    waiting_tokens: Floats
    kv_used: Floats
    kv_capacity: Floats

    def __len__(self) -> int:
        return len(self.step)

    @property
    def knows_queue(self) -> bool:
        """Whether the engine said what it runs and has queued, in the last row."""
        return len(self) > 0 and bool(np.isfinite(self.resident_reqs[-1]) or np.isfinite(self.resident_tokens[-1]))

    def after(self, earlier: Load) -> Load:
        """The rows of `earlier`, then these."""
        return Load(**{name: np.concatenate([getattr(earlier, name), getattr(self, name)]) for name in Load.__slots__})

    def since(self, step: int) -> Load:
        """The rows of steps after `step`."""
        begin = int(np.searchsorted(self.step, step, side="right"))
        return Load(**{name: getattr(self, name)[begin:] for name in Load.__slots__})

    def until(self, rows: int) -> Load:
        """The first `rows` rows."""
        return Load(**{name: getattr(self, name)[:rows] for name in Load.__slots__})


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the engine's own settings allow at most; None where a setting is unknown."""

    max_running_requests: float | None = None
    step_tokens: float | None = None
    context_length: float | None = None
    mixed: bool = False

    @classmethod
    def of(cls, engine: Mapping[str, Any]) -> Bounds:
        """Bounds from the engine arguments of a run file, however they are spelled (`--max-running-requests` too)."""
        settings = {name.lstrip("-").replace("-", "_"): value for name, value in engine.items()}

        def positive(*names: str) -> float | None:
            found = [
                float(settings[name])
                for name in names
                if isinstance(settings.get(name), int | float) and not isinstance(settings[name], bool)
            ]
            kept = [value for value in found if value > 0]  # -1 switches chunking off
            return min(kept) if kept else None

        mixed = bool(settings.get("enable_mixed_chunk")) or settings.get("schedule") == "mixed"
        return cls(
            positive("max_running_requests"),
            positive("chunked_prefill_size", "max_prefill_tokens"),
            positive("context_length"),
            mixed,
        )

    def ceiling(self, capacity: str) -> float | None:
        """The most that the settings let a capacity's demand reach, or None where they do not say."""
        if capacity in ("write_req", "plan_block"):
            return self.max_running_requests if capacity == "write_req" else None
        if capacity == "write_entry":
            return self.step_tokens
        return self.context_length if capacity == "req_to_token" else None


@dataclass(frozen=True, slots=True)
class Committed:
    """What running and admissible queued work will want of a capacity, in its unit; NaN where that is unknown.

    Attributes:
        running: Running work alone.
        likely: Running work, and queued work that the engine has room for.
        most: The same, should every queued prefix be shared.
        never_fits: Tokens of a queued request that cannot fit even alone, or NaN.
    """

    running: float
    likely: float
    most: float
    never_fits: float = float("nan")


def current_load(capacity: str, load: Load) -> Floats:
    """[rows] demand of each row with running requests counted in where they are known: what a trend is fitted to.

    Rows that hold new prompts only are NaN where running requests are unknown: they say nothing about the rest.
    """
    if capacity == "write_req":
        full = load.resident_reqs
    elif capacity == "verify":
        full = load.resident_tokens * _entries_per_token(load)
    elif capacity == "req_to_token":
        full = np.full(len(load), np.nan)
    else:
        return load.demand
    alone = np.where(load.prefill == 1.0, np.nan, load.demand)
    if np.isfinite(full).any():
        return np.fmax(full, load.demand)
    return alone if np.isfinite(alone).any() else load.demand


def work_load(capacity: str, load: Load) -> Floats | None:
    """[rows] running and all queued work of each row, or None where the queue is unknown.

    Prefills turn queued work into running work, so this does not rise while a burst that is already here is taken in.
    """
    if capacity == "write_req" and np.isfinite(load.waiting_reqs).any():
        return load.resident_reqs + load.waiting_reqs
    if capacity in ("verify", "kv_pool") and np.isfinite(load.waiting_tokens).any():
        if capacity == "kv_pool":
            return load.kv_used + load.waiting_tokens
        return (load.resident_tokens + load.waiting_tokens) * _entries_per_token(load)
    return None


def committed(capacity: str, load: Load, bounds: Bounds) -> Committed:
    """What the work of the last row will want of a capacity."""
    nan = float("nan")
    if not len(load) or capacity in ("plan_block", "violation_ring"):
        return Committed(nan, nan, nan)
    last = _Last(load, bounds)
    if capacity == "write_req":
        waiting = last.admissible_reqs(last.waiting_reqs)
        running = last.resident_reqs
        return Committed(running, running + min(waiting, last.pool_reqs()), running + waiting)
    if capacity == "verify":
        per_token = _entries_per_token(load)
        running = per_token * last.resident_tokens
        waiting = last.admissible_tokens()
        most = waiting if last.sharing() >= SHARING_SEEN else min(waiting, last.pool_tokens())
        return Committed(running, running + per_token * min(waiting, last.pool_tokens()), running + per_token * most)
    if capacity == "kv_pool":
        # Each running request takes a slot at its next token. Queued ones wait: they are no breach by themselves.
        growth = 0.0 if np.isnan(last.resident_reqs) else last.resident_reqs
        running = last.kv_used + growth
        mean = last.mean_waiting_tokens()
        return Committed(running, running, running, mean if mean > last.kv_capacity else nan)
    if capacity == "write_entry":
        if bounds.step_tokens is None:
            return Committed(nan, nan, nan)
        beside = last.resident_reqs if bounds.mixed else 0.0
        tokens = min(last.waiting_tokens + beside, bounds.step_tokens)
        return Committed(last.resident_reqs, max(tokens, last.resident_reqs), max(tokens, last.resident_reqs))
    mean, limit = last.mean_waiting_tokens(), last.limit
    return Committed(nan, nan, nan, mean if mean > limit else nan)


class _Last:
    """The last row's quantities."""

    def __init__(self, load: Load, bounds: Bounds) -> None:
        self._bounds = bounds
        self.limit = float(load.limit[-1])
        self.resident_reqs = float(load.resident_reqs[-1])
        self.resident_tokens = float(load.resident_tokens[-1])
        self.waiting_reqs = float(np.nan_to_num(load.waiting_reqs[-1]))
        self.waiting_tokens = float(np.nan_to_num(load.waiting_tokens[-1]))
        self.kv_used = float(load.kv_used[-1])
        self.kv_capacity = float(load.kv_capacity[-1])

    def admissible_reqs(self, waiting: float) -> float:
        """Queued requests that the request limit lets in beside the running ones."""
        if self._bounds.max_running_requests is None:
            return waiting
        return min(waiting, max(0.0, self._bounds.max_running_requests - self.resident_reqs))

    def mean_waiting_tokens(self) -> float:
        """Tokens of a queued request on average, NaN without a queue."""
        return self.waiting_tokens / self.waiting_reqs if self.waiting_reqs > 0 else float("nan")

    def sharing(self) -> float:
        """Tokens that running requests see for each slot they hold: above 1 where prefixes are shared."""
        if not self.kv_used > 0 or np.isnan(self.resident_tokens):
            return 1.0
        return max(1.0, self.resident_tokens / self.kv_used)

    def pool_tokens(self) -> float:
        """Tokens that the pool's free slots can take in, sharing as now; infinite where the pool is unknown."""
        free = self.kv_capacity - self.kv_used
        return float("inf") if np.isnan(free) else max(0.0, free) * self.sharing()

    def pool_reqs(self) -> float:
        """The same as a number of queued requests, rounded up."""
        mean = self.mean_waiting_tokens()
        return float("inf") if np.isnan(mean) or mean <= 0 else float(np.ceil(self.pool_tokens() / mean))

    def admissible_tokens(self) -> float:
        """Queued tokens that the request limit lets in; tokens of prompts in progress count whole."""
        if self.waiting_reqs == 0:
            return self.waiting_tokens
        return self.waiting_tokens * self.admissible_reqs(self.waiting_reqs) / self.waiting_reqs


def _entries_per_token(load: Load, rows: int = 64) -> float:
    """Verify entries for each resident token, from the last rows that held the whole running batch; 1 if none did.

    Full attention verifies every token of a prefix; a window verifies fewer.
    """
    whole = (load.prefill != 1.0) & (load.resident_tokens > 0) & np.isfinite(load.demand)
    ratios = (load.demand[whole] / load.resident_tokens[whole])[-rows:]
    return float(ratios.max()) if len(ratios) else 1.0
