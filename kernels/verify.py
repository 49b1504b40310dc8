"""Verify launcher: compare canary slots with what a plan expects of them."""

from __future__ import annotations

from . import hooks
from .backend import backend_for
from .buffers import VerifyOrWriteContext, VerifyPlan
from .checks import check_verify, wrong_kind

__all__ = ["launch_canary_verify_kernel"]


def launch_canary_verify_kernel(
    *, context: VerifyOrWriteContext, plan: VerifyPlan, check_verify_expected_token: bool
) -> None:
    """Check every entry of a plan against one canary buffer, and append a violation row for each that fails.

    An entry fails where the slot's chain hash is not that of its predecessor (of the anchor, at a chain head), its
    position not the expected one, its fingerprint not that of the real K/V bytes, or, if asked, its token not the
    expected one; the reasons are OR-ed into one row. Entries whose chain hash follows the other chain than the context
    declares are no mismatches: the first of them gives one row, `VERIFY_WRONG_CHAIN`, for the launch. Slot 0 is counted
    and not checked. With `plan.enable` 0 nothing is checked, and only `kernel_run_counter` moves on. The canary buffer
    is only read.

    The Triton backend is safe under CUDA graph capture: no allocation, no readback. The torch backend reads back, and
    must not be captured; its violation rows come in entry order, the other chain's last.

    Args:
        context: Buffer, sources and where to report; see `VerifyOrWriteContext`.
        plan: Entries, as `launch_canary_plan_kernels` filled them.
        check_verify_expected_token: Whether to compare tokens, where the plan knows them (not -1).

    Raises:
        TypeError: an argument is no plan or context, or a part of it no tensor.
        ValueError: an argument is not as `VerifyOrWriteContext` and `VerifyPlan` say, or has over four sources; nothing
            has been written. The torch backend also refuses a slot outside the buffer or a source; the Triton backend
            leaves such entries out and counts them (`skipped_entries`).

    Source:
        SGLang 0.5.23, `sglang.kernels.ops.kv_canary.verify`. Oracle: `tests/oracle.py`.
    """

    def launch() -> None:
        try:
            check_verify(context=context, plan=plan)
        except AttributeError as error:
            raise wrong_kind(
                error, {}, {"context": (context, VerifyOrWriteContext), "plan": (plan, VerifyPlan)}
            ) from error
        backend_for(context.canary_buf.device).verify(
            context=context, plan=plan, check_verify_expected_token=bool(check_verify_expected_token)
        )

    if hooks.observer is None:
        launch()
        return
    hooks.observed(hooks.VerifyCall(context, plan), launch)
