"""Fixtures and switches that every test shares."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

# One thread: two torch threads beside busy neighbours are many times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    torch.set_num_threads(1)
    return torch.cuda.is_available()


HAS_CUDA = _has_cuda()
if not HAS_CUDA:
    # Must stand before the first import of triton: without a device its kernels run in the interpreter.
    os.environ["TRITON_INTERPRET"] = "1"

WORKLOADS = Path(__file__).resolve().parents[2] / "shared" / "workloads"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this machine or this run cannot do, each with its reason."""
    wanted = config.getoption("markexpr") or ""
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_CUDA:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("slow") and "slow" not in wanted:
            item.add_marker(pytest.mark.skip(reason="long run; ask for it with -m slow"))
        if item.get_closest_marker("workload") and not WORKLOADS.is_dir():
            item.add_marker(pytest.mark.skip(reason=f"no request traces at {WORKLOADS}"))


@pytest.fixture(scope="session")
def workloads() -> Path:
    """The folder of real request traces."""
    if not WORKLOADS.is_dir():
        pytest.skip(f"no request traces at {WORKLOADS}")
    return WORKLOADS
