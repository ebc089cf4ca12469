"""A soak of the service: hostile clients and well-formed requests, whose every answer is checked.

    python -m benchmarks.soak --minutes 10 --hostile 8

Hostile clients do all that benchmarks.hostile has probes for, picked at random, in processes of their own at nice 10:
other machines would do their work. For the first tenth of the time there are none.

* Answers to well-formed requests, with another key, must equal the texts of an engine in this process; the median time
  to the first token of a stream may grow to --first-token times that without hostile clients.
* A process asks /livez every 50 ms; the 99th percentile must be below --livez-p99 ms, and none may fail.
* Memory and open files of the front and the ranks are sampled every --sample seconds; growth counts from a tenth of the
  time on, when all caches are in use.

The last line is JSON: requests, `wrong` (well-formed requests not answered exactly), `status_5xx` (other than 503),
`livez`, `first_token`, `leaks` (requests left open, slots held, files, memory), and what each probe has seen. The exit
code is 1 if a limit is not held, a probe has seen what it should not, or a process died.
"""

from __future__ import annotations

import shlex
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console

from benchmarks.common import Options, Whole, progress, run_main
from benchmarks.hostile.attack import Attack, Plan, Seen, chosen
from benchmarks.hostile.livez import Livez, summary
from benchmarks.hostile.neighbours import KEY, KEYS, Tally, ask, attacked, first_tokens, make_cases
from benchmarks.processes.leaks import is_alive
from benchmarks.processes.services import Server
from lpr import bundled_model

LIVEZ_EVERY = 0.05
SLOTS = 16
RANK = "lpr.serve.ranks"
"""In the command line of every rank."""


@dataclass(frozen=True, kw_only=True)
class SoakOptions(Options):
    """Hostile clients and well-formed requests, whose every answer is checked."""

    minutes: float = 10.0  # Duration.
    model: str | None = None  # Folder or hub id; the bundled model if none is given.
    lp: Whole = 1  # Replicas of the service.
    seed: Whole = 0  # Seed of all clients.
    clients: Whole = 3  # Clients that send well-formed requests.
    hostile: Whole = 4  # Hostile clients, each a process.
    probes: tuple[str, ...] = ("all",)  # What they do: names of probes of benchmarks.hostile, or all.
    livez_p99: float = 100.0  # Milliseconds that the 99th percentile of /livez may take under attack.
    first_token: float = 2.0
    """How many times its time without hostile clients the median time to the first token may take."""
    pause: float = 0.0  # Mean seconds between requests.
    sample: float = 5.0  # Seconds between two samples.
    grow_mb: float = 100.0  # Growth of memory in MB that is not a leak.
    grow_files: Whole = 8  # Growth of open files that is not a leak.
    flags: str = ""  # Further flags of lpr.serve, in one word: --flags="--tp 2".


@dataclass(frozen=True)
class Sample:
    """Resources of the service's processes at one time, by process id."""

    megabytes: dict[int, float]  # Resident memory.
    files: dict[int, int]  # Open file descriptors.


def sample(process: psutil.Process) -> Sample:
    """Resources of the front and of its ranks now; other descendants, which compile grammars, come and go."""
    megabytes, files = {}, {}
    for each in (process, *process.children(recursive=True)):
        try:
            if each is process or RANK in " ".join(each.cmdline()):
                megabytes[each.pid] = round(each.memory_info().rss / 2**20, 1)
                files[each.pid] = each.num_fds()
        except psutil.Error:  # it has just ended
            continue
    return Sample(megabytes, files)


def left_open(service: Server, patience: float = 60.0) -> dict[str, float]:
    """Requests and share of the KV cache that a service still holds `patience` seconds after the last client."""
    headers = {"Authorization": f"Bearer {KEY}"}
    end = time.monotonic() + patience
    while True:
        state = httpx.get(service.url + "/readyz", timeout=30).json()
        text = httpx.get(service.url + "/metrics", timeout=30, headers=headers).text
        cache = next(line for line in text.splitlines() if line.startswith("vllm:kv_cache_usage_perc{"))
        held = {"running": state["running"], "waiting": state["waiting"], "cache": float(cache.split()[-1])}
        if not any(held.values()) or time.monotonic() > end:
            return held
        time.sleep(0.2)


def growth(samples: Sequence[Sample], what: str) -> dict[int, float]:
    """Growth of a number per process: median of the last fifth minus that of the second tenth of the samples."""
    tenth = max(1, len(samples) // 10)
    early, late = samples[tenth : 2 * tenth] or samples[:1], samples[-2 * tenth :]
    processes = set(getattr(early[0], what)) & set(getattr(late[-1], what))

    def median(part: Sequence[Sample], pid: int) -> float:
        return statistics.median([value[pid] for each in part if pid in (value := getattr(each, what))])

    return {pid: round(median(late, pid) - median(early, pid), 1) for pid in sorted(processes)}


def measure(options: SoakOptions, console: Console) -> dict[str, Any]:
    """Run the soak."""
    probes = [probe.name for probe in chosen(options.probes) if not probe.is_keyless]
    model = options.model or bundled_model()
    cases = make_cases(model, options.seed)
    tally, stop = Tally(), threading.Event()
    with tempfile.TemporaryDirectory() as name:
        flags = ["--model", model, "--lp", str(options.lp), "--max-batch-size", str(SLOTS), "--request-timeout", "300"]
        flags += ["--swap-space", "0.05"]  # GiB: K/V fills up to 4 of host memory, and would hide a leak
        flags += shlex.split(options.flags)
        with attacked(Path(name), flags, options.threads) as service:
            process = psutil.Process(service.pid)
            livez = Livez(service.url, LIVEZ_EVERY)
            threads = [
                threading.Thread(
                    target=ask, args=(service.url, cases, f"{options.seed} good {number}", options.pause, tally, stop)
                )
                for number in range(options.clients)
            ]
            for thread in threads:
                thread.start()
            seconds = 60 * options.minutes
            with progress(console, round(seconds), "soaking") as advance:
                samples = watch(process, 0.1 * seconds, options.sample, advance)
                attacked_at = time.monotonic()
                attacks = [
                    Attack(
                        Plan(
                            url=service.url,
                            key=KEYS[0],
                            other=KEYS[1],
                            probes=probes,
                            seed=f"{options.seed} bad {number}",
                            pause=options.pause,
                        )
                    )
                    for number in range(options.hostile)
                ]
                samples += watch(process, 0.9 * seconds, options.sample, advance)
            ended_at = time.monotonic()
            stop.set()
            for attack in attacks:
                attack.tell()
            seen = [attack.stop() for attack in attacks]
            for thread in threads:
                thread.join(320)
            asked = livez.asked()
            held = left_open(service)
            after = sample(process)
            died = not is_alive(process) or bool(set(samples[0].files) - set(after.files))
            code = service.stop()
        written = (Path(name) / "log").read_text(errors="replace")
    times = {"alone": (0.0, attacked_at), "attacked": (attacked_at + 1.0, ended_at)}
    side = {
        "livez": {name: summary(asked, *span) for name, span in times.items()},
        "first_token": first_tokens(tally.first_tokens, times),
    }
    problems = [*tally.problems, *limits_broken(options, side)]
    problems += ["a process died"] if died else []
    problems += [f"the service ended with code {code}"] if code else []
    problems += [written[written.index("Traceback") :][:2000]] if "Traceback" in written else []
    found = verdict(options, tally, seen, samples, after, held, problems, console)
    return {**found, **side, "exit_code": code}


def limits_broken(options: SoakOptions, side: dict[str, Any]) -> list[str]:
    """The limits that other clients have not been kept to."""
    livez, ratio = side["livez"]["attacked"], side["first_token"].get("ratio", 0.0)
    broken = [f"/livez failed {livez['failed']} times"] if livez.get("failed") else []
    if (p99 := livez.get("p99_ms", 0.0)) > options.livez_p99:
        broken.append(f"the 99th percentile of /livez is {p99} ms")
    if ratio > options.first_token:
        broken.append(f"the median time to the first token is {ratio} times that without hostile clients")
    return broken


def watch(
    process: psutil.Process, seconds: float, every: float, advance: Callable[[int], None]
) -> list[Sample]:  # fmt: skip
    """Samples over a time, or until the service ends."""
    began, samples = time.monotonic(), []
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        samples.append(sample(process))
        left = seconds - (time.monotonic() - began)
        if left <= 0:
            break
        time.sleep(min(left, every))
        advance(round(min(left, every)))
    return samples


def verdict(
    options: SoakOptions, tally: Tally, seen: Sequence[Seen], samples: Sequence[Sample], after: Sample,
    held: dict[str, float], problems: list[str], console: Console,
) -> dict[str, Any]:  # fmt: skip
    """The result; every problem is an entry that `failed`."""
    memory, files = growth(samples, "megabytes"), growth([*samples, after], "files")
    # After all clients have disconnected, no process may hold more files than before.
    kept = {pid: count - samples[0].files[pid] for pid, count in after.files.items() if pid in samples[0].files}
    leaks = {
        "requests_left_open": held["running"] + held["waiting"],
        "cache_held": held["cache"],
        "files": max(0, *kept.values()) if max(kept.values(), default=0) > options.grow_files else 0,
        "memory_mb": max(0.0, *memory.values()) if max(memory.values(), default=0.0) > options.grow_mb else 0.0,
    }
    problems += [problem for each in seen for problem in each.problems]
    problems += [f"leak of {name}: {value:g}" for name, value in leaks.items() if value]
    for problem in problems[:20]:
        console.print(problem, markup=False, highlight=False)
    found = all_seen(seen)
    bad = ("500", "501", "502", "504")
    return {
        "minutes": options.minutes,
        "lp": options.lp,
        "hostile_clients": options.hostile,
        "requests": tally.counts["answer"],
        "wrong": tally.counts["wrong: answer"],
        "busy": tally.counts["busy 429"] + tally.counts["busy 503"],
        "status_5xx": sum(each.get(status, 0) for each in found.values() for status in bad),
        "leaks": leaks,
        "hostile": found,
        "memory_mb": {"first": samples[0].megabytes, "last": samples[-1].megabytes,
                      "growth": memory},
        "files": {"first": samples[0].files, "busy_growth": files, "last": after.files},
        "num_failed": len(problems),
        "problems": problems[:20],
    }  # fmt: skip


def all_seen(seen: Sequence[Seen]) -> dict[str, dict[str, int]]:
    """What all hostile clients have seen, by probe."""
    found: dict[str, Counter[str]] = {}
    for each in seen:
        for name, counts in each.seen.items():
            found.setdefault(name, Counter()).update(counts)
    return {name: dict(found[name]) for name in sorted(found)}


def main() -> int:
    """Run the command line; returns the exit code."""
    return run_main("soak", SoakOptions, measure)


if __name__ == "__main__":
    sys.exit(main())
