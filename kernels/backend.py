"""Which backend a launcher runs on: the device decides, a user may override.

A backend is a module with `plan`, `plan_offsets`, `plan_entries`, `verify`, `write` and `skipped_entries`; what it is
given has passed `checks`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, Literal, TypeAlias

import torch

BackendName: TypeAlias = Literal["torch", "triton"]

BACKEND_VARIABLE: Final = "KVCANARY_TRACE_BACKEND"
_NAMES: Final = ("torch", "triton")

_by_device: dict[torch.device, Any] = {}
_forced: Any = None


def _module(name: str) -> Any:
    if name not in _NAMES:
        raise ValueError(f"kv-canary: backend must be one of {', '.join(_NAMES)}, got {name!r}")
    return import_module(f".{name}_backend", __package__)


def _choose(device: torch.device) -> Any:
    asked = os.environ.get(BACKEND_VARIABLE, "").strip()
    if asked:
        if asked not in _NAMES:
            raise ValueError(f"kv-canary: {BACKEND_VARIABLE} must be one of {', '.join(_NAMES)}, got {asked!r}")
        return _module(asked)
    if device.type == "cuda" and find_spec("triton") is not None:
        return _module("triton")
    return _module("torch")


def backend_for(device: torch.device) -> Any:
    """The backend that launchers use for tensors on `device`.

    `use_backend` comes first, then the environment's KVCANARY_TRACE_BACKEND (read at a device's first launch), then the
    default: Triton on CUDA where it is installed, torch elsewhere.

    Raises:
        ValueError: KVCANARY_TRACE_BACKEND names no backend.
        ImportError: it names Triton, which is not installed.
    """
    if _forced is not None:
        return _forced
    module = _by_device.get(device)
    if module is None:
        module = _by_device.setdefault(device, _choose(device))
    return module


@contextmanager
def use_backend(name: BackendName | None) -> Iterator[None]:
    """Run every launch of the process inside the block on one backend; None gives the choice back to the device.

    Triton works on CPU tensors only where TRITON_INTERPRET=1 was set before triton was first imported.

    Raises:
        ValueError: `name` is not a backend's.
        ImportError: Triton was asked for and is not installed.
    """
    global _forced
    before = _forced
    _forced = None if name is None else _module(name)
    try:
        yield
    finally:
        _forced = before
