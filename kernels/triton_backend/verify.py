"""Verify kernel: check the canary records that a plan names, a block of entries at a time."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from ..buffers import is_parallel
from ..layout import DUMMY_SLOT, WORD_BYTES, FailReason
from .chains import successor
from .device import INTERPRETED, num_multiprocessors, skipped_entries
from .fold import SOURCE_SIZES, fold_args, fold_sources
from .hashing import as_i64, as_u64
from .launch import NO_OPTIONS, launch
from .records import POSITION, PREV_HASH, REAL_KV_HASH, TOKEN
from .violations import append_violation, append_violations

if TYPE_CHECKING:
    from ..buffers import VerifyOrWriteContext, VerifyPlan

_DUMMY_SLOT: tl.constexpr = tl.constexpr(DUMMY_SLOT)
_BAD_CHAIN: tl.constexpr = tl.constexpr(int(FailReason.VERIFY_CHAIN_HASH_MISMATCH))
_BAD_POSITION: tl.constexpr = tl.constexpr(int(FailReason.VERIFY_POSITION_MISMATCH))
_BAD_REAL_KV: tl.constexpr = tl.constexpr(int(FailReason.VERIFY_REAL_KV_HASH_MISMATCH))
_BAD_TOKEN: tl.constexpr = tl.constexpr(int(FailReason.VERIFY_TOKEN_MISMATCH))
_WRONG_CHAIN: tl.constexpr = tl.constexpr(int(FailReason.VERIFY_WRONG_CHAIN))

_NO_ENTRY: tl.constexpr = tl.constexpr(2**62)
_TELL_BLOCK: tl.constexpr = tl.constexpr(128)
"""One entry a lane at most: with two, telling apart would take registers that the loop over the entries needs."""

_SIZES: Final = ["slot_words", "num_records", "num_slots", "capacity", "ring_rows", "launch_tag"]


@triton.jit
def _is_checked(slot, prev_slot, num_records, num_slots):
    """Whether an entry lies inside the buffer and every source; the dummy slot's does not count."""
    return (slot > 0) & (slot < num_slots) & (prev_slot < num_records)


@triton.jit
def _read_chain(
    entry, live, words_ptr, slots_ptr, prev_slots_ptr, slot_words, num_records, num_slots, PARALLEL: tl.constexpr
):
    """(slot, stored hash, wanted hash, whether the other chain wants what is stored) of a block of entries."""
    slot = tl.load(slots_ptr + entry, mask=live, other=_DUMMY_SLOT)
    prev_slot = tl.load(prev_slots_ptr + entry, mask=live, other=0)
    checked = _is_checked(slot, prev_slot, num_records, num_slots) & (prev_slot != 0)
    has_prev = checked & (prev_slot > 0)
    prev_ptr = words_ptr + prev_slot * slot_words
    prev_hash = as_u64(tl.load(prev_ptr + PREV_HASH, mask=has_prev, other=0))
    token = as_u64(tl.load(prev_ptr + TOKEN, mask=has_prev, other=0))
    position = as_u64(tl.load(prev_ptr + POSITION, mask=has_prev, other=0))
    stored = as_u64(tl.load(words_ptr + slot * slot_words + PREV_HASH, mask=checked, other=0))
    wanted = successor(prev_slot, prev_hash, token, position, PARALLEL)
    other = successor(prev_slot, prev_hash, token, position, not PARALLEL)
    return slot, stored, wanted, checked & (stored != wanted) & (stored == other)


@triton.jit
def _tell_wrong_chain(
    first,  # this program's first entry that follows the other chain
    words_ptr,
    slots_ptr,
    prev_slots_ptr,
    ring_ptr,
    write_index_ptr,
    slot_words,
    num_records,
    num_slots,
    ring_rows,
    launch_tag,
    PARALLEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Append a row for `first`, unless an earlier entry of the plan follows the other chain: then that one's is there.

    Where all entries do, the first block has the answer. Where few do, every program that met one reads the plan up to
    it: slow, in the one case where the records of one buffer disagree on their definition.
    """
    start = tl.zeros([], tl.int64)
    has_earlier = tl.zeros([], tl.int32)
    while (start < first) & (has_earlier == 0):
        entry = start + tl.arange(0, BLOCK)
        _, _, _, wrong = _read_chain(
            entry, entry < first, words_ptr, slots_ptr, prev_slots_ptr, slot_words, num_records, num_slots, PARALLEL
        )
        has_earlier = tl.max(wrong.to(tl.int32), axis=0)
        start += BLOCK
    if has_earlier == 0:
        slot, stored, wanted, _ = _read_chain(
            first, True, words_ptr, slots_ptr, prev_slots_ptr, slot_words, num_records, num_slots, PARALLEL
        )
        record_ptr = words_ptr + slot * slot_words
        append_violation(
            ring_ptr,
            write_index_ptr,
            ring_rows,
            launch_tag,
            _WRONG_CHAIN,
            slot,
            tl.load(record_ptr + POSITION),
            tl.load(record_ptr + TOKEN),
            -1,
            as_i64(stored),
            as_i64(wanted),
        )


@triton.jit(do_not_specialize=[*_SIZES, *SOURCE_SIZES])
def _verify_kernel(
    canary_ptr,  # [.., slot_words] int64 words of the canary buffer
    slots_ptr,  # [capacity] int64, and so the next three
    tokens_ptr,
    positions_ptr,
    prev_slots_ptr,
    num_valid_ptr,  # [1] int32
    enable_ptr,  # [1] int32
    ring_ptr,  # [ring_rows, VIOLATION_WORDS] int64, out
    write_index_ptr,  # [1] int32, inout
    slot_counter_ptr,  # [1] int64, inout
    kernel_counter_ptr,  # [1] int64, inout
    skipped_ptr,  # [1] int64, inout
    slot_words,
    num_records,
    num_slots,  # at most num_records: slots below this have bytes in every source too
    capacity,
    ring_rows,
    launch_tag,
    row_words_0,
    page_size_0,
    token_words_0,
    num_words_0,
    row_words_1,
    page_size_1,
    token_words_1,
    num_words_1,
    row_words_2,
    page_size_2,
    token_words_2,
    num_words_2,
    row_words_3,
    page_size_3,
    token_words_3,
    num_words_3,
    address_0,
    address_1,
    address_2,
    address_3,
    CHECK_TOKEN: tl.constexpr,
    NUM_SOURCES: tl.constexpr,
    PAGED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PARALLEL: tl.constexpr,
):
    """Verify a plan. Grid: any number of programs; they stride over the entries that the device counts."""
    program = tl.program_id(0)
    num_active = tl.minimum(tl.load(num_valid_ptr).to(tl.int64), capacity)
    num_active = tl.where(tl.load(enable_ptr) != 0, tl.maximum(num_active, 0), 0)
    if program == 0:
        tl.atomic_add(kernel_counter_ptr, tl.full([], 1, tl.int64), sem="relaxed")
        tl.atomic_add(slot_counter_ptr, num_active, sem="relaxed")
    words_ptr = canary_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    num_skipped = tl.zeros([], tl.int32)
    first_wrong = tl.full([], _NO_ENTRY, tl.int64)  # entry that follows the other chain
    first = program.to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(first, num_active, step):
        entry = start + tl.arange(0, BLOCK)
        live = entry < num_active
        slot = tl.load(slots_ptr + entry, mask=live, other=_DUMMY_SLOT)
        prev_slot = tl.load(prev_slots_ptr + entry, mask=live, other=-1)
        wanted = live & (slot != _DUMMY_SLOT)
        checked = wanted & _is_checked(slot, prev_slot, num_records, num_slots)
        num_skipped += tl.sum((wanted & ~checked).to(tl.int32), axis=0)

        # The fold comes first: what is loaded after it does not have to live in registers through it.
        want_real_kv = as_i64(
            fold_sources(
                slot,
                checked,
                row_words_0,
                page_size_0,
                token_words_0,
                num_words_0,
                row_words_1,
                page_size_1,
                token_words_1,
                num_words_1,
                row_words_2,
                page_size_2,
                token_words_2,
                num_words_2,
                row_words_3,
                page_size_3,
                token_words_3,
                num_words_3,
                address_0,
                address_1,
                address_2,
                address_3,
                NUM_SOURCES,
                PAGED,
                CHUNK,
                BLOCK,
            )
        )
        want_position = tl.load(positions_ptr + entry, mask=live, other=0)
        want_token = tl.full([BLOCK], -1, tl.int64)
        if CHECK_TOKEN:
            want_token = tl.load(tokens_ptr + entry, mask=live, other=-1)
        record_ptr = words_ptr + slot * slot_words
        token = tl.load(record_ptr + TOKEN, mask=checked, other=0)
        position = tl.load(record_ptr + POSITION, mask=checked, other=0)
        chain_hash = tl.load(record_ptr + PREV_HASH, mask=checked, other=0)
        real_kv_hash = tl.load(record_ptr + REAL_KV_HASH, mask=checked, other=0)
        has_prev = checked & (prev_slot > 0)
        prev_ptr = words_ptr + prev_slot * slot_words
        prev_token = tl.load(prev_ptr + TOKEN, mask=has_prev, other=0)
        prev_position = tl.load(prev_ptr + POSITION, mask=has_prev, other=0)
        prev_hash = tl.load(prev_ptr + PREV_HASH, mask=has_prev, other=0)

        want_hash = as_i64(successor(prev_slot, as_u64(prev_hash), as_u64(prev_token), as_u64(prev_position), PARALLEL))
        # Predecessor unknown: nothing to compare with, and the row shows the stored hash.
        want_hash = tl.where(prev_slot == 0, chain_hash, want_hash)
        reasons = tl.where(chain_hash != want_hash, _BAD_CHAIN, 0)
        reasons |= tl.where(position != want_position, _BAD_POSITION, 0)
        reasons |= tl.where(real_kv_hash != want_real_kv, _BAD_REAL_KV, 0)
        if CHECK_TOKEN:
            reasons |= tl.where((want_token != -1) & (token != want_token), _BAD_TOKEN, 0)
        reasons = tl.where(checked, reasons, 0).to(tl.int64)
        if tl.max(reasons, axis=0) != 0:
            other_hash = successor(
                prev_slot, as_u64(prev_hash), as_u64(prev_token), as_u64(prev_position), not PARALLEL
            )
            # No fault of these records but of the declaration: told once, after the entries.
            wrong_chain = ((reasons & _BAD_CHAIN) != 0) & (chain_hash == as_i64(other_hash))
            reasons = tl.where(wrong_chain, reasons & ~_BAD_CHAIN, reasons)
            nowhere = tl.full([BLOCK], _NO_ENTRY, tl.int64)
            first_wrong = tl.minimum(first_wrong, tl.min(tl.where(wrong_chain, entry, nowhere), axis=0))
            append_violations(
                ring_ptr,
                write_index_ptr,
                ring_rows,
                launch_tag,
                reasons,
                slot,
                position,
                token,
                want_token,
                chain_hash,
                want_hash,
            )
    if first_wrong != _NO_ENTRY:
        _tell_wrong_chain(
            first_wrong,
            words_ptr,
            slots_ptr,
            prev_slots_ptr,
            ring_ptr,
            write_index_ptr,
            slot_words,
            num_records,
            num_slots,
            ring_rows,
            launch_tag,
            PARALLEL,
            _TELL_BLOCK,
        )
    if num_skipped > 0:
        tl.atomic_add(skipped_ptr, num_skipped.to(tl.int64), sem="relaxed")


_EIGHT_A_MULTIPROCESSOR: Final = MappingProxyType({"maxnreg": 64} if torch.version.cuda else {})
"""Registers that let eight programs of 128 threads live on one multiprocessor. Some variants would take 72, for the
rare case that a buffer follows the other chain, and an eighth of the programs would wait for a second wave."""


def _block(num_sources: int) -> tuple[int, int, int, Mapping[str, int]]:
    """Entries a program, warps, programs a multiprocessor, and options of the compiler."""
    if INTERPRETED:
        return 64, 1, 2, NO_OPTIONS
    if num_sources:
        return 32, 1, 32, NO_OPTIONS
    return 256, 4, 8, _EIGHT_A_MULTIPROCESSOR


def verify(*, context: VerifyOrWriteContext, plan: VerifyPlan, check_verify_expected_token: bool) -> None:
    """Check every entry of a plan. Arguments as `launch_canary_verify_kernel` checks them.

    An entry whose slot or predecessor lies outside the buffer or a source is left out and counted in `skipped_entries`.
    """
    canary_buf = context.canary_buf
    num_records, slot_bytes = canary_buf.shape
    fold = fold_args(context)
    capacity = plan.verify_slot_indices.shape[0]
    block, num_warps, programs_per_sm, options = _block(fold.num_sources)
    programs = min(triton.cdiv(capacity, block), programs_per_sm * num_multiprocessors(canary_buf.device))
    launch(
        _verify_kernel,
        max(programs, 1),
        (
            canary_buf,
            plan.verify_slot_indices,
            plan.verify_expected_tokens,
            plan.verify_expected_positions,
            plan.verify_prev_slot_indices,
            plan.verify_num_valid,
            plan.enable,
            context.violation_ring,
            context.violation_write_index,
            context.slot_run_counter,
            context.kernel_run_counter,
            skipped_entries(canary_buf.device),
        ),
        (
            slot_bytes // WORD_BYTES,
            num_records,
            min(num_records, fold.num_slots),
            capacity,
            context.violation_ring.shape[0],
            int(context.kernel_kind),
            *fold.sizes,
        ),
        fold.addresses,
        (check_verify_expected_token, fold.num_sources, fold.paged, fold.chunk, block, is_parallel(context)),
        num_warps,
        options,
    )
