"""Put on a program's path by `kvcanary-trace run`: its first canary launch opens a session.

Its own sitecustomize runs too. Nothing is imported here that the program does not import itself; SGLang is traced by
its plugin.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))
_HOOKS = "kvcanary_trace.kernels.hooks"


class _Watch(MetaPathFinder):
    """Sees the launchers' hooks being imported, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _HOOKS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Armed(spec.loader)
        return spec


class _Armed(Loader):
    """Loads the module and puts our observer into its slot."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        from kvcanary_trace.autostart.first_launch import FirstLaunch

        module.observer = FirstLaunch(module)  # type: ignore[attr-defined]


def _run_the_programs_own() -> None:
    """The sitecustomize that would have been found without us."""
    rest = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, _Watch())
    _run_the_programs_own()
