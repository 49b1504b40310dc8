"""Which step wrote the slot of a violation, as far as the rows tell, and arrows from there.

A violation names its slot and the position stored there, no request. `requests` rows (`trace(detail="requests")`) tell
what each request of a step had before it and what it added. So the writer of a position is sought among the requests
that the finding step verified at that position: each of them wrote it in the step whose extend covers it, unless its
prefix came from the cache. A record that is found wrong again and again was written once: only a step that is possible
each time is possible at all. One such step is an answer; several, or one that is not recorded, are none. One thing can
fool it: a request that takes over a row of the pool with a cached prefix exactly as long as the one before had got.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from kvcanary_trace.kernels.layout import FailReason

from .sql import Connection

__all__ = ["MAX_ARROWS", "Arrows"]

MAX_ARROWS: Final = 10_000
"""Violations whose writer is sought, the earliest of all; memory and time are bounded by it."""

_WRITTEN_HERE: Final = int(FailReason.WRITE_TOKEN_MISMATCH) | int(FailReason.WRITE_POSITION_MISMATCH)
_ELSEWHERE: Final = int(FailReason.VERIFY_POSITION_MISMATCH)

_PREPARE: Final = """
CREATE TEMP TABLE export_violations AS
SELECT row_number() OVER (ORDER BY run, rank, time, step, forward, runner, "group", launch_tag, number, slot) AS id, *
FROM violations {where};

CREATE TEMP TABLE export_records AS
SELECT id, min(id) OVER (PARTITION BY run, rank, runner, "group", slot, position, token, chain_hash) AS record
FROM export_violations WHERE id <= {limit};

CREATE TEMP TABLE export_found AS
SELECT v.id, v.position, r.run, r.rank, r.runner, r."group", r.req_pool_idx, r.step, r.forward
FROM (SELECT * FROM export_violations WHERE id <= {limit} AND fail_reason & {not_sought} = 0) v
JOIN requests r ON r.run = v.run AND r.rank = v.rank AND r.runner = v.runner AND r."group" = v."group"
    AND r.step = v.step AND r.forward = v.forward
    AND v.position < r.prefix_len AND v.position >= r.prefix_len - r.verify_entries;

CREATE TEMP TABLE export_lives AS
SELECT *, sum(begins) OVER (
    PARTITION BY run, rank, runner, "group", req_pool_idx ORDER BY step, forward ROWS UNBOUNDED PRECEDING) AS life
FROM (
    SELECT run, rank, runner, "group", req_pool_idx, step, forward, prefix_len, extend_len,
        CASE WHEN prefix_len = lag(prefix_len + extend_len) OVER (
            PARTITION BY run, rank, runner, "group", req_pool_idx ORDER BY step, forward) THEN 0 ELSE 1 END AS begins
    FROM requests SEMI JOIN export_found USING (run, rank, runner, "group", req_pool_idx)
);

CREATE TEMP TABLE export_candidates AS
SELECT f.id, f.req_pool_idx, max(w.step) AS writer
FROM export_found f
JOIN export_lives l ON l.run = f.run AND l.rank = f.rank AND l.runner = f.runner AND l."group" = f."group"
    AND l.req_pool_idx = f.req_pool_idx AND l.step = f.step AND l.forward = f.forward
LEFT JOIN export_lives w ON w.run = f.run AND w.rank = f.rank AND w.runner = f.runner AND w."group" = f."group"
    AND w.req_pool_idx = f.req_pool_idx AND w.life = l.life AND (w.step, w.forward) < (f.step, f.forward)
    AND w.prefix_len <= f.position AND f.position < w.prefix_len + w.extend_len
GROUP BY ALL;

CREATE TEMP TABLE export_counts AS
SELECT id, count(*) AS requests, count(writer) AS known, count(DISTINCT writer) AS writers, min(writer) AS first_writer,
    max(writer) AS last_writer
FROM export_candidates GROUP BY id;

CREATE TEMP TABLE export_writers AS
WITH whole AS (
    SELECT record, c.id, c.writer FROM export_candidates c
    JOIN export_records r ON r.id = c.id JOIN export_counts n ON n.id = c.id AND n.known = n.requests
), in_all AS (
    SELECT record, writer FROM whole JOIN (SELECT record, count(DISTINCT id) AS times FROM whole GROUP BY record)
    USING (record) GROUP BY record, writer, times HAVING count(DISTINCT id) = times
)
SELECT id, min(writer) AS writer FROM in_all JOIN export_records USING (record) GROUP BY id
HAVING count(DISTINCT writer) = 1;
"""

_UNKNOWN: Final = f"""
CASE
    WHEN fail_reason & {_WRITTEN_HERE} <> 0 THEN 'written by this very step'
    WHEN v.id > {{limit}} THEN 'unknown: only the first {{limit}} violations are looked up'
    WHEN fail_reason & {_ELSEWHERE} <> 0 THEN 'unknown: the slot holds another position than its request wrote'
    WHEN NOT {{has_requests}} THEN 'unknown: no requests rows; record with trace(detail="requests")'
    WHEN requests IS NULL THEN 'unknown: no request of this step was verified at this position'
    WHEN known = 0 THEN 'unknown: it came from the prefix cache, or was written before the recording began'
    WHEN known < requests THEN 'unknown: ' || requests || ' requests were verified at this position, and for '
        || (requests - known) || ' of them its writer is not recorded'
    WHEN writers > 0 THEN 'unknown: one of ' || writers || ' steps between ' || first_writer || ' and ' || last_writer
END
"""


class Arrows:
    """From the steps that wrote a slot to the violations found there."""

    def __init__(self, connection: Connection, where: str) -> None:
        """Look up the writers of the violations that the clause `where` leaves."""
        self._has_requests = bool(connection.execute("SELECT 1 FROM requests LIMIT 1").fetchall())
        prepare = _PREPARE.format(where=where, limit=MAX_ARROWS, not_sought=_WRITTEN_HERE | _ELSEWHERE)
        for statement in filter(str.strip, prepare.split(";")):
            connection.execute(statement)
        known = connection.execute(
            "SELECT run, rank, writer, id FROM export_writers JOIN export_violations USING (id) ORDER BY id"
        )
        self._from: dict[tuple[str, int, int], list[int]] = {}
        for run, rank, step, number in known.fetchall():
            self._from.setdefault((run, rank, step), []).append(number)
        self._begun: set[int] = set()

    def begin(self, run: str, rank: int, step: int) -> Sequence[int]:
        """Numbers of the arrows that begin at a step; call it once for each step that is drawn."""
        numbers = self._from.get((run, rank, step), ())
        self._begun.update(numbers)
        return numbers

    def query(self, columns: Iterable[str]) -> str:
        """The violations in order of `id`: run, rank, the columns, id, the step that wrote the slot, or why not."""
        selected = ", ".join("epoch_ns(time) AS time" if name == "time" else f'"{name}"' for name in columns)
        unknown = _UNKNOWN.format(limit=MAX_ARROWS, has_requests=str(self._has_requests).lower())
        return (
            f"SELECT run, rank, {selected}, v.id, w.writer, {unknown} FROM export_violations v "
            "LEFT JOIN export_counts n ON n.id = v.id LEFT JOIN export_writers w ON w.id = v.id ORDER BY v.id"
        )

    def end(self, violation: Mapping[str, Any]) -> tuple[int | None, str]:
        """The arrow's number, None where none begins, and what to say of the writer."""
        if violation["writer"] is None:
            return None, str(violation["unknown"])
        if violation["id"] not in self._begun:
            return None, f"step {violation['writer']}, which is not drawn"
        return int(violation["id"]), f"step {violation['writer']}"
