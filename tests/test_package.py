"""What lands in site-packages, and what importing costs."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def python(*args: str, cwd: Path, **env: str) -> str:
    """Run this interpreter in another folder, so that the checkout's own folders are not on the path."""
    done = subprocess.run(
        [sys.executable, *args], cwd=cwd, env=env or None, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, built from the checkout."""
    out = tmp_path_factory.mktemp("sdist")
    python("-m", "build", "--sdist", "--no-isolation", "--outdir", str(out), str(ROOT), cwd=out)
    return next(out.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source archive: what the archive lacks, the wheel lacks."""
    out = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(out, filter="data")
    source = next(path for path in out.iterdir() if path.is_dir())
    python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source), cwd=out)
    return next(out.glob("*.whl"))


def modules_of(folder: Path) -> set[str]:
    """Python files below a folder, relative to it."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*.py")}


def test_wheel_has_every_module_under_one_package(wheel: Path) -> None:
    """No bare `kernels` or `analysis`, and no module or template left out."""
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvcanary_trace"}
    packed = {name.removeprefix("kvcanary_trace/") for name in names if name.endswith(".py")}
    expected = (
        modules_of(ROOT / "kvcanary_trace")
        | {f"kernels/{name}" for name in modules_of(ROOT / "kernels")}
        | {f"analysis/{name}" for name in modules_of(ROOT / "analysis")}
    )
    assert packed == expected
    assert "kvcanary_trace/py.typed" in names


def test_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    """The three packages import from the wheel itself."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "import kvcanary_trace.kernels.layout as k, kvcanary_trace.analysis as a; print(k.__file__, a.__file__)"
    printed = python("-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"), PATH="/usr/bin:/bin")
    assert printed.count(str(tmp_path / "site")) == 2


def test_install_leaves_no_bare_modules(tmp_path: Path) -> None:
    """However the package is installed here (editable in the test set-up), `kernels` and `analysis` stay free."""
    code = (
        "import importlib.util as u, kvcanary_trace.kernels.layout, kvcanary_trace.analysis;"
        "print(u.find_spec('kernels'), u.find_spec('analysis'))"
    )
    assert python("-c", code, cwd=tmp_path).split() == ["None", "None"]


@pytest.mark.parametrize(
    "statement",
    [
        "import kvcanary_trace",
        "import kvcanary_trace.analysis, kvcanary_trace.analysis.commands, kvcanary_trace.analysis.findings",
        "import kvcanary_trace.kernels.layout, kvcanary_trace.schema",
        "import kvcanary_trace.cli, kvcanary_trace.replay.commands",
    ],
)
def test_imports_are_light(statement: str, tmp_path: Path) -> None:
    """No torch, no triton, no scipy.stats before something needs them."""
    heavy = ("torch", "triton", "scipy.stats", "matplotlib")
    code = f"{statement}; import sys; print([m for m in {heavy} if m in sys.modules])"
    assert python("-c", code, cwd=tmp_path).strip() == "[]"
