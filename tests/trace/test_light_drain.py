"""What the drain thread must not do: import pandas, which takes the interpreter lock for a second."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from kvcanary_trace.arrow import words

CODE = """
    import sys
    import kvcanary_trace as kv_canary
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry import metrics, trace
    metrics.set_meter_provider(MeterProvider([InMemoryMetricReader()]))
    trace.set_tracer_provider(TracerProvider())
    with kv_canary.trace(sys.argv[1], otel=True, on_pressure=lambda change: None) as session:
        for number in range(50):
            with kv_canary.step(number, mode="decode"):
                pass
            session.record(step=number, forward=1, bs=9, write_req_capacity=8, mode="decode", violations=number)
            session.record(step=number, forward=2, error_message="kv-canary: bs=9 exceeds write_req_capacity=8")
        session.flush()
    assert session.stats.complete, session.stats
    assert "pandas" not in sys.modules, "the drain thread imported pandas"
"""


def test_no_pandas_in_the_drain_thread(tmp_path: Path) -> None:
    """With every sink on, pressure and errors among the rows."""
    pytest.importorskip("pandas")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CODE), str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "array",
    [
        pa.array([5, None, -(2**62), 7]),
        pa.array([True, None, False]),
        pa.array([1, 2, None], pa.int32()),
        pa.array([10**18, None], pa.timestamp("ns", "UTC")),
        pa.array([], pa.int64()),
        pa.array([None, None], pa.int64()),
        pa.array([5, None, 6, 7, None, 8, 9, 10, 11, None]).slice(3, 6),
    ],
    ids=["int64", "booleans", "int32", "times", "empty", "nulls", "slice"],
)
def test_words_are_those_of_the_array(array: pa.Array) -> None:
    assert words(array, -9).tolist() == [
        -9 if value is None else int(value) for value in array.cast(pa.int64()).to_pylist()
    ]
    assert words(array, -9).dtype == np.int64
