"""Parts about predictions."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from benchmarks.report.parts import Part, Result
from benchmarks.report.plots import MARKERS, Theme, beside, end_labels, panels, rank_axis
from benchmarks.result_tables import predicted as tables
from benchmarks.result_tables.parts import Json, distinct, mode
from benchmarks.result_tables.predicted import best_meshes

PAPER_TIMES = 4
"""Lookahead parallelism on 8 A100 against plain decoding on one, at most (Fu et al.: ClassEval, CodeLlama 7B, 13B)."""
PAPER_MODELS = ("codellama-7b", "codellama-13b")


def simulate(result: Result) -> list[Part]:
    """Predicted tokens per second against the number of GPUs, and how such predictions fared where runs are known."""
    models = result.facts["models"]
    parts = [
        _prediction(gpu, [each for each in models if each["gpu"] == gpu], result) for gpu in distinct(models, "gpu")
    ]
    return [*parts, _check(result)]


def _prediction(gpu: str, models: list[Json], result: Result) -> Part:
    gpus = sorted({count for each in models for setting in each["settings"] for count, _ in best_meshes(setting)})

    def draw(theme: Theme) -> Figure:
        figure, grid = panels(len(models), 3.4)
        for axes, model in zip(grid, models, strict=True):
            rank_axis(axes, gpus, "GPUs", room=1.5 * max(1.0, len(gpus) / 4))
            axes.set_yscale("log", base=2)
            labels: list[tuple[float, float, str, str]] = []
            for number, setting in enumerate(model["settings"]):
                points = best_meshes(setting)
                counts = [count for count, _ in points]
                low, mid, high = (
                    [each["tokens_per_second"][key] for _, each in points] for key in ("low", "mid", "high")
                )
                color = (theme.soft, *theme.colors)[number]
                axes.fill_between(counts, low, high, color=color, alpha=0.18, linewidth=0)
                axes.plot(counts, mid, MARKERS[number] + "-", color=color)
                labels.append((counts[-1], mid[-1], f"{mode(setting['temperature'])}:\n{mid[-1]:.0f}", color))
            plain = best_meshes(model["settings"][0])
            if gpu == "a100-80gb" and model["model"] in PAPER_MODELS and plain[0][0] == 1 and 8 in gpus:
                at = (8, PAPER_TIMES * plain[0][1]["tokens_per_second"]["mid"])
                axes.plot(*at, "D", color=theme.colors[3])
                text = f"\u25c6 paper: up to {PAPER_TIMES}x"
                axes.set_title(text, loc="right", color=theme.colors[3], fontsize=8.5, fontweight="normal")
            axes.yaxis.set_major_formatter("{x:.0f}")
            axes.yaxis.set_minor_locator(NullLocator())
            axes.set_title(model["model"])
            axes.set_ylabel("predicted tokens per second")
            end_labels(axes, labels, size=8)
        return figure

    answers = {
        (model["model"], mode(setting["temperature"])): setting["on_8_gpus"]["best"]
        for model in models for setting in model["settings"] if setting.get("on_8_gpus")
    }  # fmt: skip
    meshes = list(dict.fromkeys(answers.values()))
    headline = f"Predicted for {gpu} ({models[0]['launch']}), not measured."
    if meshes:
        headline += f" The fastest lp x tp on 8 GPUs: {', '.join(meshes)}."
    return Part(f"{result.stem}_{gpu}", draw, tables.predictions(gpu, result.facts), headline)


def _check(result: Result) -> Part:
    """Predictions of runs that are known, beside those runs."""
    checks = tables.checks_of(result.facts)
    names = [each["title"] for each in checks]

    def draw(theme: Theme) -> Figure:
        figure, (axes,) = panels(1, 0.8 + 0.24 * len(checks))
        axes.axvspan(0.9, 1.1, color=theme.line, alpha=0.5, linewidth=0)
        axes.axvline(1, color=theme.soft, linestyle="--", linewidth=1.2)
        for place, each in enumerate(checks):
            color = theme.soft if each["is_fitted"] else theme.colors[0]
            axes.plot([each["ratio"]], [place], "D" if each["is_fitted"] else "o", color=color)
            note = " fitted" if each["is_fitted"] else ""
            beside(axes, f"{each['ratio']:.2f}{note}", each["ratio"], place, distance=8)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        furthest = max(abs(each["ratio"] - 1) for each in checks)
        axes.set_xlim(1 - 1.3 * furthest, 1 + 1.6 * furthest)
        axes.set_xlabel("predicted / real tokens per second (grey: within 10 %)")
        return figure

    free = [abs(each["ratio"] - 1) for each in result.facts["gpt_fast"] if not each["is_fitted"]]
    headline = f"Predictions of gpt-fast's published runs are off by at most {100 * max(free, default=0.0):.0f} %."
    return Part(f"{result.stem}_check", draw, tables.check(result.facts), headline)
