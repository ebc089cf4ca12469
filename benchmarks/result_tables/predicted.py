"""Tables of predictions, and of what they are checked by."""

from __future__ import annotations

from benchmarks.result_tables.parts import Json, Table, mode


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
