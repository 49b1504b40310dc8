"""An engine that admits fewer requests when its canary is under pressure, and one that does not: which of them breaks?

    python examples/03_shed_load.py [DIR]

Both serve the same ramp of arrivals; the write plan holds 64 requests, which neither engine knows. The one with
`on_pressure` is told when a breach becomes likely, and of which limit; from then on it admits only to nine tenths of
it. Its requests wait; the other one's launches are refused.
"""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from pathlib import Path

import kvcanary_trace as kv_canary
from kvcanary_trace.monitor import Transition

CAPACITY = 64
STEPS = 1600
STEP_S = 0.002  # a forward pass of a small model; the callback comes within 0.1 s
LIFE_STEPS = 240


class Engine:
    """Admits what arrives, up to a ceiling if it was told of one; a request decodes for a while and leaves."""

    def __init__(self) -> None:
        self.running: list[int] = []  # steps at which they are done
        self.waiting: deque[int] = deque()
        self.ceiling = 10**9
        self.refused = 0

    def on_pressure(self, change: Transition) -> None:
        """Runs on a thread of its own, and sets one number."""
        if change.capacity.id == "write_req" and change.after == "critical":
            self.ceiling = change.limit * 9 // 10

    def step(self, session: kv_canary.Session, number: int, arrivals: int) -> None:
        """One turn of the engine's loop."""
        self.waiting.extend([LIFE_STEPS] * arrivals)
        self.running = [done for done in self.running if done > number]
        for _ in range(min(2, len(self.waiting), max(0, self.ceiling - len(self.running)))):  # two prompts a step
            self.running.append(number + self.waiting.popleft())
        bs = len(self.running)
        error = f"kv-canary: bs={bs} exceeds write_req_capacity={CAPACITY}" if session.check(bs=bs) else None
        self.refused += error is not None
        session.record(
            step=number,
            mode="decode",
            bs=bs,
            write_req_capacity=CAPACITY,
            resident_reqs=bs,
            waiting_reqs=len(self.waiting),
            error_message=error,
        )
        time.sleep(STEP_S)


def serve(directory: Path, *, sheds: bool) -> Engine:
    """The same ramp for everybody: from a request in 16 steps to one in 3."""
    engine, dice = Engine(), random.Random(7)
    capacities = [{"capacity": "write_req", "value": CAPACITY, "origin": "argument"}]
    with kv_canary.trace(
        directory, capacities=capacities, on_pressure=engine.on_pressure if sheds else None
    ) as session:
        for number in range(STEPS):
            rate = 1 / 16 + (1 / 3 - 1 / 16) * min(1.0, number / 1000)
            engine.step(session, number, int(dice.random() < rate))
    return engine


def main(directory: Path) -> int:
    """Serve twice and compare."""
    proud = serve(directory, sheds=False)
    shy = serve(directory, sheds=True)
    print(f"without the callback: {proud.refused} launches refused")
    print(f"with it: {shy.refused} launches refused, {len(shy.waiting)} requests wait at the end")
    return 0 if proud.refused and not shy.refused else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "traces-shed")))
