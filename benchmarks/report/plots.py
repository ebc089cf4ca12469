"""Pictures of results: one look for all, in a light and a dark form.

Colours are those of Okabe and Ito, which people with any colour vision can tell apart, made lighter on dark ground; no
picture tells things apart by colour alone.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

WIDTH = 8.0
"""Inches; with DPI the pixels of a picture, half as many again as the 800 that a page shows it with."""
DPI = 150


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
        """Matplotlib's settings, a dictionary whose type has all their names, which differ between its versions."""
        ink = ("text.color", "axes.titlecolor")
        soft = ("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor")
        return {
            **dict.fromkeys(ink, self.ink),
            **dict.fromkeys(soft, self.soft),
            **dict.fromkeys(("xtick.color", "ytick.color", "axes.edgecolor", "grid.color"), self.line),
            **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), self.page),
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlelocation": "left",
            "axes.titlesize": 10.5,
            "axes.titleweight": "bold",
            "axes.labelsize": 9.5,
            "font.family": "DejaVu Sans",  # comes with matplotlib, so that every machine draws alike
            "font.size": 9,
            "hatch.linewidth": 0.6,
            "lines.linewidth": 1.8,
            "lines.markersize": 5.5,
        }


LIGHT = Theme(
    "light", "#ffffff", "#1b2330", "#4d5868", "#dfe3ea",
    ("#0072b2", "#d55e00", "#008560", "#b0568d", "#c98a00", "#56b4e9"),
)  # fmt: skip
DARK = Theme(
    "dark", "#171c24", "#e3e8ef", "#a8b3c2", "#333c49",
    ("#5aaef0", "#ff8a45", "#2fc296", "#e3a0c5", "#f0b429", "#a9dcf8"),
)  # fmt: skip
MARKERS = "osD^vP"
BAR_HEIGHT = 0.72

Draw = Callable[[Theme], Figure]


def png(draw: Draw, theme: Theme) -> bytes:
    """The picture; the same bytes for the same results and version of matplotlib."""
    with matplotlib.rc_context(theme.settings):
        figure = draw(theme)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def panels(count: int, height: float, columns: int = 2, **more: Any) -> tuple[Figure, list[Axes]]:
    """A figure with `count` axes in rows of up to `columns`, each row `height` inches high."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(WIDTH, height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, **more).flatten().tolist()
    for unused in grid[count:]:
        unused.set_axis_off()
    return figure, grid[:count]


def rank_axis(axes: Axes, ranks: Sequence[float], label: str = "ranks", room: float = 1.0) -> None:
    """A log2 x axis with a tick at each number of ranks, and `room` for labels right of the last one."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(ranks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(list(ranks), [f"{rank:g}" for rank in ranks])
    axes.set_xlim(min(ranks) / 1.15, max(ranks) * 2**room)
    axes.set_xlabel(label)
    axes.grid(False, axis="x")


def end_labels(axes: Axes, labels: Sequence[tuple[float, float, str, str]], size: float = 8.5) -> None:
    """Texts (x, y, text, colour) right of the ends of lines, moved apart where they would overlap.

    Call it when everything else is drawn, as it asks where the lines end.
    """
    if not labels:
        return
    axes.get_ylim()  # settles limits that follow from the data
    to_points = 72 / axes.figure.dpi
    spots = axes.transData.transform([(x, y) for x, y, _, _ in labels])[:, 1] * to_points
    order = np.argsort(spots, kind="stable")
    heights = [1.25 * size * (1 + labels[index][2].count("\n")) for index in order]
    moved = spots[order].copy()
    for _ in range(50):
        for low in range(len(moved) - 1):
            gap = (heights[low] + heights[low + 1]) / 2
            lack = gap - (moved[low + 1] - moved[low])
            if lack > 0:
                moved[low] -= lack / 2
                moved[low + 1] += lack / 2
    for place, index in zip(moved, order, strict=True):
        x, y, text, color = labels[index]
        axes.annotate(
            text, (x, y), (7, place - spots[index]), textcoords="offset points",
            color=color, fontsize=size, va="center", ha="left", linespacing=1.15, bbox=on_ground(axes),
        )  # fmt: skip


def bars(
    axes: Axes, names: Sequence[str], values: Sequence[float], colors: Sequence[str], texts: Sequence[str]
) -> None:
    """Horizontal bars from the top down, each with its text at the end."""
    places = range(len(names))
    axes.barh(places, values, color=colors, height=BAR_HEIGHT)
    for place, value, text in zip(places, values, texts, strict=True):
        beside(axes, text, value, place)
    name_rows(axes, names)
    axes.set_xlim(0, 1.32 * max([*values, 1.0]))


def beside(axes: Axes, text: str, x: float, y: float, color: str | None = None, distance: float = 5) -> None:
    """A text to the right of a point."""
    axes.annotate(
        text, (x, y), (distance, 0), textcoords="offset points", va="center", fontsize=8.5, color=color,
        bbox=on_ground(axes),
    )  # fmt: skip


def on_ground(axes: Axes) -> dict[str, Any]:
    """The box of a text that must be readable on top of lines."""
    return {"facecolor": axes.get_facecolor(), "edgecolor": "none", "pad": 0.6}


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Names left of horizontal bars, the first at the top."""
    axes.set_yticks(range(len(names)), list(names))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")


def stacked(axes: Axes, names: Sequence[str], parts: Sequence[tuple[str, Sequence[float], str]]) -> None:
    """Horizontal bars made of `parts` (label, values, colour), every other part hatched."""
    ends = np.zeros(len(names))
    for number, (label, values, color) in enumerate(parts):
        axes.barh(
            range(len(names)), values, left=ends, color=color, label=label, edgecolor=axes.get_facecolor(),
            hatch="////" if number % 2 else "", height=BAR_HEIGHT,
        )  # fmt: skip
        ends += np.asarray(values, dtype=float)
    name_rows(axes, names)


def legend(axes: Axes, columns: int) -> None:
    """A legend above the axes' picture, in the order of its parts."""
    axes.legend(
        ncols=columns, loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False, fontsize=8.5, borderaxespad=0.2,
        handlelength=1.2, columnspacing=1.2, handletextpad=0.5,
    )  # fmt: skip
