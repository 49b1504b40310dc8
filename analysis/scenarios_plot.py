"""The what-if curve: capacity against the share of steps past it, or of entries that go unverified."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .scenarios import WhatIf

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_what_if"]


def draw_what_if(found: WhatIf) -> Figure:
    """One panel; the current value and the highest demand are marked."""
    import matplotlib

    with matplotlib.rc_context({"axes.spines.right": False, "axes.spines.top": False, "font.size": 9}):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4), dpi=130, facecolor="white", layout="constrained")
        axes = figure.subplots()
        values = [one.value for one in found.scenarios]
        if found.capacity == "verify":
            for label, color, shares in (
                ("steps past it are skipped", "#c0262d", [one.unverified_skip or 0.0 for one in found.scenarios]),
                ('overflow="rotate"', "#1f5fa8", [one.unverified_rotate or 0.0 for one in found.scenarios]),
            ):
                axes.plot(values, [100 * share for share in shares], color=color, label=label, marker="o", markersize=3)
            axes.set_ylabel("entries unverified, %")
            axes.legend(frameon=False)
        else:
            axes.plot(
                values, [100 * one.share_past for one in found.scenarios], color="#c0262d", marker="o", markersize=3
            )
            axes.set_ylabel("rows past it, %")
        for x, text in ((found.current, "now"), (found.peak_demand, "highest demand")):
            axes.axvline(x, color="#7b828c", linewidth=0.8, linestyle="--")
            axes.annotate(f" {text}", (x, axes.get_ylim()[1]), color="#7b828c", va="top", fontsize=8)
        axes.set_xlabel(f"{found.capacity}, capacity")
        axes.set_title(f"What another {found.capacity} capacity would have meant: {found.rows:,} rows", loc="left")
    return figure
