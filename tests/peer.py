"""SGLang 0.5.23's own canary, for differential tests: fetched once by pip, run from its wheel, never installed.

Its three reference files need torch alone, behind stand-ins for the packages around them. `KVCANARY_PEER_WHEEL` names a
wheel that is there already; otherwise pip fetches it into the user's cache folder.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import types
import zipfile
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PEER = "sglang==0.5.23"
_WHEEL = "sglang-0.5.23-*.whl"
_FOLDER = "sglang/kernels/ops/kv_canary/"
_FETCH_TIMEOUT_S = 600
_UNREACHABLE = ("Retrying", "Connection", "timed out", "Proxy", "resolve")
_refused: list[str] = []  # asking again for each test would wait for each time-out again


class Peer(NamedTuple):
    """The peer's modules."""

    verify: types.ModuleType
    write: types.ModuleType
    plan_ref: types.ModuleType
    verify_ref: types.ModuleType
    write_ref: types.ModuleType
    plan_api: types.ModuleType
    offsets_kernel: types.ModuleType


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvcanary-trace" / "peer"


def _wheel() -> Path:
    named = os.environ.get("KVCANARY_PEER_WHEEL")
    if named:
        if not Path(named).is_file():
            pytest.fail(f"KVCANARY_PEER_WHEEL names no file: {named}")
        return Path(named)
    cache = _cache()
    found = sorted(cache.glob(_WHEEL))
    if found:
        return found[0]
    if _refused:
        pytest.skip(_refused[0])
    cache.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "-q",
        "-d",
        str(cache),
        PEER,
    ]
    command += ["--retries", "1", "--timeout", "20"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        done = subprocess.CompletedProcess(command, 1, "", f"Connection too slow: no file within {_FETCH_TIMEOUT_S} s")
    found = sorted(cache.glob(_WHEEL))
    if not found:
        lines = done.stderr.strip().splitlines() or ["pip said nothing"]
        message = f"{PEER} cannot be fetched: {lines[-1]}"
        if "No matching distribution" in done.stderr and not any(sign in done.stderr for sign in _UNREACHABLE):
            pytest.fail(message)
        _refused.append(message)
        pytest.skip(message)
    return found[0]


def _unpacked(wheel: Path) -> Path:
    """A folder with the wheel's canary, beside the wheel or in the cache."""
    target = _cache() / wheel.stem
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as made, zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.startswith(_FOLDER)]
            archive.extractall(Path(made) / "peer", members)
            # Processes that unpack at the same time: the first one's folder stays, and is whole at any moment.
            with contextlib.suppress(OSError):
                (Path(made) / "peer").rename(target)
    return target / _FOLDER


def _package(name: str, path: Path | None = None) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = [] if path is None else [str(path)]
    return module


def _load(name: str, path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _stand_ins(folder: Path) -> dict[str, types.ModuleType]:
    ops = "sglang.kernels.ops.kv_canary"
    jit = types.ModuleType("sglang.kernels.jit.utils")

    def load_jit(*_: Any, **__: Any) -> None:
        raise RuntimeError("the peer's CUDA part is not built in these tests")

    jit.cache_once = lru_cache(maxsize=None)  # type: ignore[attr-defined]
    jit.load_jit = load_jit  # type: ignore[attr-defined]
    jit.make_cpp_args = lambda *args: ", ".join(map(str, args))  # type: ignore[attr-defined]
    packages = [_package(name) for name in ("sglang", "sglang.kernels", "sglang.kernels.jit", "sglang.kernels.ops")]
    packages += [_package(ops, folder), _package(f"{ops}.plan", folder / "plan")]
    return {module.__name__: module for module in (*packages, jit)}


@lru_cache(maxsize=1)
def load_peer() -> Peer:
    """The peer's modules; skips the calling test where its wheel cannot be had. `sys.modules` is left as it was."""
    folder = _unpacked(_wheel())
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "sglang"}
    for name in before:
        del sys.modules[name]
    sys.modules.update(_stand_ins(folder))
    ops = "sglang.kernels.ops.kv_canary"
    try:
        for name in ("consts", "_dispatch"):
            _load(f"{ops}.{name}", folder / f"{name}.py")
        loaded = {name: _load(f"{ops}.{name}", folder / f"{name}.py") for name in ("verify", "write")}
        loaded |= {
            name: _load(f"{ops}.{name}", folder / f"{name}.py") for name in ("plan_ref", "verify_ref", "write_ref")
        }
        for name in ("utils", "entries_kernel"):
            _load(f"{ops}.plan.{name}", folder / "plan" / f"{name}.py")
        loaded["offsets_kernel"] = _load(f"{ops}.plan.offsets_kernel", folder / "plan" / "offsets_kernel.py")
        loaded["plan_api"] = _load(f"{ops}.plan.api", folder / "plan" / "api.py")
        _bind_late_imports(loaded)
        return Peer(**loaded)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            del sys.modules[name]
        sys.modules.update(before)


def _bind_late_imports(loaded: dict[str, types.ModuleType]) -> None:
    """The peer's launchers import their references on first use: give them these modules while they run."""
    references = {
        "plan_api": ("plan_ref", "launch_canary_plan_kernels"),
        "verify": ("verify_ref", "launch_canary_verify_kernel"),
        "write": ("write_ref", "launch_canary_write_kernel"),
    }
    for home, (reference, launcher) in references.items():
        setattr(loaded[home], launcher, _with_modules(getattr(loaded[home], launcher), loaded[reference]))


def _with_modules(launcher: Any, reference: types.ModuleType) -> Any:
    names = ["sglang", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.kv_canary"]

    @wraps(launcher)
    def launch(**arguments: Any) -> None:
        before = {name: sys.modules.get(name) for name in (*names, reference.__name__)}
        sys.modules.update({name: _package(name) for name in names})
        sys.modules[reference.__name__] = reference
        try:
            launcher(**arguments)
        finally:
            for name, module in before.items():
                if module is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = module

    return launch
