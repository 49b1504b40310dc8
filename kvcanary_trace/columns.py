"""Arrow record batches from joined ring rows: every column derives from its line in `schema.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kvcanary_trace.kernels.layout import (
    MAX_REQS_PER_LAUNCH,
    CanaryLaunchTag,
    FailReason,
    ProbeWord,
    ViolationField,
)

from .arrow import Flags, flags, integers, named, strings
from .join import Joined
from .schema import NOT_MEASURED, REQUESTS, STEPS, VIOLATIONS, Column, ErrorCode, HostWord, Table

ERROR_CODES: Final = tuple(member.code for member in ErrorCode)
"""Codes by the number that stands in `HostWord.ERROR`."""

_Ints = npt.NDArray[np.int64]


def lower_names(names: type[IntEnum]) -> tuple[str, ...]:
    """Names by value, as columns hold them."""
    by_value = {int(member): member.name.lower() for member in names}
    return tuple(by_value[value] for value in range(len(by_value)))


def steps_batch(rows: Joined, messages: Sequence[str]) -> pa.RecordBatch:
    """The rows of table `steps`.

    Args:
        rows: Joined halves.
        messages: Error messages by the number that stands in `HostWord.ERROR_MESSAGE`.
    """
    arrays = [
        _SPECIAL[column.name](rows, messages) if column.name in _SPECIAL else _word_column(column, rows)
        for column in STEPS.columns
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=STEPS_ARROW)


STEPS_ARROW: Final = STEPS.arrow
VIOLATIONS_ARROW: Final = VIOLATIONS.arrow
REQUESTS_ARROW: Final = REQUESTS.arrow


def _word_column(column: Column, rows: Joined) -> pa.Array:
    word = column.word
    if word is None:
        return pa.nulls(len(rows), column.type)
    if column.key:  # both halves have the key, in the same words
        values = np.where(rows.has_device, rows.device[:, word], rows.host[:, word])
    else:
        values = (rows.host if isinstance(word, HostWord) else rows.device)[:, word]
    return typed(column, values)


def typed(column: Column, values: _Ints) -> pa.Array:
    """int64 words as the column's Arrow type; NOT_MEASURED and unknown names are null."""
    if column.names is not None:
        return named(lower_names(column.names), values, other="unknown" if column.key else None)
    missing: Flags = values == NOT_MEASURED
    if pa.types.is_boolean(column.type):
        return flags(values != 0, missing)
    return integers(values, missing, column.type)


def _duration(column: Column, rows: Joined) -> pa.Array:
    """Durations keep 8 significant bits: what is below is the clock's noise, and would be half of a file."""
    assert column.word is not None
    values = (rows.host if isinstance(column.word, HostWord) else rows.device)[:, column.word]
    _, exponent = np.frexp(np.maximum(values, 1).astype(np.float64))
    unit = np.int64(1) << np.maximum(exponent.astype(np.int64) - _DURATION_BITS, 0)
    return typed(column, np.where(values > 0, (values + (unit >> 1)) // unit * unit, values))


def _duration_of(column: Column) -> Callable[[Joined, Sequence[str]], pa.Array]:
    return lambda rows, _: _duration(column, rows)


DURATIONS: Final = ("plan_ns", "verify_ns", "write_ns", "host_ns")
"""Measured columns, rounded when they are written."""

_DURATION_BITS: Final = 8


def _time(rows: Joined, _: Sequence[str]) -> pa.Array:
    device = rows.device[:, ProbeWord.TIME_NS]
    values = np.where(device != NOT_MEASURED, device, rows.host[:, HostWord.TIME_NS])
    return typed(STEPS["time"], values)


def _plan_block_limit(rows: Joined, _: Sequence[str]) -> pa.Array:
    return integers(np.full(len(rows), MAX_REQS_PER_LAUNCH, dtype=np.int64), ~rows.has_device)


def _error(rows: Joined, _: Sequence[str]) -> pa.Array:
    return named(ERROR_CODES, rows.host[:, HostWord.ERROR])


def _error_message(rows: Joined, messages: Sequence[str]) -> pa.Array:
    numbers = rows.host[:, HostWord.ERROR_MESSAGE]
    have = numbers != NOT_MEASURED
    if not have.any():
        return pa.nulls(len(rows), pa.string())
    texts: list[str | None] = [None] * len(rows)
    for at in np.flatnonzero(have):
        number = int(numbers[at])
        texts[at] = messages[number] if 0 <= number < len(messages) else None
    return strings(texts)


def _hex_id(words: Sequence[HostWord], rows: Joined) -> pa.Array:
    parts = [rows.host[:, word] for word in words]
    have = parts[0] != NOT_MEASURED
    if not have.any():
        return pa.nulls(len(rows), pa.string())
    texts: list[str | None] = [
        "".join(f"{int(part[at]) & 0xFFFF_FFFF_FFFF_FFFF:016x}" for part in parts) if have[at] else None
        for at in range(len(rows))
    ]
    return strings(texts)


_SPECIAL: Final[dict[str, Callable[[Joined, Sequence[str]], pa.Array]]] = {
    **{name: _duration_of(STEPS[name]) for name in DURATIONS},
    "time": _time,
    "plan_block_limit": _plan_block_limit,
    "error": _error,
    "error_message": _error_message,
    "trace_id": lambda rows, _: _hex_id((HostWord.TRACE_ID_HIGH, HostWord.TRACE_ID_LOW), rows),
    "span_id": lambda rows, _: _hex_id((HostWord.SPAN_ID,), rows),
}

# --- violations -----------------------------------------------------------------------------------------------------

_REASONS: Final = tuple(
    "|".join(reason.name or "" for reason in FailReason if bits & reason) for bits in range(2 * max(FailReason))
)


def violations_batch(found: Sequence[tuple[int, int, int, int, int, int, _Ints]]) -> pa.RecordBatch:
    """The rows of table `violations`.

    Args:
        found: (step, forward, runner, group, time in ns, number of the first in its ring, [n, 8] int64 rows) each.
    """
    rows = np.concatenate([item[6] for item in found])
    counts = [len(item[6]) for item in found]
    numbers = np.concatenate([np.arange(item[5], item[5] + count) for item, count in zip(found, counts, strict=True)])
    keys = np.repeat(np.array([item[:5] for item in found], dtype=np.int64), counts, axis=0)
    by_key = {name: keys[:, at] for at, name in enumerate((*_KEY_NAMES, "time"))}
    tags = rows[:, ViolationField.LAUNCH_TAG]
    special = {
        "number": integers(numbers),
        "launch_tag": named([tag.name for tag in sorted(CanaryLaunchTag)], tags),
        "reasons": strings([_reasons(int(bits)) for bits in rows[:, ViolationField.FAIL_REASON]]),
    }
    return _batch(VIOLATIONS, VIOLATIONS_ARROW, special, by_key, rows)


def requests_batch(plans: Sequence[tuple[int, int, int, int, int, _Ints, _Ints, _Ints]]) -> pa.RecordBatch:
    """The rows of table `requests`, padding left out.

    Args:
        plans: (step, forward, runner, group, window, req_pool_indices, prefix_lens, extend_seq_lens) each.
    """
    active = [np.flatnonzero(item[5]) for item in plans]
    counts = [len(rows) for rows in active]
    keys = np.repeat(np.array([item[:4] for item in plans], dtype=np.int64), counts, axis=0)
    by_name = {name: keys[:, at] for at, name in enumerate(_KEY_NAMES)}
    picked = list(zip(plans, active, strict=True))
    prefix_lens = np.concatenate([np.maximum(item[6][rows], 0) for item, rows in picked])
    windows = np.repeat(np.array([item[4] for item in plans], dtype=np.int64), counts)
    by_name["row"] = np.concatenate(active)
    by_name["req_pool_idx"] = np.concatenate([item[5][rows] for item, rows in picked])
    by_name["prefix_len"] = prefix_lens
    by_name["extend_len"] = np.concatenate([np.maximum(item[7][rows], 0) for item, rows in picked])
    by_name["verify_entries"] = np.where(windows > 0, np.minimum(prefix_lens, windows), prefix_lens)
    return _batch(REQUESTS, REQUESTS_ARROW, {}, by_name, None)


_KEY_NAMES: Final = ("step", "forward", "runner", "group")


def _batch(
    table: Table, schema: pa.Schema, special: dict[str, pa.Array], named: dict[str, _Ints], rows: _Ints | None
) -> pa.RecordBatch:
    arrays = []
    for column in table.columns:
        if column.name in special:
            arrays.append(special[column.name])
        elif column.name in named:
            arrays.append(typed(column, named[column.name]))
        else:
            assert rows is not None and column.word is not None
            arrays.append(integers(rows[:, column.word]))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _reasons(bits: int) -> str:
    return _REASONS[bits] if 0 <= bits < len(_REASONS) else f"unknown:{bits}"
