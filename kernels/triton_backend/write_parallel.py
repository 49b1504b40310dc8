"""Write kernels for the parallel chain: reduce, then scan, in two launches that fill the chip; one for a small batch.

The first launch composes each block of tokens to one map, the second composes the blocks before its own (a few dozen
maps, from L2), scans its tokens and stores them. Two launches rather than one with decoupled look-back: the boundary
between kernels is the only synchronisation, so nothing spins, no flags are cleared between graph replays, programs may
run in any order, and what holds in the interpreter holds on a device. It costs one more launch, under 2 µs in a graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from ..layout import WORD_BYTES
from ..scratch import scratch_words
from .device import INTERPRETED, num_multiprocessors, skipped_entries
from .fold import fold_args
from .hashing import as_i64
from .launch import launch
from .parallel_maps import blocks_before, last_of, scan_maps, token_maps
from .records import POSITION, record_at, store_record
from .violations import append_violations
from .write_chains import BAD_POSITION, BAD_TOKEN
from .write_fold import _fold_tokens_kernel, num_reqs_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..buffers import VerifyOrWriteContext, WritePlan

_SIZES: Final = [
    "req_capacity",
    "num_tokens",
    "slot_pairs",
    "num_records",
    "num_slots",
    "num_blocks",
    "ring_rows",
    "launch_tag",
]


@triton.jit(do_not_specialize=_SIZES)
def _compose_blocks_kernel(
    canary_ptr,  # [num_records, ..] uint8: records slot_pairs pairs of words apart, or words if not PAIRED
    offsets_ptr,  # [req_capacity + 1] int64
    seeds_ptr,  # [req_capacity] int64
    num_valid_reqs_ptr,  # [1] int32
    input_ids_ptr,  # [num_tokens] int64, and so the next two
    positions_ptr,
    cache_loc_ptr,
    blocks_ptr,  # [3, num_blocks] int64, out: multipliers, addends and marks
    req_capacity,
    num_tokens,
    slot_pairs,
    num_records,
    num_slots,
    num_blocks,
    PAIRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compose the maps of each block of tokens to one. Grid: (num_blocks,)."""
    block = tl.program_id(0)
    words_ptr = canary_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    _, _, _, _, multiplier, addend, last = token_maps(
        block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK),
        words_ptr,
        offsets_ptr,
        seeds_ptr,
        input_ids_ptr,
        positions_ptr,
        cache_loc_ptr,
        num_reqs_of(num_valid_reqs_ptr, req_capacity),
        num_tokens,
        slot_pairs,
        num_records,
        num_slots,
        PAIRED,
    )
    # Not a reduction, which may take its operands in any order: the maps do not commute.
    multiplier, addend, last = scan_maps(multiplier, addend, last)
    tl.store(blocks_ptr + block, as_i64(last_of(multiplier, BLOCK)))
    tl.store(blocks_ptr + num_blocks + block, as_i64(last_of(addend, BLOCK)))
    tl.store(blocks_ptr + 2 * num_blocks + block, last_of(last, BLOCK))


@triton.jit(do_not_specialize=_SIZES)
def _write_parallel_kernel(
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
    blocks_ptr,  # [3, num_blocks] int64, unless ALONE
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
    num_blocks,
    ring_rows,
    launch_tag,
    CHECK_INPUT: tl.constexpr,
    PAIRED: tl.constexpr,
    HAS_SOURCES: tl.constexpr,
    ALONE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Scan, check and store a batch's tokens. Grid: (num_blocks,); (1,) if ALONE, for at most BLOCK tokens."""
    block = tl.program_id(0)
    words_ptr = canary_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    num_reqs = num_reqs_of(num_valid_reqs_ptr, req_capacity)
    index = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live, head, begin, seed, multiplier, addend, last = token_maps(
        index,
        words_ptr,
        offsets_ptr,
        seeds_ptr,
        input_ids_ptr,
        positions_ptr,
        cache_loc_ptr,
        num_reqs,
        num_tokens,
        slot_pairs,
        num_records,
        num_slots,
        PAIRED,
    )
    slot = tl.load(cache_loc_ptr + index, mask=live, other=-1)
    token = tl.load(input_ids_ptr + index, mask=live, other=0)
    position = tl.load(positions_ptr + index, mask=live, other=0)
    stored = (slot >= 0) & (slot < num_slots)

    multiplier, addend, last = scan_maps(multiplier, addend, last)
    chain = addend
    if not ALONE:
        # Only a block that begins inside a request needs what came before, back to that request's first token.
        is_first = tl.arange(0, BLOCK) == 0
        goes_on = is_first & live & ~head
        if tl.max(goes_on.to(tl.int32), axis=0) != 0:
            first_block = tl.sum(tl.where(goes_on, begin // BLOCK, 0), axis=0)
            value, mark = blocks_before(first_block, block.to(tl.int64), blocks_ptr, num_blocks, BLOCKS)
            chain = multiplier * value + addend
            last = tl.maximum(last, mark)

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
    # The mark is the token behind the last stored one, or the request's first: then the seed came before.
    follows = stored & (seed >= 0) & (seed < tl.where(tl.load(assert_flag_ptr) != 0, num_records, 0))
    from_seed = last == begin
    seed_ptr = record_at(words_ptr, seed, slot_pairs, PAIRED)
    seed_position = tl.load(seed_ptr + POSITION, mask=follows & from_seed, other=0)
    last_position = tl.load(positions_ptr + (last - 1), mask=follows & ~from_seed, other=0)
    next_position = tl.where(from_seed, seed_position, last_position) + 1
    append_violations(
        ring_ptr,
        write_index_ptr,
        ring_rows,
        launch_tag,
        tl.where(follows & (position != next_position), BAD_POSITION, 0).to(tl.int64),
        slot,
        position,
        token,
        token,
        as_i64(chain),
        next_position,
    )
    store_record(words_ptr, slot, slot_pairs, token, position, chain, stored, HAS_SOURCES, PAIRED)

    tl.atomic_add(slot_counter_ptr, tl.sum(stored.to(tl.int32), axis=0).to(tl.int64), sem="relaxed")
    outside = (slot >= num_slots).to(tl.int32) + (head & (seed >= num_records)).to(tl.int32)
    num_outside = tl.sum(outside, axis=0).to(tl.int64)
    if block == 0:
        tl.atomic_add(kernel_counter_ptr, tl.full([], 1, tl.int64), sem="relaxed")
        base = tl.load(offsets_ptr)
        end = tl.load(offsets_ptr + num_reqs)
        beyond = tl.maximum(end - tl.maximum(base, num_tokens), 0) + tl.maximum(tl.minimum(end, 0) - base, 0)
        num_outside += tl.minimum(beyond, num_tokens + 1)
    if num_outside > 0:
        tl.atomic_add(skipped_ptr, num_outside, sem="relaxed")


_ALONE_BLOCK: Final = 8 if INTERPRETED else 1024
_BLOCK: Final = 8 if INTERPRETED else 256
_BLOCKS: Final = 2 if INTERPRETED else 128
"""Blocks that are composed at a time: 32 768 tokens in one go."""
_ALONE_WARPS: Final = 8
_WARPS: Final = 4
_FOLD_BLOCK: Final = 32
_FOLD_PROGRAMS_PER_SM: Final = 16


def write_parallel(
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
    """Write a batch under the parallel chain. Arguments as `launch_canary_write_kernel` checks them.

    What lies outside is left out and counted as in `write`. A plan's offsets rise; where they fall, which request a
    token belongs to is not defined. Two tokens that store into one slot race, also within a request.
    """
    canary_buf = context.canary_buf
    num_records, slot_bytes = canary_buf.shape
    device = canary_buf.device
    paired = slot_bytes % (2 * WORD_BYTES) == 0
    slot_pairs = slot_bytes // WORD_BYTES // (2 if paired else 1)
    fold = fold_args(context)
    num_tokens, req_capacity = input_ids.shape[0], plan.write_seed_slot_indices.shape[0]
    num_slots = min(num_records, fold.num_slots)
    alone = num_tokens <= _ALONE_BLOCK
    num_blocks = 1 if alone else triton.cdiv(num_tokens, _BLOCK)
    batch = (canary_buf, plan.write_offsets, plan.write_seed_slot_indices, plan.write_num_valid_reqs)
    tokens = (input_ids, positions, out_cache_loc)
    blocks = positions
    if fold.num_sources:
        most = _FOLD_PROGRAMS_PER_SM * num_multiprocessors(device)
        launch(
            _fold_tokens_kernel,
            max(1, min(triton.cdiv(num_tokens, _FOLD_BLOCK), most)),
            (canary_buf, plan.write_offsets, plan.write_num_valid_reqs, out_cache_loc),
            (req_capacity, num_tokens, slot_pairs, num_slots, *fold.sizes),
            fold.addresses,
            (paired, fold.num_sources, fold.paged, fold.chunk, _FOLD_BLOCK),
            num_warps=1,
        )
    if not alone:
        blocks = scratch_words("parallel-chain", device, 3 * num_blocks)
        launch(
            _compose_blocks_kernel,
            num_blocks,
            (*batch, *tokens, blocks),
            (req_capacity, num_tokens, slot_pairs, num_records, num_slots, num_blocks),
            (),
            (paired, _BLOCK),
            num_warps=_WARPS,
        )
    launch(
        _write_parallel_kernel,
        num_blocks,
        (
            *batch,
            *tokens,
            input_ids if expected_input_tokens is None else expected_input_tokens,
            positions if expected_input_positions is None else expected_input_positions,
            context.enable_chain_position_assert,
            blocks,
            context.violation_ring,
            context.violation_write_index,
            context.slot_run_counter,
            context.kernel_run_counter,
            skipped_entries(device),
        ),
        (
            req_capacity,
            num_tokens,
            slot_pairs,
            num_records,
            num_slots,
            num_blocks,
            context.violation_ring.shape[0],
            int(context.kernel_kind),
        ),
        (),
        (
            enable_write_input_assert,
            paired,
            fold.num_sources > 0,
            alone,
            _ALONE_BLOCK if alone else _BLOCK,
            _BLOCKS,
        ),
        num_warps=_ALONE_WARPS if alone else _WARPS,
    )
