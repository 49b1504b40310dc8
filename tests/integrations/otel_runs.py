"""What tests of OpenTelemetry share: an environment without `OTEL_*`, and a run with everything worth telling in it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from launches import Engine, rows

import kvcanary_trace as kv_canary
from kvcanary_trace.kernels import CanaryLaunchTag
from kvcanary_trace.sinks.otel import OtelSink, OtelStats


def clear_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of OpenTelemetry is set."""
    for name in os.environ:
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


def telling_run(directory: Path, sink: OtelSink | None = None) -> tuple[list[dict[str, Any]], OtelStats]:
    """Seven steps: two calm, two of both groups, one with violations, one that overflows, one that fails.

    Returns:
        The rows of the dataset, and what was exported.
    """
    full, swa = Engine(verify_capacity=100), Engine(verify_capacity=50, tag=CanaryLaunchTag.HEAD_K_SWA, window=8)
    sink = sink or OtelSink(everything=False)
    with kv_canary.trace([directory, sink], write_entry_capacity=64) as session:
        for prefix_len in (5, 6):
            with kv_canary.step(mode="decode", kv_used=20, kv_capacity=200, waiting_reqs=1):
                full.forward(2, prefix_len)
        for prefix_len in (10, 12):
            with kv_canary.step(mode="prefill"):
                full.forward(2, prefix_len)
                swa.forward(2, prefix_len)
        with kv_canary.step(mode="decode"):
            full.plan([1, 2], [10, 10], [1, 1])
            full.verify(lambda: full.violate(3))
            full.write()
        with kv_canary.step(mode="decode"):
            full.forward(4, 30)
        with pytest.raises(RuntimeError):
            failing_step(full)
        assert session.flush(10)
    return rows(directory), sink.stats


def failing_step(engine: Engine) -> None:
    """A step that the engine gives up after its plan."""
    with kv_canary.step(mode="decode"):
        engine.plan([1], [5], [1])
        raise RuntimeError("canary: batch of 9 exceeds write_req_capacity=8")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings and worse, of any library; what the monitor says of capacities is no failure."""
    failures = [record for record in caplog.records if record.name != "kvcanary_trace.pressure"]
    return [record.getMessage() for record in failures if record.levelno >= logging.WARNING]
