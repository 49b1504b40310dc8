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


class Ranges:
    """Pushes and pops ranges for one thread; attributes are made once for each name and category."""

    __slots__ = ("_attributes", "_domain", "pop")

    def __init__(self, domain: Any) -> None:
        """Use `domain`, an `nvtx.Domain` or anything with its methods."""
        self._domain = domain
        self._attributes: dict[tuple[str, str], Any] = {}
        self.pop: Callable[[], None] = domain.pop_range
        """Close this thread's innermost range."""

    def push(self, name: str, category: str, payload: int | None) -> None:
        """Open a range of this thread.

        Args:
            name: One of `names.RANGES`.
            category: What it works on: a mode for a step, a group for a plan, a launch tag for the rest.
            payload: Active batch size, or None where nobody knows it.
        """
        attributes = self._attributes.get((name, category))
        if attributes is None:
            # Strings and categories are registered with the domain here, once.
            attributes = self._domain.get_event_attributes(message=name, category=category)
            self._attributes[name, category] = attributes
        attributes.payload = payload
        self._domain.push_range(attributes)


def open_domain(wanted: bool) -> Any | None:
    """The domain to give to `Ranges`, or None where no tool listens or NVTX is off.

    A missing `nvtx` package is one sentence in the log; tracing goes on without ranges.
    """
    if not wanted:
        return None
    try:
        nvtx = import_module("nvtx")
        domain = nvtx.get_domain(names.DOMAIN)
    except Exception as error:  # half-installed packages raise all sorts
        _log.warning("NVTX ranges are off: %s: %s; pip install nvtx to get them", type(error).__name__, error)
        return None
    return None if type(domain).__name__ == "DummyDomain" else domain
