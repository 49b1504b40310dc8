"""The commands `replay` and `demo`. Importing this costs neither torch nor Arrow: help stays quick."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from .runner import ReplayResult

__all__ = ["demo", "replay"]


class Device(str, Enum):
    """Where kernels run."""

    cpu = "cpu"
    cuda = "cuda"


class Switch(str, Enum):
    """On or off."""

    on = "on"
    off = "off"


class Overflow(str, Enum):
    """What a plan past its verify capacity does."""

    skip = "skip"
    rotate = "rotate"


class Detail(str, Enum):
    """What is recorded beside the steps."""

    none = "none"
    requests = "requests"


class OnError(str, Enum):
    """What to do when a launcher refuses a batch."""

    stop = "stop"
    go_on = "continue"


class Schedule(str, Enum):
    """How prefills and decodes share steps."""

    prefill_first = "prefill-first"
    mixed = "mixed"


def replay(
    workload: Annotated[
        Path,
        typer.Argument(
            metavar="WORKLOAD",
            help="Request trace: Azure CSV, Mooncake JSON lines, a coding conversation (JSON), or a folder of those.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", help="Dataset folder; the run is added under a fresh id.", show_default=False)
    ],
    limit: Annotated[
        int | None, typer.Option("--limit", help="Replay the first N requests.", show_default="all")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            help="Draw the gaps between arrivals anew, and the victims of --inject.",
            show_default="arrivals as published",
        ),
    ] = None,
    time_scale: Annotated[
        float, typer.Option("--time-scale", help="Factor on gaps between arrivals; 0.5 offers twice the load.")
    ] = 1.0,
    device: Annotated[Device, typer.Option("--device", help="Where the kernels run.")] = Device.cpu,
    kernels: Annotated[
        Switch, typer.Option("--kernels", help="off: record what each step demands without running a kernel.")
    ] = Switch.on,
    max_running_requests: Annotated[
        int, typer.Option("--max-running-requests", help="Requests that run at once.")
    ] = 64,
    max_total_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-total-tokens", help="KV slots in the pool.", show_default="200000, or the longest request if more"
        ),
    ] = None,
    chunked_prefill_size: Annotated[
        int, typer.Option("--chunked-prefill-size", help="Prompt tokens that one step takes.")
    ] = 2048,
    page_size: Annotated[int, typer.Option("--page-size", help="Tokens of one page of the pool.")] = 1,
    swa_window: Annotated[
        int,
        typer.Option("--swa-window", help="Tokens of a sliding-window group beside the full one; 0: no such group."),
    ] = 0,
    schedule: Annotated[
        Schedule, typer.Option("--schedule", help="prefill-first: a step prefills or decodes; mixed: both at once.")
    ] = Schedule.prefill_first,
    verify_capacity: Annotated[
        int | None,
        typer.Option("--verify-capacity", help="Entries that a verify plan holds.", show_default="3 x pool tokens"),
    ] = None,
    write_req_capacity: Annotated[
        int | None,
        typer.Option(
            "--write-req-capacity", help="Requests that a write plan holds.", show_default="--max-running-requests"
        ),
    ] = None,
    overflow: Annotated[
        Overflow,
        typer.Option(
            "--overflow", help="Verify demand past the capacity: skip the step, or rotate through the entries."
        ),
    ] = Overflow.skip,
    on_error: Annotated[
        OnError,
        typer.Option("--on-error", help="When a launch is refused: stop there, or record it and go on in chunks."),
    ] = OnError.stop,
    detail: Annotated[
        Detail, typer.Option("--detail", help="requests: a row for each request of each step too; needs the kernels.")
    ] = Detail.none,
    inject: Annotated[
        list[str] | None,
        typer.Option(
            "--inject",
            metavar="KIND@STEP",
            help="Put a fault in from STEP on: kv-flip, slot-swap, stale-swa, row-reuse or token-flip. May repeat.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Drive the canary kernels with a real request trace and record every step.

    An engine model (continuous batching, chunked prefill, prefix cache, retraction) turns the requests into forward
    steps; each one plans, verifies and writes canaries on real buffers. Time is virtual and deterministic: a step takes
    11 ms + 70 us a token written + 20 ns a token of prefix.

    Exit code 0: clean; 1: violations were found or a launch was refused; 2: could not run.
    """
    from .faults import parse_fault
    from .knobs import EngineKnobs
    from .readers import read_workload
    from .runner import replay_workload
    from .workloads import shape_workload

    faults = [parse_fault(text) for text in inject or []]
    knobs = EngineKnobs(
        max_running_requests=max_running_requests,
        max_total_tokens=max_total_tokens,
        chunked_prefill_size=chunked_prefill_size,
        page_size=page_size,
        swa_window=swa_window,
        schedule=schedule.value,
        verify_capacity=verify_capacity,
        write_req_capacity=write_req_capacity,
    )
    load = shape_workload(read_workload(workload), limit=limit, time_scale=time_scale, seed=seed)
    result = replay_workload(
        load,
        out,
        knobs=knobs,
        kernels=kernels is Switch.on,
        device=device.value,
        overflow=overflow.value,
        on_error=on_error.value,
        faults=faults,
        seed=seed or 0,
        detail=detail.value,
        settings={"limit": limit, "seed": seed, "time_scale": time_scale, "on_error": on_error.value},
    )
    _print_result(result, out)
    if result.violations or result.errors:
        raise typer.Exit(1)


def demo(
    out: Annotated[Path, typer.Option("--out", help="Dataset folder; the run is added under a fresh id.")] = Path(
        "traces"
    ),
) -> None:
    """Replay a bursty synthetic workload into traces, then analyse them: no GPU and no server needed.

    Bursts grow until the batch outgrows the write plan; the analysis says which capacity broke and what to change.
    """
    from kvcanary_trace.analysis.commands import analyze

    from .knobs import EngineKnobs
    from .runner import replay_workload
    from .synthetic import bursty_workload

    knobs = EngineKnobs(
        max_running_requests=48, max_total_tokens=24_000, chunked_prefill_size=1024, write_req_capacity=22
    )
    load = bursty_workload(120, output_len=60, burst_every_s=4.0, quiet_rate_per_s=1.5)
    result = replay_workload(load, out, knobs=knobs, on_error="continue")
    _print_result(result, out)
    typer.echo("")
    analyze(out)


def _print_result(result: ReplayResult, out: Path) -> None:
    """The answer: what ran, what was found, where it is."""
    typer.echo(
        f"run {result.run_id} in {out}: {result.steps:,} steps, "
        f"{result.finished_reqs:,} of {result.requests:,} requests, "
        f"{result.virtual_s:,.1f} s of engine time in {result.wall_s:,.1f} s"
    )
    typer.echo(
        f"{result.entries:,} verify entries demanded, {result.tokens:,} tokens written, "
        f"{result.retractions:,} retractions, {result.violations:,} violations"
    )
    for struck in result.struck:
        typer.echo(f"injected {struck.fault.kind} at step {struck.step}: {struck.what}")
    for fault in result.missed:
        typer.echo(f"not injected: {fault.kind}@{fault.step} found nothing to strike")
    if result.first_error is not None:
        step, message = result.first_error
        ended = f"{result.errors:,} launches refused, the first at" if result.completed else "stopped at"
        typer.echo(f"{ended} step {step}: {message}")
