"""Live tails: append-only, checksummed, readable up to the last whole batch; and the sealing of what is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import rows

import kvcanary_trace as kv_canary
from kvcanary_trace.schema import STEPS, VIOLATIONS
from kvcanary_trace.sinks.live import Encoder, TailFile, live_path, live_tails, read_live, scan_live
from kvcanary_trace.sinks.recover import is_alive, recover

SCHEMA = pa.schema([("step", pa.int64()), ("name", pa.string())])


def batch(first: int, num: int) -> pa.RecordBatch:
    steps = pa.array(range(first, first + num), pa.int64())
    return pa.record_batch([steps, pa.array([f"s{n}" if n % 3 else None for n in range(num)])], schema=SCHEMA)


def tail_of(path: Path, sizes: list[int]) -> list[int]:
    """Write batches of these sizes; the file's length after the header and after each batch."""
    encoder = Encoder(SCHEMA)
    tail = TailFile(path, encoder.header)
    ends = [tail.size_bytes]
    for number, size in enumerate(sizes):
        tail.append(encoder.encode(batch(1000 * number, size)))
        ends.append(tail.size_bytes)
    tail.close()
    return ends


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=5), data=st.data())
def test_cut_anywhere_keeps_every_whole_batch(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], data: st.DataObject
) -> None:
    """However many bytes are there: exactly the batches that end within them; never an error past the header."""
    path = tmp_path_factory.mktemp("tail") / "x.arrows"
    ends = tail_of(path, sizes)
    cut = data.draw(st.integers(ends[0], ends[-1]))
    path.write_bytes(path.read_bytes()[:cut])
    found = scan_live(path)
    whole = sum(end <= cut for end in ends[1:])
    assert found.table.num_rows == sum(sizes[:whole])
    assert found.torn_bytes == cut - ends[whole]
    assert list(found.batches) == [batch(1000 * n, size) for n, size in enumerate(sizes[:whole])]


@settings(max_examples=60, deadline=None)
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_one_flipped_bit_is_seen(tmp_path_factory: pytest.TempPathFactory, at: float, bit: int) -> None:
    """Anywhere after the header: the batch that has it and all after it are left out, nothing wrong is read."""
    path = tmp_path_factory.mktemp("tail") / "x.arrows"
    ends = tail_of(path, [20, 20, 20])
    data = bytearray(path.read_bytes())
    position = ends[0] + int(at * (ends[-1] - ends[0]))
    data[position] ^= 1 << bit
    path.write_bytes(data)
    whole = sum(end <= position for end in ends[1:])
    assert list(scan_live(path).batches) == [batch(1000 * n, 20) for n in range(whole)]


def test_a_tail_of_zeros_is_torn(tmp_path: Path) -> None:
    """A file system may have given the length without the bytes."""
    path = tmp_path / "x.arrows"
    tail_of(path, [5])
    with path.open("ab") as file:
        file.write(bytes(4096))
    assert (scan_live(path).table.num_rows, scan_live(path).torn_bytes) == (5, 4096)


def test_other_readers_take_a_tail(tmp_path: Path) -> None:
    """It is a plain Arrow IPC stream to them."""
    path = tmp_path / "x.arrows"
    tail_of(path, [5, 6])
    with pa.ipc.open_stream(path) as stream:
        assert stream.read_all() == read_live(path)


def test_what_is_no_tail(tmp_path: Path) -> None:
    """One sentence, whatever it is."""
    foreign = SCHEMA.serialize().to_pybytes()
    for name, data in {"empty": b"", "text": b"hello, world, this is text", "foreign": foreign}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(kv_canary.DatasetError, match="is no live tail"):
            read_live(tmp_path / name)
    with pytest.raises(kv_canary.DatasetError, match="cannot read live tail"):
        read_live(tmp_path / "missing")


def test_a_full_disk_takes_back_half_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What did not go in whole is cut off, and the next message follows the last whole one."""
    encoder = Encoder(SCHEMA)
    tail = TailFile(tmp_path / "x.arrows", encoder.header)
    tail.append(encoder.encode(batch(0, 5)))
    write = os.write
    calls: list[int] = []

    def half(fd: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return write(fd, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        with pytest.raises(OSError, match="No space"):
            tail.append(encoder.encode(batch(10, 5)))
    tail.append(encoder.encode(batch(20, 5)))
    tail.close()
    assert read_live(tmp_path / "x.arrows")["step"].to_pylist() == [*range(5), *range(20, 25)]
    assert scan_live(tmp_path / "x.arrows").torn_bytes == 0


DYING = """
import os, sys, threading
import kvcanary_trace as kv_canary
with kv_canary.trace(sys.argv[1], run="dying", flush_interval_s=0.2, part_rows=int(sys.argv[2])) as session:
    number = 0
    while True:
        session.record(step=number, mode="decode", bs=number % 7)
        number += 1
        if number % 50 == 0:
            session.flush()
            print(number, flush=True)  # these rows are committed
"""


@pytest.mark.parametrize(("lines", "part_rows"), [(1, 200_000), (7, 200_000), (23, 300), (40, 1)])
def test_killed_at_some_moment(lines: int, part_rows: int, tmp_path: Path) -> None:
    """kill -9: every committed row is readable as it is, and sealed by recover, once each."""
    child = subprocess.Popen(
        [sys.executable, "-c", DYING, str(tmp_path), str(part_rows)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    committed = 0
    for _ in range(lines):
        committed = int(child.stdout.readline())
    assert [one.outcome for one in recover(tmp_path)] in ([], ["alive"])  # a live process is left alone
    child.kill()
    child.communicate(timeout=60)

    sealed = {row["step"] for row in rows(tmp_path)}
    live = [step for tail in live_tails(tmp_path) for step in read_live(tail.path)["step"].to_pylist()]
    assert len(live) == len(set(live)) and not sealed & set(live)
    assert set(range(committed)) <= sealed | set(live)

    outcomes = recover(tmp_path)
    assert sum(one.rows for one in outcomes) == len(live)
    steps = sorted(row["step"] for row in rows(tmp_path))
    assert steps == list(range(len(steps))) and len(steps) == len(sealed) + len(live)
    assert not live_tails(tmp_path) and not (tmp_path / "_live").exists()
    file = json.loads((tmp_path / "runs" / "dying.0.json").read_text())
    assert file["status"] == "failed" and "without closing" in file["error"] and file["rows"]["steps"] == len(steps)
    assert recover(tmp_path) == []


def test_a_part_sealed_just_before_death_is_not_read_twice(tmp_path: Path) -> None:
    """Both the part and its tail stand: the tail no longer counts, and recover removes it."""
    with kv_canary.trace(tmp_path, run="twin") as session:
        session.record(step=1)
    encoder = Encoder(STEPS.arrow)
    TailFile(live_path(tmp_path, "steps", "twin", 0, 999_999_999, 0), encoder.header).close()
    (tmp_path / "runs" / "twin.0.json").write_text(
        json.dumps({"run": "twin", "rank": 0, "pid": 999_999_999, "status": "running"})
    )
    assert live_tails(tmp_path) == []
    assert recover(tmp_path) == []
    assert not (tmp_path / "_live").exists()
    assert [row["step"] for row in rows(tmp_path)] == [1]


def test_recover_wants_a_folder(tmp_path: Path) -> None:
    """A wrong path is one sentence."""
    with pytest.raises(kv_canary.DatasetError, match="is no folder"):
        recover(tmp_path / "missing")


def test_a_number_given_to_a_newer_process_is_dead() -> None:
    """Our own pid, but a run that began long before this process."""
    assert is_alive({"pid": os.getpid()})
    assert is_alive({"pid": os.getpid(), "started_ns": 2**62})
    assert not is_alive({"pid": os.getpid(), "started_ns": 10**18})
    assert is_alive({"pid": 999_999_999, "host": "another-machine"})


def test_every_table_has_an_encoder() -> None:
    """Schemas of the record round-trip through a message, nulls included."""
    for table in (STEPS, VIOLATIONS):
        encoder = Encoder(table.arrow)
        assert encoder.header and np.frombuffer(encoder.header[:4], np.uint32)[0] == 0xFFFFFFFF
