"""Why a step broke: what led to it, whose prefixes made its demand, and who wrote the slot of a violation.

Rows of requests (`trace(detail="requests")`, `replay --detail requests`) tell most of it; without them the answer says
what it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from kvcanary_trace.errors import DatasetError, SettingError
from kvcanary_trace.pressure.capacities import CAPACITIES
from kvcanary_trace.schema import SCHEMA_VERSION

from .dataset import open_dataset
from .export_writers import Arrows
from .sql import Connection

__all__ = ["Explanation", "Request", "Slot", "explain"]

_BEFORE: Final = 500
_TOP: Final = 5
_MAX_SLOTS: Final = 20
_TELLING: Final = ("bs", "verify_demand", "write_entries", "kv_used", "resident_reqs", "waiting_reqs", "waiting_tokens")
_NO_REQUESTS: Final = 'no requests rows: record with trace(detail="requests") to see whose prefixes made the demand'


@dataclass(frozen=True, slots=True)
class Request:
    """A request of the step: its row of the pool, and its share of the demand."""

    req_pool_idx: int
    prefix_len: int
    extend_len: int
    verify_entries: int
    share: float


@dataclass(frozen=True, slots=True)
class Slot:
    """A violation: where, why, who wrote the slot, who read it, and how long its row had been in use.

    Attributes:
        written: The step that wrote it, or why that is not known.
        writer_step: That step, or None.
        readers: Rows of the pool whose requests verified that position in this step; empty where no rows tell.
        row_reuse_steps: Steps since the row of the one reader changed hands before, None where unknown.
    """

    launch_tag: str
    slot: int
    position: int
    reasons: str
    writer_step: int | None
    written: str
    readers: tuple[int, ...]
    row_reuse_steps: int | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """One step of one group, explained.

    Attributes:
        run, rank, step, group, mode: Which row.
        why: What happened in it: capacities past their limits, an error, violations.
        now, before: Quantities of this row, and their means over the 500 steps before it.
        requests: The largest shares of the demand first.
        all_requests: How many there were, None without rows of requests.
        shared_prefix_factor: Tokens that its requests see for each KV slot held: above 1 where prefixes are shared.
        slots: Violations.
        lacking: What the rows do not tell, and how to record it.
    """

    run: str
    rank: int
    step: int
    group: str | None
    mode: str | None
    why: tuple[str, ...]
    now: Mapping[str, float | None]
    before: Mapping[str, float | None]
    requests: tuple[Request, ...]
    all_requests: int | None
    shared_prefix_factor: float | None
    slots: tuple[Slot, ...]
    lacking: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Every number."""
        return {"schema": SCHEMA_VERSION, **asdict(self)}


def explain(
    path: Path | str, step: int | None = None, *, run: str | None = None, rank: int | None = None
) -> Explanation:
    """Explain a step: the given one, or the first at which something broke.

    Args:
        path: The dataset's folder.
        step: Engine step; None takes the first with a capacity past its limit, an error or a violation.
        run, rank: Of the row; None takes the first that fits.

    Raises:
        DatasetError, SchemaError: As `open_dataset`; or nothing broke and no step is given.
        SettingError: There is no such step.
    """
    past = " OR ".join(f'"{one.demand}" > "{one.limit}"' for one in CAPACITIES)
    broke = f"(error IS NOT NULL OR violations_new > 0 OR {past})"
    where, arguments = [], []
    for name, value in (("step", step), ("run", run), ("rank", rank)):
        if value is not None:
            where.append(f"{name} = ?")
            arguments.append(value)
    if step is None:
        where.append(broke)
    clause = f"WHERE {' AND '.join(where)}" if where else ""
    with open_dataset(path).connect() as connection:
        query = f"SELECT * FROM steps {clause} ORDER BY NOT coalesce({broke}, false), step, run, rank, forward LIMIT 1"
        row = _one(connection, query, arguments)
        if row is None and step is None:
            raise DatasetError(f"nothing broke in {path}: name a step to explain it all the same")
        if row is None:
            raise SettingError(f"{path} has no row of step {step}{f' in run {run}' if run else ''}")
        lacking: list[str] = []
        requests, count = _requests(connection, row, lacking)
        slots = _slots(connection, row, lacking)
        before = _before(connection, row)
    factor = None
    if row["prefix_len_sum"] and row["kv_used"]:
        factor = row["prefix_len_sum"] / row["kv_used"]
    elif row["kv_used"] is None:
        lacking.append("kv_used was not recorded: give it to step() to see how much the requests share")
    return Explanation(
        run=row["run"],
        rank=row["rank"],
        step=row["step"],
        group=row["group"],
        mode=row["mode"],
        why=_why(row),
        now={name: row[name] for name in _TELLING},
        before=before,
        requests=requests,
        all_requests=count,
        shared_prefix_factor=factor,
        slots=slots,
        lacking=tuple(lacking),
    )


def _one(connection: Connection, query: str, arguments: list[Any]) -> dict[str, Any] | None:
    found = connection.execute(query, arguments)
    names = [column[0] for column in found.description or ()]
    rows = found.fetchmany(1)
    return dict(zip(names, rows[0], strict=True)) if rows else None


def _why(row: Mapping[str, Any]) -> tuple[str, ...]:
    said = []
    for one in CAPACITIES:
        demand, limit = row[one.demand], row[one.limit]
        if demand is not None and limit is not None and demand > limit:
            said.append(f"{one.id}: {demand:,} of {limit:,}: {one.consequence}")
    if row["error"] is not None:
        said.append(f"error {row['error']}: {row['error_message']}")
    if row["violations_new"]:
        said.append(f"{row['violations_new']:,} new violations")
    if row["verify_enabled"] is False and not any(text.startswith("verify:") for text in said):
        said.append("verification was off")
    return tuple(said) or ("nothing broke in this step",)


_KEY: Final = 'run = ? AND rank = ? AND runner = ? AND "group" IS NOT DISTINCT FROM ?'


def _key(row: Mapping[str, Any]) -> list[Any]:
    return [row["run"], row["rank"], row["runner"], row["group"]]


def _before(connection: Connection, row: Mapping[str, Any]) -> dict[str, float | None]:
    means = ", ".join(f'avg("{name}") AS "{name}"' for name in _TELLING)
    query = f"SELECT {means} FROM steps WHERE {_KEY} AND step < ? AND step >= ?"
    found = _one(connection, query, [*_key(row), row["step"], row["step"] - _BEFORE])
    return {name: None if found is None else found[name] for name in _TELLING}


def _requests(
    connection: Connection, row: Mapping[str, Any], lacking: list[str]
) -> tuple[tuple[Request, ...], int | None]:
    rows = connection.execute(
        "SELECT req_pool_idx, prefix_len, extend_len, verify_entries, sum(verify_entries) OVER (), count(*) OVER () "
        f"FROM requests WHERE {_KEY} AND step = ? AND forward = ? "
        f"ORDER BY verify_entries DESC, req_pool_idx LIMIT {_TOP}",
        [*_key(row), row["step"], row["forward"]],
    ).fetchall()
    if not rows:
        lacking.append(_NO_REQUESTS)
        return (), None
    total = rows[0][4] or 0
    largest = (
        Request(row, prefix, extend, mine, mine / total if total else 0.0) for row, prefix, extend, mine, *_ in rows
    )
    return tuple(largest), int(rows[0][5])


def _slots(connection: Connection, row: Mapping[str, Any], lacking: list[str]) -> tuple[Slot, ...]:
    if not row["violations_new"]:
        return ()
    arrows = Arrows(connection, f"WHERE step <= {int(row['step'])}")
    names = ("step", "forward", "runner", "group", "launch_tag", "slot", "position", "reasons")
    query = f"SELECT * FROM ({arrows.query(names)}) WHERE {_KEY} AND step = ? AND forward = ? LIMIT {_MAX_SLOTS}"
    found = connection.execute(query, [*_key(row), row["step"], row["forward"]])
    columns = [column[0] for column in found.description or ()]
    rows = [dict(zip(columns, values, strict=True)) for values in found.fetchall()]
    if not rows:
        lacking.append("the violations' ring was full: they are counted, their detail is lost")
    unknown_column = columns[-1]
    slots = []
    for one in rows:
        writer = one["writer"]
        readers = _readers(connection, row, one["position"])
        slots.append(
            Slot(
                launch_tag=one["launch_tag"],
                slot=one["slot"],
                position=one["position"],
                reasons=one["reasons"],
                writer_step=writer,
                written=str(one[unknown_column]) if writer is None else f"step {writer}",
                readers=readers,
                row_reuse_steps=_row_reuse(connection, row, readers[0]) if len(readers) == 1 else None,
            )
        )
    return tuple(slots)


def _readers(connection: Connection, row: Mapping[str, Any], position: int) -> tuple[int, ...]:
    rows = connection.execute(
        f"SELECT req_pool_idx FROM requests WHERE {_KEY} AND step = ? AND forward = ? AND ? < prefix_len "
        "AND ? >= prefix_len - verify_entries ORDER BY req_pool_idx",
        [*_key(row), row["step"], row["forward"], position, position],
    ).fetchall()
    return tuple(int(one[0]) for one in rows)


def _row_reuse(connection: Connection, row: Mapping[str, Any], req_pool_idx: int) -> int | None:
    """Steps since a new request took over this row of the pool: its prefix did not go on from the row before."""
    rows = connection.execute(
        "SELECT step FROM (SELECT step, "
        "prefix_len <> lag(prefix_len + extend_len) OVER (ORDER BY step, forward) AS begins "
        f"FROM requests WHERE {_KEY} AND req_pool_idx = ? AND step <= ?) WHERE begins ORDER BY step DESC LIMIT 1",
        [*_key(row), req_pool_idx, row["step"]],
    ).fetchall()
    return int(row["step"] - rows[0][0]) if rows else None
