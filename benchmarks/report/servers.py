"""The comparison of servers: tokens per second and time to the first token, by load and server."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from benchmarks.report.parts import Json, Part, Table, distinct, mode, sound

FIGURES: dict[str, Callable[[Json], str]] = {
    "tokens per second": lambda run: f"{run['tokens_per_second']:.0f}",
    "milliseconds to the first token, median": lambda run: f"{run['first_token_ms'] or 0:.0f}",
    "milliseconds per further token, median": lambda run: f"{run['token_ms'] or 0:.1f}",
    "tokens per step of a sequence, by vLLM's counters": lambda run: f"{run.get('tokens_per_step', '')}",
    "acceptance length of steps with a draft, by vLLM's counters": lambda run: f"{run.get('acceptance_length', '')}",
    "texts equal to plain decoding's": lambda run: f"{run['equal_texts']}" if "equal_texts" in run else "",
}
"""A table each, and how a run becomes its cell."""
OURS = "lpr"
"""The setting that is compared with the best one of others."""


def servers(facts: Json) -> list[Part]:
    """A table per figure and type of weights: a row per load, a column per server; a failed load is so called."""
    loads = [run for run in facts["runs"] if "data" in run]
    starts = [run for run in facts["runs"] if "ready_seconds" in run]
    what = f"{facts['model']}, {facts['max_new_tokens']} tokens each"
    made = []
    for dtype in distinct(loads, "dtype"):
        mine = [run for run in loads if run["dtype"] == dtype]
        names = distinct(mine, "name")
        if rows := _beside(sound(mine)):
            head = ["load", "tokens per second", "the fastest other", "time to the first token", "the earliest other"]
            made.append(Part(Table(f"{what}, {dtype}: lpr over the best of the others", head, rows)))
        for figure, cell in FIGURES.items():
            if not any(cell(run) for run in sound(mine)):
                continue
            made.append(Part(Table(f"{what}, {dtype}: {figure}", ["load", *names], _rows(mine, names, cell))))
    if starts:
        rows = [[run["name"], run["case"].split(",")[0], f"{run['ready_seconds']:.1f}"] for run in sound(starts)]
        made.append(Part(Table("Seconds until a server is ready", ["server", "type", "seconds"], rows)))
    return made


def _beside(runs: list[Json]) -> list[list[str]]:
    """By load: lpr's tokens per second and first token over those of the best server of another maker."""
    found = []
    for load, by_name in _by_load(runs).items():
        others = {name: run for name, run in by_name.items() if not name.startswith("lpr")}
        if OURS not in by_name or not others:
            continue
        fastest = max(others, key=lambda name: others[name]["tokens_per_second"])
        earliest = min(others, key=lambda name: others[name]["first_token_ms"] or inf)
        speed, first = (
            by_name[OURS][figure] / others[name][figure]
            for name, figure in ((fastest, "tokens_per_second"), (earliest, "first_token_ms"))
        )
        found.append([load, f"{speed:.2f}x", fastest, f"{first:.2f}x", earliest])
    return found


def _rows(runs: list[Json], names: list[str], cell: Callable[[Json], str]) -> list[list[str]]:
    by_load = _by_load(runs)
    return [[load, *(_cell(found.get(name), cell) for name in names)] for load, found in by_load.items()]


def _by_load(runs: list[Json]) -> dict[str, dict[str, Json]]:
    by_load: dict[str, dict[str, Json]] = {}
    for run in runs:
        clients = f"{run['clients']} client{'s' if run['clients'] > 1 else ''}"
        load = f"{run['data']}, {mode(run['temperature'])}, {clients}, {run['prompts']} prompts, {run['pass']}"
        by_load.setdefault(load, {})[run["name"]] = run
    return by_load


def _cell(run: Json | None, cell: Callable[[Json], str]) -> str:
    if run is None:
        return ""
    return "failed" if "failed" in run else cell(run)
