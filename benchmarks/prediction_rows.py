"""Rows of replays without kernels: what `replay --kernels off` records, kept as arrays instead of files.

Each case is a workload under one scheduler, one time scale, and its published or resampled arrivals. The pool of the
free runs is never full, so that demand shows whole and a limit can be laid over it afterwards; the tight runs have
pools that are too small, and requests are retracted.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvcanary_trace.replay.demand import DemandRecorder
from kvcanary_trace.replay.engine import Engine
from kvcanary_trace.replay.knobs import EngineKnobs, Schedule
from kvcanary_trace.replay.readers import read_workload
from kvcanary_trace.replay.workloads import Workload, shape_workload

__all__ = ["CASES", "Case", "Rows", "read_rows", "tight_pools"]

WORKLOADS: Final = Path(__file__).resolve().parents[2] / "shared" / "workloads"
SCALES: Final[dict[str, tuple[float, ...]]] = {
    # From a comfortable load to one whose bursts queue; below the least, the engine never catches up.
    "azure_llm_2023_conv.csv": (0.85, 1.0, 1.5),
    "azure_llm_2023_code.csv": (0.7, 1.0, 1.5),
    "mooncake_conversation.jsonl": (2.5, 3.5, 5.0),
    "coding_conversations": (0.1, 0.3, 1.0),
}
SCHEDULES: Final[tuple[Schedule, ...]] = ("prefill-first", "mixed")
MAX_RUNNING: Final = 512
FREE_POOL_TOKENS: Final = 16_000_000
TIGHT: Final = (0.4, 0.6, 0.8)  # pools of the tight runs, in parts of the most that the free run held

COLUMNS: Final = (
    "bs", "write_entries", "verify_demand", "prefix_len_sum", "kv_used",
    "resident_reqs", "resident_tokens", "waiting_reqs", "waiting_tokens",
)  # fmt: skip
MODES: Final = {"prefill": 0, "decode": 1, "mixed": 2}


@dataclass(frozen=True, slots=True)
class Case:
    """One replay. `seed` None keeps the published arrivals; `pool_tokens` 0 means a pool that is never full."""

    workload: str
    schedule: Schedule
    time_scale: float
    seed: int | None
    pool_tokens: int = 0

    @property
    def name(self) -> str:
        arrivals = "published" if self.seed is None else f"seed {self.seed}"
        pool = f", pool {self.pool_tokens}" if self.pool_tokens else ""
        return f"{self.workload.split('.')[0]}, {self.schedule}, x{self.time_scale:g}, {arrivals}{pool}"


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one replay: [steps] float64 by column name; `mode` as in `MODES`, `retracted` requests a step."""

    case: Case
    columns: dict[str, NDArray[np.float64]]

    def __len__(self) -> int:
        return len(self.columns["bs"])


CASES: Final = tuple(
    Case(workload, schedule, scale, seed)
    for workload, scales in SCALES.items()
    for schedule in SCHEDULES
    for scale in scales
    for seed in (None, 1)
)


def tight_pools(rows: Rows) -> list[Case]:
    """Cases of the same load with pools too small for it; none where the longest request would not fit."""
    peak = float(rows.columns["kv_used"].max())
    longest = float(rows.columns["longest"][0])
    case = rows.case
    sizes = sorted({int(part * peak) for part in TIGHT if part * peak > 1.1 * longest})
    return [Case(case.workload, case.schedule, case.time_scale, case.seed, size) for size in sizes]


class _Collector:
    """Stands where a session does, and keeps the rows."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []

    def record(self, **row: Any) -> None:
        self.rows.append((MODES[row["mode"]], *(row[name] for name in COLUMNS)))


def read_rows(case: Case, cache: Path | None = None, limit: int | None = None) -> Rows:
    """Replay one case.

    Args:
        case: What to replay.
        cache: Folder to keep the rows in, and to take them from when they are there.
        limit: Requests to replay, None for all.
    """
    file = cache / f"{zlib.crc32(f'{case} {limit}'.encode()):08x}.npz" if cache else None
    if file is not None and file.exists():
        with np.load(file) as stored:
            return Rows(case, {name: stored[name].astype(float) for name in stored.files})
    load = shape_workload(
        read_workload(WORKLOADS / case.workload), limit=limit, time_scale=case.time_scale, seed=case.seed
    )
    columns = _replay(load, case)
    if file is not None:
        np.savez_compressed(file, **columns)
    return Rows(case, columns)


def _replay(load: Workload, case: Case) -> dict[str, NDArray[np.float64]]:
    knobs = EngineKnobs(
        max_running_requests=MAX_RUNNING,
        max_total_tokens=case.pool_tokens or FREE_POOL_TOKENS,
        schedule=case.schedule,
    )
    engine = Engine(load, knobs)
    engine.fills_input_ids = False
    kept = _Collector()
    recorder = DemandRecorder(
        kept,  # type: ignore[arg-type]
        engine.sizes, window=0, overflow="skip", chunk_refused=True, start_ns=0,
    )  # fmt: skip
    retracted: list[int] = []
    while (batch := engine.schedule()) is not None:
        recorder.record(batch)
        retracted.append(engine.stats.retractions)
        engine.complete(batch)
    table = np.array(kept.rows, dtype=float)
    columns = {name: np.ascontiguousarray(table[:, i]) for i, name in enumerate(("mode", *COLUMNS))}
    columns["retracted"] = np.diff(np.array(retracted, float), prepend=0.0)
    columns["longest"] = np.full(len(table), float(load.longest))
    return columns
