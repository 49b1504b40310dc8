"""Tells a callback of transitions, on a thread of its own: one that raises or blocks harms neither engine nor drain."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Final, TypeAlias

from . import names
from .monitor import Transition

__all__ = ["Callback", "Listener"]

_log: Final = logging.getLogger(f"{names.LOGGER}.pressure")

_MAX_QUEUED: Final = 1024

Callback: TypeAlias = Callable[[Transition], object]


class Listener:
    """Calls somebody's function for each transition. `tell` belongs to the drain thread."""

    def __init__(self, callback: Callback) -> None:
        """Prepare; `start` starts the thread."""
        self._callback = callback
        self._waiting: queue.Queue[Transition | None] = queue.Queue(_MAX_QUEUED)
        self._thread = threading.Thread(target=self._run, name=f"{names.DRAIN_THREAD}-pressure", daemon=True)
        self.errors = 0
        self.dropped = 0
        """Transitions that a callback which blocks did not take in time."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def tell(self, change: Transition) -> None:
        """Hand over one transition; never blocks."""
        try:
            self._waiting.put_nowait(change)
        except queue.Full:
            self.dropped += 1

    def stop(self, timeout_s: float) -> None:
        """Let it finish what waits, for a while; what is left is dropped."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=timeout_s)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.dropped += self._waiting.qsize()
            _log.warning("the on_pressure callback still runs after %g s; it is left alone", timeout_s)

    def _run(self) -> None:
        while (change := self._waiting.get()) is not None:
            try:
                self._callback(change)
            except Exception as error:
                self.errors += 1
                if self.errors == 1:
                    _log.warning("the on_pressure callback failed; it is called again: %s", error, exc_info=error)
