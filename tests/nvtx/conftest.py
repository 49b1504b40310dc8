"""Two small libraries of our own, compiled with the system's compiler: an NVTX tool and an NVTXW backend that log."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
HEADERS_WHEEL = "nvidia-nvtx==13.5.25"
"""Fetched where what torch depends on is too old to have nvtxw3."""

_FORMATS = {17: "q", 18: "Q", 44: "d", 68: "I", 69: "I", 80: "Q"}  # NVTX_PAYLOAD_ENTRY_TYPE_* that we use


def fetch_wheel(requirement: str) -> Path:
    """Unpack a wheel into the user's cache folder, once; skips the test where pip cannot get it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "kvcanary-trace" / "wheels" / f"{requirement}-{sys.version_info[0]}.{sys.version_info[1]}"
    if not folder.is_dir():
        part = folder.with_name(f"{folder.name}.{os.getpid()}")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-q", "-d", str(part)]
        command += ["--retries", "1", "--timeout", "20", requirement]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        wheels = sorted(part.glob("*.whl"))
        if not wheels:
            shutil.rmtree(part, ignore_errors=True)
            lines = done.stderr.strip().splitlines() or ["pip said nothing"]
            pytest.skip(f"{requirement} cannot be fetched: {lines[-1]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(part)
        try:
            part.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(part)
    return folder


def header_folder(needed: str) -> Path:
    """The folder that `#include <nvtx3/…>` looks in, of a package that has the header `needed`."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec is not None else ():
        for found in sorted(Path(root).glob(f"*/include/{needed}")):
            return found.parents[needed.count("/")]
    for found in sorted(fetch_wheel(HEADERS_WHEEL).glob(f"nvidia/*/include/{needed}")):
        return found.parents[needed.count("/")]
    raise AssertionError(f"{HEADERS_WHEEL} has no {needed}")


def compiled(source: str, folder: Path, needed: str) -> Path:
    """Compile one of the C files beside this one into a shared library."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("no C compiler: neither cc, gcc nor clang is on the path")
    library = folder / f"{Path(source).stem}.so"
    command = [compiler, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]
    # As system headers: what a compiler thinks of them is not ours to fail for.
    command += ["-isystem", str(header_folder(needed)), str(HERE / source), "-o", str(library), "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    return library


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def decode(data: str, entries: Sequence[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """Rows of a payload, by the schema that was registered for it."""
    raw = bytes.fromhex(data)
    assert len(raw) % size == 0
    rows = []
    for at in range(0, len(raw), size):
        row = {}
        for entry in entries:
            row[entry["name"]] = struct.unpack_from("=" + _FORMATS[entry["type"]], raw, at + entry["offset"])[0]
        rows.append(row)
    return rows


@dataclass
class Log:
    """What the tool saw, resolved: names in place of handles."""

    events: list[dict[str, Any]]
    stderr: str
    domains: dict[int, str] = field(default_factory=dict)
    strings: dict[int, str] = field(default_factory=dict)
    categories: dict[int, str] = field(default_factory=dict)
    schemas: dict[int, dict[str, Any]] = field(default_factory=dict)
    counters: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for event in self.events:
            match event["event"]:
                case "domain":
                    self.domains[event["id"]] = event["name"]
                case "string":
                    self.strings[event["id"]] = event["text"]
                case "category":
                    self.categories[event["id"]] = event["name"]
                case "schema":
                    self.schemas[event["id"]] = event
                case "counter":
                    self.counters[event["id"]] = event

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        """Events of some kinds, in their order."""
        return [event for event in self.events if event["event"] in kinds]

    def samples(self, name: str) -> list[tuple[int, dict[str, Any]]]:
        """(time, values) of every sample of a counter."""
        found = []
        for batch in self.of("batch"):
            counter = self.counters[batch["counter"]]
            if counter["name"] == name:
                schema = self.schemas[counter["schema"]]
                rows = decode(batch["data"], schema["entries"], schema["size"])
                found += list(zip(batch["times"], rows, strict=True))
        return found


Run = Callable[..., Log]


@pytest.fixture(scope="session")
def injection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The NVTX tool."""
    return compiled("injection.c", tmp_path_factory.mktemp("injection"), "nvtx3/nvToolsExtCounters.h")


@pytest.fixture(scope="session")
def under_tool(injection: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a script in a process of its own with the tool attached; a NVTX tool attaches when a process starts."""

    def run(code: str, *arguments: str, path: Sequence[Path] = (), timeout_s: float = 120) -> Log:
        log = tmp_path_factory.mktemp("log") / "nvtx.jsonl"
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("KVCANARY_", "OTEL_"))}
        environment |= {"NVTX_INJECTION64_PATH": str(injection), "KVCANARY_NVTX_LOG": str(log)}
        environment["PYTHONPATH"] = os.pathsep.join(map(str, [*path, HERE.parent]))
        environment["OMP_NUM_THREADS"] = "1"
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return Log(read_log(log), done.stderr)

    return run


@pytest.fixture(scope="session")
def wheel_folder() -> Callable[[str], Path]:
    """Fetch a wheel by pip and unpack it: `wheel_folder("nvtx==0.2.15")`."""
    return fetch_wheel


@pytest.fixture(scope="session")
def nvtxw_backend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The NVTXW backend."""
    return compiled("backend.c", tmp_path_factory.mktemp("backend"), "nvtxw3/nvtxw3.h")


@pytest.fixture
def resolve() -> Callable[..., Log]:
    """Make a `Log` of a file; `decode` of this module reads its payloads."""
    return lambda path, stderr="": Log(read_log(path), stderr)


@pytest.fixture
def decoded() -> Callable[..., list[dict[str, Any]]]:
    """`decode`, for tests that look at batches themselves."""
    return decode
