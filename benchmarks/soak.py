"""A soak of the service: hostile clients and well-formed requests, whose every answer is checked.

    python -m benchmarks.soak --minutes 60 --lp 2

Hostile clients send malformed JSON, huge and endless bodies, random fields, wrong keys and noise, do not read, or drop
their connections (benchmarks.hostile). Answers to well-formed requests must equal the texts of an engine in this
process. Memory and open files of the front and the ranks are sampled every --sample seconds; growth counts from a tenth
of the time on, when all caches are in use.

The last line is JSON: requests, `wrong` (well-formed requests not answered exactly), `status_5xx` (other than 503),
`leaks` (requests left open, slots held, files, memory). The exit code is 1 if any of these is not 0, or a process died.
"""

from __future__ import annotations

import json
import random
import shlex
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console

from benchmarks.common import Options, Whole, progress, run_main
from benchmarks.hostile import MAX_BODY, Hostile
from benchmarks.processes.services import Running, running
from lpr import Engine, SamplingParams, bundled_model

KEY = "soak-key"
TEXT = 'class Account:\n    """An account."""\n\n    def __init__(self, owner):\n        self.owner = owner\n'
PROMPTS = ("def f(x):\n", "import os\n\n\n", "for i in range(10):\n    ", TEXT, TEXT[:40], TEXT[:60], TEXT[:61])
SLOTS = 4


@dataclass(frozen=True, kw_only=True)
class SoakOptions(Options):
    """Hostile clients and well-formed requests, whose every answer is checked."""

    minutes: float = 10.0
    """Duration."""
    model: str | None = None
    """Folder or hub id; the bundled model if none is given."""
    lp: Whole = 1
    """Replicas of the service."""
    seed: Whole = 0
    """Seed of all clients."""
    clients: Whole = 3
    """Clients that send well-formed requests."""
    hostile: Whole = 4
    """Hostile clients."""
    pause: float = 0.0
    """Mean seconds between requests."""
    sample: float = 5.0
    """Seconds between two samples."""
    grow_mb: float = 100.0
    """Growth of memory in MB that is not a leak."""
    grow_files: Whole = 8
    """Growth of open files that is not a leak."""
    flags: str = ""
    """Further flags of lpr.serve, in one word: --flags="--tp 2"."""


@dataclass(frozen=True)
class Case:
    """A well-formed request and the expected texts."""

    body: dict[str, Any]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    """Resources of the service's processes at one time, by process id."""

    seconds: float
    megabytes: dict[int, float]
    """Resident memory."""
    files: dict[int, int]
    """Open file descriptors."""


class Tally:
    """Outcomes of the requests; clients are threads."""

    def __init__(self) -> None:
        """Empty."""
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._lock = threading.Lock()

    def count(self, what: str, problem: str = "") -> None:
        """Count an event, and record its problem if there is one."""
        with self._lock:
            self.counts[what] += 1
            if problem:
                self.counts[f"wrong: {what}"] += 1
                self.problems.append(f"{what}: {problem}"[:500])


def make_cases(model: str, seed: int) -> list[Case]:
    """Requests of many kinds, most with prompts that begin alike, and an engine's texts for each."""
    dice = random.Random(seed)
    bodies: list[dict[str, Any]] = []
    for index in range(32):
        body: dict[str, Any] = {"prompt": dice.choice(PROMPTS), "max_tokens": dice.choice((4, 16, 48)), "seed": index,
                "temperature": dice.choice((0.0, 0.0, 0.8, 1.2))}  # fmt: skip
        if dice.random() < 0.3:
            body |= {"top_p": 0.9, "top_k": 20}
        if dice.random() < 0.3:
            body["stop"] = ["\n\n", "self."]
        if dice.random() < 0.2:
            body["repetition_penalty"] = 1.2
        if dice.random() < 0.2:
            body["n"] = 2
        bodies.append(body)
    asked = [(body, number) for body in bodies for number in range(body.get("n", 1))]
    engine = Engine.from_pretrained(model, dtype="float32")
    done = engine.generate([body["prompt"] for body, _ in asked], [_params(*each) for each in asked])
    engine.close()
    texts = iter(done)
    return [Case(body, tuple(next(texts).text for _ in range(body.get("n", 1)))) for body in bodies]


def _params(body: dict[str, Any], number: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=body["max_tokens"],
        temperature=body["temperature"],
        seed=body["seed"] + number,
        top_p=body.get("top_p", 1.0),
        top_k=body.get("top_k", 0),
        stop=tuple(body.get("stop", ())),
        repetition_penalty=body.get("repetition_penalty", 1.0),
    )


def ask(url: str, cases: Sequence[Case], seed: str, pause: float, tally: Tally, stop: threading.Event) -> None:
    """Send well-formed requests until `stop`, with `pause` seconds between two of them on average."""
    dice = random.Random(seed)
    with httpx.Client(base_url=url, timeout=300, headers={"Authorization": f"Bearer {KEY}"}) as client:
        while not stop.is_set():
            case, stream = dice.choice(cases), dice.random() < 0.5
            try:
                answer = client.post("/v1/completions", json={**case.body, "stream": stream})
            except httpx.HTTPError as failure:
                tally.count("answer", repr(failure))
                continue
            if answer.status_code in (429, 503):
                tally.count(f"busy {answer.status_code}")
                stop.wait(0.5)
            elif answer.status_code != 200:
                tally.count("answer", f"{answer.status_code} {answer.text}")
            else:
                found = texts_of(answer, stream, len(case.texts))
                tally.count("answer", "" if found == case.texts else f"{case.body}: {found!r} is not {case.texts!r}")
            if pause:
                stop.wait(dice.expovariate(1 / pause))


def texts_of(answer: httpx.Response, stream: bool, count: int) -> tuple[str, ...]:
    """The texts of an answer's choices."""
    if not stream:
        return tuple(choice["text"] for choice in answer.json()["choices"])
    texts = [""] * count
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:]).get("choices", ()):
                texts[choice["index"]] += choice["text"]
    return tuple(texts)


def sample(process: psutil.Process, began: float) -> Sample:
    """Resources of a process and its descendants now."""
    megabytes, files = {}, {}
    for each in (process, *process.children(recursive=True)):
        try:
            megabytes[each.pid] = each.memory_info().rss / 2**20
            files[each.pid] = each.num_fds()
        except psutil.Error:  # it has just ended
            continue
    return Sample(round(time.monotonic() - began, 1), megabytes, files)


def left_open(service: Running, patience: float = 60.0) -> dict[str, float]:
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
    model = options.model or bundled_model()
    cases = make_cases(model, options.seed)
    tally, stop = Tally(), threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        flags = ["--model", model, "--dtype", "float32", "--lp", str(options.lp), "--max-batch-size", str(SLOTS),
                 "--api-key", KEY, "--max-body", str(MAX_BODY), "--max-queue", "32", "--no-access-log",
                 "--request-timeout", "300", *shlex.split(options.flags)]  # fmt: skip
        with running(flags, options.threads, log) as service:
            process = psutil.Process(service.process.pid)
            pause = options.pause
            threads = [
                threading.Thread(
                    target=ask, args=(service.url, cases, f"{options.seed} good {number}", pause, tally, stop)
                )
                for number in range(options.clients)
            ]
            for number in range(options.hostile):
                hostile = Hostile(service.url, KEY, f"{options.seed} bad {number}", tally.count, stop)
                threads.append(threading.Thread(target=hostile.run, args=(pause,)))
            for thread in threads:
                thread.start()
            samples = watch(process, options, console)
            stop.set()
            for thread in threads:
                thread.join(320)
            held = left_open(service)
            after = sample(process, 0.0)
            died = service.process.poll() is not None or bool(set(samples[0].files) - set(after.files))
            code = service.stop()
        written = log.read_text(errors="replace")
    return verdict(options, tally, samples, after, held, died, code, written, console)


def watch(process: psutil.Process, options: SoakOptions, console: Console) -> list[Sample]:
    """Samples over the time of the soak, or until the service ends."""
    began, samples = time.monotonic(), []
    seconds = 60 * options.minutes
    with progress(console, round(seconds), "soaking") as advance:
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            samples.append(sample(process, began))
            left = seconds - (time.monotonic() - began)
            if left <= 0:
                break
            time.sleep(min(left, options.sample))
            advance(round(min(left, options.sample)))
    return samples


def verdict(
    options: SoakOptions,
    tally: Tally,
    samples: Sequence[Sample],
    after: Sample,
    held: dict[str, float],
    died: bool,
    code: int,
    written: str,
    console: Console,
) -> dict[str, Any]:
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
    problems = list(tally.problems)
    problems += [f"leak of {name}: {value:g}" for name, value in leaks.items() if value]
    problems += ["a process died"] if died else []
    problems += [f"the service ended with code {code}"] if code else []
    problems += [written[written.index("Traceback") :][:2000]] if "Traceback" in written else []
    for problem in problems[:20]:
        console.print(problem, markup=False, highlight=False)
    statuses = {name: number for name, number in tally.counts.items() if name.startswith("status 5")}
    return {
        "minutes": options.minutes,
        "lp": options.lp,
        "requests": tally.counts["answer"],
        "wrong": tally.counts["wrong: answer"],
        "status_5xx": sum(number for name, number in statuses.items() if name != "status 503"),
        "leaks": leaks,
        "hostile": {name: number for name, number in sorted(tally.counts.items()) if name != "answer"},
        "memory_mb": {"first": _rounded(samples[0].megabytes), "last": _rounded(samples[-1].megabytes),
                      "growth": memory},
        "files": {"first": samples[0].files, "busy_growth": files, "last": after.files},
        "exit_code": code,
        "num_failed": len(problems),
        "problems": problems[:20],
    }  # fmt: skip


def _rounded(values: dict[int, float]) -> dict[int, float]:
    return {pid: round(value, 1) for pid, value in values.items()}


def main() -> int:
    """Run the command line; returns the exit code."""
    return run_main("soak", SoakOptions, measure)


if __name__ == "__main__":
    sys.exit(main())
