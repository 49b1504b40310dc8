"""What a session recorded and what it lost, as numbers."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TraceStats"]


@dataclass(frozen=True, slots=True)
class TraceStats:
    """What a session recorded and what it lost. published = drained + ring_overwritten + pending, always."""

    run: str
    steps: int
    """Rows of table steps given to the sinks."""
    violations: int
    requests: int
    last_step: int | None
    published: int
    """Probe rows put into the rings."""
    drained: int
    pending: int
    ring_overwritten: int
    host_ring_overwritten: int
    rows_dropped: int
    """Rows that a failing sink did not take in time, and details that did not fit."""
    violations_lost: int
    """Violations without detail: their ring was full."""
    violations_lost_from: int | None
    """Step from which on violations are without detail."""
    halves_unmatched: int
    sink_errors: int
    observer_errors: int
    last_lost_seq: int | None
    callback_errors: int = 0
    """Calls of `on_pressure` that raised."""
    callbacks_dropped: int = 0
    """Transitions that `on_pressure` was not told of, because it blocked."""

    @property
    def complete(self) -> bool:
        """Whether nothing was lost."""
        return not any(
            (
                self.ring_overwritten,
                self.host_ring_overwritten,
                self.rows_dropped,
                self.violations_lost,
                self.halves_unmatched,
                self.observer_errors,
            )
        )
