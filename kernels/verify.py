"""Verify: does every planned slot hold what its chain says?"""

from __future__ import annotations

from . import hooks
from .backend import backend_for
from .buffers import VerifyOrWriteContext, VerifyPlan
from .checks import check_verify


def launch_canary_verify_kernel(
    *, context: VerifyOrWriteContext, plan: VerifyPlan, check_verify_expected_token: bool
) -> None:
    """Compare the planned slots of one canary buffer with their chain, positions, K/V fingerprints and, if asked, tokens.

    Runs nothing while `plan.enable` is 0, but counts the launch. An entry of slot 0 is counted and not verified; a
    predecessor slot 0 leaves out the chain check alone. All mismatches of an entry go into one violation row. Safe under
    CUDA graph capture: no allocation, no readback.

    Args:
        context: Buffer, sources, ring and counters. `violation_ring` and the counters are in and out; the buffer is read.
        plan: From `launch_canary_plan_kernels`, or filled by hand (a sweep).
        check_verify_expected_token: Compare stored tokens with `plan.verify_expected_tokens` where these are not -1.

    Raises:
        ValueError: An argument is ill-shaped, ill-typed, misplaced or not contiguous; in torch also a planned slot outside
            the buffer. Nothing has been written then.

    Source:
        SGLang's `launch_canary_verify_kernel`, whose results these are. Oracle: `tests/oracle.py`.
    """

    def launch() -> None:
        check_verify(context, plan)
        backend_for(context.canary_buf.device).verify(
            context=context, plan=plan, check_verify_expected_token=check_verify_expected_token
        )

    if hooks.observer is None:
        launch()
        return
    hooks.observed(hooks.VerifyCall(context, plan), launch)
