"""Tables of services and engines that serve several requests."""

from __future__ import annotations

from benchmarks.result_tables.parts import Json, Table, distinct, mode, sound, workload


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
