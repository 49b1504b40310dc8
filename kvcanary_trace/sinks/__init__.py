"""Where rows go. A sink is three methods; a new one touches no other file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import pyarrow as pa

    from kvcanary_trace.runfile import Run

__all__ = ["Sink"]


@runtime_checkable
class Sink(Protocol):
    """Takes the rows of a run.

    `open` is called on the thread that opens the session, before the first row; what it raises, `trace()` raises.
    `write` and `close` are called on the drain thread; what they raise is counted and reported once, and the engine
    never sees it.
    """

    def open(self, run: Run) -> None:
        """Get ready for `run`, which changes while it runs: read it again when needed."""

    def write(self, batches: Mapping[str, pa.RecordBatch]) -> None:
        """Take the new rows, by table name. Called once per flush, with nothing when there is nothing new.

        A batch whose `write` raised is offered again, with what is new appended, so take all of it or none.
        """

    def close(self) -> None:
        """Put everything where it belongs; `run.status` says how the run ended."""
