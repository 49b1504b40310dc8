"""The command line as a user meets it: whole processes, their output and their exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvcanary_trace.cli import ALIASES, COMMANDS

CSV = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


def run(*args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `kvcanary-trace` in a process of its own."""
    command = [sys.executable, "-m", "kvcanary_trace", *args]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    """Twelve requests, all at once: enough to fill a batch of eight."""
    path = tmp_path / "requests.csv"
    rows = "".join(f"2023-11-16 18:15:46.{i:07d},{40 + i},{12 + i}\r\n" for i in range(12))
    path.write_text(CSV + rows, newline="")
    return path


def test_version(tmp_path: Path) -> None:
    """One line, with the package's version."""
    done = run("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "kvcanary-trace 0.1.0\n")


def test_help_is_quick_and_names_every_command(tmp_path: Path) -> None:
    """Help needs neither torch nor triton, and lists all commands."""
    code = (
        "import sys\nfrom kvcanary_trace.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'triton', 'scipy.stats', 'duckdb') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.rstrip().endswith("[]"), done.stdout + done.stderr
    for command in COMMANDS:
        assert command in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command: str, tmp_path: Path) -> None:
    """Every command explains itself."""
    done = run(command, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_other_spellings_are_the_same_command(tmp_path: Path) -> None:
    """And the help does not list them twice."""
    for other, command in ALIASES.items():
        asked, named = (run(name, "--help", cwd=tmp_path).stdout.split() for name in (other, command))
        assert asked[5:] == named[5:] and asked[4] == other
        assert other not in run("--help", cwd=tmp_path).stdout


def test_completion_offers_commands_and_options(tmp_path: Path) -> None:
    """Shell completion knows the lazily loaded commands and their options."""
    script = Path(sys.executable).with_name("kvcanary-trace")
    for words, expected in (("kvcanary-trace ", "analyze"), ("kvcanary-trace analyze --", "--until")):
        asked = {
            "_KVCANARY_TRACE_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        }
        done = subprocess.run([script], env={**os.environ, **asked}, cwd=tmp_path, capture_output=True, text=True)
        assert expected in done.stdout.split(), done.stdout + done.stderr


def test_replay_then_analyze(workload: Path, tmp_path: Path) -> None:
    """A log goes in, findings come out: clean with room, and with the error's step and demand without."""
    done = run("replay", str(workload), "--out", "roomy", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stderr  # the progress bar is silent when nobody watches

    done = run("replay", str(workload), "--out", "tight", "--write-req-capacity", "8", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "exceeds write_req_capacity=8" in done.stdout

    done = run("analyze", "tight", "--json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    answer = json.loads(done.stdout)
    worst = answer["findings"][0]
    assert (worst["capacity"], worst["severity"]) == ("write_req", "breached")
    assert worst["peak_utilization"] > 1
    broke = worst["steps"][1]

    done = run("analyze", "tight", "--json", "--until", str(broke - 1), "--fail-on", "warning", cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    assert "write_req" in {finding["capacity"] for finding in json.loads(done.stdout)["findings"]}


def test_runs_are_never_mixed(workload: Path, tmp_path: Path) -> None:
    """A second replay into the same folder is a run of its own and leaves the first alone."""
    run("replay", str(workload), "--out", "traces", cwd=tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "traces").rglob("*.parquet")}
    assert before
    run("replay", str(workload), "--out", "traces", cwd=tmp_path)
    after = {path: path.read_bytes() for path in (tmp_path / "traces").rglob("*.parquet")}
    assert before.items() <= after.items()
    assert len(list((tmp_path / "traces" / "runs").glob("*.json"))) == 2


def test_recover_seals_what_a_killed_process_left(tmp_path: Path) -> None:
    """After kill -9 the rows of the live tail become a part, and the run file says that the run failed."""
    code = (
        "import os, signal, kvcanary_trace as k\n"
        "session = k.trace('traces', flush_interval_s=0.05).__enter__()\n"
        "session.record(step=1, bs=3, write_req_capacity=4)\n"
        "session.flush()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=60, check=False)
    assert not list(tmp_path.glob("traces/steps/*/*/*.parquet"))
    done = run("recover", "traces", cwd=tmp_path)
    assert (done.returncode, done.stdout.startswith("sealed steps of run ")) == (0, True), done.stdout + done.stderr
    assert len(list(tmp_path.glob("traces/steps/*/*/*.parquet"))) == 1
    (path,) = tmp_path.glob("traces/runs/*.json")
    assert json.loads(path.read_text())["status"] == "failed"
    assert run("recover", "traces", cwd=tmp_path).stdout == "nothing to recover in traces\n"


def test_plot_is_a_picture(workload: Path, tmp_path: Path) -> None:
    """`--plot` writes a PNG."""
    run("replay", str(workload), "--out", "traces", cwd=tmp_path)
    done = run("analyze", "traces", "--plot", "out.png", cwd=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_small_dataset_is_quick(workload: Path, tmp_path: Path) -> None:
    """`analyze` as a whole process stays within seconds, without torch."""
    run("replay", str(workload), "--out", "traces", cwd=tmp_path)
    began = time.perf_counter()
    run("analyze", "traces", cwd=tmp_path)
    assert time.perf_counter() - began < 8  # the bar is 2 s on a quiet machine: benchmarks/analyze.py


def test_a_reader_that_leaves_changes_no_exit_code(workload: Path, tmp_path: Path) -> None:
    """`analyze DIR | head`: the code stays 0 for clean and 1 for findings, and nothing is said about the pipe."""
    run("replay", str(workload), "--out", "roomy", cwd=tmp_path)
    run("replay", str(workload), "--out", "tight", "--write-req-capacity", "8", cwd=tmp_path)
    for arguments, code in ((["roomy"], 0), (["roomy", "--json"], 0), (["tight"], 1), (["tight", "--json"], 1)):
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-m", "kvcanary_trace", "analyze", *arguments]
        done = subprocess.run(command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, timeout=120, check=False)
        os.close(writer)
        assert (done.returncode, done.stderr) == (code, b""), arguments


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_replay_that_is_told_to_stop_seals_its_files(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C, and the signal of `kill` and `timeout`: sealed parts, a failed run, no tail, no traceback."""
    rows = "".join(f"2023-11-16 18:15:{i % 60:02d}.0,1000,100000\r\n" for i in range(60))
    (tmp_path / "long.csv").write_text(CSV + rows, newline="")
    command = [sys.executable, "-m", "kvcanary_trace", "replay", "long.csv", "--out", "traces", "--kernels", "off"]
    live = tmp_path / "traces" / "_live"
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while process.poll() is None and not any(file.stat().st_size > 10_000 for file in live.glob("steps*.arrows")):
            time.sleep(0.02)  # another process: nothing to wait on but its file
        process.send_signal(number)
        said, complained = process.communicate(timeout=60)
    assert (process.returncode, said, complained) == (128 + number, b"", b"")
    (run_file,) = (tmp_path / "traces" / "runs").glob("*.json")
    what = json.loads(run_file.read_text())
    assert what["status"] == "failed"
    assert what["rows"]["steps"] > 0
    assert list((tmp_path / "traces" / "steps").rglob("*.parquet"))
    assert not list(live.glob("*"))


def test_a_defect_is_no_finding(tmp_path: Path) -> None:
    """An error that nobody foresaw exits with 2, never with the 1 of findings."""
    code = (
        "import sys\nfrom kvcanary_trace import cli\nfrom kvcanary_trace.analysis import result\n"
        "def broken(*_):\n    raise IndexError('planted')\nresult.analyze = broken\n"
        "sys.argv = ['kvcanary-trace', 'analyze', '.']\ncli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "IndexError: planted" in done.stderr.splitlines()[-1]


def bad_line(folder: Path) -> list[str]:
    """A workload with a bad third line."""
    (folder / "bad.csv").write_text(CSV + "2023-11-16 18:15:46.1,10,5\r\n2023-11-16 18:15:47.1,ten,5\r\n", newline="")
    return ["replay", "bad.csv", "--out", "traces"]


def unknown_format(folder: Path) -> list[str]:
    """A file that is no workload."""
    (folder / "notes.txt").write_text("remember the milk\n")
    return ["replay", "notes.txt", "--out", "traces"]


def empty_dataset(folder: Path) -> list[str]:
    """A folder with nothing in it."""
    (folder / "empty").mkdir()
    return ["analyze", "empty"]


def foreign_parquet(folder: Path) -> list[str]:
    """Parquet, but not ours."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    part = folder / "foreign" / "steps" / "run=r1" / "rank=0"
    part.mkdir(parents=True)
    pq.write_table(pa.table({"name": ["a"], "price": [1.0]}), part / "part-0.parquet")
    return ["analyze", "foreign"]


def truncated_file(folder: Path) -> list[str]:
    """A part that lost its footer."""
    part = folder / "cut" / "steps" / "run=r1" / "rank=0"
    part.mkdir(parents=True)
    (part / "part-0.parquet").write_bytes(b"PAR1 and then the disk was full")
    return ["analyze", "cut"]


REFUSED = {
    "missing folder": (lambda _: ["analyze", "nowhere"], "nowhere"),
    "empty dataset": (empty_dataset, "empty"),
    "foreign Parquet": (foreign_parquet, "foreign"),
    "truncated file": (truncated_file, "part-0.parquet"),
    "missing workload": (lambda _: ["replay", "nothing.csv", "--out", "traces"], "nothing.csv"),
    "unknown format": (unknown_format, "notes.txt"),
    "bad line": (bad_line, "line 3"),
    "impossible knob": (
        lambda _: ["replay", "requests.csv", "--out", "traces", "--max-running-requests", "0"],
        "max_running_requests|--max-running-requests",
    ),
    "unknown fault": (
        lambda _: ["replay", "requests.csv", "--out", "traces", "--inject", "gremlin@5"],
        "gremlin",
    ),
}


@pytest.mark.parametrize(("case", "match"), REFUSED.values(), ids=REFUSED)
def test_refusals_are_one_sentence(case, match: str, workload: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """What cannot run exits with 2, says why in one line on standard error, and writes nothing."""
    import re

    args = case(tmp_path)
    done = run(*args, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert re.search(match, done.stderr), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("traces/**/*.parquet"))
