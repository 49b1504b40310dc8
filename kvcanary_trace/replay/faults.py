"""Faults that a canary exists for, put into a running replay on purpose: `KIND@STEP`.

A fault strikes at the first step from STEP on where it can (some running request must be long enough). What the
scheduler would repair is put back after the step; flipped KV bytes stay until the slot is written again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from kvcanary_trace.errors import SettingError
from kvcanary_trace.kernels.layout import FailReason

from .batch import Batch
from .engine import Engine

if TYPE_CHECKING:
    from .canary import Canary

__all__ = ["FAULT_REASONS", "Fault", "FaultInjector", "Struck", "parse_fault"]

FAULT_REASONS: Final[dict[str, FailReason]] = {
    "kv-flip": FailReason.VERIFY_REAL_KV_HASH_MISMATCH,
    "slot-swap": FailReason.VERIFY_CHAIN_HASH_MISMATCH | FailReason.VERIFY_POSITION_MISMATCH,
    "stale-swa": FailReason.VERIFY_CHAIN_HASH_MISMATCH | FailReason.VERIFY_POSITION_MISMATCH,
    "row-reuse": FailReason.VERIFY_CHAIN_HASH_MISMATCH,
    "token-flip": FailReason.WRITE_TOKEN_MISMATCH,
}
"""Fault kind → the reasons that its violations must show."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to come."""

    kind: str
    step: int


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that was put in: at which step, and what it hit."""

    fault: Fault
    step: int
    what: str


def parse_fault(text: str) -> Fault:
    """Read `KIND@STEP`.

    Raises:
        SettingError: The kind is unknown or the step is no number from 0.
    """
    kind, _, step = text.partition("@")
    if kind not in FAULT_REASONS:
        raise SettingError(f"--inject takes KIND@STEP with a kind of {', '.join(FAULT_REASONS)}, got {text!r}")
    if not step.isascii() or not step.isdigit():
        raise SettingError(f"--inject {kind}@STEP needs a step number from 0, got {text!r}")
    return Fault(kind, int(step))


class FaultInjector:
    """Puts faults into batches; one call before the kernels of a step and one after them."""

    def __init__(self, faults: list[Fault], engine: Engine, canary: Canary, seed: int = 0) -> None:
        if engine.swa is None and any(fault.kind == "stale-swa" for fault in faults):
            raise SettingError("--inject stale-swa needs a sliding-window group: give --swa-window")
        self.engine = engine
        self.canary = canary
        self.struck: list[Struck] = []
        self.pending = sorted(faults, key=lambda fault: fault.step)
        self._rng = np.random.default_rng(seed)
        self._undo: list[Callable[[], None]] = []

    def before(self, batch: Batch) -> npt.NDArray[np.int64] | None:
        """Strike with what is due. Returns the input ids that the scheduler meant, if a fault changed them."""
        if not self.pending or self.pending[0].step > batch.step:
            return None
        meant: npt.NDArray[np.int64] | None = None
        still: list[Fault] = []
        for fault in self.pending:
            what: str | None = None
            if fault.step <= batch.step:
                if fault.kind == "token-flip":
                    if meant is None:
                        meant = batch.input_ids.copy()
                    what = self._flip_token(batch)
                else:
                    what = _STRIKES[fault.kind](self, batch)
            if what is None:
                still.append(fault)
            else:
                self.struck.append(Struck(fault, batch.step, what))
        self.pending = still
        return meant

    def after(self) -> None:
        """Put back what the scheduler would."""
        while self._undo:
            self._undo.pop()()

    # --- kinds --------------------------------------------------------------------------------------------------------

    def _flip_token(self, batch: Batch) -> str:
        at = int(self._rng.integers(batch.num_tokens))
        batch.input_ids[at] ^= 1
        return f"input id {at} of the batch, slot {batch.out_cache_loc[at]}"

    def _flip_kv(self, batch: Batch) -> str | None:
        """One bit of a slot that this step verifies."""
        row, prefix = self._victim(batch, least=1)
        if row < 0:
            return None
        slot = int(self.engine.req_to_token[row, self._rng.integers(prefix)])
        self.canary.groups[0].kv_words[slot, 0] ^= 1 << int(self._rng.integers(62))
        return f"KV bytes of slot {slot}"

    def _swap_slots(self, batch: Batch) -> str | None:
        """Two positions of one row, neither of them the one that this step's tokens chain from."""
        row, prefix = self._victim(batch, least=3)
        if row < 0:
            return None
        one, two = (int(position) for position in self._rng.choice(prefix - 1, 2, replace=False))
        self._rewrite(row, np.array([one, two]), self.engine.req_to_token[row, [two, one]])
        return f"row {row}: slots of positions {one} and {two}"

    def _reuse_row(self, batch: Batch) -> str | None:
        """The head of a running row is overwritten by another request's slots, as if the row had been handed on."""
        for row, prefix in self._victims(batch, least=2):
            for other, other_len in self._victims(batch, least=1):
                length = min(prefix - 1, other_len)
                tokens = self.engine.tokens
                differ = np.flatnonzero(tokens[row, :length] != tokens[other, :length])
                if other != row and len(differ):
                    count = int(differ[-1]) + 1
                    self._rewrite(row, np.arange(count), self.engine.req_to_token[other, :count])
                    return f"row {row}: first {count} slots are row {other}'s"
        return None

    def _stale_swa(self, batch: Batch) -> str | None:
        """A token within its window is mapped to the window slot of its neighbour, as before an eviction."""
        swa = self.engine.swa
        assert swa is not None
        for row, prefix in self._victims(batch, least=3):
            start = max(0, prefix - swa.window)
            if prefix - 1 - start < 2:
                continue  # the last slot seeds the write: leave it alone
            position = int(self._rng.integers(start, prefix - 2))
            slot, neighbour = (int(s) for s in self.engine.req_to_token[row, position : position + 2])
            old = int(swa.mapping[slot])
            swa.mapping[slot] = swa.mapping[neighbour]

            def put_back(slot: int = slot, old: int = old) -> None:
                swa.mapping[slot] = old

            self._undo.append(put_back)
            return f"window slot of full slot {slot}"
        return None

    # --- victims ------------------------------------------------------------------------------------------------------

    def _victims(self, batch: Batch, least: int) -> list[tuple[int, int]]:
        """(row, prefix) of the batch's requests with at least `least` tokens before this step, in a random order."""
        fit = np.flatnonzero(batch.prefix_lens >= least)
        order = self._rng.permutation(fit)
        return list(zip(batch.req_pool_indices[order].tolist(), batch.prefix_lens[order].tolist(), strict=True))

    def _victim(self, batch: Batch, least: int) -> tuple[int, int]:
        return next(iter(self._victims(batch, least)), (-1, 0))

    def _rewrite(self, row: int, positions: npt.NDArray[np.int64], slots: npt.NDArray[Any]) -> None:
        """Change slots of a row until the step is over."""
        table = self.engine.req_to_token
        old = table[row, positions].copy()
        table[row, positions] = slots
        reach = (row, int(positions.min()), int(positions.max()) + 1)
        self.engine.note_row_change(*reach)

        def put_back() -> None:
            table[row, positions] = old
            self.engine.note_row_change(*reach)

        self._undo.append(put_back)


_STRIKES: Final[dict[str, Callable[[FaultInjector, Batch], str | None]]] = {
    "kv-flip": FaultInjector._flip_kv,
    "slot-swap": FaultInjector._swap_slots,
    "stale-swa": FaultInjector._stale_swa,
    "row-reuse": FaultInjector._reuse_row,
}
