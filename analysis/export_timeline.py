"""A dataset as a timeline: steps, phases, utilisation and violations, streamed in the order of the steps.

A row has one time and some durations, no beginnings. A plan ended at its row's time and began `plan_ns` before it;
verify and write follow it; a step begins with its first plan and lasts `host_ns`. Spans of the OpenTelemetry sink stand
likewise. Slices of one track never overlap: steps that do (several threads, or a virtual clock) get lanes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, Final, TypeAlias

from kvcanary_trace import names
from kvcanary_trace.pressure.capacities import CAPACITIES, Capacity
from kvcanary_trace.schema import STEPS, VIOLATIONS

from .export_writers import Arrows
from .sql import Connection

__all__ = ["Event", "Instant", "Process", "Sample", "Slice", "Timeline", "Track"]

MAX_LANES: Final = 8
"""Steps that stand beside each other; one more is cut to where the first lane is free."""

_FETCH_ROWS: Final = 4096
_PIECE_ROWS: Final = 200_000
_PHASES: Final = ((names.PLAN, "plan_ns"), (names.VERIFY, "verify_ns"), (names.WRITE, "write_ns"))

_KEY: Final = frozenset(("step", "forward", "runner", "group", "time", "seq"))
_OF_THE_STEP: Final = (
    "mode", "graph_replay", "kv_used", "kv_capacity", "resident_reqs", "resident_tokens", "waiting_reqs",
    "waiting_tokens", "host_ns", "error", "error_message", "trace_id", "span_id",
)  # fmt: skip
_OF_THE_GROUP: Final = tuple(
    column.name for column in STEPS.columns if column.name not in _KEY and column.name not in _OF_THE_STEP
)

Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Process:
    """One rank of a run."""

    run: str
    rank: int

    @property
    def name(self) -> str:
        """What a viewer calls it."""
        return f"{self.run} rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Track:
    """One line of the timeline; `unit` is that of a counter, None on a track of slices."""

    process: Process
    name: str
    unit: str | None = None


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that lasted. `flows` are numbers of arrows that begin here."""

    track: Track
    begin_ns: int
    end_ns: int
    name: str
    args: Mapping[str, Any]
    flows: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Instant:
    """Something that happened at one time. `flow` is the number of the arrow that ends here."""

    track: Track
    time_ns: int
    name: str
    args: Mapping[str, Any]
    flow: int | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """A counter's value from this time on."""

    track: Track
    time_ns: int
    value: float


Event: TypeAlias = Slice | Instant | Sample


@dataclass(slots=True)
class _State:
    """What is known of one process: how far each track and lane is filled, and each counter's value."""

    lanes: list[int] = field(default_factory=list)
    filled: dict[Track, int] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)


class Timeline:
    """The events of a dataset, read through one connection; `events` may be called once."""

    def __init__(self, connection: Connection, steps: tuple[int | None, int | None], arrows: Arrows) -> None:
        """Read steps from the first to the last of `steps`, both included; None is open."""
        self._connection = connection
        self._where = step_filter(steps)
        self._arrows = arrows
        self._states: dict[Process, _State] = {}
        self.counts = {"steps": 0, "phases": 0, "samples": 0, "violations": 0, "arrows": 0}
        self.untimed_rows = 0
        """Rows that have no time: nothing can be drawn of them."""
        self.cut_slices = 0
        """Slices that overlapped others and were shortened."""

    def begin_ns(self) -> int:
        """The earliest time of the timeline, 0 for an empty one."""
        query = f"SELECT min(epoch_ns(time) - coalesce(plan_ns, 0)) FROM steps {self._where}"
        found = self._connection.execute(query).fetchall()[0][0]
        return 0 if found is None else int(found)

    def events(self) -> Iterator[Event]:
        """Everything; steps first, then violations, which need to know that the step they point to is there."""
        yield from self._step_events()
        yield from self._violation_events()

    # --- steps ------------------------------------------------------------------------------------------------------

    def _step_events(self) -> Iterator[Event]:
        key = itemgetter("run", "rank", "step")
        for (run, rank, number), of_step in groupby(self._step_rows(), key=key):
            timed = []
            for row in of_step:
                if row["time"] is None:
                    self.untimed_rows += 1
                else:
                    timed.append(row)
            if timed:
                process = Process(run, rank)
                state = self._states.setdefault(process, _State())
                yield from self._step(process, state, number, timed)

    def _step_rows(self) -> Iterator[Row]:
        """Rows in order, sorted a piece at a time: sorting all at once would need memory for all."""
        columns = [column.name for column in STEPS.columns]
        selected = ", ".join("epoch_ns(time) AS time" if name == "time" else f'"{name}"' for name in columns)
        for run, rank, piece in self._pieces():
            query = (
                f"SELECT run, rank, {selected} FROM steps WHERE run = '{run.replace(chr(39), 2 * chr(39))}' "
                f'AND rank = {rank} AND {piece} ORDER BY step, forward, runner, time, "group"'
            )
            yield from _rows(self._connection, query, ["run", "rank", *columns])

    def _pieces(self) -> list[tuple[str, int, str]]:
        """(run, rank, condition on step) of pieces of about _PIECE_ROWS rows each."""
        sizes = f"SELECT run, rank, count(*), min(step), max(step) FROM steps {self._where} GROUP BY ALL ORDER BY ALL"
        found = []
        for run, rank, rows, first, last in self._connection.execute(sizes).fetchall():
            cuts = [first - 1]
            if rows > _PIECE_ROWS:
                shares = [at * _PIECE_ROWS / rows for at in range(1, rows // _PIECE_ROWS + 1)]
                where = f"{self._where or 'WHERE true'} AND run = ? AND rank = ?"
                query = f"SELECT approx_quantile(step, {shares}) FROM steps {where}"
                cuts += self._connection.execute(query, [run, rank]).fetchall()[0][0]
            cuts = sorted({int(cut) for cut in cuts if first - 1 <= cut < last} | {last})
            found += [(run, rank, f"step > {low} AND step <= {high}") for low, high in pairwise(cuts)]
        return found

    def _step(self, process: Process, state: _State, number: int, rows: Sequence[Row]) -> Iterator[Event]:
        forwards = [
            list(of_forward) for _, of_forward in groupby(rows, key=lambda row: (row["forward"], row["runner"]))
        ]
        begin_ns = min(row["time"] - (row["plan_ns"] or 0) for row in rows)
        end_ns = max(_end_ns(forward) for forward in forwards)
        lane = self._lane(state, begin_ns, end_ns)
        suffix = f" #{lane + 1}" if lane else ""
        flows = self._arrows.begin(process.run, process.rank, number)
        self.counts["steps"] += 1
        yield self._slice(
            state, Track(process, f"{names.STEP}s{suffix}"), begin_ns, end_ns, names.STEP, _step_args(rows), flows
        )
        for forward in forwards:
            for row in forward:
                yield from self._phases(process, state, row, _host_end_ns(forward), suffix)
            yield from self._samples(process, state, forward)

    def _phases(self, process: Process, state: _State, row: Row, last_ns: int | None, suffix: str) -> Iterator[Slice]:
        track = Track(process, names.counter_name("phases", row["runner"], _group(row)) + suffix)
        at_ns = _begin_ns(row)
        for name, column in _PHASES:
            spent_ns = row[column]
            if spent_ns is None:
                continue
            done_ns = at_ns + spent_ns
            if last_ns is not None:
                at_ns, done_ns = min(at_ns, last_ns), min(done_ns, last_ns)
            self.counts["phases"] += 1
            yield self._slice(state, track, at_ns, done_ns, name, _phase_args(row, spent_ns))
            at_ns = done_ns

    def _samples(self, process: Process, state: _State, forward: Sequence[Row]) -> Iterator[Sample]:
        """Utilisations that changed; a viewer holds a counter's value until its next one."""
        for number, row in enumerate(forward):
            for capacity in CAPACITIES:
                if not capacity.grouped and number:
                    continue
                value = _utilization(row, capacity)
                if value is None:
                    continue
                of_what = (row["runner"], _group(row)) if capacity.grouped else (None, None)
                name = names.counter_name(capacity.id, *of_what)
                if state.values.get(name) != value:
                    state.values[name] = value
                    self.counts["samples"] += 1
                    yield Sample(Track(process, f"{name} utilization", "1"), row["time"], value)

    def _lane(self, state: _State, begin_ns: int, end_ns: int) -> int:
        """The first lane that is free at `begin_ns`; past MAX_LANES the one that is free first."""
        lanes = state.lanes
        lane = next((lane for lane, until_ns in enumerate(lanes) if until_ns <= begin_ns), None)
        if lane is None and len(lanes) < MAX_LANES:
            lane = len(lanes)
            lanes.append(begin_ns)
        elif lane is None:
            lane = lanes.index(min(lanes))
        lanes[lane] = max(lanes[lane], end_ns)
        return lane

    def _slice(
        self,
        state: _State,
        track: Track,
        begin_ns: int,
        end_ns: int,
        name: str,
        args: Mapping[str, Any],
        flows: Sequence[int] = (),
    ) -> Slice:
        free_ns = state.filled.get(track, begin_ns)
        if free_ns > begin_ns:
            self.cut_slices += 1
            begin_ns, end_ns = free_ns, max(end_ns, free_ns)
        state.filled[track] = end_ns
        return Slice(track, begin_ns, end_ns, name, args, flows)

    # --- violations -------------------------------------------------------------------------------------------------

    def _violation_events(self) -> Iterator[Instant]:
        columns = [column.name for column in VIOLATIONS.columns]
        for row in _rows(self._connection, self._arrows.query(columns), ["run", "rank", *columns, "id", *_WRITER]):
            if row["time"] is None:
                self.untimed_rows += 1
                continue
            process = Process(row["run"], row["rank"])
            args = {name: row[name] for name in columns if name != "time" and row[name] is not None}
            args["time_ns"] = row["time"]
            flow, args["written_by"] = self._arrows.end(row)
            self.counts["violations"] += 1
            self.counts["arrows"] += flow is not None
            yield Instant(Track(process, f"{names.VIOLATION}s"), row["time"], names.VIOLATION, args, flow)


_WRITER: Final = ("writer", "unknown")


def step_filter(steps: tuple[int | None, int | None]) -> str:
    """WHERE clause of a range of steps."""
    first, last = steps
    parts = [f"step >= {int(first)}"] if first is not None else []
    parts += [f"step <= {int(last)}"] if last is not None else []
    return f"WHERE {' AND '.join(parts)}" if parts else ""


def _rows(connection: Connection, query: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows of a query, some thousands in memory at a time."""
    cursor = connection.execute(query)
    while batch := cursor.fetchmany(_FETCH_ROWS):
        for values in batch:
            yield dict(zip(columns, values, strict=True))


def _begin_ns(row: Row) -> int:
    """When the row's plan began; for a row without one, its time."""
    begin_ns: int = row["time"] - (row["plan_ns"] or 0)
    return begin_ns


def _host_end_ns(forward: Sequence[Row]) -> int | None:
    """When `step()` ended, where the host measured it."""
    host_ns = forward[0]["host_ns"]
    return None if host_ns is None else min(map(_begin_ns, forward)) + int(host_ns)


def _end_ns(forward: Sequence[Row]) -> int:
    host_ns = _host_end_ns(forward)
    if host_ns is not None:
        return host_ns
    return max(int(row["time"]) + (row["verify_ns"] or 0) + (row["write_ns"] or 0) for row in forward)


def _utilization(row: Row, capacity: Capacity) -> float | None:
    demand, limit = row[capacity.demand], row[capacity.limit]
    return None if demand is None or limit is None else demand / max(limit, 1)


def _group(row: Row) -> str | None:
    """The group, and that it was a sweep: a sweep has plans and demands of its own."""
    group: str | None = row["group"]
    return f"{group} {row['kind']}" if row["kind"] == "sweep" and group is not None else group


def _step_args(rows: Sequence[Row]) -> dict[str, Any]:
    """What the step's rows say; of several forwards the first one's, which the number of forwards shows."""
    first = rows[0]
    args: dict[str, Any] = {"step": first["step"], "forwards": len({(row["forward"], row["runner"]) for row in rows})}
    for row in rows:
        for name in _OF_THE_STEP:
            if row[name] is not None:
                args.setdefault(name, row[name])
        if row["group"] is not None:
            prefix = row["group"] if row["runner"] == "target" else f"{row['group']}.{row['runner']}"
            for name in _OF_THE_GROUP:
                if row[name] is not None:
                    args.setdefault(f"{prefix}.{name}", row[name])
    return args


def _phase_args(row: Row, spent_ns: int) -> dict[str, Any]:
    names_of_key = ("step", "forward", "runner", "group", "bs")
    return {**{name: row[name] for name in names_of_key if row[name] is not None}, "spent_ns": spent_ns}
