"""The panels of a Grafana dashboard as a page of SVG, from Prometheus's answers: a look at it without Grafana."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

CELL, ROW, GAP = 58, 34, 6
"""Pixels of a column and of a row of Grafana's grid, and between panels."""
COLOURS = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#ffa6b0", "#96d98d", "#c4a000")
UNITS = {"s": "s", "percentunit": "%", "reqps": " /s", "bool_on_off": "", "short": ""}
STYLE = """
body { background: #111217; margin: 12px; font: 12px system-ui, sans-serif; color: #ccccdc }
h1 { font-size: 17px; font-weight: 500; margin: 0 0 2px } p { color: #8e8e9b; margin: 0 0 8px }
.grid { position: relative } .panel, .row { position: absolute; box-sizing: border-box }
.panel { background: #181b1f; border: 1px solid #2c3035; border-radius: 3px; padding: 6px 8px; overflow: hidden }
.title { font-weight: 500; white-space: nowrap; overflow: hidden } .row { font-weight: 600; padding: 9px 4px }
.stat { font-size: 34px; font-weight: 600; color: #73bf69; text-align: center; padding-top: 22px }
.legend { position: absolute; bottom: 4px; left: 8px; right: 8px; font-size: 10px; color: #a0a0ad; height: 26px;
          overflow: hidden } .legend b { font-size: 15px; line-height: 8px; vertical-align: -2px }
text { fill: #8e8e9b; font-size: 10px } .line { fill: none; stroke-width: 1.4 } .tick { stroke: #26292e }
"""


def page(dashboard: Mapping[str, Any], answers: Sequence[Sequence[Mapping[str, Any]]], start: float, end: float) -> str:
    """The page; `answers` are those of the panels that ask something, in their order."""
    remaining, parts = iter(answers), []
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        place = (
            f"left:{at['x'] * CELL}px;top:{at['y'] * ROW}px;width:{at['w'] * CELL - GAP}px;"
            f"height:{at['h'] * ROW - GAP}px"
        )
        title = html.escape(panel["title"])
        if panel["type"] == "row":
            parts.append(f'<div class="row" style="{place}">{title}</div>')
            continue
        found = next(remaining)
        inside = stat(panel, found) if panel["type"] == "stat" else chart(panel, found, start, end)
        parts.append(f'<div class="panel" style="{place}"><div class="title">{title}</div>{inside}</div>')
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"]) * ROW
    note = f"{len(answers)} panels, {end - start:.0f} seconds, from Prometheus's answers; drawn without Grafana"
    return (
        f"<!doctype html><meta charset=utf-8><title>dashboard</title><style>{STYLE}</style>"
        f"<h1>{html.escape(dashboard['title'])}</h1><p>{note}</p>"
        f'<div class="grid" style="width:{24 * CELL}px;height:{height}px">{"".join(parts)}</div>\n'
    )


def unit_of(panel: Mapping[str, Any]) -> str:
    """The name of a panel's unit."""
    return str(panel["fieldConfig"]["defaults"]["unit"])


def shown(value: float, unit: str) -> str:
    """A figure as text."""
    if unit == "s" and value < 1:
        return f"{1e3 * value:.3g} ms"
    if unit == "percentunit":
        return f"{100 * value:.0f} %"
    return f"{value:.3g}{UNITS[unit]}" if value < 1000 else f"{value:.0f}{UNITS[unit]}"


def stat(panel: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> str:
    """The last figure."""
    values = [float(value) for each in answers for series in each["series"] for _, value in series["values"]]
    finite = [value for value in values if math.isfinite(value)]
    return f'<div class="stat">{shown(finite[-1], unit_of(panel)) if finite else "no data"}</div>'


def chart(panel: Mapping[str, Any], answers: Sequence[Mapping[str, Any]], start: float, end: float) -> str:
    """Lines over time, with a legend."""
    lines = [
        (name(each["legend"], series["metric"]), series["values"]) for each in answers for series in each["series"]
    ]
    width, height = panel["gridPos"]["w"] * CELL - GAP - 18, panel["gridPos"]["h"] * ROW - GAP - 64
    finite = [float(value) for _, values in lines for _, value in values if math.isfinite(float(value))]
    most = panel["fieldConfig"]["defaults"].get("max") or nice(max(finite, default=1.0))
    unit = unit_of(panel)

    def point(at: float, value: float) -> str:
        x = 44 + (width - 48) * (at - start) / (end - start)
        return f"{x:.1f},{6 + (height - 12) * (1 - min(1.0, value / most)):.1f}"

    parts = []
    for part in (0.0, 0.5, 1.0):
        y = 6 + (height - 12) * (1 - part)
        parts.append(f'<line class="tick" x1="44" x2="{width}" y1="{y:.0f}" y2="{y:.0f}"/>')
        parts.append(f'<text x="40" y="{y + 3:.0f}" text-anchor="end">{shown(part * most, unit)}</text>')
    legend = []
    for number, (label, values) in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        legend.append(f'<b style="color:{colour}">&#9644;</b> {html.escape(label)} ')
        for piece in pieces(values):
            path = " ".join(point(float(at), float(value)) for at, value in piece)
            parts.append(f'<polyline class="line" stroke="{colour}" points="{path}"/>')
    return f'<svg width="{width}" height="{height}">{"".join(parts)}</svg><div class="legend">{"".join(legend)}</div>'


def pieces(values: Sequence[Sequence[Any]]) -> list[list[Sequence[Any]]]:
    """The stretches of a series without what is no number."""
    found: list[list[Sequence[Any]]] = [[]]
    for each in values:
        if math.isfinite(float(each[1])):
            found[-1].append(each)
        elif found[-1]:
            found.append([])
    return [piece for piece in found if len(piece) > 1]


def name(legend: str, labels: Mapping[str, str]) -> str:
    """A legend with its {{labels}} filled in."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), legend)


def nice(value: float) -> float:
    """A round figure at or above."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value)
