"""The docs say what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_record_page_is_generated() -> None:
    """`docs/record.md` is what the schema makes of it."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "build_tables.py"), "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_example_runs_alone(path: Path, tmp_path: Path) -> None:
    """Every example runs by itself, in an empty folder, and prints something."""
    done = subprocess.run([sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
