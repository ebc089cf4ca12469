"""Pictures of the report, drawn by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from benchmarks.report.parts import Bars, Lines

WIDTH, DPI = 8.0, 150  # inches
MARKERS = "osD^vP"
COLORS = ("#0072b2", "#d55e00", "#008560", "#b0568d", "#c98a00", "#56b4e9")
SETTINGS: dict[str, Any] = {
    "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlelocation": "left", "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.edgecolor": "#dfe3ea",
    "grid.color": "#dfe3ea", "font.family": "DejaVu Sans", "font.size": 9, "legend.frameon": False,
}  # fmt: skip
"""The font comes with matplotlib, so pictures are alike on every machine."""


def png(panels: Sequence[Lines | Bars]) -> bytes:
    """The picture of some panels, two in a row; the same bytes for the same result and version of matplotlib."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    height = max(0.9 + 0.3 * len(each.bars) if isinstance(each, Bars) else 3.6 for each in panels)
    with matplotlib.rc_context(SETTINGS):  # type: ignore[arg-type]
        figure = Figure(figsize=(WIDTH, height * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
        for axes, panel in zip(grid, panels, strict=False):
            draw_bars(axes, panel) if isinstance(panel, Bars) else draw_lines(axes, panel)
            axes.set_title(panel.title)
            axes.set_xlabel(panel.x)
        for unused in grid[len(panels) :]:
            unused.set_axis_off()
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def draw_lines(axes: Axes, panel: Lines) -> None:
    """A line per series over a logarithmic axis."""
    for number, (name, points) in enumerate(panel.series.items()):
        color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        axes.plot([x for x, _ in points], [y for _, y in points], label=name, color=color, marker=marker)
    if places := sorted({x for points in panel.series.values() for x, _ in points}):
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, 1.12 * max([1e-9, *(y for points in panel.series.values() for _, y in points)]))
    axes.set_ylabel(panel.y)
    axes.grid(False, axis="x")
    axes.legend()


def draw_bars(axes: Axes, panel: Bars) -> None:
    """Horizontal bars from the top down, each with its text at the end."""
    for place, (_, value, text) in enumerate(panel.bars):
        axes.barh(place, value, color=COLORS[0], height=0.72)
        axes.annotate(text, (value, place), (5, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.set_yticks(range(len(panel.bars)), [name for name, _, _ in panel.bars])
    axes.set_ylim(len(panel.bars) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.set_xlim(0, 1.2 * max([1e-9, *(value for _, value, _ in panel.bars)]))
