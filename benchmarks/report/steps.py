"""Results that count steps, which are the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.report.parts import (
    Bars,
    Column,
    Json,
    Lines,
    Part,
    Table,
    distinct,
    how_sampled,
    mode,
    optional,
    sound,
    tabulate,
    workload,
)

FEWEST = 30
"""Drafted nodes below which no share is shown."""
PAPER = {8: "1.4x to 1.5x"}
"""Ranks to how many times fewer steps they take: Fu, Bailis, Stoica, Zhang, ICML 2024, arXiv 2402.02057."""
SOURCES = {
    "trie": "trie",
    "shared_trie": "shared trie",
    "pool": "n-gram pool",
    "window": "window",
    "recycled": "recycled",
    "prediction": "prediction",
    "head": "prediction head",
}
LOOPING = optional("{looping_outputs:.0%}")
LIMIT: dict[str, Column] = {
    "tokens/step": "{tokens_per_step:.2f}",
    "limit": optional("{limit_tokens_per_step:.2f}"),
    "of limit": optional("{share_of_limit:.1%}"),
    "looping": LOOPING,
    "without loops": optional("{without_loops[tokens_per_step]:.2f}"),
    "its limit": optional("{without_loops[limit_tokens_per_step]:.2f}"),
    "of it": optional("{without_loops[share_of_limit]:.1%}"),
}
"""Columns of tokens per step relative to the limit of longest phrases (benchmarks.limit)."""


def strong_scaling(facts: Json) -> list[Part]:
    """Tokens per step against ranks, and how many times fewer steps than on one rank."""
    runs = sorted(sound(facts["runs"]), key=lambda run: run["num_ranks"])
    counted = tabulate(
        workload(facts), runs,
        {
            "mode": how_sampled, "nodes per rank": "{budget_per_rank}", "ranks": "{num_ranks}",
            "tokens/step": "{tokens_per_step:.2f}", "nodes/step": "{nodes_per_step:.0f}",
            "largest shard": "{nodes_of_largest_shard:.0f}", "redundant": "{evaluated_redundantly:.1%}",
            "bytes/rank": "{payload_bytes_per_rank}",
        },
    )  # fmt: skip
    groups: dict[tuple[float, int], dict[int, float]] = {}
    for run in runs:
        case = groups.setdefault((run["temperature"], run["budget_per_rank"]), {})
        case[run["num_ranks"]] = run["tokens_per_step"]
    panels = [
        Lines(mode(temperature), "ranks", "tokens per step", {
            f"{budget} nodes per rank": list(found.items()) for (each, budget), found in groups.items()
            if each == temperature})
        for temperature in distinct(runs, "temperature")
    ]  # fmt: skip
    ranks = sorted(distinct(runs, "num_ranks"))
    ratios = {case: {n: each / found[1] for n, each in found.items()} for case, found in groups.items() if 1 in found}
    rows = [
        [mode(temperature), str(budget), *(f"{found[n]:.2f}x" if n in found else "" for n in ranks)]
        for (temperature, budget), found in ratios.items()
    ]
    rows.append(["paper", "", *(PAPER.get(rank, "") for rank in ranks)])
    fewer = Table("times fewer steps than on one rank", ["mode", "nodes per rank", *map(str, ranks)], rows)
    best = "; ".join(
        f"{mode(temperature)}, {budget} nodes per rank: {found[ranks[0]]:.1f} to {found[ranks[-1]]:.1f}"
        for (temperature, budget), found in groups.items()
        if {ranks[0], ranks[-1]} <= set(found)
    )
    headline = f"Tokens per step on {ranks[0]} to {ranks[-1]} ranks: {best}." if ranks else ""
    lines = {f"{mode(t)}, {budget} nodes": list(found.items()) for (t, budget), found in ratios.items()}
    return [
        Part(counted, panels, headline),
        Part(fewer, [Lines("", "ranks", "times fewer steps", lines)] if lines else []),
    ]


def ablation(facts: Json) -> list[Part]:
    """Tokens per step by draft source and node budget, the limit where it was counted, and acceptance by depth."""
    runs = sound(facts["runs"])
    budgets = sorted(distinct(runs, "budget"))
    cells = {(run["temperature"], run["kind"], run["budget"]): run["tokens_per_step"] for run in runs}
    cases = list(dict.fromkeys((run["temperature"], run["kind"]) for run in runs))
    rows = [
        [mode(t), kind, *(f"{cells[t, kind, b]:.2f}" if (t, kind, b) in cells else "" for b in budgets)]
        for t, kind in cases
    ]
    panels = [
        Lines(mode(temperature), "node budget of a step", "tokens per step", {
            kind: [(b, cells[temperature, kind, b]) for b in budgets if (temperature, kind, b) in cells]
            for t, kind in cases if t == temperature})
        for temperature in distinct(runs, "temperature")
    ]  # fmt: skip
    best = max((value, key) for key, value in cells.items())
    headline = (
        f"Most tokens per step on one rank: {best[0]:.1f} ({best[1][1]}, {best[1][2]} nodes, {mode(best[1][0])})."
    )
    table = Table(workload(facts), ["mode", "source", *(f"{budget} nodes" for budget in budgets)], rows)
    parts = [Part(table, panels, headline)]
    limits = [run for run in runs if "share_of_limit" in run]
    if limits:
        columns: dict[str, Column] = {"mode": how_sampled, "source": "{kind}", "nodes": "{budget}", **LIMIT}
        parts.append(Part(tabulate("relative to the limit of longest phrases", limits, columns)))
    return [*parts, depths(runs)]


def depths(runs: Sequence[Json]) -> Part:
    """Nodes drafted and accepted by source and depth, of the run with all sources and the largest budget."""
    kinds = distinct(runs, "kind")
    kind = next(each for each in ("both", "trie", "window") if each in kinds)
    most = max(run["budget"] for run in runs if run["kind"] == kind)
    chosen = [run for run in runs if (run["kind"], run["budget"]) == (kind, most)]
    counts = [
        {**each, "temperature": run["temperature"], "steps": run["num_steps"]}
        for run in chosen
        for each in run["by_depth"]
    ]
    table = tabulate(
        f"{kind}, {most} nodes", counts,
        {
            "mode": how_sampled, "source": lambda each: SOURCES[each["source"]], "up to depth": "{up_to_depth}",
            "drafted/step": lambda each: f"{each['drafted'] / each['steps']:.2f}",
            "accepted/step": lambda each: f"{each['accepted'] / each['steps']:.3f}",
            "accepted": lambda each: f"{share(each):.1%}" if each["drafted"] >= FEWEST else "",
        },
    )  # fmt: skip
    panels = [
        Lines(f"{mode(run['temperature'])}: share accepted", "depth in the tree", "share of drafted nodes", {
            name: [(each["up_to_depth"], share(each)) for each in run["by_depth"]
                   if each["source"] == source and each["drafted"] >= FEWEST]
            for source, name in SOURCES.items()}, None)
        for run in chosen
    ]  # fmt: skip
    return Part(table, panels, "Share of drafted nodes that were accepted, by source and depth.")


def share(each: Json) -> float:
    """The accepted share of drafted nodes."""
    return float(each["accepted"] / each["drafted"])


def data_sets(facts: Json) -> list[Part]:
    """Tokens per step on recorded texts by nodes, and peers on the same texts."""
    runs = sound(facts["runs"])
    budgets, temperatures = sorted(distinct(runs, "budget")), distinct(runs, "temperature")
    cases: dict[tuple[str, float], dict[int, Json]] = {}
    for run in runs:
        cases.setdefault((run["data"], run["temperature"]), {})[run["budget"]] = run

    def cell(run: Json | None) -> str:
        return "" if run is None else with_straight(run)

    rows = [
        [
            data,
            mode(t),
            LOOPING(first),
            f"{first['limit_tokens_per_step']:.2f}",
            *map(cell, map(found.get, budgets)),
        ]
        for (data, t), found in cases.items()
        for first in [next(iter(found.values()))]
    ]
    table = Table(
        "tokens per step by drafted nodes (without outputs that loop)",
        ["data", "mode", "looping", "limit", *(f"{budget} nodes" for budget in budgets)],
        rows,
    )
    panels = [
        Lines(mode(temperature), "drafted nodes of a step", "tokens per step", {
            data: [(budget, found[budget]["tokens_per_step"]) for budget in budgets if budget in found]
            for (data, t), found in cases.items() if t == temperature})
        for temperature in temperatures
    ]  # fmt: skip
    parts = [Part(table, panels, "Tokens per step on a model's recorded texts.")]
    replayed: dict[str, Column] = {
        "data": "{data}",
        "mode": how_sampled,
        "peer": "{peer}",
        "tokens/step": with_straight,
    }
    peers = facts.get("peers", [])
    return [*parts, *([Part(tabulate("peers on the same texts", peers, replayed))] if peers else [])]


def with_straight(run: Json) -> str:
    """Tokens per step, and in brackets those of the outputs that do not loop."""
    without = run.get("without_loops")
    return f"{run['tokens_per_step']:.2f}" + (f" ({without['tokens_per_step']:.2f})" if without else "")


def replay(facts: Json) -> list[Part]:
    """Drafting on recorded completions, and where steps end; runs with a long history only time queries."""
    runs = sound(facts.get("runs", [facts]))

    def setting(run: Json) -> str:
        if run["num_warm_tokens"] and not run["warm"]:
            return f"history of {run['num_warm_tokens'] / 1e6:g}M tokens"
        return "warm" if run["warm"] else "cold"

    def name(run: Json) -> str:
        return Path(run["traces"]).name.removesuffix(".jsonl")

    times = {"drafted/step": "{drafted_per_step:.1f}", "ms": "{draft_ms_per_step:.3f}", "ms p99": "{draft_ms_p99:.3f}"}
    columns: dict[str, Column] = {
        "traces": name,
        "setting": setting,
        "nodes": "{budget}",
        "tasks": "{num_tasks}",
        **LIMIT,
        **times,
    }
    bars = [
        (f"{name(run)}, {setting(run)}, {run['budget']} nodes", run["tokens_per_step"], f"{run['tokens_per_step']:.2f}")
        for run in runs
        if not setting(run).startswith("history")
    ]
    headline = f"Tokens per step on recorded completions: {'; '.join(f'{each[0]}: {each[2]}' for each in bars)}."
    picture = [Bars("", "tokens per step (plain decoding: 1)", bars)] if bars else []
    parts = [Part(tabulate("recorded completions", runs, columns), picture, headline)]
    ends = [{**end, "traces": name(run), "setting": setting(run)} for run in runs for end in run.get("ends", ())]
    if ends:
        why: dict[str, Column] = {
            "traces": "{traces}",
            "setting": "{setting}",
            "at": "{at}",
            "the token that came": "{cause}",
        }
        parts.append(Part(tabulate("where steps end", ends, {**why, "steps": "{steps}", "share": "{share:.1%}"})))
    return parts


def heads(facts: Json) -> list[Part]:
    """Tokens per step with and without a head's guesses, and where accepted nodes came from, by depth."""
    by_place = {(run["data"], run["temperature"], run["budget"], run["heads"]): run for run in facts["runs"]}
    rows, budgets, temperatures = [], distinct(facts["runs"], "budget"), distinct(facts["runs"], "temperature")
    gains: list[float] = []
    for data in distinct(facts["runs"], "data"):
        cells = [data]
        for temperature in temperatures:
            for budget in budgets:
                off, on = (by_place[data, temperature, budget, each]["tokens_per_step"] for each in ("off", "on"))
                cells.append(f"{off:.2f} / {on:.2f}")
                gains.append(on / off)
        rows.append(cells)
    columns = ["", *(f"{mode(each)}, {budget} nodes" for each in temperatures for budget in budgets)]
    said = f"With the head steps bring {min(gains):.2f} to {max(gains):.2f} times the tokens."
    made = [Part(Table("Tokens per step without and with the head", columns, rows), headline=said)]
    depths = distinct([each for run in facts["runs"] for each in run["by_depth"]], "up_to_depth")
    rows = []
    for (data, temperature, budget, kind), run in by_place.items():
        if kind == "off" or budget != max(budgets):
            continue
        for name, is_head in (("the head", True), ("the text", False)):
            counts = [each for each in run["by_depth"] if (each["source"] == "head") is is_head]
            by_depth = [sum(each["accepted"] for each in counts if each["up_to_depth"] == depth) for depth in depths]
            rows.append([f"{data}, {mode(temperature)}", name, *map(str, by_depth)])
    title = f"Accepted nodes by source and depth, {max(budgets)} nodes"
    made.append(Part(Table(title, ["", "source", *(f"to {each}" for each in depths)], rows)))
    return made


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
