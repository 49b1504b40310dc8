"""An engine with launchers of its own: its phases are traced by a decorator, and a row can be given whole.

    python examples/04_other_engine.py [DIR]

The toy engine below checks what it can of its cache at every step and skips the rest, which nobody would see. Its
functions stay as they are; `traced` says which arguments tell the demand.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import kvcanary_trace as kv_canary
from kvcanary_trace.analysis import analyze

CAPACITY = 600


@dataclass
class Batch:
    """Prefix lengths of the running requests."""

    prefix_lens: list[int]


@kv_canary.traced(
    "plan",
    bs=lambda batch: len(batch.prefix_lens),
    verify_demand=lambda batch: sum(batch.prefix_lens),
    verify_capacity=CAPACITY,
    verify_enabled=lambda batch: sum(batch.prefix_lens) <= CAPACITY,
)
def plan(batch: Batch) -> list[int]:
    """The slots to check, or none where they are too many."""
    demand = sum(batch.prefix_lens)
    return list(range(demand)) if demand <= CAPACITY else []


@kv_canary.traced("verify", verify_checked=lambda slots: len(slots))
def verify(slots: list[int]) -> int:
    """Look at each slot."""
    return sum(slot % 7 for slot in slots)


def main(directory: Path) -> int:
    """Serve growing requests, then ask what will break."""
    with kv_canary.trace(directory, engine={"engine": "toy"}) as session:
        for number in range(80):
            batch = Batch([number + 10 * k for k in range(8)])
            with kv_canary.step(mode="decode", resident_reqs=8, waiting_reqs=0):
                verify(plan(batch))
        # Or without any function to decorate: one row, by the names of its columns.
        session.record(step=80, mode="decode", bs=8, verify_demand=920, verify_capacity=CAPACITY, verify_enabled=False)
    for finding in analyze(directory).findings:
        print(f"{finding.severity}: {finding.capacity}: {finding.reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "traces-other")))
