"""What is documented, drawn and alerted on is what is emitted."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import ModuleType

import pytest
from integrations.otel_runs import clear_environment, telling_run
from integrations.otlp_receiver import attributes_of, http_receiver
from launches import Engine

import kvcanary_trace as kv_canary
from kvcanary_trace.sinks import otel_names

ROOT = Path(__file__).resolve().parents[2]
JAEGER = ROOT / "examples" / "jaeger"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_environment(monkeypatch)


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    """`examples/jaeger/check_names.py`."""
    spec = importlib.util.spec_from_file_location("check_names", JAEGER / "check_names.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_generated() -> None:
    """`docs/opentelemetry.md` has the tables that the names make."""
    command = [sys.executable, str(ROOT / "docs" / "build_otel_tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# The run gives no queue, replays no graph, and is past its limit at once, so that nothing is told ahead.
NOT_IN_THE_RUN = {
    "graph_replay", "resident_reqs", "resident_tokens", "waiting_tokens", "steps_to_breach", "seconds_to_breach",
}  # fmt: skip


def test_every_name_is_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever arrives stands in the tables, and whatever stands there arrives, but for what the run does not know."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    with http_receiver() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.endpoint)
        telling_run(tmp_path)
    assert {span.name for span in received.spans} == set(otel_names.SPANS)
    assert {record.event_name for record in received.records} == set(otel_names.EVENTS)
    said = [*received.spans, *received.records, *(event for span in received.spans for event in span.events)]
    for metric in otel_names.METRICS:
        points = received.points(metric.name)
        said += points
        for point in points:
            assert set(attributes_of(point)) <= {*metric.attributes, "kv_canary.rank"}, metric.name
    used = {name for one in said for name in attributes_of(one)}
    grouped = {one.name for one in otel_names.ATTRIBUTES if one.grouped}
    of_groups = {name for name in used if re.match(r"kv_canary\.(full|swa)\.", name)}
    assert {re.sub(r"\.(full|swa)\.", ".", name) for name in of_groups} == grouped
    documented = {one.name for one in otel_names.ATTRIBUTES}
    assert used - of_groups <= documented
    assert documented - used - grouped == {f"kv_canary.{name}" for name in NOT_IN_THE_RUN}


def test_dashboard_and_rules_name_what_exists(checker: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """The check passes on what we ship."""
    assert checker.main([]) == 0
    assert "all known" in capsys.readouterr().out
    dashboard = json.loads((JAEGER / "dashboard.json").read_text())
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"]) == 10
    assert all(panel["targets"] for panel in dashboard["panels"])


@pytest.mark.parametrize("word", ["kv_canary_verify_demnd", "kv_canary.verify.demnd", "kv_canary_entries", "error_typ"])
def test_an_unknown_name_is_found(
    word: str, checker: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt metric, label or attribute fails the check, and so does a counter without its suffix."""
    path = tmp_path / "alerts.yaml"
    path.write_text((JAEGER / "alerts.yaml").read_text().replace("kv_canary_violations_total", word))
    assert checker.main([str(path)]) == 1
    assert word in capsys.readouterr().err


def test_prometheus_scrape(checker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK's reader serves every metric under the names that the dashboard uses, with explicit buckets."""
    pytest.importorskip("opentelemetry.exporter.prometheus")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "prometheus")
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_HOST", "127.0.0.1")
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", str(port))
    engine = Engine(verify_capacity=40)
    with kv_canary.trace(tmp_path, write_entry_capacity=10) as session:
        with kv_canary.step(mode="decode", kv_used=1, kv_capacity=2):
            engine.plan([1, 2], [10, 10], [1, 1])
            engine.verify(engine.violate)
            engine.write()
        session.record(step=1, bs=1, verify_demand=90, verify_capacity=40, verify_enabled=False, error="other")
        assert session.flush(10)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    series = set(re.findall(r"^(kv_canary\w+?)(?:\{| )", text, re.MULTILINE))
    assert series <= {name for metric in otel_names.METRICS for name in checker.prometheus_names(metric)}
    for metric in otel_names.METRICS:
        assert series & checker.prometheus_names(metric), metric.name
    assert re.search(r'kv_canary_step_duration_seconds_bucket\{.*le="0.001"', text)
    assert re.search(r'kv_canary_verify_demand\{.*kv_canary_group="full".*\} 90', text)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), timeout=1)
