"""Verify through torch's operations, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from ..buffers import VerifyOrWriteContext, VerifyPlan, is_parallel
from ..layout import DUMMY_SLOT, FailReason, SlotField, ViolationField
from .refusals import slot_refusal
from .tensor_chain import successors
from .tensor_fold import fingerprints, slot_words
from .violations import append_violations


def verify(*, context: VerifyOrWriteContext, plan: VerifyPlan, check_verify_expected_token: bool) -> None:
    """Check every entry of a plan. Arguments as `launch_canary_verify_kernel` checks them."""
    capacity = plan.verify_slot_indices.shape[0]
    active = min(int(plan.verify_num_valid), capacity) if int(plan.enable) else 0
    if active > 0:
        live = plan.verify_slot_indices[:active] != DUMMY_SLOT
        rows = _violations(context, plan, live, active, check_verify_expected_token)
        append_violations(context, rows)
        context.slot_run_counter.add_(active)
    context.kernel_run_counter.add_(1)


def _violations(
    context: VerifyOrWriteContext, plan: VerifyPlan, live: Tensor, active: int, check_tokens: bool
) -> Tensor:
    slots, prev_slots, positions, tokens = (
        column[:active][live]
        for column in (
            plan.verify_slot_indices,
            plan.verify_prev_slot_indices,
            plan.verify_expected_positions,
            plan.verify_expected_tokens,
        )
    )
    if not check_tokens:
        tokens = torch.full_like(slots, -1)
    words = slot_words(context)
    _check_bounds(slots, prev_slots, words.shape[0])
    wanted_real_kv_hash = fingerprints(context, slots)
    records = words[slots]
    token, position, prev_hash, real_kv_hash = (records[:, field] for field in SlotField)
    parallel = is_parallel(context)
    chain = torch.where(prev_slots == DUMMY_SLOT, prev_hash, successors(words, prev_slots, parallel))
    differs = prev_hash != chain
    wrong = differs & (prev_hash == successors(words, prev_slots, not parallel))
    reasons = (differs & ~wrong) * int(FailReason.VERIFY_CHAIN_HASH_MISMATCH)
    reasons += (position != positions) * int(FailReason.VERIFY_POSITION_MISMATCH)
    reasons += (real_kv_hash != wanted_real_kv_hash) * int(FailReason.VERIFY_REAL_KV_HASH_MISMATCH)
    reasons += ((tokens != -1) & (tokens != token)) * int(FailReason.VERIFY_TOKEN_MISMATCH)
    tag = torch.full_like(slots, int(context.kernel_kind))
    rows = torch.stack((tag, slots, position, token, tokens, prev_hash, chain, reasons), dim=1)
    # Records that follow the other chain are no mismatches: the first of them is told, once, after the rest.
    told = rows[wrong][:1]
    told[:, ViolationField.EXPECTED_TOKEN] = -1
    told[:, ViolationField.FAIL_REASON] = int(FailReason.VERIFY_WRONG_CHAIN)
    return torch.cat((rows[reasons != 0], told))


def _check_bounds(slots: Tensor, prev_slots: Tensor, num_slots: int) -> None:
    for name, named, bad in (
        ("verify_slot_indices", slots, (slots < 0) | (slots >= num_slots)),
        ("verify_prev_slot_indices", prev_slots, prev_slots >= num_slots),
    ):
        if bool(bad.any()):
            raise slot_refusal(f"plan.{name}", int(named[bad][0]), num_slots)
