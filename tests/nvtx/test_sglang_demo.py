"""An SGLang-shaped loop under the plugin, no line of it changed: rows, spans, ranges, counters and metrics agree."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from integrations.otlp_receiver import attributes_of, grpc_receiver, http_receiver
from integrations.sglang_peer import unpacked
from launches import rows

LOOP = """
    import os, sys
    os.environ |= {"KVCANARY_TRACE_DIR": sys.argv[1], "KVCANARY_TRACE_RUN": "demo", "OTEL_TRACES_SAMPLER": "always_on"}
    os.environ |= {"OTEL_EXPORTER_OTLP_ENDPOINT": sys.argv[2], "OTEL_EXPORTER_OTLP_PROTOCOL": sys.argv[3]}
    from integrations.sglang_peer import ForwardMode, Server, sglang_importable
    with sglang_importable():
        from sglang.srt.plugins import load_plugins
        load_plugins()
        server = Server()
        server.run(ForwardMode.EXTEND, [0, 0, 0], [6, 4, 5], waiting=2)
        for step in range(4):
            server.run(ForwardMode.DECODE, [6 + step, 4 + step, 5 + step], [1, 1, 1])
        server.run(ForwardMode.EXTEND, [0], [16])
"""
"""The loop calls nothing of this package: `load_plugins` is what SGLang itself does in each process."""
STEPS = range(1, 7)


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_everything_agrees(under_tool: Callable[..., Any], protocol: str, tmp_path: Path) -> None:
    """On bs, demand and coverage, for every step."""
    if protocol == "grpc" and importlib.util.find_spec("grpc") is None:
        pytest.skip("grpcio is not installed: kvcanary-trace[otlp-grpc]")
    unpacked()  # skips where the wheel cannot be had
    with grpc_receiver() if protocol == "grpc" else http_receiver() as received:
        log = under_tool(LOOP, str(tmp_path), received.endpoint, protocol)
    table = {row["step"]: row for row in rows(tmp_path)}
    assert sorted(table) == list(STEPS) and {row["run"] for row in table.values()} == {"demo"}
    steps = [one for one in received.spans if one.name == "kv_canary.step"]
    spans = {attributes_of(one)["kv_canary.step"]: one for one in steps if "kv_canary.runner" in attributes_of(one)}
    turns = {one.span_id for one in steps if "kv_canary.runner" not in attributes_of(one)}
    assert sorted(spans) == list(STEPS) and {one.parent_span_id for one in spans.values()} == turns
    demands = [values["demand"] for _, values in log.samples("verify full")]
    limits = [values["limit"] for _, values in log.samples("verify full")]
    assert demands == [table[step]["verify_demand"] for step in STEPS] == [0, 15, 18, 21, 24, 0]
    assert limits == [table[step]["verify_capacity"] for step in STEPS]
    plans = [event for event in log.of("push") if log.strings.get(event["string"]) == "plan"]
    assert [event["payload"] for event in plans] == [table[step]["bs"] for step in STEPS] == [3, 3, 3, 3, 3, 1]
    for step, row in table.items():
        said = attributes_of(spans[step])
        assert said["kv_canary.bs"] == row["bs"]
        assert said["kv_canary.full.verify_demand"] == row["verify_demand"]
        assert said["kv_canary.full.coverage"] == 1.0 and row["verify_checked"] == row["verify_demand"]
        assert (row["trace_id"], row["span_id"]) == (spans[step].trace_id.hex(), spans[step].span_id.hex())
    assert received.number("kv_canary.verify.demand", group="full") == table[6]["verify_demand"]
    assert sum(point.as_int for point in received.points("kv_canary.entries", outcome="verified")) == 78
    assert sum(point.as_int for point in received.points("kv_canary.steps")) == len(STEPS)
