"""The comparison of servers: tokens per second and time to the first token, by load and server."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from benchmarks.report.parts import Json, Part, Table, distinct, mode, sound

Servers = dict[str, Json]
"""The runs of one load, by server."""

FIGURES: dict[str, Callable[[Json], str]] = {
    "tokens per second": lambda run: f"{run['tokens_per_second']:.0f}",
    "milliseconds to the first token, median": lambda run: f"{run['first_token_ms'] or 0:.0f}",
    "milliseconds per further token, median": lambda run: f"{run['token_ms'] or 0:.1f}",
    "tokens per step of a sequence, by vLLM's counters": lambda run: f"{run.get('tokens_per_step', '')}",
    "acceptance length of steps with a draft, by vLLM's counters": lambda run: f"{run.get('acceptance_length', '')}",
    "texts equal to plain decoding's": lambda run: f"{run['equal_texts']}" if "equal_texts" in run else "",
}
"""A table each, and how a run becomes its cell."""
OURS, OURS_PLAIN, PLAIN = "lpr", "lpr-plain", "vllm-plain"
"""The setting that is compared with the best one of others, and plain decoding."""


def summary(facts: Json) -> list[Table]:
    """What a reader of the documentation sees: a table per comparison and type of weights, with a cell per load."""
    loads = sound([run for run in facts["runs"] if "data" in run])
    made = []
    for dtype in distinct(loads, "dtype"):
        mine = [run for run in loads if run["dtype"] == dtype]
        by_place: dict[tuple[str, str], Servers] = {}
        for run in mine:
            place = f"{run['data']}, {mode(run['temperature'])}", f"{_clients(run)}, {run['pass']}"
            by_place.setdefault(place, {})[run["name"]] = run
        heads = sorted({(run["clients"], run["pass"], f"{_clients(run)}, {run['pass']}") for run in mine})
        columns = [head for *_, head in heads]
        temperatures = sorted({run["temperature"] for run in mine})
        names = [f"{data}, {mode(each)}" for data in distinct(mine, "data") for each in temperatures]
        others = ", ".join(name for name in distinct(mine, "name") if not name.startswith("lpr"))
        for title, ratio in RATIOS.items():
            cells = {place: f"{found:.2f}x" for place, runs in by_place.items() if (found := ratio(runs)) is not None}
            rows = [[name, *(cells.get((name, column), "") for column in columns)] for name in names]
            if cells:
                made.append(Table(f"{dtype}, {facts['cpu']}, beside {others}: {title}", ["", *columns], rows))
    return made


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
        speed, first = _speed(by_name), _first_token(by_name)
        if speed is not None and first is not None:
            fastest, earliest = _fastest(by_name), _earliest(by_name)
            found.append([load, f"{speed:.2f}x", fastest["name"], f"{first:.2f}x", earliest["name"]])
    return found


def _others(by_name: Servers) -> list[Json]:
    return [run for name, run in by_name.items() if not name.startswith("lpr")]


def _fastest(by_name: Servers) -> Json:
    return max(_others(by_name), key=lambda run: run["tokens_per_second"])


def _earliest(by_name: Servers) -> Json:
    return min(_others(by_name), key=lambda run: run["first_token_ms"] or inf)


def _speed(by_name: Servers) -> float | None:
    """lpr's tokens per second over those of the fastest server of another maker; None if there is only one side."""
    if OURS not in by_name or not _others(by_name):
        return None
    return by_name[OURS]["tokens_per_second"] / _fastest(by_name)["tokens_per_second"]


def _first_token(by_name: Servers) -> float | None:
    """The same of the median time to the first token."""
    if OURS not in by_name or not _others(by_name):
        return None
    return by_name[OURS]["first_token_ms"] / _earliest(by_name)["first_token_ms"]


def _tokens(ours: str, theirs: str) -> Callable[[Servers], float | None]:
    """The ratio of two servers' tokens per second; None of a load without one of them."""

    def ratio(by_name: Servers) -> float | None:
        if ours not in by_name or theirs not in by_name:
            return None
        return by_name[ours]["tokens_per_second"] / by_name[theirs]["tokens_per_second"]

    return ratio


RATIOS: dict[str, Callable[[Servers], float | None]] = {
    "tokens per second, lpr over the fastest other": _speed,
    "median time to the first token, lpr over the earliest other": _first_token,
    "tokens per second, lpr's automatic sizes over its plain decoding": _tokens(OURS, OURS_PLAIN),
    "tokens per second, lpr's plain decoding over vLLM's": _tokens(OURS_PLAIN, PLAIN),
}
"""A table each, and how the runs of a load become its cell."""


def _rows(runs: list[Json], names: list[str], cell: Callable[[Json], str]) -> list[list[str]]:
    by_load = _by_load(runs)
    return [[load, *(_cell(found.get(name), cell) for name in names)] for load, found in by_load.items()]


def _by_load(runs: list[Json]) -> dict[str, Servers]:
    by_load: dict[str, Servers] = {}
    for run in runs:
        load = f"{run['data']}, {mode(run['temperature'])}, {_clients(run)}, {run['prompts']} prompts, {run['pass']}"
        by_load.setdefault(load, {})[run["name"]] = run
    return by_load


def _cell(run: Json | None, cell: Callable[[Json], str]) -> str:
    if run is None:
        return ""
    return "failed" if "failed" in run else cell(run)


def _clients(run: Json) -> str:
    return f"{run['clients']} client{'s' if run['clients'] > 1 else ''}"
