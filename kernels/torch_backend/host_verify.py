"""Verify on the host: whole cache-sized chunks, and details only where a chunk has a mismatch."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch

from ..buffers import VerifyOrWriteContext, VerifyPlan
from ..hashing import as_u64
from ..layout import DUMMY_SLOT, VIOLATION_WORDS, FailReason, SlotField, ViolationField
from .host_arrays import CHUNK, I64, U64, Bools, array, scratch, slot_words
from .host_chains import Chain, chains_of
from .host_fold import Fingerprints
from .refusals import slot_refusal
from .violations import append_violations

_GATHER_MAX_ENTRIES: Final = 512
"""Up to here one gather of all predecessors is cheaper than telling apart which of them are in the chunk."""

_TOKEN, _POSITION, _PREV_HASH, _REAL_KV_HASH = (int(field) for field in SlotField)


class _Entries(NamedTuple):
    """A chunk of a plan; tokens are None where they are not to be checked."""

    slots: I64
    prev_slots: I64
    positions: I64
    tokens: I64 | None


class _Checker:
    """Checks chunk after chunk, in order, and keeps the violation rows."""

    def __init__(self, context: VerifyOrWriteContext) -> None:
        self._words = slot_words(context.canary_buf)
        self._fingerprints = Fingerprints(context)
        self._chain, self._other_chain = chains_of(context)
        self._wrong_chain: list[I64] = []
        self._tag = int(context.kernel_kind)
        self._rows: list[I64] = []

    def check(self, entries: _Entries) -> None:
        slots, prev_slots, positions, tokens = entries
        n = len(slots)
        if self._check_bounds(slots, prev_slots) == DUMMY_SLOT:
            return
        records = scratch.words("verify_records", n, 4)
        words = self._words if self._words.shape[1] == 4 else self._words[:, :4]
        if words.flags.c_contiguous:
            words.take(slots, axis=0, out=records, mode="clip")
        else:
            records[:] = words[slots]  # take() would copy the whole strided buffer first

        expected = self._expected_hashes(slots, prev_slots, records)
        bad: Bools = np.not_equal(records[:, _PREV_HASH], expected)
        bad |= records[:, _POSITION] != as_u64(positions)
        fingerprints = scratch.words("verify_fingerprints", n)
        if self._fingerprints.active:
            self._fingerprints.fold(slots, fingerprints)
            bad |= records[:, _REAL_KV_HASH] != fingerprints
        else:
            bad |= records[:, _REAL_KV_HASH] != 0
        if tokens is not None:
            bad |= (records[:, _TOKEN] != as_u64(tokens)) & (tokens != -1)
        if bad.any():
            if not self._fingerprints.active:
                fingerprints.fill(0)
            bad &= slots != DUMMY_SLOT
            self._report(np.flatnonzero(bad), entries, records, expected, fingerprints)

    def _check_bounds(self, slots: I64, prev_slots: I64) -> int:
        """The largest slot, after refusing any that lies outside the buffer or a source."""
        num_slots = len(self._words)
        max_slot = int(as_u64(slots).max())  # a negative slot reads as a huge one
        if max_slot >= num_slots or int(prev_slots.max()) >= num_slots:
            self._refuse(slots, prev_slots)
            max_slot = int(slots.max())
        if self._fingerprints.active and max_slot != DUMMY_SLOT:
            self._fingerprints.check(max_slot)
        return max_slot

    def _refuse(self, slots: I64, prev_slots: I64) -> None:
        num_slots = len(self._words)
        live = slots != DUMMY_SLOT
        for name, bad in (
            ("verify_slot_indices", live & ((slots < 0) | (slots >= num_slots))),
            ("verify_prev_slot_indices", live & (prev_slots >= num_slots)),
        ):
            if bad.any():
                slot = int((slots if name == "verify_slot_indices" else prev_slots)[bad][0])
                raise slot_refusal(f"plan.{name}", slot, num_slots)

    def _expected_hashes(self, slots: I64, prev_slots: I64, records: U64) -> U64:
        """[n] what each slot's chain hash should be; where the predecessor is unknown, what it is."""
        n = len(slots)
        expected = scratch.words("verify_expected", n)
        if n <= _GATHER_MAX_ENTRIES:
            self._gather_hashes(self._chain, slots, prev_slots, records[:, _PREV_HASH], expected)
            return expected
        following, tmp = scratch.words("verify_following", n), scratch.words("verify_tmp", n)
        self._chain.successors(records, following, tmp)
        # Most entries follow their predecessor in the plan, whose record is already here.
        expected[1:] = following[:-1]
        elsewhere = np.not_equal(prev_slots[1:], slots[:-1])
        elsewhere |= prev_slots[1:] == DUMMY_SLOT
        others = np.concatenate(([0], np.flatnonzero(elsewhere) + 1))
        hashes = np.empty(len(others), dtype=np.uint64)
        self._gather_hashes(self._chain, slots[others], prev_slots[others], records[others, _PREV_HASH], hashes)
        expected[others] = hashes
        return expected

    def _gather_hashes(self, chain: Chain, slots: I64, prev_slots: I64, stored: U64, out: U64) -> None:
        """Expected hashes from the predecessors' own records."""
        place = np.maximum(prev_slots, 0)
        place[slots == DUMMY_SLOT] = DUMMY_SLOT  # not checked: whatever its predecessor, it is not read
        chain.successors(self._words[place], out, np.empty_like(out))
        np.copyto(out, chain.anchor_hash, where=prev_slots < 0)
        np.copyto(out, stored, where=prev_slots == DUMMY_SLOT)

    def _report(self, failed: I64, entries: _Entries, records: U64, expected: U64, fingerprints: U64) -> None:
        record = records[failed].view(np.int64)
        chain = expected[failed].view(np.int64)
        reasons = self._chain_reasons(failed, entries, records, record[:, _PREV_HASH] != chain, chain)
        moved = record[:, _POSITION] != entries.positions[failed]
        reasons |= np.where(moved, int(FailReason.VERIFY_POSITION_MISMATCH), 0)
        changed = record[:, _REAL_KV_HASH] != fingerprints[failed].view(np.int64)
        reasons |= np.where(changed, int(FailReason.VERIFY_REAL_KV_HASH_MISMATCH), 0)
        rows = np.empty((len(failed), VIOLATION_WORDS), dtype=np.int64)
        rows[:, ViolationField.EXPECTED_TOKEN] = -1
        if entries.tokens is not None:
            wanted = entries.tokens[failed]
            other = (wanted != -1) & (record[:, _TOKEN] != wanted)
            reasons |= np.where(other, int(FailReason.VERIFY_TOKEN_MISMATCH), 0)
            rows[:, ViolationField.EXPECTED_TOKEN] = wanted
        rows[:, ViolationField.LAUNCH_TAG] = self._tag
        rows[:, ViolationField.SLOT] = entries.slots[failed]
        rows[:, ViolationField.POSITION] = record[:, _POSITION]
        rows[:, ViolationField.TOKEN] = record[:, _TOKEN]
        rows[:, ViolationField.CHAIN_HASH] = record[:, _PREV_HASH]
        rows[:, ViolationField.EXPECTED_AUX] = chain
        rows[:, ViolationField.FAIL_REASON] = reasons
        self._rows.append(rows[reasons != 0])

    def _chain_reasons(self, failed: I64, entries: _Entries, records: U64, differs: Bools, expected: I64) -> I64:
        """A mismatch each; but a record that follows the other chain is none, and the launch's first one is told."""
        reasons = np.where(differs, int(FailReason.VERIFY_CHAIN_HASH_MISMATCH), 0)
        if not differs.any():
            return reasons
        stored, others = records[failed, _PREV_HASH], np.empty(len(failed), dtype=np.uint64)
        self._gather_hashes(self._other_chain, entries.slots[failed], entries.prev_slots[failed], stored, others)
        wrong = differs & (stored == others)
        reasons[wrong] = 0
        if not self._wrong_chain and wrong.any():
            at = int(wrong.argmax())
            token, position, prev_hash, _ = records[failed[at]].view(np.int64).tolist()
            slot, reason = int(entries.slots[failed[at]]), int(FailReason.VERIFY_WRONG_CHAIN)
            row = [self._tag, slot, position, token, -1, prev_hash, int(expected[at]), reason]
            self._wrong_chain.append(np.array([row], dtype=np.int64))
        return reasons

    def rows(self) -> list[I64]:
        """Violation rows in entry order, then the one that tells of the other chain."""
        return self._rows + self._wrong_chain


def verify(*, context: VerifyOrWriteContext, plan: VerifyPlan, check_verify_expected_token: bool) -> None:
    """Check every entry of a plan. Arguments as `launch_canary_verify_kernel` checks them."""
    slots = array(plan.verify_slot_indices)
    active = min(int(plan.verify_num_valid.item()), len(slots)) if plan.enable.item() else 0
    if active > 0:
        prev_slots, positions = array(plan.verify_prev_slot_indices), array(plan.verify_expected_positions)
        tokens = array(plan.verify_expected_tokens) if check_verify_expected_token else None
        checker = _Checker(context)
        for lo in range(0, active, CHUNK):
            part = slice(lo, min(lo + CHUNK, active))
            wanted = None if tokens is None else tokens[part]
            checker.check(_Entries(slots[part], prev_slots[part], positions[part], wanted))
        # Nothing is written until every entry has been read and found inside the buffer.
        rows = checker.rows()
        if rows:
            append_violations(context, torch.from_numpy(np.concatenate(rows)))
        array(context.slot_run_counter)[0] += active
    array(context.kernel_run_counter)[0] += 1
