"""A progress bar on standard error: requests done, steps and entries a second, time left. Silent off a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["ReplayProgress"]

_REFRESH_S: Final = 0.1


class ReplayProgress:
    """Context manager around a replay; `update` costs a clock reading between refreshes, and nothing when silent."""

    def __init__(self, title: str, num_requests: int, *, shown: bool | None = None) -> None:
        self._title = title
        self._total = num_requests
        self.shown = sys.stderr.isatty() if shown is None else shown
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._due_s = 0.0
        self._start_s = 0.0

    def __enter__(self) -> ReplayProgress:
        if self.shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("requests · {task.fields[rate]} · left"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self._total, rate="starting")
            self._start_s = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, finished_reqs: int, steps: int, entries: int) -> None:
        """Show how far the replay is; at most ten times a second."""
        if self._bar is None or self._task is None:
            return
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + _REFRESH_S
        passed_s = max(now_s - self._start_s, 1e-3)
        rate = f"{steps / passed_s:,.0f} steps/s, {entries / passed_s / 1e6:,.1f} M entries/s"
        self._bar.update(self._task, completed=finished_reqs, rate=rate)
