"""What ran, how it ended and what was lost: `DIR/runs/<run>.<rank>.json`, and the short form in each Parquet file."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from .errors import DatasetError, RunExistsError, SettingError
from .schema import SCHEMA_VERSION

Status = Literal["running", "completed", "failed"]

METADATA_KEY: Final = b"kvcanary_trace.run"
"""Key of the short form in a Parquet file's metadata."""

_RUN_ID: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,99}")
_PACKAGES: Final = ("kvcanary-trace", "torch", "triton", "numpy", "pyarrow", "nvtx", "sglang")


def new_run_id() -> str:
    """A run id that nobody has: `r<UTC stamp>-<6 hex digits>`."""
    return f"r{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(3)}"


def check_run_id(run: str) -> str:
    """The run id itself, if it can stand in a path and be read back as text.

    Raises:
        SettingError: it starts with no letter, or has characters that a path must not have.
    """
    if not _RUN_ID.fullmatch(run):
        raise SettingError(
            f"run must start with a letter and have only letters, digits, '-' and '_', at most 100, got {run!r}"
        )
    return run


def installed_versions() -> dict[str, str]:
    """Versions of the packages that a trace depends on, without importing them."""
    versions = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@dataclass(slots=True)
class Run:
    """One run of one rank. Written by the session; sinks read `describe` and `brief` on the drain thread."""

    run: str
    rank: int
    world_size: int = 1
    status: Status = "running"
    error: str | None = None
    started_ns: int = field(default_factory=time.time_ns)
    ended_ns: int | None = None
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    device: str = "cpu"
    versions: Mapping[str, str] = field(default_factory=installed_versions)
    argv: Sequence[str] = field(default_factory=lambda: list(sys.argv))
    engine: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    capacities: Sequence[Mapping[str, Any]] = ()
    counters: Callable[[], dict[str, Any]] = dict
    """The moving part: `losses`, `rows` and `last_step`."""

    def describe(self) -> dict[str, Any]:
        """The whole run file."""
        return {
            "schema": SCHEMA_VERSION,
            "run": self.run,
            "rank": self.rank,
            "status": self.status,
            "error": self.error,
            "started_ns": self.started_ns,
            "ended_ns": self.ended_ns,
            "host": self.host,
            "pid": self.pid,
            "device": self.device,
            "versions": dict(self.versions),
            "argv": list(self.argv),
            "engine": dict(self.engine),
            "settings": {name: dict(setting) for name, setting in self.settings.items()},
            "capacities": [dict(capacity) for capacity in self.capacities],
            "world_size": self.world_size,
            **self.counters(),
        }

    def brief(self) -> dict[str, Any]:
        """What each file carries about its run."""
        whole = self.describe()
        names = ("schema", "run", "rank", "host", "pid", "device", "versions", "engine", "capacities")
        return {name: whole[name] for name in names}


def run_path(directory: Path, run: str, rank: int) -> Path:
    """Where the run file of one rank stands."""
    return directory / "runs" / f"{run}.{rank}.json"


def claim(directory: Path, run: Run) -> None:
    """Make the run file, so that no other run can take the same name.

    Raises:
        RunExistsError: the dataset already has this run and rank.
        DatasetError: the directory cannot be written.
    """
    path = run_path(directory, run.run, run.rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x") as file:
            file.write(to_json(run.describe()))
    except FileExistsError as error:
        if not path.is_file():
            raise DatasetError(f"{directory} cannot hold a dataset: {error.filename} is in the way") from None
        raise RunExistsError(
            f"{directory} already has run {run.run!r} of rank {run.rank}; leave run= out to get a fresh id, "
            "or choose another directory"
        ) from None
    except OSError as error:
        raise DatasetError(f"cannot write to {directory}: {error.strerror or error}") from error


def write(directory: Path, run: Run) -> None:
    """Replace the run file at once: a reader sees the old one or the new one.

    Raises:
        OSError: the directory cannot be written.
    """
    path = run_path(directory, run.run, run.rank)
    temporary = directory / "_live" / f"run={run.run}.rank={run.rank}.json.tmp"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_text(to_json(run.describe()))
    temporary.replace(path)


def to_json(value: Mapping[str, Any]) -> str:
    """Readable JSON; whatever an engine argument is, it has a text form."""
    return json.dumps(value, indent=1, default=str, allow_nan=False) + "\n"
