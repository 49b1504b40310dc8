"""The estimator of breaches: one answer live and from files, from the first step on, through every change of regime."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import dataset, steps_table

import kvcanary_trace as kv_canary
from kvcanary_trace.analysis import analyze
from kvcanary_trace.analysis.dataset import open_dataset
from kvcanary_trace.analysis.history import read_loads_and_history
from kvcanary_trace.analysis.result import read_series
from kvcanary_trace.pressure.estimator import claim_probability, claims
from kvcanary_trace.pressure.horizon import Horizon, WorkRows, probability

LIMIT = 1000.0


def walk(rng: np.random.Generator, rows: int, level: float = 300.0, swing: float = 12.0) -> np.ndarray:
    """Demand that wanders around a level."""
    out, x = np.empty(rows), 0.0
    for i in range(rows):
        x = 0.995 * x + rng.normal(0, swing)
        out[i] = max(0.0, level + x)
    return out.round()


def fed(demand: Any, queued: float = 0.0, begin: int = 0) -> Horizon:
    """An estimator after a series of decode rows."""
    horizon = Horizon("verify")
    for step, value in enumerate(demand, begin):
        horizon.update(step, float(value), float(value), queued)
    return horizon


def likely(horizon: Horizon, limit: float = LIMIT) -> float:
    """Its probability."""
    found = horizon.outlook(limit).probability
    assert found is not None
    return found


def test_it_speaks_from_the_first_step() -> None:
    """One row is enough: idle is unlikely, and a queue that cannot fit is not."""
    assert likely(fed([10])) < 0.01
    assert likely(fed([10], queued=5000)) > 0.5


def test_a_restart_forgets_the_run_but_not_how_much_it_rises() -> None:
    """The step number goes back: the high of the old run no longer counts, what was learned of rises does."""
    demand = np.concatenate([walk(np.random.default_rng(0), 3000), np.full(10, 900)])
    horizon = fed(demand)
    rise, before = horizon.rise, likely(horizon)
    horizon.update(0, 50, 50)
    assert horizon.recent_high == 50 and horizon.rise == pytest.approx(rise, rel=0.05) and rise > 0
    assert likely(horizon) < before / 3


def test_a_capacity_that_changes_is_the_one_that_counts() -> None:
    """The limit is asked for with each outlook: raised, the probability falls; lowered, it rises."""
    horizon = fed(walk(np.random.default_rng(1), 3000))
    found = [likely(horizon, limit) for limit in (350, 500, 1000, 4000)]
    assert found == sorted(found, reverse=True) and found[0] > 0.3 and found[-1] < 0.01


def test_idle_time_costs_nothing_and_forgets_nothing_wrong() -> None:
    """An engine that idles for a billion steps: no loop over them, and the old high has passed."""
    horizon = fed(np.full(600, 900))
    high = likely(horizon)
    horizon.update(10**9, 20, 20)
    assert horizon.recent_high == 20 and likely(horizon) < high


def test_not_measured_is_skipped() -> None:
    """NaN changes nothing; residents below what is demanded are not believed."""
    horizon = fed([100, 200])
    before = horizon.outlook(LIMIT)
    horizon.update(2, math.nan, math.nan)
    assert horizon.outlook(LIMIT) == before
    horizon.update(3, 300, 5, math.nan)
    assert horizon.expected == 300


def test_calibrated_or_none() -> None:
    """A capacity without a calibration has no probability, and one that its settings bound has none to fear."""
    horizon = Horizon("write_entry")
    horizon.update(0, 10, 10)
    assert horizon.outlook(LIMIT).probability is None
    assert fed([990]).outlook(LIMIT, ceiling=LIMIT).probability == 0.0


def test_one_state_and_many_agree() -> None:
    """The live monitor's vectorised probability is the outlook's."""
    rng = np.random.default_rng(2)
    for level in (100, 500, 900):
        horizon = fed(walk(rng, 1200, level))
        states = (np.array([value]) for value in (horizon.expected, horizon.rise, horizon.recent_high))
        assert probability(*states, LIMIT)[0] == pytest.approx(likely(horizon), rel=1e-9)


def test_running_work_is_rebuilt_from_rows() -> None:
    """Prefills leave running requests out: they are the last decode row, plus what was prefilled since."""
    work = WorkRows("write_req")
    assert work.update(8, prefill=False) == (8, 0) and work.from_rows
    assert work.update(1, prefill=True, write_entries=512)[0] == 9
    assert work.update(2, prefill=True, write_entries=100)[0] == 10  # a full chunk before: one of the two goes on
    assert work.update(1, prefill=True, write_entries=50)[0] == 11
    assert work.update(11, prefill=False)[0] == 11
    assert work.update(1, prefill=True, resident_reqs=12, waiting_reqs=3) == (12, 3) and not work.from_rows


@pytest.mark.parametrize("told", [True, False], ids=["queue", "rows"])
def test_live_and_from_files_agree(tmp_path: Path, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A burst 8000 steps back is remembered by both, and prefills are counted in by both."""
    rng = np.random.default_rng(3)
    rows = 12_000
    demand = walk(rng, rows, 450)
    demand[4000:4100] = 930
    prefill = np.zeros(rows, bool)
    prefill[rng.choice(rows, 1500, replace=False)] = True
    prefill[-2:] = True
    queue = {"resident_tokens": demand, "waiting_tokens": np.full(rows, 40.0), "resident_reqs": 5, "waiting_reqs": 1}
    seen = np.where(prefill, 30, demand)
    root = dataset(
        tmp_path,
        steps_table(
            rows, mode=np.where(prefill, "prefill", "decode"), verify_demand=seen, verify_capacity=1000,
            write_entries=np.where(prefill, 60, 5), **(queue if told else {}),
        ),
    )  # fmt: skip
    work, live = WorkRows("verify"), Horizon("verify")
    for step in range(rows):
        known = {name: float(values[step]) for name, values in queue.items() if np.ndim(values)} if told else {}
        running, queued = work.update(
            float(seen[step]), prefill=bool(prefill[step]), write_entries=60.0 if prefill[step] else 5.0, **known
        )
        live.update(step, float(seen[step]), running, queued)
    now = live.outlook(LIMIT)
    (offline,) = _outlooks(root)
    assert offline.expected == pytest.approx(now.expected, rel=0.01)
    assert offline.rise == pytest.approx(now.rise, rel=0.02)
    assert offline.probability == pytest.approx(now.probability, rel=0.05)
    if told:
        monkeypatch.setattr("kvcanary_trace.analysis.history._MOST_STEPWISE", 0)
        (offline,) = _outlooks(root)  # as of many series
        assert offline.rise == pytest.approx(now.rise, rel=0.1)
        assert offline.probability == pytest.approx(now.probability, rel=0.15)


def _outlooks(root: Path) -> list[Any]:
    """What the analysis expects of verify."""
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        from kvcanary_trace.pressure import forecast as module

        real = module.outlook_after

        def spy(capacity: str, *arguments: Any) -> Any:
            found = real(capacity, *arguments)
            if capacity == "verify":
                seen.append(found)
            return found

        patch.setattr(module, "outlook_after", spy)
        analyze(root)
    return seen


@pytest.mark.parametrize(("stepwise", "most"), [(8, 20_000), (0, 802)])
def test_history_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stepwise: int, most: int) -> None:
    """However long a run, at most 20 000 rows a series are looked at: maxima of steps or blocks, prefills apart."""
    monkeypatch.setattr("kvcanary_trace.analysis.history._MOST_STEPWISE", stepwise)
    rows = 60_000
    step = np.arange(rows) // 2
    root = dataset(tmp_path, steps_table(rows, step=step, mode=["prefill" if i % 2 else "decode" for i in range(rows)]))
    opened = open_dataset(root)
    with opened.connect() as connection:
        series = read_series(connection, opened, None)
        (loads,), (remembered,) = (one.values() for one in read_loads_and_history(connection, series))
    recent, whole = loads["verify"], remembered["verify"]
    assert recent.step.min() == step[-1] - 999 and len(recent) == 2000
    assert (whole.step[-2000:] == recent.step).all() and (np.diff(whole.step) >= 0).all()
    assert most / 2 < len(whole) - 2000 <= most and whole.step.min() >= step[-1] - 11_025


def test_a_finding_says_what_it_was_told_from(tmp_path: Path) -> None:
    """`queue` where the engine gave its residents, `rows` where they were rebuilt."""
    bs = np.round(1000 * (0.6 + 0.005 * np.arange(45))).astype(int)
    alone = dataset(tmp_path / "a", steps_table(45, bs=bs, write_req_capacity=1000))
    told = dataset(tmp_path / "b", steps_table(45, bs=bs, write_req_capacity=1000, resident_reqs=bs, waiting_reqs=400))
    for root, used in ((alone, "rows"), (told, "queue")):
        (one,) = [one for one in analyze(root).findings if one.capacity == "write_req"]
        assert one.severity == "critical" and one.breach is not None and one.breach.used == used
        assert ("rebuilt from the rows" in one.reason) == (used == "rows")
        assert one.to_json()["breach"]["used"] == used


def test_ranks_runners_and_groups_have_their_own(tmp_path: Path) -> None:
    """One series climbs, the others do not: only its transitions are told, with its names."""
    told: list[Any] = []
    with kv_canary.trace(tmp_path, on_pressure=told.append) as session:
        for step in range(300):
            for runner, group, demand in (("target", "full", 10), ("target", "swa", 10), ("draft", "full", 4 * step)):
                session.record(
                    step=step, runner=runner, group=group, mode="decode", verify_demand=demand, verify_capacity=1000
                )  # fmt: skip
    assert {(one.runner, one.group) for one in told} == {("draft", "full")}
    assert told[-1].after == "breached" and "critical" in {one.after for one in told}


@pytest.mark.parametrize(
    ("capacity", "queue", "fits"),
    [
        ("verify", (2, 600, 400, 100, 400), 100),
        ("verify", (2, 600, 400, 0, 400), 0),
        ("verify", (2, 600, 800, 100, 400), math.inf),  # two tokens a slot: prefixes are shared
        ("verify", (2, 600, 400, math.nan, math.nan), math.inf),
        ("write_req", (3, 600, 400, 250, 400), 2),
        ("write_req", (3, math.nan, 400, 250, 400), math.inf),
        ("kv_pool", (3, 600, 400, 250, 400), 250),
    ],
)
def test_a_queue_counts_as_far_as_the_pool_has_room(capacity: str, queue: tuple[float, ...], fits: float) -> None:
    """Waiting requests, their tokens, resident tokens, free and used slots; what nobody knows bounds nothing."""
    assert WorkRows(capacity).pool_fits(*queue) == fits


def test_a_queue_before_a_full_pool_is_no_breach_to_come() -> None:
    """The same queue is one where the pool has room for it."""
    full, roomy = Horizon("verify"), Horizon("verify")
    full.update(0, 100.0, 100.0, 5000.0, 50.0)
    roomy.update(0, 100.0, 100.0, 5000.0, math.inf)
    assert full.expected == 150 and roomy.expected == 5100
    assert likely(full) < 0.06 < likely(roomy)


def test_a_pool_is_critical_when_it_is_full_and_retraction_is_likely() -> None:
    """Other capacities at their probability, however full."""
    sure, idle = claim_probability("kv_pool") + 0.01, claim_probability("verify") / 2
    assert claims("kv_pool", [sure, sure, 0.0], [0.98, 0.99, 1.0]).tolist() == [False, True, False]
    assert claims("verify", [0.06, idle], [0.1, 0.99]).tolist() == [True, False]


@pytest.mark.parametrize("told", [True, False], ids=["queue", "rows"])
@pytest.mark.parametrize("level", [300, 700, 880, 985])
def test_live_and_files_give_one_severity(tmp_path: Path, told: bool, level: float) -> None:
    """The monitor's last word on a run is what `analyze` says of its files, where no earlier claim still stands."""
    heard: list[Any] = []
    demand = walk(np.random.default_rng(int(level)), 900, level, 1.5)
    with kv_canary.trace(tmp_path, on_pressure=heard.append) as session:
        for step, value in enumerate(demand.astype(int).tolist()):
            queue = {"resident_tokens": value, "waiting_tokens": 0} if told else {}
            session.record(step=step, mode="decode", verify_demand=value, verify_capacity=1000, **queue)
    assert session.stats.complete and demand.max() <= 1000
    live = [one.after for one in heard if one.capacity.id == "verify"]
    (found,) = [one for one in analyze(tmp_path).findings if one.capacity == "verify"]
    assert found.severity == (live[-1] if live else "info")


def test_what_broke_once_is_still_forecast(tmp_path: Path) -> None:
    """A breach long ago hides none to come; while demand is past the limit there is none to come."""
    demand = np.concatenate([[1200.0], np.full(2000, 100.0), 100 + 2.0 * np.arange(420)])
    queue = {"resident_tokens": demand, "waiting_tokens": 0}
    root = dataset(tmp_path / "a", steps_table(len(demand), verify_demand=demand, verify_capacity=1000, **queue))
    (one,) = [one for one in analyze(root).findings if one.capacity == "verify"]
    assert one.severity == "breached" and one.breach is not None and one.breach.probability is not None
    assert one.breach.steps is not None and "; and again: " in one.reason and "to " in one.reason
    short = {name: np.asarray(value)[:1] if np.ndim(value) else value for name, value in queue.items()}
    root = dataset(tmp_path / "b", steps_table(1, verify_demand=demand[:1], verify_capacity=1000, **short))
    (one,) = [one for one in analyze(root).findings if one.capacity == "verify"]
    assert one.severity == "breached" and one.breach is None
