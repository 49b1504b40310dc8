"""Plan, verify and write kernels of a KV canary, in torch and in Triton, behind one set of launchers.

Names load on first use: `kvcanary_trace.kernels.layout` costs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "CanaryLaunchTag": "layout",
    "FailReason": "layout",
    "RealKvHashMode": "layout",
    "RealKvSource": "buffers",
    "VerifyOrWriteContext": "buffers",
    "VerifyPlan": "buffers",
    "WritePlan": "buffers",
    "launch_canary_plan_kernels": "plan",
    "launch_canary_verify_kernel": "verify",
    "launch_canary_write_kernel": "write",
    "launch_plan_entries_kernel": "plan",
    "launch_plan_offsets_kernel": "plan",
    "plan_chunks": "chunks",
    "warmup": "prepare",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_HOME[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return __all__
