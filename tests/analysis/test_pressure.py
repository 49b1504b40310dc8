"""Capacities, the severity ladder and the forecast: pure functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary_trace.pressure import severity
from kvcanary_trace.pressure.capacities import BY_ID, CAPACITIES, capacity_of_error
from kvcanary_trace.pressure.forecast import Bounds, Load, _rise, announced_steps, forecast, trend
from kvcanary_trace.pressure.work import committed
from kvcanary_trace.schema import STEPS, ErrorCode


def load(rows: int = 1, **columns: Any) -> Load:
    """A series with `columns` given, the rest not measured."""
    values = {name: np.full(rows, np.nan) for name in Load.__slots__}
    values |= {"step": np.arange(rows, dtype=float), "prefill": np.zeros(rows), "limit": np.full(rows, 100.0)}
    values |= {name: np.broadcast_to(np.asarray(value, float), (rows,)) for name, value in columns.items()}
    return Load(**values)


def test_capacities_are_the_designs() -> None:
    """Ids in order, each with columns of the record, a consequence, and a lever or none."""
    assert list(BY_ID) == [
        "write_req", "plan_block", "write_entry", "verify", "violation_ring", "req_to_token", "kv_pool",
    ]  # fmt: skip
    for one in CAPACITIES:
        assert STEPS[one.demand].unit == STEPS[one.limit].unit
        assert one.consequence and one.advice
    assert BY_ID["verify"].flag is None and BY_ID["kv_pool"].flag == "--max-total-tokens"


def test_error_codes_name_their_capacity() -> None:
    """A capacity's own error is its breach; others are nobody's."""
    assert capacity_of_error(ErrorCode.BS_EXCEEDS_WRITE_REQ_CAPACITY.code) is BY_ID["write_req"]
    assert capacity_of_error("other") is None


def test_remedies_leave_room() -> None:
    """A raised value has the need within the warning line; a lowered one is the limit itself."""
    assert BY_ID["write_req"].remedy_value(28, 24, 0.8) == 40
    assert BY_ID["plan_block"].remedy_value(5000, 4096, 0.8) == 4096


@pytest.mark.parametrize(
    ("peak", "breached", "forecast_", "expected"),
    [
        (0.79, False, False, "info"), (0.8, False, False, "warning"), (1.0, False, False, "warning"),
        (0.3, False, True, "critical"), (0.96, False, True, "critical"), (1.01, False, False, "breached"),
        (0.1, True, False, "breached"), (float("nan"), False, False, "info"),
    ],
)  # fmt: skip
def test_ladder(peak: float, breached: bool, forecast_: bool, expected: str) -> None:
    """Where each case stands; exactly full is no breach."""
    assert severity.classify(peak, breached=breached, breach_forecast=forecast_) == expected


def test_ladder_names() -> None:
    """Names are parsed or refused with the accepted ones."""
    assert [severity.rank(severity.parse(name)) for name in severity.LADDER] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="one of info, warning, critical, breached, got 'bad'"):
        severity.parse("bad")


@pytest.mark.parametrize(("slope", "begin"), [(0.005, 0.6), (0.01, 0.3), (0.03, 0.1), (0.001, 0.5)])
def test_a_ramp_is_seen_in_time_and_dated_right(slope: float, begin: float) -> None:
    """Steps to the limit come out exactly on a straight line, and it is seen well before 0.95."""
    steps = np.arange(2000.0)
    line = begin + slope * steps
    seen = next(n for n in range(2, 2000) if trend(steps[:n], line[:n]) is not None)
    assert line[seen - 1] < 0.9
    found = trend(steps[:seen], line[:seen])
    assert found is not None
    assert found.steps_to_limit == pytest.approx((1 - line[seen - 1]) / slope)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.3, 0.97), st.floats(0.0, 0.03))
def test_noise_around_a_level_is_no_trend(seed: int, level: float, noise: float) -> None:
    """Whatever the level, a stationary series that has been there before announces nothing."""
    rng = np.random.default_rng(seed)
    values = np.minimum(level + noise * rng.standard_normal(1500), 1.0)
    assert trend(np.arange(1500.0)[-600:], values[-600:], float(values[:-600].max())) is None


def test_a_trend_skips_what_was_not_measured() -> None:
    """NaN is left out; nothing known is no trend."""
    steps = np.arange(100.0)
    line = 0.4 + 0.005 * steps
    line[::3] = np.nan
    assert trend(steps, line) is not None
    assert trend(steps, np.full(100, np.nan)) is None
    assert trend(steps[:0], steps[:0]) is None


def test_bounds_are_read_however_they_are_spelled() -> None:
    """SGLang's flags or our names; -1 switches chunking off, text is no number."""
    spelled = Bounds.of({"--max-running-requests": 8, "chunked_prefill_size": -1, "context-length": "auto"})
    assert (spelled.max_running_requests, spelled.step_tokens, spelled.context_length) == (8, None, None)
    assert Bounds.of({"schedule": "mixed", "max_prefill_tokens": 100, "chunked-prefill-size": 40}) == Bounds(
        None, 40, None, True
    )


def test_queue_counts_as_far_as_pool_and_limit_admit() -> None:
    """The request limit, then the pool's free slots, bound what a queue can want; sharing stretches the pool."""
    queue = {"resident_reqs": 10, "resident_tokens": 1000, "waiting_reqs": 50, "waiting_tokens": 5000}
    unbounded = load(demand=10, **queue)
    assert committed("write_req", unbounded, Bounds()).likely == 60
    assert committed("write_req", unbounded, Bounds(max_running_requests=16)).likely == 16
    tight = load(demand=10, kv_used=1000, kv_capacity=1250, **queue)
    assert committed("write_req", tight, Bounds()).likely == 13  # 250 free slots, 100 tokens a request
    assert committed("verify", tight, Bounds()).likely == 1000 * 1.0 * 0.01 + 0.01 * 250  # a window verifies 1 %
    shared = load(demand=1000, kv_used=250, kv_capacity=1000, **queue)
    assert committed("verify", shared, Bounds()).likely == 1000 + 750 * 4


def test_nothing_known_announces_nothing() -> None:
    """Without queue, pool or history there is no forecast, and it says that it used rows only."""
    for one in CAPACITIES:
        found = forecast(one.id, load(3, demand=50), Bounds())
        assert (found.cause, found.used) == (None, "rows")


def test_settings_that_keep_demand_within_the_limit_silence_a_slope() -> None:
    """A batch that climbs to the engine's own limit, which fits, is not about to break."""
    ramp = load(60, demand=40 + np.arange(60))
    found = forecast("write_req", ramp, Bounds())
    assert found.cause == "likely" and found.trend is not None
    assert found.steps == pytest.approx(1) and found.low == pytest.approx(1)
    assert found.high is not None and found.high > 200  # slopes before a breach mostly bend
    assert forecast("write_req", ramp, Bounds(max_running_requests=100)).cause is None


def test_step_tokens_are_bounded_by_the_chunk_not_extrapolated() -> None:
    """write_entry: what is queued fills the next chunk; a slope says nothing."""
    ramp = load(60, demand=40 + np.arange(60), waiting_tokens=1e6, waiting_reqs=3, resident_reqs=5)
    assert forecast("write_entry", ramp, Bounds()).cause is None
    assert forecast("write_entry", ramp, Bounds(step_tokens=90)).cause is None
    assert forecast("write_entry", ramp, Bounds(step_tokens=120)).cause == "queued"


def test_announcement_is_causal() -> None:
    """Later rows change nothing about when a breach was announced."""
    ramp = load(81, demand=60 + 0.5 * np.arange(81))
    assert announced_steps("write_req", ramp, Bounds()) == 42  # from 0.795 of the limit on
    assert announced_steps("write_req", load(81, demand=60), Bounds()) == 0
    assert announced_steps("write_req", load(0), Bounds()) == 0


def test_a_level_that_was_reached_before_is_no_trend() -> None:
    """A sawtooth's rise below its own old peak announces nothing; the same rise to a new high does."""
    steps, rise = np.arange(40.0), np.linspace(0.5, 0.8, 40)
    assert trend(steps, rise) is not None
    assert trend(steps, rise, earlier_peak=0.9) is None
    before = np.concatenate([np.full(20, 0.9), rise])
    assert trend(np.arange(60.0), before) is None


def test_a_burst_that_is_here_is_no_trend() -> None:
    """Demand that rises only because queued prompts are taken in stops when the queue is empty."""
    used = 10 + 2.0 * np.arange(30)
    alone = load(30, demand=used, kv_used=used, kv_capacity=100)
    assert _rise("kv_pool", alone, None, 0.0) is not None
    burst = load(30, demand=used, kv_used=used, kv_capacity=100, waiting_tokens=58 - 2.0 * np.arange(30))
    assert _rise("kv_pool", burst, None, 0.0) is None
