"""Write launcher: store the canary records of a batch's new tokens."""

from __future__ import annotations

from torch import Tensor

from . import hooks
from .backend import backend_for
from .buffers import VerifyOrWriteContext, WritePlan
from .checks import check_write, wrong_kind

__all__ = ["launch_canary_write_kernel"]


def launch_canary_write_kernel(
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
    """Store one record per new token, each request's chained from its seed slot.

    A record holds the token, its position, the hash of everything before it and the fingerprint of the slot's real K/V
    bytes. Tokens with a negative slot are left out and do not move the chain on. Records are stored whatever the checks
    say: a token or position other than the expected one (with `enable_write_input_assert`), and a position that does
    not follow the one before (with a seed, where `enable_chain_position_assert` is not 0), give a violation row each.

    The Triton backend is safe under CUDA graph capture: no allocation, no readback. The torch backend reads back, and
    must not be captured. Where two requests store into one slot, or one is seeded from a slot that another stores into,
    the torch backend works request after request, like SGLang's reference; on a device such launches race. Under the
    parallel chain two tokens of one request that store into one slot race there too.

    Args:
        context: Buffer, sources and where to report; see `VerifyOrWriteContext`.
        plan: Requests and seeds, as `launch_canary_plan_kernels` filled them.
        input_ids: [num_tokens] int64. Tokens past the plan's last offset are padding.
        positions: [num_tokens] int64.
        out_cache_loc: [num_tokens] int64, the slot of each token, already translated for a sliding-window group.
        enable_write_input_assert: Whether to compare with the two below.
        expected_input_tokens: [num_tokens] int64; None without the comparison.
        expected_input_positions: [num_tokens] int64; None without the comparison.

    Raises:
        TypeError: an argument is no plan, context or tensor.
        ValueError: an argument is not as above; nothing has been written. The torch backend also refuses a slot outside
            the buffer or a source, and offsets past the tokens; the Triton backend leaves such tokens out and counts
            them (`skipped_entries`).

    Source:
        SGLang 0.5.23, `sglang.kernels.ops.kv_canary.write`. Oracle: `tests/oracle.py`.
    """

    def launch() -> None:
        try:
            check_write(
                context=context,
                plan=plan,
                input_ids=input_ids,
                positions=positions,
                out_cache_loc=out_cache_loc,
                enable_write_input_assert=enable_write_input_assert,
                expected_input_tokens=expected_input_tokens,
                expected_input_positions=expected_input_positions,
            )
        except AttributeError as error:
            tokens: dict[str, object] = {"input_ids": input_ids, "positions": positions, "out_cache_loc": out_cache_loc}
            if enable_write_input_assert:
                tokens |= {
                    "expected_input_tokens": expected_input_tokens,
                    "expected_input_positions": expected_input_positions,
                }
            objects: dict[str, tuple[object, type]] = {
                "context": (context, VerifyOrWriteContext),
                "plan": (plan, WritePlan),
            }
            raise wrong_kind(error, tokens, objects) from error
        backend_for(context.canary_buf.device).write(
            context=context,
            plan=plan,
            input_ids=input_ids,
            positions=positions,
            out_cache_loc=out_cache_loc,
            enable_write_input_assert=bool(enable_write_input_assert),
            expected_input_tokens=expected_input_tokens,
            expected_input_positions=expected_input_positions,
        )

    if hooks.observer is None:
        launch()
        return
    hooks.observed(hooks.WriteCall(context, plan), launch)
