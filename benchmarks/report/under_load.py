"""Parts about a service under load that was simulated."""

from __future__ import annotations

from matplotlib.figure import Figure

from benchmarks.report.parts import Part, Result
from benchmarks.report.plots import MARKERS, Theme, panels
from benchmarks.result_tables import under_load as tables
from benchmarks.result_tables.parts import Json, distinct, mode


def served(result: Result) -> list[Part]:
    """Mean latency and goodput against load, a picture for each temperature."""
    return [_loads(temperature, result) for temperature in distinct(result.facts["runs"], "temperature")]


def _loads(temperature: float, result: Result) -> Part:
    runs = [each for each in result.facts["runs"] if each["temperature"] == temperature]
    names = distinct(runs, "service")

    def draw(theme: Theme) -> Figure:
        figure, (latency, goodput) = panels(2, 3.6)
        for number, name in enumerate(names):
            mine = sorted((each for each in runs if each["service"] == name), key=lambda each: each["load"])
            color = (theme.soft, *theme.colors)[number]
            for axes, key in ((latency, "end_to_end_ms"), (goodput, "goodput")):
                axes.plot([each["load"] for each in mine], [each[key] for each in mine], MARKERS[number] + "-",
                          color=color, label=name)  # fmt: skip
        for axes, title in ((latency, "end to end, ms, mean"), (goodput, "requests a second within both targets")):
            axes.set_title(title)
            axes.set_xlabel("load (1: data parallelism with drafts is never idle)")
        latency.set_yscale("log")
        goodput.set_ylim(bottom=0)
        goodput.legend(frameon=False, fontsize=8)
        return figure

    claim = next(each for each in result.facts["claims"] if each["temperature"] == temperature)
    return Part(f"{result.stem}_{temperature:g}", draw, tables.served(temperature, result.facts), _said(claim))


def _said(claim: Json) -> str:
    holds = "" if claim["holds"] else ", so the claim (1.3 and 0.97) does not hold"
    faster, part = f"{claim['faster_at_low_load']:.2f}", f"{claim['part_at_full_load']:.2f}"
    return (
        f"Predicted, {mode(claim['temperature'])}: elastic lp answers a request {faster} times as fast as data "
        f"parallelism with drafts at the lowest load, and brings {part} of its tokens at full load{holds}."
    )
