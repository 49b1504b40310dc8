"""`kvcanary-trace run -- program …`: a Python program under tracing, its children included, without a change of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from kvcanary_trace import config
from kvcanary_trace.errors import SettingError

__all__ = ["environment", "run"]


def run(
    command: Annotated[list[str], typer.Argument(help="The program and its arguments.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the dataset.")] = Path("traces"),
    detail: Annotated[str, typer.Option(help="none, or requests: a row for each request of each step.")] = "none",
) -> None:
    """Run a program and trace its canary: SGLang's by its plugin, ours at its first launch."""
    program = shutil.which(command[0])
    if program is None:
        raise SettingError(f"{command[0]!r} is no program on the PATH; give it as kvcanary-trace run -- python app.py")
    variables = environment(out, detail)
    config.resolve({}, variables)  # a malformed setting stops here, not in some child
    os.execve(program, command, variables)


def environment(out: Path, detail: str = "none") -> dict[str, str]:
    """The variables that make a program and its children trace."""
    ours = str(Path(__file__).parent / "autostart")
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        config.SWITCH: "1",
        config.PREFIX + "DIR": str(out.absolute()),
        config.PREFIX + "DETAIL": detail,
        "PYTHONPATH": ours if not path else ours + os.pathsep + path,
    }
