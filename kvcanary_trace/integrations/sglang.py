"""SGLang in place, without a change of its code: as its plugin, as an OpenTelemetry instrumentor, or by hand.

As a plugin (entry point group `sglang.srt.plugins`) it is active when `KVCANARY_TRACE=1` or `KVCANARY_TRACE_DIR` is
set. Hooks go through SGLang's own registry there; by hand they are placed here, and can be taken away again.
"""

from __future__ import annotations

import logging
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from kvcanary_trace import config, names
from kvcanary_trace.runfile import new_run_id

from .patches import Around, Patches, resolve

__all__ = ["TRIED_VERSIONS", "instrument", "plugin", "uninstrument"]

_log: Final = logging.getLogger(names.LOGGER)

TRIED_VERSIONS: Final = ("0.5.23",)
"""SGLang versions whose real code the tests run under these hooks."""

_patches = Patches()


def plugin() -> None:
    """Entry point of SGLang's plugin framework: registers hooks if tracing is wanted. Never raises into the server."""
    try:
        if not config.is_wanted():
            return
        found = _fitting_hooks()
        if not found:
            return
        # The server's first process names the run; its children inherit the name, so that their ranks are of one run.
        os.environ.setdefault(config.PREFIX + "RUN", new_run_id())
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        for target, hook in found.items():
            HookRegistry.register(target, hook, HookType.AROUND)
    except Exception as error:
        _log.warning("SGLang is not traced: %s: %s; the server goes on", type(error).__name__, error)


def instrument() -> bool:
    """Put hooks around SGLang's canary in this process, before its model runner installs it.

    Returns:
        Whether the hooks are in place. False, with one sentence in the log, where SGLang is missing or of a shape that
        is not known; nothing is changed then.
    """
    if _patches:
        return True
    found = _fitting_hooks()
    try:
        for target, hook in found.items():
            _patches.wrap(target, hook)
    except Exception as error:
        _patches.undo()
        _log.warning("SGLang is not traced: %s: %s", type(error).__name__, error)
    return bool(_patches)


def uninstrument() -> None:
    """Take the hooks of `instrument()` away, restoring the very same objects, and close the session they opened."""
    from . import sglang_hooks

    _patches.undo()
    sglang_hooks.close_opened()


def _fitting_hooks() -> dict[str, Around]:
    """The hooks, if this SGLang has all that they go around; else none, and one sentence says what is missing."""
    from .sglang_hooks import HOOKS, SCHEDULER

    try:
        installed = version("sglang")
    except PackageNotFoundError:
        installed = "of unknown version"
    found, missing = dict(HOOKS), []
    for target in HOOKS:
        try:
            resolve(target)
        except (ImportError, AttributeError) as error:
            found.pop(target)
            missing.append(f"{target} ({error})")
    tried = ", ".join(TRIED_VERSIONS)
    if len(missing) > (SCHEDULER not in found):
        _log.warning(
            "SGLang %s is not traced: it lacks %s; versions tried: %s; the server goes on",
            installed,
            "; ".join(missing),
            tried,
        )
        return {}
    if missing:
        _log.warning("SGLang %s does not tell running and queued work: it lacks %s", installed, missing[0])
    if installed not in TRIED_VERSIONS:
        _log.info("SGLang %s has the shape of the versions tried: %s", installed, tried)
    return found
