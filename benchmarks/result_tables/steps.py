"""Tables of what steps bring: tokens per step by ranks, sizes and sources, replays, peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.result_tables.parts import FEWEST, Json, Table, distinct, mode, sound, workload

SOURCES = {
    "trie": "trie",
    "shared_trie": "shared trie",
    "pool": "n-gram pool",
    "window": "window",
    "recycled": "recycled",
}


def lines_of(runs: list[Json]) -> list[tuple[float, int, list[Json]]]:
    """(temperature, nodes per rank, runs by ascending ranks) of a strong scaling result."""
    return [
        (temperature, budget, sorted(chosen, key=lambda run: run["num_ranks"]))
        for temperature in distinct(runs, "temperature")
        for budget in distinct(runs, "budget_per_rank")
        if (chosen := [r for r in runs if (r["temperature"], r["budget_per_rank"]) == (temperature, budget)])
    ]


def ratios_of(runs: list[Json]) -> list[tuple[float, int, dict[int, float]]]:
    """(temperature, nodes per rank, ranks to times fewer steps than on one rank), where one rank was counted."""
    return [
        (temperature, budget, {r["num_ranks"]: r["tokens_per_step"] / found[0]["tokens_per_step"] for r in found})
        for temperature, budget, found in lines_of(runs)
        if found[0]["num_ranks"] == 1
    ]


def scaling(facts: Json) -> Table:
    """Tokens per step against ranks."""
    rows = [
        [mode(temperature), str(budget), str(run["num_ranks"]), f"{run['tokens_per_step']:.2f}",
         f"{run['nodes_per_step']:.0f}", f"{run['nodes_of_largest_shard']:.0f}",
         f"{100 * run['evaluated_redundantly']:.1f} %", f"{run['payload_bytes_per_rank'] / 1024:.1f}"]
        for temperature, budget, found in lines_of(sound(facts["runs"])) for run in found
    ]  # fmt: skip
    columns = ["mode", "nodes per rank", "ranks", "tokens/step", "nodes/step", "largest shard", "redundant", "KiB/rank"]
    return Table(workload(facts), columns, rows)


def speedup(facts: Json) -> Table:
    """How many times fewer steps than on one rank."""
    runs = sound(facts["runs"])
    ranks = sorted(distinct(runs, "num_ranks"))
    rows = [
        [mode(temperature), str(budget), *(f"{ratios[r]:.2f}x" if r in ratios else "" for r in ranks)]
        for temperature, budget, ratios in ratios_of(runs)
    ]
    columns = ["mode", "nodes per rank", *(f"{rank} rank{'s' if rank > 1 else ''}" for rank in ranks)]
    return Table("times fewer steps than on one rank", columns, rows)


def sources(facts: Json) -> Table:
    """Tokens per step by draft source and node budget."""
    runs = sound(facts["runs"])
    cells = {(run["temperature"], run["kind"], run["budget"]): f"{run['tokens_per_step']:.2f}" for run in runs}
    budgets = sorted(distinct(runs, "budget"))
    rows = [
        [mode(t), "both" if kind == "both" else f"{kind} only", *(cells.get((t, kind, b), "failed") for b in budgets)]
        for t in distinct(runs, "temperature")
        for kind in ("both", "trie", "window")
        if kind in distinct(runs, "kind")
    ]
    return Table(workload(facts), ["mode", "source", *(f"{budget} nodes" for budget in budgets)], rows)


def limits(facts: Json) -> Table:
    """How near the steps come to copying the longest phrase in each, where that was counted."""
    rows = [
        [mode(run["temperature"]), run["kind"], str(run["budget"]), f"{run['tokens_per_step']:.2f}", *_limit(run),
         *_loops(run), *_limit(run.get("without_loops", {}))]
        for run in sound(facts["runs"]) if "share_of_limit" in run
    ]  # fmt: skip
    columns = ["mode", "source", "nodes", "tokens/step", "limit", "of it", "looping", "without", "limit", "of it"]
    return Table(f"{workload(facts)}, beside the limit of longest phrases", columns, rows)


def data_sets(facts: Json, is_straight: bool = False) -> Table:
    """Tokens per step on recorded texts of several data sets, by nodes; of outputs without loops if `is_straight`."""
    runs, rows = sound(facts["runs"]), []
    budgets = sorted(distinct(runs, "budget"))
    for data in distinct(runs, "data"):
        for temperature in distinct(runs, "temperature"):
            found = {run["budget"]: run for run in runs if (run["data"], run["temperature"]) == (data, temperature)}
            if not found:
                continue
            counted = {budget: run.get("without_loops", {}) if is_straight else run for budget, run in found.items()}
            first = next(iter(counted.values()))
            values = [f"{run['tokens_per_step']:.2f}" if run else "" for run in map(counted.get, budgets)]
            looping = [] if is_straight else [_loops(next(iter(found.values())))[0]]
            rows.append([data, mode(temperature), *looping, _limit(first)[0], *values])
    columns = ["data", "mode", *([] if is_straight else ["looping"]), "limit"]
    title = "tokens per step by drafted nodes" + (", outputs without loops" if is_straight else "")
    return Table(title, [*columns, *(f"{budget} nodes" for budget in budgets)], rows)


def replayed_peers(facts: Json) -> Table:
    """Tokens per step of peers on the same texts; in brackets of outputs without loops."""
    runs = sound(facts.get("peers", []))
    places = list(dict.fromkeys((run["data"], run["temperature"]) for run in runs))
    cells = {(run["peer"], run["data"], run["temperature"]): run for run in runs}
    rows = []
    for peer in distinct(runs, "peer"):
        found = [cells[peer, *place] for place in places if (peer, *place) in cells]
        rows.append([peer, *(_with_straight(run) for run in found)])
    columns = [f"{data}, {mode(temperature)}" for data, temperature in places]
    return Table("peers that draft from text, on the same texts (without loops)", ["tokens per step", *columns], rows)


def _with_straight(run: Json) -> str:
    without = run.get("without_loops")
    return f"{run['tokens_per_step']:.2f}" + (f" ({without['tokens_per_step']:.2f})" if without else "")


def largest_of_both(facts: Json) -> list[Json]:
    """The runs with all sources, or else with those there are, and the largest budget."""
    kinds = distinct(sound(facts["runs"]), "kind")
    kind = next((each for each in ("both", "trie", "window") if each in kinds), "")
    runs = [run for run in sound(facts["runs"]) if run["kind"] == kind]
    return [run for run in runs if run["budget"] == max(each["budget"] for each in runs)]


def depth_group(last: int) -> str:
    """The depths above half of `last` and up to it."""
    return str(last) if last < 4 else f"{last // 2 + 1}-{last}"


def share(count: Json | None) -> float:
    """Accepted of 100 drafted; not a number where too few were drafted to tell."""
    return 100 * count["accepted"] / count["drafted"] if count and count["drafted"] >= FEWEST else float("nan")


def depths(facts: Json) -> Table:
    """What each source drafted and what of it was accepted, by depth, for the largest budget of all sources."""
    order = list(SOURCES)
    runs = largest_of_both(facts)
    rows = [
        [mode(run["temperature"]), SOURCES[each["source"]], depth_group(each["up_to_depth"]),
         f"{each['drafted'] / run['num_steps']:.2f}", f"{each['accepted'] / run['num_steps']:.3f}",
         f"{share(each):.1f} %" if each["drafted"] >= FEWEST else f"{each['accepted']} of {each['drafted']}"]
        for run in runs
        for each in sorted(run["by_depth"], key=lambda each: (order.index(each["source"]), each["up_to_depth"]))
    ]  # fmt: skip
    which = {"both": "window and trie together", "trie": "the trie", "window": "the window"}
    title = f"{workload(facts)}, {which[runs[0]['kind']]}, {runs[0]['budget']} nodes" if runs else ""
    return Table(title, ["mode", "source", "depth", "drafted/step", "accepted/step", "share accepted"], rows)


def replay_runs(facts: Json) -> list[tuple[Json, str]]:
    """Runs of a replay result, which may be a single one, and what was known before each."""

    def setting(run: Json) -> str:
        if run["num_warm_tokens"] and not run["warm"]:
            return f"history of {run['num_warm_tokens'] / 1e6:g}M tokens"
        return "warm" if run["warm"] else "cold"

    return [(run, setting(run)) for run in sound(facts.get("runs", [facts]))]


def replay(facts: Json) -> Table:
    """Drafting on recorded completions; runs with a long history only time queries."""
    rows = [
        [Path(run["traces"]).name, setting, str(run["budget"]), str(run["num_tasks"]),
         f"{run['tokens_per_step']:.2f}" if setting in ("cold", "warm") else "", *_limit(run), *_loops(run),
         f"{run['drafted_per_step']:.1f}", f"{run['draft_ms_per_step']:.3f}", f"{run['draft_ms_p99']:.3f}"]
        for run, setting in replay_runs(facts)
    ]  # fmt: skip
    columns = [
        "traces",
        "setting",
        "nodes",
        "tasks",
        "tokens/step",
        "limit",
        "of it",
        "looping",
        "without",
        "drafted/step",
    ]
    return Table("recorded completions", [*columns, "draft ms", "draft ms, p99"], rows)


def _limit(run: Json) -> list[str]:
    """Tokens per step of the longest phrases, and how near the run comes to it."""
    limit = run.get("limit_tokens_per_step")
    return ["", ""] if limit is None else [f"{limit:.2f}", f"{100 * run['share_of_limit']:.1f} %"]


def _loops(run: Json) -> list[str]:
    """The share of outputs that repeat themselves, and tokens per step of the others, where it was counted."""
    share = run.get("looping_outputs")
    without = run.get("without_loops", {}).get("tokens_per_step")
    return ["" if share is None else f"{100 * share:.0f} %", "" if without is None else f"{without:.2f}"]


def ends(facts: Json) -> Table:
    """Where the steps of a replay end, and why the token that came was not drafted."""
    rows = [
        [
            Path(run["traces"]).name,
            setting,
            each["at"],
            each["cause"],
            str(each["steps"]),
            f"{100 * each['share']:.1f} %",
        ]
        for run, setting in replay_runs(facts)
        for each in run.get("ends", ())
    ]
    return Table("where steps end", ["traces", "setting", "at", "the token that came", "steps", "share"], rows)


def peers(facts: Json) -> Table:
    """lpr beside its peers: tokens per step by temperature, and seconds beside transformers' own plain decoding."""
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
