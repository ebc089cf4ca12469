"""Draws the panels of a part with matplotlib, in a light and a dark theme.

Colours are those of Okabe and Ito, which people with any colour vision can tell apart, lighter on dark ground. Markers
differ too.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from benchmarks.report.parts import Bars, Lines

WIDTH = 8.0
"""Inches."""
DPI = 150
MARKERS = "osD^vP"


@dataclass(frozen=True)
class Theme:
    """Colours of a picture."""

    name: str
    page: str
    ink: str
    soft: str
    line: str
    colors: tuple[str, ...]
    """Blue, vermilion, green, purple, orange, sky."""

    @property
    def settings(self) -> Any:
        """Matplotlib's settings."""
        ink = ("text.color", "axes.titlecolor")
        soft = ("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor")
        lines = ("xtick.color", "ytick.color", "axes.edgecolor", "grid.color")
        grounds = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
        return {
            **dict.fromkeys(ink, self.ink), **dict.fromkeys(soft, self.soft), **dict.fromkeys(lines, self.line),
            **dict.fromkeys(grounds, self.page),
            "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
            "axes.titlelocation": "left", "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.labelsize": 9.5,
            "font.family": "DejaVu Sans",  # comes with matplotlib, so pictures are alike on every machine
            "font.size": 9, "lines.linewidth": 1.8, "lines.markersize": 5.5,
        }  # fmt: skip


LIGHT = Theme(
    "light", "#ffffff", "#1b2330", "#4d5868", "#dfe3ea",
    ("#0072b2", "#d55e00", "#008560", "#b0568d", "#c98a00", "#56b4e9"),
)  # fmt: skip
DARK = Theme(
    "dark", "#171c24", "#e3e8ef", "#a8b3c2", "#333c49",
    ("#5aaef0", "#ff8a45", "#2fc296", "#e3a0c5", "#f0b429", "#a9dcf8"),
)  # fmt: skip


def png(panels: Sequence[Lines | Bars], theme: Theme) -> bytes:
    """The picture of some panels, two in a row; the same bytes for the same result and version of matplotlib."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    height = max(0.9 + 0.3 * len(each.bars) if isinstance(each, Bars) else 3.6 for each in panels)
    with matplotlib.rc_context(theme.settings):
        figure = Figure(figsize=(WIDTH, height * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
        for axes, panel in zip(grid, panels, strict=False):
            if isinstance(panel, Bars):
                draw_bars(axes, panel, theme)
            else:
                draw_lines(axes, panel, theme)
            axes.set_title(panel.title)
        for unused in grid[len(panels) :]:
            unused.set_axis_off()
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def draw_lines(axes: Axes, panel: Lines, theme: Theme) -> None:
    """A line per series, named at its end."""
    places = sorted({x for points in panel.series.values() for x, _ in points})
    labels = []
    for number, (name, points) in enumerate(panel.series.items()):
        if points:
            color = theme.colors[number % len(theme.colors)]
            axes.plot(*zip(*points, strict=True), MARKERS[number % len(MARKERS)] + "-", color=color)
            labels.append((*points[-1], f"{name}: {points[-1][1]:.3g}", color))
    if panel.plain is not None:
        axes.axhline(panel.plain, linestyle="--", color=theme.soft, linewidth=1.2)
    if places:
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(places[0] / 1.15, places[-1] * (places[-1] / places[0] * 2) ** 0.6)
    axes.set_ylim(0, 1.12 * max([1e-9, *(y for points in panel.series.values() for _, y in points)]))
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.grid(False, axis="x")
    end_labels(axes, labels)


def draw_bars(axes: Axes, panel: Bars, theme: Theme) -> None:
    """Horizontal bars from the top down, each with its text at the end."""
    for place, (name, value, text) in enumerate(panel.bars):
        axes.barh(place, value, color=theme.colors[name == panel.marked], height=0.72)
        axes.annotate(text, (value, place), (5, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.set_yticks(range(len(panel.bars)), [name for name, _, _ in panel.bars])
    axes.set_ylim(len(panel.bars) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.axvline(1, color=theme.soft, linestyle="--", linewidth=1.2)
    axes.set_xlim(0, 1.4 * max([1.0, *(value for _, value, _ in panel.bars)]))
    axes.set_xlabel(panel.x)


def end_labels(axes: Axes, labels: Sequence[tuple[float, float, str, str]], size: float = 8.5) -> None:
    """Texts (x, y, text, colour) to the right of the ends of lines, moved apart where they would overlap.

    The limits of the axes must be final.
    """
    to_points = 72 / axes.figure.dpi
    spots = axes.transData.transform([(x, y) for x, y, _, _ in labels] or [(0, 0)])[:, 1] * to_points
    order = np.argsort(spots, kind="stable")[: len(labels)]
    moved = spots[order].copy()
    for _ in range(50):
        for low in range(len(moved) - 1):
            lack = 1.25 * size - (moved[low + 1] - moved[low])
            if lack > 0:
                moved[low] -= lack / 2
                moved[low + 1] += lack / 2
    for place, index in zip(moved, order, strict=True):
        x, y, text, color = labels[index]
        axes.annotate(
            text, (x, y), (7, place - spots[index]), textcoords="offset points", color=color, fontsize=size,
            va="center", ha="left", bbox={"facecolor": axes.get_facecolor(), "edgecolor": "none", "pad": 0.6},
        )  # fmt: skip
