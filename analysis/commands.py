"""`kvcanary-trace analyze`: parses, calls, prints, and sets an exit code."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["analyze"]


class FailOn(str, Enum):
    """The ladder, mildest first."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"
    BREACHED = "breached"


def analyze(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that trace() or replay wrote to.")],
    json_: Annotated[bool, typer.Option("--json", help="Print every number as JSON.")] = False,
    until: Annotated[
        int | None, typer.Option("--until", metavar="STEP", help="Look at no later step: what was known then.")
    ] = None,
    fail_on: Annotated[
        FailOn, typer.Option("--fail-on", help="Exit with 1 when a finding is at least this severe.")
    ] = FailOn.CRITICAL,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw utilisation over time (png, svg or pdf).")
    ] = None,
) -> None:
    """Say which capacity will break, when, and what to change; what was verified; and what was lost.

    A capacity is a warning from 0.8 utilisation, critical where running and queued work cannot fit or its recent slope
    reaches the limit within 500 steps, breached where demand exceeded it.

    Exit code 0: no finding at --fail-on or above; 1: findings; 2: the dataset cannot be read.
    """
    from .plots import check_plot_path, draw_utilization, save
    from .report import print_analysis, to_json
    from .result import analyze as run_analysis

    if plot is not None:
        check_plot_path(plot)
    result = run_analysis(directory, until)
    if plot is not None:
        save(draw_utilization(result), plot)
    if json_:
        typer.echo(to_json(result))
    else:
        print_analysis(result)
    if result.at_least(fail_on.value):
        raise typer.Exit(1)
