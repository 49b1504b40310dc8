"""Faults in a replay with the real kernels: a clean run finds nothing, each fault is found for its own reasons."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from kvcanary_trace.errors import SettingError
from kvcanary_trace.kernels.layout import CanaryLaunchTag, FailReason, SlotField, ViolationField
from kvcanary_trace.replay.canary import Canary
from kvcanary_trace.replay.engine import Engine
from kvcanary_trace.replay.faults import FAULT_REASONS, Fault, FaultInjector, Struck, parse_fault
from kvcanary_trace.replay.knobs import EngineKnobs
from kvcanary_trace.replay.synthetic import bursty_workload

LOAD = bursty_workload(16, seed=5, input_len=70, output_len=40, burst_every_s=1.0, quiet_rate_per_s=12.0)
ROOMY = EngineKnobs(max_running_requests=8, max_total_tokens=20_000, chunked_prefill_size=64)
TIGHT = replace(ROOMY, max_total_tokens=LOAD.longest + 32)


@dataclass(frozen=True)
class Found:
    """One violation row, with the step it was found in."""

    step: int
    tag: CanaryLaunchTag
    slot: int
    reasons: FailReason


def play(
    knobs: EngineKnobs, *kinds: str, at: int = 40, mirrored: bool = False
) -> tuple[Canary, list[Found], list[Struck], list[Fault]]:
    """Replay with faults of these kinds from step `at` on."""
    engine = Engine(LOAD, knobs)
    canary = Canary(engine, torch.device("cpu"), mirrored=mirrored)
    faults = FaultInjector([Fault(kind, at) for kind in kinds], engine, canary, seed=1)
    found: list[Found] = []
    while (batch := engine.schedule()) is not None:
        before = canary.num_violations
        canary.run(batch, faults.before(batch))
        faults.after()
        engine.complete(batch)
        for row in canary.violation_ring[before : canary.num_violations].tolist():
            tag, slot = CanaryLaunchTag(row[ViolationField.LAUNCH_TAG]), row[ViolationField.SLOT]
            found.append(Found(batch.step, tag, slot, FailReason(row[ViolationField.FAIL_REASON])))
    return canary, found, faults.struck, faults.pending


CLEAN = {
    "roomy": ROOMY,
    "tight": TIGHT,
    "mixed": replace(TIGHT, schedule="mixed"),
    "pages": replace(TIGHT, page_size=8),
    "window": replace(TIGHT, swa_window=24),
    "window-pages-mixed": replace(TIGHT, swa_window=24, page_size=8, schedule="mixed"),
}


@pytest.mark.parametrize("mirrored", [False, True], ids=["in-place", "mirrored"])
@pytest.mark.parametrize("knobs", CLEAN.values(), ids=CLEAN)
def test_clean_replay_has_no_violations(knobs: EngineKnobs, mirrored: bool) -> None:
    """And every demanded entry was verified at both endpoints, every token written; also from copies, as on devices."""
    clean_replay(knobs, torch.device("cpu"), mirrored)


@pytest.mark.gpu
@pytest.mark.parametrize("knobs", CLEAN.values(), ids=CLEAN)
def test_clean_replay_on_a_device(knobs: EngineKnobs) -> None:
    """The same with the Triton kernels."""
    clean_replay(knobs, torch.device("cuda"), True)


def clean_replay(knobs: EngineKnobs, device: torch.device, mirrored: bool) -> None:
    """Replay `LOAD` and check that nothing was found or left out."""
    demanded, written = 0, 0
    engine = Engine(LOAD, knobs)
    canary = Canary(engine, device, mirrored=mirrored)
    while (following := engine.schedule()) is not None:
        batch = following
        canary.run(batch)
        demanded += batch.num_entries
        written += batch.num_tokens
        engine.complete(batch)
    assert canary.num_violations == 0
    last = int(batch.out_cache_loc[-1])
    field = SlotField.REAL_KV_HASH
    assert canary.groups[0].tail.canary_buf.view(torch.int64)[last, field] != 0  # of bytes that the model wrote
    assert canary.groups[0].head.canary_buf.view(torch.int64)[last, field] == 0
    for context in (canary.groups[0].head, canary.groups[0].tail):
        assert context.slot_run_counter.item() == demanded + written
        assert context.kernel_run_counter.item() == 2 * engine.stats.steps


HEAD_AND_TAIL = {CanaryLaunchTag.HEAD_K_FULL, CanaryLaunchTag.TAIL_K_FULL}
WINDOW = {CanaryLaunchTag.HEAD_K_SWA, CanaryLaunchTag.TAIL_K_SWA}
TAGS = {
    "kv-flip": {CanaryLaunchTag.TAIL_K_FULL},
    "slot-swap": HEAD_AND_TAIL,
    "row-reuse": HEAD_AND_TAIL,
    "token-flip": HEAD_AND_TAIL,
    "stale-swa": WINDOW,
}


@pytest.mark.parametrize("mirrored", [False, True], ids=["in-place", "mirrored"])
@pytest.mark.parametrize("kind", FAULT_REASONS)
def test_each_fault_is_found_where_and_why(kind: str, mirrored: bool) -> None:
    """In the step it strikes, by the launches that can see it, with exactly its reasons."""
    knobs = replace(ROOMY, swa_window=24) if kind == "stale-swa" else ROOMY
    _, found, struck, pending = play(knobs, kind, mirrored=mirrored)
    assert not pending
    (strike,) = struck
    assert strike.step >= 40
    assert found[0].step == strike.step
    first = [row for row in found if row.step == strike.step]
    assert {row.tag for row in first} == TAGS[kind]
    reasons = FailReason(0)
    for row in first:
        reasons |= row.reasons
    assert reasons == FAULT_REASONS[kind]


def test_flipped_bytes_stay_until_rewritten_and_swaps_do_not() -> None:
    """Flipped bytes are found at every step that reads the slot; a swap is over with its step."""
    _, found, struck, _ = play(ROOMY, "kv-flip")
    slot = int(struck[0].what.split()[-1])
    assert {row.slot for row in found} == {slot}
    assert len({row.step for row in found}) > 1
    for mirrored in (False, True):
        _, found, struck, _ = play(ROOMY, "slot-swap", mirrored=mirrored)
        assert {row.step for row in found} == {struck[0].step}
        assert {FailReason(3), FailReason(1)} == {row.reasons for row in found}


def test_faults_wait_for_a_victim_or_are_reported_missed() -> None:
    """Step 0 has no prefix to damage: the fault strikes later. After the last step nothing is struck."""
    _, _, struck, pending = play(ROOMY, "slot-swap", at=0)
    assert struck[0].step > 0
    assert not pending
    _, found, struck, pending = play(ROOMY, "kv-flip", at=10**6)
    assert (found, struck) == ([], [])
    assert pending == [Fault("kv-flip", 10**6)]


def test_same_seed_same_victims() -> None:
    """Injection is as deterministic as the engine."""
    assert play(ROOMY, "kv-flip", "slot-swap")[1:] == play(ROOMY, "kv-flip", "slot-swap")[1:]


def test_fault_names() -> None:
    """KIND@STEP, or one sentence that lists the kinds."""
    assert parse_fault("kv-flip@120") == Fault("kv-flip", 120)
    with pytest.raises(
        SettingError, match="kind of kv-flip, slot-swap, stale-swa, row-reuse, token-flip, got 'rust@3'"
    ):
        parse_fault("rust@3")
    for wrong in ("kv-flip", "kv-flip@", "kv-flip@-1", "kv-flip@x"):
        with pytest.raises(SettingError, match="needs a step number from 0"):
            parse_fault(wrong)
    with pytest.raises(SettingError, match="needs a sliding-window group"):
        play(ROOMY, "stale-swa")
