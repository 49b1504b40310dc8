"""Real request traces through the engine and the kernels, the demo, and what a terminal sees."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcanary_trace.cli import app
from kvcanary_trace.replay.engine import Engine
from kvcanary_trace.replay.knobs import EngineKnobs
from kvcanary_trace.replay.progress import ReplayProgress
from kvcanary_trace.replay.readers import read_workload
from kvcanary_trace.replay.runner import replay_workload
from kvcanary_trace.replay.workloads import shape_workload


@pytest.mark.workload
@pytest.mark.parametrize(
    ("name", "limit", "knobs"),
    [
        ("azure_llm_2023_conv.csv", 20, EngineKnobs()),
        ("azure_llm_2023_code.csv", 10, EngineKnobs(schedule="mixed", page_size=16, swa_window=512)),
        ("mooncake_conversation.jsonl", 2, EngineKnobs(page_size=64)),
        ("coding_conversations/trace_0103.json", 2, EngineKnobs(chunked_prefill_size=8192, swa_window=1024)),
    ],
)
def test_a_clean_replay_finds_nothing(
    workloads: Path, tmp_path: Path, name: str, limit: int, knobs: EngineKnobs
) -> None:
    """Every format through the real kernels: no violation, no loss, every request done."""
    load = shape_workload(read_workload(workloads / name), limit=limit)
    result = replay_workload(load, tmp_path, knobs=knobs)
    assert (result.violations, result.errors) == (0, 0)
    assert result.finished_reqs == limit
    assert result.stats.complete


@pytest.mark.workload
def test_figures_of_a_known_run(workloads: Path) -> None:
    """Engine, clock and tokens are deterministic: these figures change only when the model changes."""
    load = shape_workload(read_workload(workloads / "azure_llm_2023_conv.csv"), limit=1000)
    engine = Engine(load, EngineKnobs())
    entries = 0
    while (batch := engine.schedule()) is not None:
        entries += batch.num_entries
        engine.complete(batch)
    assert (engine.stats.steps, entries) == (11_047, 284_571_470)


@pytest.mark.workload
def test_conversations_reuse_their_prefixes(workloads: Path) -> None:
    """The published prefix share of a conversation is what the cache finds."""
    load = read_workload(workloads / "coding_conversations" / "trace_0095.json")
    engine = Engine(load, EngineKnobs())
    while (batch := engine.schedule()) is not None:
        engine.complete(batch)
    first, *others = load.requests
    assert engine.stats.prefix_hit_tokens / sum(request.input_len for request in others) > 0.9
    assert engine.stats.prompt_tokens - engine.stats.prefix_hit_tokens >= first.input_len


def test_demo_breaks_a_capacity_and_says_so(tmp_path: Path) -> None:
    """Exit code 1: the analysis found the breach that the demo is about."""
    done = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])
    assert done.exit_code == 1, done.output
    assert "120 of 120 requests" in done.stdout
    assert "exceeds write_req_capacity=22" in done.stdout
    assert "breached" in done.stdout
    assert "write_req" in done.stdout


def test_progress_is_silent_off_a_terminal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing without a terminal; otherwise a bar on standard error and nothing on standard output."""
    with ReplayProgress("load", 10) as bar:
        bar.update(3, 100, 1000)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    with ReplayProgress("load", 10, shown=True) as bar:
        bar.update(3, 100, 1000)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "load" in shown.err
