"""A day at 1000 steps a second, in compressed time: memory, files and numbers stay within bounds."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from kvcanary_trace.columns import steps_batch
from kvcanary_trace.join import Joiner
from kvcanary_trace.kernels.layout import ProbeWord
from kvcanary_trace.ring import ROW_WORDS, RingReader
from kvcanary_trace.runfile import Run
from kvcanary_trace.schema import NOT_MEASURED, HostWord
from kvcanary_trace.sinks.parquet import ParquetSink

ROWS = int(os.environ.get("KVCANARY_LONG_RUN_ROWS", 86_400_000))
TICK_ROWS = 20_000
RING_ROWS = 65_536
FIRST = 2**31 - ROWS // 2
"""Both the rings' numbers and the steps pass 2**31 half-way."""


def publish(words: np.ndarray, first: int, rows: np.ndarray) -> None:
    """What `TICK_ROWS` calls of `Ring.publish` leave behind."""
    numbers = np.arange(first, first + len(rows))
    rows[:, 0] = rows[:, ProbeWord.SEQ_END] = numbers
    words[(numbers - 1) % len(words)] = rows


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_day_at_a_thousand_steps_a_second(tmp_path: Path) -> None:
    device_words, host_words = (np.zeros((RING_ROWS, ROW_WORDS), dtype=np.int64) for _ in range(2))
    device, host = RingReader(device_words), RingReader(host_words)
    device.next_seq = host.next_seq = FIRST
    joiner = Joiner()
    sink = ParquetSink(tmp_path)
    run = Run(run="day", rank=0)
    sink.open(run)
    rng = np.random.default_rng(0)
    tick = np.arange(TICK_ROWS)
    device_rows = np.full((TICK_ROWS, ROW_WORDS), NOT_MEASURED)
    host_rows = np.full((TICK_ROWS, ROW_WORDS), NOT_MEASURED)
    for rows in (device_rows, host_rows):
        rows[:, ProbeWord.FORWARD] = rows[:, ProbeWord.RUNNER] = 0
    device_rows[:, [ProbeWord.GROUP, ProbeWord.KIND]] = 0
    host_rows[:, HostWord.MODE] = 2
    host_rows[:, HostWord.DEVICE_ROWS] = 1
    peaks, begin = [], time.monotonic()
    for number in range(0, ROWS, TICK_ROWS):
        steps = FIRST + number + tick
        bs = 20 + rng.integers(-3, 4, TICK_ROWS).cumsum() % 30
        device_rows[:, ProbeWord.STEP] = host_rows[:, HostWord.STEP] = steps
        device_rows[:, ProbeWord.TIME_NS] = host_rows[:, HostWord.TIME_NS] = (number + tick) * 1_000_000 + 10**18
        device_rows[:, ProbeWord.BS] = bs
        device_rows[:, ProbeWord.VERIFY_DEMAND] = bs * 900
        device_rows[:, ProbeWord.VERIFY_CAPACITY] = 60_000
        publish(device_words, FIRST + number, device_rows)
        publish(host_words, FIRST + number, host_rows)
        joined = joiner.join(device.read(), host.read(), last=False)
        sink.write({"steps": steps_batch(joined, [])})
        if number % (ROWS // 8) < TICK_ROWS:
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    joined = joiner.join(device.read(), host.read(), last=True)
    sink.write({"steps": steps_batch(joined, [])})
    sink.close()
    parts = sorted(tmp_path.glob("steps/*/*/*.parquet"))
    size = sum(part.stat().st_size for part in parts)
    took = time.monotonic() - begin
    print(
        f"{ROWS:,} rows in {took:.0f} s, {len(parts)} parts, {size / ROWS:.1f} bytes a row, "
        f"peak memory {peaks[1] >> 10} MiB after an eighth, {peaks[-1] >> 10} MiB at the end"
    )
    assert device.overwritten == host.overwritten == 0 and device.drained == host.drained == ROWS
    assert sum(pq.read_metadata(part).num_rows for part in parts) == ROWS
    last = pq.read_table(parts[-1], columns=["step", "seq"], partitioning=None)
    assert last["step"][-1].as_py() == last["seq"][-1].as_py() == FIRST + ROWS - 1 > 2**31
    assert len(parts) <= ROWS // 200_000 + 1 and max(part.stat().st_size for part in parts) < 16 << 20
    assert size / ROWS < 20
    assert peaks[-1] < 1.1 * peaks[1]
