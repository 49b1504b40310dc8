"""What a dead process left in its black box becomes sealed Parquet, and tells how the process ended."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kvcanary_trace import runfile
from kvcanary_trace.arrow import flags
from kvcanary_trace.black_box import Box, RingFile
from kvcanary_trace.columns import STEPS_ARROW, steps_batch
from kvcanary_trace.errors import DatasetError
from kvcanary_trace.join import Joined, Joiner
from kvcanary_trace.kernels.layout import ProbeWord, Progress
from kvcanary_trace.lane import MODE_NAMES
from kvcanary_trace.ring import RingReader, Words
from kvcanary_trace.schema import NOT_MEASURED, HostWord

from .live import LIVE_DIR, part_path
from .parquet import write_part

__all__ = ["BoxRecovered", "last_phase", "recover_box"]

RING_NUMBER_BIT: Final = 40


@dataclass(frozen=True, slots=True)
class BoxRecovered:
    """What a black box had, and how its process ended as far as the rows tell.

    Attributes:
        box: Where it was; its folder is gone.
        rows: Rows in its rings.
        sealed: Those that the dataset did not have yet.
        overwritten: Rows that were gone from the rings; the dataset may have them.
        last_step: Highest step of a row, None without rows.
        last_mode: What it did, as `step()` was told.
        last_phase: The last phase of its latest row that left a trace: plan, verify or write.
        last_ns: Unix time of the latest row.
        writing: Whether the process died while a row was being written.
        progress: The last phase that a device completed, where it marked its phases.
    """

    box: Box
    rows: int
    sealed: int
    overwritten: int
    last_step: int | None
    last_mode: str | None
    last_phase: str | None
    last_ns: int | None
    writing: bool
    progress: Progress | None = None

    @property
    def ending(self) -> str:
        """One sentence."""
        if self.last_step is None or self.last_ns is None:
            return "it ended before its first row"
        age_s = (time.time_ns() - self.last_ns) / 1e9
        mode = f" ({self.last_mode})" if self.last_mode not in (None, "unknown") else ""
        phase = f", {self.last_phase} done" if self.last_phase else ""
        torn = "; it died while it wrote the next row" if self.writing else ""
        device = f"; the device completed the {self.progress} last" if self.progress is not None else ""
        return f"its last row is of step {self.last_step:,}{mode}{phase}, {age_s:,.1f} s ago{torn}{device}"


def recover_box(box: Box, directory: Path) -> BoxRecovered:
    """Seal every row of a dead process's rings that its dataset lacks, then remove the box.

    Args:
        box: Of a process that is dead.
        directory: The dataset; live tails of the same run have been sealed before.

    Raises:
        DatasetError: the process is alive, or the box is of another schema.
        OSError: a part cannot be written; the box stays.
    """
    if box.alive:
        raise DatasetError(f"{box.path} belongs to process {box.pid}, which still runs; watch reads it meanwhile")
    devices, hosts, overwritten, writing = [], [], 0, False
    progress: Progress | None = None
    for ring in box.rings():
        reader = RingReader(ring.words)
        rows = reader.read()
        overwritten += reader.overwritten if ring.half == "device" else 0
        writing |= _is_writing(ring)
        progress = max(filter(None, (progress, ring.progress)), default=None)
        if ring.half == "device":
            rows[:, 0] += ring.number << RING_NUMBER_BIT
            devices.append(rows)
        else:
            hosts.append(rows)
    joined = Joiner().join(_all(devices), _all(hosts), last=True)
    fresh = _fresh(joined, directory, box)
    sealed = int(fresh.sum())
    if sealed:
        batch = steps_batch(joined, box.messages).filter(flags(fresh))
        _seal(batch, directory, box)
    found = _summary(box, joined, sealed, overwritten, writing, progress)
    box.remove()
    return found


def last_phase(row: Words) -> str | None:
    """The last phase that left a trace in a device half: [32] int64."""
    if row[ProbeWord.WRITE_NS] != NOT_MEASURED:
        return "write"
    if row[ProbeWord.VERIFY_CHECKED] != NOT_MEASURED:
        return "verify"
    return "plan" if row[ProbeWord.BS] != NOT_MEASURED else None


def _all(parts: Sequence[Words]) -> Words:
    return np.concatenate(parts) if parts else np.empty((0, 32), dtype=np.int64)


def _is_writing(ring: RingFile) -> bool:
    """Whether the newest row carries the mark of one that is being written; a device leaves that mark at any time."""
    first = ring.words[:, 0]
    return not ring.by_device and int(first[np.abs(first).argmax()]) < 0


def _fresh(joined: Joined, directory: Path, box: Box) -> np.ndarray:
    """[rows] bool: rows that no sealed part has. A row is known by its `seq`, a host half alone by its key."""
    if not len(joined):
        return np.zeros(0, dtype=bool)
    folder = part_path(directory, "steps", box.run, box.rank, 0).parent
    parts = sorted(folder.glob("part-*.parquet"))
    if not parts:
        return np.ones(len(joined), dtype=bool)
    tables = [pq.read_table(part, columns=["seq", "step", "forward"], partitioning=None) for part in parts]
    known = pa.concat_tables(tables)
    seqs = known["seq"].drop_null().to_numpy()
    fresh = np.where(joined.has_device, ~np.isin(joined.device[:, ProbeWord.SEQ], seqs), True)
    alone = np.flatnonzero(~joined.has_device)
    if len(alone):
        keys = set(zip(known["step"].to_pylist(), known["forward"].to_pylist(), strict=True))
        for at in alone:
            key = (int(joined.host[at, HostWord.STEP]), int(joined.host[at, HostWord.FORWARD]))
            fresh[at] = key not in keys
    return np.asarray(fresh, dtype=bool)


def _seal(batch: pa.RecordBatch, directory: Path, box: Box) -> None:
    number = 0
    while (path := part_path(directory, "steps", box.run, box.rank, number)).exists():
        number += 1
    names = ("schema", "run", "rank", "host", "pid", "device", "versions", "engine", "capacities")
    brief = {name: box.description.get(name) for name in names}
    temporary = directory / LIVE_DIR / f"steps.run={box.run}.rank={box.rank}.{box.pid}-box.parquet.tmp"
    write_part([batch], STEPS_ARROW, {runfile.METADATA_KEY: json.dumps(brief).encode()}, temporary, path)
    with contextlib.suppress(OSError):  # others may have something there
        temporary.parent.rmdir()


def _summary(
    box: Box, joined: Joined, sealed: int, overwritten: int, writing: bool, progress: Progress | None
) -> BoxRecovered:
    step = mode = phase = last_ns = None
    if len(joined):
        times = np.where(joined.has_device, joined.device[:, ProbeWord.TIME_NS], joined.host[:, HostWord.TIME_NS])
        at = int(times.argmax())
        last_ns = int(times[at])
        key = joined.device[at] if joined.has_device[at] else joined.host[at]
        step = int(key[ProbeWord.STEP])
        phase = last_phase(joined.device[at]) if joined.has_device[at] else None
        number = int(joined.host[at, HostWord.MODE])
        mode = MODE_NAMES[number] if joined.has_host[at] and 0 <= number < len(MODE_NAMES) else None
    return BoxRecovered(box, len(joined), sealed, overwritten, step, mode, phase, last_ns, writing, progress)
