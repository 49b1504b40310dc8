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
from .fold import SOURCE_SIZES, fold_args, fold_sources
from .hashing import HEAD_HASH, as_i64, as_u64, mix3
from .launch import launch
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
    "slot_pairs",
    "num_records",
    "num_slots",
    "ring_rows",
    "launch_tag",
    "num_chain_programs",
]


@triton.jit
def _record_ptr(words_ptr, slot, slot_pairs, PAIRED: tl.constexpr):
    """Address of a slot's record; records lie a whole number of word pairs apart if PAIRED."""
    # A buffer of 2**32 records is larger than any device: one 32 x 32 -> 64 bit product addresses it.
    offset = slot.to(tl.uint32).to(tl.uint64) * slot_pairs.to(tl.uint32).to(tl.uint64)
    if PAIRED:
        offset = tl.multiple_of(offset * 2, 2)
    return words_ptr + offset


@triton.jit
def _store_pair(ptr, first, second, live, PAIRED: tl.constexpr):
    if PAIRED:
        # Two neighbouring words go as one store of 16 bytes.
        pair_ptr = ptr[:, None] + tl.arange(0, 2)[None, :]
        tl.store(pair_ptr, tl.join(first, second), mask=live[:, None])
    else:
        tl.store(ptr, first, mask=live)
        tl.store(ptr + 1, second, mask=live)


@triton.jit
def _store_record(
    words_ptr, slot, slot_pairs, token, position, chain, live, HAS_SOURCES: tl.constexpr, PAIRED: tl.constexpr
):
    """Store a record in the order of its words: TOKEN POSITION PREV_HASH REAL_KV_HASH, the last by the fold if any."""
    record_ptr = _record_ptr(words_ptr, slot, slot_pairs, PAIRED)
    _store_pair(record_ptr + _TOKEN, token, position, live, PAIRED)
    if HAS_SOURCES:
        tl.store(record_ptr + _PREV_HASH, as_i64(chain), mask=live)
    else:
        _store_pair(record_ptr + _PREV_HASH, as_i64(chain), tl.zeros_like(token), live, PAIRED)


@triton.jit
def _step(
    index,  # [BLOCK_REQS] int64: one token of every request
    live,  # [BLOCK_REQS] bool
    chain,  # [BLOCK_REQS] uint64, and so the rest of the state
    last_position,
    num_stored,
    num_outside,
    follows,  # [BLOCK_REQS] bool: positions must be consecutive
    words_ptr,
    input_ids_ptr,
    positions_ptr,
    cache_loc_ptr,
    want_tokens_ptr,
    want_positions_ptr,
    ring_ptr,
    write_index_ptr,
    slot_pairs,
    num_slots,
    ring_rows,
    launch_tag,
    CHECK_INPUT: tl.constexpr,
    HAS_SOURCES: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """Check and store one token of every request. Returns the state after it."""
    slot = tl.load(cache_loc_ptr + index, mask=live, other=-1)
    token = tl.load(input_ids_ptr + index, mask=live, other=0)
    position = tl.load(positions_ptr + index, mask=live, other=0)
    stored = (slot >= 0) & (slot < num_slots)
    if CHECK_INPUT:
        want_token = tl.load(want_tokens_ptr + index, mask=live, other=0)
        want_position = tl.load(want_positions_ptr + index, mask=live, other=0)
        reasons = tl.where(token != want_token, _BAD_TOKEN, 0)
        reasons |= tl.where(position != want_position, _BAD_POSITION, 0)
        append_violations(
            ring_ptr,
            write_index_ptr,
            ring_rows,
            launch_tag,
            tl.where(stored, reasons, 0).to(tl.int64),
            slot,
            position,
            token,
            want_token,
            as_i64(chain),
            want_position,
        )
    next_position = last_position + 1
    append_violations(
        ring_ptr,
        write_index_ptr,
        ring_rows,
        launch_tag,
        tl.where(stored & follows & (position != next_position), _BAD_POSITION, 0).to(tl.int64),
        slot,
        position,
        token,
        token,
        as_i64(chain),
        next_position,
    )
    _store_record(words_ptr, slot, slot_pairs, token, position, chain, stored, HAS_SOURCES, PAIRED)
    last_position = tl.where(stored, position, last_position)
    num_stored += stored.to(tl.int32)
    num_outside += (slot >= num_slots).to(tl.int32)
    chain = tl.where(stored, mix3(chain, as_u64(token), as_u64(position)), chain)
    return chain, last_position, num_stored, num_outside


@triton.jit
def _load_group(ptr, index, UNROLL: tl.constexpr):
    """UNROLL values of every request, as a tuple of [BLOCK_REQS]."""
    steps = ()
    for step in tl.static_range(UNROLL):
        steps = steps + (tl.load(ptr + index + step),)  # noqa: RUF005
    return steps


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
    slot_pairs,
    num_records,
    num_slots,
    ring_rows,
    launch_tag,
    CHECK_INPUT: tl.constexpr,
    HAS_SOURCES: tl.constexpr,
    PAIRED: tl.constexpr,
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
    seed_ptr = _record_ptr(words_ptr, seed, slot_pairs, PAIRED)
    seed_token = tl.load(seed_ptr + _TOKEN, mask=seeded, other=0)
    last_position = tl.load(seed_ptr + _POSITION, mask=seeded, other=0)
    seed_hash = tl.load(seed_ptr + _PREV_HASH, mask=seeded, other=0)
    head = tl.full([BLOCK_REQS], HEAD_HASH, tl.uint64)
    chain = tl.where(seeded, mix3(as_u64(seed_hash), as_u64(seed_token), as_u64(last_position)), head)
    follows = seeded & (assert_flag != 0)

    num_stored = tl.zeros([BLOCK_REQS], tl.int32)
    count = tl.maximum(end - begin, 0)
    whole = count // UNROLL * UNROLL
    longest = tl.max(whole, axis=0)
    if longest > 0:
        # Requests without a group of their own read the first tokens, which are there, rather than under a mask.
        index = tl.where(whole > 0, begin, 0)
        slots = _load_group(cache_loc_ptr, index, UNROLL)
        tokens = _load_group(input_ids_ptr, index, UNROLL)
        positions = _load_group(positions_ptr, index, UNROLL)
        for start in range(0, longest, UNROLL):
            live = start < whole
            index = tl.where(live, begin + start, 0)
            next_index = tl.where(start + UNROLL < whole, begin + (start + UNROLL), 0)
            # A group that has nothing to report is stored without looking at its tokens one by one. Words of the bits
            # that would have to be 0 are gathered first: a compare each would cost as much as a third of the hash.
            slot_bits = tl.zeros([BLOCK_REQS], tl.uint64)
            position_bits = tl.zeros([BLOCK_REQS], tl.uint64)
            input_bits = tl.zeros([BLOCK_REQS], tl.uint64)
            largest = tl.zeros([BLOCK_REQS], tl.uint32)
            next_position = as_u64(last_position + 1)
            for step in tl.static_range(UNROLL):
                slot_bits |= as_u64(slots[step])
                largest = tl.maximum(largest, slots[step].to(tl.uint32))
                # Exact while the low words do not carry; if they do, the group is looked at.
                low = (as_u64(positions[step]).to(tl.uint32) - step) ^ next_position.to(tl.uint32)
                high = (as_u64(positions[step]) ^ next_position) >> 32
                position_bits |= low.to(tl.uint64) | high
                if CHECK_INPUT:
                    input_bits |= as_u64(tokens[step] ^ tl.load(want_tokens_ptr + index + step))
                    input_bits |= as_u64(positions[step] ^ tl.load(want_positions_ptr + index + step))
            bad = ((slot_bits >> 32) != 0) | (largest >= num_slots) | (input_bits != 0)
            bad = live & (bad | (follows & (position_bits != 0)))
            if tl.max(bad.to(tl.int32), axis=0) == 0:
                after = chain
                next_slots = ()
                next_tokens = ()
                next_positions = ()
                for step in tl.static_range(UNROLL):
                    _store_record(
                        words_ptr,
                        slots[step],
                        slot_pairs,
                        tokens[step],
                        positions[step],
                        after,
                        live,
                        HAS_SOURCES,
                        PAIRED,
                    )
                    after = mix3(after, as_u64(tokens[step]), as_u64(positions[step]))
                    # The next group loads in the shadow of the hash, a token a step.
                    next_slots = next_slots + (tl.load(cache_loc_ptr + next_index + step),)  # noqa: RUF005
                    next_tokens = next_tokens + (tl.load(input_ids_ptr + next_index + step),)  # noqa: RUF005
                    next_positions = next_positions + (tl.load(positions_ptr + next_index + step),)  # noqa: RUF005
                chain = tl.where(live, after, chain)
                last_position = tl.where(live, positions[UNROLL - 1], last_position)
                num_stored += tl.where(live, UNROLL, 0)
                slots = next_slots
                tokens = next_tokens
                positions = next_positions
            else:
                for again in range(UNROLL):
                    chain, last_position, num_stored, num_outside = _step(
                        index + again,
                        live,
                        chain,
                        last_position,
                        num_stored,
                        num_outside,
                        follows,
                        words_ptr,
                        input_ids_ptr,
                        positions_ptr,
                        cache_loc_ptr,
                        want_tokens_ptr,
                        want_positions_ptr,
                        ring_ptr,
                        write_index_ptr,
                        slot_pairs,
                        num_slots,
                        ring_rows,
                        launch_tag,
                        CHECK_INPUT,
                        HAS_SOURCES,
                        PAIRED,
                    )
                slots = _load_group(cache_loc_ptr, next_index, UNROLL)
                tokens = _load_group(input_ids_ptr, next_index, UNROLL)
                positions = _load_group(positions_ptr, next_index, UNROLL)
    for one in range(tl.max(count - whole, axis=0)):
        rest = whole + one
        chain, last_position, num_stored, num_outside = _step(
            begin + rest,
            rest < count,
            chain,
            last_position,
            num_stored,
            num_outside,
            follows,
            words_ptr,
            input_ids_ptr,
            positions_ptr,
            cache_loc_ptr,
            want_tokens_ptr,
            want_positions_ptr,
            ring_ptr,
            write_index_ptr,
            slot_pairs,
            num_slots,
            ring_rows,
            launch_tag,
            CHECK_INPUT,
            HAS_SOURCES,
            PAIRED,
        )

    tl.atomic_add(slot_counter_ptr, tl.sum(num_stored, axis=0).to(tl.int64), sem="relaxed")
    outside = tl.sum(num_outside, axis=0)
    if outside > 0:
        tl.atomic_add(skipped_ptr, outside.to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=[*_SIZES, *SOURCE_SIZES])
def _write_kernel(
    canary_ptr,  # [num_records, ..] uint8, inout: records slot_pairs pairs of words apart, or words if not PAIRED
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
    slot_pairs,
    num_records,
    num_slots,  # at most num_records: slots below this have bytes in every source too
    ring_rows,
    launch_tag,
    num_chain_programs,
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
    CHECK_INPUT: tl.constexpr,
    PAIRED: tl.constexpr,
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
                slot_pairs,
                num_records,
                num_slots,
                ring_rows,
                launch_tag,
                CHECK_INPUT,
                NUM_SOURCES > 0,
                PAIRED,
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
            # Two tokens of one slot store the same value here, so their order does not matter.
            tl.store(
                _record_ptr(words_ptr, slot, slot_pairs, PAIRED) + _REAL_KV_HASH, as_i64(real_kv_hash), mask=stored
            )


_UNROLL: Final = 2 if INTERPRETED else 16
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
    num_records, slot_bytes = canary_buf.shape
    paired = slot_bytes % (2 * WORD_BYTES) == 0
    fold = fold_args(context)
    num_tokens = input_ids.shape[0]
    req_capacity = plan.write_seed_slot_indices.shape[0]
    chain_programs = triton.cdiv(req_capacity, _BLOCK_REQS)
    fold_programs = 0
    if fold.num_sources:
        most = _FOLD_PROGRAMS_PER_SM * num_multiprocessors(canary_buf.device)
        fold_programs = min(triton.cdiv(num_tokens, _BLOCK), most)
    launch(
        _write_kernel,
        chain_programs + fold_programs,
        (
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
        ),
        (
            req_capacity,
            num_tokens,
            slot_bytes // WORD_BYTES // (2 if paired else 1),
            num_records,
            min(num_records, fold.num_slots),
            context.violation_ring.shape[0],
            int(context.kernel_kind),
            chain_programs,
            *fold.sizes,
        ),
        fold.addresses,
        (
            enable_write_input_assert,
            paired,
            fold.num_sources,
            fold.paged,
            fold.chunk,
            _BLOCK_REQS,
            _UNROLL,
            _BLOCK,
        ),
        num_warps=1,
    )
