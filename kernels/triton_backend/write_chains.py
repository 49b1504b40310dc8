"""Serial chains: a lane a request, a token a step, its loads ahead of it and its stores behind."""

from __future__ import annotations

import triton
import triton.language as tl

from ..layout import FailReason
from .hashing import HEAD_HASH, as_i64, as_u64, mix3
from .records import POSITION, PREV_HASH, TOKEN, record_at, store_record
from .violations import append_violations

BAD_TOKEN: tl.constexpr = tl.constexpr(int(FailReason.WRITE_TOKEN_MISMATCH))
BAD_POSITION: tl.constexpr = tl.constexpr(int(FailReason.WRITE_POSITION_MISMATCH))


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
        reasons = tl.where(token != want_token, BAD_TOKEN, 0)
        reasons |= tl.where(position != want_position, BAD_POSITION, 0)
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
        tl.where(stored & follows & (position != next_position), BAD_POSITION, 0).to(tl.int64),
        slot,
        position,
        token,
        token,
        as_i64(chain),
        next_position,
    )
    store_record(words_ptr, slot, slot_pairs, token, position, chain, stored, HAS_SOURCES, PAIRED)
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
def walk_chains(
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
    seed_ptr = record_at(words_ptr, seed, slot_pairs, PAIRED)
    seed_token = tl.load(seed_ptr + TOKEN, mask=seeded, other=0)
    last_position = tl.load(seed_ptr + POSITION, mask=seeded, other=0)
    seed_hash = tl.load(seed_ptr + PREV_HASH, mask=seeded, other=0)
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
                    store_record(
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
