"""Readers of published request traces: one per format, chosen by what a file says rather than by its name.

A file that no reader knows, and a line that its reader cannot take, is a `WorkloadError` in one sentence; a bad line is
named by its number. Nothing is skipped silently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvcanary_trace.errors import WorkloadError

from .workloads import MAX_SPAN_S, Request, Workload

__all__ = ["FORMATS", "read_workload"]

_AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_AZURE_TIME: Final = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:\+00:00|Z)?")
_MOONCAKE_BLOCK: Final = 512
_HEAD_BYTES: Final = 1 << 16
_MAX_TOKENS: Final = 1 << 30
_NO_HASHES: Final = np.empty(0, np.int64)


def read_workload(path: Path) -> Workload:
    """Read a workload file, or a folder of coding conversations (each with hashes of its own, all starting at once).

    Raises:
        WorkloadError: The file is missing, empty, of unknown format, or has a bad line (named by number).
    """
    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        raise WorkloadError(f"no workload at {path}: give a request trace, or a folder of coding conversations")
    return _reader_of(path)(path)


def _reader_of(path: Path) -> Callable[[Path], Workload]:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n")
    if not head:
        raise WorkloadError(f"{path} is empty: a workload has at least one request")
    for knows, reader in FORMATS.values():
        if knows(head):
            return reader
    raise WorkloadError(
        f"{path} is of unknown format; known are: azure (CSV with {','.join(_AZURE_COLUMNS)}), "
        "mooncake (JSON lines with timestamp, input_length, output_length), "
        "coding conversation (one JSON object with block_size and requests)"
    )


# --- azure ------------------------------------------------------------------------------------------------------------


def _is_azure(head: bytes) -> bool:
    first = head.split(b"\n", 1)[0].decode("utf-8", "replace")
    return [name.strip() for name in first.split(",")] == list(_AZURE_COLUMNS)


def _read_azure(path: Path) -> Workload:
    """Azure LLM inference trace: date and time, input tokens, output tokens; no hashes."""
    rows: list[tuple[int, int, int]] = []
    for number, line in _lines(path):
        if number == 1 or not line.strip():
            continue
        cells = line.strip().split(",")
        if len(cells) != len(_AZURE_COLUMNS):
            raise _bad(
                path, number, f"has {len(cells)} cells, wanted {len(_AZURE_COLUMNS)}: {','.join(_AZURE_COLUMNS)}"
            )
        time_ns = _azure_time_ns(path, number, cells[0])
        input_len = _count(path, number, _AZURE_COLUMNS[1], cells[1])
        rows.append((time_ns, input_len, _count(path, number, _AZURE_COLUMNS[2], cells[2])))
    if not rows:
        raise WorkloadError(f"{path} has a header and no requests")
    rows.sort(key=lambda row: row[0])
    start_ns = rows[0][0]
    requests = tuple(
        Request((time_ns - start_ns) / 1e9, input_len, max(output_len, 1), _NO_HASHES)
        for time_ns, input_len, output_len in rows
    )
    return Workload(path.stem, "azure", requests, start_ns)


def _azure_time_ns(path: Path, number: int, cell: str) -> int:
    match = _AZURE_TIME.fullmatch(cell.strip())
    try:
        if match is None or not "1970" <= match[1] < "2200":  # int64 ns since 1970 end in 2262
            raise ValueError
        when = datetime.fromisoformat(f"{match[1]}T{match[2]}").replace(tzinfo=timezone.utc)
    except ValueError:
        raise _bad(
            path,
            number,
            f"TIMESTAMP must read like 2023-11-16 18:15:46.6805900 and lie from 1970 to 2199, got {cell.strip()!r}",
        ) from None
    return int(when.timestamp()) * 1_000_000_000 + int((match[3] or "0").ljust(9, "0"))


# --- mooncake ---------------------------------------------------------------------------------------------------------


def _is_mooncake(head: bytes) -> bool:
    first = head.split(b"\n", 1)[0]
    return first.startswith(b"{") and b'"timestamp"' in first and b'"input_length"' in first


def _read_mooncake(path: Path) -> Workload:
    """Mooncake trace: milliseconds, lengths, one hash per 512-token prefix block (the last may be partly filled)."""
    requests: list[Request] = []
    for number, line in _lines(path):
        if not line.strip():
            continue
        record = _record(path, number, line)
        input_len = _count(path, number, "input_length", record.get("input_length"))
        output_len = _count(path, number, "output_length", record.get("output_length"))
        time_ms = record.get("timestamp")
        if isinstance(time_ms, bool) or not isinstance(time_ms, int | float) or not 0 <= time_ms <= MAX_SPAN_S * 1e3:
            raise _bad(path, number, f"timestamp must be milliseconds from 0 to {MAX_SPAN_S * 1e3:g}, got {time_ms!r}")
        hashes = _hashes(path, number, record.get("hash_ids", []), -(-input_len // _MOONCAKE_BLOCK))
        requests.append(Request(time_ms / 1e3, input_len, max(output_len, 1), hashes, _MOONCAKE_BLOCK, scope=0))
    requests.sort(key=lambda request: request.arrival_s)
    return Workload(path.stem, "mooncake", tuple(requests))


# --- coding conversations ---------------------------------------------------------------------------------------------


def _is_conversation(head: bytes) -> bool:
    return head.startswith(b"{") and b'"block_size"' in head and b'"requests"' in head


def _read_conversation(path: Path) -> Workload:
    """One coding conversation: each request arrives when the one before is answered and the think time has passed."""
    return Workload(path.stem, "coding-conversation", tuple(_conversation(path, scope=0, first=0)))


def _read_folder(path: Path) -> Workload:
    files = sorted(file for file in path.glob("*.json") if file.is_file())
    if not files:
        raise WorkloadError(f"{path} holds no .json file: a workload folder is a folder of coding conversations")
    requests: list[Request] = []
    for scope, file in enumerate(files):
        if _reader_of(file) is not _read_conversation:
            raise WorkloadError(f"{file} is not a coding conversation: a workload folder holds nothing else")
        requests += _conversation(file, scope, first=len(requests))
    return Workload(path.name, "coding-conversation", tuple(requests))


def _conversation(path: Path, scope: int, first: int) -> list[Request]:
    """The requests of one file, numbered from `first`."""
    try:
        whole = json.loads(path.read_text("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise _bad(path, error.lineno, f"is not JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    block_size, records = whole.get("block_size"), whole.get("requests")
    if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1:
        raise WorkloadError(f"{path}: block_size must be at least 1 token, got {block_size!r}")
    if not isinstance(records, list) or not records:
        raise WorkloadError(f"{path}: requests must be a list with at least one request")
    requests: list[Request] = []
    answered_s = 0.0
    for index, record in enumerate(records):
        where = f"request {index + 1}"
        if not isinstance(record, dict):
            raise WorkloadError(f"{path}: {where} must be an object, got {type(record).__name__}")
        input_len = _count(path, where, "in", record.get("in"))
        output_len = _count(path, where, "out", record.get("out"))
        time_s = _seconds(path, where, "t", record.get("t"))
        hashes = _hashes(path, where, record.get("hash_ids", []), -(-input_len // block_size))
        given = record.get("think_time")
        think_s = max(time_s - answered_s, 0.0) if given is None else _seconds(path, where, "think_time", given)
        after = first + index - 1 if index else -1
        requests.append(Request(time_s, input_len, max(output_len, 1), hashes, block_size, scope, after, think_s))
        answered_s = time_s + _seconds(path, where, "api_time", record.get("api_time") or 0.0)
    return requests


# --- cells ------------------------------------------------------------------------------------------------------------


def _lines(path: Path) -> list[tuple[int, str]]:
    """Numbered lines, from 1."""
    try:
        return list(enumerate(path.read_text("utf-8-sig").splitlines(), start=1))
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _bad(path: Path, where: int | str, what: str) -> WorkloadError:
    place = f"line {where}" if isinstance(where, int) else where
    return WorkloadError(f"{path}: {place} {what}")


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise _bad(path, number, f"is not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(record, dict):
        raise _bad(path, number, f"must be a JSON object, got {type(record).__name__}")
    return record


def _count(path: Path, where: int | str, name: str, cell: object) -> int:
    """A number of tokens; only an output may be 0."""
    least = 0 if name.lower().startswith(("out", "gen")) else 1
    if isinstance(cell, str):
        cell = int(cell) if re.fullmatch(r"\s*\d{1,12}\s*", cell) else cell
    if isinstance(cell, bool) or not isinstance(cell, int) or not least <= cell <= _MAX_TOKENS:
        raise _bad(path, where, f"{name} must be a number of tokens from {least} to {_MAX_TOKENS}, got {cell!r}")
    return cell


def _seconds(path: Path, where: int | str, name: str, cell: object) -> float:
    if isinstance(cell, bool) or not isinstance(cell, int | float) or not 0 <= cell <= MAX_SPAN_S:
        raise _bad(path, where, f"{name} must be seconds from 0 to {MAX_SPAN_S:g}, got {cell!r}")
    return float(cell)


def _hashes(path: Path, where: int | str, cell: object, most: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    if not isinstance(cell, list) or not all(type(item) is int and -(2**63) <= item < 2**63 for item in cell):
        raise _bad(path, where, "hash_ids must be a list of 64-bit integers")
    if len(cell) > most:
        raise _bad(path, where, f"hash_ids has {len(cell)} blocks, its input fills {most}")
    return np.array(cell, np.int64)


FORMATS: Final[dict[str, tuple[Callable[[bytes], bool], Callable[[Path], Workload]]]] = {
    "azure": (_is_azure, _read_azure),
    "mooncake": (_is_mooncake, _read_mooncake),
    "coding-conversation": (_is_conversation, _read_conversation),
}
"""Format → (whether the first bytes are of it, its reader)."""
