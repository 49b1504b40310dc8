"""`kvcanary-trace run`: a program that knows nothing of tracing, and its children, are traced."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from launches import rows

PROGRAM = """
    import os, subprocess, sys
    sys.path.insert(0, sys.argv[1])
    from launches import Engine
    Engine().forward(2, 5)
    if len(sys.argv) > 2:
        subprocess.run([sys.executable, __file__, sys.argv[1]], check=True)
        sys.exit(7)
"""
TESTS = str(Path(__file__).parents[1])


def traced(tmp_path: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program under `kvcanary-trace run` with traces beside it."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(code))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("KVCANARY_", "OTEL_"))}
    command = [sys.executable, "-m", "kvcanary_trace", "run", "--out", str(tmp_path / "traces"), "--", sys.executable]
    return subprocess.run(
        [*command, str(program), TESTS, *arguments], capture_output=True, text=True, timeout=120, env=clean
    )


def test_a_program_and_its_child(tmp_path: Path) -> None:
    """Each process has a run of its own; the program's exit code comes through."""
    done = traced(tmp_path, PROGRAM, "--child")
    assert done.returncode == 7, done.stderr
    table = rows(tmp_path / "traces")
    assert [(row["bs"], row["verify_demand"]) for row in table] == [(2, 10), (2, 10)]
    assert len({row["run"] for row in table}) == 2


def test_a_program_with_a_session_of_its_own(tmp_path: Path) -> None:
    """Its own session takes over; nothing is recorded twice."""
    done = traced(
        tmp_path,
        """
        import sys
        sys.path.insert(0, sys.argv[1])
        import kvcanary_trace as kv_canary
        from launches import Engine
        engine = Engine()
        engine.forward(1, 3)
        with kv_canary.trace(run="mine"), kv_canary.step(5):
            engine.forward(2, 4)
        """,
    )
    assert done.returncode == 0, done.stderr
    found = sorted((row["run"] == "mine", row["step"], row["bs"]) for row in rows(tmp_path / "traces"))
    assert found == [(False, 0, 1), (True, 5, 2)]


def test_a_program_without_a_canary(tmp_path: Path) -> None:
    """Nothing of ours is imported, nothing is written; its own sitecustomize runs."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("print('own')")
    program = "import sys; print([name for name in sys.modules if name.startswith(('kvcanary', 'torch'))])"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "own")}
    done = subprocess.run(
        [sys.executable, "-m", "kvcanary_trace", "run", "-o", str(tmp_path / "t"), sys.executable, "-c", program],
        capture_output=True, text=True, timeout=60, env=environment,
    )  # fmt: skip
    # Once in the command's process, once in the program's.
    assert done.stdout == "own\nown\n[]\n" and not (tmp_path / "t").exists(), done.stderr


@pytest.mark.parametrize(
    ("variables", "command", "words"),
    [({}, "no-such-program", "no program on the PATH"), ({"KVCANARY_TRACE_RANK": "x"}, sys.executable, "must be an")],
)
def test_what_cannot_run(variables: dict[str, str], command: str, words: str) -> None:
    """One sentence and exit code 2, before anything is started."""
    done = subprocess.run(
        [sys.executable, "-m", "kvcanary_trace", "run", "--", command],
        capture_output=True, text=True, timeout=60, env={**os.environ, **variables},
    )  # fmt: skip
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
