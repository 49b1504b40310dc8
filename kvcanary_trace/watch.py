"""`kvcanary-trace watch`: reads along in the black box of a live process, without touching the process."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from .black_box import Box, find_boxes
from .errors import DatasetError, SettingError
from .kernels.layout import Group, ProbeWord, Runner
from .ring import RingReader, Words
from .schema import NOT_MEASURED

__all__ = ["Glance", "Watcher", "pick_box", "watch"]


@dataclass(frozen=True, slots=True)
class Glance:
    """The newest row of one (runner, group), and what went by since the look before. None: not measured.

    Attributes:
        bs, write_req_capacity: Active requests and their limit.
        verify_demand, verify_capacity: Entries to verify and their limit.
        verify_enabled: Whether the step was verified.
        violations: Of the launches so far.
        peak_bs, peak_verify: The highest since the look before.
        rows: Rows since then.
        lost: Rows that were overwritten before they could be read, since the watching began.
    """

    step: int
    runner: str
    group: str
    bs: int | None
    write_req_capacity: int | None
    verify_demand: int | None
    verify_capacity: int | None
    verify_enabled: bool | None
    violations: int | None
    peak_bs: int | None
    peak_verify: int | None
    rows: int
    lost: int

    def __str__(self) -> str:
        who = self.group if self.runner == "target" else f"{self.runner}/{self.group}"
        off = "  UNVERIFIED" if self.verify_enabled is False else ""
        violations = f"  {self.violations:,} violations" if self.violations else ""
        lost = f"  {self.lost:,} rows lost" if self.lost else ""
        bs = _of(self.bs, self.write_req_capacity, self.peak_bs)
        verify = _of(self.verify_demand, self.verify_capacity, self.peak_verify)
        return f"step {self.step:,} {who}: bs {bs}, verify {verify}, {self.rows:,} rows{off}{violations}{lost}"


def _of(demand: int | None, capacity: int | None, peak: int | None) -> str:
    if demand is None:
        return "not measured"
    share = f" of {capacity:,} ({demand / capacity:.0%})" if capacity else ""
    return f"{demand:,}{share}, at most {peak:,}" if peak is not None and peak > demand else f"{demand:,}{share}"


class Watcher:
    """Follows all rings of a box from now on. Only maps its files; the process knows nothing of it."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self._readers: dict[Path, RingReader] = {}
        self._follow(from_now=True)

    def look(self) -> list[Glance]:
        """What was published since the last look; nothing new gives an empty list."""
        self._follow(from_now=False)
        parts = [reader.read() for reader in self._readers.values()]
        rows = [part for part in parts if len(part)]
        if not rows:
            return []
        return list(self._glances(np.concatenate(rows)))

    def _follow(self, *, from_now: bool) -> None:
        for ring in self.box.rings():
            if ring.half == "device" and ring.path not in self._readers:
                reader = self._readers[ring.path] = RingReader(ring.words)
                if from_now:  # the newest row is shown at once, those before it are not this watcher's to lose
                    reader.next_seq = max(1, int(np.abs(ring.words[:, ProbeWord.SEQ]).max()) - 1)

    def _glances(self, rows: Words) -> Iterator[Glance]:
        lost = sum(reader.overwritten for reader in self._readers.values())
        keys = rows[:, [ProbeWord.RUNNER, ProbeWord.GROUP]]
        for runner, group in np.unique(keys, axis=0).tolist():
            mine = rows[(keys == (runner, group)).all(axis=1)]
            last = mine[int(mine[:, ProbeWord.STEP].argmax())]
            enabled = _measured(last[ProbeWord.VERIFY_ENABLED])
            yield Glance(
                step=int(last[ProbeWord.STEP]),
                runner=Runner(runner).name.lower(),
                group=Group(group).name.lower(),
                bs=_measured(last[ProbeWord.BS]),
                write_req_capacity=_measured(last[ProbeWord.WRITE_REQ_CAPACITY]),
                verify_demand=_measured(last[ProbeWord.VERIFY_DEMAND]),
                verify_capacity=_measured(last[ProbeWord.VERIFY_CAPACITY]),
                verify_enabled=None if enabled is None else bool(enabled),
                violations=_measured(last[ProbeWord.VIOLATIONS]),
                peak_bs=_measured(mine[:, ProbeWord.BS].max()),
                peak_verify=_measured(mine[:, ProbeWord.VERIFY_DEMAND].max()),
                rows=len(mine),
                lost=lost,
            )


def _measured(word: Any) -> int | None:
    return None if word == NOT_MEASURED else int(word)


def pick_box(process: str | None, boxes: list[Box]) -> Box:
    """The box of a process id or a path; with neither, the only one of a live process.

    Raises:
        DatasetError: there is no such box, or there are several.
    """
    if process is not None:
        found = [box for box in boxes if str(box.pid) == process or box.path == Path(process)]
        if not found:
            known = ", ".join(str(box.pid) for box in boxes if box.alive) or "none"
            raise DatasetError(f"{process} has no black box: trace(black_box=True) makes one; live ones: {known}")
        return found[-1]
    found = [box for box in boxes if box.alive]
    if len(found) != 1:
        pids = ", ".join(str(box.pid) for box in found) or "none"
        raise DatasetError(f"name the process to watch, processes with a black box: {pids}")
    return found[0]


def watch(
    process: Annotated[str | None, typer.Argument(metavar="[PID|PATH]", help="Whose black box.")] = None,
    pid: Annotated[int | None, typer.Option("--pid", metavar="PID", help="The same, as an option.")] = None,
    interval_s: Annotated[float, typer.Option("--interval", metavar="S", help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show the newest rows and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Follow a live process's steps: demand, capacity and losses, a line for each group and look.

    Needs `trace(black_box=True)` there. Reads shared memory only; the process is not slowed or stopped.

    Exit code 0: the process ended, or --once; 1: it died; 2: there is nothing to watch.
    """
    if not interval_s > 0:
        raise SettingError(f"--interval must be above 0 seconds, got {interval_s:g}")
    if pid is not None and process is not None:
        raise SettingError(f"give the process once: {process} or --pid {pid}")
    box = pick_box(process if pid is None else str(pid), find_boxes())
    watcher = Watcher(box)
    while True:
        ended = not box.path.exists()
        dead = not ended and not box.alive
        for glance in watcher.look():
            typer.echo(json.dumps(asdict(glance)) if as_json else str(glance))
        if once:
            return
        if ended:
            typer.echo(f"process {box.pid} closed its session", err=True)
            return
        if dead:
            typer.echo(f"process {box.pid} died; kvcanary-trace recover takes what it left", err=True)
            raise typer.Exit(1)
        time.sleep(interval_s)
