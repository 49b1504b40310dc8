"""An illegal memory access on the device: the context is dead, the rows published before it are sealed, and the session
names the last phase that was completed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import launches
import pytest

PROGRAM = Path(__file__).parent / "illegal_access.py"
STEPS = [1000 + 7 * number for number in range(7)]


@pytest.mark.gpu
def test_rows_before_an_illegal_access_are_sealed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.strip().splitlines()[-1])
    assert "illegal" in said["error"], said
    rows = sorted(launches.rows(tmp_path), key=lambda row: row["step"])
    assert [row["step"] for row in rows][: len(STEPS)] == STEPS
    assert {row["step"] for row in rows} <= {*STEPS, 5000}
    assert said["drained"] >= len(STEPS)
    (run,) = (json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*.json"))
    assert run["device_progress"] == {"cuda:0": "write of step 5,000, group full, target"}
    assert "it completed the write of step 5,000" in done.stderr
