"""`kvcanary-trace recover`: seals what dead processes left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcanary_trace import runfile
from kvcanary_trace.errors import DatasetError

if TYPE_CHECKING:
    from kvcanary_trace.black_box import Box

__all__ = ["recover"]


def recover(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder that the trace was written to.")] = Path(
        "traces"
    ),
    list_boxes: Annotated[bool, typer.Option("--list", help="Show black boxes in shared memory and stop.")] = False,
    box: Annotated[
        Path | None,
        typer.Option("--box", metavar="PATH", help="Recover this black box into DIR, whatever it was written to."),
    ] = None,
) -> None:
    """Turn what a killed process left behind into sealed Parquet, and end its run file; live processes are left alone.

    Live tails below DIR, then the black boxes of runs that were written to DIR, each with how its process ended.

    Exit code 0: done, or nothing to do; 2: the folder, a tail or a box cannot be read.
    """
    from kvcanary_trace.black_box import find_boxes

    boxes = find_boxes()
    if list_boxes:
        _show(boxes)
        return
    if box is not None:
        boxes = [one for one in boxes if one.path.resolve() == box.resolve()]
        if not boxes:
            raise DatasetError(f"{box} is no black box; kvcanary-trace recover --list shows those there are")
        directory.mkdir(parents=True, exist_ok=True)
    else:
        boxes = [one for one in boxes if one.description.get("dataset") == str(directory.resolve())]
    found = _recover_tails(directory)
    for one in boxes:
        if one.alive:
            typer.echo(f"left alone {one.path}: process {one.pid} still runs")
        else:
            _recover_box(one, directory)
    if not found and not boxes:
        typer.echo(f"nothing to recover in {directory}")


def _recover_tails(directory: Path) -> bool:
    from .recover import recover as seal_tails

    found = seal_tails(directory)
    for one in found:
        tail = one.tail
        where = f"{tail.table} of run {tail.run} rank {tail.rank} (pid {tail.pid})"
        torn = f", {one.torn_bytes:,} bytes of a torn batch left out" if one.torn_bytes else ""
        if one.outcome == "alive":
            typer.echo(f"left alone {where}: its process still runs")
        elif one.outcome == "empty":
            typer.echo(f"removed {where}: it had no whole batch{torn}")
        else:
            typer.echo(f"sealed {where}: {one.rows:,} rows{torn}")
    return bool(found)


def _recover_box(box: Box, directory: Path) -> None:
    from .recover import end_run
    from .recover_box import recover_box

    found = recover_box(box, directory)
    end_run(directory, _run_file(box, directory), box.run, box.rank)
    typer.echo(
        f"sealed {found.sealed:,} of {found.rows:,} rows of the black box of run {box.run} rank {box.rank} "
        f"(pid {box.pid}), the rest was in the dataset; {found.ending}"
    )


def _run_file(box: Box, directory: Path) -> dict[str, Any]:
    """The run's own file, or, where the dataset has none, what the box knew of it."""
    path = runfile.run_path(directory, box.run, box.rank)
    try:
        description: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        path.parent.mkdir(parents=True, exist_ok=True)
        description = {name: value for name, value in box.description.items() if name != "dataset"}
    return description


def _show(boxes: list[Box]) -> None:
    for box in boxes:
        size = sum(path.stat().st_size for path in box.path.glob("*.ring"))
        state = "its process runs" if box.alive else "its process is dead"
        where = box.description.get("dataset") or "no dataset"
        typer.echo(f"{box.path}: run {box.run} rank {box.rank}, {size >> 20} MiB, for {where}; {state} (pid {box.pid})")
    if not boxes:
        typer.echo("no black boxes in shared memory")
