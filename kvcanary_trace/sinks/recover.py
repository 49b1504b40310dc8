"""Seals what dead processes left behind: live tails become Parquet parts, and their run files say how the run ended."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow.parquet as pq

from kvcanary_trace import runfile
from kvcanary_trace.errors import DatasetError

from .live import LIVE_DIR, LiveTail, live_tails, part_path, scan_live
from .parquet import write_part

__all__ = ["Recovered", "is_alive", "recover"]

ENDED: Final = "the process ended without closing its session"


@dataclass(frozen=True, slots=True)
class Recovered:
    """What became of one live tail."""

    tail: LiveTail
    outcome: Literal["sealed", "empty", "alive"]
    rows: int
    torn_bytes: int
    """Bytes after the last whole batch, left out."""


def recover(directory: Path | str) -> list[Recovered]:
    """Seal the live tails of all processes that are dead; those of live ones are left alone.

    A process of another host counts as alive: nothing here can tell. Black boxes are `recover_box`'s, afterwards.

    Returns:
        One entry per tail, in order.

    Raises:
        DatasetError: `directory` is no folder, or a tail is no tail.
        OSError: a part cannot be written; its tail stays.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise DatasetError(f"{directory} is no folder; give the folder that a trace was written to")
    descriptions = _run_files(directory)
    outcomes, runs = [], set()
    for tail in live_tails(directory):
        description = descriptions.get((tail.run, tail.rank), {"pid": tail.pid})
        if is_alive(description):
            outcomes.append(Recovered(tail, "alive", 0, 0))
            continue
        runs.add((tail.run, tail.rank))
        outcomes.append(_seal(tail))
    for key, description in descriptions.items():
        if description.get("status") == "running" and not is_alive(description):
            runs.add(key)
    for run, rank in sorted(runs):
        _clean_up(directory, run, rank)
        if (run, rank) in descriptions:
            end_run(directory, descriptions[run, rank], run, rank)
    return outcomes


def is_alive(description: Mapping[str, Any]) -> bool:
    """Whether the process of a run file may still write; a number that was given to a newer process does not count."""
    if description.get("host", socket.gethostname()) != socket.gethostname():
        return True
    pid = int(description["pid"])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    started_ns = description.get("started_ns")
    began_ns = _process_began_ns(pid)
    # Both clocks are coarse: a second of slack.
    return started_ns is None or began_ns is None or began_ns <= started_ns + 1_000_000_000


def _process_began_ns(pid: int) -> int | None:
    """Unix time at which a process began, or None where the system does not tell."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        lines = Path("/proc/stat").read_text().splitlines()
        boot_s = next(int(line.split()[1]) for line in lines if line.startswith("btime"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    return boot_s * 1_000_000_000 + ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def _seal(tail: LiveTail) -> Recovered:
    try:
        found = scan_live(tail.path)
    except DatasetError:
        if tail.path.stat().st_size > 1 << 16:
            raise
        # Killed while the header was written: no row was ever in it.
        size = tail.path.stat().st_size
        tail.path.unlink()
        return Recovered(tail, "empty", 0, size)
    rows = sum(batch.num_rows for batch in found.batches)
    if rows:
        own = dict(found.schema.metadata or {})
        metadata = {key: own.pop(key) for key in (runfile.METADATA_KEY,) if key in own}
        temporary = tail.path.with_suffix(".parquet.tmp")
        write_part(found.batches, found.schema.with_metadata(own), metadata, temporary, tail.sealed_path)
    tail.path.unlink()
    return Recovered(tail, "sealed" if rows else "empty", rows, found.torn_bytes)


def _run_files(directory: Path) -> dict[tuple[str, int], dict[str, Any]]:
    descriptions = {}
    for path in sorted((directory / "runs").glob("*.json")):
        try:
            description = json.loads(path.read_text())
            descriptions[description["run"], int(description["rank"])] = description
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a run file that cannot be read keeps nobody's rows from being sealed
    return descriptions


def _clean_up(directory: Path, run: str, rank: int) -> None:
    """Remove temporaries, and tails whose part was sealed just before the process died."""
    for path in (directory / LIVE_DIR).glob(f"*run={run}.rank={rank}.*"):
        if path.suffix == ".tmp" or path.suffix == ".arrows":
            path.unlink(missing_ok=True)
    if (directory / LIVE_DIR).is_dir() and not any((directory / LIVE_DIR).iterdir()):
        (directory / LIVE_DIR).rmdir()


def end_run(directory: Path, description: dict[str, Any], run: str, rank: int) -> None:
    """Say in the run file that the process died, and how many rows are sealed."""
    if description.get("status") == "running":
        description["status"], description["error"] = "failed", ENDED
    description["rows"] = {
        table: _num_rows(part_path(directory, table, run, rank, 0).parent.glob("part-*.parquet"))
        for table in ("steps", "violations", "requests")
    }
    path = runfile.run_path(directory, run, rank)
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(runfile.to_json(description))
    temporary.replace(path)


def _num_rows(parts: Iterable[Path]) -> int:
    return sum(pq.read_metadata(part).num_rows for part in parts)
