"""Parts about predictions, and results that have no picture of their own."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from benchmarks.report.parts import Json, Part, Result, distinct, mode
from benchmarks.report.plots import MARKERS, Theme, beside, end_labels, panels, rank_axis

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


def _best(setting: Json) -> list[tuple[int, Json]]:
    """(GPUs, prediction of the fastest mesh of so many)."""
    found: dict[int, Json] = {}
    for each in setting["predictions"]:
        count = each["lp"] * each["tp"]
        if count not in found or each["tokens_per_second"]["mid"] > found[count]["tokens_per_second"]["mid"]:
            found[count] = each
    return sorted(found.items())


def _prediction(gpu: str, models: list[Json], result: Result) -> Part:
    gpus = sorted({count for each in models for setting in each["settings"] for count, _ in _best(setting)})

    def draw(theme: Theme) -> Figure:
        figure, grid = panels(len(models), 3.4)
        for axes, model in zip(grid, models, strict=True):
            rank_axis(axes, gpus, "GPUs", room=1.5 * max(1.0, len(gpus) / 4))
            axes.set_yscale("log", base=2)
            labels: list[tuple[float, float, str, str]] = []
            for number, setting in enumerate(model["settings"]):
                points = _best(setting)
                counts = [count for count, _ in points]
                low, mid, high = (
                    [each["tokens_per_second"][key] for _, each in points] for key in ("low", "mid", "high")
                )
                color = (theme.soft, *theme.colors)[number]
                axes.fill_between(counts, low, high, color=color, alpha=0.18, linewidth=0)
                axes.plot(counts, mid, MARKERS[number] + "-", color=color)
                labels.append((counts[-1], mid[-1], f"{mode(setting['temperature'])}:\n{mid[-1]:.0f}", color))
            plain = _best(model["settings"][0])
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

    rows = [
        [model["model"], mode(setting["temperature"]), str(count), f"{each['lp']} x {each['tp']}",
         f"{each['tokens_per_second']['mid']:.0f}",
         f"{each['tokens_per_second']['low']:.0f} to {each['tokens_per_second']['high']:.0f}",
         f"{each['tokens_per_step']:.2f}" + ("?" if each["extrapolated"] else ""), str(each["drafted_nodes"]),
         *(f"{each['step_ms'][key]:.2f}" for key in ("forward", "tp", "lp", "host"))]
        for model in models for setting in model["settings"] for count, each in _best(setting)
    ]  # fmt: skip
    columns = ["model", "mode", "GPUs", "lp x tp", "tokens/s", "range", "tokens/step", "nodes", "forward ms", "tp ms",
               "lp ms", "host ms"]  # fmt: skip
    answers = {
        (model["model"], mode(setting["temperature"])): setting["on_8_gpus"]["best"]
        for model in models for setting in model["settings"] if setting.get("on_8_gpus")
    }  # fmt: skip
    meshes = list(dict.fromkeys(answers.values()))
    headline = f"Predicted for {gpu} ({models[0]['launch']}), not measured."
    if meshes:
        headline += f" The fastest lp x tp on 8 GPUs: {', '.join(meshes)}."
    title = f"{gpu}, {models[0]['launch']}, {models[0]['kv']} cached tokens, the best mesh of each number of GPUs"
    return Part(f"{result.stem}_{gpu}", title, draw, headline, columns, rows, headline)


def _check(result: Result) -> Part:
    published = result.facts["gpt_fast"]
    names = [f"{each['model']}, {each['num_gpus']} GPU{'s' if each['num_gpus'] > 1 else ''}" for each in published]
    own = [{**each, "published": each["measured"], "is_fitted": False} for each in result.facts["runs"] or []]
    names += [f"here: {each['name']}, {each['processes']} process{'es' * (each['processes'] > 1)}" for each in own]
    checks = published + own

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

    rows = [
        [
            name,
            f"{each['published']:.1f}",
            f"{each['predicted']:.1f}",
            f"{each['ratio']:.2f}",
            "yes" if each["is_fitted"] else "no",
        ]
        for name, each in zip(names, checks, strict=True)
    ]
    free = [abs(each["ratio"] - 1) for each in published if not each["is_fitted"]]
    headline = f"Predictions of gpt-fast's published runs are off by at most {100 * max(free, default=0.0):.0f} %."
    title = "the check: gpt-fast's published runs of plain decoding with tensor parallelism"
    title += ", and runs of the machine named below" if own else ""
    columns = ["run", "real", "predicted", "ratio", "fitted to it"]
    return Part(f"{result.stem}_check", title, draw, headline, columns, rows, headline)


def plain_tables(result: Result) -> list[Part]:
    """The numbers of a result without a picture: its single values, and every list of records as a table."""
    single = [[key, _cell(value)] for key, value in result.facts.items() if isinstance(value, str | int | float)]
    known = {
        "benchmark",
        "date",
        "command",
        "commit",
        "cpu",
        "gpu",
        "threads",
        "python",
        "torch",
        "transformers",
        "note",
    }
    single = [row for row in single if row[0] not in known]
    parts = [Part(result.stem, result.file, None, "", ["", ""], single)] if single else []
    for key, value in result.facts.items():
        records = [value] if isinstance(value, dict) else value
        if isinstance(records, list) and records and all(isinstance(each, dict) for each in records):
            columns = list(dict.fromkeys(name for each in records for name in each))
            rows = [[_cell(each.get(name, "")) for name in columns] for each in records]
            parts.append(Part(f"{result.stem}_{key}", f"{result.file}: {key}", None, "", columns, rows))
    return parts


def _cell(value: Any) -> str:
    if isinstance(value, dict | list) and any(isinstance(each, dict | list) for each in _values(value)):
        return f"{len(value)} entries, see the file"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return f"{value:,.6g}" if isinstance(value, float) else str(value)


def _values(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value
