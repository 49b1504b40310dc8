"""`docs/nsight.md` says what the code says."""

from __future__ import annotations

from pathlib import Path

from kvcanary_trace import names
from kvcanary_trace.analysis.export_timeline import MAX_LANES
from kvcanary_trace.analysis.export_writers import MAX_ARROWS
from kvcanary_trace.nvtx_ranges import COUNTERS_SINCE, category

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "nsight.md").read_text()


def test_ranges_colours_and_limits() -> None:
    """Each range's name, category and colour, the replay's message, and the numbers that the page names."""
    for name in names.RANGES:
        (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
        assert f"`{category(name, '')}" in line and f"`#{names.COLORS[name] & 0xFFFFFF:06X}`" in line
    assert f"`{names.STEP_REPLAY}`" in PAGE
    assert f"up to {'eight' if MAX_LANES == 8 else MAX_LANES}" in PAGE
    assert f"The first {MAX_ARROWS:,}".replace(",", " ") in PAGE.replace("\n", " ").replace("  ", " ")
    assert f"| {COUNTERS_SINCE} and newer | yes | yes | yes |" in PAGE
