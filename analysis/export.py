"""`kvcanary-trace export`: a dataset as a timeline for Perfetto, Chrome or Nsight Systems."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Protocol

import typer

from kvcanary_trace.errors import SettingError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .export_timeline import Event

__all__ = ["Exported", "Format", "export", "export_timeline"]


class Format(str, Enum):
    """What is written."""

    perfetto = "perfetto"
    chrome = "chrome"
    nvtxw = "nvtxw"


_SUFFIX = {Format.perfetto: ".perfetto-trace", Format.chrome: ".trace.json"}


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and what could not be drawn."""

    where: str
    steps: int
    phases: int
    samples: int
    violations: int
    arrows: int
    untimed_rows: int
    cut_slices: int
    unknown_writers: tuple[tuple[str, int], ...]
    """Why violations have no arrow, and how many, most frequent first."""


class _Writer(Protocol):
    def add(self, event: Event) -> None: ...

    def close(self) -> None: ...


def export_timeline(
    directory: Path | str,
    format_: Format,
    *,
    out: Path | None = None,
    first_step: int | None = None,
    last_step: int | None = None,
    backend: Path | None = None,
    session: str = "kv_canary",
    config: Sequence[str] = (),
) -> Exported:
    """Write a dataset as a timeline; memory does not grow with it.

    Args:
        directory: Folder of the dataset.
        format_: `perfetto` and `chrome` write a file; `nvtxw` gives the events to a tool's library.
        out: File to write; named after the folder when None, compressed when it ends with `.gz`.
        first_step: Leave out earlier steps.
        last_step: Leave out later steps.
        backend: Library that takes the events, for `nvtxw`.
        session: Name of the session, for `nvtxw`.
        config: Options of the backend as `key=value`, for `nvtxw`.

    Raises:
        DatasetError: the dataset cannot be read.
        SettingError: the options do not fit the format, or the backend does not work.
    """
    from .dataset import open_dataset
    from .export_timeline import Timeline, step_filter
    from .export_writers import Arrows

    if (backend is None) == (format_ is Format.nvtxw):
        raise SettingError(
            "--format nvtxw needs --backend, the library of the tool that takes the events"
            if backend is None
            else f"--backend is for --format nvtxw, got --format {format_.value}"
        )
    for option in config:
        if "=" not in option or any(mark in option for mark in "\r\n|"):
            raise SettingError(f"--backend-config must be KEY=VALUE without line breaks or |, got {option!r}")
    dataset = open_dataset(directory)
    range_ = (first_step, last_step)
    reasons: dict[str, int] = {}
    with dataset.connect() as connection:
        timeline = Timeline(connection, range_, Arrows(connection, step_filter(range_)))
        begin_ns = timeline.begin_ns()
        if backend is not None:
            from .export_nvtxw import NvtxwWriter

            where = f"session {session} of {backend.name}"
            _write_all(NvtxwWriter(backend, session, config), timeline.events(), reasons)
        else:
            path = out if out is not None else Path(Path(directory).resolve().name + _SUFFIX[format_])
            where = str(path)
            with _replacing(path) as file:
                _write_all(_file_writer(format_, file, begin_ns), timeline.events(), reasons)
    return Exported(
        where,
        **timeline.counts,
        untimed_rows=timeline.untimed_rows,
        cut_slices=timeline.cut_slices,
        unknown_writers=tuple(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
    )


def _file_writer(format_: Format, file: BinaryIO, begin_ns: int) -> _Writer:
    if format_ is Format.perfetto:
        from .export_perfetto import PerfettoWriter

        return PerfettoWriter(file, begin_ns)
    from .export_chrome import ChromeWriter

    return ChromeWriter(file, begin_ns)


def _write_all(writer: _Writer, events: Iterable[Event], reasons: dict[str, int]) -> None:
    from .export_timeline import Instant

    for event in events:
        writer.add(event)
        if isinstance(event, Instant) and event.flow is None:
            why = str(event.args["written_by"])
            reasons[why] = reasons.get(why, 0) + 1
    writer.close()


@contextmanager
def _replacing(path: Path) -> Iterator[Any]:
    """A file that appears under its name only when it is whole."""
    import gzip

    part = path.with_name(f"{path.name}.part")
    try:
        with gzip.open(part, "wb") if path.suffix == ".gz" else open(part, "wb", buffering=1 << 20) as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


_MAX_REASONS = 5


def _print_exported(exported: Exported) -> None:
    e = exported
    typer.echo(
        f"wrote {e.where}: {e.steps:,} steps, {e.phases:,} phases, {e.samples:,} samples of utilisation, "
        f"{e.violations:,} violations"
    )
    if e.violations:
        typer.echo(f"{e.arrows:,} of {e.violations:,} violations have an arrow from the step that wrote the slot")
    for why, count in e.unknown_writers[:_MAX_REASONS]:
        typer.echo(f"  {count:,} without: {why}")
    if len(e.unknown_writers) > _MAX_REASONS:
        rest = sum(count for _, count in e.unknown_writers[_MAX_REASONS:])
        typer.echo(f"  {rest:,} without, for other reasons that stand in the timeline")
    if e.untimed_rows:
        typer.echo(f"{e.untimed_rows:,} rows have no time and are not drawn")
    if e.cut_slices:
        typer.echo(f"{e.cut_slices:,} slices overlapped others of their track and were shortened")


def export(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that trace() or replay wrote to.")],
    format_: Annotated[
        Format, typer.Option("--format", help="perfetto (protobuf), chrome (JSON), or nvtxw (to a tool's library).")
    ] = Format.perfetto,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="File to write; named after DIR if not given; .gz compresses."),
    ] = None,
    first_step: Annotated[int | None, typer.Option("--from", metavar="STEP", help="Leave out earlier steps.")] = None,
    last_step: Annotated[int | None, typer.Option("--until", metavar="STEP", help="Leave out later steps.")] = None,
    backend: Annotated[
        Path | None, typer.Option("--backend", metavar="LIB", help="nvtxw: the tool's library that takes the events.")
    ] = None,
    session: Annotated[str, typer.Option("--session", help="nvtxw: name of the session.")] = "kv_canary",
    config: Annotated[
        list[str] | None, typer.Option("--backend-config", metavar="KEY=VALUE", help="nvtxw: option of the backend.")
    ] = None,
) -> None:
    """Write steps, phases, utilisation and violations as a timeline, with arrows to the steps that wrote the slots.

    Open the file in ui.perfetto.dev or chrome://tracing. Exit code 0: written; 2: could not.
    """
    exported = export_timeline(
        directory,
        format_,
        out=out,
        first_step=first_step,
        last_step=last_step,
        backend=backend,
        session=session,
        config=config or (),
    )
    _print_exported(exported)
