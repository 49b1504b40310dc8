"""Write through torch's operations, on any device: one step of every chain at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..buffers import VerifyOrWriteContext, WritePlan, is_parallel
from ..layout import SLOT_WORDS, FailReason, SlotField
from .refusals import slot_refusal, write_offsets_refusal
from .tensor_chain import chain_hashes, successors
from .tensor_fold import fingerprints, slot_words
from .violations import append_violations


class _Batch(NamedTuple):
    """Tokens that are stored, in order, with the request that each belongs to and its place in the request's chain."""

    reqs: Tensor
    step: Tensor
    slots: Tensor
    ids: Tensor
    positions: Tensor
    want_ids: Tensor | None
    want_positions: Tensor | None

    def pick(self, which: Tensor) -> _Batch:
        return _Batch(*(None if column is None else column[which] for column in self))  # type: ignore[arg-type]


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
    capacity = plan.write_seed_slot_indices.shape[0]
    num_reqs = max(0, min(int(plan.write_num_valid_reqs), capacity))
    reqs, index = _tokens_of(plan.write_offsets[: num_reqs + 1], input_ids.shape[0])
    kept = out_cache_loc[index] >= 0
    reqs, index = reqs[kept], index[kept]
    num_stored = index.shape[0]
    if num_stored:
        step = torch.arange(num_stored, device=reqs.device) - torch.searchsorted(reqs, reqs)
        columns = (input_ids, positions, expected_input_tokens, expected_input_positions)
        ids, places, want_ids, want_places = (None if column is None else column[index] for column in columns)
        assert ids is not None and places is not None
        batch = _Batch(reqs, step, out_cache_loc[index], ids, places, want_ids, want_places)
        seeds = plan.write_seed_slot_indices[:num_reqs]
        _check_bounds(batch, seeds, context.canary_buf.shape[0])
        real_kv_hashes = fingerprints(context, batch.slots)
        rows = []
        serial = bool(torch.isin(seeds[reqs], batch.slots).any())
        for part in torch.unique(reqs).tolist() if serial else [None]:
            which = torch.ones_like(reqs, dtype=torch.bool) if part is None else reqs == part
            rows.append(_write_part(context, batch.pick(which), seeds, real_kv_hashes[which]))
        append_violations(context, torch.cat(rows))
        context.slot_run_counter.add_(num_stored)
    context.kernel_run_counter.add_(1)


def _tokens_of(offsets: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """(request, index) of every token that the offsets name."""
    counts = offsets.diff().clamp(min=0)
    first = offsets[:-1]
    bad = (counts > 0) & ((first < 0) | (first + counts > num_tokens))
    if bool(bad.any()):
        req = int(bad.to(torch.int32).argmax())
        raise write_offsets_refusal(req, int(first[req]), int(first[req] + counts[req]), num_tokens)
    reqs = torch.repeat_interleave(torch.arange(counts.shape[0], device=offsets.device), counts)
    before = counts.cumsum(0) - counts
    index = torch.arange(reqs.shape[0], device=offsets.device) - before[reqs] + first[reqs]
    return reqs, index


def _check_bounds(batch: _Batch, seeds: Tensor, num_slots: int) -> None:
    for name, slot in (
        ("out_cache_loc", int(batch.slots.max())),
        ("plan.write_seed_slot_indices", int(seeds[batch.reqs].max())),
    ):
        if slot >= num_slots:
            raise slot_refusal(name, slot, num_slots)


def _write_part(context: VerifyOrWriteContext, batch: _Batch, seeds: Tensor, real_kv_hashes: Tensor) -> Tensor:
    """Store requests of which none is seeded from a slot that another stores into; the violation rows."""
    words = slot_words(context)
    seed = seeds[batch.reqs]
    seed_positions = words[seed.clamp(min=0), int(SlotField.POSITION)]
    parallel = is_parallel(context)
    seed_hashes = successors(words, seed, parallel)
    hashes = chain_hashes(batch.step, seed_hashes, batch.ids, batch.positions, parallel)
    rows = _violations(context, batch, seed, seed_positions, hashes)
    records = torch.stack((batch.ids, batch.positions, hashes, real_kv_hashes), dim=1)
    # The last of several stores to one slot counts; an indexed store has no order.
    order = torch.arange(len(records), device=records.device)
    last = torch.zeros(words.shape[0], dtype=torch.int64, device=records.device)
    last.scatter_reduce_(0, batch.slots, order, "amax")
    kept = last[batch.slots] == order
    words[batch.slots[kept], :SLOT_WORDS] = records[kept]
    return rows


def _violations(
    context: VerifyOrWriteContext, batch: _Batch, seed: Tensor, seed_positions: Tensor, hashes: Tensor
) -> Tensor:
    slots, ids, positions = batch.slots, batch.ids, batch.positions
    tag = torch.full_like(slots, int(context.kernel_kind))
    rows, failed = [], []
    if batch.want_ids is not None and batch.want_positions is not None:
        reasons = (ids != batch.want_ids) * int(FailReason.WRITE_TOKEN_MISMATCH)
        reasons += (positions != batch.want_positions) * int(FailReason.WRITE_POSITION_MISMATCH)
        rows.append((tag, slots, positions, ids, batch.want_ids, hashes, batch.want_positions, reasons))
        failed.append(reasons != 0)
    follows = seed >= 0 if int(context.enable_chain_position_assert) else torch.zeros_like(seed, dtype=torch.bool)
    wanted = torch.where(batch.step == 0, seed_positions, positions.roll(1)) + 1
    reasons = torch.full_like(slots, int(FailReason.WRITE_POSITION_MISMATCH))
    rows.append((tag, slots, positions, ids, ids, hashes, wanted, reasons))
    failed.append(follows & (positions != wanted))
    # Token by token, the input assert before the chain's: the order of a serial walk.
    table = torch.stack([torch.stack(columns, dim=1) for columns in rows], dim=1).flatten(0, 1)
    return table[torch.stack(failed, dim=1).flatten()]
