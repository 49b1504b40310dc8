"""Serial chains: short requests a lane each, a long request a warp of its own.

One token's hash is some forty dependent instructions, and a warp that walks a chain is bound by their latency: each
instruction beside them costs time. So a long request's warp holds a group of tokens in its lanes: it loads, checks and
stores 32 of them with the instructions of one, and only the hash goes token by token, the same in every lane.
"""

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
def _seed_state(
    words_ptr,
    begin,  # int64, a scalar or of any shape, and so `end` and `seed`
    end,
    seed,
    num_tokens,
    num_records,
    slot_pairs,
    PAIRED: tl.constexpr,
):
    """Where a request begins. Returns its tokens within the arrays, chain, last position, whether it is seeded, and how
    many of its tokens and seeds lie outside."""
    # Offsets that point outside the token arrays, or a seed outside the buffer, are not followed.
    num_outside = tl.maximum(end - tl.maximum(begin, num_tokens), 0) + tl.maximum(tl.minimum(end, 0) - begin, 0)
    num_outside = tl.minimum(num_outside, num_tokens + 1).to(tl.int32)
    begin = tl.maximum(begin, 0)
    end = tl.minimum(end, num_tokens)
    has_tokens = end > begin
    num_outside += (has_tokens & (seed >= num_records)).to(tl.int32)
    seeded = has_tokens & (seed >= 0) & (seed < num_records)
    seed_ptr = record_at(words_ptr, seed, slot_pairs, PAIRED)
    seed_token = tl.load(seed_ptr + TOKEN, mask=seeded, other=0)
    last_position = tl.load(seed_ptr + POSITION, mask=seeded, other=0)
    seed_hash = tl.load(seed_ptr + PREV_HASH, mask=seeded, other=0)
    after_seed = mix3(as_u64(seed_hash), as_u64(seed_token), as_u64(last_position))
    head = as_u64(tl.zeros_like(seed)) + HEAD_HASH
    return begin, end, tl.where(seeded, after_seed, head), last_position, seeded, num_outside


@triton.jit
def _count(slot_counter_ptr, skipped_ptr, num_stored, num_outside):
    """Add what a program stored and left out. Both int32."""
    if num_stored > 0:
        tl.atomic_add(slot_counter_ptr, num_stored.to(tl.int64), sem="relaxed")
    if num_outside > 0:
        tl.atomic_add(skipped_ptr, num_outside.to(tl.int64), sem="relaxed")


@triton.jit
def walk_short(
    program,
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
    SHORT: tl.constexpr,
):
    """Walk the chains of BLOCK_REQS requests, those of at most SHORT tokens: a decode batch is the loop run once."""
    req = program * BLOCK_REQS + tl.arange(0, BLOCK_REQS)
    in_batch = req < num_reqs
    begin = tl.load(offsets_ptr + req, mask=in_batch, other=0)
    end = tl.load(offsets_ptr + req + 1, mask=in_batch, other=0)
    ours = end - begin <= SHORT
    begin = tl.where(ours, begin, 0)
    end = tl.where(ours, end, 0)
    seed = tl.load(seeds_ptr + req, mask=in_batch, other=-1)
    assert_flag = tl.load(assert_flag_ptr)
    begin, end, chain, last_position, seeded, num_outside = _seed_state(
        words_ptr, begin, end, seed, num_tokens, num_records, slot_pairs, PAIRED
    )
    follows = seeded & (assert_flag != 0)
    num_stored = tl.zeros([BLOCK_REQS], tl.int32)
    for step in range(tl.max(end - begin, axis=0)):
        chain, last_position, num_stored, num_outside = _step(
            begin + step,
            begin + step < end,
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
    _count(slot_counter_ptr, skipped_ptr, tl.sum(num_stored, axis=0), tl.sum(num_outside, axis=0))


@triton.jit
def _walk_group(
    start,  # int64: the group's first token
    count,  # its tokens
    chain,  # uint64: before the group
    last_position,  # int64: of the last stored token before the group
    input_ids_ptr,
    positions_ptr,
    cache_loc_ptr,
    num_slots,
    GROUP: tl.constexpr,
):
    """Token by token. Returns every lane's chain and last position before its token, and those after the group."""
    lanes = tl.arange(0, GROUP)
    chains = tl.zeros([GROUP], tl.uint64)
    before = tl.zeros([GROUP], tl.int64)
    for step in range(count):
        chains = tl.where(lanes == step, chain, chains)
        before = tl.where(lanes == step, last_position, before)
        slot = tl.load(cache_loc_ptr + start + step)
        token = tl.load(input_ids_ptr + start + step)
        position = tl.load(positions_ptr + start + step)
        stored = (slot >= 0) & (slot < num_slots)
        chain = tl.where(stored, mix3(chain, as_u64(token), as_u64(position)), chain)
        last_position = tl.where(stored, position, last_position)
    return chains, before, chain, last_position


@triton.jit
def walk_long(
    req,
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
    num_tokens,
    slot_pairs,
    num_records,
    num_slots,
    ring_rows,
    launch_tag,
    CHECK_INPUT: tl.constexpr,
    HAS_SOURCES: tl.constexpr,
    PAIRED: tl.constexpr,
    SHORT: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Walk the chain of one request of more than SHORT tokens, GROUP tokens at a time.

    Of two tokens of one group that name the same slot, either may be the one that stays.
    """
    begin = tl.load(offsets_ptr + req)
    end = tl.load(offsets_ptr + req + 1)
    if end - begin > SHORT:
        seed = tl.load(seeds_ptr + req)
        assert_flag = tl.load(assert_flag_ptr)
        begin, end, chain, last_position, seeded, num_outside = _seed_state(
            words_ptr, begin, end, seed, num_tokens, num_records, slot_pairs, PAIRED
        )
        follows = seeded & (assert_flag != 0)
        lanes = tl.arange(0, GROUP)
        num_stored = tl.zeros([GROUP], tl.int32)
        num_left_out = tl.zeros([GROUP], tl.int32)
        index = begin + lanes
        slot = tl.load(cache_loc_ptr + index, mask=index < end, other=-1)
        token = tl.load(input_ids_ptr + index, mask=index < end, other=0)
        position = tl.load(positions_ptr + index, mask=index < end, other=0)
        for start in range(begin, end, GROUP):
            index = start + lanes
            # The next group loads in the shadow of this one's hashes.
            ahead = index + GROUP
            next_slot = tl.load(cache_loc_ptr + ahead, mask=ahead < end, other=-1)
            next_token = tl.load(input_ids_ptr + ahead, mask=ahead < end, other=0)
            next_position = tl.load(positions_ptr + ahead, mask=ahead < end, other=0)
            stored = (slot >= 0) & (slot < num_slots)
            first_position = tl.load(positions_ptr + start)
            consecutive = first_position + lanes
            plain = stored & (position == consecutive)
            if tl.min(plain.to(tl.int32), axis=0) == 1:
                chains = as_u64(tl.zeros_like(token))
                for step in tl.static_range(GROUP):
                    chains = tl.where(lanes == step, chain, chains)
                    # From L1, where the group's load has just put it: cheaper than asking its lane.
                    step_token = tl.load(input_ids_ptr + start + step)
                    chain = mix3(chain, as_u64(step_token), as_u64(first_position + step))
                before = tl.where(lanes == 0, last_position, consecutive - 1)
                last_position = first_position + (GROUP - 1)
            else:
                count = tl.minimum(end - start, GROUP).to(tl.int32)
                chains, before, chain, last_position = _walk_group(
                    start, count, chain, last_position, input_ids_ptr, positions_ptr, cache_loc_ptr, num_slots, GROUP
                )
            reasons = tl.where(stored & follows & (position != before + 1), BAD_POSITION, 0)
            if CHECK_INPUT:
                want_token = tl.load(want_tokens_ptr + index, mask=index < end, other=0)
                want_position = tl.load(want_positions_ptr + index, mask=index < end, other=0)
                input_reasons = tl.where(token != want_token, BAD_TOKEN, 0)
                input_reasons |= tl.where(position != want_position, BAD_POSITION, 0)
                append_violations(
                    ring_ptr,
                    write_index_ptr,
                    ring_rows,
                    launch_tag,
                    tl.where(stored, input_reasons, 0).to(tl.int64),
                    slot,
                    position,
                    token,
                    want_token,
                    as_i64(chains),
                    want_position,
                )
            append_violations(
                ring_ptr,
                write_index_ptr,
                ring_rows,
                launch_tag,
                reasons.to(tl.int64),
                slot,
                position,
                token,
                token,
                as_i64(chains),
                before + 1,
            )
            store_record(words_ptr, slot, slot_pairs, token, position, chains, stored, HAS_SOURCES, PAIRED)
            num_stored += stored.to(tl.int32)
            num_left_out += (slot >= num_slots).to(tl.int32)
            slot = next_slot
            token = next_token
            position = next_position
        num_outside += tl.sum(num_left_out, axis=0)
        _count(slot_counter_ptr, skipped_ptr, tl.sum(num_stored, axis=0), num_outside)
