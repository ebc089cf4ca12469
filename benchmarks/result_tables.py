"""Results as tables of text: what a benchmark shows on stderr and what the report shows beside its pictures.

`tables_of(result)` is all that others need: the tables of a known benchmark, or every value of an unknown one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]

SOURCES = {
    "trie": "trie",
    "shared_trie": "shared trie",
    "pool": "n-gram pool",
    "window": "window",
    "recycled": "recycled",
}
FEWEST = 30
"""Drafted nodes below which a share says nothing."""
CIRCUMSTANCES = {
    "benchmark", "date", "command", "commit", "cpu", "gpu", "threads", "python", "torch", "transformers", "note",
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """A title, and cells of text in columns."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables_of(facts: Json) -> list[Table]:
    """The tables of a result."""
    make = TABLES.get(str(facts.get("benchmark", "")))
    return make(facts) if make is not None else every_value(facts)


def failures(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Every entry of a result that is marked as failed: what it is, and why it failed."""
    if isinstance(value, dict):
        name = " ".join(str(value[key]) for key in ("name", "case", "heads", "kind", "num_ranks") if key in value)
        where = f"{where} {name}".strip()
        if value.get("failed"):  # a reason; or a count, which may be 0
            yield where, str(value["failed"])
        for key, each in value.items():
            # Words that only say that a list follows are left out.
            yield from failures(each, where if isinstance(each, list) else f"{where} {key}".strip())
    elif isinstance(value, list):
        for each in value:
            yield from failures(each, where)


def sound(entries: Sequence[Json]) -> list[Json]:
    """Those that did not fail."""
    return [each for each in entries if "failed" not in each]


def mode(temperature: float | None) -> str:
    """How tokens are chosen, in words."""
    if temperature is None:
        return "plain decoding"
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def workload(facts: Json) -> str:
    """The prompts of a result, in words."""
    length = f" x {facts['max_new_tokens']} tokens" if "max_new_tokens" in facts else ""
    return f"{facts['num_prompts']} prompts of {facts['data'].rsplit('.', 1)[0]}{length}"


def distinct(entries: Sequence[Json], key: str) -> list[Any]:
    """The different values of `key`, in order of appearance."""
    return list(dict.fromkeys(each[key] for each in entries))


# Counted steps.


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


def largest_of_both(facts: Json) -> list[Json]:
    """The runs with all sources and the largest budget."""
    runs = [run for run in sound(facts["runs"]) if run["kind"] == "both"]
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
    title = f"{workload(facts)}, window and trie together, {runs[0]['budget']} nodes" if runs else ""
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
         f"{run['tokens_per_step']:.2f}" if setting in ("cold", "warm") else "", *_limit(run),
         f"{run['drafted_per_step']:.1f}", f"{run['draft_ms_per_step']:.3f}", f"{run['draft_ms_p99']:.3f}"]
        for run, setting in replay_runs(facts)
    ]  # fmt: skip
    columns = ["traces", "setting", "nodes", "tasks", "tokens/step", "limit", "of it", "drafted/step", "draft ms"]
    return Table("recorded completions", [*columns, "draft ms, p99"], rows)


def _limit(run: Json) -> list[str]:
    """Tokens per step of the longest phrases, and how near the run comes to it."""
    limit = run.get("limit_tokens_per_step")
    return ["", ""] if limit is None else [f"{limit:.2f}", f"{100 * run['share_of_limit']:.0f} %"]


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


# Time.


def decode(facts: Json) -> Table:
    """Wall clock against transformers."""
    rows = [
        [each["name"], *(["failed"] * 5 if "failed" in each else [
            f"{each['median_seconds']:.3f}", f"{each['speedup_over_transformers']:.2f}x",
            f"{each['speedup_over_autoregressive']:.2f}x",
            f"{each['tokens_per_step']:.2f}" if each["tokens_per_step"] else "",
            str(each["prompts_with_other_tokens"]),
        ])]
        for each in facts["results"]
    ]  # fmt: skip
    title = f"{workload(facts)}, greedy, {facts['device']}, {facts['dtype'].removeprefix('torch.')}"
    columns = ["", "median s", "over transformers", "over lpr plain", "tokens/step", "prompts with other tokens"]
    return Table(title, columns, rows)


def race_title(race: Json) -> str:
    """Data and temperature of a race."""
    return f"{race['data']}, {mode(race['temperature'])}"


def races(facts: Json) -> Table:
    """Automatic sizes against a grid of fixed ones."""
    rows = [
        [race_title(race), each["name"] + (" (best fixed)" if each["name"] == race["best_fixed"] else ""),
         f"{each['tokens_per_second']:.1f}", f"{each['over_plain']:.2f}x", f"{each['tokens_per_step']:.2f}",
         f"{each['nodes_per_step']:.1f}"]
        for race in sound(facts["races"]) for each in race["results"]
    ]  # fmt: skip
    columns = ["race", "contestant", "tokens/s", "over plain", "tokens/step", "nodes/step"]
    return Table("against fixed sizes", columns, rows)


def over_plain(case: Json) -> float:
    """Speed of automatic sizes over plain decoding in a trap."""
    return float(next(each["over_plain"] for each in case["results"] if each["name"] == "auto"))


def traps(facts: Json) -> Table:
    """Automatic sizes where drafts must fail."""
    rows = [[each["case"], f"{over_plain(each):.3f}x"] for each in sound(facts["traps"])]
    return Table("where drafts must fail", ["", "over plain"], rows)


def sizes_title(run: Json) -> str:
    """Text and start of a run of benchmarks.sizes."""
    return f"{Path(run['traces']).stem}, {'warm' if run['num_warm_tasks'] else 'cold'}"


def sizes(facts: Json) -> Table:
    """Automatic sizes against the best fixed one on recorded texts, under given step times."""
    rows = [
        [sizes_title(run), race["costs"], str(race["best_fixed"]), f"{race['best_fixed_over_plain']:.2f}x",
         f"{race['auto']['over_plain']:.2f}x", f"{race['auto']['nodes_per_step']:.1f}",
         f"{race['auto_over_best_fixed']:.2f}"]
        for run in sound(facts["runs"]) for race in run["races"]
    ]  # fmt: skip
    columns = ["text", "step times", "best fixed size", "over plain", "automatic, over plain", "nodes/step", "ratio"]
    return Table("on recorded texts", columns, rows)


def host(facts: Json) -> Table:
    """Host time beside a paced device."""
    names = ["host_ms", "host_ms_p99", "draft_ms", "inputs_ms", "hidden_ms", "after_ms"]
    rows = [
        [f"{row['costs']}, batch {row['batch']}, {row['nodes']} nodes, lp {row['lp']}, {mode(row['temperature'])}"
         f"{', window' if row['window'] else ''}", f"{row['efficiency']:.3f}", *(f"{row[name]:.3f}" for name in names)]
        for row in [*facts["rows"], *facts["flat_rows"]]
    ]  # fmt: skip
    title = f"host time on the critical path, {facts['core']} core"
    return Table(title, ["case", "efficiency", *(name.replace("_", " ") for name in names)], rows)


def step_parts(facts: Json) -> Table:
    """Where the time of a step goes."""
    runs = sound(facts["runs"])
    columns = [f"{run['budget']} node{'s' if run['budget'] > 1 else ''}, {mode(run['temperature'])}" for run in runs]
    rows = [[key, *(f"{run['median_ms'][key]:.3f}" for run in runs)] for key in (runs[0]["median_ms"] if runs else ())]
    where = f"{', '.join(distinct(runs, 'device'))}, CPU threads: {', '.join(map(str, distinct(runs, 'threads')))}"
    return Table(f"{where}, medians", ["median ms", *columns], rows)


def step_costs(facts: Json) -> Table:
    """t(n) by cached length."""
    costs = facts.get("step_times", [])
    counts = sorted({int(n) for row in costs for n in row["ms"]})
    rows = [[str(n), *(f"{row['ms'][str(n)]:.2f}" if str(n) in row["ms"] else "" for row in costs)] for n in counts]
    rows.append(["critical decoding length", *(str(row["critical_length"]) for row in costs)])
    return Table("t(n), ms", ["n", *(f"{row['kv']} cached" for row in costs)], rows)


def collective(facts: Json) -> Table:
    """The all-gather between ranks that do nothing else."""
    found = facts.get("collective", {})
    rows = [[str(r["bytes"]), f"{r['median_ms']:.3f}", f"{r['p99_ms']:.3f}"] for r in found.get("runs", [])]
    title = f"all-gather, {found.get('num_ranks', 0)} ranks, {found.get('backend', 'failed')}"
    return Table(title, ["bytes per rank", "median ms", "p99 ms"], rows)


def fleet(facts: Json) -> Table:
    """Wall clock of real ranks; a run that failed has no figures."""

    def cells(run: Json) -> list[str]:
        name = [run["data"], mode(run["temperature"]), f"{run['mesh']} {run['budget_per_rank']}"]
        if run["error"] is not None:
            return [*name, *[""] * 6, "failed"]

        def cell(key: str, form: str) -> str:
            return form.format(run[key]) if key in run else "?"

        plain = run["budget_per_rank"] == "autoregressive"
        same = "?" if run["equal_to_autoregressive"] is None else "same"
        return [
            *name,
            cell("tokens_per_second", "{:.1f}"),
            cell("speedup_over_autoregressive", "{:.2f}x"),
            cell("tokens_per_step", "{:.2f}"),
            cell("ms_per_step", "{:.2f}"),
            f"{run['payload_bytes_per_rank'] / 1024:.1f}",
            "" if plain else cell("part_of_ceiling", "{:.0%}"),
            "baseline" if plain else same,
        ]

    columns = ["data", "mode", "lp x tp, nodes", "tokens/s", "speed-up", "tokens/step", "ms/step", "KiB/rank"]
    rows = [cells(run) for run in facts["runs"]]
    return Table(f"{facts['max_new_tokens']} tokens", [*columns, "of ceiling", "tokens"], rows)


# The service.


def loads(facts: Json) -> Table:
    """How long clients of the service wait, by load and setting."""

    def times(run: Json, key: str) -> str:
        return " / ".join(f"{run[key][name]:.0f}" for name in ("p50", "p90", "p99")) if run[key] else ""

    rows = [
        [run["case"], run["name"], times(run, "ttft_ms"), times(run, "between_tokens_ms"), times(run, "end_to_end_ms"),
         f"{run['tokens_per_step']:.2f}" if run["tokens_per_step"] else "", f"{run['tokens_per_second']:.0f}",
         f"{run['goodput_per_second']:.2f}", f"{run['cancelled_before_a_token']} of {run['requests']}"]
        for run in sorted(sound(facts["runs"]), key=lambda run: distinct(facts["runs"], "case").index(run["case"]))
    ]  # fmt: skip
    title = f"{workload(facts)}, lp {facts['lp']}, {facts['batch']} slots; milliseconds as p50 / p90 / p99; goodput: "
    title += f"requests/s with the first token within {facts['ttft_ms']:g} ms and {facts['token_ms']:g} ms per token"
    columns = ["load", "setting", "first token", "between tokens", "end to end", "tokens/step", "tokens/s", "goodput"]
    columns.append("cancelled unseen")
    return Table(title, columns, rows)


def simulated_loads(facts: Json) -> Table:
    """What the planner's simulation says of a service, beside what was measured."""
    names = {"ttft_ms_p50": "first token, ms", "end_to_end_ms_p50": "end to end, ms", "tokens_per_second": "tokens/s"}

    def cell(run: Json, key: str) -> str:
        measured, simulated = run["measured"][key], run["simulated"][key]
        return f"{measured:.0f} / {simulated:.0f} ({run['simulated_over_measured'][key]:.2f})"

    rows = [[run["case"], run["name"], *(cell(run, key) for key in names)] for run in sound(facts["runs"])]
    return Table(
        f"measured / simulated (ratio), medians; {facts['within']}; load average {min(facts['load_average'])} to "
        f"{max(facts['load_average'])}",
        ["load", "temperature", *names.values()],
        rows,
    )


def soak(facts: Json) -> list[Table]:
    """What became of a soak's requests, and what its processes hold."""
    verdict = [[name, str(facts[name])] for name in ("minutes", "requests", "wrong", "status_5xx", "exit_code")]
    verdict += [[f"leak: {name}", f"{value:g}"] for name, value in facts["leaks"].items()]
    hostile = [[name, str(count)] for name, count in facts["hostile"].items()]
    first, last = facts["memory_mb"]["first"], facts["memory_mb"]["last"]
    held = [
        [str(pid), f"{first[pid]:.0f}", f"{last[pid]:.0f}", f"{grown:g}", str(facts["files"]["last"].get(pid, ""))]
        for pid, grown in facts["memory_mb"]["growth"].items() if pid in first and pid in last
    ]  # fmt: skip
    return [
        Table("soak", ["", ""], verdict),
        Table("hostile clients", ["what", "times"], hostile),
        Table("processes", ["id", "MB at first", "MB at last", "growth", "open files at last"], held),
    ]


def shared_drafts(facts: Json) -> list[Table]:
    """What replicas gain by each other's outputs, and what a stream and a lost store cost."""
    made, drafting = facts["stream"], facts["drafting"]
    rows = [
        [run["case"], *(f"{run[f'{name}_tokens_per_step']:.2f}" for name in ("cold", "second", "alone"))]
        for run in drafting["runs"]
    ]
    title = f"tokens per step with {facts['nodes']} nodes; learnt from the other replica after "
    title += f"{drafting['learnt_after_s_median']:g} s (at most {drafting['learnt_after_s_max']:g} s)"
    memory = [[f"{each['entries']:,}", f"{each['mb']:.0f}"] for each in made["memory"]]
    names = ("requests", "while_away", "failed_requests", "different", "shared_again_after_s", "slowest_s")
    lost = [[name.replace("_", " "), str(facts["restart"][name])] for name in names]
    return [
        Table(title, ["a request like one of another replica", "cold", "shared drafts", "warm by itself"], rows),
        Table(f"{made['learnt']:,} outputs learnt in {made['seconds']:g} s", ["outputs", "MB of the rank"], memory),
        Table("the store killed and started again under load", ["", ""], lost),
    ]


# Predictions.


def best_meshes(setting: Json) -> list[tuple[int, Json]]:
    """(GPUs, prediction of the fastest mesh of so many)."""
    found: dict[int, Json] = {}
    for each in setting["predictions"]:
        count = each["lp"] * each["tp"]
        if count not in found or each["tokens_per_second"]["mid"] > found[count]["tokens_per_second"]["mid"]:
            found[count] = each
    return sorted(found.items())


def predictions(gpu: str, facts: Json) -> Table:
    """Predicted tokens per second, the best mesh of each number of GPUs."""
    models = [each for each in facts["models"] if each["gpu"] == gpu]
    rows = [
        [model["model"], mode(setting["temperature"]), str(count), f"{each['lp']} x {each['tp']}",
         f"{each['tokens_per_second']['mid']:.0f}",
         f"{each['tokens_per_second']['low']:.0f} to {each['tokens_per_second']['high']:.0f}",
         f"{each['tokens_per_step']:.2f}" + ("?" if each["extrapolated"] else ""), str(each["drafted_nodes"]),
         *(f"{each['step_ms'][key]:.2f}" for key in ("forward", "tp", "lp", "host"))]
        for model in models for setting in model["settings"] for count, each in best_meshes(setting)
    ]  # fmt: skip
    columns = ["model", "mode", "GPUs", "lp x tp", "tokens/s", "range", "tokens/step", "nodes"]
    columns += [f"{part} ms" for part in ("forward", "tp", "lp", "host")]
    title = f"{gpu}, {models[0]['launch']}, {models[0]['kv']} cached tokens, the best mesh of each number of GPUs"
    return Table(title, columns, rows)


def checks_of(facts: Json) -> list[Json]:
    """Every real run that a prediction was compared with; `title`, and `published` is what was real."""
    published = [{**each, "title": f"{each['model']}, {each['num_gpus']} GPU{'s' * (each['num_gpus'] > 1)}"}
                 for each in facts["gpt_fast"]]  # fmt: skip
    own = [
        {**run, "published": run["measured"], "is_fitted": False,
         "title": f"here: {run['name']}, {run['processes']} process{'es' * (run['processes'] > 1)}"}
        for run in facts["runs"] or []
    ]  # fmt: skip
    return published + own


def check(facts: Json) -> Table:
    """Predictions of runs that are known."""
    rows = [
        [each["title"], f"{each['published']:.1f}", f"{each['predicted']:.1f}", f"{each['ratio']:.2f}",
         "yes" if each["is_fitted"] else "no"]
        for each in checks_of(facts)
    ]  # fmt: skip
    title = "the check: gpt-fast's published runs of plain decoding with tensor parallelism"
    title += ", and runs of the machine named below" if facts["runs"] else ""
    return Table(title, ["run", "real", "predicted", "ratio", "fitted to it"], rows)


# Anything else.


def every_value(facts: Json) -> list[Table]:
    """The single values of a result, and every list of records as a table."""
    values = [(key, value) for key, value in facts.items() if key not in CIRCUMSTANCES]
    name = str(facts.get("benchmark", ""))
    single = [[key, _cell(value)] for key, value in values if isinstance(value, str | int | float)]
    made = [Table(name, ["", ""], single)] if single else []
    for key, value in values:
        records = [value] if isinstance(value, dict) else value
        if isinstance(records, list) and records and all(isinstance(each, dict) for each in records):
            columns = list(dict.fromkeys(name for each in records for name in each))
            rows = [[_cell(each.get(name, "")) for name in columns] for each in records]
            made.append(Table(f"{name}: {key}", columns, rows))
    return made


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


def homes(facts: Json) -> Table:
    """What ranks evaluate and hold per token, by policy and load."""
    columns = ["ranks, load, policy", "tokens/step", "busiest/token", "table ms/token", "K/V copies", "homes/request",
               "host ms/step"]  # fmt: skip
    rows = [
        [
            f"{run['num_ranks']}, {run['load']}, {run['policy']} ({mode(run['temperature'])})",
            *(f"{run[name]:.2f}" for name in ("tokens_per_step", "busiest_per_token", "table_ms_per_token")),
            *(f"{run[name]:.2f}" for name in ("kv_copies", "homes_per_request")),
            f"{run['host_ms_per_step']:.2f}" if "host_ms_per_step" in run else "",
        ]
        for run in sound(facts["runs"])
    ]
    return Table(f"home ranks, {facts['data']}, {facts['model']} model, times of {facts['times']}", columns, rows)


def served(temperature: float, facts: Json) -> Table:
    """What requests get of simulated services, by load."""
    columns = [
        "load, service",
        "end to end, ms",
        "first token p50 / p99",
        "per token p50 / p99",
        "tokens/s",
        "goodput/s",
    ]
    rows = [
        [
            f"{run['load']:g}, {run['service']}",
            f"{run['end_to_end_ms']:.0f}",
            *(f"{run[name][0]:.3g} / {run[name][2]:.3g}" for name in ("first_token_ms", "per_token_ms")),
            f"{run['tokens_per_second']:.0f}",
            f"{run['goodput']:.3g}",
        ]
        for run in sound(facts["runs"])
        if run["temperature"] == temperature
    ]
    title = f"simulated, {facts['gpus']} {facts['machine']}, {facts['model']}, times of {facts['times']} (estimated)"
    return Table(f"{title}, {mode(temperature)}", columns, rows)


TABLES: dict[str, Callable[[Json], list[Table]]] = {
    "homes": lambda facts: [homes(facts)],
    "strong_scaling": lambda facts: [scaling(facts), speedup(facts)],
    "ablation": lambda facts: [sources(facts), depths(facts)],
    "replay": lambda facts: [replay(facts), *([ends(facts)] if ends(facts).rows else [])],
    "decode": lambda facts: [decode(facts)],
    "adaptive": lambda facts: [races(facts), traps(facts)],
    "sizes": lambda facts: [sizes(facts)],
    "host": lambda facts: [host(facts)],
    "step": lambda facts: [step_costs(facts), collective(facts), step_parts(facts)],
    "serve": lambda facts: [loads(facts)],
    "serve_simulated": lambda facts: [served(each, facts) for each in distinct(facts["runs"], "temperature")],
    "plan_service": lambda facts: [simulated_loads(facts)],
    "soak": soak,
    "shared_drafts": shared_drafts,
    "fleet": lambda facts: [fleet(facts)],
    "simulate": lambda facts: [check(facts), *(predictions(gpu, facts) for gpu in distinct(facts["models"], "gpu"))],
}
