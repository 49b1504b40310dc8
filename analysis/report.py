"""An analysis as text for a terminal, or as JSON. Takes values and decides nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from kvcanary_trace.pressure.capacities import BY_ID

from .coverage import REASONS, covered
from .findings import count_by_severity, percent

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from .findings import Finding
    from .result import Analysis

__all__ = ["print_analysis", "to_json"]

_STYLES: Final = {"breached": "bold white on red", "critical": "bold red", "warning": "yellow", "info": "dim"}
_PIPE_WIDTH: Final = 120


def to_json(analysis: Analysis) -> str:
    """Every number of the analysis."""
    return json.dumps(analysis.to_json(), indent=1, allow_nan=False, default=str)


def print_analysis(analysis: Analysis, console: Console | None = None) -> None:
    """Verdict, findings worst first, capacities, coverage, losses.

    Args:
        analysis: What to print.
        console: Where to; None is standard output.
    """
    if console is None:
        import sys

        from rich.console import Console

        # In a pipe lines are as long as they need to be to be searched, not cut to an imagined terminal.
        console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    for part in (
        _verdict(analysis),
        _findings(analysis),
        _capacities(analysis),
        _coverage(analysis),
        _losses(analysis),
    ):
        if part is not None:
            console.print(part)


def _verdict(analysis: Analysis) -> Text:
    from rich.text import Text

    counts = count_by_severity(one for one in analysis.findings if one.severity != "info")
    named = [Text(f"{count} {name}", _STYLES[name]) for name, count in counts.items() if count]
    what = Text(", ").join(named) if named else Text("clean: no capacity under pressure", "green")
    first, last = analysis.steps
    runs = len({run.run for run in analysis.runs})
    ranks = len(analysis.runs)
    seen = f"{analysis.rows:,} rows, steps {first:,} to {last:,}" + (" (--until)" if analysis.until is not None else "")
    many = f", {runs} runs" if runs > 1 else f", run {analysis.runs[0].run}"
    return Text.assemble(
        (str(analysis.path), "bold"), f": {seen}{many}", f", {ranks} ranks" if ranks > 1 else "", "\n", what
    )


def _findings(analysis: Analysis) -> RenderableType | None:
    """One row a finding. Capacities that are merely low stand in the next table."""
    shown = [one for one in analysis.findings if one.severity != "info" or one.headroom is None]
    if not shown:
        return None
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title="Findings, worst first", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0)
    )
    table.add_column("severity", no_wrap=True)
    table.add_column("subject", no_wrap=True)
    table.add_column("steps", justify="right", no_wrap=True)
    if _many(analysis):
        table.add_column("where", no_wrap=True)
    table.add_column("what", overflow="fold", ratio=3)
    table.add_column("remedy", overflow="fold", ratio=1)
    for one in shown:
        steps = (
            ""
            if one.steps is None
            else f"{one.steps[0]:,}–{one.steps[1]:,}"
            if one.steps[0] != one.steps[1]
            else f"{one.steps[0]:,}"
        )
        cells: list[str | Text] = [Text(one.severity, _STYLES[one.severity]), one.subject, steps]
        if _many(analysis):
            cells.append(_where(one.run, one.rank))
        table.add_row(*cells, Text(one.reason), Text(_remedy(one)))
    return table


def _remedy(finding: Finding) -> str:
    """The remedy in a few words; where the engine has no knob, what to do instead."""
    if finding.capacity is None or finding.severity == "info":
        return ""
    capacity = BY_ID[finding.capacity]
    if finding.remedy is None:
        return capacity.advice if finding.severity == "breached" else "none needed"
    if finding.remedy.flag is None:
        return f"needs {finding.remedy.value:,}; {capacity.advice}"
    assign = "=" if finding.remedy.flag.isupper() else " "
    return f"{finding.remedy.flag}{assign}{finding.remedy.value}"


def _capacities(analysis: Analysis) -> RenderableType:
    from rich.table import Table

    table = Table(title="\nCapacities", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column("capacity", no_wrap=True)
    table.add_column("group", no_wrap=True)
    if _many(analysis):
        table.add_column("where", no_wrap=True)
    for name in ("limit", "peak", "peak %", "p99 %", "headroom"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    for series, one in analysis.capacities():
        key = series.key
        group = " ".join(
            part
            for part in (
                (key.group or "") if one.capacity.grouped else "",
                key.runner if key.runner != "target" else "",
                key.kind if key.kind == "sweep" else "",
            )
            if part
        )
        where = [_where(key.run, key.rank)] if _many(analysis) else []
        table.add_row(
            one.capacity.id,
            group,
            *where,
            f"{one.last_limit:,}",
            f"{one.peak_demand:,}",
            percent(one.peak_utilization),
            percent(one.p99_utilization),
            f"{one.peak_limit - one.peak_demand:,}",
            one.capacity.unit,
        )
    missing = [name for name in BY_ID if name not in {one.capacity.id for _, one in analysis.capacities()}]
    if missing:
        table.caption = f"not measured: {', '.join(missing)}"
        table.caption_justify = "left"
    return table


def _coverage(analysis: Analysis) -> Text:
    from rich.text import Text

    ledger = analysis.coverage
    if not ledger.demanded:
        return Text.assemble(("\nCoverage", "bold"), ": no verify entry was demanded")
    if ledger.ratio is None and not ledger.unverified:
        unknown = f": unknown, {REASONS['not_measured']}: {ledger.demanded:,} entries"
        return Text.assemble(("\nCoverage", "bold"), unknown)
    lines = [f": {covered(ledger)} of {ledger.demanded:,} demanded entries were verified"]
    for name, meaning in REASONS.items():
        count = ledger.unverified_by_reason[name]
        if count:
            lines.append(f"  {count:,} not: {meaning} ({ledger.rows_by_reason[name]:,} rows)")
    if len(analysis.coverage_by_series) > 1:
        for key, one in analysis.coverage_by_series.items():
            if one.unverified:
                where = f" {_where(key.run, key.rank)}" if _many(analysis) else ""
                lines.append(f"  group {key.group or 'unknown'}{where}: {covered(one)}")
    return Text.assemble(("\nCoverage", "bold"), "\n".join(lines))


def _losses(analysis: Analysis) -> Text:
    from rich.text import Text

    lost = {key: one for key, one in analysis.losses.items() if one.any}
    if lost:
        sentences = [f"{_where(run, rank)}: {one.sentence}" for (run, rank), one in lost.items()]
        return Text.assemble(("Lost", "bold"), ": ", ("; ".join(sentences), "yellow"))
    unknown = [key for key, one in analysis.losses.items() if len(one.counters) <= 1]
    if unknown:
        return Text.assemble(("Lost", "bold"), ": no counters, the run file is missing")
    return Text.assemble(("Lost", "bold"), ": nothing")


def _many(analysis: Analysis) -> bool:
    return len(analysis.runs) > 1


def _where(run: str, rank: int | None) -> str:
    return run if rank is None else f"{run}/{rank}"
