"""Read a trace: which capacity will break, when, and what to change. DuckDB over the files; torch is never imported.

Names load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .advice import Advice, Recommendation, recommend
    from .comparison import Comparison, Move, compare
    from .coverage import Coverage
    from .dataset import Dataset, Run, load, open_dataset
    from .explanation import Explanation, explain
    from .findings import Breach, Finding, Remedy
    from .losses import Losses
    from .result import Analysis, analyze
    from .scenarios import Scenario, WhatIf, what_if

_HOME = {
    "Advice": "advice",
    "Analysis": "result",
    "Breach": "findings",
    "Comparison": "comparison",
    "Coverage": "coverage",
    "Dataset": "dataset",
    "Explanation": "explanation",
    "Finding": "findings",
    "Losses": "losses",
    "Move": "comparison",
    "Recommendation": "advice",
    "Remedy": "findings",
    "Run": "dataset",
    "Scenario": "scenarios",
    "WhatIf": "scenarios",
    "analyze": "result",
    "compare": "comparison",
    "explain": "explanation",
    "load": "dataset",
    "open_dataset": "dataset",
    "recommend": "advice",
    "what_if": "scenarios",
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
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
