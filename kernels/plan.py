"""Plan launchers: turn a batch into the slots to verify and the chains to write."""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor

from . import hooks
from .backend import backend_for
from .buffers import VerifyPlan, WritePlan
from .checks import check_entries, check_offsets, check_overflow, check_plan, wrong_kind
from .layout import MAX_REQS_PER_LAUNCH
from .scratch import scratch_words

__all__ = ["Overflow", "launch_canary_plan_kernels", "launch_plan_entries_kernel", "launch_plan_offsets_kernel"]

Overflow: TypeAlias = Literal["skip", "rotate"]
"""What a plan does with more entries than it holds: check none, or a window that moves on each step."""


def run_plan(
    *,
    verify_plan_out: VerifyPlan,
    write_plan_out: WritePlan,
    req_pool_indices: Tensor,
    prefix_lens: Tensor,
    extend_seq_lens: Tensor,
    req_to_token: Tensor,
    swa_window_size: int,
    full_to_swa_index_mapping: Tensor | None,
    verify_capacity: int,
    req_to_verify_expected_tokens: Tensor | None,
    req_to_verify_expected_tokens_valid_lens: Tensor | None,
    kv_token_id_vs_position_offset: int,
    overflow: Overflow,
    rotate_cursor: Tensor | None,
    max_reqs: int,
) -> None:
    """Check and plan up to `max_reqs` rows, unobserved. Arguments as `launch_canary_plan_kernels` says."""
    check_plan(
        verify_plan_out=verify_plan_out,
        req_pool_indices=req_pool_indices,
        swa_window_size=swa_window_size,
        full_to_swa_index_mapping=full_to_swa_index_mapping,
        verify_capacity=verify_capacity,
        overflow=overflow,
        rotate_cursor=rotate_cursor,
        max_reqs=max_reqs,
    )
    device = verify_plan_out.verify_slot_indices.device
    scratch = scratch_words("plan", device, max_reqs + 1)
    check_offsets(
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        extend_seq_lens=extend_seq_lens,
        req_to_token=req_to_token,
        full_to_swa_index_mapping=full_to_swa_index_mapping,
        out_verify_offsets_scratch=scratch,
        out_write_offsets=write_plan_out.write_offsets,
        out_write_seed_slot_indices=write_plan_out.write_seed_slot_indices,
        out_verify_num_valid=verify_plan_out.verify_num_valid,
        out_verify_enable=verify_plan_out.enable,
        out_write_num_valid_reqs=write_plan_out.write_num_valid_reqs,
        max_reqs=max_reqs,
    )
    check_entries(
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        req_to_token=req_to_token,
        full_to_swa_index_mapping=full_to_swa_index_mapping,
        verify_offsets_scratch=scratch,
        verify_enable=verify_plan_out.enable,
        out_verify_slot_indices=verify_plan_out.verify_slot_indices,
        out_verify_expected_tokens=verify_plan_out.verify_expected_tokens,
        out_verify_expected_positions=verify_plan_out.verify_expected_positions,
        out_verify_prev_slot_indices=verify_plan_out.verify_prev_slot_indices,
        req_to_verify_expected_tokens=req_to_verify_expected_tokens,
        req_to_verify_expected_tokens_valid_lens=req_to_verify_expected_tokens_valid_lens,
        rotate_cursor=rotate_cursor,
        max_reqs=max_reqs,
    )
    backend_for(device).plan(
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        extend_seq_lens=extend_seq_lens,
        req_to_token=req_to_token,
        full_to_swa_index_mapping=full_to_swa_index_mapping,
        verify_offsets_scratch=scratch,
        out_write_offsets=write_plan_out.write_offsets,
        out_write_seed_slot_indices=write_plan_out.write_seed_slot_indices,
        out_verify_num_valid=verify_plan_out.verify_num_valid,
        out_verify_enable=verify_plan_out.enable,
        out_write_num_valid_reqs=write_plan_out.write_num_valid_reqs,
        out_verify_slot_indices=verify_plan_out.verify_slot_indices,
        out_verify_expected_tokens=verify_plan_out.verify_expected_tokens,
        out_verify_expected_positions=verify_plan_out.verify_expected_positions,
        out_verify_prev_slot_indices=verify_plan_out.verify_prev_slot_indices,
        swa_window_size=int(swa_window_size),
        req_to_verify_expected_tokens=req_to_verify_expected_tokens,
        req_to_verify_expected_tokens_valid_lens=req_to_verify_expected_tokens_valid_lens,
        kv_token_id_vs_position_offset=int(kv_token_id_vs_position_offset),
        overflow_rotate=overflow == "rotate",
        rotate_cursor=rotate_cursor,
    )


def launch_canary_plan_kernels(
    *,
    verify_plan_out: VerifyPlan,
    write_plan_out: WritePlan,
    req_pool_indices: Tensor,
    prefix_lens: Tensor,
    extend_seq_lens: Tensor,
    req_to_token: Tensor,
    swa_window_size: int,
    full_to_swa_index_mapping: Tensor | None,
    verify_capacity: int,
    req_to_verify_expected_tokens: Tensor | None,
    req_to_verify_expected_tokens_valid_lens: Tensor | None,
    kv_token_id_vs_position_offset: int,
    overflow: Overflow = "skip",
    rotate_cursor: Tensor | None = None,
) -> None:
    """Fill a verify plan and a write plan from one batch.

    Every request with `req_pool_indices != 0` gives one verify entry per cached position in its window, and a chain to
    write. `demand` is the number of entries. Where it exceeds `verify_capacity`, `enable` becomes 0 and nothing will be
    verified ("skip", SGLang's way), or a window of `verify_capacity` entries is planned ("rotate"): the entries from
    `rotate_cursor % demand` on, around the end; the cursor then moves on by the capacity, so that an unchanged batch is
    checked whole in `ceil(demand / verify_capacity)` steps. The write plan is filled in any case.

    The Triton backend is safe under CUDA graph capture: no readback, and no allocation but the graph's own scratch. The
    torch backend reads back, and must not be captured.

    Args:
        verify_plan_out: Out. Entries past `verify_num_valid` keep what they held.
        write_plan_out: Out. `write_offsets` is written in full; seeds past the batch keep what they held.
        req_pool_indices: [bs] int64, rows of `req_to_token`; 0 is a padding row. `bs` is at most 4096.
        prefix_lens: [bs] int64, tokens cached before this step. Below 0 counts as 0.
        extend_seq_lens: [bs] int64, tokens written in this step. Below 0 counts as 0.
        req_to_token: [max_reqs, max_seq_len] int32, the slot of each position.
        swa_window_size: Positions verified per request; 0 and below: all.
        full_to_swa_index_mapping: [map_len] int64, applied to every slot that is not negative. Required with a window.
        verify_capacity: `verify_plan_out.verify_slot_indices.shape[0]`.
        req_to_verify_expected_tokens: [rows, width] int32, the token of each position, or None.
        req_to_verify_expected_tokens_valid_lens: [bs] int64, how much of a row counts. Required with the tokens.
        kv_token_id_vs_position_offset: Added to a position to find its token: 0, or 1 for a draft model.
        overflow: "skip" or "rotate".
        rotate_cursor: [1] int64, moved on by the launch. Required for "rotate".

    Raises:
        TypeError: an argument is no plan or tensor.
        ValueError: an argument is not as above; nothing has been written. The torch backend also refuses a prefix past
            its row and a slot past the map; the Triton backend leaves such entries out and counts them
            (`skipped_entries`).

    Source:
        SGLang 0.5.23, `sglang.kernels.ops.kv_canary.plan.api`. Oracle: `tests/oracle.py`.
    """

    def launch() -> None:
        try:
            run_plan(
                verify_plan_out=verify_plan_out,
                write_plan_out=write_plan_out,
                req_pool_indices=req_pool_indices,
                prefix_lens=prefix_lens,
                extend_seq_lens=extend_seq_lens,
                req_to_token=req_to_token,
                swa_window_size=swa_window_size,
                full_to_swa_index_mapping=full_to_swa_index_mapping,
                verify_capacity=verify_capacity,
                req_to_verify_expected_tokens=req_to_verify_expected_tokens,
                req_to_verify_expected_tokens_valid_lens=req_to_verify_expected_tokens_valid_lens,
                kv_token_id_vs_position_offset=kv_token_id_vs_position_offset,
                overflow=overflow,
                rotate_cursor=rotate_cursor,
                max_reqs=MAX_REQS_PER_LAUNCH,
            )
        except AttributeError as error:
            tensors = {
                "req_pool_indices": req_pool_indices,
                "prefix_lens": prefix_lens,
                "extend_seq_lens": extend_seq_lens,
                "req_to_token": req_to_token,
            }
            optional = {
                "full_to_swa_index_mapping": full_to_swa_index_mapping,
                "req_to_verify_expected_tokens": req_to_verify_expected_tokens,
                "req_to_verify_expected_tokens_valid_lens": req_to_verify_expected_tokens_valid_lens,
                "rotate_cursor": rotate_cursor,
            }
            given = {name: tensor for name, tensor in optional.items() if tensor is not None}
            objects: dict[str, tuple[object, type]] = {
                "verify_plan_out": (verify_plan_out, VerifyPlan),
                "write_plan_out": (write_plan_out, WritePlan),
            }
            raise wrong_kind(error, tensors | given, objects) from error

    if hooks.observer is None:
        launch()
        return
    hooks.observed(
        hooks.PlanCall(
            verify_plan_out,
            write_plan_out,
            req_pool_indices,
            prefix_lens,
            extend_seq_lens,
            req_to_token,
            full_to_swa_index_mapping,
            swa_window_size,
            verify_capacity,
        ),
        launch,
    )


def launch_plan_offsets_kernel(
    *,
    req_pool_indices: Tensor,
    prefix_lens: Tensor,
    extend_seq_lens: Tensor,
    req_to_token: Tensor,
    full_to_swa_index_mapping: Tensor | None,
    out_verify_offsets_scratch: Tensor,
    out_write_offsets: Tensor,
    out_write_seed_slot_indices: Tensor,
    out_verify_num_valid: Tensor,
    out_verify_enable: Tensor,
    out_write_num_valid_reqs: Tensor,
    swa_window_size: int,
    verify_capacity: int,
    overflow: Overflow = "skip",
) -> None:
    """The first half of a plan: prefix sums, seeds and totals.

    Safe under CUDA graph capture on the Triton backend: no allocation, no readback.

    Args:
        req_pool_indices: [bs] int64, and so `prefix_lens` and `extend_seq_lens`; see `launch_canary_plan_kernels`.
        prefix_lens: [bs] int64.
        extend_seq_lens: [bs] int64.
        req_to_token: [max_reqs, max_seq_len] int32.
        full_to_swa_index_mapping: [map_len] int64, or None.
        out_verify_offsets_scratch: [>= 4097] int64. Out: where each request's entries start; at `[bs]` the demand,
            unclamped.
        out_write_offsets: [write_req_capacity + 1] int64. Out, in full: exclusive prefix sum of the tokens written.
        out_write_seed_slot_indices: [write_req_capacity] int64. Out, the first `bs`: slot before the first token.
        out_verify_num_valid: [1] int32. Out: the demand, clamped to the capacity.
        out_verify_enable: [1] int32. Out: 0 where the demand exceeds the capacity and `overflow` is "skip", else 1.
        out_write_num_valid_reqs: [1] int32. Out: `bs`, padding included.
        swa_window_size: Positions verified per request; 0 and below: all.
        verify_capacity: Entries that the verify plan holds.
        overflow: "skip" or "rotate".

    Raises:
        ValueError: as `launch_canary_plan_kernels`; nothing has been written.

    Source:
        SGLang 0.5.23, `sglang.kernels.ops.kv_canary.plan.offsets_kernel`. Oracle: `tests/oracle.py`.
    """
    if overflow != "skip":
        check_overflow(overflow, out_verify_enable)  # the cursor belongs to the entries
    check_offsets(
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        extend_seq_lens=extend_seq_lens,
        req_to_token=req_to_token,
        full_to_swa_index_mapping=full_to_swa_index_mapping,
        out_verify_offsets_scratch=out_verify_offsets_scratch,
        out_write_offsets=out_write_offsets,
        out_write_seed_slot_indices=out_write_seed_slot_indices,
        out_verify_num_valid=out_verify_num_valid,
        out_verify_enable=out_verify_enable,
        out_write_num_valid_reqs=out_write_num_valid_reqs,
    )
    backend_for(out_verify_offsets_scratch.device).plan_offsets(
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        extend_seq_lens=extend_seq_lens,
        req_to_token=req_to_token,
        full_to_swa_index_mapping=full_to_swa_index_mapping,
        out_verify_offsets_scratch=out_verify_offsets_scratch,
        out_write_offsets=out_write_offsets,
        out_write_seed_slot_indices=out_write_seed_slot_indices,
        out_verify_num_valid=out_verify_num_valid,
        out_verify_enable=out_verify_enable,
        out_write_num_valid_reqs=out_write_num_valid_reqs,
        swa_window_size=int(swa_window_size),
        verify_capacity=int(verify_capacity),
        overflow_rotate=overflow == "rotate",
    )


def launch_plan_entries_kernel(
    *,
    req_pool_indices: Tensor,
    prefix_lens: Tensor,
    req_to_token: Tensor,
    full_to_swa_index_mapping: Tensor | None,
    verify_offsets_scratch: Tensor,
    verify_enable: Tensor,
    req_to_verify_expected_tokens: Tensor | None,
    req_to_verify_expected_tokens_valid_lens: Tensor | None,
    out_verify_slot_indices: Tensor,
    out_verify_expected_tokens: Tensor,
    out_verify_expected_positions: Tensor,
    out_verify_prev_slot_indices: Tensor,
    kv_token_id_vs_position_offset: int,
    swa_window_size: int,
    rotate_cursor: Tensor | None = None,
) -> None:
    """The second half of a plan: one verify entry per cached position.

    Safe under CUDA graph capture on the Triton backend: no allocation, no readback.

    Args:
        req_pool_indices: [bs] int64; the inputs are those of `launch_canary_plan_kernels`.
        prefix_lens: [bs] int64.
        req_to_token: [max_reqs, max_seq_len] int32.
        full_to_swa_index_mapping: [map_len] int64, or None.
        verify_offsets_scratch: [>= bs + 1] int64, as `launch_plan_offsets_kernel` filled it.
        verify_enable: [1] int32. 0: nothing is stored.
        req_to_verify_expected_tokens: [rows, width] int32, or None.
        req_to_verify_expected_tokens_valid_lens: [bs] int64. Required with the tokens.
        out_verify_slot_indices: [verify_capacity] int64. Out, as the three below: the first `demand` entries.
        out_verify_expected_tokens: [verify_capacity] int64. Out, -1 where no token is known.
        out_verify_expected_positions: [verify_capacity] int64. Out.
        out_verify_prev_slot_indices: [verify_capacity] int64. Out, -1 at a chain head.
        kv_token_id_vs_position_offset: Added to a position to find its token.
        swa_window_size: Positions verified per request; 0 and below: all.
        rotate_cursor: [1] int64, where the offsets were made with overflow="rotate"; moved on if they overflowed.

    Raises:
        ValueError: as `launch_canary_plan_kernels`; nothing has been written.

    Source:
        SGLang 0.5.23, `sglang.kernels.ops.kv_canary.plan.entries_kernel`. Oracle: `tests/oracle.py`.
    """
    check_entries(
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        req_to_token=req_to_token,
        full_to_swa_index_mapping=full_to_swa_index_mapping,
        verify_offsets_scratch=verify_offsets_scratch,
        verify_enable=verify_enable,
        out_verify_slot_indices=out_verify_slot_indices,
        out_verify_expected_tokens=out_verify_expected_tokens,
        out_verify_expected_positions=out_verify_expected_positions,
        out_verify_prev_slot_indices=out_verify_prev_slot_indices,
        req_to_verify_expected_tokens=req_to_verify_expected_tokens,
        req_to_verify_expected_tokens_valid_lens=req_to_verify_expected_tokens_valid_lens,
        rotate_cursor=rotate_cursor,
    )
    backend_for(verify_offsets_scratch.device).plan_entries(
        req_pool_indices=req_pool_indices,
        prefix_lens=prefix_lens,
        req_to_token=req_to_token,
        full_to_swa_index_mapping=full_to_swa_index_mapping,
        verify_offsets_scratch=verify_offsets_scratch,
        verify_enable=verify_enable,
        out_verify_slot_indices=out_verify_slot_indices,
        out_verify_expected_tokens=out_verify_expected_tokens,
        out_verify_expected_positions=out_verify_expected_positions,
        out_verify_prev_slot_indices=out_verify_prev_slot_indices,
        swa_window_size=int(swa_window_size),
        req_to_verify_expected_tokens=req_to_verify_expected_tokens,
        req_to_verify_expected_tokens_valid_lens=req_to_verify_expected_tokens_valid_lens,
        kv_token_id_vs_position_offset=int(kv_token_id_vs_position_offset),
        rotate_cursor=rotate_cursor,
    )
