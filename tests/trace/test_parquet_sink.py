"""The Parquet sink: what goes in comes out, in sealed parts of any size, through disks that fail."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import read, rows

import kvcanary_trace as kv_canary
from kvcanary_trace.columns import DURATIONS, requests_batch, steps_batch
from kvcanary_trace.join import Joined
from kvcanary_trace.kernels.layout import ProbeWord
from kvcanary_trace.runfile import Run, new_run_id
from kvcanary_trace.schema import NOT_MEASURED, STEPS, HostWord
from kvcanary_trace.sinks import Sink
from kvcanary_trace.sinks.live import live_tails, read_live
from kvcanary_trace.sinks.parquet import ParquetSink

_MEASURED = [
    column.name
    for column in STEPS.columns
    if isinstance(column.word, ProbeWord | HostWord)
    and pa.types.is_integer(column.type)
    and column.name not in DURATIONS
]
_WORD = st.one_of(st.just(NOT_MEASURED), st.integers(0, 5), st.integers(-(2**63) + 1, 2**63 - 1))


def joined(values: list[list[int]]) -> Joined:
    """[n] rows whose integer columns, in order, hold `values`."""
    num = len(values)
    device, host = np.full((2, num, 32), NOT_MEASURED, dtype=np.int64)
    for words in (device, host):
        words[:, 1:4] = 0
    for at, name in enumerate(_MEASURED):
        column = STEPS[name]
        target = host if isinstance(column.word, HostWord) else device
        target[:, column.word] = [row[at] for row in values]
    return Joined(device, host, np.ones(num, np.bool_), np.ones(num, np.bool_))


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.lists(_WORD, min_size=len(_MEASURED), max_size=len(_MEASURED)), min_size=1, max_size=12),
    part_rows=st.integers(1, 8),
    flush_rows=st.integers(1, 5),
)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, values: list[list[int]], part_rows: int, flush_rows: int
) -> None:
    """Any int64 in any integer column, in parts and flushes of any size: the same numbers, nulls where unmeasured."""
    for row in values:
        row[0] = row[1] = 1 if row[0] == NOT_MEASURED else row[0] % 100  # step, forward: never null
    directory = tmp_path_factory.mktemp("dataset")
    sink = ParquetSink(directory, part_rows=part_rows)
    sink.open(Run(run=new_run_id(), rank=0))
    whole = steps_batch(joined(values), [])
    for at in range(0, len(values), flush_rows):
        sink.write({"steps": whole.slice(at, flush_rows)})
    sink.close()
    back = pa.concat_tables([pq.ParquetFile(part).read() for part in sorted((directory / "steps").rglob("*.parquet"))])
    assert back.column_names == [column.name for column in STEPS.columns]
    for at, name in enumerate(_MEASURED):
        assert back[name].to_pylist() == [None if row[at] == NOT_MEASURED else row[at] for row in values], name
    assert not (directory / "_live").exists()


@settings(max_examples=200, deadline=None)
@given(value=st.integers(0, 2**50))
def test_durations_keep_eight_bits(value: int) -> None:
    """Within 0.4 %, exact below 256 ns, null when unmeasured."""
    rows_in = joined([[0] * len(_MEASURED)] * 2)
    rows_in.device[0, ProbeWord.PLAN_NS] = value
    got, none = steps_batch(rows_in, []).column("plan_ns").to_pylist()
    assert none is None
    assert got == value if value < 256 else abs(got - value) <= value * 0.004


def test_every_reader_takes_the_dataset_as_it_is(tmp_path: Path) -> None:
    """DuckDB, pandas, Polars and pyarrow.dataset see the same rows, with run and rank from the path."""
    with kv_canary.trace(tmp_path, part_rows=2, flush_interval_s=0.01) as session:
        for number in range(6):
            session.record(step=number, mode="decode", bs=number, verify_enabled=number % 2 == 0)
            session.flush()
    pattern = str(tmp_path / "steps" / "**" / "*.parquet")
    expected = [(number, number, number % 2 == 0, "decode", session.run_id, 0) for number in range(6)]
    names = ["step", "bs", "verify_enabled", "mode", "run", "rank"]
    assert len(list((tmp_path / "steps").rglob("*.parquet"))) > 1
    assert duckdb.sql(f"select {', '.join(names)} from read_parquet('{pattern}') order by step").fetchall() == expected
    frame = pd.read_parquet(tmp_path / "steps").sort_values("step")
    assert [(*row[:4], str(row[4]), int(row[5])) for row in frame[names].itertuples(index=False)] == expected
    assert pl.scan_parquet(pattern, hive_partitioning=True).sort("step").select(names).collect().rows() == expected
    assert [tuple(row.values()) for row in read(tmp_path).select(names).sort_by("step").to_pylist()] == expected


def test_small_parts_are_small(tmp_path: Path) -> None:
    """3000 rows that look like a decode loop: at most 20 bytes each, footer included."""
    rng = np.random.default_rng(3)
    with kv_canary.trace(tmp_path, engine={"max_running_requests": 64}) as session:
        demand = 0
        for number in range(3000):
            demand += 32
            session.record(
                step=number,
                mode="decode",
                bs=32,
                bs_launched=64,
                write_req_capacity=64,
                write_entries=32,
                verify_demand=demand,
                verify_planned=demand,
                verify_checked=demand,
                verify_capacity=600_000,
                verify_enabled=True,
                prefix_len_max=number,
                prefix_len_sum=demand,
                plan_ns=int(rng.lognormal(12, 0.3)),
                verify_ns=int(rng.lognormal(13, 0.3)),
                write_ns=int(rng.lognormal(12, 0.3)),
                host_ns=int(rng.lognormal(15, 0.3)),
                violations=0,
                violation_ring_capacity=1024,
                kv_used=demand,
                kv_capacity=200_000,
                resident_reqs=32,
                waiting_reqs=0,
            )
    (part,) = (tmp_path / "steps").rglob("*.parquet")
    assert pq.read_metadata(part).num_rows == 3000
    assert part.stat().st_size <= 20 * 3000


def test_parts_are_sealed_by_age(tmp_path: Path) -> None:
    """A part appears while the session is open, its tail goes, and the run file has counted it."""
    with kv_canary.trace(tmp_path, part_seconds=0.001, flush_interval_s=0.01) as session:
        session.record(step=1)
        for _ in range(1000):  # the age is looked at in each flush
            session.flush()
            if rows(tmp_path):
                break
        assert len(rows(tmp_path)) == 1
        assert not list((tmp_path / "_live").glob("steps.*.arrows"))
        (path,) = (tmp_path / "runs").iterdir()
        assert json.loads(path.read_text())["status"] == "running"
        assert json.loads(path.read_text())["rows"]["steps"] == 1


def test_a_vanished_directory_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rows that were not sealed yet are written anew, from memory."""
    directory = tmp_path / "traces"
    with caplog.at_level(logging.WARNING), kv_canary.trace(directory) as session:
        session.record(step=1)
        session.flush()
        shutil.rmtree(directory)
        session.record(step=2)
        session.flush()
        assert list((directory / "_live").glob("*.arrows"))
    assert [row["step"] for row in rows(directory)] == [1, 2]
    assert session.stats.complete


class Flaky:
    """A sink that fails when told to."""

    def __init__(self) -> None:
        self.failing = False
        self.steps: list[int] = []
        self.closed = False

    def open(self, run: Run) -> None:
        pass

    def write(self, batches: Mapping[str, Any]) -> None:
        if self.failing:
            raise OSError(28, "No space left on device")
        if "steps" in batches:
            self.steps += batches["steps"]["step"].to_pylist()

    def close(self) -> None:
        self.closed = True


def test_a_failing_sink_is_reported_once_and_offered_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The other sink never notices; when the disk is back, the kept rows arrive, in order."""
    flaky = Flaky()
    assert isinstance(flaky, Sink)
    with caplog.at_level(logging.WARNING), kv_canary.trace([tmp_path, flaky]) as session:
        for number in range(9):
            flaky.failing = 3 <= number < 6
            session.record(step=number)
            session.flush()
    assert flaky.steps == list(range(9)) and flaky.closed
    assert [row["step"] for row in rows(tmp_path)] == list(range(9))
    assert session.stats.sink_errors >= 3 and session.stats.rows_dropped == 0
    assert sum("Flaky failed" in record.message for record in caplog.records) == 1


def test_a_sink_that_never_recovers_costs_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The oldest rows go first, every one of them counted, in stats and in the run file."""
    monkeypatch.setattr("kvcanary_trace.drain._BACKLOG_ROWS", 4)
    flaky = Flaky()
    flaky.failing = True
    with caplog.at_level(logging.WARNING), kv_canary.trace([flaky, tmp_path]) as session:
        for number in range(10):
            session.record(step=number)
            session.flush()
        assert session.stats.rows_dropped == 6
    assert session.stats.rows_dropped == 10 and not session.stats.complete
    (path,) = (tmp_path / "runs").iterdir()
    assert json.loads(path.read_text())["losses"]["rows_dropped"] == 10


def test_a_full_disk_loses_nothing_when_space_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Appends fail for a while: counted and reported once; every row is there in the end, once."""
    from kvcanary_trace.sinks.live import TailFile

    append = TailFile.append
    full = [False]

    def maybe(self: TailFile, message: bytes) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")
        append(self, message)

    monkeypatch.setattr(TailFile, "append", maybe)
    with caplog.at_level(logging.WARNING), kv_canary.trace(tmp_path, part_rows=3) as session:
        for number in range(12):
            full[0] = 4 <= number < 9
            session.record(step=number)
            session.flush()
    assert [row["step"] for row in rows(tmp_path)] == list(range(12))
    assert session.stats.sink_errors >= 5
    assert sum("ParquetSink failed" in record.message for record in caplog.records) == 1


def test_all_tables_of_a_flush_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second table does not fit on the disk: the first is taken back, so offering both again repeats nothing."""
    from kvcanary_trace.sinks.live import TailFile

    append = TailFile.append

    def full(self: TailFile, message: bytes) -> None:
        if "requests" in self.path.name:
            raise OSError(28, "No space left on device")
        append(self, message)

    requests = requests_batch([(1, 0, 0, 0, 0, *np.array([[3], [5], [1]]))])
    batches = {"steps": steps_batch(joined([[1] * len(_MEASURED)]), []), "requests": requests}
    sink = ParquetSink(tmp_path)
    sink.open(Run(run="both", rank=0))
    with monkeypatch.context() as patch:
        patch.setattr(TailFile, "append", full)
        with pytest.raises(OSError, match="No space"):
            sink.write(batches)
    sink.write(batches)
    live = {tail.table: read_live(tail.path).num_rows for tail in live_tails(tmp_path)}
    assert live == {"steps": 1, "requests": 1}
    sink.close()
    assert len(rows(tmp_path)) == len(rows(tmp_path, "requests")) == 1


@pytest.mark.parametrize("bad", [[], 7, [3]])
def test_what_is_no_sink(bad: Any) -> None:
    """Refused by name."""
    with pytest.raises(kv_canary.SettingError, match="sink"):
        kv_canary.trace(bad).__enter__()
