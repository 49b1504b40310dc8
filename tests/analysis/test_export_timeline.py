"""Exports to files: read with the formats' own rules, and compared with the rows."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest

from kvcanary_trace import names
from kvcanary_trace.analysis import export_timeline as export_timeline_module
from kvcanary_trace.analysis.export import Format, export_timeline
from kvcanary_trace.errors import DatasetError, SettingError
from kvcanary_trace.schema import REQUESTS

START_NS, STEP_NS = datasets.START_NS, datasets.STEP_NS
PLAN_NS, VERIFY_NS, WRITE_NS, HOST_NS = 1_001, 2_002, 503, 10_007


def steps(rows: int, **columns: Any) -> Any:
    """Rows with all durations."""
    durations = {"plan_ns": PLAN_NS, "verify_ns": VERIFY_NS, "write_ns": WRITE_NS, "host_ns": HOST_NS}
    return datasets.steps_table(rows, **{**durations, **columns})


class Timeline:
    """A file of either format, read into one shape: slices by (process, track), counters, arrows."""

    def __init__(self) -> None:
        self.slices: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        self.counters: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
        self.arrows_from: dict[int, dict[str, Any]] = {}
        self.arrows_to: dict[int, dict[str, Any]] = {}

    def check(self) -> Timeline:
        """Slices of a track do not overlap; each arrow has two ends and goes forward in time."""
        for key, slices in self.slices.items():
            for one, other in pairwise(slices):
                assert one["end"] <= other["begin"] or (one["begin"], one["end"]) == (other["begin"], other["end"]), key
        assert self.arrows_from.keys() == self.arrows_to.keys()
        for flow, one in self.arrows_from.items():
            assert one["name"] == names.STEP and self.arrows_to[flow]["name"] == names.VIOLATION
            assert one["begin"] <= self.arrows_to[flow]["begin"]
        return self


def read_perfetto(path: Path) -> Timeline:
    """By the published protobuf classes: no unknown fields, every reference resolved."""
    schema = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    from google.protobuf.unknown_fields import UnknownFieldSet

    def refuse_unknown(message: Any) -> None:
        assert not len(UnknownFieldSet(message)), f"unknown fields in {message.DESCRIPTOR.name}"
        for field, value in message.ListFields():
            if field.message_type is not None:
                for one in value if not hasattr(value, "ListFields") else [value]:
                    refuse_unknown(one)

    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    trace = schema.Trace.FromString(data)
    timeline = Timeline()
    interned: dict[str, dict[int, str]] = defaultdict(dict)
    processes: dict[int, str] = {}
    tracks: dict[int, tuple[str, str]] = {}
    counters: dict[int, str] = {}
    open_slices: dict[int, list[dict[str, Any]]] = defaultdict(list)
    event_type = schema.TrackEvent.Type
    assert trace.packet[0].sequence_flags & schema.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    clocks = {clock.clock_id: clock.timestamp for clock in trace.packet[0].clock_snapshot.clocks}
    assert (
        set(clocks) == {schema.BUILTIN_CLOCK_REALTIME, schema.BUILTIN_CLOCK_BOOTTIME} and len(set(clocks.values())) == 1
    )
    for packet in trace.packet:
        refuse_unknown(packet)
        assert packet.trusted_packet_sequence_id == 1
        for kind in ("event_names", "event_categories", "debug_annotation_names"):
            for entry in getattr(packet.interned_data, kind):
                assert entry.iid not in interned[kind]
                interned[kind][entry.iid] = entry.name
        if packet.HasField("track_descriptor"):
            about = packet.track_descriptor
            assert about.uuid not in tracks and about.uuid not in processes
            if about.HasField("process"):
                processes[about.uuid] = about.process.process_name
                continue
            tracks[about.uuid] = (processes[about.parent_uuid], about.name)
            if about.HasField("counter"):
                counters[about.uuid] = about.counter.unit_name
        if not packet.HasField("track_event"):
            continue
        assert packet.sequence_flags & schema.TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
        event = packet.track_event
        track = tracks[event.track_uuid]
        if event.type == event_type.TYPE_COUNTER:
            assert counters[event.track_uuid] == "1"
            timeline.counters[track].append((packet.timestamp, event.double_counter_value))
        elif event.type == event_type.TYPE_SLICE_END:
            open_slices[event.track_uuid].pop()["end"] = packet.timestamp
        else:
            args = {}
            for annotation in event.debug_annotations:
                args[interned["debug_annotation_names"][annotation.name_iid]] = getattr(
                    annotation, annotation.WhichOneof("value")
                )
            one = {"name": interned["event_names"][event.name_iid], "begin": packet.timestamp, "args": args}
            assert interned["event_categories"][event.category_iids[0]] == one["name"]
            timeline.slices[track].append(one)
            for flow in event.flow_ids:
                timeline.arrows_from[flow] = one
            for flow in event.terminating_flow_ids:
                timeline.arrows_to[flow] = one
            if event.type == event_type.TYPE_SLICE_BEGIN:
                open_slices[event.track_uuid].append(one)
            else:
                assert event.type == event_type.TYPE_INSTANT
                one["end"] = one["begin"]
    assert not any(open_slices.values())
    return timeline.check()


_MEMBERS = {
    "M": {"ph", "name", "pid", "tid", "args"},
    "X": {"ph", "name", "ts", "pid", "tid", "dur", "cat", "args"},
    "C": {"ph", "name", "ts", "pid", "tid", "args"},
    "s": {"ph", "name", "ts", "pid", "tid", "cat", "id"},
    "f": {"ph", "name", "ts", "pid", "tid", "cat", "id", "bp"},
}
"""What the trace event format asks of each phase that we write."""


def read_chrome(path: Path) -> Timeline:
    """By the rules of the trace event format; times as exact nanoseconds."""
    from decimal import Decimal

    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    trace = json.loads(data, parse_float=Decimal)
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"} and trace["displayTimeUnit"] == "ns"
    begin_ns = int(trace["otherData"]["clock_begin_unix_ns"])
    timeline = Timeline()
    processes: dict[int, str] = {}
    threads: dict[tuple[int, int], str] = {}
    by_begin: dict[tuple[int, int, Any], dict[str, Any]] = {}

    def at_ns(number: Decimal) -> int:
        exact = number * 1000
        assert exact == int(exact) and float(number) < 2**53
        return begin_ns + int(exact)

    for event in trace["traceEvents"]:
        assert set(event) == _MEMBERS[event["ph"]], event
        assert all(isinstance(event[name], int) for name in ("pid", "tid"))
        if event["ph"] == "M":
            if event["name"] == "process_name":
                processes[event["pid"]] = event["args"]["name"]
            else:
                assert event["name"] == "thread_name"
                threads[event["pid"], event["tid"]] = event["args"]["name"]
        elif event["ph"] == "C":
            (value,) = event["args"].values()
            timeline.counters[processes[event["pid"]], event["name"]].append((at_ns(event["ts"]), float(value)))
        elif event["ph"] == "X":
            begin, dur = at_ns(event["ts"]), int(event["dur"] * 1000)
            one = {"name": event["name"], "begin": begin, "end": begin + dur, "args": event["args"]}
            assert dur >= 0 and event["cat"] == event["name"]
            timeline.slices[processes[event["pid"]], threads[event["pid"], event["tid"]]].append(one)
            by_begin[event["pid"], event["tid"], event["ts"]] = one
        else:
            ends = timeline.arrows_from if event["ph"] == "s" else timeline.arrows_to
            assert event["id"] not in ends and (event["ph"] == "s" or event["bp"] == "e")
            # An arrow stands at a slice's beginning, inside of it.
            ends[event["id"]] = by_begin[event["pid"], event["tid"], event["ts"]]
    return timeline.check()


READERS = {Format.perfetto: read_perfetto, Format.chrome: read_chrome}
formats = pytest.mark.parametrize("format_", READERS, ids=lambda format_: format_.value)


def exported(root: Path, format_: Format, **options: Any) -> tuple[Timeline, Any]:
    """Export and read back."""
    path = root.with_name("timeline")
    done = export_timeline(root, format_, out=path, **options)
    return READERS[format_](path), done


@formats
def test_steps_and_phases_stand_where_the_rows_say(tmp_path: Path, format_: Format) -> None:
    """A plan ends at the row's time, verify and write follow; a step lasts as long as step() did; nothing is lost."""
    root = datasets.dataset(tmp_path / "d", steps(50, bs=np.arange(50)))
    timeline, done = exported(root, format_)
    times = START_NS + np.arange(50) * STEP_NS
    found = timeline.slices["r1 rank 0", "steps"]
    assert [(one["begin"], one["end"]) for one in found] == [
        (t - PLAN_NS, t - PLAN_NS + HOST_NS) for t in times.tolist()
    ]
    assert [one["args"]["step"] for one in found] == list(range(50))
    assert [one["args"]["full.bs"] for one in found] == list(range(50))
    assert all(one["args"]["full.verify_enabled"] is True and one["args"]["mode"] == "decode" for one in found)
    phases = timeline.slices["r1 rank 0", "phases full"]
    expected = []
    for t in times.tolist():
        expected += [
            (names.PLAN, t - PLAN_NS, t),
            (names.VERIFY, t, t + VERIFY_NS),
            (names.WRITE, t + VERIFY_NS, t + VERIFY_NS + WRITE_NS),
        ]
    assert [(one["name"], one["begin"], one["end"]) for one in phases] == expected
    assert (done.steps, done.phases, done.untimed_rows, done.cut_slices) == (50, 150, 0, 0)


@formats
def test_utilisation_changes_at_the_row_that_changed_it(tmp_path: Path, format_: Format) -> None:
    """demand / limit of each capacity; equal neighbours are one sample; what is not measured has none."""
    bs = [3, 3, 6, 6, None, 6, 3]
    root = datasets.dataset(tmp_path / "d", steps(7, bs=bs, kv_used=[None, 5, 5, 5, 5, 7, 7], kv_capacity=10))
    timeline, _ = exported(root, format_)
    times = (START_NS + np.arange(7) * STEP_NS).tolist()
    assert timeline.counters["r1 rank 0", "write_req full utilization"] == [
        (times[0], 3 / 256), (times[2], 6 / 256), (times[6], 3 / 256),
    ]  # fmt: skip
    assert timeline.counters["r1 rank 0", "kv_pool utilization"] == [(times[1], 0.5), (times[5], 0.7)]
    assert not [name for _, name in timeline.counters if name.startswith("write_entry")]


@formats
def test_ranks_groups_runners_and_sweeps_have_tracks_of_their_own(tmp_path: Path, format_: Format) -> None:
    """One step of several forwards is one slice; each group's phases and utilisation are apart."""
    root = tmp_path / "d"
    table = steps(
        6,
        step=[0, 0, 0, 1, 1, 1],
        forward=[0, 0, 1, 0, 0, 1],
        runner=["target", "target", "draft"] * 2,
        group=["full", "swa", "full"] * 2,
        kind=["forward", "forward", "sweep"] * 2,
        time=[START_NS + at for at in (0, 100, 20_000, STEP_NS, STEP_NS + 100, STEP_NS + 20_000)],
    )
    for rank in (0, 1):
        datasets.write_part(root, table, rank=rank)
        datasets.write_run(root, rank=rank, world_size=2)
    timeline, done = exported(root, format_)
    for process in ("r1 rank 0", "r1 rank 1"):
        two = timeline.slices[process, "steps"]
        assert [one["args"]["forwards"] for one in two] == [2, 2]
        assert two[0]["begin"] == START_NS - PLAN_NS and two[0]["end"] == START_NS + 20_000 - PLAN_NS + HOST_NS
        for track in ("phases full", "phases swa", "phases full sweep draft"):
            assert len(timeline.slices[process, track]) == 6, track
        assert (process, "verify full sweep draft utilization") in timeline.counters
    assert done.steps == 4


@formats
def test_steps_that_overlap_get_lanes(tmp_path: Path, format_: Format) -> None:
    """Two threads' steps stand beside each other whole; past the lanes a step is cut, and that is said."""
    root = datasets.dataset(tmp_path / "d", steps(10, time=[START_NS + 6_000 * at for at in range(10)]))
    timeline, done = exported(root, format_)
    lengths = [
        one["end"] - one["begin"] for track in ("steps", "steps #2") for one in timeline.slices["r1 rank 0", track]
    ]
    assert lengths == [HOST_NS] * 10 and done.cut_slices == 0
    root = datasets.dataset(tmp_path / "e", steps(10, time=[START_NS + at for at in range(10)]))
    timeline, done = exported(root, format_)
    assert len({track for _, track in timeline.slices if track.startswith("steps")}) == 8 and done.cut_slices > 0


@formats
def test_what_is_not_measured_is_left_out(tmp_path: Path, format_: Format) -> None:
    """A graph replay without durations is a step without phases; a row without a time is counted."""
    table = datasets.steps_table(
        4, time=[START_NS, START_NS + 10, None, START_NS + 30], graph_replay=True, bs=[1, None, 1, 1],
        error=[None, None, None, "other"], error_message=[None, None, None, 'say "no"\né\x01'],
    )  # fmt: skip
    timeline, done = exported(datasets.dataset(tmp_path / "d", table), format_)
    found = timeline.slices["r1 rank 0", "steps"]
    assert len(found) == 3 and done.phases == 0 and done.untimed_rows == 1
    assert "full.bs" not in found[1]["args"] and found[1]["args"]["graph_replay"] is True
    assert found[2]["args"]["error_message"] == 'say "no"\né\x01'


@formats
def test_a_range_of_steps(tmp_path: Path, format_: Format) -> None:
    """--from and --until are inclusive; a range without steps is an empty timeline, not an error."""
    root = datasets.dataset(tmp_path / "d", steps(20))
    timeline, done = exported(root, format_, first_step=5, last_step=7)
    assert [one["args"]["step"] for one in timeline.slices["r1 rank 0", "steps"]] == [5, 6, 7]
    timeline, done = exported(root, format_, first_step=100)
    assert done.steps == 0 and not timeline.slices


def test_pieces_are_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorted a piece at a time, a file is that of one sort, byte for byte; of several runs and sparse steps, too."""
    root = tmp_path / "d"
    for run, scale in (("r1", 1), ("it's", 1 << 40)):
        for rank in (0, 1):
            step = np.repeat(np.arange(60) * scale, 2)
            columns = {"step": step, "group": ["full", "swa"] * 60, "time": START_NS + np.arange(120) * STEP_NS}
            datasets.write_part(root, steps(120, **columns), run=run, rank=rank)
    export_timeline(root, Format.perfetto, out=tmp_path / "whole")
    pieces = []
    rows = export_timeline_module._rows
    monkeypatch.setattr(export_timeline_module, "_PIECE_ROWS", 17)
    monkeypatch.setattr(export_timeline_module, "_rows", lambda *given: pieces.append(given[1]) or rows(*given))
    done = export_timeline(root, Format.perfetto, out=tmp_path / "pieces")
    assert len(pieces) > 20 and done.steps == 240
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "pieces").read_bytes()


@formats
def test_large_numbers_survive(tmp_path: Path, format_: Format) -> None:
    """Integers past a double's 53 bits come out exactly: as integers, or as text in JSON."""
    value = -(2**63) + 1
    root = datasets.dataset(tmp_path / "d", steps(3))
    datasets.write_part(
        root,
        datasets.violations_table(1, step=1, time=START_NS + STEP_NS, chain_hash=value, fail_reason=1),
        name="violations",
    )
    timeline, _ = exported(root, format_)
    (one,) = timeline.slices["r1 rank 0", "violations"]
    assert int(one["args"]["chain_hash"]) == value
    assert isinstance(one["args"]["chain_hash"], str) == (format_ is Format.chrome)


@formats
def test_an_arrow_leads_from_the_writing_step_to_the_violation(tmp_path: Path, format_: Format) -> None:
    """Position 2 was written in step 0; found in steps 3 and 4; one more violation is found by the step that wrote."""
    root = datasets.dataset(tmp_path / "d", steps(5))
    lengths = [(0, 4), (4, 1), (5, 1), (6, 1), (7, 1)]
    requests = [
        {"step": step, "forward": 0, "runner": "target", "group": "full", "row": 0, "req_pool_idx": 1,
         "prefix_len": prefix, "extend_len": extend, "verify_entries": prefix}
        for step, (prefix, extend) in enumerate(lengths)
    ]  # fmt: skip
    datasets.write_part(root, pa.Table.from_pylist(requests, schema=REQUESTS.arrow), name="requests")
    found = datasets.violations_table(
        3, step=[3, 4, 4], time=[START_NS + at * STEP_NS for at in (3, 4, 4)], slot=[9, 9, 8], position=[2, 2, 7],
        token=1, chain_hash=5, fail_reason=[4, 4, 8],
    )  # fmt: skip
    datasets.write_part(root, found, name="violations")
    timeline, done = exported(root, format_)
    assert [one["args"]["step"] for one in timeline.arrows_from.values()] == [0, 0]
    assert [one["args"]["step"] for one in timeline.arrows_to.values()] == [3, 4]
    violations = timeline.slices["r1 rank 0", "violations"]
    said = [one["args"]["written_by"] for one in violations]
    assert said == ["step 0", "step 0", "written by this very step"]
    assert (done.violations, done.arrows, done.unknown_writers) == (3, 2, (("written by this very step", 1),))


def test_the_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export that fails leaves the file of the one before, and no half of its own; .gz compresses."""
    root = datasets.dataset(tmp_path / "d", steps(5))
    out = tmp_path / "t.json.gz"
    export_timeline(root, Format.chrome, out=out)
    before = out.read_bytes()
    assert read_chrome(out).slices
    from kvcanary_trace.analysis import export_chrome

    def fail(*_: Any) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(export_chrome.ChromeWriter, "close", fail)
    with pytest.raises(OSError, match="no space"):
        export_timeline(root, Format.chrome, out=out)
    assert out.read_bytes() == before and sorted(p.name for p in tmp_path.iterdir()) == ["d", "t.json.gz"]


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    """A backend without nvtxw, nvtxw without one, no dataset: a sentence each."""
    root = datasets.dataset(tmp_path / "d", steps(1))
    with pytest.raises(SettingError, match="--backend is for --format nvtxw, got --format chrome"):
        export_timeline(root, Format.chrome, backend=Path("lib.so"))
    with pytest.raises(SettingError, match="needs --backend"):
        export_timeline(root, Format.nvtxw)
    with pytest.raises(DatasetError, match="does not exist"):
        export_timeline(tmp_path / "none", Format.chrome)


def test_the_command_writes_and_tells(tmp_path: Path) -> None:
    """Named after the folder; only the answer on standard output; torch stays out."""
    root = datasets.dataset(tmp_path / "traces", steps(3))
    code = (
        "import sys; from kvcanary_trace.cli import main\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules and 'nvtx' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "export", str(root)],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("wrote traces.perfetto-trace: 3 steps, 9 phases, ") and done.stderr == ""
    assert len(read_perfetto(tmp_path / "traces.perfetto-trace").slices["r1 rank 0", "steps"]) == 3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_does_not_grow_with_the_dataset(tmp_path: Path) -> None:
    """Three times the rows, within a quarter the same peak: sorted in pieces, written as it comes."""
    code = (
        "import pathlib, resource, sys; from kvcanary_trace.analysis.export import Format, export_timeline\n"
        "export_timeline(sys.argv[1], Format.chrome, out=pathlib.Path(sys.argv[1] + '.json'))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for parts in (4, 12):
        root = tmp_path / f"d{parts}"
        for part in range(parts):
            step = np.arange(50_000) + part * 50_000
            datasets.write_part(root, steps(50_000, step=step, bs=step % 200), part=part)
        done = subprocess.run([sys.executable, "-c", code, str(root)], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    assert peaks[1] < 1.25 * peaks[0], peaks
