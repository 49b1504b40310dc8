"""Write: a record for every new token, chained to the one before it."""

from __future__ import annotations

import torch

from . import hooks
from .backend import backend_for
from .buffers import VerifyOrWriteContext, WritePlan
from .checks import check_write


def launch_canary_write_kernel(
    *,
    context: VerifyOrWriteContext,
    plan: WritePlan,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    out_cache_loc: torch.Tensor,
    enable_write_input_assert: bool,
    expected_input_tokens: torch.Tensor | None,
    expected_input_positions: torch.Tensor | None,
) -> None:
    """Store the canary records of the forward's new tokens.

    A token is stored as it came, whatever the checks say. Checked are its token and position against the expected ones, if
    given, and, where the chain has a seed and `context.enable_chain_position_assert` is not 0, that its position follows
    the one before. Safe under CUDA graph capture: no allocation, no readback.

    Args:
        context: Buffer, sources, ring and counters, all in and out but the sources.
        plan: From `launch_canary_plan_kernels`.
        input_ids: [tokens] int64.
        positions: [tokens] int64, each token's position in its sequence.
        out_cache_loc: [tokens] int64, the slot of each token, translated for the group by the caller; negative: skip.
        enable_write_input_assert: Compare with the two expected tensors, which must be given then and be None otherwise.
        expected_input_tokens: [tokens] int64 or None.
        expected_input_positions: [tokens] int64 or None.

    Raises:
        ValueError: An argument is ill-shaped, ill-typed, misplaced or not contiguous; in torch also a slot outside the
            buffer. Nothing has been written then.

    Source:
        SGLang's `launch_canary_write_kernel`, whose results these are. Oracle: `tests/oracle.py`.
    """

    def launch() -> None:
        check_write(
            context,
            plan,
            input_ids,
            positions,
            out_cache_loc,
            enable_write_input_assert,
            expected_input_tokens,
            expected_input_positions,
        )
        backend_for(context.canary_buf.device).write(
            context=context,
            plan=plan,
            input_ids=input_ids,
            positions=positions,
            out_cache_loc=out_cache_loc,
            enable_write_input_assert=enable_write_input_assert,
            expected_input_tokens=expected_input_tokens,
            expected_input_positions=expected_input_positions,
        )

    if hooks.observer is None:
        launch()
        return
    hooks.observed(hooks.WriteCall(context, plan), launch)
