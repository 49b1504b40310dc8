"""What an NVTX tool sees of a session: ranges of real launches, and counters from the drain thread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from kvcanary_trace import names
from kvcanary_trace.pressure.capacities import BY_ID, CAPACITIES
from kvcanary_trace.sinks import otel_names

INT64_PAYLOAD = 2  # NVTX_PAYLOAD_TYPE_INT64
FLOAT64, INT64 = 44, 17  # NVTX_PAYLOAD_ENTRY_TYPE_*
COUNTER_ENTRY = 4 << 12  # NVTX_PAYLOAD_ENTRY_FLAG_COUNTER
UNTIL_NEXT = 3
COUNTER_GROUP = 1 << 3  # NVTX_PAYLOAD_SCHEMA_FLAG_COUNTER_GROUP
REALTIME, GLOBALTIMER = 12, 80  # NVTX_TIMESTAMP_TYPE_*

STEPS = 20

LOOP = """
    import json, sys, threading
    import torch
    torch.set_num_threads(1)
    from launches import Engine
    import kvcanary_trace as kv_canary

    engine = Engine()
    with kv_canary.trace(sys.argv[1], otel=False, flush_interval_s=0.05) as session:
        threads = {thread.name: thread.native_id for thread in threading.enumerate()}
        for number in range(20):
            with kv_canary.step(mode="decode", resident_reqs=2, kv_used=100 + number, kv_capacity=200):
                engine.plan([4, 0, 6], [1, 1, 1], [1, 1, 1])
                engine.verify()
                engine.write()
        with kv_canary.step(mode="decode", graph_replay=True, resident_reqs=7):
            pass
        with kv_canary.step(mode="idle"):
            pass
    print(json.dumps(threads), file=sys.stderr)
    assert session.stats.complete and session.stats.sink_errors == 0, session.stats
"""


@pytest.fixture(scope="module")
def seen(under_tool: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[dict[str, Any]]]:
    """The tool's log of the loop, and the rows that the same loop recorded."""
    folder = tmp_path_factory.mktemp("traces")
    return under_tool(LOOP, str(folder)), recorded(folder)


def recorded(folder: Path) -> list[dict[str, Any]]:
    """Rows of `steps` by step; times in ns."""
    table = ds.dataset(folder / "steps", partitioning="hive").to_table()
    at = table.schema.get_field_index("time")
    table = table.set_column(at, "time", table["time"].cast(pa.int64()))
    return sorted(table.to_pylist(), key=lambda row: row["step"])


def series(capacity: Any) -> str:
    """The counter's name in a loop of one runner and one group."""
    return names.counter_name(capacity.id, "target", "full" if capacity.grouped else None)


def ranges(log: Any) -> list[tuple[str, ...]]:
    """Pushes as (depth, message, category, payload), in order; fails where a pop has no push."""
    depth, found = 0, []
    for event in log.of("push", "pop"):
        if event["event"] == "pop":
            depth -= 1
            assert depth >= 0
            continue
        found.append((depth, log.strings[event["string"]], log.categories[event["category"]], event.get("payload")))
        depth += 1
    assert depth == 0
    return found


def test_ranges_as_a_tool_sees_them(seen: tuple[Any, Any]) -> None:
    """Pushes and pops nest and balance, all on the engine's thread and in our domain; payloads are batch sizes."""
    log, _ = seen
    one_step = [
        (0, "step", "step decode", 2),
        (1, "plan", "plan full", 2),
        (1, "verify", "verify HEAD_K_FULL", 2),
        (1, "write", "write HEAD_K_FULL", 2),
    ]
    assert ranges(log)[: 4 * STEPS] == one_step * STEPS
    threads = json.loads(log.stderr.strip().splitlines()[-1])
    for event in log.of("push", "pop"):
        assert event["thread"] == threads["MainThread"]
        assert log.domains[event["domain"]] == names.DOMAIN
    pushes = log.of("push")
    assert all(event["payload_type"] == INT64_PAYLOAD for event in pushes[:-1])
    assert "payload" not in pushes[-1]  # nobody said what the idle step has: no payload, rather than a zero


def test_colours_follow_the_phase(seen: tuple[Any, Any]) -> None:
    """One opaque colour for each phase, the one of `names.COLORS`."""
    log, _ = seen
    for event in log.of("push"):
        phase = log.categories[event["category"]].split()[0]
        assert event["color"] == names.COLORS[phase] and event["color"] >> 24 == 0xFF
    assert len(set(names.COLORS.values())) == len(names.RANGES) == len(names.COLORS)


def test_strings_and_categories_are_registered_once(seen: tuple[Any, Any]) -> None:
    """Twenty steps register each message and each category one time; no range carries its text itself."""
    log, _ = seen
    texts = [event["text"] for event in log.of("string")]
    assert sorted(texts) == sorted({*names.RANGES, names.STEP_REPLAY})
    categories = [event["name"] for event in log.of("category")]
    assert len(categories) == len(set(categories))
    assert {name.split()[0] for name in categories} == set(names.RANGES)
    assert all("message" not in event for event in log.of("push"))


def test_names_are_those_of_the_spans(seen: tuple[Any, Any]) -> None:
    """Domain and range, joined by a dot, are the span's name."""
    log, _ = seen
    pushed = {
        f"{log.domains[event['domain']]}.{log.strings[event['string']]}"
        for event in log.of("push")
        if log.strings[event["string"]] != names.STEP_REPLAY
    }
    assert pushed == set(otel_names.SPANS)


def test_a_graph_replay_is_one_range(seen: tuple[Any, Any]) -> None:
    """It stands in the step's category, and says where its inside is."""
    log, rows = seen
    replays = [one for one in ranges(log) if one[1] == names.STEP_REPLAY]
    assert replays == [(0, names.STEP_REPLAY, "step decode", 7)]
    assert "in the rows" in names.STEP_REPLAY and names.STEP_REPLAY.startswith(names.STEP)
    assert [row["graph_replay"] for row in rows].count(True) == 1


@pytest.mark.parametrize("capacity", CAPACITIES, ids=lambda capacity: capacity.id)
def test_counters_equal_the_rows(seen: tuple[Any, Any], capacity: Any) -> None:
    """Demand, limit, utilisation and time of each sample are those of its row; what is not measured has no sample."""
    log, rows = seen
    expected = []
    for row in rows:
        demand, limit = row[capacity.demand], row[capacity.limit]
        if demand is not None and limit is not None:
            expected.append((row["time"], {"demand": demand, "limit": limit, "utilization": demand / limit}))
    assert len(expected) == (0 if capacity.id == "write_entry" else STEPS)  # nobody gave a write_entry_capacity
    samples = log.samples(series(capacity))
    assert samples == expected


def test_counters_say_unit_bounds_and_clock(seen: tuple[Any, Any]) -> None:
    """A group of three fields for each capacity, each with its unit and a lower bound; host times are named as such."""
    log, _ = seen
    assert {event["name"] for event in log.of("counter")} == {
        series(BY_ID[name]) for name in BY_ID if name != "write_entry"
    }
    for counter in log.of("counter"):
        assert counter["time_domain"] == REALTIME and log.domains[counter["domain"]] == names.DOMAIN
        schema = log.schemas[counter["schema"]]
        assert schema["flags"] & COUNTER_GROUP
        demand, limit, utilization = schema["entries"]
        unit = f"{{{BY_ID[counter['name'].split()[0]].unit}}}"
        for entry, name, kind, units in (
            (demand, "demand", INT64, unit),
            (limit, "limit", INT64, unit),
            (utilization, "utilization", FLOAT64, "1"),
        ):
            assert (entry["name"], entry["type"], entry["unit"]) == (name, kind, units)
            assert entry["min"] == 0 and entry["max"] is None and entry["flags"] & COUNTER_ENTRY
            assert entry["interpolation"] == UNTIL_NEXT


def test_batches_come_from_the_drain_thread(seen: tuple[Any, Any]) -> None:
    """The engine's thread submits nothing; times within a batch rise, as batches without flags promise."""
    log, _ = seen
    threads = json.loads(log.stderr.strip().splitlines()[-1])
    batches = log.of("batch")
    assert batches and {batch["thread"] for batch in batches} == {threads[names.DRAIN_THREAD]}
    for batch in batches:
        assert batch["flags"] == 0 and batch["times"] == sorted(batch["times"])


OTHER_CLOCKS = """
    import sys
    import kvcanary_trace as kv_canary

    with kv_canary.trace(sys.argv[1], otel=False) as session:
        session.device_rings = None
        for sink in session._drain.outlets:
            if type(sink.sink).__name__ == "NvtxCounters":
                sink.sink.device_rings = lambda: {0}  # rows of this thread stand in for a device's
        for step, time_ns in ((0, 2000), (1, 1000), (2, 3000)):
            for group in ("full", "swa"):
                for runner in ("target", "draft"):
                    session.record(step=step, group=group, runner=runner, bs=step, write_req_capacity=4,
                                   kv_used=step, kv_capacity=10, time_ns=time_ns)
"""


def test_groups_runners_and_device_clocks(under_tool: Any, tmp_path: Path) -> None:
    """Each group and runner has its own counter, the pool one for all; device rows name the device's timer; batches
    that come out of order are sorted."""
    log = under_tool(OTHER_CLOCKS, str(tmp_path))
    expected = [(1000, 1, 0.25), (2000, 0, 0.0), (3000, 2, 0.5)]
    for name in ("write_req full", "write_req swa", "write_req full draft", "write_req swa draft"):
        samples = [(time, values["demand"], values["utilization"]) for time, values in log.samples(name)]
        assert samples == expected, name
    assert {event["time_domain"] for event in log.of("counter")} == {GLOBALTIMER}
    pool = [(time, values["demand"]) for time, values in log.samples("kv_pool")]
    assert sorted(set(pool)) == [(1000, 1), (2000, 0), (3000, 2)] and pool == sorted(pool)


TOOL_BREAKS = """
    import sys
    import kvcanary_trace as kv_canary

    with kv_canary.trace(sys.argv[1], otel=False) as session:
        sink = session._drain.outlets[-1].sink
        def fail(*_):
            raise RuntimeError("the tool went away")
        sink._submit_all = fail
        for step in range(3):
            session.record(step=step, bs=1, write_req_capacity=4)
            session.flush(30)
    assert session.stats.sink_errors == 0 and session.stats.steps == 3
"""


def test_a_failing_tool_turns_counters_off_once(under_tool: Any, tmp_path: Path) -> None:
    """One sentence, no repeated batches, no lost rows."""
    log = under_tool(TOOL_BREAKS, str(tmp_path))
    assert log.stderr.count("NVTX counters are off from now on: RuntimeError: the tool went away") == 1
    assert len(recorded(tmp_path)) == 3 and not log.of("batch")


def test_nothing_is_submitted_when_nvtx_is_off(under_tool: Any, tmp_path: Path) -> None:
    """`nvtx=False` means no domain, no ranges and no counters."""
    code = """
        import sys
        import kvcanary_trace as kv_canary
        with kv_canary.trace(sys.argv[1], otel=False, nvtx=False) as session, kv_canary.step():
            session.record(step=1, bs=1, write_req_capacity=4)
    """
    assert under_tool(code, str(tmp_path)).events == []
