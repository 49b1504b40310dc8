"""The write half of a plan: whose tokens are whose, and where each chain goes on from."""

from __future__ import annotations

import triton
import triton.language as tl

from .plan_slots import count_skipped, translate


@triton.jit
def store_write_plan(
    row,  # [BLOCK_REQS] int64: req_pool_indices
    prefix_len,  # [BLOCK_REQS] int64
    extend_len,  # [BLOCK_REQS] int64: 0 for padding rows
    req,  # [BLOCK_REQS] int32
    req_to_token_ptr,
    map_ptr,
    write_offsets_ptr,
    seeds_ptr,
    num_valid_reqs_ptr,
    skipped_ptr,
    num_reqs,
    num_rows,
    row_width,
    row_stride,
    map_len,
    write_offsets_len,
    HAS_MAP: tl.constexpr,
    BLOCK_REQS: tl.constexpr,
):
    """Store write offsets (the tail zeroed), seeds and the number of requests."""
    in_batch = req < num_reqs
    ends = tl.cumsum(extend_len, axis=0)
    tl.store(write_offsets_ptr, tl.zeros([], tl.int64))
    tl.store(write_offsets_ptr + 1 + req, ends, mask=in_batch)
    for first in range(0, write_offsets_len, BLOCK_REQS):
        tail = first + req
        zero = tl.zeros_like(ends)
        tl.store(write_offsets_ptr + tail, zero, mask=(tail > num_reqs) & (tail < write_offsets_len))

    wants_seed = (extend_len > 0) & (prefix_len > 0)
    readable = wants_seed & (row >= 0) & (row < num_rows) & (prefix_len <= row_width)
    seed = tl.load(req_to_token_ptr + row * row_stride + (prefix_len - 1), mask=readable, other=-1).to(tl.int64)
    skipped = wants_seed & ~readable
    if HAS_MAP:
        skipped = skipped | (readable & (seed >= map_len))
        seed = translate(seed, readable, map_ptr, map_len)
    tl.store(seeds_ptr + req, seed, mask=in_batch)
    tl.store(num_valid_reqs_ptr, num_reqs)
    count_skipped(skipped_ptr, tl.sum(skipped.to(tl.int32), axis=0))
