"""Settings: arguments beat variables beat defaults, origins are kept, nonsense is refused with what would do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvcanary_trace as kv_canary
from kvcanary_trace.config import SETTINGS, resolve


def test_arguments_beat_variables_beat_defaults() -> None:
    """Each with its origin."""
    environ = {"KVCANARY_TRACE_PART_ROWS": "500", "KVCANARY_TRACE_RANK": "3", "RANK": "9", "WORLD_SIZE": "4"}
    got = resolve({"part_rows": 7, "ring_rows": None}, environ)
    assert (got["part_rows"].value, got["part_rows"].origin) == (7, "argument")
    assert (got["rank"].value, got["rank"].origin) == (3, "environment")
    assert (got["world_size"].value, got["world_size"].origin) == (4, "environment")
    assert (got["ring_rows"].value, got["ring_rows"].origin) == (65_536, "default")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FLUSH_INTERVAL_S", "soon"),
        ("FLUSH_INTERVAL_S", "nan"),
        ("FLUSH_INTERVAL_S", "0"),
        ("PART_ROWS", "0"),
        ("PART_ROWS", "1e3"),
        ("RING_ROWS", "1"),
        ("RANK", "-1"),
        ("DETAIL", "everything"),
        ("NVTX", "maybe"),
    ],
)
def test_malformed_variables_are_refused(name: str, value: str) -> None:
    """The variable, what it accepts, and what it held."""
    with pytest.raises(kv_canary.SettingError, match=f"KVCANARY_TRACE_{name} must be .*, got '{value}'"):
        resolve({}, {f"KVCANARY_TRACE_{name}": value})


@pytest.mark.parametrize(("name", "value"), [("part_rows", 1.5), ("ring_rows", True), ("rank", "x"), ("detail", "all")])
def test_malformed_arguments_are_refused(name: str, value: Any) -> None:
    """An argument is named as the caller wrote it."""
    with pytest.raises(kv_canary.SettingError, match=f"^{name} must be"):
        kv_canary.trace("unused", **{name: value})


def test_unknown_variables_are_refused_with_the_accepted_listed() -> None:
    """A typo gets a hint; variables of other parts and of other programs are fine."""
    with pytest.raises(kv_canary.SettingError, match=r"did you mean KVCANARY_TRACE_PART_ROWS\? accepted: KVCANARY"):
        resolve({}, {"KVCANARY_TRACE_PART_ROW": "5"})
    resolve({}, {"KVCANARY_TRACE_BACKEND": "torch", "OTEL_SERVICE_NAME": "x"})


def test_the_run_file_has_values_and_origins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory may come from the environment alone."""
    monkeypatch.setenv("KVCANARY_TRACE_DIR", str(tmp_path))
    monkeypatch.setenv("KVCANARY_TRACE_RUN", "from-env")
    capacities = [{"capacity": "verify", "group": "full", "value": 600_000, "origin": "derived"}]
    with kv_canary.trace(rank=2, engine={"page_size": 1}, capacities=capacities):
        pass
    file = json.loads((tmp_path / "runs" / "from-env.2.json").read_text())
    assert file["settings"]["dir"] == {"value": str(tmp_path), "origin": "environment"}
    assert file["settings"]["rank"] == {"value": 2, "origin": "argument"}
    assert file["settings"]["nvtx"] == {"value": True, "origin": "default"}
    assert set(file["settings"]) == {setting.name for setting in SETTINGS}
    assert file["engine"] == {"page_size": 1} and file["capacities"] == capacities
    assert (file["status"], file["error"], file["world_size"], file["device"]) == ("completed", None, 3, "cpu")
    assert file["versions"]["kvcanary-trace"] == kv_canary.__version__
