"""Figures: take values, decide nothing. Utilisation over time, one panel a capacity, and what went unverified."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcanary_trace.errors import SettingError
from kvcanary_trace.pressure.capacities import CAPACITIES, Capacity
from kvcanary_trace.pressure.severity import WARNING_UTILIZATION

from .coverage import covered
from .findings import percent
from .sql import Key

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .result import Analysis
    from .series import CapacitySeries, Series

__all__ = ["check_plot_path", "draw_utilization", "envelope", "save"]

Floats: TypeAlias = NDArray[np.float64]

FORMATS: Final = (".png", ".svg", ".pdf")
_POINTS: Final = 1200  # a panel: about one for each pixel
_MAX_LABELS: Final = 8
_COLORS: Final = ("#1f5fa8", "#d9822b", "#3f8f5b", "#8a5bb5", "#7a6a58", "#c2577e", "#3d9bb0", "#97952b")
_BREACH: Final = "#c0262d"
_WARNING: Final = "#e8b13a"
_INK: Final = "#23272e"
_FAINT: Final = "#7b828c"
_STYLE: Final[Any] = {
    "axes.edgecolor": "#c9ced6",
    "axes.labelcolor": _FAINT,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "svg.fonttype": "none",
    "text.color": _INK,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
}


def check_plot_path(path: Path) -> None:
    """Refuse a file that cannot become a figure, before any work is done.

    Raises:
        SettingError: Its ending is not png, svg or pdf, or its folder does not exist.
    """
    if path.suffix.lower() not in FORMATS:
        raise SettingError(f"--plot must end in {', '.join(FORMATS)}, got {path}")
    if not path.parent.is_dir():
        raise SettingError(f"--plot {path}: the folder {path.parent} does not exist")


def envelope(x: Floats, y: Floats, points: int = _POINTS) -> tuple[Floats, Floats]:
    """Thin a series out so that no peak is lost: the highest value of each of `points` buckets, where it stands.

    Args:
        x: [n], increasing.
        y: [n], no NaN.
        points: Most points to keep.
    """
    if len(x) <= points:
        return x, y
    bucket = np.minimum((np.arange(len(x)) * points) // len(x), points - 1)
    order = np.lexsort((y, bucket))
    last = np.flatnonzero(np.diff(bucket[order], append=points))
    keep = np.sort(order[last])
    return x[keep], y[keep]


def draw_utilization(analysis: Analysis) -> Figure:
    """Utilisation over steps for each measured capacity, fullest first, with limit and breaches; unverified below."""
    import matplotlib

    measured = [
        (capacity, found)
        for capacity in CAPACITIES
        if (found := [(series, one) for series, one in analysis.capacities() if one.capacity is capacity])
    ]
    measured.sort(key=lambda panel: -_peak(panel[1]).peak_utilization)
    heights_in = [_height_in(_peak(found).peak_utilization) for _, found in measured]
    if analysis.coverage.demanded or not measured:
        heights_in.append(0.8 if analysis.coverage.unverified else 0.3)
    gap_in, top_in, bottom_in = 0.5, 1.0, 0.5
    height_in = sum(heights_in) + gap_in * (len(heights_in) - 1) + top_in + bottom_in
    with matplotlib.rc_context(_STYLE):
        # A figure of its own, not pyplot's: no global state, no display, nothing to close.
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, height_in), dpi=130, facecolor="white")
        grid: dict[str, Any] = {
            "height_ratios": heights_in,
            "left": 0.075,
            "right": 0.98,
            "top": 1 - top_in / height_in,
            "bottom": bottom_in / height_in,
            "hspace": gap_in / (sum(heights_in) / len(heights_in)),
        }
        colors = {one.key: _COLORS[number % len(_COLORS)] for number, one in enumerate(analysis.series)}
        axes = list(np.atleast_1d(figure.subplots(len(heights_in), 1, sharex=True, gridspec_kw=grid)))
        for axis, (capacity, found) in zip(axes, measured, strict=False):
            _capacity_panel(axis, capacity, found, colors)
        if analysis.coverage.demanded:
            _unverified_panel(axes[-1], analysis)
        elif not measured:
            axes[0].text(0.5, 0.5, "no capacity was measured in this dataset", ha="center", va="center")
            axes[0].set_axis_off()
        first, last = analysis.steps
        axes[-1].set_xlabel("engine step")
        axes[-1].xaxis.set_major_formatter(_thousands)
        axes[-1].set_xlim(first, max(last, first + 1))
        _headline(figure, analysis, height_in)
        if 1 < len(colors) <= _MAX_LABELS:
            _legend(figure, colors, height_in)
    return figure


def _peak(found: list[tuple[Series, CapacitySeries]]) -> CapacitySeries:
    return max(found, key=lambda pair: pair[1].peak_utilization)[1]


def _height_in(peak: float) -> float:
    """Room for a panel: what is under pressure is worth looking at closely."""
    return 1.5 if peak >= WARNING_UTILIZATION else 0.9 if peak >= 0.3 else 0.45


def save(figure: Figure, path: Path) -> None:
    """Write the figure; the format follows the file's ending.

    Raises:
        OSError: The file cannot be written.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    with matplotlib.rc_context(_STYLE):
        figure.savefig(path, format=path.suffix.lower().lstrip("."))


def _headline(figure: Figure, analysis: Analysis, height_in: float) -> None:
    """What the figure says as a whole."""
    worst = analysis.worst
    broken = list(dict.fromkeys(one.capacity for one in analysis.findings if one.severity == worst and one.capacity))
    names = ", ".join(str(name) for name in broken)
    said = {
        "breached": f"{names} broke" if broken else "a step broke",
        "critical": f"{names} about to break" if broken else "something is wrong beside the capacities",
        "warning": f"{names} under pressure" if broken else "no capacity under pressure",
        "info": "no capacity under pressure",
    }[worst]
    runs = list(dict.fromkeys(run.run for run in analysis.runs))
    which = f"run {runs[0]}" if len(runs) == 1 else f"{len(runs)} runs"
    color = _BREACH if worst in ("breached", "critical") else _INK
    figure.text(0.075, 1 - 0.32 / height_in, f"Canary capacities: {said}", fontsize=13, fontweight="bold", color=color)
    first, last = analysis.steps
    detail = f"{which}, steps {first:,} to {last:,}, {analysis.rows:,} rows; utilisation is demand over limit"
    figure.text(0.075, 1 - 0.53 / height_in, detail, fontsize=9, color=_FAINT)


def _legend(figure: Figure, colors: Mapping[Key, str], height_in: float) -> None:
    """One line for each series, named by what tells them apart."""
    from matplotlib.lines import Line2D

    varying = [at for at in range(len(Key._fields)) if len({key[at] for key in colors}) > 1]
    names = ["rank {}" if Key._fields[at] == "rank" else "{}" for at in varying]
    lines = [Line2D([], [], color=color, linewidth=1.6) for color in colors.values()]
    labels = [
        " ".join(name.format(key[at] or "no group") for name, at in zip(names, varying, strict=True)) for key in colors
    ]
    figure.legend(
        lines,
        labels,
        loc="upper right",
        bbox_to_anchor=(0.985, 1 - 0.16 / height_in),
        ncols=4,
        frameon=False,
        fontsize=9,
        handlelength=1.4,
        columnspacing=1.2,
    )


def _capacity_panel(
    axis: Axes, capacity: Capacity, found: list[tuple[Series, CapacitySeries]], colors: Mapping[Key, str]
) -> None:
    """Demand over limit of one capacity, every series."""
    peak_of = _peak(found)
    top = 100 * max(1.0, peak_of.peak_utilization)
    for series, one in found:
        color = colors[series.key]
        known = np.isfinite(one.utilization)
        x, y = envelope(series.first_steps[known].astype(np.float64), 100 * one.utilization[known])
        axis.plot(x, y, color=color, linewidth=0.9, zorder=3)
        axis.fill_between(x, y, color=color, alpha=0.10 / len(found) ** 0.5, linewidth=0, zorder=2)
        over = y > 100
        if over.any():
            axis.plot(x[over], y[over], ".", color=_BREACH, markersize=3.5, zorder=4)
    axis.axhspan(100 * WARNING_UTILIZATION, 100, color=_WARNING, alpha=0.13, linewidth=0, zorder=1)
    axis.axhline(100, color=_BREACH, linewidth=0.9, linestyle=(0, (5, 3)), zorder=2.5)
    axis.set_ylim(0, top * 1.12)
    axis.set_ylabel("% of limit" if peak_of.peak_utilization >= 0.3 else "%")
    axis.set_yticks([0, 50, 100] if top <= 200 and peak_of.peak_utilization >= 0.3 else [0, 100])
    axis.tick_params(length=2)
    plural = {"entry": "entries"}.get(capacity.unit, f"{capacity.unit}s")
    counted = f"{peak_of.peak_demand:,} of {peak_of.peak_limit:,} {plural}"
    said = f"{capacity.title}: peak {percent(peak_of.peak_utilization)}, {counted}"
    _title(axis, capacity.id, said, _BREACH if any(one.breached is not None for _, one in found) else _INK)


def _title(axis: Axes, name: str, said: str, color: str) -> None:
    """What a panel is about, and beside it what it shows."""
    title = axis.set_title(name, loc="left", fontsize=10, fontweight="bold", color=color, pad=5)
    axis.annotate(
        said,
        xy=(1, 0),
        xycoords=title,
        xytext=(8, 0),
        textcoords="offset points",
        fontsize=9,
        color=_FAINT,
        va="bottom",
        annotation_clip=False,
    )


def _unverified_panel(axis: Axes, analysis: Analysis) -> None:
    """Entries that went unverified, summed over the groups of each bucket."""
    ledger = analysis.coverage
    steps = np.concatenate([series.first_steps for series in analysis.series])
    entries = np.concatenate([series.unverified for series in analysis.series])
    at, where = np.unique(steps, return_inverse=True)
    x, y = envelope(at.astype(np.float64), np.bincount(where, weights=entries).astype(np.float64))
    axis.fill_between(x, y, step="mid", color=_BREACH, alpha=0.35, linewidth=0)
    axis.plot(x, y, drawstyle="steps-mid", color=_BREACH, linewidth=0.8)
    axis.set_ylim(0, max(1.0, float(y.max()) * 1.15))
    if ledger.unverified:
        axis.set_ylabel("entries")
        axis.yaxis.set_major_formatter(_short)
        axis.yaxis.set_major_locator(_ticks())
    else:
        axis.set_yticks([])
    axis.tick_params(length=2)
    if ledger.unverified:
        said = f"{ledger.unverified:,} of {ledger.demanded:,} demanded entries; coverage {covered(ledger)}"
    elif ledger.ratio is None:
        said = "whether entries were verified was not recorded"
    else:
        said = f"none: all {ledger.demanded:,} demanded entries were verified"
    _title(axis, "unverified", said, _BREACH if ledger.unverified else _INK)


def _thousands(value: float, _position: float) -> str:
    return f"{int(value):,}" if value == int(value) else ""


def _short(value: float, _position: float) -> str:
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g} {suffix}"
    return f"{value:g}"


def _ticks() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=2, integer=True)
