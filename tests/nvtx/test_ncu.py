"""Nsight Compute selects our kernels by our ranges. Needs a GPU, `ncu`, and permission to read its counters.

pytest -m gpu tests/nvtx/test_ncu.py
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("ncu_program.py")
STEPS = 5


def profiled(include: str | None, folder: Path) -> Counter[str]:
    """Names of the kernels that ncu profiles, with how often."""
    ncu = shutil.which("ncu") or next(map(str, Path("/usr/local").glob("cuda*/bin/ncu")), None)
    if ncu is None:
        pytest.skip("ncu is not installed; it comes with the CUDA toolkit")
    command = [ncu, "--csv", "--metrics", "gpu__time_duration.sum", "--nvtx"]
    command += ["--nvtx-include", include] if include is not None else []
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [*command, sys.executable, str(PROGRAM), "cuda", str(folder)],
        env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        pytest.skip("this user may not read the GPU's performance counters (ERR_NVGPUCTRPERM)")
    assert done.returncode == 0 and f"{STEPS} steps" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    return Counter(row["Kernel Name"].split("(")[0] for row in csv.DictReader(lines))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("include", "kernel"),
    [
        ("kv_canary@plan/", "_plan_kernel"),
        ("kv_canary@verify/", "_verify_kernel"),
        ("kv_canary@write/", "_write_kernel"),
    ],
)
def test_ncu_selects_exactly_our_kernels(tmp_path: Path, include: str, kernel: str) -> None:
    """One phase's kernel, once a step, and none of the model's or of the other phases."""
    assert profiled(include, tmp_path) == {kernel: STEPS}


@pytest.mark.gpu
def test_ncu_sees_more_without_the_filter(tmp_path: Path) -> None:
    """The program has other kernels to leave out, and ours outside of any range too."""
    seen = profiled(None, tmp_path)
    assert seen["_plan_kernel"] == STEPS + 1 and len(seen) > 3


def test_the_program_runs_without_ncu(under_tool: Any, tmp_path: Path) -> None:
    """On the CPU, under our own tool: each launch stands in the range that the filter names, inside its step."""
    code = f"import sys; sys.argv[0] = 'program'; exec(compile(open({str(PROGRAM)!r}).read(), 'program', 'exec'))"
    log = under_tool(code, "cpu", str(tmp_path))
    pushes = [log.strings[event["string"]] for event in log.of("push")]
    assert pushes == ["step", "plan", "verify", "write"] * STEPS
