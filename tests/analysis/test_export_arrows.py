"""Arrows from the step that wrote a slot: compared with an engine that knows, and silent where nobody can know."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest

from kvcanary_trace.analysis import export_writers
from kvcanary_trace.analysis.dataset import open_dataset
from kvcanary_trace.analysis.export_writers import Arrows
from kvcanary_trace.kernels.layout import FailReason
from kvcanary_trace.schema import REQUESTS, VIOLATIONS

KV_HASH = int(FailReason.VERIFY_REAL_KV_HASH_MISMATCH)
WRITE_TOKEN = int(FailReason.WRITE_TOKEN_MISMATCH)
POSITION = int(FailReason.VERIFY_POSITION_MISMATCH)


@dataclass
class Engine:
    """Runs requests, and keeps what rows do not have: which slot holds which position, and who wrote it."""

    rng: random.Random
    window: int = 0
    step: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    violations: list[dict[str, Any]] = field(default_factory=list)
    writer_of: dict[int, int] = field(default_factory=dict)
    running: dict[int, list[int]] = field(default_factory=dict)
    ended_at: dict[int, int] = field(default_factory=dict)
    bad: set[int] = field(default_factory=set)

    def admit(self, pool_idx: int, shared_with: int | None = None, length: int = 0) -> None:
        """Start a request in a row of the pool; it may share the first slots of another, as a prefix cache does."""
        self.running[pool_idx] = self.running[shared_with][:length] if shared_with is not None else []

    def forward(self, extends: dict[int, int]) -> None:
        """One step: verify what each request has, then write `extends` more tokens."""
        for row, (pool_idx, extend) in enumerate(extends.items()):
            slots = self.running[pool_idx]
            entries = min(len(slots), self.window) if self.window else len(slots)
            self.requests.append(
                {"step": self.step, "forward": 0, "runner": "target", "group": "full", "row": row,
                 "req_pool_idx": pool_idx, "prefix_len": len(slots), "extend_len": extend, "verify_entries": entries}
            )  # fmt: skip
            for position in range(len(slots) - entries, len(slots)):
                if slots[position] in self.bad:
                    self.find(slots[position], position)
        for pool_idx, extend in extends.items():
            for _ in range(extend):
                slot = len(self.writer_of)
                self.writer_of[slot] = self.step
                self.running[pool_idx].append(slot)
        self.step += 1

    def find(self, slot: int, position: int, reason: int = KV_HASH) -> None:
        """A violation row."""
        self.violations.append(
            {"step": self.step, "forward": 0, "runner": "target", "group": "full", "number": len(self.violations),
             "time": datasets.START_NS + self.step * datasets.STEP_NS, "slot": slot, "position": position, "token": 1,
             "chain_hash": slot * 31, "fail_reason": reason}
        )  # fmt: skip

    def write(self, root: Path, *, with_requests: bool = True) -> Path:
        """A dataset of it."""
        datasets.dataset(root, datasets.steps_table(self.step))
        tables = {VIOLATIONS: self.violations, REQUESTS: self.requests if with_requests else []}
        for table, rows in tables.items():
            if rows:
                columns = {
                    f.name: pa.array([row.get(f.name) for row in rows]).cast(pa.int64()).cast(f.type)
                    if f.name == "time"
                    else pa.array([row.get(f.name) for row in rows], f.type)
                    for f in table.arrow
                }
                datasets.write_part(root, pa.table(columns, schema=table.arrow), name=table.name)
        return root


def look_up(root: Path, steps: range | None = None) -> list[tuple[int, int, str]]:
    """(slot, finding step, what is said of the writer) of each violation, in order; all steps are drawn."""
    columns = [column.name for column in VIOLATIONS.columns]
    names = ["run", "rank", *columns, "id", "writer", "unknown"]
    with open_dataset(root).connect() as connection:
        arrows = Arrows(connection, "")
        for step in steps if steps is not None else range(10_000):
            arrows.begin("r1", 0, step)
        rows = [dict(zip(names, row, strict=True)) for row in connection.execute(arrows.query(columns)).fetchall()]
        return [(row["slot"], row["step"], arrows.end(row)[1]) for row in rows]


def drive(seed: int) -> Engine:
    """A random life: admissions, shared prefixes, chunks, decodes, rows of the pool used again, slots going bad."""
    rng = random.Random(seed)
    engine = Engine(rng, window=rng.choice([0, 0, 5]))
    for _ in range(60):
        idle = [idx for idx in range(1, 6) if idx not in engine.running]
        if idle and rng.random() < 0.3:
            other = rng.choice([None, *engine.running])
            length = rng.randrange(len(engine.running[other]) + 1) if other is not None else 0
            idx = rng.choice(idle)
            # A prefix as long as the row's last request was: its rows are those of that request going on.
            engine.admit(idx, other, length - (length == engine.ended_at.get(idx)))
        chosen = [idx for idx in engine.running if rng.random() < 0.8]
        engine.forward({idx: rng.choice([1, 1, 1, 4]) for idx in chosen})
        held = [slot for slots in engine.running.values() for slot in slots]
        if held and rng.random() < 0.15:
            engine.bad.add(rng.choice(held))
        for idx in list(engine.running):
            if rng.random() < 0.05:
                engine.ended_at[idx] = len(engine.running.pop(idx))
    return engine


@pytest.mark.parametrize("seed", range(8))
def test_an_arrow_never_points_to_another_step(tmp_path: Path, seed: int) -> None:
    """Whatever is claimed is what the engine knows; many can be claimed, and the rest says that it is unknown."""
    engine = drive(seed)
    found = look_up(engine.write(tmp_path))
    assert len(found) == len(engine.violations) > 0
    for slot, _, said in found:
        assert said.startswith("unknown: ") or said == f"step {engine.writer_of[slot]}", (slot, said)


def test_many_are_found(tmp_path: Path) -> None:
    """Over all seeds at least a third has an arrow: the lookup is no constant `unknown`."""
    counts: Counter[bool] = Counter()
    for seed in range(8):
        for _, _, said in look_up(drive(seed).write(tmp_path / str(seed))):
            counts[said.startswith("step ")] += 1
    assert counts[True] > counts.total() / 3, counts


def test_a_lone_request_is_always_known(tmp_path: Path) -> None:
    """Chunks and decodes of one request: each slot's step, also for a row of the pool that is used again."""
    engine = Engine(random.Random(0))
    for _ in range(2):
        engine.admit(1)
        for extend in (5, 3, 1, 1, 1):
            engine.forward({1: extend})
        engine.bad = set(engine.running[1])
        engine.forward({1: 1})
        engine.bad = set()
    found = look_up(engine.write(tmp_path))
    assert len(found) == 22
    assert [said for _, _, said in found] == [f"step {engine.writer_of[slot]}" for slot, _, _ in found]


def test_a_record_found_again_and_again_narrows_down(tmp_path: Path) -> None:
    """Two requests could have written it at first; when one of them is gone, both findings know."""
    engine = Engine(random.Random(0))
    engine.admit(1)
    engine.admit(2)
    engine.forward({1: 4})
    engine.forward({2: 4})
    engine.bad = {engine.running[2][1]}
    engine.forward({1: 1, 2: 1})
    alone = look_up(engine.write(tmp_path / "a"))
    assert [said for _, _, said in alone] == ["unknown: one of 2 steps between 0 and 1"]
    engine.forward({2: 1})
    assert [said for _, _, said in look_up(engine.write(tmp_path / "b"))] == ["step 1", "step 1"]


def test_each_unknown_says_why(tmp_path: Path) -> None:
    """No requests rows, a shared prefix, another position, a write that found itself wrong."""
    engine = Engine(random.Random(0))
    engine.admit(1)
    engine.forward({1: 4})
    engine.admit(2, shared_with=1, length=4)
    del engine.running[1]
    engine.bad = {0}
    engine.forward({2: 1})
    engine.find(1, 1, POSITION)
    engine.find(9, 9, WRITE_TOKEN)
    engine.find(2, 99)
    said = [text for _, _, text in look_up(engine.write(tmp_path / "a"))]
    assert said == [
        "unknown: it came from the prefix cache, or was written before the recording began",
        "unknown: the slot holds another position than its request wrote",
        "written by this very step",
        "unknown: no request of this step was verified at this position",
    ]
    without = [text for _, _, text in look_up(engine.write(tmp_path / "b", with_requests=False))]
    assert without[0] == 'unknown: no requests rows; record with trace(detail="requests")'


def test_a_step_that_is_not_drawn_has_no_arrow(tmp_path: Path) -> None:
    """An export of later steps only says where the arrow would begin."""
    engine = Engine(random.Random(0))
    engine.admit(1)
    engine.forward({1: 4})
    engine.bad = {0}
    engine.forward({1: 1})
    assert look_up(engine.write(tmp_path), range(1, 2)) == [(0, 1, "step 0, which is not drawn")]


def test_the_lookup_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Violations past the limit are drawn and say so."""
    monkeypatch.setattr(export_writers, "MAX_ARROWS", 2)
    engine = Engine(random.Random(0))
    engine.admit(1)
    engine.forward({1: 4})
    engine.bad = {0}
    for _ in range(4):
        engine.forward({1: 1})
    said = [text for _, _, text in look_up(engine.write(tmp_path))]
    assert said == ["step 0"] * 2 + ["unknown: only the first 2 violations are looked up"] * 2


def test_only_what_the_window_covers_is_asked(tmp_path: Path) -> None:
    """Sliding window: a request whose window is past the position did not verify it, so it did not write the slot."""
    engine = Engine(random.Random(0), window=2)
    engine.admit(1)
    engine.admit(2)
    engine.forward({1: 9})
    engine.forward({2: 4})
    engine.bad = {engine.running[2][3]}
    engine.forward({1: 1, 2: 1})
    assert [said for _, _, said in look_up(engine.write(tmp_path))] == ["step 1"]
