"""Endings that are nobody's plan: signals, memory, spawned children, disks that are slow, full or read-only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from launches import rows

import kvcanary_trace as kv_canary
from kvcanary_trace.runfile import Run


def start(code: str, directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_files(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((directory / "runs").glob("*.json"))]


LOOP = """
    import sys, time
    import kvcanary_trace as kv_canary
    with kv_canary.trace(sys.argv[1], flush_interval_s=60) as session:
        for number in range(1_000_000):
            with kv_canary.step(number, mode="decode"):
                pass
            if number == 500:
                print("running", flush=True)
            time.sleep(0.0005)
"""


def test_sigterm_to_a_program_that_turns_it_into_an_exit(tmp_path: Path) -> None:
    """As servers do: rows are sealed, the exit code is the program's."""
    head = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
    child = start(head + textwrap.dedent(LOOP), tmp_path)
    assert child.stdout is not None and child.stdout.readline() == "running\n"
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=60)
    assert child.returncode == 143
    (run,) = run_files(tmp_path)
    assert run["status"] == "failed" and run["error"] == "SystemExit: 143"
    steps = [row["step"] for row in rows(tmp_path)]
    assert steps == list(range(len(steps))) and len(steps) > 500


def test_sigterm_without_a_handler_is_a_kill(tmp_path: Path) -> None:
    """Nothing runs in the process any more: what was not flushed is the black box's to keep."""
    child = start(LOOP, tmp_path)
    assert child.stdout is not None and child.stdout.readline() == "running\n"
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGTERM
    from kvcanary_trace.sinks.recover import recover

    recover(tmp_path)
    (run,) = run_files(tmp_path)
    assert (run["status"], run["error"]) == ("failed", "the process ended without closing its session")


def test_the_engine_runs_out_of_memory(tmp_path: Path) -> None:
    """The error goes on unchanged; the step that it broke has a row with it, and all rows before it are there."""

    def engine() -> None:
        with kv_canary.trace(tmp_path):
            for number in range(10):
                with kv_canary.step(number, mode="prefill"):
                    if number == 9:
                        raise MemoryError("no 7 GiB")

    with pytest.raises(MemoryError, match="no 7 GiB"):
        engine()
    found = rows(tmp_path)
    assert [row["step"] for row in found] == list(range(10))
    assert found[-1]["error_message"] == "MemoryError: no 7 GiB" and found[-2]["error"] is None
    assert run_files(tmp_path)[0]["error"] == "MemoryError: no 7 GiB"


def test_spawned_children_have_files_of_their_own(tmp_path: Path) -> None:
    """Four ranks of one run, spawned while the parent traces too: nobody's rows are in another's files."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import multiprocessing, sys
            import kvcanary_trace as kv_canary

            def child(directory, rank):
                with kv_canary.trace(directory, run="one", rank=rank) as session:
                    for number in range(50):
                        session.record(step=100 * rank + number)

            if __name__ == "__main__":
                spawn = multiprocessing.get_context("spawn")
                with kv_canary.trace(sys.argv[1], run="parent") as session:
                    children = [spawn.Process(target=child, args=(sys.argv[1], rank)) for rank in range(4)]
                    for one in children:
                        one.start()
                    session.record(step=7)
                    for one in children:
                        one.join()
                assert [one.exitcode for one in children] == [0] * 4
            """
        )
    )
    data = tmp_path / "data"
    done = subprocess.run([sys.executable, str(program), str(data)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = [(row["run"], row["rank"], row["step"]) for row in rows(data)]
    wanted = [("one", rank, 100 * rank + number) for rank in range(4) for number in range(50)]
    assert sorted(found) == sorted([*wanted, ("parent", 0, 7)])
    assert [run["status"] for run in run_files(data)] == ["completed"] * 5


class Slow:
    """A sink whose disk takes half a second for every write."""

    def __init__(self) -> None:
        self.rows = 0

    def open(self, run: Run) -> None:
        pass

    def write(self, batches: Mapping[str, Any]) -> None:
        if "steps" in batches:
            time.sleep(0.5)
            self.rows += batches["steps"].num_rows

    def close(self) -> None:
        pass


def test_a_slow_disk_does_not_slow_the_engine(tmp_path: Path) -> None:
    """Recording waits for nobody: its slowest call is far below one write, and nothing is lost."""
    slow = Slow()
    slowest = 0.0
    with kv_canary.trace(slow, flush_interval_s=0.02) as session:
        end = time.monotonic() + 1.5
        number = 0
        while time.monotonic() < end:
            begin = time.perf_counter()
            session.record(step=number)
            slowest = max(slowest, time.perf_counter() - begin)
            number += 1
            time.sleep(0.0005)
    assert slow.rows == number > 500 and session.stats.complete
    assert slowest < 0.25


def test_a_disk_that_becomes_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither tails nor parts nor the run file can be written: the engine goes on, every row is counted as dropped."""
    from kvcanary_trace import runfile
    from kvcanary_trace.sinks import parquet
    from kvcanary_trace.sinks.live import TailFile

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    with kv_canary.trace(tmp_path) as session:
        session.record(step=1)
        session.flush()
        monkeypatch.setattr(TailFile, "append", refuse)
        monkeypatch.setattr(parquet, "write_part", refuse)
        monkeypatch.setattr(runfile, "write", refuse)
        session.record(step=2)
        session.record(step=3)
        session.flush()
    stats = session.stats
    assert stats.rows_dropped == 2 and stats.sink_errors >= 2 and not stats.complete
    monkeypatch.undo()
    assert list((tmp_path / "_live").iterdir())  # step 1 is in its tail still
    run = run_files(tmp_path)[0] | {"pid": 2**22 + 1}  # as if this process had ended
    (path,) = (tmp_path / "runs").glob("*.json")
    path.write_text(json.dumps(run))
    from kvcanary_trace.sinks.recover import recover

    recover(tmp_path)
    assert [row["step"] for row in rows(tmp_path)] == [1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_many_forks_at_once(tmp_path: Path) -> None:
    """Forked in the middle of steps, from several threads' points of view: no child hangs on a lock it inherited."""
    child = start(
        """
        import os, sys, threading
        import kvcanary_trace as kv_canary
        with kv_canary.trace(sys.argv[1], flush_interval_s=0.01) as session:
            stop = threading.Event()
            def busy():
                while not stop.wait(0.0005):
                    with kv_canary.step(mode="decode"):
                        pass
            thread = threading.Thread(target=busy)
            thread.start()
            for number in range(20):
                pid = os.fork()
                if pid == 0:
                    with kv_canary.step(1):
                        pass
                    session.flush(0.1)
                    session.close()
                    os._exit(0)
                assert os.waitpid(pid, 0)[1] == 0
            stop.set()
            thread.join()
        """,
        tmp_path,
    )
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors
    steps = [row["step"] for row in rows(tmp_path)]
    assert steps and len(set(steps)) == len(steps)
    assert run_files(tmp_path)[0]["status"] == "completed"
