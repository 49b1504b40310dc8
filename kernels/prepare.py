"""Compile ahead of traffic: every kernel variant that a configuration can need, before the first request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .backend import backend_for
from .buffers import VerifyOrWriteContext, VerifyPlan, WritePlan, is_parallel
from .layout import MAX_REQS_PER_LAUNCH, VERIFY_OFFSETS_SCRATCH_LEN

__all__ = ["warmup"]

_SMALLEST_BLOCK = 16
_MANY_TOKENS = 4096
"""Tokens for which the parallel chain takes its kernels for long batches."""


def warmup(
    contexts: Sequence[VerifyOrWriteContext] = (),
    *,
    device: torch.device | str | None = None,
    max_reqs: int = MAX_REQS_PER_LAUNCH,
    swa: bool = True,
    expected_tokens: bool = True,
    rotate: bool = False,
) -> int:
    """Compile and load every variant of the kernels that a configuration launches, so that none compiles in traffic.

    A variant is what the kernels are specialised on: the batch size rounded up to a power of two, maps, expected
    tokens and rotation for plan; the chain, the number of sources, paging and bytes of a context, and the checks asked
    for, for verify and write. Run it before capturing CUDA graphs: the first launch on a device also allocates the
    counter of skipped entries. On the torch backend there is nothing to compile.

    Args:
        contexts: The contexts that will be launched, or ones like them: of each, sources, mode, chain and device count.
            Their buffers, rings and counters are not touched.
        device: Where plan runs; the first context's device, or else the current CUDA device.
        max_reqs: The largest batch, padding included.
        swa: Whether a sliding-window map will be given.
        expected_tokens: Whether expected tokens will be given to plan, and verify and write be asked to compare.
        rotate: Whether `overflow="rotate"` will be used.

    Returns:
        How many launches it took, each a variant.

    Raises:
        ValueError: `max_reqs` is below 1 or above 4096.
    """
    if not 1 <= max_reqs <= MAX_REQS_PER_LAUNCH:
        raise ValueError(f"kv-canary: warmup max_reqs must be in [1, {MAX_REQS_PER_LAUNCH}], got {max_reqs}")
    if device is None:
        device = contexts[0].canary_buf.device if contexts else torch.device("cuda", torch.cuda.current_device())
    where = torch.device(device)
    launches = 0
    num_reqs = 1
    while True:
        for has_map in (False, True) if swa else (False,):
            for has_pool in (False, True) if expected_tokens else (False,):
                for rotates in (False, True) if rotate else (False,):
                    _plan(where, num_reqs, has_map, has_pool, rotates)
                    launches += 1
        if num_reqs >= max_reqs:
            break
        num_reqs = min(max(_SMALLEST_BLOCK, num_reqs) * 2, max_reqs)
    for context in contexts:
        for checks in (False, True) if expected_tokens else (False,):
            launches += _verify_and_write(context, checks)
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    return launches


def _plan(device: torch.device, num_reqs: int, has_map: bool, has_pool: bool, rotates: bool) -> None:
    padding = torch.zeros(num_reqs, dtype=torch.int64, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    verify_plan = VerifyPlan.allocate(verify_capacity=1, device=device)
    write_plan = WritePlan.allocate(write_req_capacity=num_reqs, device=device)
    backend_for(device).plan(
        req_pool_indices=padding,
        prefix_lens=padding,
        extend_seq_lens=padding,
        req_to_token=table,
        full_to_swa_index_mapping=padding if has_map else None,
        verify_offsets_scratch=torch.empty(VERIFY_OFFSETS_SCRATCH_LEN, dtype=torch.int64, device=device),
        out_write_offsets=write_plan.write_offsets,
        out_write_seed_slot_indices=write_plan.write_seed_slot_indices,
        out_write_num_valid_reqs=write_plan.write_num_valid_reqs,
        out_verify_num_valid=verify_plan.verify_num_valid,
        out_verify_enable=verify_plan.enable,
        out_verify_slot_indices=verify_plan.verify_slot_indices,
        out_verify_expected_tokens=verify_plan.verify_expected_tokens,
        out_verify_expected_positions=verify_plan.verify_expected_positions,
        out_verify_prev_slot_indices=verify_plan.verify_prev_slot_indices,
        swa_window_size=0,
        req_to_verify_expected_tokens=table if has_pool else None,
        req_to_verify_expected_tokens_valid_lens=padding if has_pool else None,
        kv_token_id_vs_position_offset=0,
        overflow_rotate=rotates,
        rotate_cursor=torch.zeros(1, dtype=torch.int64, device=device) if rotates else None,
    )


def _verify_and_write(context: VerifyOrWriteContext, checks: bool) -> int:
    """Launch on empty plans and on outputs of our own: sources are passed on, and not read. How many launches."""
    device = context.canary_buf.device
    counters = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2)]
    own = replace(
        context,
        canary_buf=torch.empty(1, context.canary_buf.shape[1], dtype=torch.uint8, device=device),
        violation_ring=torch.empty(1, context.violation_ring.shape[1], dtype=torch.int64, device=device),
        violation_write_index=torch.zeros(1, dtype=torch.int32, device=device),
        slot_run_counter=counters[0],
        kernel_run_counter=counters[1],
    )
    verify_plan = VerifyPlan.allocate(verify_capacity=1, device=device)
    verify_plan.verify_num_valid.zero_()
    write_plan = WritePlan.allocate(write_req_capacity=1, device=device)
    write_plan.write_offsets.zero_()
    write_plan.write_num_valid_reqs.zero_()
    backend = backend_for(device)
    backend.verify(context=own, plan=verify_plan, check_verify_expected_token=checks)
    sizes = (1, _MANY_TOKENS) if is_parallel(context) else (1,)
    for num_tokens in sizes:
        tokens = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        backend.write(
            context=own,
            plan=write_plan,
            input_ids=tokens,
            positions=tokens,
            out_cache_loc=tokens,
            enable_write_input_assert=checks,
            expected_input_tokens=tokens if checks else None,
            expected_input_positions=tokens if checks else None,
        )
    return 1 + len(sizes)
