"""Read a trace: which capacity will break, when, and what to change. DuckDB over the files; torch is never imported.

Names load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compare import Comparison, Move, compare
    from .coverage import Coverage
    from .dataset import Dataset, Run, load, open_dataset
    from .explain import Explanation, explain
    from .findings import Breach, Finding, Remedy
    from .losses import Losses
    from .recommend import Advice, Recommendation, recommend
    from .result import Analysis, analyze
    from .what_if import Scenario, WhatIf, what_if

_HOME = {
    "Advice": "recommend",
    "Analysis": "result",
    "Breach": "findings",
    "Comparison": "compare",
    "Coverage": "coverage",
    "Dataset": "dataset",
    "Explanation": "explain",
    "Finding": "findings",
    "Losses": "losses",
    "Move": "compare",
    "Recommendation": "recommend",
    "Remedy": "findings",
    "Run": "dataset",
    "Scenario": "what_if",
    "WhatIf": "what_if",
    "analyze": "result",
    "compare": "compare",
    "explain": "explain",
    "load": "dataset",
    "open_dataset": "dataset",
    "recommend": "recommend",
    "what_if": "what_if",
}

__all__ = [
    "Advice",
    "Analysis",
    "Breach",
    "Comparison",
    "Coverage",
    "Dataset",
    "Explanation",
    "Finding",
    "Losses",
    "Move",
    "Recommendation",
    "Remedy",
    "Run",
    "Scenario",
    "WhatIf",
    "analyze",
    "compare",
    "explain",
    "load",
    "open_dataset",
    "recommend",
    "what_if",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value  # over the module of the same name, which the import has put there
    return value


def __dir__() -> list[str]:
    return list(__all__)
