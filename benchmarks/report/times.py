"""Results that were timed; they belong to the machine that the result names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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

OVER_PLAIN = "times as fast as plain decoding"


def decode(facts: Json) -> list[Part]:
    """Wall clock against transformers."""
    found = sound(facts["results"])
    title = f"{workload(facts)}, greedy, {facts['device']}, {facts['dtype'].removeprefix('torch.')}"
    table = tabulate(
        title, found,
        {
            "": "{name}", "median s": "{median_seconds:.3f}", "over transformers": "{speedup_over_transformers:.2f}x",
            "over lpr plain": "{speedup_over_autoregressive:.2f}x", "tokens/step": optional("{tokens_per_step:.2f}"),
            "prompts with other tokens": "{prompts_with_other_tokens}",
        },
    )  # fmt: skip
    bars = [
        (each["name"], each["speedup_over_transformers"], f"{each['speedup_over_transformers']:.2f}x") for each in found
    ]
    best = max((bar for bar in bars if bar[0].startswith("lpr")), key=lambda bar: bar[1])
    headline = f"{title}: {best[0]} is {best[2]} as fast as transformers' greedy decoding."
    return [Part(table, [Bars("", "times as fast as transformers' greedy decoding", bars, "lpr auto")], headline)]


def adaptive(facts: Json) -> list[Part]:
    """Automatic sizes against a grid of fixed ones, and where drafts cannot help."""
    races = sound(facts["races"])
    entries = [
        {**each, "race": race_title(race), "best": " (best fixed)" * (each["name"] == race["best_fixed"])}
        for race in races
        for each in race["results"]
    ]
    table = tabulate(
        "against fixed sizes", entries,
        {
            "race": "{race}", "contestant": "{name}{best}", "tokens/s": "{tokens_per_second:.1f}",
            "over plain": "{over_plain:.2f}x", "tokens/step": "{tokens_per_step:.2f}",
            "nodes/step": "{nodes_per_step:.1f}",
        },
    )  # fmt: skip
    panels = [
        Bars(race_title(race), OVER_PLAIN, [
            (each["name"], each["over_plain"], f"{each['over_plain']:.2f}x") for each in race["results"]], "auto")
        for race in races
    ]  # fmt: skip
    found = "; ".join(f"{race_title(race)}: {race['auto_over_best_fixed']:.2f}x" for race in races)
    traps = [
        (each["case"], over_plain, f"{over_plain:.3f}x")
        for each in sound(facts["traps"])
        for over_plain in [next(one["over_plain"] for one in each["results"] if one["name"] == "auto")]
    ]
    lost = Table("where drafts cannot help", ["", "over plain"], [[name, text] for name, _, text in traps])
    return [
        Part(table, panels, f"Automatic sizes relative to the best fixed size, chosen afterwards. {found}."),
        Part(lost, [Bars("", OVER_PLAIN, traps)] if traps else []),
    ]


def race_title(race: Json) -> str:
    """Data and temperature of a race."""
    return f"{race['data']}, {mode(race['temperature'])}"


def step(facts: Json) -> list[Part]:
    """Medians of the parts of a step."""
    runs = sound(facts["runs"])
    names = list(runs[0]["median_ms"]) if runs else []
    columns = [f"{run['budget']} nodes, {mode(run['temperature'])}" for run in runs]
    cells = [[name, *(f"{run['median_ms'][name]:.3f}" for run in runs)] for name in names]
    where = f"{', '.join(distinct(runs, 'device'))}, CPU threads: {', '.join(map(str, distinct(runs, 'threads')))}"
    bars = [
        (column, run["median_ms"]["step"], "{step:.1f}, host alone {host alone:.2f}".format_map(run["median_ms"]))
        for column, run in zip(columns, runs, strict=True)
    ]  # fmt: skip
    picture = [Bars("", "milliseconds of a step, processor time", bars)] if bars else []
    return [Part(Table(f"medians; {where}", ["median ms", *columns], cells), picture, "Milliseconds of a step.")]


def step_times(facts: Json) -> list[Part]:
    """t(n), the time of a step with n nodes, of every table of step times in a result."""
    series = dict(_tables(facts))
    if not series:
        raise KeyError("nodes, rows")
    nodes = sorted({count for points in series.values() for count, _ in points})
    rows = [
        [name, *(f"{dict(points)[n]:.2f}" if n in dict(points) else "" for n in nodes)]
        for name, points in series.items()
    ]
    device = str(facts.get("gpu") or facts.get("cpu", ""))
    table = Table(device, ["milliseconds at", *(f"{n:g}" for n in nodes)], rows)
    picture = Lines("", "n, tokens that a step evaluates", "t(n), milliseconds", series, None)
    words = "; ".join(f"{name}: {points[0][1]:.2f} to {points[-1][1]:.2f} ms" for name, points in series.items())
    return [Part(table, [picture], f"From the fewest to the most nodes: {words}.")]


def gpu_check(facts: Json) -> list[Part]:
    """What a GPU's ids and bits equal, tokens per second, and its step times, as far as they were measured."""
    parts, found = [], facts.get("sections", {})
    correct = found.get("correctness", {})
    forms = {form: correct[form]["equal_to_cpu"] for form in ("graphs", "eager") if form in correct}
    if forms:
        kinds = sorted({kind for equal in forms.values() for kind in equal})
        cells = [[form, *(f"{equal[kind]} of {correct['prompts']}" for kind in kinds)] for form, equal in forms.items()]
        words = f"{correct['prompts']} prompts x {correct['max_new_tokens']} tokens, float32, {facts['gpu']}"
        parts.append(Part(Table(f"ids equal to the CPU's: {words}", ["", *kinds], cells), [], "Ids on a GPU."))
    if bits := found.get("exact", {}):
        cells = [
            [f"{mode}, {way}", "{outputs_that_differ} of {prompts}".format_map(each),
             "{logits_that_differ} of {logits_compared}".format_map(each)]
            for mode in ("usual", "exact") for way, each in bits.get(mode, {}).items()
        ]  # fmt: skip
        words = f"compared with plain decoding, {bits['dtype'].removeprefix('torch.')}, {facts['gpu']}"
        parts.append(Part(Table(words, ["", "outputs that differ", "logits that differ"], cells), [], "Bits on a GPU."))
    if rates := {name: each for name, each in found.get("end_to_end", {}).items() if isinstance(each, dict)}:
        columns: dict[str, Column] = {
            "": "{name}", "tokens/s": "{tokens_per_s:.0f}", "tokens/step": optional("{tokens_per_step:.2f}")
        }  # fmt: skip
        records = [{"name": name, **each} for name, each in rates.items()]
        table = tabulate(f"the bundled model, one request at a time, {facts['gpu']}", records, columns)
        bars = [(name, each["tokens_per_s"], f"{each['tokens_per_s']:.0f}") for name, each in rates.items()]
        parts.append(Part(table, [Bars("", "tokens per second", bars)], "Tokens per second on a GPU."))
    if not parts or any(True for _ in _tables(facts)):
        parts += step_times(facts)
    return parts


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


def host(facts: Json) -> list[Part]:
    """Host time of a step on a paced device."""
    names = ("host_ms", "host_ms_p99", "draft_ms", "inputs_ms", "hidden_ms", "after_ms")

    def case(row: Json) -> str:
        words = f"{row['costs']}, batch {row['batch']}, {row['nodes']} nodes, lp {row['lp']}"
        return f"{words}, {mode(row['temperature'])}{', window' if row['window'] else ''}"

    columns: dict[str, Column] = {
        "case": case,
        "efficiency": "{efficiency:.3f}",
        **{name: f"{{{name}:.3f}}" for name in names},
    }
    rows = [*facts["rows"], *facts["flat_rows"]]
    return [Part(tabulate(f"host time on the critical path, {facts['core']} core", rows, columns))]


def fleet(facts: Json) -> list[Part]:
    """Wall clock of real ranks; a run that failed has no figures."""
    columns: dict[str, Column] = {
        "data": "{data}", "mode": how_sampled, "lp x tp, nodes": "{mesh} {budget_per_rank}",
        "tokens/s": optional("{tokens_per_second:.1f}"), "speed-up": optional("{speedup_over_autoregressive:.2f}x"),
        "tokens/step": optional("{tokens_per_step:.2f}"), "ms/step": optional("{ms_per_step:.2f}"),
        "bytes/rank": optional("{payload_bytes_per_rank}"), "of ceiling": optional("{part_of_ceiling:.0%}"),
        "tokens equal": "{equal_to_autoregressive}", "error": lambda run: run["error"] or "",
    }  # fmt: skip
    return [Part(tabulate(f"{facts['max_new_tokens']} tokens", facts["runs"], columns))]
