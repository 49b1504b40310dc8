"""Telemetry as a guest: collectors that are down, slow or refuse, missing packages, hosts with providers, forks."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from integrations.otel_runs import clear_environment, telling_run, warnings_of
from integrations.otlp_receiver import attributes_of, http_receiver
from launches import Engine, rows
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider, sampling
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import kvcanary_trace as kv_canary
from kvcanary_trace.sinks import otel_host, otel_setup
from kvcanary_trace.sinks.otel import OtelSink


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_environment(monkeypatch)


@pytest.fixture
def host_spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Spans of a tracer provider that the host set."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


def _collect_sockets() -> None:
    """Collect what urllib3 leaves open after a failed handshake, where nobody takes its warning for a failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def closed_port() -> int:
    """A port on which nobody listens."""
    with http_receiver() as received:
        return received.port


@pytest.mark.parametrize("behaviour", ["down", "tls", "hang", "503", "die"])
def test_a_bad_collector_harms_nobody(
    behaviour: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows are whole, the shutdown keeps its deadline, everything is counted, and there is one warning."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "10")
    served = "accept" if behaviour in ("down", "tls") else behaviour
    with http_receiver(served, retry_after_s=30) as received:
        port = closed_port() if behaviour == "down" else received.port
        scheme = "https" if behaviour == "tls" else "http"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{scheme}://127.0.0.1:{port}")
        sink = OtelSink(everything=False, shutdown_s=1.0)
        began_s = time.monotonic()
        table, stats = telling_run(tmp_path, sink)
        spent_s = time.monotonic() - began_s
    assert len(table) == 9 and all(row["span_id"] for row in table)
    assert spent_s < 2.5
    assert stats.spans == stats.metrics == stats.log_records == 0
    phases = [row[f"{phase}_ns"] for row in table for phase in ("plan", "verify", "write")]
    assert stats.spans_dropped == 7 + sum(phase is not None for phase in phases)
    assert stats.log_records_dropped > 0 and stats.metrics_dropped > 0
    (warning,) = warnings_of(caplog)
    assert "cannot be exported" in warning and "recording goes on" in warning
    _collect_sockets()


def test_it_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Down at start, up later: what was lost is counted, what follows arrives, and the losses are a metric."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")  # no retries
    port = closed_port()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    engine, sink = Engine(), OtelSink(everything=False)
    with kv_canary.trace([tmp_path, sink]) as session:
        with kv_canary.step():
            engine.forward()
        assert session.flush(10)
        queue = sink._providers.exports["spans"]
        queue.force_flush()
        deadline_s = time.monotonic() + 10
        while sink.stats.spans_dropped < 4:
            assert time.monotonic() < deadline_s
            threading.Event().wait(0.01)
        with http_receiver(port=port) as received:
            with kv_canary.step():
                engine.forward()
            session.close()
            assert len(received.spans) == 4
            (lost,) = [p for p in received.points("kv_canary.losses") if p.as_int]
    assert attributes_of(lost)["kv_canary.loss"] == "spans_dropped" and lost.as_int == 4
    assert len(warnings_of(caplog)) == 1


def test_a_step_never_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a collector hangs, steps go on; the queue is bounded and what does not fit is counted."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    engine, sink = Engine(), OtelSink(everything=False, shutdown_s=0.3)
    with http_receiver("hang") as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.endpoint)
        with kv_canary.trace([tmp_path, sink]) as session:
            with kv_canary.step():
                engine.forward()
            assert session.flush(10) and received.wait_for_attempts(1)
            for _ in range(50):
                with kv_canary.step():
                    engine.forward()
            assert session.flush(10)
            queue = sink._providers.exports["spans"]
            assert queue.left <= 12 and queue.dropped == 4 * 50 - 8
    assert sink.stats.spans_dropped == 4 * 51
    assert session.stats.complete and session.stats.steps == 51


def test_providers_of_the_host_are_used(
    host_spans: InMemorySpanExporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any variable: the host's providers get everything, in its own traces, and are never replaced."""
    reader = InMemoryMetricReader()
    meters = MeterProvider([reader], shutdown_on_exit=False)
    monkeypatch.setattr("opentelemetry.metrics._internal._METER_PROVIDER", meters)
    monkeypatch.setattr(otel_host, "random", lambda: 0.0)
    before = trace.get_tracer_provider(), metrics.get_meter_provider()
    engine = Engine()
    for _ in range(2):  # a second session finds the instruments of the first
        tracer = trace.get_tracer("host")
        with (
            kv_canary.trace(tmp_path),
            tracer.start_as_current_span("request"),
            kv_canary.step(),
            tracer.start_as_current_span("model"),
        ):
            engine.forward()
    assert (trace.get_tracer_provider(), metrics.get_meter_provider()) == before
    spans = host_spans.get_finished_spans()
    by_id = {span.context.span_id: span for span in spans}
    for span in spans:
        parent = by_id[span.parent.span_id].name if span.parent is not None else None
        assert parent == {"request": None, "kv_canary.step": "request"}.get(span.name, "kv_canary.step")
    assert sorted(span.name for span in spans if span.name.startswith("kv_canary")) == sorted(
        2 * ["kv_canary.step", "kv_canary.plan", "kv_canary.verify", "kv_canary.write"]
    )
    data = reader.get_metrics_data()
    assert data is not None
    (scope,) = data.resource_metrics[0].scope_metrics
    found = {metric.name: metric for metric in scope.metrics}
    assert sum(point.value for point in found["kv_canary.steps"].data.data_points) == 2
    assert "kv_canary.verify.demand" not in found  # no session is open any more
    assert {row["trace_id"] for row in rows(tmp_path)} == {f"{s.context.trace_id:032x}" for s in spans}


def test_a_kept_step_links_to_where_it_ran(
    host_spans: InMemorySpanExporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unsampled step that overflows becomes a root span of its own with a link to the host's current span."""
    monkeypatch.setattr(otel_host, "random", lambda: 0.5)
    engine = Engine(verify_capacity=10)
    with kv_canary.trace(tmp_path), trace.get_tracer("host").start_as_current_span("request") as request:
        for prefix_len in (1, 20):
            with kv_canary.step():
                assert trace.get_current_span() is request
                engine.forward(1, prefix_len)
    (step,) = [span for span in host_spans.get_finished_spans() if span.name == "kv_canary.step"]
    assert step.parent is None and [link.context.span_id for link in step.links] == [request.get_span_context().span_id]
    calm, kept = rows(tmp_path)
    assert int(kept["span_id"], 16) == step.context.span_id
    assert int(calm["span_id"], 16) == request.get_span_context().span_id


def test_the_hosts_sampler_has_the_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps worth keeping that the host's sampler refuses are counted, and their rows have no ids."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampling.ALWAYS_OFF, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    table, stats = telling_run(tmp_path)
    assert stats.spans_refused == 3 and exporter.get_finished_spans() == ()
    assert not any(row["span_id"] for row in table)


def test_a_provider_set_later_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With providers of our own, the global one stays free for the host."""
    with http_receiver() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.endpoint)
        with kv_canary.trace(tmp_path):
            assert otel_setup.host_provider("traces") is None
            later = TracerProvider(shutdown_on_exit=False)
            monkeypatch.setattr(trace, "_TRACER_PROVIDER", later)
            with kv_canary.step():
                Engine().forward()
        assert trace.get_tracer_provider() is later
        assert received.metrics


def test_nothing_is_configured(tmp_path: Path) -> None:
    """Then there is no sink, no thread, and no import of the SDK by a session."""
    code = """
    import sys, threading
    import kvcanary_trace as kv_canary
    with kv_canary.trace(sys.argv[1]) as session, kv_canary.step():
        pass
    assert session.host_spans is None
    assert not [name for name in sys.modules if name.startswith("opentelemetry")]
    """
    run(code, tmp_path)


@pytest.mark.parametrize("missing", ["opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter"])
def test_packages_are_missing(missing: str, tmp_path: Path) -> None:
    """One sentence that names what to install; rows are recorded."""
    code = """
    import sys, logging
    sys.modules[sys.argv[2]] = None
    logging.basicConfig(format="%(levelname)s %(message)s")
    import kvcanary_trace as kv_canary
    with kv_canary.trace(sys.argv[1], otel=True) as session, kv_canary.step():
        pass
    assert session.stats.steps == 1
    """
    lines = run(code, tmp_path, missing).splitlines()
    assert len(lines) == 1 and "OpenTelemetry is off" in lines[0] and "pip install" in lines[0]
    assert len(rows(tmp_path)) == 1


def test_grpc_is_missing(tmp_path: Path) -> None:
    """Protocol grpc without its extra: one sentence for each signal, and rows are recorded."""
    code = """
    import sys, logging
    sys.modules["opentelemetry.exporter.otlp.proto.grpc"] = None
    logging.basicConfig(format="%(levelname)s %(message)s")
    import kvcanary_trace as kv_canary
    with kv_canary.trace(sys.argv[1], otel=True) as session, kv_canary.step():
        pass
    """
    lines = run(code, tmp_path, OTEL_EXPORTER_OTLP_PROTOCOL="grpc").splitlines()
    assert len(lines) == 3 and all("kvcanary-trace[otlp-grpc]" in line for line in lines)
    assert len(rows(tmp_path)) == 1


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier-pigeon", "http/protobuf or grpc"),
        ("OTEL_TRACES_EXPORTER", "zipkin", "otlp, console or none"),
        ("OTEL_TRACES_SAMPLER", "sometimes", "must be always_on, always_off or traceidratio"),
        ("OTEL_TRACES_SAMPLER", "traceidratio 7", "must be a number from 0 to 1"),
    ],
)
def test_bad_variables(
    name: str, value: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A variable that makes no sense is one sentence with what would; nothing is raised."""
    value, _, argument = value.partition(" ")
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument or "1")
    with http_receiver() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.endpoint)
        with kv_canary.trace(tmp_path), kv_canary.step():
            Engine().forward()
    (warning,) = warnings_of(caplog)
    assert words in warning
    assert len(rows(tmp_path)) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_exports_its_own(tmp_path: Path) -> None:
    """The child of an open session sends nothing of its parent's, and may open a session that exports as its own."""
    code = """
    import os, sys
    import kvcanary_trace as kv_canary
    with kv_canary.trace(sys.argv[1], run="parent") as session:
        with kv_canary.step(1):
            child = os.fork()
            if not child:
                assert session.closed
                with kv_canary.trace(sys.argv[1], run="child"), kv_canary.step(2):
                    pass
        if not child:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """
    with http_receiver() as received:
        run(code, tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=received.endpoint, OTEL_TRACES_SAMPLER="always_on")
    said = [attributes_of(span) for span in received.spans]
    assert sorted((one["kv_canary.run"], one["kv_canary.step"]) for one in said) == [("child", 2), ("parent", 1)]
    pids = {
        attributes_of(resource.resource)["process.pid"]
        for request in received.of("metrics")
        for resource in request.resource_metrics
    }
    assert len(pids) == len(received.of("metrics")) == 2
    assert sorted((row["run"], row["step"]) for row in rows(tmp_path)) == [("child", 2), ("parent", 1)]


def test_a_processor_that_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception of the host's processor is one warning; steps and rows go on."""

    class Broken(SimpleSpanProcessor):
        def on_start(self, span: Any, parent_context: Any = None) -> None:
            raise RuntimeError("boom")

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Broken(InMemorySpanExporter()))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    monkeypatch.setattr(otel_host, "random", lambda: 0.0)
    with kv_canary.trace(tmp_path) as session:
        for _ in range(3):
            with kv_canary.step():
                Engine().forward()
    assert session.stats.steps == 3 and session.stats.observer_errors == 0
    assert ["cannot be started" in warning for warning in warnings_of(caplog)] == [True]


def run(code: str, directory: Path, *arguments: str, **environment: str) -> str:
    """What a process of its own prints."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(directory), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**clean, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
