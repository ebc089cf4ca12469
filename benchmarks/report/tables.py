"""The sections of the report: for each benchmark its title, how to read it, and the builder of its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report.parts import (
    Bars,
    Column,
    Json,
    Lines,
    Part,
    Table,
    distinct,
    every_value,
    how_sampled,
    mode,
    sound,
    tabulate,
    workload,
)  # fmt: skip


def strong_scaling(facts: Json) -> list[Part]:
    """Tokens per step against ranks, and how many times fewer steps than on one rank."""
    runs = sorted(sound(facts["runs"]), key=lambda run: run["num_ranks"])
    groups: dict[tuple[float, int], dict[int, float]] = {}
    for run in runs:
        found = groups.setdefault((run["temperature"], run["budget_per_rank"]), {})
        found[run["num_ranks"]] = run["tokens_per_step"]

    def fewer(run: Json) -> str:
        one = groups[run["temperature"], run["budget_per_rank"]].get(1)
        return f"{run['tokens_per_step'] / one:.2f}x" if one else ""

    columns: dict[str, Column] = {
        "mode": how_sampled, "nodes per rank": "{budget_per_rank}", "ranks": "{num_ranks}",
        "tokens/step": "{tokens_per_step:.2f}", "fewer steps": fewer, "nodes/step": "{nodes_per_step:.0f}",
        "largest shard": "{nodes_of_largest_shard:.0f}", "redundant": "{evaluated_redundantly:.1%}",
        "bytes/rank": "{payload_bytes_per_rank}",
    }  # fmt: skip
    panels = [
        Lines(mode(temperature), "ranks", "tokens per step", {
            f"{budget} nodes per rank": list(found.items()) for (at, budget), found in groups.items()
            if at == temperature})
        for temperature in distinct(runs, "temperature")
    ]  # fmt: skip
    best = "; ".join(
        f"{mode(at)}, {nodes} nodes: {list(each.values())[-1]:.1f}" for (at, nodes), each in groups.items()
    )
    headline = f"Tokens per step on the most ranks: {best}." if runs else ""
    return [Part(tabulate(workload(facts), runs, columns), panels, headline)]


def replay(facts: Json) -> list[Part]:
    """Drafting on recorded completions, and where steps end."""
    runs = []
    for run in sound(facts.get("runs", [facts])):
        setting = "warm" if run["warm"] else "cold"
        if run["num_warm_tokens"] and not run["warm"]:
            setting = f"history of {run['num_warm_tokens'] / 1e6:g}M tokens"
        runs.append({**run, "name": Path(run["traces"]).name.removesuffix(".jsonl"), "setting": setting})
    columns: dict[str, Column] = {
        "traces": "{name}", "setting": "{setting}", "nodes": "{budget}", "tasks": "{num_tasks}",
        "tokens/step": "{tokens_per_step:.2f}", "limit": "{limit_tokens_per_step:.2f}", "of it": "{share_of_limit:.1%}",
        "drafted/step": "{drafted_per_step:.1f}", "ms": "{draft_ms_per_step:.3f}", "ms p99": "{draft_ms_p99:.3f}",
    }  # fmt: skip
    bars = [
        (f"{run['name']}, {run['setting']}", run["tokens_per_step"], f"{run['tokens_per_step']:.2f}")
        for run in runs if not run["setting"].startswith("history")
    ]  # fmt: skip
    headline = f"Tokens per step on recorded completions: {'; '.join(f'{each[0]}: {each[2]}' for each in bars)}."
    ends = [{**end, "traces": run["name"], "setting": run["setting"]} for run in runs for end in run.get("ends", ())]
    why: dict[str, Column] = {
        "traces": "{traces}", "setting": "{setting}", "at": "{at}", "the token that came": "{cause}",
        "steps": "{steps}", "share": "{share:.1%}",
    }  # fmt: skip
    parts = [Part(tabulate("recorded completions", runs, columns), [Bars("", "tokens per step", bars)], headline)]
    return [*parts, *([Part(tabulate("where steps end", ends, why))] if ends else [])]


def peers(facts: Json) -> list[Part]:
    """lpr and its peers."""
    return [Part(peers_table(facts))]


def peers_table(facts: Json) -> Table:
    """Tokens per step by temperature, and seconds relative to transformers' plain decoding."""
    rows = sound(facts["rows"])
    temperatures = sorted(distinct(facts["rows"], "temperature"))
    by_place = {(row["peer"], row["variant"], row["temperature"]): row for row in rows}
    times: dict[tuple[str, str], list[Json]] = {}
    for each in facts["wall_clock"]:
        times.setdefault((each["peer"], each["variant"]), []).append(each)

    def steps(row: Json | None) -> str:
        if row is None:
            return ""
        found = f"{row['tokens_per_step']:.2f}"
        low, high = min(row["by_seed"]), max(row["by_seed"])
        return found if len(row["seeds"]) == 1 else f"{found} ({low:.2f} to {high:.2f}, {len(row['seeds'])} seeds)"

    def same(found: Sequence[Json | None]) -> str:
        counted = [row for row in found if row is not None and "outputs" in row]
        outputs, different = (sum(row[key] for row in counted) for key in ("outputs", "different"))
        return f"{outputs - different} of {outputs}" if counted else ""

    def speed(place: tuple[str, str]) -> str:
        found = times.get(place, [])
        base, own = (sum(each[key] for each in found) for key in ("base_seconds", "seconds"))
        return f"{base / own:.2f}x of {len(found)}" if found else ""

    cells = []
    for place in dict.fromkeys((row["peer"], row["variant"]) for row in rows):
        found = [by_place.get((*place, temperature)) for temperature in temperatures]
        cells.append([", ".join(place), *map(steps, found), same(found), speed(place)])
    columns = ["", *map(mode, temperatures), "ids as plain decoding", "speed over generate, of prompts"]
    return Table(f"tokens per step, {workload(facts)}, from prompt {facts['first_prompt']} on", columns, cells)


def decode(facts: Json) -> list[Part]:
    """Wall clock against transformers."""
    found = sound(facts["results"])
    title = f"{workload(facts)}, greedy, {facts['device']}, {facts['dtype'].removeprefix('torch.')}"
    columns: dict[str, Column] = {
        "": "{name}", "median s": "{median_seconds:.3f}", "over transformers": "{speedup_over_transformers:.2f}x",
        "over lpr plain": "{speedup_over_autoregressive:.2f}x", "tokens/step": "{tokens_per_step:.2f}",
        "prompts with other tokens": "{prompts_with_other_tokens}",
    }  # fmt: skip
    speeds = [(each["name"], each["speedup_over_transformers"]) for each in found]
    bars = Bars("", "times as fast as transformers", [(name, value, f"{value:.2f}x") for name, value in speeds])
    best = max((each for each in speeds if each[0].startswith("lpr")), key=lambda each: each[1])
    return [Part(tabulate(title, found, columns), [bars], f"{title}: {best[0]} {best[1]:.2f}x transformers.")]


def step_times(facts: Json) -> list[Part]:
    """t(n), the time of a step with n nodes, of every table of step times in a result."""
    series = dict(_tables(facts))
    if not series:
        raise KeyError("nodes, rows")
    nodes = sorted({count for points in series.values() for count, _ in points})
    cells = [[name, *(f"{dict(points)[n]:.2f}" if n in dict(points) else "" for n in nodes)]
             for name, points in series.items()]  # fmt: skip
    device = str(facts.get("gpu") or facts.get("cpu", ""))
    table = Table(device, ["milliseconds at", *(f"{n:g}" for n in nodes)], cells)
    words = "; ".join(f"{name}: {points[0][1]:.2f} to {points[-1][1]:.2f} ms" for name, points in series.items())
    picture = Lines("", "n, tokens that a step evaluates", "t(n), milliseconds", series)
    return [Part(table, [picture], f"From the fewest to the most nodes: {words}.")]


def _tables(value: Any, name: str = "") -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Step times as lpr.core.step_times writes them, anywhere in a result: a name and points (tokens, milliseconds)."""
    if isinstance(value, list):
        for each in value:
            yield from _tables(each, name)
    if not isinstance(value, dict):
        return
    name = str(value.get("name") or value.get("model") or name)
    nodes, rows = value.get("nodes"), value.get("rows")
    if isinstance(nodes, list) and isinstance(rows, list):
        for row in rows:
            label = f"{name}: batch {row['batch']}, {row['kv']} cached".lstrip(": ")
            yield label, list(zip(nodes, row["ms"], strict=True))
        return
    for key, each in value.items():
        yield from _tables(each, name or key)


def gpu_check(facts: Json) -> list[Part]:
    """What a GPU's ids and bits equal, tokens per second, and its step times, as far as they were measured."""
    parts, found, gpu = [], facts.get("sections", {}), facts["gpu"]
    correct = found.get("correctness", {})
    if forms := {form: correct[form]["equal_to_cpu"] for form in ("graphs", "eager") if form in correct}:
        kinds = sorted({kind for equal in forms.values() for kind in equal})
        cells = [[form, *(f"{equal[kind]} of {correct['prompts']}" for kind in kinds)] for form, equal in forms.items()]
        words = f"{correct['prompts']} prompts x {correct['max_new_tokens']} tokens, float32, {gpu}"
        parts.append(Part(Table(f"ids equal to the CPU's: {words}", ["", *kinds], cells)))
    if bits := found.get("exact", {}):
        cells = [
            [f"{kind}, {way}", "{outputs_that_differ} of {prompts}".format_map(each),
             "{logits_that_differ} of {logits_compared}".format_map(each)]
            for kind in ("usual", "exact") for way, each in bits.get(kind, {}).items()
        ]  # fmt: skip
        words = f"compared with plain decoding, {bits['dtype'].removeprefix('torch.')}, {gpu}"
        parts.append(Part(Table(words, ["", "outputs that differ", "logits that differ"], cells)))
    if rates := {name: each for name, each in found.get("end_to_end", {}).items() if isinstance(each, dict)}:
        cells = [[name, f"{each['tokens_per_s']:.0f}", f"{each.get('tokens_per_step', '')}"]
                 for name, each in rates.items()]  # fmt: skip
        title = f"the bundled model, one request at a time, {gpu}"
        bars = [(name, each["tokens_per_s"], f"{each['tokens_per_s']:.0f}") for name, each in rates.items()]
        parts.append(
            Part(Table(title, ["", "tokens/s", "tokens/step"], cells), [Bars("", "tokens per second", bars)],
                 "Tokens per second on a GPU."))  # fmt: skip
    if not parts or any(True for _ in _tables(facts)):
        parts += step_times(facts)
    return parts


def host(facts: Json) -> list[Part]:
    """Host time of a step on a paced device."""

    def case(row: Json) -> str:
        words = f"{row['costs']}, batch {row['batch']}, {row['nodes']} nodes, lp {row['lp']}"
        return f"{words}, {how_sampled(row)}{', window' if row['window'] else ''}"

    names = ("host_ms", "host_ms_p99", "draft_ms", "inputs_ms", "hidden_ms", "after_ms")
    columns: dict[str, Column] = {"case": case, "efficiency": "{efficiency:.3f}"}
    columns |= {name: f"{{{name}:.3f}}" for name in names}
    title = f"host time on the critical path, {facts['core']} core"
    return [Part(tabulate(title, facts["rows"], columns))]


Servers = dict[str, Json]
"""The runs of one load, by server."""


def _ratio(of: str, *names: str) -> Callable[[Servers], float | None]:
    """lpr's figure over another's: of the named ones, or of the best server of another maker; None without both."""

    def found(by_name: Servers) -> float | None:
        ours = by_name.get(names[0] if names else "lpr")
        theirs = [run for name, run in by_name.items() if name in names[1:] or not (names or name.startswith("lpr"))]
        known = [run[of] for run in theirs if run[of] is not None]
        if ours is None or not known:
            return None
        return ours[of] / (min(known) if of == "first_token_ms" else max(known))

    return found


RATIOS: dict[str, Callable[[Servers], float | None]] = {
    "tokens per second, lpr over the fastest other": _ratio("tokens_per_second"),
    "median time to the first token, lpr over the earliest other": _ratio("first_token_ms"),
    "tokens per second, lpr's automatic sizes over its plain decoding": _ratio("tokens_per_second", "lpr", "lpr-plain"),
    "tokens per second, lpr's plain decoding over vLLM's": _ratio("tokens_per_second", "lpr-plain", "vllm-plain"),
}
"""A table each, and how the runs of a load become its cell."""


def summary(facts: Json) -> list[Table]:
    """What a reader of the documentation sees: a table per comparison and type of weights, with a cell per load."""
    loads = sound([run for run in facts["runs"] if "data" in run])
    made = []
    for dtype in distinct(loads, "dtype"):
        mine = [run for run in loads if run["dtype"] == dtype]
        by_place: dict[tuple[str, str], Servers] = {}
        for run in mine:
            place = f"{run['data']}, {how_sampled(run)}", _clients(run)
            by_place.setdefault(place, {})[run["name"]] = run
        columns = [head for *_, head in sorted({(run["clients"], run["pass"], _clients(run)) for run in mine})]
        temperatures = sorted({run["temperature"] for run in mine})
        names = [f"{data}, {mode(each)}" for data in distinct(mine, "data") for each in temperatures]
        others = ", ".join(name for name in distinct(mine, "name") if not name.startswith("lpr"))
        for title, ratio in RATIOS.items():
            cells = {place: f"{found:.2f}x" for place, runs in by_place.items() if (found := ratio(runs)) is not None}
            rows = [[name, *(cells.get((name, column), "") for column in columns)] for name in names]
            if cells:
                made.append(
                    Table(
                        f"{dtype}, {facts.get('cpu', 'this machine')}, beside {others}: {title}", ["", *columns], rows
                    )
                )
    return made


def _clients(run: Json) -> str:
    return f"{run['clients']} client{'s' if run['clients'] > 1 else ''}, {run['pass']}"


def servers(facts: Json) -> list[Part]:
    """The ratios that a reader of the documentation sees; the file has every load's figures."""
    return list(map(Part, summary(facts)))


@dataclass(frozen=True)
class Section:
    """What the page shows of one benchmark's results."""

    title: str
    text: str  # How to read the tables and pictures.
    build: Callable[[Json], list[Part]] = every_value
    options: str = ""  # Of the command that makes the result.

    def command(self, name: str) -> str:
        """The command that makes the result."""
        words = ["python -m", f"benchmarks.{name}", self.options, f"--output benchmarks/results/{name}.json"]
        return " ".join(filter(None, words))


SECTIONS = {
    "strong_scaling": Section(
        "Tokens per step against ranks",
        "Every rank adds its own nodes to the tree. Steps are counted, not timed. The paper of lookahead decoding (Fu, "
        "Bailis, Stoica, Zhang, ICML 2024, arXiv 2402.02057) has 1.4 to 1.5 times fewer steps on 8 ranks.",
        strong_scaling, "--data hub:classeval",
    ),
    "replay": Section(
        "Drafting alone",
        "Recorded completions of other models, replayed. Cold: only the prompt is known; warm: outputs of other tasks "
        "are known. The limit copies the longest phrase of the text so far in every step.",
        replay, "--traces FILE.jsonl",
    ),
    "peers": Section("Peers", "lpr and related systems, on the same prompts and weights.", peers, "run --work DIR"),
    "decode": Section(
        "Wall clock against transformers",
        "Whole completions, greedy. All contestants must emit the same tokens. auto: sizes that lpr chose itself; "
        "trie N, both N: N nodes per step.",
        decode, "--data hub:classeval",
    ),
    "host": Section("Host time", "Efficiency is the paced device's share of the wall time.", host, "--quick"),
    "gpu_check": Section(
        "On a GPU", "While t(n), the time of a step of n nodes, is flat, further nodes cost nothing.", gpu_check
    ),
    "servers": Section(
        "Servers", "lpr's server beside vLLM's and llama.cpp's: the same prompts, by turns, in one run. Warm: the "
        "server has answered the same prompts before.", servers, "--model FOLDER --vllm DIR --llama DIR",
    ),
    "exactness": Section("Exactness", "Ids and logits that differ from plain decoding's."),
    "soak": Section("Soak", "Hostile clients next to well-formed requests.", options="--minutes 60 --lp 2"),
    "chaos": Section("Chaos", "Ranks are killed and stopped; every stream is compared."),
}  # fmt: skip


def parts_of(facts: Json) -> list[Part]:
    """The tables and pictures of a result; of an unknown benchmark every value."""
    section = SECTIONS.get(str(facts.get("benchmark", "")))
    return every_value(facts) if section is None else section.build(facts)
