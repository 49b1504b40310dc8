"""The black box: a session's rings as files in shared memory, which outlive the process that writes them.

    /dev/shm/kvcanary-trace/<run>.<rank>.<pid>/
        run.json            the run file as it was at the start, with the dataset's folder
        messages.jsonl      texts of errors, in the order of their numbers
        device-0.ring …     one file a ring: a page of header, then rows
        host-0.ring

A session that closes removes its folder. What a dead process left behind is read by `kvcanary-trace recover`, a live
one's rows by `kvcanary-trace watch`: both only map the files.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from kvcanary_trace.kernels.layout import NOT_MEASURED, Progress

from . import runfile
from .errors import DatasetError, SettingError
from .ring import ROW_WORDS, Words
from .schema import SCHEMA_VERSION

__all__ = ["SHM", "BlackBox", "Box", "Half", "RingFile", "RingMemory", "find_boxes"]

SHM: Final = Path("/dev/shm")
FOLDER: Final = "kvcanary-trace"

HEADER_BYTES: Final = 4096
MAGIC: Final = int.from_bytes(b"KVCTRING", "little")
_ROW_BYTES: Final = 8 * ROW_WORDS
_RUN_FILE: Final = "run.json"
_MESSAGES: Final = "messages.jsonl"
_KEEP_TURNS: Final = 8  # turns of the drain after which nothing of a thread that ended is under way any more

Half = Literal["device", "host"]


class HeaderWord(IntEnum):
    """int64 words at the beginning of a ring's file."""

    MAGIC = 0
    SCHEMA = 1
    NUMBER = 2  # of the ring: its part of the `seq` column
    ROWS = 3
    ROW_WORDS = 4
    PID = 5
    RANK = 6
    CREATED_NS = 7  # Unix time
    MONOTONIC_NS = 8  # of the same moment: rows of a host carry Unix time, durations are of this clock
    BY_DEVICE = 9  # 1 where a device publishes: it invalidates the row after each that it publishes
    PROGRESS = 10  # written by that device: `layout.Progress`, or NOT_MEASURED


class RingMemory(NamedTuple):
    """Memory of one ring of a box, one behind the other: [512] int64 of header, [rows, 32] int64 of rows."""

    header: Words
    rows: Words


class BlackBox:
    """The writing side. Belongs to the process that made it; a forked child's copy does nothing."""

    def __init__(self, run: runfile.Run, ring_rows: int, dataset: str | None, root: Path | None = None) -> None:
        """Make the folder, and see to it that the first thread's two rings fit.

        Args:
            run: What runs.
            ring_rows: Rows of each ring.
            dataset: Folder that `recover` completes, or None where no sink is one.
            root: Where shared memory is mounted, `/dev/shm` when None.

        Raises:
            SettingError: there is no shared memory, or too little.
        """
        root = SHM if root is None else root
        self._run = run
        self._pid = os.getpid()
        self._retired: list[tuple[int, int]] = []
        self._turn = 0
        self.path = root / FOLDER / f"{run.run}.{run.rank}.{self._pid}"
        wanted = 2 * (HEADER_BYTES + ring_rows * _ROW_BYTES)
        try:
            room = os.statvfs(root)
        except OSError as error:
            raise SettingError(
                f"black_box=True keeps rings in {root}, which cannot be used here ({error.strerror}); leave it off"
            ) from None
        free = room.f_bavail * room.f_frsize
        if free < wanted:
            fitting = max(2, free // 2 // _ROW_BYTES - 32)
            raise SettingError(
                f"black_box=True needs {_mib(wanted)} in {root} for two rings of {ring_rows:,} rows, {_mib(free)} are "
                f"free: give it more (docker run --shm-size=…), or take at most ring_rows={fitting}"
            )
        try:
            self.path.mkdir(parents=True, mode=0o700)
            described = {**run.describe(), "dataset": None if dataset is None else str(Path(dataset).resolve())}
            (self.path / _RUN_FILE).write_text(runfile.to_json(described))
        except OSError as error:
            raise SettingError(f"black_box=True cannot write to {self.path}: {error.strerror}") from None

    def ring(self, half: Half, number: int, rows: int, *, by_device: bool = False) -> RingMemory:
        """A new ring's memory, its rows zero, all of it really there.

        Raises:
            OSError: it does not fit, or the folder is gone. Nothing is left behind.
        """
        path = self.path / f"{half}-{number}.ring"
        size = HEADER_BYTES + rows * _ROW_BYTES
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)  # a page that is not there would be a SIGBUS in the engine
            mapped = mmap.mmap(fd, size)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(fd)
        words = np.frombuffer(mapped, dtype=np.int64)
        header = words[: max(HeaderWord) + 1]
        header[1:] = (
            SCHEMA_VERSION,
            number,
            rows,
            ROW_WORDS,
            self._pid,
            self._run.rank,
            time.time_ns(),
            time.monotonic_ns(),
            by_device,
            NOT_MEASURED,
        )
        header[HeaderWord.MAGIC] = MAGIC  # last: a reader that sees it sees the rest
        return RingMemory(words[: HEADER_BYTES // 8], words[HEADER_BYTES // 8 :].reshape(rows, ROW_WORDS))

    def add_message(self, text: str) -> None:
        """Keep an error's text; its number is its line. Errors are rare: this is the one file that grows."""
        if self._pid == os.getpid():
            with (self.path / _MESSAGES).open("a") as file:
                file.write(json.dumps(text) + "\n")

    def retire(self, number: int) -> None:
        """The rings of a thread that ended have been drained; `turn` removes them once their rows are safe."""
        self._retired.append((self._turn, number))

    def turn(self, *, safe: bool) -> None:
        """Once for each turn of the drain. `safe`: every sink has taken everything."""
        self._turn += 1
        if safe and self._retired:
            gone = [number for turn, number in self._retired if self._turn - turn > _KEEP_TURNS]
            self._retired = [one for one in self._retired if self._turn - one[0] <= _KEEP_TURNS]
            for number in gone:
                for half in ("device", "host"):
                    (self.path / f"{half}-{number}.ring").unlink(missing_ok=True)

    def remove(self) -> None:
        """The session ended well: nothing is left to recover."""
        if self._pid == os.getpid():
            shutil.rmtree(self.path, ignore_errors=True)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


# --- the reading side -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RingFile:
    """One ring of a box, mapped for reading only."""

    path: Path
    half: Half
    number: int
    by_device: bool
    progress: Progress | None  # of the device that publishes, where it marks its phases
    words: Words  # [rows, 32] int64; changes while its process lives


@dataclass(frozen=True, slots=True)
class Box:
    """A black box that some process made."""

    path: Path
    description: Mapping[str, Any]
    """As the run file, with `dataset`: the folder that the process wrote to, or None."""

    @property
    def run(self) -> str:
        return str(self.description["run"])

    @property
    def rank(self) -> int:
        return int(self.description["rank"])

    @property
    def pid(self) -> int:
        return int(self.description["pid"])

    @property
    def alive(self) -> bool:
        """Whether its process may still write."""
        from .sinks.recover import is_alive

        return is_alive(self.description)

    @property
    def messages(self) -> list[str]:
        """Texts of errors; a torn last line is left out."""
        try:
            lines = (self.path / _MESSAGES).read_text().splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            try:
                found.append(str(json.loads(line)))
            except ValueError:
                break
        return found

    def rings(self) -> Iterator[RingFile]:
        """Every ring that is whole, in order; one that was being made when its process died has no rows."""
        for path in sorted(self.path.glob("*.ring")):
            found = _map(path)
            if found is not None:
                yield found

    def remove(self) -> None:
        """Take the folder away."""
        shutil.rmtree(self.path, ignore_errors=True)


def _map(path: Path) -> RingFile | None:
    half = path.name.partition("-")[0]
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None
    if len(mapped) < HEADER_BYTES or half not in ("device", "host"):
        return None
    words = np.frombuffer(mapped, dtype=np.int64)
    if words[HeaderWord.MAGIC] != MAGIC:
        return None
    if words[HeaderWord.SCHEMA] != SCHEMA_VERSION or words[HeaderWord.ROW_WORDS] != ROW_WORDS:
        raise DatasetError(
            f"{path} has schema {words[HeaderWord.SCHEMA]} with rows of {words[HeaderWord.ROW_WORDS]} words, this "
            f"version reads {SCHEMA_VERSION} with {ROW_WORDS}: recover it with the version that wrote it"
        )
    rows = int(words[HeaderWord.ROWS])
    body = words[HEADER_BYTES // 8 :][: rows * ROW_WORDS].reshape(rows, ROW_WORDS)
    by_device = bool(words[HeaderWord.BY_DEVICE])
    progress = Progress.of(int(words[HeaderWord.PROGRESS])) if by_device else None
    return RingFile(path, half, int(words[HeaderWord.NUMBER]), by_device, progress, body)  # type: ignore[arg-type]


def find_boxes(root: Path | None = None) -> list[Box]:
    """All black boxes of this machine, oldest first; a folder without a readable run file is none."""
    found = []
    for path in (SHM if root is None else root).glob(f"{FOLDER}/*/{_RUN_FILE}"):
        try:
            description = json.loads(path.read_text())
            found.append(Box(path.parent, description))
        except (OSError, ValueError):
            continue
    return sorted(found, key=lambda box: (box.description.get("started_ns", 0), box.path.name))
