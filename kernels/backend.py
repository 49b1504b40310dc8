"""Which implementation runs a launch: torch on the host, Triton on a CUDA device, or the one asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from typing import Any, Final

import torch

NAMES: Final = ("torch", "triton")
VARIABLE: Final = "KVCANARY_TRACE_BACKEND"

_asked: ContextVar[str | None] = ContextVar("kvcanary_backend", default=None)


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Run the launches of a block on one backend: `"torch"`, `"triton"`, or None for the default.

    Triton runs on CPU tensors only in its interpreter, with `TRITON_INTERPRET=1` set before triton is imported.

    Raises:
        ValueError: No backend has that name.
    """
    token = _asked.set(_checked(name))
    try:
        yield
    finally:
        _asked.reset(token)


def backend_for(device: torch.device) -> Any:
    """The module whose `plan_offsets`, `plan_entries`, `verify`, `write` and `skipped_entries` serve a device.

    Raises:
        ValueError: `KVCANARY_TRACE_BACKEND` names no backend.
    """
    return _module(_asked.get() or _default(device.type))


def skipped_entries(device: torch.device) -> torch.Tensor:
    """[1] int64 on `device`: entries left out so far because they lay outside a buffer, a map or a row."""
    counter: torch.Tensor = backend_for(device).skipped_entries(device)
    return counter


def _default(device_type: str) -> str:
    asked = _checked(os.environ.get(VARIABLE) or None)
    if asked is not None:
        return asked
    return "triton" if device_type == "cuda" and _has_triton() else "torch"


def _checked(name: str | None) -> str | None:
    if name is not None and name not in NAMES:
        raise ValueError(f"kv-canary: no backend is called {name!r}; there are {', '.join(NAMES)}")
    return name


@cache
def _has_triton() -> bool:
    try:
        import_module("triton")
    except ImportError:
        return False
    return True


@cache
def _module(name: str) -> Any:
    return import_module(f".{name}_backend", __package__)
