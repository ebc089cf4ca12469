"""Parts about time, which was measured: it belongs to the machine that is named beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.report.parts import Part, Result
from benchmarks.report.plots import MARKERS, Theme, bars, beside, end_labels, legend, panels, rank_axis, stacked
from benchmarks.result_tables import times as tables
from benchmarks.result_tables.parts import Json, Table, sound
from benchmarks.result_tables.times import over_plain, race_title, sizes_title

DEVICE_PARTS = {"forward": "forward", "choose": "choice of tokens", "candidates": "recycled candidates"}
HOST_PARTS = {
    "draft": ("draft",),
    "inputs": ("inputs",),
    "exchange": ("exchange",),
    "accept, commit": ("accept, commit", "accept", "commit", "advance"),
    "text": ("text",),
    "partition, rows": ("partition", "rows", "selection"),
}


def breakdown(result: Result) -> list[Part]:
    """Where the time of a step goes: the model's part, and the host's."""
    runs = sound(result.facts["runs"])
    table = tables.step_parts(result.facts)
    names = table.columns[1:]
    median = [run["median_ms"] for run in runs]

    def draw(theme: Theme) -> Figure:
        figure, (whole, host) = panels(2, 1.4 + 0.28 * len(runs), columns=1)
        parts = [(label, [each[key] for each in median], theme.colors[number])
                 for number, (key, label) in enumerate(DEVICE_PARTS.items())]  # fmt: skip
        outside = [each["outside the forward"] for each in median]
        stacked(whole, names, [*parts, ("everything else", outside, theme.colors[4])])
        for place, each in enumerate(median):
            total = sum(each[key] for key in DEVICE_PARTS) + each["outside the forward"]
            beside(whole, f"{total:.1f}", total, place)
        whole.margins(x=0.08)
        whole.set_xlabel("the whole step, milliseconds of processor time")
        host_parts = [
            (label, [sum(each.get(key, 0.0) for key in keys) for each in median], theme.colors[number])
            for number, (label, keys) in enumerate(HOST_PARTS.items())
        ]
        stacked(host, names, [part for part in host_parts if any(part[1])])
        alone = [each["host alone"] for each in median]
        host.plot(alone, range(len(runs)), "D", color=theme.ink, label="host alone", linestyle="none")
        host.set_xlabel("everything else, enlarged, milliseconds of processor time")
        legend(whole, 4)
        legend(host, 4)
        return figure

    found = "; ".join(
        f"{name}: {each['step']:.1f}, of which {each['outside the forward']:.2f} outside the model"
        for name, each in zip(names, median, strict=True)
        if each is median[0] or each is median[-1]
    )
    headline = f"Milliseconds of a step. {found}."
    return [Part("step_time", draw, table, headline)]


def decode(result: Result) -> list[Part]:
    """Wall clock against transformers."""
    everyone = result.facts["results"]
    best = max((each for each in sound(everyone) if each["name"].startswith("lpr")),
               key=lambda each: each["speedup_over_transformers"])  # fmt: skip

    def text(each: Json) -> str:
        if "failed" in each:
            return "failed"
        steps = f", {each['tokens_per_step']:.1f} tokens/step" if each["tokens_per_step"] else ""
        return f"{each['speedup_over_transformers']:.2f}x{steps}"

    def color(name: str, theme: Theme) -> str:
        if name == "lpr auto":
            return theme.colors[1]
        return theme.colors[0] if name.startswith("lpr") else theme.soft

    def draw(theme: Theme) -> Figure:
        figure, (axes,) = panels(1, 0.8 + 0.3 * len(everyone))
        names = [each["name"] for each in everyone]
        values = [each.get("speedup_over_transformers", 0.0) for each in everyone]
        bars(axes, names, values, [color(name, theme) for name in names], [text(each) for each in everyone])
        axes.axvline(1, color=theme.soft, linestyle="--", linewidth=1.2)
        axes.set_xlabel("times as fast as transformers' greedy decoding (wall clock, medians over prompts)")
        return figure

    table = tables.decode(result.facts)
    times = best["speedup_over_transformers"]
    headline = f"{table.title}: {best['name']} is {times:.2f} times as fast as transformers' greedy decoding."
    return [Part(result.stem, draw, table, headline)]


def sizes(result: Result) -> list[Part]:
    """Automatic sizes against the best fixed one on recorded texts, under given step times."""
    runs = sound(result.facts["runs"])

    def draw(theme: Theme) -> Figure:
        figure, grid = panels(len(runs), 1.0 + 0.45 * max(len(run["races"]) for run in runs))
        for axes, run in zip(grid, runs, strict=True):
            names, values, colors, words = [], [], [], []
            for race in run["races"]:
                names += [f"{race['costs']}, fixed", "automatic"]
                values += [race["best_fixed_over_plain"], race["auto"]["over_plain"]]
                colors += [theme.colors[0], theme.colors[1]]
                words += [f"{values[-2]:.2f}x ({race['best_fixed']} nodes)", f"{values[-1]:.2f}x"]
            bars(axes, names, values, colors, words)
            axes.axvline(1, color=theme.soft, linestyle="--", linewidth=1.2)
            axes.set_xlabel("times as fast as plain decoding")
            axes.set_title(sizes_title(run))
        return figure

    ratios = [race["auto_over_best_fixed"] for run in runs for race in run["races"]]
    headline = (
        f"Automatic sizes against the best fixed size, chosen afterwards: {min(ratios):.2f} to {max(ratios):.2f} times "
        "its speed."
    )
    return [Part("sizes", draw, tables.sizes(result.facts), headline)]


def adaptive(result: Result) -> list[Part]:
    """Automatic sizes against a grid of fixed ones, and where drafts must fail."""
    races, traps = sound(result.facts["races"]), sound(result.facts["traps"])

    def race_axes(axes: Axes, race: Json, theme: Theme) -> None:
        found = race["results"]
        colors = {"auto": theme.colors[1], "plain": theme.soft}
        marks = ["best fixed" if each["name"] == race["best_fixed"] else "" for each in found]
        bars(
            axes,
            [each["name"] for each in found],
            [each["over_plain"] for each in found],
            [colors.get(each["name"], theme.colors[0]) for each in found],
            [f"{each['over_plain']:.2f}x {mark}" for each, mark in zip(found, marks, strict=True)],
        )
        axes.axvline(1, color=theme.soft, linestyle="--", linewidth=1.2)
        axes.set_xlabel("times as fast as plain decoding")

    def draw_races(theme: Theme) -> Figure:
        tallest = max(len(race["results"]) for race in races)
        figure, grid = panels(len(races), 0.9 + 0.25 * tallest)
        for axes, race in zip(grid, races, strict=True):
            race_axes(axes, race, theme)
            axes.set_title(race_title(race))
        return figure

    def draw_traps(theme: Theme) -> Figure:
        figure, (axes,) = panels(1, 0.8 + 0.35 * len(traps))
        values = [over_plain(each) for each in traps]
        colors = [theme.colors[1]] * len(traps)
        bars(axes, [each["case"] for each in traps], values, colors, [f"{value:.3f}x" for value in values])
        axes.axvline(1, color=theme.soft, linestyle="--", linewidth=1.2)
        axes.set_xlabel("automatic sizes: times as fast as plain decoding (1: no slower)")
        return figure

    found = "; ".join(f"{race_title(race)}: {race['auto_over_best_fixed']:.2f}x" for race in races)
    headline = f"Speed against the best fixed size, chosen afterwards. {found}."
    parts = [Part("automatic_sizes", draw_races, tables.races(result.facts), headline)]
    if traps:
        speeds = [over_plain(each) for each in traps]
        headline = f"Where drafts must fail: {min(speeds):.2f} to {max(speeds):.2f} times the speed of plain decoding."
        parts.append(Part("automatic_traps", draw_traps, tables.traps(result.facts), headline))
    return parts


def step_costs(result: Result) -> list[Part]:
    """t(n): how long a step takes with n nodes, for every table that the result holds."""
    found = list(_tables(result.facts))
    if not found:
        raise KeyError("nodes, rows")
    nodes = sorted({count for _, points in found for count, _ in points})

    def draw(theme: Theme) -> Figure:
        figure, (axes,) = panels(1, 3.8)
        rank_axis(axes, nodes, "n, tokens that a step evaluates", room=1.6)
        labels = []
        for number, (name, points) in enumerate(found):
            color = theme.colors[number % len(theme.colors)]
            axes.plot(*zip(*points, strict=True), MARKERS[number % len(MARKERS)] + "-", color=color)
            labels.append((*points[-1], name, color))
        axes.set_ylim(0)
        axes.tick_params(axis="x", labelsize=8)
        axes.set_ylabel("t(n), milliseconds")
        end_labels(axes, labels)
        return figure

    rows = [[name, *(f"{dict(points)[n]:.2f}" if n in dict(points) else "" for n in nodes)] for name, points in found]
    words = "; ".join(f"{name}: {points[0][1]:.2f} to {points[-1][1]:.2f} ms" for name, points in found)
    device = result.facts.get("gpu") or result.facts.get("cpu", "")
    headline = f"From the fewest to the most nodes. {words}."
    columns = ["milliseconds at", *(f"{n:g}" for n in nodes)]
    return [Part(f"t_of_n_{result.stem}", draw, Table(str(device), columns, rows), headline)]


def _tables(value: Any, name: str = "") -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Tables as lpr.core.step_times.StepTimes writes them, wherever in a result: a name and (tokens, milliseconds)."""
    if isinstance(value, list):
        for each in value:
            yield from _tables(each, name)
    if not isinstance(value, dict):
        return
    name = str(value.get("name") or value.get("model") or name)
    nodes, rows = value.get("nodes"), value.get("rows")
    if isinstance(nodes, list) and isinstance(rows, list):
        for row in rows:
            yield (
                f"{name}: batch {row['batch']}, {row['kv']} cached".lstrip(": "),
                list(zip(nodes, row["ms"], strict=True)),
            )
        return
    for key, each in value.items():
        yield from _tables(each, name or key)
