"""The torch backend: vectorised, on any device, the CPU's default.

CPU tensors are worked on in place through numpy views (`host_*`): native unsigned words, cache-sized chunks, no copies.
Tensors of any other device go through torch's int64 operations (`tensor_*`). Both read back, so neither may be captured
into a CUDA graph; both refuse what lies outside a buffer, a map or a row before anything is written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..buffers import VerifyOrWriteContext, VerifyPlan, WritePlan
from . import host_plan, host_verify, host_write, tensor_plan, tensor_verify, tensor_write

__all__ = ["plan", "plan_entries", "plan_offsets", "skipped_entries", "verify", "write"]

_skipped: dict[torch.device, Tensor] = {}


def _on_host(tensor: Tensor) -> bool:
    return tensor.is_cpu


def plan(**arguments: Any) -> None:
    """`plan_offsets` and `plan_entries` in one go, so that a refusal of either leaves everything as it was."""
    host = _on_host(arguments["req_pool_indices"])
    (host_plan if host else tensor_plan).plan(**arguments)


def plan_offsets(**arguments: Any) -> None:
    """Scan a batch into offsets, seeds and totals. Arguments as `launch_plan_offsets_kernel` checks them."""
    host = _on_host(arguments["req_pool_indices"])
    (host_plan if host else tensor_plan).plan_offsets(**arguments)


def plan_entries(**arguments: Any) -> None:
    """Store the entries that the offsets describe. Arguments as `launch_plan_entries_kernel` checks them."""
    host = _on_host(arguments["req_pool_indices"])
    (host_plan if host else tensor_plan).plan_entries(**arguments)


def verify(*, context: VerifyOrWriteContext, plan: VerifyPlan, check_verify_expected_token: bool) -> None:
    """Check every entry of a plan. Arguments as `launch_canary_verify_kernel` checks them."""
    backend = host_verify if _on_host(context.canary_buf) else tensor_verify
    backend.verify(context=context, plan=plan, check_verify_expected_token=check_verify_expected_token)


def write(*, context: VerifyOrWriteContext, plan: WritePlan, **arguments: Any) -> None:
    """Write the records of a batch's new tokens. Arguments as `launch_canary_write_kernel` checks them."""
    backend = host_write if _on_host(context.canary_buf) else tensor_write
    backend.write(context=context, plan=plan, **arguments)


def skipped_entries(device: torch.device) -> Tensor:
    """Entries left out because they lay outside a buffer, a map or a row: none, this backend refuses them.

    Returns:
        [1] int64 on `device`, always 0.
    """
    counter = _skipped.get(device)
    if counter is None:
        counter = _skipped.setdefault(device, torch.zeros(1, dtype=torch.int64, device=device))
    return counter
