"""Write kernel: fingerprints in parallel, the hash chain serially, in one launch.

The chain needs tokens and positions only, the fingerprint needs the slot's bytes only, and they fill different words of
a record. So the first programs walk chains, one lane a request, while the rest fold bytes, one lane a token; neither
waits for the other. A decode batch is the chain loop run once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from ..layout import WORD_BYTES, FailReason, SlotField
from .device import INTERPRETED, num_multiprocessors, skipped_entries
from .fold import fold_args, fold_sources
from .hashing import HEAD_HASH, advance, as_i64, as_u64, finished, mix3, unfinished
from .violations import append_violations

if TYPE_CHECKING:
    from torch import Tensor

    from ..buffers import VerifyOrWriteContext, WritePlan

_TOKEN: tl.constexpr = tl.constexpr(int(SlotField.TOKEN))
_POSITION: tl.constexpr = tl.constexpr(int(SlotField.POSITION))
_PREV_HASH: tl.constexpr = tl.constexpr(int(SlotField.PREV_HASH))
_REAL_KV_HASH: tl.constexpr = tl.constexpr(int(SlotField.REAL_KV_HASH))
_BAD_TOKEN: tl.constexpr = tl.constexpr(int(FailReason.WRITE_TOKEN_MISMATCH))
_BAD_POSITION: tl.constexpr = tl.constexpr(int(FailReason.WRITE_POSITION_MISMATCH))

_SIZES: Final = [
    "req_capacity",
    "num_tokens",
    "slot_words",
    "num_records",
    "num_slots",
    "ring_rows",
    "launch_tag",
    "num_chain_programs",
]
_SOURCE_SIZES: Final = [f"{name}_{i}" for i in range(4) for name in ("page_size", "num_words")]


@triton.jit
def _load_steps(ptr, index, end, other, UNROLL: tl.constexpr):
    """The next UNROLL values of every request, as a tuple of [BLOCK_REQS]; `other` from `end` on."""
    steps = ()
    for step in tl.static_range(UNROLL):
        steps = steps + (tl.load(ptr + index + step, mask=index + step < end, other=other),)  # noqa: RUF005
    return steps


@triton.jit
def _walk_steps(
    chain,  # [BLOCK_REQS] uint64, and so the rest of the state
    last_position,
    num_stored,
    num_outside,
    slots,  # UNROLL x [BLOCK_REQS]
    tokens,
    positions,
    want_tokens,
    want_positions,
    follows,  # [BLOCK_REQS] bool: positions must be consecutive
    words_ptr,
    ring_ptr,
    write_index_ptr,
    slot_words,
    num_slots,
    ring_rows,
    launch_tag,
    CHECK_INPUT: tl.constexpr,
    HAS_SOURCES: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Store UNROLL tokens of every request and go on along its chain. Returns the state after them."""
    first_position = last_position
    first_chain = chain
    any_bad = tl.zeros_like(num_stored)
    for step in tl.static_range(UNROLL):
        slot = slots[step]
        token = tokens[step]
        position = positions[step]
        stored = (slot >= 0) & (slot < num_slots)
        num_stored += stored.to(tl.int32)
        num_outside += (slot >= num_slots).to(tl.int32)
        bad = follows & (position != last_position + 1)
        if CHECK_INPUT:
            bad = bad | (token != want_tokens[step]) | (position != want_positions[step])
        any_bad |= (stored & bad).to(tl.int32)
        last_position = tl.where(stored, position, last_position)
        record_ptr = words_ptr + slot * slot_words
        tl.store(record_ptr + _TOKEN, token, mask=stored)
        tl.store(record_ptr + _POSITION, position, mask=stored)
        tl.store(record_ptr + _PREV_HASH, as_i64(finished(chain)), mask=stored)
        if not HAS_SOURCES:
            tl.store(record_ptr + _REAL_KV_HASH, tl.zeros_like(token), mask=stored)
        chain = tl.where(stored, advance(chain, as_u64(token), as_u64(position)), chain)

    # Faults are rare: the chain is walked again for them, rather than kept in registers for the case.
    if tl.max(any_bad, axis=0) > 0:
        again = first_chain
        before = first_position
        for step in tl.static_range(UNROLL):
            slot = slots[step]
            token = tokens[step]
            position = positions[step]
            stored = (slot >= 0) & (slot < num_slots)
            if CHECK_INPUT:
                reasons = tl.where(token != want_tokens[step], _BAD_TOKEN, 0)
                reasons |= tl.where(position != want_positions[step], _BAD_POSITION, 0)
                append_violations(
                    ring_ptr,
                    write_index_ptr,
                    ring_rows,
                    launch_tag,
                    tl.where(stored, reasons, 0).to(tl.int64),
                    slot,
                    position,
                    token,
                    want_tokens[step],
                    as_i64(finished(again)),
                    want_positions[step],
                )
            append_violations(
                ring_ptr,
                write_index_ptr,
                ring_rows,
                launch_tag,
                tl.where(stored & follows & (position != before + 1), _BAD_POSITION, 0).to(tl.int64),
                slot,
                position,
                token,
                token,
                as_i64(finished(again)),
                before + 1,
            )
            before = tl.where(stored, position, before)
            again = tl.where(stored, advance(again, as_u64(token), as_u64(position)), again)
    return chain, last_position, num_stored, num_outside


@triton.jit
def _walk_chains(
    words_ptr,
    offsets_ptr,
    seeds_ptr,
    input_ids_ptr,
    positions_ptr,
    cache_loc_ptr,
    want_tokens_ptr,
    want_positions_ptr,
    assert_flag_ptr,
    ring_ptr,
    write_index_ptr,
    slot_counter_ptr,
    skipped_ptr,
    num_reqs,
    num_tokens,
    slot_words,
    num_records,
    num_slots,
    ring_rows,
    launch_tag,
    CHECK_INPUT: tl.constexpr,
    HAS_SOURCES: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    req = tl.program_id(0) * BLOCK_REQS + tl.arange(0, BLOCK_REQS)
    in_batch = req < num_reqs
    begin = tl.load(offsets_ptr + req, mask=in_batch, other=0)
    end = tl.load(offsets_ptr + req + 1, mask=in_batch, other=0)
    seed = tl.load(seeds_ptr + req, mask=in_batch, other=-1)
    assert_flag = tl.load(assert_flag_ptr)
    # Offsets that point outside the token arrays, or a seed outside the buffer, are not followed.
    num_outside = tl.maximum(end - tl.maximum(begin, num_tokens), 0) + tl.maximum(tl.minimum(end, 0) - begin, 0)
    num_outside = tl.minimum(num_outside, num_tokens + 1).to(tl.int32)
    begin = tl.maximum(begin, 0)
    end = tl.minimum(end, num_tokens)
    has_tokens = end > begin
    bad_seed = has_tokens & (seed >= num_records)
    num_outside += bad_seed.to(tl.int32)
    seeded = has_tokens & (seed >= 0) & (seed < num_records)
    seed_ptr = words_ptr + seed * slot_words
    seed_token = tl.load(seed_ptr + _TOKEN, mask=seeded, other=0)
    last_position = tl.load(seed_ptr + _POSITION, mask=seeded, other=0)
    seed_hash = tl.load(seed_ptr + _PREV_HASH, mask=seeded, other=0)
    head = tl.full([BLOCK_REQS], HEAD_HASH, tl.uint64)
    chain = unfinished(tl.where(seeded, mix3(as_u64(seed_hash), as_u64(seed_token), as_u64(last_position)), head))
    follows = seeded & (assert_flag != 0)

    num_stored = tl.zeros([BLOCK_REQS], tl.int32)
    longest = tl.max(tl.maximum(end - begin, 0), axis=0)
    done = tl.zeros([], tl.int64)
    if UNROLL > 1:
        whole = longest // UNROLL * UNROLL
        slots = _load_steps(cache_loc_ptr, begin, end, -1, UNROLL)
        tokens = _load_steps(input_ids_ptr, begin, end, 0, UNROLL)
        positions = _load_steps(positions_ptr, begin, end, 0, UNROLL)
        want_tokens = tokens
        want_positions = positions
        if CHECK_INPUT:
            want_tokens = _load_steps(want_tokens_ptr, begin, end, 0, UNROLL)
            want_positions = _load_steps(want_positions_ptr, begin, end, 0, UNROLL)
        for start in range(0, whole, UNROLL):
            # The next group loads while this one is hashed.
            index = begin + start + UNROLL
            next_slots = _load_steps(cache_loc_ptr, index, end, -1, UNROLL)
            next_tokens = _load_steps(input_ids_ptr, index, end, 0, UNROLL)
            next_positions = _load_steps(positions_ptr, index, end, 0, UNROLL)
            next_want_tokens = next_tokens
            next_want_positions = next_positions
            if CHECK_INPUT:
                next_want_tokens = _load_steps(want_tokens_ptr, index, end, 0, UNROLL)
                next_want_positions = _load_steps(want_positions_ptr, index, end, 0, UNROLL)
            chain, last_position, num_stored, num_outside = _walk_steps(
                chain,
                last_position,
                num_stored,
                num_outside,
                slots,
                tokens,
                positions,
                want_tokens,
                want_positions,
                follows,
                words_ptr,
                ring_ptr,
                write_index_ptr,
                slot_words,
                num_slots,
                ring_rows,
                launch_tag,
                CHECK_INPUT,
                HAS_SOURCES,
                UNROLL,
            )
            slots = next_slots
            tokens = next_tokens
            positions = next_positions
            want_tokens = next_want_tokens
            want_positions = next_want_positions
        done = whole
    for start in range(done, longest):
        index = begin + start
        one_slot = _load_steps(cache_loc_ptr, index, end, -1, 1)
        one_token = _load_steps(input_ids_ptr, index, end, 0, 1)
        one_position = _load_steps(positions_ptr, index, end, 0, 1)
        want_token = one_token
        want_position = one_position
        if CHECK_INPUT:
            want_token = _load_steps(want_tokens_ptr, index, end, 0, 1)
            want_position = _load_steps(want_positions_ptr, index, end, 0, 1)
        chain, last_position, num_stored, num_outside = _walk_steps(
            chain,
            last_position,
            num_stored,
            num_outside,
            one_slot,
            one_token,
            one_position,
            want_token,
            want_position,
            follows,
            words_ptr,
            ring_ptr,
            write_index_ptr,
            slot_words,
            num_slots,
            ring_rows,
            launch_tag,
            CHECK_INPUT,
            HAS_SOURCES,
            1,
        )

    tl.atomic_add(slot_counter_ptr, tl.sum(num_stored, axis=0).to(tl.int64), sem="relaxed")
    outside = tl.sum(num_outside, axis=0)
    if outside > 0:
        tl.atomic_add(skipped_ptr, outside.to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=[*_SIZES, *_SOURCE_SIZES])
def _write_kernel(
    canary_ptr,  # [.., slot_words] int64 words of the canary buffer, inout
    offsets_ptr,  # [req_capacity + 1] int64
    seeds_ptr,  # [req_capacity] int64
    num_valid_reqs_ptr,  # [1] int32
    input_ids_ptr,  # [num_tokens] int64, and so the next four
    positions_ptr,
    cache_loc_ptr,
    want_tokens_ptr,
    want_positions_ptr,
    assert_flag_ptr,  # [1] int32
    ring_ptr,  # [ring_rows, VIOLATION_WORDS] int64, out
    write_index_ptr,  # [1] int32, inout
    slot_counter_ptr,  # [1] int64, inout
    kernel_counter_ptr,  # [1] int64, inout
    skipped_ptr,  # [1] int64, inout
    req_capacity,
    num_tokens,
    slot_words,
    num_records,
    num_slots,  # at most num_records: slots below this have bytes in every source too
    ring_rows,
    launch_tag,
    num_chain_programs,
    address_0,
    row_words_0,
    page_size_0,
    token_words_0,
    num_words_0,
    address_1,
    row_words_1,
    page_size_1,
    token_words_1,
    num_words_1,
    address_2,
    row_words_2,
    page_size_2,
    token_words_2,
    num_words_2,
    address_3,
    row_words_3,
    page_size_3,
    token_words_3,
    num_words_3,
    CHECK_INPUT: tl.constexpr,
    NUM_SOURCES: tl.constexpr,
    PAGED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a batch. Grid: (num_chain_programs + any number of programs that stride over the tokens,)."""
    program = tl.program_id(0)
    words_ptr = canary_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    num_reqs = tl.maximum(tl.minimum(tl.load(num_valid_reqs_ptr), req_capacity), 0)
    if program == 0:
        tl.atomic_add(kernel_counter_ptr, tl.full([], 1, tl.int64), sem="relaxed")
    if program < num_chain_programs:
        if program * BLOCK_REQS < num_reqs:
            _walk_chains(
                words_ptr,
                offsets_ptr,
                seeds_ptr,
                input_ids_ptr,
                positions_ptr,
                cache_loc_ptr,
                want_tokens_ptr,
                want_positions_ptr,
                assert_flag_ptr,
                ring_ptr,
                write_index_ptr,
                slot_counter_ptr,
                skipped_ptr,
                num_reqs,
                num_tokens,
                slot_words,
                num_records,
                num_slots,
                ring_rows,
                launch_tag,
                CHECK_INPUT,
                NUM_SOURCES > 0,
                BLOCK_REQS,
                UNROLL,
            )
    elif NUM_SOURCES > 0:
        begin = tl.maximum(tl.load(offsets_ptr), 0)
        end = tl.minimum(tl.load(offsets_ptr + num_reqs), num_tokens)
        first = begin + (program - num_chain_programs).to(tl.int64) * BLOCK
        step = (tl.num_programs(0) - num_chain_programs).to(tl.int64) * BLOCK
        for start in range(first, end, step):
            index = start + tl.arange(0, BLOCK)
            slot = tl.load(cache_loc_ptr + index, mask=index < end, other=-1)
            stored = (slot >= 0) & (slot < num_slots)
            real_kv_hash = fold_sources(
                slot,
                stored,
                address_0,
                row_words_0,
                page_size_0,
                token_words_0,
                num_words_0,
                address_1,
                row_words_1,
                page_size_1,
                token_words_1,
                num_words_1,
                address_2,
                row_words_2,
                page_size_2,
                token_words_2,
                num_words_2,
                address_3,
                row_words_3,
                page_size_3,
                token_words_3,
                num_words_3,
                NUM_SOURCES,
                PAGED,
                CHUNK,
                BLOCK,
            )
            # Two tokens of one slot store the same value here, so their order does not matter.
            tl.store(words_ptr + slot * slot_words + _REAL_KV_HASH, as_i64(real_kv_hash), mask=stored)


_UNROLL: Final = 2 if INTERPRETED else 8
_BLOCK_REQS: Final = 16 if INTERPRETED else 32
_BLOCK: Final = 32
_FOLD_PROGRAMS_PER_SM: Final = 16


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
    """Write the records of a batch's new tokens. Arguments as `launch_canary_write_kernel` checks them.

    A token whose slot lies outside the buffer or a source, or a seed outside the buffer, is left out and counted in
    `skipped_entries`; a chain without its seed starts at the anchor.
    """
    canary_buf = context.canary_buf
    fold = fold_args(context)
    num_tokens = input_ids.shape[0]
    req_capacity = plan.write_seed_slot_indices.shape[0]
    chain_programs = triton.cdiv(req_capacity, _BLOCK_REQS)
    fold_programs = 0
    if fold.num_sources:
        most = _FOLD_PROGRAMS_PER_SM * num_multiprocessors(canary_buf.device)
        fold_programs = min(triton.cdiv(num_tokens, _BLOCK), most)
    _write_kernel[(chain_programs + fold_programs,)](
        canary_buf,
        plan.write_offsets,
        plan.write_seed_slot_indices,
        plan.write_num_valid_reqs,
        input_ids,
        positions,
        out_cache_loc,
        input_ids if expected_input_tokens is None else expected_input_tokens,
        positions if expected_input_positions is None else expected_input_positions,
        context.enable_chain_position_assert,
        context.violation_ring,
        context.violation_write_index,
        context.slot_run_counter,
        context.kernel_run_counter,
        skipped_entries(canary_buf.device),
        req_capacity,
        num_tokens,
        canary_buf.shape[1] // WORD_BYTES,
        canary_buf.shape[0],
        min(canary_buf.shape[0], fold.num_slots),
        context.violation_ring.shape[0],
        int(context.kernel_kind),
        chain_programs,
        *fold.args,
        CHECK_INPUT=enable_write_input_assert,
        NUM_SOURCES=fold.num_sources,
        PAGED=fold.paged,
        CHUNK=fold.chunk,
        BLOCK_REQS=_BLOCK_REQS,
        UNROLL=_UNROLL,
        BLOCK=_BLOCK,
        num_warps=1,
    )
