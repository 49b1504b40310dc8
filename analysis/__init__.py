"""Read a trace: which capacity will break, when, and what to change. DuckDB over the files; torch is never imported.

Names load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .coverage import Coverage
    from .dataset import Dataset, Run, load, open_dataset
    from .findings import Breach, Finding, Remedy
    from .losses import Losses
    from .result import Analysis, analyze

_HOME = {
    "Analysis": "result",
    "Breach": "findings",
    "Coverage": "coverage",
    "Dataset": "dataset",
    "Finding": "findings",
    "Losses": "losses",
    "Remedy": "findings",
    "Run": "dataset",
    "analyze": "result",
    "load": "dataset",
    "open_dataset": "dataset",
}

__all__ = [
    "Analysis",
    "Breach",
    "Coverage",
    "Dataset",
    "Finding",
    "Losses",
    "Remedy",
    "Run",
    "analyze",
    "load",
    "open_dataset",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return list(__all__)
