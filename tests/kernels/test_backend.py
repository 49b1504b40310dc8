"""Which backend runs, the observer's seat, and what a launch costs nobody."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from strategies import plan_case, verify_case, write_case

from kvcanary_trace import kernels
from kvcanary_trace.kernels import backend, hooks, torch_backend

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_by_device", {})
    monkeypatch.delenv(backend.BACKEND_VARIABLE, raising=False)


def test_the_cpu_runs_on_torch() -> None:
    assert backend.backend_for(CPU) is torch_backend


def test_an_override_comes_first_and_ends() -> None:
    with backend.use_backend("triton"):
        assert backend.backend_for(CPU).__name__.endswith("triton_backend")
        with backend.use_backend(None):
            assert backend.backend_for(CPU) is torch_backend
        assert backend.backend_for(CPU).__name__.endswith("triton_backend")
    assert backend.backend_for(CPU) is torch_backend


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backend.BACKEND_VARIABLE, "triton")
    assert backend.backend_for(CPU).__name__.endswith("triton_backend")


def test_unknown_backends_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(ValueError, match="backend must be one of torch, triton, got 'cuda'"),
        backend.use_backend("cuda"),
    ):  # type: ignore[arg-type]
        pass
    monkeypatch.setenv(backend.BACKEND_VARIABLE, "numba")
    with pytest.raises(ValueError, match="KVCANARY_TRACE_BACKEND must be one of torch, triton, got 'numba'"):
        backend.backend_for(CPU)


class Recorder:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def begin(self, call: Any) -> None:
        self.told.append(("begin", type(call).__name__))

    def end(self, call: Any, error: BaseException | None) -> None:
        self.told.append(("end", error))


def test_every_launcher_is_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(hooks, "observer", recorder)
    plan_case(1).run(kernels.launch_canary_plan_kernels)
    write_case(1).run(kernels.launch_canary_write_kernel)
    monkeypatch.setattr(hooks, "observer", None)
    case = verify_case(1, kernels.launch_canary_write_kernel)
    monkeypatch.setattr(hooks, "observer", recorder)
    case.run(kernels.launch_canary_verify_kernel)
    names = ("PlanCall", "WriteCall", "VerifyCall")
    assert recorder.told == [told for name in names for told in (("begin", name), ("end", None))]


def test_a_refusal_is_observed_and_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(hooks, "observer", recorder)
    case = plan_case(1)
    case.inputs["verify_capacity"] += 1
    plans = case.outputs()
    case.inputs["verify_capacity"] += 1
    with pytest.raises(ValueError, match="does not match") as caught:
        kernels.launch_canary_plan_kernels(verify_plan_out=plans[0], write_plan_out=plans[1], **case.inputs)
    assert recorder.told == [("begin", "PlanCall"), ("end", caught.value)]


def test_the_torch_backend_needs_no_triton() -> None:
    """A CPU launch imports torch and numpy, and leaves triton alone."""
    code = (
        "import sys, torch\n"
        "from kvcanary_trace.kernels import *\n"
        "import kvcanary_trace.kernels as k\n"
        "before = 'triton' in sys.modules\n"
        "k.launch_canary_plan_kernels\n"
        "from kvcanary_trace.kernels.backend import backend_for\n"
        "backend_for(torch.device('cpu'))\n"
        "assert before or 'triton' not in sys.modules, 'triton came along'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_launches_from_threads_do_not_share_scratch() -> None:
    """Eight threads plan, verify and write at once; each gets what it would alone."""
    from concurrent.futures import ThreadPoolExecutor

    def work(seed: int) -> list[Any]:
        case = verify_case(seed, kernels.launch_canary_write_kernel, many=True)
        results = [case.run(kernels.launch_canary_verify_kernel) for _ in range(5)]
        plans = [plan_case(seed).run(kernels.launch_canary_plan_kernels)[0] for _ in range(5)]
        rings = [result.violation_ring.tolist() for result in results]
        return [*rings, *(plan.verify_slot_indices.tolist() for plan in plans)]

    alone = [work(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(8))) == alone
