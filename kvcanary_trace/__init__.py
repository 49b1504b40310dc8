"""Profiling and tracing for KV-cache canaries: see capacity pressure before the engine raises.

    import kvcanary_trace as kv_canary

    with kv_canary.trace("traces/") as session:
        for batch in engine:
            with kv_canary.step(mode="decode"):
                ...  # launch_canary_plan_kernels, launch_canary_verify_kernel, launch_canary_write_kernel
    print(session.stats)

Names load on first use, so that importing the package costs neither torch nor Arrow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import (
    DatasetError,
    KvCanaryError,
    RunExistsError,
    SchemaError,
    SessionError,
    SettingError,
    WorkloadError,
)

if TYPE_CHECKING:
    from .analysis.lint import lint
    from .integrations.sglang import instrument, uninstrument
    from .kernels.buffers import RealKvSource, VerifyOrWriteContext, VerifyPlan, WritePlan
    from .kernels.chunks import plan_chunks
    from .kernels.layout import CanaryLaunchTag, FailReason, RealKvHashMode
    from .kernels.plan import launch_canary_plan_kernels, launch_plan_entries_kernel, launch_plan_offsets_kernel
    from .kernels.verify import launch_canary_verify_kernel
    from .kernels.write import launch_canary_write_kernel
    from .opening import trace
    from .session import Session
    from .sinks import Sink
    from .sinks.parquet import ParquetSink
    from .stats import TraceStats
    from .steps import step
    from .traced import traced

__version__ = "0.1.0"

_HOME = {
    "CanaryLaunchTag": ".kernels.layout",
    "FailReason": ".kernels.layout",
    "ParquetSink": ".sinks.parquet",
    "RealKvHashMode": ".kernels.layout",
    "RealKvSource": ".kernels.buffers",
    "Session": ".session",
    "Sink": ".sinks",
    "TraceStats": ".stats",
    "VerifyOrWriteContext": ".kernels.buffers",
    "VerifyPlan": ".kernels.buffers",
    "WritePlan": ".kernels.buffers",
    "instrument": ".integrations.sglang",
    "launch_canary_plan_kernels": ".kernels.plan",
    "launch_canary_verify_kernel": ".kernels.verify",
    "launch_canary_write_kernel": ".kernels.write",
    "launch_plan_entries_kernel": ".kernels.plan",
    "launch_plan_offsets_kernel": ".kernels.plan",
    "lint": ".analysis.lint",
    "plan_chunks": ".kernels.chunks",
    "step": ".steps",
    "trace": ".opening",
    "traced": ".traced",
    "uninstrument": ".integrations.sglang",
}

__all__ = [
    "CanaryLaunchTag",
    "DatasetError",
    "FailReason",
    "KvCanaryError",
    "ParquetSink",
    "RealKvHashMode",
    "RealKvSource",
    "RunExistsError",
    "SchemaError",
    "Session",
    "SessionError",
    "SettingError",
    "Sink",
    "TraceStats",
    "VerifyOrWriteContext",
    "VerifyPlan",
    "WorkloadError",
    "WritePlan",
    "__version__",
    "instrument",
    "launch_canary_plan_kernels",
    "launch_canary_verify_kernel",
    "launch_canary_write_kernel",
    "launch_plan_entries_kernel",
    "launch_plan_offsets_kernel",
    "lint",
    "plan_chunks",
    "step",
    "trace",
    "traced",
    "uninstrument",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name], __name__), name)
    globals()[name] = value  # the next look-up costs nothing
    return value


def __dir__() -> list[str]:
    return __all__
