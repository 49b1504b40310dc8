"""Drives an engine over a workload, step by step, into a trace: with the real kernels or with their demands alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from kvcanary_trace.errors import SettingError
from kvcanary_trace.schema import ErrorCode

from .batch import Batch
from .engine import Engine
from .knobs import EngineKnobs, EngineSizes
from .progress import ReplayProgress
from .workloads import Workload

if TYPE_CHECKING:
    from kvcanary_trace.session import Session
    from kvcanary_trace.stats import TraceStats

    from .canary import Canary
    from .faults import Fault, FaultInjector, Struck

__all__ = ["ReplayResult", "replay_workload"]

OnError = Literal["stop", "continue"]
Overflow = Literal["skip", "rotate"]
_NS_PER_S: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay did.

    Attributes:
        entries: Verify entries demanded, over both groups.
        tokens: Tokens written.
        violations: Found by the canaries; 0 with kernels off.
        errors: Steps that a launcher refused as one launch.
        first_error: The first of those steps and its message.
        completed: False when the run stopped at an error.
        struck, missed: Faults that were put in, and those that never could be.
        virtual_s, wall_s: Seconds of the engine's clock, and of the wall's.
    """

    run_id: str
    steps: int
    requests: int
    finished_reqs: int
    retractions: int
    entries: int
    tokens: int
    violations: int
    errors: int
    first_error: tuple[int, str] | None
    completed: bool
    struck: tuple[Struck, ...]
    missed: tuple[Fault, ...]
    virtual_s: float
    wall_s: float
    stats: TraceStats


def replay_workload(
    workload: Workload,
    out: Path,
    *,
    knobs: EngineKnobs | None = None,
    kernels: bool = True,
    device: str = "cpu",
    overflow: Overflow = "skip",
    on_error: OnError = "stop",
    faults: Sequence[Fault] = (),
    seed: int = 0,
    progress: bool | None = None,
    detail: Literal["none", "requests"] = "none",
    settings: dict[str, Any] | None = None,
) -> ReplayResult:
    """Replay a workload into a new run of the dataset at `out`.

    Args:
        workload: As read and shaped.
        out: Dataset folder; an existing one gets one more run, under a fresh id.
        knobs: The engine's knobs.
        kernels: False records the demands without running a kernel.
        device: cpu or cuda.
        overflow: What a plan past its verify capacity does: skip the step, or rotate through the entries.
        on_error: When a launcher refuses a batch: stop there, or record it and run the batch in chunks.
        faults: To be put in; needs kernels.
        seed: Of the faults' victims.
        progress: Whether to show a bar; None asks the terminal.
        detail: requests records each request of each step too; needs the kernels.
        settings: Further entries for the run file's `engine` part.

    Raises:
        SettingError: Knobs that cannot work, alone or together.
    """
    knobs = knobs or EngineKnobs()
    if faults and not kernels:
        raise SettingError("--inject needs the kernels that would catch it: drop --kernels off")
    if detail == "requests" and not kernels:
        raise SettingError("--detail requests is read from the launches: drop --kernels off")
    if overflow not in ("skip", "rotate") or on_error not in ("stop", "continue"):
        raise SettingError(
            f"--overflow is skip or rotate and --on-error is stop or continue, got {overflow!r} and {on_error!r}"
        )
    sizes = EngineSizes.of(knobs, workload)
    try:
        run = _Run(workload, knobs, sizes, overflow, on_error)
        if kernels:
            run.add_kernels(device, faults, seed)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise SettingError(_too_much_memory(sizes)) from error
    engine_settings = _engine_settings(workload, run.engine, kernels, device, overflow) | (settings or {})
    return run.into(out, engine_settings, progress, detail)


def _too_much_memory(sizes: EngineSizes) -> str:
    """One sentence for buffers that could not be allocated."""
    return (
        f"the engine's buffers do not fit the memory: --max-total-tokens {sizes.pool_tokens}, "
        f"--max-running-requests {sizes.num_rows - 1} of up to {sizes.context_length} tokens, "
        f"--verify-capacity {sizes.verify_capacity}, --write-req-capacity {sizes.write_req_capacity}; lower one of them"
    )


def _engine_settings(
    workload: Workload, engine: Engine, kernels: bool, device: str, overflow: Overflow
) -> dict[str, Any]:
    """The run file's `engine` part."""
    knobs, sizes = engine.knobs, engine.sizes
    clock = engine.clock
    return {
        "workload": workload.name,
        "workload_format": workload.format,
        "requests": len(workload.requests),
        "max_running_requests": knobs.max_running_requests,
        "max_total_tokens": sizes.pool_tokens,
        "chunked_prefill_size": knobs.chunked_prefill_size,
        "page_size": knobs.page_size,
        "swa_window": knobs.swa_window,
        "schedule": knobs.schedule,
        "context_length": sizes.context_length,
        "overflow": overflow,
        "kernels": "on" if kernels else "off",
        "device": device,
        "clock": f"{clock.base_s:g} s + {clock.token_s:g} s/token + {clock.entry_s:g} s/entry",
    }


class _Run:
    """One replay, from the first step to the result."""

    def __init__(
        self, workload: Workload, knobs: EngineKnobs, sizes: EngineSizes, overflow: Overflow, on_error: OnError
    ) -> None:
        self.workload = workload
        self.engine = Engine(workload, knobs, sizes)
        self.overflow: Overflow = overflow
        self.on_error: OnError = on_error
        self.canary: Canary | None = None
        self.faults: FaultInjector | None = None
        self.entries = 0
        self.tokens = 0
        self.errors = 0
        self.first_error: tuple[int, str] | None = None

    def add_kernels(self, device: str, faults: Sequence[Fault], seed: int) -> None:
        """Allocate buffers and prepare the faults."""
        import torch

        from .canary import Canary
        from .faults import FaultInjector

        if device == "cuda" and not torch.cuda.is_available():
            raise SettingError("--device cuda: torch sees no CUDA device here; use --device cpu")
        self.canary = Canary(self.engine, torch.device(device), self.overflow)
        if faults:
            self.faults = FaultInjector(list(faults), self.engine, self.canary, seed)

    def into(
        self,
        out: Path,
        engine_settings: dict[str, Any],
        progress: bool | None,
        detail: Literal["none", "requests"] = "none",
    ) -> ReplayResult:
        """Open a session at `out`, run every step, and sum up."""
        from kvcanary_trace.opening import trace

        started_s = time.monotonic()
        completed = True
        sizes = self.engine.sizes
        session: Session | None = None
        total = len(self.workload.requests)
        try:
            with (
                ReplayProgress(self.workload.name, total, shown=progress) as bar,
                trace(
                    out,
                    engine=engine_settings,
                    capacities=sizes.for_run_file(self.engine.knobs),
                    write_entry_capacity=sizes.write_entry_capacity,
                    detail="requests" if detail == "requests" else None,
                ) as session,
            ):
                if self.canary is None:
                    self._run_demands(session, bar)
                else:
                    with self.canary.one_thread():
                        self._run_kernels(bar)
        except ValueError as error:
            if ErrorCode.of(str(error)) is ErrorCode.OTHER:
                raise
            completed = False  # the launcher's refusal is an answer, and the run file has it
        assert session is not None
        return ReplayResult(
            run_id=session.run_id,
            steps=self.engine.stats.steps,
            requests=total,
            finished_reqs=self.engine.stats.finished_reqs,
            retractions=self.engine.stats.retractions,
            entries=self.entries,
            tokens=self.tokens,
            violations=self.canary.num_violations if self.canary else 0,
            errors=self.errors,
            first_error=self.first_error,
            completed=completed,
            struck=tuple(self.faults.struck) if self.faults else (),
            missed=tuple(self.faults.pending) if self.faults else (),
            virtual_s=self.engine.now_s,
            wall_s=time.monotonic() - started_s,
            stats=session.stats,
        )

    def _run_kernels(self, bar: ReplayProgress) -> None:
        """Every step through the launchers; the session sees them by itself."""
        from kvcanary_trace.steps import step

        assert self.canary is not None
        engine, canary, faults = self.engine, self.canary, self.faults
        start_ns = self.workload.start_ns
        while (batch := engine.schedule()) is not None:
            meant = faults.before(batch) if faults is not None else None
            with step(
                batch.step,
                mode=batch.mode,
                kv_used=batch.kv_used,
                kv_capacity=batch.kv_capacity,
                resident_reqs=batch.resident_reqs,
                resident_tokens=batch.resident_tokens,
                waiting_reqs=batch.waiting_reqs,
                waiting_tokens=batch.waiting_tokens,
                time_ns=start_ns + int(batch.start_s * _NS_PER_S),
            ):
                try:
                    refusal = canary.run(batch, meant, chunk_refused=self.on_error == "continue")
                except ValueError as error:
                    self._refused(batch, str(error))
                    raise
            if refusal is not None:
                self._refused(batch, refusal)
            if faults is not None:
                faults.after()
            self._count(batch)
            engine.complete(batch)
            bar.update(engine.stats.finished_reqs, engine.stats.steps, self.entries)

    def _run_demands(self, session: Session, bar: ReplayProgress) -> None:
        """Every step's rows without a kernel."""
        from .demand import DemandRecorder

        engine = self.engine
        engine.fills_input_ids = False
        recorder = DemandRecorder(
            session,
            engine.sizes,
            window=engine.knobs.swa_window,
            overflow=self.overflow,
            chunk_refused=self.on_error == "continue",
            start_ns=self.workload.start_ns,
        )
        while (batch := engine.schedule()) is not None:
            message = recorder.record(batch)
            if message is not None:
                self._refused(batch, message)
                if self.on_error == "stop":
                    raise ValueError(message)
            self._count(batch)
            engine.complete(batch)
            bar.update(engine.stats.finished_reqs, engine.stats.steps, self.entries)

    def _count(self, batch: Batch) -> None:
        window = self.engine.knobs.swa_window
        self.entries += batch.num_entries + (batch.window_entries(window) if window else 0)
        self.tokens += batch.num_tokens

    def _refused(self, batch: Batch, message: str) -> None:
        """A launcher would not take the batch whole."""
        self.errors += 1
        if self.first_error is None:
            self.first_error = (batch.step, message)
