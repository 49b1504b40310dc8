"""`kvcanary-trace recover`: seals what dead processes left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["recover"]


def recover(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder that the trace was written to.")] = Path(
        "traces"
    ),
) -> None:
    """Turn what a killed process left behind into sealed Parquet, and end its run file; live processes are left alone.

    Exit code 0: done, or nothing to do; 2: the folder or a tail cannot be read.
    """
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
    if not found:
        typer.echo(f"nothing to recover in {directory}")
