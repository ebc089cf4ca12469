"""Tables of what took how long: completions, steps and their parts, real ranks."""

from __future__ import annotations

from pathlib import Path

from benchmarks.result_tables.parts import Json, Table, distinct, mode, sound, workload


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
