"""Older nvtx packages, the real ones, fetched into a cache: each lacks something, and says so in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

CODE = """
    import sys
    import nvtx
    assert sys.argv[2] in nvtx.__file__, nvtx.__file__
    import kvcanary_trace as kv_canary
    with kv_canary.trace(sys.argv[1], otel=False) as session:
        for step in range(3):
            with kv_canary.step(step, mode="decode"):
                session.record(step=100 + step, bs=1, write_req_capacity=4)
    assert session.stats.complete and session.stats.steps == 6, session.stats
"""

RANGES_OFF = "NVTX ranges are off: domains of nvtx {} take none; pip install 'nvtx>=0.2.16' to get ranges and counters"
COUNTERS_OFF = "NVTX counters are off, ranges are on: nvtx {} has no counters; pip install 'nvtx>=0.2.16'"


@pytest.mark.parametrize(
    ("version", "sentence"),
    [("0.2.10", RANGES_OFF), ("0.2.11", RANGES_OFF), ("0.2.13", COUNTERS_OFF), ("0.2.15", COUNTERS_OFF)],
)
def test_older_nvtx_is_one_sentence(
    under_tool: Any, wheel_folder: Any, tmp_path: Path, version: str, sentence: str
) -> None:
    """Rows are recorded all the same; ranges where that version has them."""
    log = under_tool(CODE, str(tmp_path), f"nvtx=={version}", path=[wheel_folder(f"nvtx=={version}")])
    assert log.stderr.strip().splitlines() == [sentence.format(version)]
    pushed = 0 if sentence == RANGES_OFF else 3
    assert len(log.of("push")) == len(log.of("pop")) == pushed
    assert not log.of("counter", "batch")


def test_0_2_16_has_counters(under_tool: Any, wheel_folder: Any, tmp_path: Path) -> None:
    """The first version with all of it."""
    log = under_tool(CODE, str(tmp_path), "nvtx==0.2.16", path=[wheel_folder("nvtx==0.2.16")])
    assert log.stderr == "" and len(log.of("push")) == 3
    assert len(log.samples("write_req full")) == 3


def test_a_half_of_0_2_16_is_not_enough(under_tool: Any, tmp_path: Path) -> None:
    """An nvtx whose counters lost a part, simulated: the same sentence."""
    code = CODE.replace("import kvcanary_trace as", "del nvtx.CounterSemantics\n    import kvcanary_trace as", 1)
    log = under_tool(code, str(tmp_path), "nvtx")
    assert "NVTX counters are off, ranges are on" in log.stderr and len(log.stderr.strip().splitlines()) == 1
    assert len(log.of("push")) == 3 and not log.of("counter", "batch")
