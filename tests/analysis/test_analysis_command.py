"""The command: its JSON, its text, its exit codes, its figure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from datasets import dataset, steps_table, write_part
from typer.testing import CliRunner

from kvcanary_trace.analysis.commands import analyze as analyze_command
from kvcanary_trace.errors import KvCanaryError

app = typer.Typer()
app.command()(analyze_command)

FINDING_KEYS = [
    "rule", "severity", "capacity", "group", "rank", "steps", "peak_utilization", "p99_utilization", "headroom",
    "breach", "reason", "remedy",
]  # fmt: skip


def run(*args: object) -> Any:
    """The command in this process."""
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture
def ramp(tmp_path: Path) -> Path:
    """A batch that outgrows its plan at step 81."""
    bs = np.round(1000 * (0.6 + 0.005 * np.arange(90))).astype(int)
    return dataset(tmp_path / "ramp", steps_table(90, bs=bs, write_req_capacity=1000))


def test_json_has_the_contract(ramp: Path) -> None:
    """Names that scripts rely on, and plain numbers."""
    done = run(ramp, "--json", "--until", 45)
    assert done.exit_code == 1
    answer = json.loads(done.stdout)
    assert list(answer) == ["schema", "runs", "findings", "coverage", "losses", "capacities"]
    assert answer["schema"] == 1 and answer["runs"][0]["run"] == "r1"
    worst = answer["findings"][0]
    assert list(worst)[: len(FINDING_KEYS)] == FINDING_KEYS
    assert (worst["rule"], worst["severity"], worst["capacity"]) == ("write-req-capacity", "critical", "write_req")
    assert worst["steps"] == [40, 45] and worst["rank"] == 0 and worst["group"] == "full"
    assert set(worst["breach"]) == {"steps", "seconds", "low", "high", "probability", "used"}
    assert worst["breach"]["used"] == "rows" and "rebuilt from the rows" in worst["reason"]
    assert worst["remedy"] == {"value": 1256, "flag": "--cuda-graph-max-bs-decode"}
    assert {"demanded", "verified", "ratio", "unverified_by_reason"} <= set(answer["coverage"])
    assert [one["capacity"] for one in answer["capacities"]][:2] == ["write_req", "plan_block"]
    order = ["breached", "critical", "warning", "info"]
    places = [order.index(one["severity"]) for one in answer["findings"]]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("until", "fail_on", "code"),
    [
        (89, "breached", 1), (89, "critical", 1), (45, "critical", 1), (45, "breached", 0), (12, "critical", 0),
        (12, "warning", 0), (12, "info", 1), (45, "warning", 1),
    ],
)  # fmt: skip
def test_exit_code(ramp: Path, until: int, fail_on: str, code: int) -> None:
    """1 from the chosen severity on, else 0."""
    assert run(ramp, "--until", until, "--fail-on", fail_on).exit_code == code


def test_text_says_the_same(ramp: Path) -> None:
    """The verdict, the worst finding with its remedy, all capacities, coverage and losses, on standard output."""
    done = run(ramp)
    text = " ".join(done.stdout.split())
    assert "1 breached" in text and "write_req" in text and "--cuda-graph-max-bs-decode" in text
    for name in ("plan_block", "verify", "req_to_token", "not measured: write_entry, kv_pool"):
        assert name in text
    assert "Coverage: 100 % of 270,000" in text and "Lost: nothing" in text
    assert "\x1b" not in done.stdout


def test_unreadable_is_an_error_of_ours(tmp_path: Path) -> None:
    """The command raises what the command line prints: no traceback of a reader's."""
    done = run(tmp_path / "nowhere")
    assert isinstance(done.exception, KvCanaryError) and "nowhere" in str(done.exception)


def test_plot(ramp: Path, tmp_path: Path) -> None:
    """A figure in the format of its ending; a bad ending is refused before anything is read."""
    for name, magic in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")):
        assert run(ramp, "--plot", tmp_path / name).exit_code == 1
        assert (tmp_path / name).read_bytes().startswith(magic)
    svg = (tmp_path / "a.svg").read_text()
    assert "Canary capacities: write_req broke" in svg and "% of limit" in svg and "engine step" in svg
    done = run(tmp_path / "nowhere", "--plot", tmp_path / "a.gif")
    assert isinstance(done.exception, KvCanaryError) and "must end in .png, .svg, .pdf" in str(done.exception)


def test_plot_of_many_shapes(tmp_path: Path) -> None:
    """One row, many ranks, overflow: each has its figure."""
    run_one = dataset(tmp_path / "one", steps_table(1))
    assert run(run_one, "--plot", tmp_path / "one.png").exit_code == 0
    for rank in range(12):
        write_part(tmp_path / "many", steps_table(30, verify_demand=np.arange(30) * 4000), rank=rank)
    assert run(tmp_path / "many", "--plot", tmp_path / "many.png").exit_code == 1
    nothing = steps_table(3, verify_demand=None, verify_planned=None, verify_checked=None, verify_enabled=None,
                          bs=None, bs_launched=None, seq_len_max=None, violations=None)  # fmt: skip
    assert run(dataset(tmp_path / "none", nothing), "--plot", tmp_path / "none.png").exit_code == 0


def test_envelope_keeps_peaks() -> None:
    """Thinning out keeps the highest value of every bucket, in order."""
    from kvcanary_trace.analysis.plots import envelope

    y = np.zeros(100_000)
    y[[5, 77_777]] = 3.0, 9.0
    x, thin = envelope(np.arange(100_000.0), y, 500)
    assert len(x) == 500 and np.all(np.diff(x) > 0)
    assert thin[x == 5] == 3.0 and thin[x == 77_777] == 9.0


def test_process_is_light(ramp: Path, tmp_path: Path) -> None:
    """Neither torch nor scipy.stats, and no matplotlib without a plot."""
    code = (
        "import sys\nfrom kvcanary_trace.analysis import analyze\n"
        f"analyze({str(ramp)!r}).to_json()\n"
        "print([m for m in ('torch', 'triton', 'scipy.stats', 'matplotlib', 'pandas') if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
