"""NVTX ranges: nested as the step is, with the batch size as payload, closed whatever happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launches import Engine

import kvcanary_trace as kv_canary
from kvcanary_trace import names, nvtx_ranges


class Attributes:
    """What a domain gives out; it keeps what is set."""

    def __init__(self, message: str, category: str) -> None:
        self.message, self.category = message, category
        self.payload: Any = "unset"


class Domain:
    """Stands in for `nvtx.Domain`: notes every push and pop."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.made = 0

    def get_event_attributes(self, message: str, color: int, category: str) -> Attributes:
        self.made += 1
        return Attributes(message, category)

    def push_range(self, attributes: Attributes) -> None:
        self.events.append((attributes.message, attributes.category, attributes.payload))

    def pop_range(self) -> None:
        self.events.append(("pop",))


@pytest.fixture
def domain(monkeypatch: pytest.MonkeyPatch) -> Domain:
    """The domain that sessions use."""
    domain = Domain()
    monkeypatch.setattr(nvtx_ranges, "open_domain", lambda wanted: domain if wanted else None)
    return domain


def test_ranges_of_a_step(domain: Domain, tmp_path: Path) -> None:
    """Step around plan, verify and write; categories say phase, and mode, group or launch; payloads are batch sizes."""
    engine = Engine()
    with kv_canary.trace(tmp_path), kv_canary.step(mode="decode", resident_reqs=2):
        engine.plan([4, 0, 6], [1, 1, 1], [1, 1, 1])
        engine.verify()
        engine.write()
    assert domain.events == [
        ("step", "step decode", 2),
        ("plan", "plan full", 2),
        ("pop",),
        ("verify", "verify HEAD_K_FULL", 2),
        ("pop",),
        ("write", "write HEAD_K_FULL", 2),
        ("pop",),
        ("pop",),
    ]
    assert {event[0] for event in domain.events} - {"pop"} == set(names.RANGES)


def test_attributes_are_made_once(domain: Domain, tmp_path: Path) -> None:
    """Strings and categories are registered at the first use of a kind, not at each step."""
    engine = Engine()
    with kv_canary.trace(tmp_path):
        for _ in range(5):
            with kv_canary.step(mode="decode"):
                engine.forward()
    assert domain.made == 4


def test_ranges_close_when_the_body_raises(domain: Domain, tmp_path: Path) -> None:
    """Errors in a launch, in a step, and a session that closes inside: pushes and pops balance."""
    engine = Engine()

    def fail() -> None:
        raise RuntimeError("no")

    with kv_canary.trace(tmp_path) as session:
        with pytest.raises(RuntimeError), kv_canary.step():
            engine.plan([1], [1], [1], launch=fail)
        with kv_canary.step():
            session.close()
    pushes = sum(event != ("pop",) for event in domain.events)
    assert pushes == 3 and len(domain.events) == 2 * pushes


def test_nvtx_can_be_turned_off(domain: Domain, tmp_path: Path) -> None:
    """No domain, no ranges."""
    with kv_canary.trace(tmp_path, nvtx=False), kv_canary.step():
        Engine().forward()
    assert domain.events == []


def test_a_real_domain_takes_our_ranges() -> None:
    """The installed nvtx has what we call; without a tool it hands out a dummy, which costs nothing here."""
    pytest.importorskip("nvtx")
    from nvtx._lib import Domain as RealDomain
    from nvtx._lib.lib import EventAttributes

    assert nvtx_ranges.open_domain(True) is None
    assert nvtx_ranges.open_domain(False) is None
    assert all(callable(getattr(RealDomain, name)) for name in ("get_event_attributes", "push_range", "pop_range"))
    assert hasattr(EventAttributes, "payload")
