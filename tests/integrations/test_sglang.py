"""SGLang under our hooks: its real launchers, endpoints and managers, on the CPU through its reference path."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from integrations.sglang_peer import ForwardMode, Server, sglang_importable
from launches import rows

import kvcanary_trace as kv_canary
from kvcanary_trace import steps
from kvcanary_trace.integrations import sglang as integration
from kvcanary_trace.integrations.sglang_hooks import HOOKS, close_opened
from kvcanary_trace.integrations.sglang_load import SchedulerLoad

PREFILL, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """SGLang can be imported, and traces go to a folder of the test's."""
    monkeypatch.setenv("KVCANARY_TRACE_DIR", str(tmp_path))
    with sglang_importable():
        yield tmp_path
    assert steps.open_session is None


@pytest.fixture
def by_hand(traces: Path) -> Iterator[Path]:
    """Hooks are in place."""
    assert kv_canary.instrument()
    try:
        yield traces
    finally:
        kv_canary.uninstrument()


def serve(server: Server) -> None:
    """A prefill of two prompts, two decodes of both."""
    server.run(PREFILL, [0, 0], [6, 4], waiting=3)
    server.run(DECODE, [6, 4], [1, 1], waiting=4)
    server.run(DECODE, [7, 5], [1, 1], waiting=4)


def told(table: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    """Those columns, in order of the steps."""
    return [tuple(row[name] for name in names) for row in sorted(table, key=lambda row: (row["step"], row["forward"]))]


def test_rows_of_an_untouched_server(by_hand: Path) -> None:
    """Active batch, unclamped demand, capacities, coverage, and the scheduler's work, step by step."""
    serve(Server())
    kv_canary.uninstrument()
    table = rows(by_hand)
    assert told(table, "step", "mode", "bs", "bs_launched", "write_entries", "verify_demand", "verify_checked") == [
        (1, "prefill", 2, 8, 10, 0, 0),
        (2, "decode", 2, 8, 2, 10, 10),
        (3, "decode", 2, 8, 2, 12, 12),
    ]
    assert told(table, "resident_reqs", "resident_tokens", "waiting_reqs", "waiting_tokens", "kv_used") == [
        (2, 10, 3, 15, 60),
        (2, 12, 4, 20, 60),
        (2, 14, 4, 20, 60),
    ]
    assert {row["write_req_capacity"] for row in table} == {8}
    assert {row["verify_capacity"] for row in table} == {300}
    assert {row["write_entry_capacity"] for row in table} == {16}
    assert {row["violations"] for row in table} == {0}


def test_the_run_file(by_hand: Path) -> None:
    """Rank from the parallel sizes, capacities with their origin, arguments without secrets."""
    serve(Server())
    kv_canary.uninstrument()
    (file,) = (by_hand / "runs").iterdir()
    run = json.loads(file.read_text())
    assert run["rank"] == 1 and run["status"] == "completed"
    assert run["engine"] == {"engine": "sglang", "tp_size": 2, "tp_rank": 1, "pp_rank": 0, "gpu_id": 1}
    assert [(one["capacity"], one["value"], one["origin"], one["runner"]) for one in run["capacities"]] == [
        ("verify", 300, "derived", "target"),
        ("write_req", 8, "derived", "target"),
        ("write_entry", 16, "derived", "target"),
    ]


def test_draft_and_target_share_a_step(by_hand: Path) -> None:
    """Two managers, two runners, one step of the scheduler."""
    serve(Server(draft=True))
    kv_canary.uninstrument()
    assert sorted(told(rows(by_hand), "step", "runner", "forward", "bs")) == [
        (step, runner, 0, 2) for step in (1, 2, 3) for runner in ("draft", "target")
    ]


@pytest.mark.parametrize(
    ("prefixes", "extends", "code", "words"),
    [
        ([3] * 9, [1] * 9, "bs-exceeds-write-req-capacity", "batch_size=9 exceeds pre-allocated write_req_capacity=8"),
        ([0] * 2, [10] * 2, "write-entries-exceed-capacity", "token count=20 exceeds pre-allocated"),
    ],
)
def test_what_the_server_refuses(by_hand: Path, prefixes: list[int], extends: list[int], code: str, words: str) -> None:
    """SGLang's own check raises as ever, and the last row has the demand that broke it."""
    server = Server()
    serve(server)
    with pytest.raises(RuntimeError, match=words) as raised:
        server.run(DECODE if extends[0] == 1 else PREFILL, prefixes, extends)
    assert raised.traceback[-1].name == "pre_ops_outside_graph"
    kv_canary.uninstrument()
    *_, last = told(rows(by_hand), "step", "bs", "write_entries", "write_req_capacity", "error")
    assert last == (4, len(prefixes), sum(extends), 8, code)
    assert len(rows(by_hand)) == 4


def test_violations(by_hand: Path) -> None:
    """A record that somebody overwrote is found by SGLang's kernels and told in the rows and in detail."""
    server = Server()
    server.run(PREFILL, [0, 0], [6, 4])
    server.k_tail[int(server.req_to_token[1, 2]), 0] += 1
    server.run(DECODE, [6, 4], [1, 1])
    kv_canary.uninstrument()
    assert told(rows(by_hand), "violations_new") == [(0,), (1,)]


def test_undone_means_the_same_objects(traces: Path) -> None:
    """Everywhere, also where a module imported a launcher by name, before or after."""
    before = {}
    for target in HOOKS:
        owner, _, name = target.rpartition(".")
        before[target] = vars(importlib.import_module("pkgutil").resolve_name(owner))[name]
    launcher = importlib.import_module("sglang.srt.kv_canary.runner.kernel_launcher")
    endpoint = importlib.import_module("sglang.srt.kv_canary.endpoint")
    named = (launcher.launch_canary_plan_kernels, endpoint.launch_canary_verify_kernel)
    assert kv_canary.instrument() and kv_canary.instrument()
    late = SimpleNamespace()
    late_module = type(sys)("late")
    late_module.write = endpoint.launch_canary_write_kernel  # type: ignore[attr-defined]
    sys.modules["late"] = late_module
    try:
        assert launcher.launch_canary_plan_kernels is not named[0]
        assert endpoint.launch_canary_verify_kernel is not named[1]
        kv_canary.uninstrument()
        for target, original in before.items():
            owner, _, name = target.rpartition(".")
            assert vars(importlib.import_module("pkgutil").resolve_name(owner))[name] is original, target
        assert (launcher.launch_canary_plan_kernels, endpoint.launch_canary_verify_kernel) == named
        assert late_module.write is before["sglang.kernels.ops.kv_canary.write.launch_canary_write_kernel"]
    finally:
        del sys.modules["late"], late


def test_as_a_plugin(traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through SGLang's own registry; active only where the environment asks for it."""
    monkeypatch.setenv("KVCANARY_TRACE", "1")
    monkeypatch.setenv("KVCANARY_TRACE_RUN", "shared")
    registry = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
    integration.plugin()
    assert set(registry._hooks) == set(HOOKS)
    registry.apply_hooks()
    serve(Server())
    close_opened()
    assert {row["run"] for row in rows(traces)} == {"shared"}
    assert told(rows(traces), "verify_demand") == [(0,), (10,), (12,)]


@pytest.mark.parametrize("value", [None, "0", "off"])
def test_telemetry_off_leaves_the_launchers_alone(
    traces: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    """No hook is even registered."""
    monkeypatch.delenv("KVCANARY_TRACE_DIR") if value is None else monkeypatch.setenv("KVCANARY_TRACE", value)
    verify = importlib.import_module("sglang.kernels.ops.kv_canary.verify")
    original = verify.launch_canary_verify_kernel
    registry = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
    integration.plugin()
    registry.apply_hooks()
    assert not registry._hooks and verify.launch_canary_verify_kernel is original
    serve(Server())
    assert not list(traces.iterdir())


@pytest.mark.parametrize(
    ("missing", "traced"), [("sglang.srt.kv_canary.api", False), ("sglang.srt.managers.scheduler", True)]
)
def test_an_unknown_shape(
    missing: str, traced: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One clear sentence; nothing is patched where a part that tracing needs is missing."""
    monkeypatch.setenv("KVCANARY_TRACE_DIR", str(tmp_path))
    with sglang_importable(frozenset({missing})), caplog.at_level(logging.WARNING):
        assert kv_canary.instrument() is traced
        kv_canary.uninstrument()
    (record,) = caplog.records
    assert missing in record.getMessage()
    assert ("is not traced" in record.getMessage()) is not traced


def test_a_hook_of_ours_that_fails(by_hand: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A scheduler that has changed: one warning, the server runs, rows lack what is not known."""
    server = Server()
    del server.scheduler.running_batch
    server.run(PREFILL, [0], [4])
    server.run(PREFILL, [0], [4])
    kv_canary.uninstrument()
    assert told(rows(by_hand), "bs", "resident_reqs", "waiting_reqs") == [(1, None, None)] * 2
    assert len([r for r in caplog.records if "running and queued work" in r.getMessage()]) == 1


def test_a_long_queue_is_followed_as_it_grows() -> None:
    """Tokens of a queue are summed anew only when its head changed; a huge changed one is not known."""
    load = SchedulerLoad()
    requests = [SimpleNamespace(origin_input_ids=[0] * 3, output_ids=[0]) for _ in range(400)]
    assert load._tokens_of_queue([]) == 0
    queue = requests[:200]
    assert load._tokens_of_queue(queue) == 800
    queue += requests[200:]
    assert load._tokens_of_queue(queue) == 1600
    assert load._tokens_of_queue(queue[1:]) is None
    assert load._tokens_of_queue(queue[300:]) == 400


def test_as_an_instrumentor(traces: Path) -> None:
    """OpenTelemetry's entry point switches it on and off."""
    pytest.importorskip("opentelemetry.instrumentation", reason="opentelemetry-instrumentation is not installed")
    (entry,) = [one for one in entry_points(group="opentelemetry_instrumentor") if one.name == "kv_canary"]
    instrumentor = entry.load()()
    instrumentor.instrument(skip_dep_check=True)
    try:
        serve(Server())
    finally:
        instrumentor.uninstrument()
    assert told(rows(traces), "verify_demand") == [(0,), (10,), (12,)]


def test_the_plugin_is_registered() -> None:
    """SGLang finds it by its entry point."""
    (entry,) = [one for one in entry_points(group="sglang.srt.plugins") if one.name == "kvcanary_trace"]
    assert entry.load() is integration.plugin
