"""The engine model against a plain memory: every verified slot holds what was written for exactly that prefix."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary_trace.errors import SettingError
from kvcanary_trace.replay.batch import Batch, StepClock
from kvcanary_trace.replay.engine import Engine
from kvcanary_trace.replay.knobs import EngineKnobs, EngineSizes
from kvcanary_trace.replay.synthetic import bursty_workload
from kvcanary_trace.replay.workloads import Request, Workload

SMALL = bursty_workload(40, seed=5, input_len=70, output_len=60, burst_every_s=1.0, quiet_rate_per_s=12.0)


class Memory:
    """What each slot was last written for, as the chain of tokens up to it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.full: dict[int, int] = {}
        self.window: dict[int, int] = {}

    def check(self, batch: Batch) -> None:
        """Read every prefix slot as verify would, then write as write would."""
        engine, at = self.engine, 0
        assert len(np.unique(batch.out_cache_loc)) == batch.num_tokens
        assert batch.out_cache_loc.min() >= engine.knobs.page_size
        for row, prefix, extend in zip(
            batch.req_pool_indices.tolist(), batch.prefix_lens.tolist(), batch.extend_seq_lens.tolist(), strict=True
        ):
            chain = self.chain(row, prefix + extend)
            slots = engine.req_to_token[row, : prefix + extend].tolist()
            assert [self.full.get(slot) for slot in slots[:prefix]] == chain[:prefix]
            new = slice(at, at + extend)
            assert batch.out_cache_loc[new].tolist() == slots[prefix:]
            assert batch.positions[new].tolist() == list(range(prefix, prefix + extend))
            assert batch.input_ids[new].tolist() == engine.tokens[row, prefix : prefix + extend].tolist()
            if engine.swa is not None:
                start = max(0, prefix - engine.swa.window)
                mapped = engine.swa.mapping[slots].tolist()
                assert [self.window.get(slot) for slot in mapped[start:prefix]] == chain[start:prefix]
                assert min(mapped[start:]) > 0
                self.window.update(zip(mapped[prefix:], chain[prefix:], strict=True))
            self.full.update(zip(slots[prefix:], chain[prefix:], strict=True))
            at += extend
        assert at == batch.num_tokens

    def chain(self, row: int, length: int) -> list[int]:
        hashes, last = [], 0
        for token in self.engine.tokens[row, :length].tolist():
            last = hash((last, token))
            hashes.append(last)
        return hashes


def check_pool(engine: Engine) -> None:
    """Every page is free, cached, or owned by one running request; windows likewise."""
    page = engine.knobs.page_size
    pages = engine.pool.free_pages.tolist()
    cached = [slot for node in engine.cache.nodes() for slot in node.slots.tolist()]
    pages += [slot // page for slot in cached if slot % page == 0]
    for running in engine._by_row:
        if running is not None:
            length = int(engine.kv_lens[running.row])
            owned = engine.req_to_token[running.row, running.shared_len : length]
            pages += [slot // page for slot in owned.tolist() if slot % page == 0]
    assert sorted(pages) == list(range(1, engine.pool.capacity // page + 1))
    if engine.swa is not None:
        mapped = engine.swa.mapping[:-1]
        mapped = mapped[mapped > 0].tolist()
        assert sorted(mapped + engine.swa.pool.free_pages.tolist()) == list(range(1, engine.swa.pool.capacity + 1))


def drive(engine: Engine, check: bool = True) -> list[Batch]:
    """All batches of a run, each checked."""
    memory, batches = Memory(engine), []
    while (batch := engine.schedule()) is not None:
        if check:
            memory.check(batch)
        batches.append(batch)
        engine.complete(batch)
        if check:
            check_pool(engine)
    return batches


def end_state(engine: Engine) -> None:
    """Nothing is held by anyone once every request is done."""
    assert engine.stats.finished_reqs == len(engine._requests)
    assert engine.kv_used == 0
    assert engine.cache.protected == 0
    assert (engine.num_resident, engine._resident_tokens, engine._waiting_tokens) == (0, 0, 0)
    if engine.swa is not None:
        assert engine.swa.pool.available + engine.swa.evictable == engine.swa.pool.capacity


ROOMY = EngineKnobs(max_running_requests=8, max_total_tokens=20_000, chunked_prefill_size=64)
TIGHT = replace(ROOMY, max_total_tokens=SMALL.longest + 32)
CASES = {
    "roomy": ROOMY,
    "tight": TIGHT,
    "mixed": replace(TIGHT, schedule="mixed"),
    "pages": replace(TIGHT, page_size=16),
    "pages-mixed": replace(TIGHT, page_size=16, schedule="mixed"),
    "window": replace(TIGHT, swa_window=20),
    "window-pages-mixed": replace(TIGHT, swa_window=20, page_size=16, schedule="mixed"),
    "window-wide": replace(TIGHT, swa_window=500),
}


@pytest.mark.parametrize("knobs", CASES.values(), ids=CASES)
def test_every_slot_holds_what_was_written_for_it(knobs: EngineKnobs) -> None:
    """Sharing, eviction, retraction and windows never hand out a slot that somebody still reads."""
    engine = Engine(SMALL, knobs)
    batches = drive(engine)
    end_state(engine)
    assert engine.stats.prefix_hit_tokens > 0 or knobs.swa_window
    if knobs.max_total_tokens == TIGHT.max_total_tokens:
        assert engine.stats.retractions > 0
        assert engine.stats.evicted_tokens > 0
    for batch in batches:
        limit = max(knobs.chunked_prefill_size, knobs.max_running_requests)
        assert 0 < batch.num_tokens <= limit
        assert batch.bs <= knobs.max_running_requests
        assert 0 < batch.kv_used <= batch.kv_capacity == engine.pool.capacity
        assert batch.resident_reqs <= knobs.max_running_requests
    modes = {batch.mode for batch in batches}
    assert modes == ({"prefill", "decode", "mixed"} if knobs.schedule == "mixed" else {"prefill", "decode"})


def test_without_retraction_each_token_is_written_once() -> None:
    """Prompt tokens less cache hits, plus every generated token but the last, which is never fed back."""
    engine = Engine(SMALL, ROOMY)
    written = Counter[int]()
    for batch in drive(engine, check=False):
        written["tokens"] += batch.num_tokens
    wanted = sum(r.input_len + r.output_len - 1 for r in SMALL.requests)
    assert engine.stats.retractions == 0
    assert written["tokens"] == wanted - engine.stats.prefix_hit_tokens


def test_same_seed_same_run_and_knobs_matter() -> None:
    """Batches are equal word for word in a second run."""
    runs = [drive(Engine(SMALL, knobs), check=False) for knobs in (TIGHT, TIGHT, replace(TIGHT, schedule="mixed"))]
    for one, two in zip(runs[0], runs[1], strict=True):
        assert (one.start_s, one.mode, one.kv_used) == (two.start_s, two.mode, two.kv_used)
        assert (one.out_cache_loc == two.out_cache_loc).all()
        assert (one.input_ids == two.input_ids).all()
    assert len(runs[0]) != len(runs[2])


def test_first_come_first_served_and_resident_load() -> None:
    """A queue drains in order of arrival, and the load a step reports is what it holds."""
    requests = tuple(Request(0.0, 40, 5, np.empty(0, np.int64)) for _ in range(6))
    engine = Engine(Workload("six", "test", requests), replace(ROOMY, max_running_requests=2))
    batch = engine.schedule()
    assert batch is not None
    # 64 tokens: the first prompt whole, 24 tokens of the second.
    assert batch.extend_seq_lens.tolist() == [40, 24]
    assert (batch.resident_reqs, batch.resident_tokens) == (2, 64)
    assert (batch.waiting_reqs, batch.waiting_tokens) == (4, 4 * 40 + 16)
    engine.complete(batch)
    assert engine.now_s == pytest.approx(StepClock().duration_s(64, 0))
    batches = [batch, *drive(engine, check=False)]
    assert all(batch.waiting_reqs >= later.waiting_reqs for batch, later in pairwise(batches))
    end_state(engine)


def test_a_retracted_request_comes_back_first_with_its_output() -> None:
    """It goes ahead of newcomers, and brings its generated tokens along."""
    requests = tuple(Request(0.0, 40, 60, np.empty(0, np.int64)) for _ in range(4))
    engine = Engine(Workload("four", "test", requests), replace(ROOMY, max_total_tokens=160, max_running_requests=2))
    memory, before = Memory(engine), 0
    while (batch := engine.schedule()) is not None:
        memory.check(batch)
        if engine.stats.retractions > before:
            before = engine.stats.retractions
            back, *newcomers = [waiting.number for waiting in engine._waiting]
            assert engine._waiting[0].prompt_len > 40
            assert all(back < number for number in newcomers)
        engine.complete(batch)
    assert before > 0
    end_state(engine)


def test_closed_loop_waits_for_the_answer_and_reuses_its_prefix() -> None:
    """The second request comes after the first is done and has been thought about, and shares its prompt."""
    first = Request(0.0, 128, 10, np.array([1, 2]), 64, scope=0)
    second = Request(0.1, 192, 10, np.array([1, 2, 3]), 64, scope=0, after=0, think_s=5.0)
    engine = Engine(Workload("talk", "test", (first, second)), ROOMY)
    batches = drive(engine)
    later = [batch for batch in batches if batch.start_s >= 5.0]
    assert [batch.prefix_lens.tolist() for batch in later[:1]] == [[128]]
    assert batches[len(batches) - len(later) - 1].start_s < 1.0
    assert engine.stats.prefix_hit_tokens == 128


def test_sizes_are_derived_or_refused() -> None:
    """Defaults follow the workload; what cannot work is one clear sentence."""
    long = Workload("long", "test", (Request(0.0, 300_000, 10, np.empty(0, np.int64)),))
    sizes = EngineSizes.of(EngineKnobs(page_size=16), long)
    assert (sizes.pool_tokens, sizes.verify_capacity) == (300_016, 900_048)
    assert sizes.context_length > 300_010
    assert {row["capacity"]: row["origin"] for row in sizes.for_run_file(EngineKnobs())}["verify"] == "derived"
    with pytest.raises(SettingError, match=r"--max-total-tokens must hold the longest request, 300010 tokens"):
        EngineSizes.of(EngineKnobs(max_total_tokens=1000), long)
    for knobs, sentence in (
        ({"max_running_requests": 0}, "--max-running-requests must be a whole number of at least 1, got 0"),
        ({"swa_window": -1}, "--swa-window must be a whole number of at least 0, got -1"),
        ({"page_size": 3}, "--chunked-prefill-size must be a multiple of --page-size 3, got 2048"),
        ({"schedule": "lifo"}, "--schedule must be prefill-first or mixed, got 'lifo'"),
        ({"schedule": "mixed", "chunked_prefill_size": 64}, "--chunked-prefill-size must be above"),
    ):
        with pytest.raises(SettingError, match=sentence):
            EngineKnobs(**knobs)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([0, 1, 7, 64]),
    st.sampled_from(["prefill-first", "mixed"]),
    st.integers(2, 6),
    st.floats(1.0, 3.0),
)
def test_any_engine_is_sound(seed: int, page: int, window: int, schedule: str, running: int, room: float) -> None:
    """Random load and knobs, pools from just one request upwards."""
    load = bursty_workload(12, seed=seed, input_len=40, output_len=12, burst_every_s=0.5, quiet_rate_per_s=20.0)
    pool = int((load.longest + page) * room)
    knobs = EngineKnobs(
        max_running_requests=running,
        max_total_tokens=pool,
        chunked_prefill_size=32,
        page_size=page,
        swa_window=window,
        schedule=schedule,  # type: ignore[arg-type]
    )
    engine = Engine(load, knobs)
    drive(engine)
    end_state(engine)
