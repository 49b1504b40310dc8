"""`kvcanary-trace explain`, `what-if`, `recommend` and `compare`: parse, call, print, set an exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from .advice import Recommendation
    from .comparison import Comparison
    from .explanation import Explanation
    from .scenarios import WhatIf

__all__ = ["compare", "explain", "recommend", "what_if"]

_Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The folder that trace() or replay wrote to.")]
_Json = Annotated[bool, typer.Option("--json", help="Print every number as JSON.")]
_Until = Annotated[int | None, typer.Option("--until", metavar="STEP", help="Look at no later step.")]


def explain(
    directory: _Directory,
    step: Annotated[int | None, typer.Option("--step", help="Step to explain.", show_default="the first break")] = None,
    run: Annotated[str | None, typer.Option("--run", help="Run to look into.", show_default="the first")] = None,
    rank: Annotated[int | None, typer.Option("--rank", help="Rank to look into.", show_default="the first")] = None,
    json_: _Json = False,
) -> None:
    """Say why a step broke: what led to it, whose prefixes made its demand, who wrote a bad slot and who read it.

    Exit code 0: explained; 2: nothing broke, there is no such step, or the dataset cannot be read.
    """
    from .explanation import explain as run_explain

    found = run_explain(directory, step, run=run, rank=rank)
    _answer(found, json_, _explained)


def what_if(
    directory: _Directory,
    capacity: Annotated[str, typer.Option("--capacity", help="Id of the capacity, as analyze shows it.")] = "verify",
    values: Annotated[
        str, typer.Option("--values", metavar="N,N,…", help="Values to try.", show_default="a ladder")
    ] = "",
    group: Annotated[str | None, typer.Option("--group", help="full or swa.", show_default="all")] = None,
    until: _Until = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw the curve (png, svg, pdf).")] = None,
    json_: _Json = False,
) -> None:
    """Say what other values of a capacity would have meant: steps past it, entries unverified, memory.

    Exit code 0: answered; 2: could not be.
    """
    from kvcanary_trace.errors import SettingError

    from .scenarios import what_if as run_what_if

    try:
        tried = [int(part.replace("_", "")) for part in values.split(",") if part.strip()]
    except ValueError:
        raise SettingError(f"--values must be whole numbers between commas, got {values!r}") from None
    if plot is not None:
        from .plots import check_plot_path

        check_plot_path(plot)
    found = run_what_if(directory, capacity, tried, group=group, until=until)
    if plot is not None:
        from .plots import save
        from .scenarios_plot import draw_what_if

        save(draw_what_if(found), plot)
    _answer(found, json_, _scenarios)


def recommend(
    directory: _Directory,
    steps: Annotated[int, typer.Option("--steps", help="For how many further steps.")] = 1_000_000,
    probability: Annotated[
        float, typer.Option("--probability", help="Of a breach of one capacity within them, at most.")
    ] = 0.01,
    until: _Until = None,
    json_: _Json = False,
) -> None:
    """Advise the smallest capacities that keep a breach unlikely, as values and as SGLang's flags where one exists.

    Exit code 0: every capacity is as large as advised; 1: one is smaller; 2: could not be answered.
    """
    from .advice import recommend as run_recommend

    found = run_recommend(directory, steps=steps, probability=probability, until=until)
    _answer(found, json_, _advice)
    if any(one.current < one.value for one in found.advice):
        raise typer.Exit(1)


def compare(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="Folder of the run before.")],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="Folder of the run after; may be the same.")],
    before_run: Annotated[str | None, typer.Option("--before-run", help="Run id.", show_default="latest")] = None,
    after_run: Annotated[str | None, typer.Option("--after-run", help="Run id.", show_default="latest")] = None,
    alpha: Annotated[float, typer.Option("--alpha", help="Chance of calling noise a move, over all metrics.")] = 0.01,
    min_change: Annotated[float, typer.Option("--min-change", help="Least relative change that matters.")] = 0.05,
    json_: _Json = False,
) -> None:
    """Say which distributions of demand, coverage and duration moved between two runs.

    Exit code 0: nothing moved for the worse; 1: something did; 2: could not be compared.
    """
    from .comparison import compare as run_compare

    found = run_compare(before, after, before_run=before_run, after_run=after_run, alpha=alpha, min_ratio=min_change)
    _answer(found, json_, _moves)
    if found.worse:
        raise typer.Exit(1)


def _answer(found: Any, as_json: bool, text: Any) -> None:
    typer.echo(json.dumps(found.to_json(), indent=1, allow_nan=False) if as_json else text(found))


def _explained(found: Explanation) -> str:
    group = f", group {found.group}" if found.group else ""
    lines = [f"step {found.step:,} of run {found.run}, rank {found.rank}{group}, {found.mode or 'mode unknown'}"]
    lines += [f"  {one}" for one in found.why]
    lines.append(f"{'':18}{'this step':>14}{'500 before, mean':>20}")
    for name, value in found.now.items():
        lines.append(f"  {name:16}{_number(value):>14}{_number(found.before[name]):>20}")
    if found.shared_prefix_factor is not None:
        lines.append(f"shared-prefix factor {found.shared_prefix_factor:.2f}: tokens seen for each KV slot held")
    if found.requests:
        lines.append(f"largest of {found.all_requests} requests by verify entries")
        lines += [
            f"  row {one.req_pool_idx}: {one.verify_entries:,} entries ({one.share:.0%}), prefix {one.prefix_len:,}, "
            f"extend {one.extend_len:,}"
            for one in found.requests
        ]
    for slot in found.slots:
        readers = f"read by row {', '.join(map(str, slot.readers))}" if slot.readers else "reader unknown"
        reuse = "" if slot.row_reuse_steps is None else f", in use for {slot.row_reuse_steps:,} steps"
        lines.append(
            f"{slot.launch_tag}: slot {slot.slot}, position {slot.position}: {slot.reasons}; "
            f"written by {slot.written}; {readers}{reuse}"
        )
    return "\n".join([*lines, *(f"not known: {one}" for one in found.lacking)])


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def _scenarios(found: WhatIf) -> str:
    from kvcanary_trace.pressure.capacities import BY_ID

    verifies = found.capacity == "verify"
    group = f" of group {found.group}" if found.group else ""
    lines = [
        f"{found.capacity}{group}: {found.rows:,} rows of {found.steps:,} steps, highest demand {found.peak_demand:,}; "
        f"past a value, {BY_ID[found.capacity].consequence}"
    ]
    head = f"{'value':>14}{'steps past it':>15}{'share':>9}"
    lines.append(head + (f"{'unverified':>12}{'with rotate':>13}" if verifies else "") + f"{'memory':>12}")
    for one in found.scenarios:
        line = f"{one.value:>14,}{one.steps_past:>15,}{one.steps_past / found.steps:>9.2%}"
        if one.unverified_skip is not None and one.unverified_rotate is not None:
            line += f"{one.unverified_skip:>12.2%}{one.unverified_rotate:>13.2%}"
        lines.append(line + f"{_bytes(one.memory_bytes):>12}" + ("  now" if one.is_current else ""))
    return "\n".join(lines)


def _bytes(value: int | None) -> str:
    if value is None:
        return "-"
    return (
        f"{value:,} B"
        if value < 10_000
        else f"{value / 1024:,.0f} KiB"
        if value < 10**7
        else f"{value / 2**20:,.0f} MiB"
    )


def _advice(found: Recommendation) -> str:
    lines = [f"for {found.steps:,} further steps, breach probability of each at most {found.probability:g}"]
    for one in found.advice:
        group = f" ({one.group})" if one.group else ""
        lines.append(f"  {one.capacity + group:22}{one.value:>14,}  now {one.current:,}; {one.reason}")
    if found.flags:
        lines.append("as flags: " + " ".join(f"{flag} {value}" for flag, value in found.flags.items()))
    return "\n".join(lines)


def _moves(found: Comparison) -> str:
    lines = [f"{found.before} → {found.after}: {len(found.worse)} of {len(found.moves)} metrics moved for the worse"]
    for one in found.moves:
        if not one.moved:
            continue
        ratio = "" if one.ratio is None else f" ({one.ratio - 1:+.1%})"
        said = "worse" if one.worse else "better"
        where = f"{one.group or 'all'}, {one.mode or 'any mode'}"
        lines += [
            f"  {said:7}{one.metric} of {where}: {one.before:,.4g} → {one.after:,.4g} {one.unit}{ratio}",
            f"         p99 {one.p99[0]:,.4g} → {one.p99[1]:,.4g}; effect {one.effect:+.2f}, p {one.p_value:.2g}",
        ]
    lines += [f"  not compared: {one}" for one in found.one_sided]
    unclear = sum(one.p_value is None for one in found.moves)
    if unclear:
        lines.append(f"  {unclear} metrics had too few rows to tell")
    return "\n".join(lines)
