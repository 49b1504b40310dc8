"""The ring: whole rows only, in order, every one accounted for."""

from __future__ import annotations

import struct
import subprocess
import sys
import textwrap
from multiprocessing import shared_memory
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcanary_trace.ring import ROW_WORDS, Ring, RingReader


def row_of(seq: int) -> list[int]:
    """A row whose words all tell its number."""
    return [0, *(seq * 100 + word for word in range(1, ROW_WORDS - 1))]


def publish(ring: Ring, num: int) -> None:
    for _ in range(num):
        ring.publish(row_of(ring.published + 1))


@settings(max_examples=200, deadline=None)
@given(rows=st.integers(2, 40), moves=st.lists(st.tuples(st.integers(0, 90), st.booleans()), max_size=12))
def test_every_row_is_drained_overwritten_or_pending(rows: int, moves: list[tuple[int, bool]]) -> None:
    """The balance holds after each move, what comes out is whole and in order, and what is missing was counted."""
    ring = Ring(rows)
    reader = RingReader(ring.words)
    seen: list[int] = []
    for num, read in moves:
        publish(ring, num)
        if read:
            got = reader.read()
            for row in got:
                assert row[0] == row[-1]
                assert row[1:-1].tolist() == row_of(int(row[0]))[1:]
            seen += got[:, 0].tolist()
        drained, overwritten, pending = reader.balance(ring.published)
        assert drained == len(seen) and drained + overwritten + pending == ring.published
        if read:
            assert pending == 0
            assert not seen or seen[-1] == ring.published
    assert seen == sorted(set(seen))
    lost = set(range(1, reader.next_seq)) - set(seen)
    assert len(lost) == reader.overwritten
    assert reader.last_lost_seq == (max(lost) if lost else None)


def test_a_stopped_writer_leaves_a_whole_ring() -> None:
    """Of a lapped ring all rows that still stand are taken, none is given up for safety."""
    ring = Ring(64)
    reader = RingReader(ring.words)
    publish(ring, 64 * 3 + 5)
    assert len(reader.read()) == 64
    assert reader.overwritten == 64 * 2 + 5


def test_a_row_being_written_is_not_taken() -> None:
    """Word 0 is negative while a row is filled: the reader waits for it, and nothing counts as lost."""
    ring = Ring(8)
    reader = RingReader(ring.words)
    publish(ring, 3)
    ring.words[2, 0] = -3
    assert len(reader.read()) == 2
    assert len(reader.read()) == 0
    ring.words[2, 0] = 3
    assert reader.read()[:, 0].tolist() == [3]
    assert reader.overwritten == 0


def test_a_row_overwritten_during_the_copy_is_not_taken() -> None:
    """Old last word, new words in between: word 0 gives the row away."""
    ring = Ring(4)
    reader = RingReader(ring.words)
    publish(ring, 4)
    ring.words[0, 0] = -5
    ring.words[0, 1:20] = 7
    got = reader.read()
    assert got[:, 0].tolist() == [2, 3, 4]
    assert reader.overwritten == 1


def test_a_row_whose_writer_was_interrupted_for_good_is_skipped() -> None:
    """Its writer went on with the next row, so the hole is a loss, not a row to wait for."""
    ring = Ring(8)
    reader = RingReader(ring.words)
    publish(ring, 5)
    ring.words[1, 0] = -2
    assert reader.read()[:, 0].tolist() == [1, 3, 4, 5]
    assert (reader.overwritten, reader.last_lost_seq) == (1, 2)


def test_a_word_that_is_no_int64_leaves_the_ring_usable() -> None:
    """The failed row's number is used by the next one."""
    ring = Ring(8)
    reader = RingReader(ring.words)
    publish(ring, 1)
    with pytest.raises(struct.error):
        ring.publish([0, "x", *([0] * 29)])
    publish(ring, 1)
    assert reader.read()[:, 0].tolist() == [1, 2]
    assert reader.overwritten == 0


def test_numbers_past_two_to_the_31() -> None:
    """Sequence numbers are int64 everywhere."""
    ring = Ring(8)
    reader = RingReader(ring.words)
    ring._next = reader.next_seq = 2**31 - 2
    for _ in range(6):
        ring.publish([0] * 31)
    assert reader.read()[:, 0].tolist() == list(range(2**31 - 2, 2**31 + 4))


WRITER = """
    import sys, numpy as np
    protocol = sys.argv[4]
    from multiprocessing import shared_memory, resource_tracker
    from kvcanary_trace.ring import Ring
    name, rows, total = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    memory = shared_memory.SharedMemory(name=name)
    resource_tracker.unregister(memory._name, "shared_memory")
    words = np.ndarray((rows, 32), dtype=np.int64, buffer=memory.buf)
    ring = Ring(rows, words)
    print("ready", flush=True)
    sys.stdin.readline()
    for seq in range(1, total + 1):
        if protocol == "ours":
            ring.publish([0] + [seq] * 30)
        else:  # the sequence only at the end, without invalidation first
            row = words[(seq - 1) % rows]
            row[1:31] = seq
            row[31] = seq
            row[0] = seq
    print("done", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("protocol", ["ours", pytest.param("naive", marks=pytest.mark.slow)])
def test_no_torn_row_from_a_writer_at_full_speed(protocol: str, tmp_path: Path) -> None:
    """A writer in another process laps a tiny ring all the time: rows taken are of one piece, losses are counted.

    The naive protocol shows that this test can fail: a reader takes torn rows from it.
    """
    num_rows, total = 16, 150_000 if protocol == "ours" else 2_000_000
    memory = shared_memory.SharedMemory(create=True, size=num_rows * ROW_WORDS * 8)
    try:
        words = np.ndarray((num_rows, ROW_WORDS), dtype=np.int64, buffer=memory.buf)
        words[:] = 0
        script = tmp_path / "writer.py"
        script.write_text(textwrap.dedent(WRITER))
        writer = subprocess.Popen(
            [sys.executable, str(script), memory.name, str(num_rows), str(total), protocol],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdin is not None and writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        reader = RingReader(words)
        writer.stdin.write("\n")
        writer.stdin.flush()
        taken, torn, last = 0, 0, 0
        while reader.next_seq <= total:
            for row in reader.read(max_rows=4096):
                torn += bool((row != row[0]).any())
                assert row[0] > last
                last = int(row[0])
                taken += 1
        assert (torn > 0) == (protocol == "naive")
        assert taken == reader.drained and taken + reader.overwritten == total
        assert reader.overwritten > 0
        writer.stdin.write("\n")
        writer.communicate(timeout=60)
        del words, reader
    finally:
        memory.close()
        memory.unlink()
