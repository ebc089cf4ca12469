"""Results of services and engines that serve several requests."""

from __future__ import annotations

from benchmarks.report.parts import Column, Json, Part, Table, distinct, how_sampled, optional, tabulate, workload


def serve(facts: Json) -> list[Part]:
    """How long clients wait, by load and setting."""

    def times(key: str) -> str:
        return f"{{{key}[p50]:.0f}} / {{{key}[p90]:.0f}} / {{{key}[p99]:.0f}}"

    title = f"{workload(facts)}, lp {facts['lp']}, {facts['batch']} slots; milliseconds as p50 / p90 / p99; goodput: "
    title += f"requests/s with the first token within {facts['ttft_ms']:g} ms and {facts['token_ms']:g} ms per token"
    columns: dict[str, Column] = {
        "load": "{case}", "setting": "{name}", "first token": optional(times("ttft_ms")),
        "between tokens": optional(times("between_tokens_ms")), "end to end": optional(times("end_to_end_ms")),
        "tokens/step": optional("{tokens_per_step:.2f}"), "tokens/s": "{tokens_per_second:.0f}",
        "goodput": "{goodput_per_second:.2f}", "cancelled": "{cancelled_before_a_token} of {requests}",
    }  # fmt: skip
    cases = list(dict.fromkeys(run["case"] for run in facts["runs"]))
    return [Part(tabulate(title, sorted(facts["runs"], key=lambda run: cases.index(run["case"])), columns))]


def soak(facts: Json) -> list[Part]:
    """The outcomes of a soak's requests, what other clients saw, and the memory and files of its processes."""
    verdict = [[name, str(facts[name])] for name in ("minutes", "requests", "wrong", "status_5xx", "exit_code")]
    verdict += [[f"leak: {name}", f"{value:g}"] for name, value in facts["leaks"].items()]
    for name, found in facts.get("livez", {}).items():
        if "p50_ms" in found:
            times = "{p50_ms} / {p99_ms} / {max_ms} ms".format_map(found)
            verdict.append([f"/livez {name}: p50 / p99 / longest", times])
    verdict += [[f"first token: {name}", f"{value:g}"] for name, value in facts.get("first_token", {}).items() if value]
    hostile = [
        [name, ", ".join(f"{what} x {n}" for what, n in found.items()) if isinstance(found, dict) else str(found)]
        for name, found in facts["hostile"].items()
    ]
    first, last = facts["memory_mb"]["first"], facts["memory_mb"]["last"]
    held = [
        [str(pid), f"{first[pid]:.0f}", f"{last[pid]:.0f}", f"{grown:g}", str(facts["files"]["last"].get(pid, ""))]
        for pid, grown in facts["memory_mb"]["growth"].items() if pid in first and pid in last
    ]  # fmt: skip
    return [
        Part(Table("soak", ["", ""], verdict)),
        Part(Table("hostile clients", ["what", "times"], hostile)),
        Part(Table("processes", ["id", "MB at first", "MB at last", "growth", "open files at last"], held)),
    ]


def hostile(facts: Json) -> list[Part]:
    """By probe, what each service answers and what it costs its other clients."""
    names = distinct(facts["runs"], "service")
    columns = ["attack", "probe", *(f"{name}: {what}" for name in names for what in ("client sees", "/livez", "MB"))]
    by_probe: dict[str, dict[str, Json]] = {}
    for run in facts["runs"]:
        by_probe.setdefault(run["probe"], {})[run["service"]] = run
    rows = []
    for runs in by_probe.values():
        first = next(iter(runs.values()))
        cells = [cell for name in names for cell in (_seen(runs[name]) if name in runs else ("", "", ""))]
        rows.append([first["item"], f"{first['probe']}: {first['what']}", *cells])
    return [Part(Table("Probes: longest stall of /livez in ms, growth of the front in MB", columns, rows))]


def _seen(run: Json) -> tuple[str, str, str]:
    """What the client sees, the stall and the memory of a probe."""
    seen = [what if count == run["times"] else f"{what} x {count}" for what, count in run["seen"].items()]
    seen += [f"waits {run['neighbour_waits_s']:g} s"] if "neighbour_waits_s" in run else []
    seen += [f"**service died, code {run['died']}**"] if run["died"] is not None else []
    stall = "died" if run["died"] is not None else f"{run['livez'].get('max_ms', float('nan')):.0f}"
    failed = run["livez"].get("failed", 0)
    return ", ".join(seen), stall + (f" ({failed} failed)" if failed else ""), f"{run['front_mb']:.0f}"


def chaos(facts: Json) -> list[Part]:
    """Losses, streams, pauses and leaks of a chaos run."""
    names = (
        "kills", "stops", "all_at_once", "streams", "failed", "different", "pause_p50_s", "pause_p99_s",
        "pause_with_survivors_p99_s",
    )  # fmt: skip
    rows = [[name, str(facts[name])] for name in names]
    rows += [[name, str(count)] for name, count in facts["events"].items()]
    rows += [[f"leaked {name}", str(count)] for name, count in facts["leaks"].items()]
    return [Part(Table(f"{facts['ranks']} ranks, {facts['minutes']:g} minutes", ["what", "count"], rows))]


def homes(facts: Json) -> list[Part]:
    """What ranks evaluate and hold per token, by policy and load."""
    columns: dict[str, Column] = {
        "ranks, load, policy": "{num_ranks}, {load}, {policy}", "mode": how_sampled,
        "tokens/step": "{tokens_per_step:.2f}", "busiest/token": "{busiest_per_token:.2f}",
        "table ms/token": "{table_ms_per_token:.3f}", "K/V copies": "{kv_copies:.2f}",
        "homes/request": "{homes_per_request:.2f}", "host ms/step": optional("{host_ms_per_step:.2f}"),
    }  # fmt: skip
    title = f"home ranks, {facts['data']}, {facts['model']} model, times of {facts['times']}"
    return [Part(tabulate(title, facts["runs"], columns))]
