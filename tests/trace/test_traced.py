"""Functions of another engine, traced by a decorator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launches import rows

import kvcanary_trace as kv_canary


@kv_canary.traced("plan", bs=lambda reqs: len(reqs), verify_demand=lambda reqs: sum(reqs), verify_capacity=20)
def plan(reqs: list[int], fail: bool = False) -> str:
    """A plan of somebody else's."""
    if fail:
        raise RuntimeError("kv-canary: bs=3 exceeds write_req_capacity=2")
    return "planned"


@kv_canary.traced("verify", verify_checked=lambda checked: checked)
def verify(checked: int | None) -> None:
    """A verify of somebody else's."""


@kv_canary.traced("write", group="swa", write_entries=lambda tokens: tokens)
def write(tokens: int) -> None:
    """A write without a plan."""


def test_without_a_session() -> None:
    """The function, as it is."""
    assert plan([1]) == "planned" and plan.__name__ == "plan" and plan.__doc__ == "A plan of somebody else's."


def test_phases_make_rows(tmp_path: Path) -> None:
    """One row a forward, facts from arguments, durations; None is null; a second plan is the next forward."""
    with kv_canary.trace(tmp_path) as session, kv_canary.step(3, mode="decode"):
        assert plan([4, 5]) == "planned"
        verify(9)
        verify(None)
        plan([6])
        write(7)
    assert session.stats.complete
    table = {(row["forward"], row["group"]): row for row in rows(tmp_path)}
    first, second, other = table[0, "full"], table[1, "full"], table[1, "swa"]
    assert (first["bs"], first["verify_demand"], first["verify_capacity"], first["verify_checked"]) == (2, 9, 20, None)
    assert (second["bs"], second["verify_demand"]) == (1, 6) and other["write_entries"] == 7
    assert first["plan_ns"] > 0 and first["verify_ns"] > 0 and first["write_ns"] is None and other["write_ns"] > 0
    assert {row["step"] for row in table.values()} == {3} and {row["mode"] for row in table.values()} == {"decode"}


def test_an_error_is_in_the_row(tmp_path: Path) -> None:
    """It is raised unchanged; the row has its code and the demand that broke it."""
    with kv_canary.trace(tmp_path), pytest.raises(RuntimeError, match="exceeds"), kv_canary.step():
        plan([1, 2, 3], fail=True)
    (row,) = rows(tmp_path)
    assert (row["bs"], row["error"]) == (3, "bs-exceeds-write-req-capacity")


def test_a_fact_that_fails(tmp_path: Path) -> None:
    """It is counted, and the function's result is its own."""
    broken: Any = kv_canary.traced("plan", bs=lambda reqs: len(reqs))(lambda reqs: "done")
    with kv_canary.trace(tmp_path) as session, kv_canary.step():
        assert broken(None) == "done"
    assert session.stats.observer_errors == 1 and [row["bs"] for row in rows(tmp_path)] == [None]


def test_what_cannot_be_traced() -> None:
    """Unknown phases, facts and arguments, when the function is decorated."""
    with pytest.raises(ValueError, match="phase must be plan, verify or write, got 'sweep'"):
        kv_canary.traced("sweep")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no fact 'demand'; it has bs, "):
        kv_canary.traced("plan", demand=1)
    with pytest.raises(TypeError, match="fact bs asks for reqs; the function has batch"):
        kv_canary.traced("plan", bs=lambda reqs: 1)(lambda batch: None)
