"""Readers: each format by its content, each bad line by its number, and the real files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvcanary_trace.errors import SettingError, WorkloadError
from kvcanary_trace.replay.readers import read_workload
from kvcanary_trace.replay.synthetic import bursty_workload
from kvcanary_trace.replay.tokens import request_tokens
from kvcanary_trace.replay.workloads import Request, shape_workload

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 7]}\n'
    '{"timestamp": 3000, "input_length": 512, "output_length": 6, "hash_ids": [0]}\n'
)


def conversation(**change: object) -> str:
    """A conversation of two requests, the second with `change`."""
    first = {"t": 0.0, "type": "s", "in": 130, "out": 4, "hash_ids": [1, 2], "api_time": 2.0}
    second = {"t": 9.0, "type": "s", "in": 200, "out": 3, "hash_ids": [1, 2, 3], "think_time": 5.0}
    return json.dumps({"id": "x", "block_size": 64, "requests": [first, {**second, **change}]})


def write(folder: Path, text: str, name: str = "load.txt") -> Path:
    """A workload file whose name tells nothing."""
    path = folder / name
    path.write_bytes(text.encode())
    return path


def test_azure(tmp_path: Path) -> None:
    """Seven fraction digits, CRLF, no hashes."""
    workload = read_workload(write(tmp_path, AZURE))
    first, second = workload.requests
    assert workload.format == "azure"
    assert workload.start_ns == 1_700_158_546_680_590_000
    assert (first.arrival_s, first.input_len, first.output_len, len(first.block_hashes)) == (0.0, 374, 44, 0)
    assert second.arrival_s == pytest.approx(4.314579)


def test_mooncake(tmp_path: Path) -> None:
    """Milliseconds and 512-token blocks, the last partly filled."""
    workload = read_workload(write(tmp_path, MOONCAKE))
    assert workload.format == "mooncake"
    assert [r.arrival_s for r in workload.requests] == [0.0, 3.0]
    assert workload.requests[0].block_hashes.tolist() == [0, 7]
    assert workload.requests[0].block_size == 512


def test_conversation_is_a_closed_loop(tmp_path: Path) -> None:
    """Each request waits for the one before; a missing think time is what lies between answer and next request."""
    first, second = read_workload(write(tmp_path, conversation())).requests
    assert (first.after, second.after, second.think_s) == (-1, 0, 5.0)
    _, second = read_workload(write(tmp_path, conversation(think_time=None))).requests
    assert second.think_s == 7.0


def test_folder_of_conversations_keeps_scopes_apart(tmp_path: Path) -> None:
    """Hash ids mean something only within one file."""
    write(tmp_path, conversation(), "a.json")
    write(tmp_path, conversation(), "b.json")
    workload = read_workload(tmp_path)
    assert [r.scope for r in workload.requests] == [0, 0, 1, 1]
    assert [r.after for r in workload.requests] == [-1, 0, -1, 2]


BAD = {
    "azure-cells": (AZURE + "2023-11-16 18:15:51.0,5\r\n", "line 4 has 2 cells, wanted 3"),
    "azure-time": (AZURE + "yesterday,5,5\r\n", "line 4 TIMESTAMP must read like"),
    "azure-no-such-day": (AZURE + "2023-13-16 18:15:51.0,5,5\r\n", "line 4 TIMESTAMP must read like"),
    "azure-long-ago": (AZURE + "1969-12-31 23:59:59.5,5,5\r\n", "lie from 1970 to 2199, got '1969-12-31"),
    "azure-far-ahead": (AZURE + "9999-12-31 18:15:51.0,5,5\r\n", "lie from 1970 to 2199, got '9999-12-31"),
    "azure-count": (AZURE + "2023-11-16 18:15:51.0,-5,5\r\n", "line 4 ContextTokens must be a number of tokens from 1"),
    "azure-empty": (AZURE.splitlines()[0] + "\r\n", "has a header and no requests"),
    "mooncake-json": (MOONCAKE + '{"timestamp": 1,\n', "line 3 is not JSON"),
    "mooncake-list": (MOONCAKE + "[]\n", "line 3 must be a JSON object, got list"),
    "mooncake-length": (MOONCAKE + '{"timestamp": 1, "input_length": 0}\n', "line 3 input_length must be a number"),
    "mooncake-flag": (MOONCAKE + '{"timestamp": 1, "input_length": true}\n', "line 3 input_length must be a number"),
    "mooncake-time": (
        MOONCAKE + '{"timestamp": "x", "input_length": 1, "output_length": 1}\n',
        "line 3 timestamp must be milliseconds",
    ),
    "mooncake-far-ahead": (
        MOONCAKE + '{"timestamp": 1e13, "input_length": 1, "output_length": 1}\n',
        "line 3 timestamp must be milliseconds from 0 to 1e+12",
    ),
    "mooncake-hashes": (
        MOONCAKE + '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [1, 2]}\n',
        "line 3 hash_ids has 2 blocks, its input fills 1",
    ),
    "conversation-json": (conversation()[:-1], "line 1 is not JSON"),
    "conversation-in": (conversation(**{"in": "many"}), "request 2 in must be a number of tokens from 1"),
    "conversation-think": (conversation(think_time=-1), "request 2 think_time must be seconds from 0"),
    "conversation-none": ('{"block_size": 64, "requests": []}', "requests must be a list with at least one request"),
    "conversation-block": ('{"block_size": 0, "requests": [1]}', "block_size must be at least 1 token, got 0"),
    "unknown": ("a,b,c\n1,2,3\n", "is of unknown format; known are: azure"),
    "empty": ("\n", "is empty"),
}


@pytest.mark.parametrize(("text", "sentence"), BAD.values(), ids=BAD)
def test_bad_files_are_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    """The line or request is named by its number."""
    with pytest.raises(WorkloadError) as caught:
        read_workload(write(tmp_path, text))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_foreign_and_binary(tmp_path: Path) -> None:
    """What is no workload at all says so."""
    with pytest.raises(WorkloadError, match="no workload at"):
        read_workload(tmp_path / "nowhere.csv")
    with pytest.raises(WorkloadError, match=r"holds no \.json file"):
        read_workload(tmp_path)
    write(tmp_path, AZURE, "a.json")
    with pytest.raises(WorkloadError, match="is not a coding conversation"):
        read_workload(tmp_path)
    binary = tmp_path / "b"
    binary.write_bytes(AZURE.encode() + b"\xff\xfe\n")
    with pytest.raises(WorkloadError, match="is not UTF-8 text"):
        read_workload(binary)


def test_equal_hashes_give_equal_tokens() -> None:
    """Tokens agree exactly as far as the hashes do, and differ at the first token after that."""
    shared = Request(0, 1000, 4, np.array([3, 4]), 512, scope=0)
    other = Request(0, 900, 4, np.array([3, 5]), 512, scope=0)
    a, b = request_tokens(shared, 0), request_tokens(other, 1)
    assert (a[:512] == b[:512]).all()
    assert a[512] != b[512]
    assert len(a) == 1004
    assert a.min() > 0
    assert (request_tokens(shared, 0) == a).all()
    assert request_tokens(shared, 2)[1000] != a[1000]  # generated tokens are the request's own
    assert len(np.unique(a)) > 990


def test_shaping_is_deterministic_and_scales_time() -> None:
    """Same seed, same arrivals; another seed, others; half the scale, half the time."""
    workload = bursty_workload(50, seed=3)
    arrivals = [[r.arrival_s for r in shape_workload(workload, seed=seed).requests] for seed in (1, 1, 2, None)]
    assert arrivals[0] == arrivals[1]
    assert arrivals[0] != arrivals[2]
    assert arrivals[3] == [r.arrival_s for r in workload.requests]
    assert arrivals[0] == sorted(arrivals[0])
    fast = shape_workload(workload, limit=10, time_scale=0.5)
    assert [r.arrival_s * 2 for r in fast.requests] == arrivals[3][:10]
    for wrong in ({"limit": 0}, {"time_scale": 0.0}, {"time_scale": float("nan")}, {"time_scale": 1e308}, {"seed": -1}):
        with pytest.raises(SettingError):
            shape_workload(workload, **wrong)


def test_synthetic_is_seeded_and_bursty() -> None:
    """Same seed, same requests; bursts grow."""
    one, same, other = bursty_workload(80, seed=1), bursty_workload(80, seed=1), bursty_workload(80, seed=2)
    assert [r.arrival_s for r in one.requests] == [r.arrival_s for r in same.requests]
    assert [r.input_len for r in one.requests] != [r.input_len for r in other.requests]
    per_second = np.bincount(np.array([r.arrival_s for r in one.requests], int))
    assert per_second.max() >= 8
    with pytest.raises(SettingError, match="at least 1 request"):
        bursty_workload(0)


@pytest.mark.workload
@pytest.mark.parametrize(
    ("name", "count", "longest"),
    [
        ("azure_llm_2023_conv.csv", 9683, 14_089),
        ("azure_llm_2023_code.csv", 4409, 7_841),
        ("mooncake_conversation.jsonl", 6011, 124_741),
        ("coding_conversations/trace_0095.json", 5, 83_922),
        ("coding_conversations", 218, 244_272),
    ],
)
def test_real_workloads(workloads: Path, name: str, count: int, longest: int) -> None:
    """Every published row is read."""
    workload = read_workload(workloads / name)
    assert len(workload.requests) == count
    assert workload.longest == longest
