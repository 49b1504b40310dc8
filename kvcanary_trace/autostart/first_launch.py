"""Stands where a session's observer does, and opens the session when the first launch comes."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import TYPE_CHECKING, Final

from kvcanary_trace import names

if TYPE_CHECKING:
    from kvcanary_trace.kernels.hooks import Call, LaunchObserver

__all__ = ["FirstLaunch"]

_log: Final = logging.getLogger(names.LOGGER)


class FirstLaunch:
    """A `hooks.LaunchObserver` that hands over to the session's. A session of the program's own takes its place."""

    def __init__(self, hooks: ModuleType) -> None:
        self._hooks = hooks
        self._next: LaunchObserver | None = None

    def begin(self, call: Call) -> None:
        """Open the session, then tell it of the launch."""
        if self._next is None:
            self._hooks.observer = None  # type: ignore[attr-defined]  # once, whatever comes of it
            try:
                from kvcanary_trace.opening import trace

                session = trace().__enter__()
                session.automatic = True
            except Exception as error:
                _log.warning("not traced: %s: %s; the program goes on", type(error).__name__, error)
                return
            self._next = self._hooks.observer
        if self._next is not None:
            self._next.begin(call)

    def end(self, call: Call, error: BaseException | None) -> None:
        """Tell the session how the launch ended."""
        if self._next is not None:
            self._next.end(call, error)
