"""NVTX ranges of domain `kv_canary`: step, plan, verify and write, with the active batch size as payload.

Without a tool attached `nvtx` hands out a dummy domain, and then there are no ranges at all: they cost one branch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

from . import names

_log: Final = logging.getLogger(names.LOGGER)

COUNTERS_SINCE: Final = "0.2.16"
"""The first nvtx with counters, batches and the NVTXW writer."""


class Ranges:
    """Pushes and pops ranges for one thread; attributes are made once for each name and subject."""

    __slots__ = ("_attributes", "_domain", "pop")

    def __init__(self, domain: Any) -> None:
        """Use `domain`, an `nvtx.Domain` or anything with its methods."""
        self._domain = domain
        self._attributes: dict[tuple[str, str], Any] = {}
        self.pop: Callable[[], None] = domain.pop_range
        """Close this thread's innermost range."""

    def push(self, name: str, subject: str, payload: int | None) -> None:
        """Open a range of this thread.

        Args:
            name: One of `names.RANGES`, or `names.STEP_REPLAY`.
            subject: What it works on: a mode for a step, a group for a plan, a launch tag for the rest.
            payload: Active batch size; for a step the requests that the engine runs; None where nobody knows it.
        """
        attributes = self._attributes.get((name, subject))
        if attributes is None:
            # Strings and categories are registered with the domain here, once.
            attributes = self._domain.get_event_attributes(
                message=name, color=color_of(name), category=category(name, subject)
            )
            self._attributes[name, subject] = attributes
        attributes.payload = payload
        self._domain.push_range(attributes)


def category(name: str, subject: str) -> str:
    """The category of a range: its phase first, so that a filter takes a whole phase or one kind of it."""
    return f"{phase(name)} {subject}"


def phase(name: str) -> str:
    """Step, plan, verify or write, of a range's name."""
    return names.STEP if name == names.STEP_REPLAY else name


def color_of(name: str) -> int:
    """ARGB colour of a range."""
    return names.COLORS[phase(name)]


def open_domain(wanted: bool) -> Any | None:
    """The domain to give to `Ranges`, or None where no tool listens or NVTX is off.

    A missing or too old `nvtx` package is one sentence in the log; tracing goes on without ranges.
    """
    if not wanted:
        return None
    try:
        nvtx = import_module("nvtx")
        domain = nvtx.get_domain(names.DOMAIN) if hasattr(nvtx, "get_domain") else None
        if not hasattr(domain, "push_range"):
            _log.warning(
                "NVTX ranges are off: domains of nvtx %s take none; pip install 'nvtx>=%s' to get ranges and counters",
                version(),
                COUNTERS_SINCE,
            )
            return None
    except Exception as error:  # half-installed packages raise all sorts
        _log.warning("NVTX ranges are off: %s: %s; pip install nvtx to get them", type(error).__name__, error)
        return None
    return None if type(domain).__name__ == "DummyDomain" else domain


def version() -> str:
    """Version of the installed nvtx, for a sentence to the user."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    try:
        return version_of("nvtx")
    except PackageNotFoundError:
        return "of unknown version"
