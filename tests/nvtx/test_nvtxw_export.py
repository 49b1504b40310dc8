"""`export --format nvtxw`: what a backend is given, compared with the rows; and every way in which it can go wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from kvcanary_trace import names
from kvcanary_trace.kernels.layout import FailReason

RANGE_PUSHPOP, MARK = 2 << 3, 4 << 3  # NVTX_PAYLOAD_SCHEMA_FLAG_*
TIMESTAMP, BEGIN, END, IS_MARK, MESSAGE = 2 << 10, 1 << 12, 2 << 12, 3 << 12, 1 << 10  # NVTX_PAYLOAD_ENTRY_FLAG_*
STRING, CATEGORY, COLOR = 80, 68, 69  # NVTX_PAYLOAD_ENTRY_TYPE_*
REALTIME = 12
STEPS = 10_000


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps with all phases, more than a batch of them, and one violation."""
    root = tmp_path_factory.mktemp("dataset")
    table = datasets.steps_table(
        STEPS, plan_ns=1000, verify_ns=2000, write_ns=500, host_ns=10_000, bs=np.arange(STEPS) % 7 + 1
    )
    datasets.dataset(root, table)
    found = datasets.violations_table(
        1, step=5, time=datasets.START_NS, slot=77, position=3, fail_reason=int(FailReason.VERIFY_REAL_KV_HASH_MISMATCH)
    )
    datasets.write_part(root, found, name="violations")
    return root


def export(dataset: Path, log: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command; a backend keeps its state in the process."""
    environment = os.environ | {"KVCANARY_NVTXW_LOG": str(log)}
    command = [sys.executable, "-m", "kvcanary_trace", "export", str(dataset), "--format", "nvtxw", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def seen(dataset: Path, nvtxw_backend: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The backend's log of one export."""
    log = tmp_path_factory.mktemp("log") / "nvtxw.jsonl"
    done = export(
        dataset, log, "--backend", str(nvtxw_backend), "--session", "mine", "--backend-config", "out=a",
        "--backend-config", "b=c",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"session mine of {nvtxw_backend.name}: {STEPS:,} steps, {3 * STEPS:,} phases" in done.stdout
    return log


def events_of(log: Any, decoded: Any, kind: int) -> dict[str, list[dict[str, Any]]]:
    """Stream → rows of its events of one kind, names in place of handles."""
    streams = {event["id"]: event["name"] for event in log.of("stream")}
    found: dict[str, list[dict[str, Any]]] = {}
    for batch in log.of("events"):
        schema = log.schemas[batch["schema"]]
        if schema["flags"] == kind:
            for row in decoded(batch["data"], schema["entries"], schema["size"]):
                row["message"], row["category"] = log.strings[row["message"]], log.categories[row["category"]]
                found.setdefault(streams[batch["stream"]], []).append(row)
    return found


def test_steps_and_phases_reach_the_backend(seen: Path, resolve: Any, decoded: Any) -> None:
    """Each with its times, name, category, colour and facts; in batches, not one by one."""
    log = resolve(seen)
    found = events_of(log, decoded, RANGE_PUSHPOP)
    assert set(found) == {"r1/rank[0]/steps", "r1/rank[0]/phases full"}
    begins = datasets.START_NS + np.arange(STEPS) * datasets.STEP_NS - 1000
    steps = found["r1/rank[0]/steps"]
    assert [row["begin"] for row in steps] == begins.tolist()
    assert all(row["end"] - row["begin"] == 10_000 for row in steps)
    assert [row["step"] for row in steps] == list(range(STEPS))
    phases = found["r1/rank[0]/phases full"]
    assert [row["message"] for row in phases] == [names.PLAN, names.VERIFY, names.WRITE] * STEPS
    for at, (name, begin, spent) in enumerate(
        ((names.PLAN, 0, 1000), (names.VERIFY, 1000, 2000), ("write", 3000, 500))
    ):
        of_kind = phases[at::3]
        assert [row["begin"] for row in of_kind] == (begins + begin).tolist()
        assert all(row["end"] - row["begin"] == spent and row["category"] == name for row in of_kind)
        assert {row["color"] for row in of_kind} == {names.COLORS[name]}
        assert [row["bs"] for row in of_kind] == (np.arange(STEPS) % 7 + 1).tolist()
    assert len(log.of("events")) < 20


def test_schemas_name_the_roles_of_their_fields(seen: Path, resolve: Any) -> None:
    """Begin and end are the range's times, the message a registered string, category and colour typed as such."""
    log = resolve(seen)
    ranges = [schema for schema in log.schemas.values() if schema["flags"] == RANGE_PUSHPOP]
    marks = [schema for schema in log.schemas.values() if schema["flags"] == MARK]
    assert ranges and len(marks) == 1
    for schema in ranges:
        entries = {entry["name"]: entry for entry in schema["entries"]}
        assert entries["begin"]["flags"] == BEGIN | TIMESTAMP and entries["end"]["flags"] == END | TIMESTAMP
        assert entries["message"]["flags"] == MESSAGE and entries["message"]["type"] == STRING
        assert entries["category"]["type"] == CATEGORY and entries["color"]["type"] == COLOR
    assert marks[0]["entries"][0]["flags"] == IS_MARK | TIMESTAMP


def test_violations_are_marks(seen: Path, resolve: Any, decoded: Any) -> None:
    """With slot and position."""
    (marks,) = events_of(resolve(seen), decoded, MARK).values()
    assert [(mark["time"], mark["message"], mark["slot"], mark["position"], mark["step"]) for mark in marks] == [
        (datasets.START_NS, names.VIOLATION, 77, 3, 5)
    ]


def test_utilisation_is_a_counter(seen: Path, resolve: Any, decoded: Any) -> None:
    """Of each measured capacity, with unit and bound; a value once until it changes."""
    log = resolve(seen)
    counters = {event["name"]: event for event in log.of("counter")}
    assert {"write_req full utilization", "verify full utilization"} <= set(counters)
    assert all((event["unit"], event["min"], event["interpolation"]) == ("1", 0, 3) for event in counters.values())
    batches = [batch for batch in log.of("batch") if batch["counter"] == counters["write_req full utilization"]["id"]]
    values = np.concatenate([np.frombuffer(bytes.fromhex(batch["data"])) for batch in batches])
    times = np.concatenate([batch["times"] for batch in batches])
    assert np.array_equal(values, (np.arange(STEPS) % 7 + 1) / 256)
    assert np.array_equal(times, datasets.START_NS + np.arange(STEPS) * datasets.STEP_NS)
    assert sum(batch["counter"] == counters["verify full utilization"]["id"] for batch in log.of("batch")) == 1


def test_the_session_is_begun_and_ended(seen: Path, resolve: Any) -> None:
    """Name and options arrive; streams say domain, scope and clock; everything is closed in order."""
    log = resolve(seen)
    assert [(event["name"], event["config"]) for event in log.of("session")] == [("mine", "out=a\nb=c")]
    assert list(log.domains.values()) == [names.DOMAIN]
    scopes = {event["id"]: event["path"] for event in log.of("scope")}
    for stream in log.of("stream"):
        assert stream["time_domain"] == REALTIME and scopes[stream["scope"]] == stream["name"]
    closed = [event["id"] for event in log.of("stream_close")]
    assert sorted(closed) == sorted(event["id"] for event in log.of("stream"))
    assert [event["event"] for event in log.events[-2:]] == ["session_end", "finalize"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--format nvtxw needs --backend"),
        (["--backend", "nowhere.so"], "--backend nowhere.so is no NVTXW backend that works here"),
        (["--backend", "{libc}"], "is no NVTXW backend that works here: load_backend failed: library symbol missing"),
        (["--backend", "{backend}", "--session", "refuse"], "SessionBegin failed"),
        (["--backend", "{backend}", "--backend-config", "fail=events"], "the NVTXW backend failed: EventBatchWrite"),
        (["--backend", "{backend}", "--backend-config", "novalue"], "--backend-config must be KEY=VALUE"),
    ],
    ids=["none", "missing", "other-library", "refused", "failing", "option"],
)
def test_what_goes_wrong_is_one_sentence(
    dataset: Path, nvtxw_backend: Path, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    """And exit code 2."""
    libc = next(Path(name) for name in ("/lib/x86_64-linux-gnu/libm.so.6", sys.executable) if Path(name).exists())
    given = [argument.format(backend=nvtxw_backend, libc=libc) for argument in arguments]
    done = export(dataset, tmp_path / "log", *given)
    assert done.returncode == 2 and sentence in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and done.stdout == ""


def test_an_older_nvtx_has_no_writer(dataset: Path, nvtxw_backend: Path, wheel_folder: Any, tmp_path: Path) -> None:
    """nvtx 0.2.15, the real one: one sentence that names what to install."""
    environment = os.environ | {"PYTHONPATH": str(wheel_folder("nvtx==0.2.15"))}
    command = [sys.executable, "-m", "kvcanary_trace", "export", str(dataset), "--format", "nvtxw"]
    done = subprocess.run(
        [*command, "--backend", str(nvtxw_backend)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "needs the NVTXW writer of nvtx 0.2.16 or newer" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
