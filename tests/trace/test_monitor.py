"""The live monitor: severities as rows come, whom it tells, and that nobody can harm it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launches import Engine

import kvcanary_trace as kv_canary
from kvcanary_trace.listener import Listener
from kvcanary_trace.monitor import Monitor, Transition
from kvcanary_trace.pressure.check import shortfalls

LIMIT = 1000


def feed(tmp_path: Path, loads: list[dict[str, Any]], **arguments: Any) -> tuple[list[Transition], Any]:
    """Record rows of one series and return the transitions that the callback got."""
    told: list[Transition] = []
    arguments = {"on_pressure": told.append, **arguments}
    with kv_canary.trace(tmp_path, **arguments) as session:
        for step, load in enumerate(loads):
            session.record(step=step, mode="decode", verify_capacity=LIMIT, **load)
    return told, session


def levels(told: list[Transition]) -> list[tuple[str, str]]:
    """(before, after) of each."""
    return [(one.before, one.after) for one in told]


def test_a_ramp_goes_up_the_ladder(tmp_path: Path) -> None:
    """Each severity once on the way up, and the way down again; demand and limit are those of the row."""
    up = [{"verify_demand": demand, "resident_tokens": demand, "waiting_tokens": 0} for demand in range(0, 1100, 2)]
    down = [{"verify_demand": 10, "resident_tokens": 10, "waiting_tokens": 0}] * 2000
    told, session = feed(tmp_path, up + down)
    order = [after for _, after in levels(told)]
    assert order[order.index("breached") - 1 :][:1] == ["critical"] and order[-1] == "info"
    breach = next(one for one in told if one.after == "breached")
    assert (breach.demand, breach.limit, breach.capacity.id, breach.group) == (1002, LIMIT, "verify", "full")
    assert breach.step == 501 and breach.rises and session.stats.callback_errors == 0
    critical = next(one for one in told if one.after == "critical")
    assert critical.step < breach.step and critical.probability is not None and critical.probability >= 0.06


def test_queued_work_is_seen_before_it_runs(tmp_path: Path) -> None:
    """Demand is far from the limit; what waits is not."""
    calm = [{"verify_demand": 100, "resident_tokens": 100, "waiting_tokens": 0}] * 600
    burst = [{"verify_demand": 110, "resident_tokens": 110, "waiting_tokens": 2000}] * 3
    told, _ = feed(tmp_path, calm + burst)
    assert levels(told) == [("info", "critical")] and told[0].step == 600 and told[0].demand == 110


def test_a_load_that_hovers_is_one_transition(tmp_path: Path) -> None:
    """Around a threshold, back and forth, without a forecast in play."""
    told: list[Transition] = []
    with kv_canary.trace(tmp_path, on_pressure=told.append) as session:
        for step in range(300):
            session.record(step=step, violations=80 if step % 2 else 78, violation_ring_capacity=100)
        for step in range(300, 310):
            session.record(step=step, violations=70, violation_ring_capacity=100)
    assert [(one.step, one.after) for one in told] == [(1, "warning"), (300, "info")]


@pytest.mark.parametrize("flush_every", [1000, 1], ids=["at once", "row by row"])
def test_a_prefill_between_decode_steps_is_no_relief(tmp_path: Path, flush_every: int) -> None:
    """Past the limit in every other row: breached once, and until 500 steps after the last, however rows arrive."""
    told: list[Transition] = []
    with kv_canary.trace(tmp_path, on_pressure=told.append) as session:
        for step in range(100):
            session.record(step=step, verify_demand=0 if step % 2 else 1200, verify_capacity=LIMIT)
            if step % flush_every == 0:
                assert session.flush(10)
        for step in range(100, 1200):
            session.record(step=step, verify_demand=0, resident_tokens=0, waiting_tokens=0, verify_capacity=LIMIT)
    assert [(one.step, one.after) for one in told][:1] == [(0, "breached")]
    falls = [one for one in told if one.before == "breached"]
    assert len(falls) == 1 and falls[0].step == 98 + 500


def test_what_settings_rule_out_is_no_forecast(tmp_path: Path) -> None:
    """With fewer running requests than the plan holds, no queue can break it."""
    loads = [{"bs": 8, "resident_reqs": 8, "waiting_reqs": 500, "write_req_capacity": 16}] * 600
    told, _ = feed(tmp_path, loads, engine={"max_running_requests": 16})
    assert levels(told) == []
    told, _ = feed(tmp_path / "free", loads)
    # A queue that never joins stops counting once the estimator has seen that.
    assert levels(told) == [("info", "critical"), ("critical", "info")]


def test_logging(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line for each transition, with what happens past the limit."""
    with caplog.at_level(logging.INFO, "kvcanary_trace.pressure"), kv_canary.trace(tmp_path), kv_canary.step():
        Engine(verify_capacity=10).forward(2, 20)
    (line,) = [one for one in caplog.records if one.name == "kvcanary_trace.pressure"]
    assert line.levelno == logging.WARNING
    assert line.getMessage() == (
        "verify of group full is breached, was info: 40 of 10 (400%); past the limit, the step goes unverified"
    )


def test_it_can_be_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Then nothing is told."""
    with caplog.at_level(logging.INFO), kv_canary.trace(tmp_path, pressure=False) as session, kv_canary.step():
        Engine(verify_capacity=10).forward(2, 20)
    assert session.monitor is None and not [one for one in caplog.records if "pressure" in one.name]


def test_a_callback_that_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Counted, told once, called again."""
    calls = []

    def broken(change: Transition) -> None:
        calls.append(change)
        raise RuntimeError("boom")

    loads = [{"verify_demand": demand} for demand in (10, 1200, *[10] * 1100, 1200)]
    _, session = feed(tmp_path, loads, on_pressure=broken)
    assert session.stats.callback_errors == len(calls) > 1 and session.stats.complete
    assert len([one for one in caplog.records if "callback failed" in one.getMessage()]) == 1


def test_a_callback_that_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows go on to disk, the session closes within its time, what was not told is counted."""
    monkeypatch.setattr("kvcanary_trace.session._CALLBACK_TIMEOUT_S", 0.1)
    release = threading.Event()
    with kv_canary.trace(tmp_path, on_pressure=lambda _: release.wait()) as session:
        for step, demand in enumerate((10, 1200, 10, 1200, 10, 1200)):
            session.record(step=step, verify_demand=demand, verify_capacity=LIMIT)
        assert session.flush(10)
    assert session.stats.steps == 6 and session.stats.callbacks_dropped > 0
    release.set()


def test_a_full_queue_is_counted() -> None:
    """The drain thread never waits for a callback."""
    listener = Listener(lambda _: None)
    for _ in range(1030):
        listener.tell(None)  # type: ignore[arg-type]
    assert listener.dropped == 6


def test_a_monitor_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows are recorded all the same."""

    def broken(*_: Any) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(Monitor, "update", broken)
    with kv_canary.trace(tmp_path) as session, kv_canary.step():
        pass
    assert session.stats.steps == 1 and session.stats.observer_errors == 1


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"bs": 8, "tokens": 64, "verify": 100}, []),
        ({"bs": 9}, ["write_req: 9 of 8, 1 request too many: the engine raises"]),
        ({"tokens": 65, "verify": 150}, ["write_entry: 65 of 64, 1 token", "verify: 150 of 100, 50 entry"]),
    ],
)
def test_before_a_launch(wanted: dict[str, int], told: list[str], tmp_path: Path) -> None:
    """`session.check` tells the exact shortfall and what to do, from given limits or from the latest rows."""
    with kv_canary.trace(tmp_path, write_entry_capacity=64) as session:
        assert session.check(bs=10**6) == ()  # nobody knows the limit yet
        with kv_canary.step():
            Engine(verify_capacity=100).forward(2, 5)
        assert session.flush(10)
        found = session.check(**wanted)
    assert [str(one).startswith(words) for one, words in zip(found, told, strict=True)] == [True] * len(told)
    assert all(one.missing > 0 and one.remedy for one in found)


def test_limits_that_were_given(tmp_path: Path) -> None:
    """Before the first row, the capacities of the run file count."""
    capacities = [{"capacity": "verify", "group": None, "value": 50, "origin": "derived"}]
    with kv_canary.trace(tmp_path, capacities=capacities) as session:
        (short,) = session.check(verify=51)
    assert (short.demand, short.limit, short.missing) == (51, 50, 1)


def test_bad_demands() -> None:
    """Unknown capacities and negative demands are refused."""
    with pytest.raises(ValueError, match="capacity must be one of write_req"):
        shortfalls({}, {"entries": 1})
    with pytest.raises(ValueError, match="at least 0, got -1"):
        shortfalls({}, {"verify": -1})


def test_many_rows_at_once_cost_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a flush of thousands the estimator takes the highest of each 25 steps; no breach is missed."""
    fed: list[int] = []
    monitor_module = pytest.importorskip("kvcanary_trace.monitor")
    original: Callable[..., Any] = monitor_module._fed
    monkeypatch.setattr(monitor_module, "_fed", lambda *a: fed.append(len(original(*a))) or original(*a))
    told: list[Transition] = []
    with kv_canary.trace(tmp_path, on_pressure=told.append, flush_interval_s=1000) as session:
        session._drain._wait_s = 1000
        assert session.flush(10)
        for step in range(10_000):
            session.record(step=step, verify_demand=1001 if step == 7777 else 10, verify_capacity=LIMIT)
    assert max(fed) <= 401 and [one.step for one in told if one.after == "breached"] == [7777]


def test_a_transition_says_what_work_it_saw(tmp_path: Path) -> None:
    """A small batch beside a long queue: the message has the work that makes it critical."""
    seen: list[Transition] = []
    with kv_canary.trace(tmp_path, on_pressure=seen.append) as session:
        for number in range(40):
            session.record(
                step=number,
                mode="decode",
                bs=2,
                write_req_capacity=64,
                resident_reqs=2,
                waiting_reqs=70 * (number > 20),
            )
            session.flush()
    change = next(one for one in seen if one.capacity.id == "write_req" and one.after == "critical")
    assert change.expected is not None and change.expected > change.demand == 2
    assert f"2 of 64 (3%), {change.expected} with all that runs and waits, breach within 500 steps" in str(change)


class Busy:
    """A sink that burns 20 ms of a core for every turn."""

    def __init__(self) -> None:
        self.turns = 0

    def open(self, run: Any) -> None:
        pass

    def write(self, batches: Any) -> None:
        self.turns += 1
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass

    def close(self) -> None:
        pass


def test_frequent_turns_leave_the_core_to_the_engine() -> None:
    """Turns that are dear come seldom: at most a twentieth of the time, not ten a second."""
    busy = Busy()
    with kv_canary.trace(busy, on_pressure=lambda change: None, flush_interval_s=30):
        time.sleep(2.05)
        assert 2 <= busy.turns <= 7


def test_a_critical_transition_says_when(tmp_path: Path) -> None:
    """Steps with their interval, and seconds at the pace of the rows; none once it has come."""
    ramp = [
        {"verify_demand": 2 * i, "resident_tokens": 2 * i, "waiting_tokens": 0, "time_ns": 10**18 + i * 20_000_000}
        for i in range(600)
    ]
    told, _ = feed(tmp_path, ramp)
    critical = next(one for one in told if one.after == "critical")
    assert critical.steps is not None and critical.low is not None and critical.high is not None
    assert critical.low < 501 - critical.step < critical.high and critical.low < critical.steps < critical.high
    assert critical.seconds == pytest.approx(critical.steps * 0.02)
    assert f"in about {critical.steps} ({critical.low} to {critical.high}), 5.4 s" in str(critical)
    breached = next(one for one in told if one.after == "breached")
    assert breached.steps is None and breached.seconds is None and "in about" not in str(breached)


def test_a_pace_needs_two_steps(tmp_path: Path) -> None:
    """Rows of one step tell no pace: then there are steps and no seconds."""
    told, _ = feed(tmp_path, [{"verify_demand": 900, "resident_tokens": 900, "waiting_tokens": 5000}])
    (only,) = told
    assert only.after == "critical" and only.steps is not None and only.seconds is None
    assert "s;" not in str(only).split("likely")[1].split("past")[0].replace("steps", "")
