"""Write on the host: chains side by side, fingerprints and records for all tokens at once."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..buffers import VerifyOrWriteContext, WritePlan
from ..hashing import as_u64
from ..layout import SLOT_WORDS, VIOLATION_WORDS, FailReason, SlotField, ViolationField
from .host_arrays import CHUNK, I64, U64, Bools, array, slot_words
from .host_chains import chains_of
from .host_fold import Fingerprints
from .refusals import slot_refusal, write_offsets_refusal
from .violations import append_violations

_FEW_SLOTS: Final = 256
"""Up to here a Python set finds a seed among the slots faster than numpy."""


class _Tokens(NamedTuple):
    """Tokens that are stored, request after request; `want_*` are None without the input assert."""

    slots: I64
    ids: I64
    positions: I64
    want_ids: I64 | None
    want_positions: I64 | None

    def pick(self, which: slice | Bools | I64) -> _Tokens:
        slots, ids, positions, want_ids, want_positions = self
        if want_ids is not None and want_positions is not None:
            want_ids, want_positions = want_ids[which], want_positions[which]
        return _Tokens(slots[which], ids[which], positions[which], want_ids, want_positions)


class _Requests(NamedTuple):
    """Requests that store at least one token."""

    seeds: I64
    counts: I64
    offsets: I64  # each request's first token

    def pick(self, which: slice) -> _Requests:
        seeds, counts, offsets = (column[which] for column in self)
        return _Requests(seeds, counts, offsets - offsets[0])


class _Writer:
    """Stores segments of a batch one after another, and keeps the violation rows."""

    def __init__(self, context: VerifyOrWriteContext) -> None:
        self._words = slot_words(context.canary_buf)
        self._records = self._words[:, :SLOT_WORDS]
        self._fingerprints = Fingerprints(context)
        self._chain, _ = chains_of(context)
        self._tag = int(context.kernel_kind)
        self._assert_positions = context.enable_chain_position_assert.item() != 0
        self.rows: list[I64] = []

    def check_bounds(self, requests: _Requests, tokens: _Tokens) -> None:
        num_slots, max_slot = len(self._words), int(tokens.slots.max())
        for name, slot in (("out_cache_loc", max_slot), ("plan.write_seed_slot_indices", int(requests.seeds.max()))):
            if slot >= num_slots:
                raise slot_refusal(name, slot, num_slots)
        if self._fingerprints.active:
            self._fingerprints.check(max_slot)

    def write(self, requests: _Requests, tokens: _Tokens) -> None:
        """Store one segment: requests of which none is seeded from a slot that another stores into."""
        seeded = requests.seeds >= 0
        seed_records = self._words[np.maximum(requests.seeds, 0)]
        seeds = np.empty(len(seed_records), dtype=np.uint64)
        self._chain.successors(seed_records, seeds, np.empty_like(seeds))
        np.copyto(seeds, self._chain.anchor_hash, where=~seeded)

        records = np.empty((len(tokens.slots), SLOT_WORDS), dtype=np.uint64)
        hashes = np.empty(len(records), dtype=np.uint64)
        ids, positions = as_u64(tokens.ids), as_u64(tokens.positions)
        self._chain.chain_hashes(seeds, requests.counts, requests.offsets, ids, positions, hashes)
        records[:, SlotField.TOKEN] = ids
        records[:, SlotField.POSITION] = positions
        records[:, SlotField.PREV_HASH] = hashes
        self._fold(tokens.slots, records)
        self._check(requests, tokens, seeded, seed_records, hashes)
        self._records[tokens.slots] = records  # where a slot comes twice, numpy keeps the last

    def _fold(self, slots: I64, records: U64) -> None:
        if not self._fingerprints.active:
            records[:, SlotField.REAL_KV_HASH] = 0
            return
        for lo in range(0, len(slots), CHUNK):
            part = slots[lo : lo + CHUNK]
            fingerprints = np.empty(len(part), dtype=np.uint64)
            self._fingerprints.fold(part, fingerprints)
            records[lo : lo + CHUNK, SlotField.REAL_KV_HASH] = fingerprints

    def _check(self, requests: _Requests, tokens: _Tokens, seeded: Bools, seed_records: U64, hashes: U64) -> None:
        found: list[tuple[I64, I64]] = []
        if tokens.want_ids is not None and tokens.want_positions is not None:
            other_id, other_position = tokens.ids != tokens.want_ids, tokens.positions != tokens.want_positions
            failed = (other_id | other_position).nonzero()[0]
            if len(failed):
                reasons = np.where(other_id[failed], int(FailReason.WRITE_TOKEN_MISMATCH), 0)
                reasons |= np.where(other_position[failed], int(FailReason.WRITE_POSITION_MISMATCH), 0)
                wants = (tokens.want_ids[failed], tokens.want_positions[failed])
                found.append((2 * failed, self._rows(tokens, hashes, failed, *wants, reasons)))
        if self._assert_positions and seeded.any():
            expected = np.empty(len(hashes), dtype=np.int64)
            expected[1:] = tokens.positions[:-1]
            expected[requests.offsets] = seed_records[:, SlotField.POSITION].view(np.int64)
            expected += 1
            failed = ((tokens.positions != expected) & seeded.repeat(requests.counts)).nonzero()[0]
            if len(failed):
                reason = int(FailReason.WRITE_POSITION_MISMATCH)
                rows = self._rows(tokens, hashes, failed, tokens.ids[failed], expected[failed], reason)
                found.append((2 * failed + 1, rows))
        if found:
            keys = np.concatenate([keys for keys, _ in found])  # in the order that a serial walk reports them
            self.rows.append(np.concatenate([rows for _, rows in found])[np.argsort(keys, kind="stable")])

    def _rows(
        self, tokens: _Tokens, hashes: U64, failed: I64, want_ids: I64, want_positions: I64, reasons: I64 | int
    ) -> I64:
        rows = np.empty((len(failed), VIOLATION_WORDS), dtype=np.int64)
        rows[:, ViolationField.LAUNCH_TAG] = self._tag
        rows[:, ViolationField.SLOT] = tokens.slots[failed]
        rows[:, ViolationField.POSITION] = tokens.positions[failed]
        rows[:, ViolationField.TOKEN] = tokens.ids[failed]
        rows[:, ViolationField.EXPECTED_TOKEN] = want_ids
        rows[:, ViolationField.CHAIN_HASH] = hashes[failed].view(np.int64)
        rows[:, ViolationField.EXPECTED_AUX] = want_positions
        rows[:, ViolationField.FAIL_REASON] = reasons
        return rows


def _read_batch(plan: WritePlan, tokens: _Tokens) -> tuple[_Requests, _Tokens] | None:
    """Requests and the tokens that they store, negative slots left out; None if there is nothing to store."""
    capacity = plan.write_seed_slot_indices.shape[0]
    num_reqs = max(0, min(int(plan.write_num_valid_reqs.item()), capacity))
    offsets = array(plan.write_offsets)[: num_reqs + 1]
    counts = offsets[1:] - offsets[:-1]
    reqs = (counts > 0).nonzero()[0]
    if not len(reqs):
        return None
    first, last = offsets[:-1][reqs], offsets[1:][reqs]
    num_tokens = len(tokens.slots)
    if int(first.min()) < 0 or int(last.max()) > num_tokens:
        i = int(((first < 0) | (last > num_tokens)).argmax())
        raise write_offsets_refusal(int(reqs[i]), int(first[i]), int(last[i]), num_tokens)
    counts = counts[reqs]
    if (first[1:] == last[:-1]).all():
        tokens = tokens.pick(slice(int(first[0]), int(last[-1])))
    else:  # offsets that fall: ranges overlap
        index = np.concatenate([np.arange(a, b) for a, b in zip(first.tolist(), last.tolist(), strict=True)])
        tokens = tokens.pick(index)
    seeds = array(plan.write_seed_slot_indices)[reqs]
    if int(tokens.slots.min()) < 0:
        kept = tokens.slots >= 0
        counts = np.add.reduceat(kept, counts.cumsum() - counts, dtype=np.int64)
        tokens, stores = tokens.pick(kept), counts > 0
        seeds, counts = seeds[stores], counts[stores]
        if not len(counts):
            return None
    return _Requests(seeds, counts, counts.cumsum() - counts), tokens


def _seeded_from_batch(seeds: I64, slots: I64, num_slots: int) -> bool:
    """Whether a seed is among the slots that the batch stores into."""
    if len(slots) <= _FEW_SLOTS:
        return not set(slots.tolist()).isdisjoint(seeds.tolist())
    marked = np.zeros(num_slots, dtype=np.bool_)
    marked[slots] = True
    return bool(marked[seeds[seeds >= 0]].any())


def write(
    *,
    context: VerifyOrWriteContext,
    plan: WritePlan,
    input_ids: Tensor,
    positions: Tensor,
    out_cache_loc: Tensor,
    enable_write_input_assert: bool,
    expected_input_tokens: Tensor | None,
    expected_input_positions: Tensor | None,
) -> None:
    """Write the records of a batch's new tokens. Arguments as `launch_canary_write_kernel` checks them."""
    want_ids, want_positions = expected_input_tokens, expected_input_positions
    given = _Tokens(
        slots=array(out_cache_loc),
        ids=array(input_ids),
        positions=array(positions),
        want_ids=None if want_ids is None else array(want_ids),
        want_positions=None if want_positions is None else array(want_positions),
    )
    batch = _read_batch(plan, given)
    if batch is not None:
        requests, tokens = batch
        writer = _Writer(context)
        writer.check_bounds(requests, tokens)
        if _seeded_from_batch(requests.seeds, tokens.slots, context.canary_buf.shape[0]):
            for i, (count, first) in enumerate(zip(requests.counts.tolist(), requests.offsets.tolist(), strict=True)):
                writer.write(requests.pick(slice(i, i + 1)), tokens.pick(slice(first, first + count)))
        else:
            writer.write(requests, tokens)
        if writer.rows:
            append_violations(context, torch.from_numpy(np.concatenate(writer.rows)))
        array(context.slot_run_counter)[0] += len(tokens.slots)
    array(context.kernel_run_counter)[0] += 1
