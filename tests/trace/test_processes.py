"""Processes that fork, exit or are interrupted with a session open. Each scenario is a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from launches import rows


def run(code: str, directory: Path, *, returncode: int = 0) -> str:
    """Run `code` with the dataset's path as its argument."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(directory)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == returncode, done.stderr
    return done.stdout + done.stderr


def run_file(directory: Path) -> dict[str, Any]:
    (path,) = (directory / "runs").glob("*.json")
    return dict(json.loads(path.read_text()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_records_nothing(tmp_path: Path) -> None:
    """It steps, launches, closes and exits through atexit; the parent's files are whole and only the parent's."""
    run(
        """
        import os, sys
        import kvcanary_trace as kv_canary
        from kvcanary_trace.kernels import hooks
        with kv_canary.trace(sys.argv[1], flush_interval_s=0.05) as session:
            session.record(step=1)
            session.flush()
            pid = os.fork()
            if pid == 0:
                assert hooks.observer is None
                with kv_canary.step(2):
                    pass
                session.close()
                sys.exit(0)  # through atexit and through __exit__
            assert os.waitpid(pid, 0)[1] == 0
            with kv_canary.step(3):
                pass
        """,
        tmp_path,
    )
    assert [row["step"] for row in rows(tmp_path)] == [1, 3]
    assert run_file(tmp_path)["status"] == "completed" and not (tmp_path / "_live").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_may_trace_for_itself(tmp_path: Path) -> None:
    """Under a run of its own, while the parent's session is open."""
    run(
        """
        import os, sys
        import kvcanary_trace as kv_canary
        with kv_canary.trace(sys.argv[1], run="parent") as session:
            pid = os.fork()
            if pid == 0:
                with kv_canary.trace(sys.argv[1], run="child") as own:
                    own.record(step=10)
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            session.record(step=20)
        """,
        tmp_path,
    )
    assert sorted((row["run"], row["step"]) for row in rows(tmp_path)) == [("child", 10), ("parent", 20)]


@pytest.mark.parametrize(
    ("ending", "returncode", "status", "error"),
    [
        ("", 0, "completed", None),
        ("raise ValueError('lost')", 1, "failed", "ValueError: lost"),
        ("sys.exit(4)", 4, "completed", None),
    ],
)
def test_exit_without_closing(ending: str, returncode: int, status: str, error: str | None, tmp_path: Path) -> None:
    """The interpreter ends with a session open: it is sealed, and an exception that nobody caught is named."""
    run(
        f"""
        import sys
        import kvcanary_trace as kv_canary
        session = kv_canary.trace(sys.argv[1]).__enter__()
        session.record(step=1)
        {ending}
        """,
        tmp_path,
        returncode=returncode,
    )
    assert [row["step"] for row in rows(tmp_path)] == [1]
    assert (run_file(tmp_path)["status"], run_file(tmp_path)["error"]) == (status, error)


def test_control_c(tmp_path: Path) -> None:
    """SIGINT in the middle of the loop: sealed and marked."""
    code = """
        import sys
        import kvcanary_trace as kv_canary
        with kv_canary.trace(sys.argv[1]) as session:
            number = 0
            while True:
                with kv_canary.step(mode="decode"):
                    number += 1
                if number == 1000:
                    print("running", flush=True)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None and child.stdout.readline() == "running\n"
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert run_file(tmp_path)["status"] == "failed" and run_file(tmp_path)["error"] == "KeyboardInterrupt"
    steps = [row["step"] for row in rows(tmp_path)]
    assert len(steps) >= 1000 and len(set(steps)) == len(steps)


def test_nvtx_missing_is_one_sentence(tmp_path: Path) -> None:
    """Tracing works without the package."""
    printed = run(
        """
        import sys
        sys.modules["nvtx"] = None
        import kvcanary_trace as kv_canary
        with kv_canary.trace(sys.argv[1]) as session:
            session.record(step=1)
        """,
        tmp_path,
    )
    assert printed.count("NVTX ranges are off") == 1 and len(printed.strip().splitlines()) == 1
    assert len(rows(tmp_path)) == 1
