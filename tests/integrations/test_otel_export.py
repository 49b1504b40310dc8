"""Spans, metrics and log records over real HTTP and gRPC, beside the rows of the dataset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from integrations.otel_runs import clear_environment, telling_run
from integrations.otlp_receiver import Received, attributes_of, grpc_receiver, http_receiver, value_of
from launches import Engine, rows

import kvcanary_trace as kv_canary
from kvcanary_trace.sinks import otel_host, otel_names
from kvcanary_trace.sinks.otel import OtelSink

STEP = otel_names.SPAN_STEP


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_environment(monkeypatch)


@pytest.fixture(params=["http/protobuf", "grpc"])
def receiver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Received]:
    """A receiver of either protocol that the environment points to."""
    if request.param == "grpc":
        pytest.importorskip("grpc")
        pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
    with grpc_receiver() if request.param == "grpc" else http_receiver() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", request.param)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.endpoint)
        yield received


@pytest.fixture
def http(monkeypatch: pytest.MonkeyPatch) -> Iterator[Received]:
    """An HTTP receiver that the environment points to."""
    with http_receiver() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.endpoint)
        yield received


def steps_of(received: Received) -> dict[int, Any]:
    """Step spans by step."""
    return {attributes_of(span)["kv_canary.step"]: span for span in received.spans if span.name == STEP}


def test_all_agree_on_every_step(receiver: Received, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every step sampled: spans, metrics and rows say the same of bs, demand, coverage, ids and children."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    table, stats = telling_run(tmp_path)
    steps = steps_of(receiver)
    assert sorted(steps) == sorted({row["step"] for row in table}) == list(range(7))
    assert len(table) == 9
    for row in table:
        span, group = steps[row["step"]], row["group"]
        said = attributes_of(span)
        assert (row["trace_id"], row["span_id"]) == (span.trace_id.hex(), span.span_id.hex())
        assert said["kv_canary.kept"] == "sampled" and said["kv_canary.mode"] == row["mode"]
        assert said["kv_canary.run"] == row["run"] and said["kv_canary.rank"] == row["rank"] == 0
        assert said["kv_canary.bs"] == row["bs"] and said["kv_canary.step"] == row["step"]
        for name in otel_names.GROUP_COLUMNS:
            assert said.get(f"kv_canary.{group}.{name}") == row[name], name
        children = [one for one in receiver.spans if one.parent_span_id == span.span_id]
        mine = {one.name: one for one in children if attributes_of(one)["kv_canary.group"] == group}
        phases = {f"kv_canary.{phase}" for phase in ("plan", "verify", "write") if row[f"{phase}_ns"] is not None}
        assert set(mine) == phases
        for child in mine.values():
            assert child.trace_id == span.trace_id
            assert span.start_time_unix_nano <= child.start_time_unix_nano <= child.end_time_unix_nano
            assert child.end_time_unix_nano <= span.end_time_unix_nano
        assert attributes_of(mine["kv_canary.plan"])["kv_canary.verify_demand"] == row["verify_demand"]
    assert attributes_of(steps[0])["kv_canary.full.coverage"] == 1.0
    assert attributes_of(steps[5])["kv_canary.full.coverage"] == 0.0
    assert receiver.number("kv_canary.verify.demand", group="full") == table[-1]["verify_demand"]
    assert receiver.number("kv_canary.verify.demand", group="swa") == 16
    assert stats.spans == len(receiver.spans) and stats.spans_dropped == stats.metrics_dropped == 0
    assert stats.log_records == len(receiver.records)


def test_metrics_of_a_run(http: Received, tmp_path: Path) -> None:
    """Every metric that is documented arrives, with the documented unit, and counts what the rows hold."""
    table, _ = telling_run(tmp_path)
    assert {name: metric.unit for name, metric in http.metrics.items()} == {m.name: m.unit for m in otel_names.METRICS}
    of_full = {"group": "full", "runner": "target"}
    total = {"demand": 0, "verified": 0}
    for row in table:
        total["demand"] += row["verify_demand"]
        total["verified"] += row["verify_checked"] or 0
    entries = {
        outcome: sum(point.as_int for point in http.points("kv_canary.entries", outcome=outcome))
        for outcome in ("verified", "unverified")
    }
    assert entries == {"verified": total["verified"], "unverified": total["demand"] - total["verified"]}
    assert sum(point.as_int for point in http.points("kv_canary.steps")) == 7
    assert http.number("kv_canary.steps", mode="prefill") == 2
    assert http.number("kv_canary.unverified_steps", reason="overflow", **of_full) == 1
    assert http.number("kv_canary.unverified_steps", reason="error", **of_full) == 1
    (errors,) = http.points("kv_canary.errors")
    assert attributes_of(errors)["error.type"] == "bs-exceeds-write-req-capacity" and errors.as_int == 1
    (violations,) = http.points("kv_canary.violations")
    assert violations.as_int == 3 and "CHAIN" in attributes_of(violations)["kv_canary.reasons"]
    assert http.number("kv_canary.capacity.utilization", capacity="verify", **of_full) == pytest.approx(0.05)
    assert http.number("kv_canary.capacity.peak_utilization", capacity="verify", **of_full) == pytest.approx(1.2)
    assert http.number("kv_canary.verify.limit", **of_full) == 100
    assert http.number("kv_canary.verify.headroom", **of_full) == 95
    assert http.number("kv_canary.kv_pool.headroom") == 180
    assert http.number("kv_canary.write_entry.limit", **of_full) == 64
    durations = http.points("kv_canary.step.duration")
    assert sum(point.count for point in durations) == 7
    assert sum(point.count for point in http.points("kv_canary.phase.duration", phase="plan")) == len(table)
    assert sum(point.sum for point in durations) == pytest.approx(
        1e-9 * sum(r["host_ns"] for r in table if r["group"] == "full")
    )
    assert all(point.as_int == 0 for point in http.points("kv_canary.losses"))
    assert {attributes_of(point)["kv_canary.rank"] for point in durations} == {0}


def test_only_what_matters_is_kept(http: Received, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of unsampled steps, those with a violation, an overflow or an error get a span; calm ones get none."""
    monkeypatch.setattr(otel_host, "random", lambda: 0.5)
    table, _ = telling_run(tmp_path)
    steps = steps_of(http)
    assert {step: attributes_of(span)["kv_canary.kept"] for step, span in steps.items()} == {
        4: "violation",
        5: "overflow",
        6: "error",
    }
    assert {row["step"] for row in table if row["span_id"] is not None} == {4, 5, 6}
    for row in table[-3:]:
        assert (row["trace_id"], row["span_id"]) == (
            steps[row["step"]].trace_id.hex(),
            steps[row["step"]].span_id.hex(),
        )
    assert [event.name for event in steps[4].events] == ["kv_canary.violation"] * 3
    assert attributes_of(steps[4].events[1])["kv_canary.slot"] == 101
    (pressure,) = steps[5].events
    said = attributes_of(pressure)
    assert pressure.name == "kv_canary.pressure"
    assert (said["kv_canary.capacity"], said["kv_canary.severity_before"], said["kv_canary.severity"]) == (
        "verify",
        "info",
        "breached",
    )
    assert said["kv_canary.utilization"] == pytest.approx(1.2)
    assert attributes_of(steps[6])["error.type"] == "bs-exceeds-write-req-capacity"
    assert steps[6].status.code == 2 and "exceeds write_req_capacity=8" in steps[6].status.message
    kinds = [(record.event_name, record.severity_text) for record in http.records]
    # The last step's demand is small again: one step is no relief, so that is no transition.
    assert sorted(kinds) == sorted(
        [("kv_canary.violation", "ERROR")] * 3 + [("kv_canary.pressure", "ERROR"), ("kv_canary.error", "ERROR")]
    )
    by_span = {record.span_id for record in http.records}
    assert by_span == {span.span_id for span in steps.values()}
    breach = next(record for record in http.records if "breached, was info" in value_of(record.body))
    assert "120 of 100" in value_of(breach.body) and "goes unverified" in value_of(breach.body)


def test_one_step_in_a_hundred(http: Received, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a sampler in the environment, 1 % of the steps are sampled."""
    numbers = iter([0.0099, 0.0101, 0.5])
    monkeypatch.setattr(otel_host, "random", lambda: next(numbers))
    engine = Engine()
    with kv_canary.trace(tmp_path):
        for _ in range(3):
            with kv_canary.step():
                engine.forward()
    assert list(steps_of(http)) == [0]
    assert [row["span_id"] is not None for row in rows(tmp_path)] == [True, False, False]


def test_exemplars_lead_to_spans(http: Received, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exponential histograms carry exemplars with the ids of kept spans, and of no others."""
    monkeypatch.setattr(otel_host, "random", lambda: 0.5)
    telling_run(tmp_path)
    kept = {span.span_id for span in steps_of(http).values()}
    assert http.metrics["kv_canary.step.duration"].WhichOneof("data") == "exponential_histogram"
    found = {e.span_id for point in http.points("kv_canary.step.duration") for e in point.exemplars}
    assert found and found <= kept


def test_resource_and_scope(http: Received, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The resource says which process it was; what the user says about the service wins."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-server")
    telling_run(tmp_path)
    for request in http.of("traces"):
        for resource in request.resource_spans:
            said = attributes_of(resource.resource)
            assert said["service.name"] == "my-server" and said["service.instance.id"].endswith(".0")
            assert [scope.scope.name for scope in resource.scope_spans] == ["kvcanary_trace"]
            assert resource.scope_spans[0].scope.version == kv_canary.__version__


def test_speculative_forwards_share_a_span(http: Received, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft forwards inside a sampled step have spans under it; a bracket without rows still ends its span."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    engine = Engine()
    with kv_canary.trace(tmp_path), kv_canary.step(mode="decode"):
        with kv_canary.step(runner="draft"):
            engine.forward(1)
        with kv_canary.step(runner="target"):
            engine.forward(2)
    spans = {attributes_of(span).get("kv_canary.runner"): span for span in http.spans if span.name == STEP}
    assert set(spans) == {None, "draft", "target"}
    outer = spans[None]
    assert spans["draft"].parent_span_id == spans["target"].parent_span_id == outer.span_id
    assert {row["span_id"] for row in rows(tmp_path)} == {spans[r].span_id.hex() for r in ("draft", "target")}


def test_too_many_at_once_are_thinned(http: Received, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps under pressure have an allowance; errors come first, and what got no span is counted."""
    monkeypatch.setattr("kvcanary_trace.sinks.otel_spans.MAX_KEPT_AT_ONCE", 3)
    monkeypatch.setattr("kvcanary_trace.sinks.otel_spans.MAX_KEPT_PER_S", 0)
    monkeypatch.setattr(otel_host, "random", lambda: 0.5)
    sink = OtelSink(everything=False)
    with kv_canary.trace([tmp_path, sink], flush_interval_s=60) as session:
        for number in range(6):
            session.record(step=number, bs=9, write_req_capacity=10, error="other" if number == 5 else None)
    assert {step: attributes_of(s)["kv_canary.kept"] for step, s in steps_of(http).items()} == {
        0: "pressure",
        1: "pressure",
        5: "error",
    }
    assert sink.stats.steps_thinned == 3
