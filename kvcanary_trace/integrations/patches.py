"""Replaces functions of another program by wrappers, everywhere they are known by name, and puts them back.

`from module import function` copies a reference: a patch at the source misses it. So every loaded module that holds the
original gets the wrapper too. Putting back restores the very same objects.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["Around", "Patches", "resolve"]

Around: TypeAlias = Callable[..., Any]
"""A hook around a function: called as `hook(original, *args, **kwargs)` instead of it."""


def resolve(target: str) -> tuple[Any, str, Any]:
    """Where a dotted target is defined, its name there, and the object itself, descriptors left as they are.

    Raises:
        ImportError: a module on the way is missing.
        AttributeError: the last name is.
    """
    owner_path, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(owner_path)
    found = vars(owner)[name] if isinstance(owner, type) and name in vars(owner) else getattr(owner, name)
    return owner, name, found


@dataclass(frozen=True, slots=True)
class _Patch:
    owner: Any
    name: str
    original: Any
    wrapper: Any


class Patches:
    """Wrappers that are in place. Attach and detach on one thread."""

    def __init__(self) -> None:
        self._placed: list[_Patch] = []

    def __bool__(self) -> bool:
        return bool(self._placed)

    def wrap(self, target: str, hook: Around) -> None:
        """Put `hook` around a function or method, at its source and wherever a loaded module has it by name.

        Raises:
            ImportError, AttributeError: the target does not exist.
            TypeError: it is no plain function.
        """
        owner, name, original = resolve(target)
        if not isinstance(original, types.FunctionType):
            raise TypeError(f"{target} is no plain function but a {type(original).__name__}")

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return hook(original, *args, **kwargs)

        self._place(owner, name, original, wrapper)
        self._rename(original, wrapper)

    def undo(self) -> None:
        """Put every original back; a name that somebody else has changed since stays theirs."""
        while self._placed:
            patch = self._placed.pop()
            if vars(patch.owner).get(patch.name) is patch.wrapper:
                setattr(patch.owner, patch.name, patch.original)
            for module, name in _holders(patch.wrapper):  # imported by name after the patch
                setattr(module, name, patch.original)

    def _rename(self, original: Any, wrapper: Any) -> None:
        for module, name in _holders(original):
            self._place(module, name, original, wrapper)

    def _place(self, owner: Any, name: str, original: Any, wrapper: Any) -> None:
        setattr(owner, name, wrapper)
        self._placed.append(_Patch(owner, name, original, wrapper))


def _holders(value: Any) -> list[tuple[types.ModuleType, str]]:
    """Loaded modules that hold this very object, and under which name."""
    return [
        (module, name)
        for module in list(sys.modules.values())
        if isinstance(module, types.ModuleType)
        for name, held in list(vars(module).items())
        if held is value
    ]
