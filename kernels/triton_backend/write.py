"""Write kernel: fingerprints in parallel, the hash chain serially, in one launch.

The chain needs tokens and positions only, the fingerprint needs the slot's bytes only, and they fill different words of
a record. So the first programs walk chains while the rest fold bytes, one lane a token; neither waits for the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from ..buffers import is_parallel
from ..layout import WORD_BYTES
from .device import INTERPRETED, num_multiprocessors, skipped_entries
from .fold import SOURCE_SIZES, fold_args
from .launch import launch
from .write_chains import walk_long, walk_short
from .write_fold import fold_tokens
from .write_parallel import write_parallel

if TYPE_CHECKING:
    from torch import Tensor

    from ..buffers import VerifyOrWriteContext, WritePlan

_SIZES: Final = [
    "req_capacity",
    "num_tokens",
    "slot_pairs",
    "num_records",
    "num_slots",
    "ring_rows",
    "launch_tag",
    "num_short_programs",
    "num_long_programs",
]


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
    num_short_programs,
    num_long_programs,
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
    SHORT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a batch. Grid: (num_short_programs + num_long_programs + any number that stride over the tokens,)."""
    program = tl.program_id(0)
    words_ptr = canary_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    num_reqs = tl.maximum(tl.minimum(tl.load(num_valid_reqs_ptr), req_capacity), 0)
    if program == 0:
        tl.atomic_add(kernel_counter_ptr, tl.full([], 1, tl.int64), sem="relaxed")
    num_chain_programs = num_short_programs + num_long_programs
    if program < num_short_programs:
        if program * BLOCK_REQS < num_reqs:
            walk_short(
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
                CHECK_INPUT,
                NUM_SOURCES > 0,
                PAIRED,
                BLOCK_REQS,
                SHORT,
            )
    elif program < num_chain_programs:
        for req in range(program - num_short_programs, num_reqs, num_long_programs):
            walk_long(
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
                CHECK_INPUT,
                NUM_SOURCES > 0,
                PAIRED,
                SHORT,
                GROUP,
            )
    elif NUM_SOURCES > 0:
        fold_tokens(
            program - num_chain_programs,
            tl.num_programs(0) - num_chain_programs,
            words_ptr,
            offsets_ptr,
            cache_loc_ptr,
            num_reqs,
            num_tokens,
            slot_pairs,
            num_slots,
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
            PAIRED,
            NUM_SOURCES,
            PAGED,
            CHUNK,
            BLOCK,
        )


_BLOCK_REQS: Final = 16 if INTERPRETED else 32
_GROUP: Final = 4 if INTERPRETED else 32
_SHORT: Final = 2 if INTERPRETED else 4
"""Tokens up to which a request is walked by a lane of a shared warp rather than by a warp of its own."""
_LONG_PROGRAMS_PER_SM: Final = 8
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
    if is_parallel(context):
        write_parallel(
            context=context,
            plan=plan,
            input_ids=input_ids,
            positions=positions,
            out_cache_loc=out_cache_loc,
            enable_write_input_assert=enable_write_input_assert,
            expected_input_tokens=expected_input_tokens,
            expected_input_positions=expected_input_positions,
        )
        return
    canary_buf = context.canary_buf
    num_records, slot_bytes = canary_buf.shape
    paired = slot_bytes % (2 * WORD_BYTES) == 0
    fold = fold_args(context)
    num_tokens = input_ids.shape[0]
    req_capacity = plan.write_seed_slot_indices.shape[0]
    multiprocessors = num_multiprocessors(canary_buf.device)
    short_programs = triton.cdiv(req_capacity, _BLOCK_REQS)
    # No batch of so few tokens has more long requests than this.
    long_programs = min(req_capacity, num_tokens // (_SHORT + 1), _LONG_PROGRAMS_PER_SM * multiprocessors)
    fold_programs = 0
    if fold.num_sources:
        fold_programs = min(triton.cdiv(num_tokens, _BLOCK), _FOLD_PROGRAMS_PER_SM * multiprocessors)
    launch(
        _write_kernel,
        short_programs + long_programs + fold_programs,
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
            short_programs,
            long_programs,
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
            _SHORT,
            _GROUP,
            _BLOCK,
        ),
        num_warps=1,
    )
