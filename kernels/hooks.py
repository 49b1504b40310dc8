"""The one observer slot that the public launchers call.

Empty, it costs a launcher one branch. A tracing session fills it; whatever stands in it must never raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

    from .buffers import VerifyOrWriteContext, VerifyPlan, WritePlan


class PlanCall(NamedTuple):
    """Arguments of one plan launch, as the caller gave them."""

    verify_plan_out: VerifyPlan
    write_plan_out: WritePlan
    req_pool_indices: torch.Tensor
    prefix_lens: torch.Tensor
    extend_seq_lens: torch.Tensor
    req_to_token: torch.Tensor
    full_to_swa_index_mapping: torch.Tensor | None
    swa_window_size: int
    verify_capacity: int


class VerifyCall(NamedTuple):
    """Arguments of one verify launch."""

    context: VerifyOrWriteContext
    plan: VerifyPlan


class WriteCall(NamedTuple):
    """Arguments of one write launch."""

    context: VerifyOrWriteContext
    plan: WritePlan


Call: TypeAlias = PlanCall | VerifyCall | WriteCall  # type: ignore[operator,unused-ignore]


class LaunchObserver(Protocol):
    """What a session offers to the launchers. No method raises, blocks or synchronises."""

    def begin(self, call: Call) -> None:
        """Before anything of the launch is checked or run."""

    def end(self, call: Call, error: BaseException | None) -> None:
        """After the launch, with the exception that it raised, or None."""


observer: LaunchObserver | None = None


def observed(call: Call, launch: Callable[[], None]) -> None:
    """Run `launch` between the observer's `begin` and `end`; its exception passes through unchanged."""
    seat = observer
    if seat is None:
        launch()
        return
    seat.begin(call)
    try:
        launch()
    except BaseException as error:
        seat.end(call, error)
        raise
    seat.end(call, None)
