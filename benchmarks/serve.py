"""The service under load: how long clients wait, for plain decoding and lookahead, with and without prefix reuse.

    python -m benchmarks.serve --data classeval.jsonl --output benchmarks/results/serve.json

One service per setting is started on loopback and stays idle while another is measured; every round runs each load
against each of them in turn, so that what else the machine does meets all alike. Loads, as `kind:number`:

    closed:C    C clients, each of which asks again as soon as it is answered
    poisson:R   R requests a second on average, at random times
    burst:N     N requests at once, once the burst before is answered
    typing:S    S people who type on in a file: a prompt per keystroke, and the request before it cancelled

Of every request: TTFT (arrival to first token), time between tokens (a step's tokens share the time since the step
before), end to end, tokens per step. Goodput counts the requests a second that kept --ttft-ms and --token-ms. A
request that fails is recorded as failed, never averaged. `--url` measures a service that runs already.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
from rich.console import Console

from benchmarks.common import attempt, model_parser, progress, run_main, whole
from benchmarks.data import load_prompts
from lpr.config import InputError

SETTINGS = {
    "plain": ("--window-size", "0", "--trie-nodes", "0"),
    "plain, no reuse": ("--window-size", "0", "--trie-nodes", "0", "--no-prefix-reuse"),
    "lookahead": (),
    "lookahead, no reuse": ("--no-prefix-reuse",),
}
KINDS = ("closed", "poisson", "burst", "typing")
START_SECONDS = 300.0
KEY_SECONDS = 0.2
"""Mean time between two keystrokes."""


@dataclass
class Answer:
    """One request as its client saw it; times in seconds."""

    ttft: float | None = None
    gaps: list[float] = field(default_factory=list)
    """Per token after the first step: its share of the time since the step before."""
    seconds: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    cancelled: bool = False
    failed: str | None = None


class Client:
    """Asks one service."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        """`options` hold the parameters of every request."""
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(base_url=url, timeout=600, limits=limits)
        self._options = options

    async def ask(self, prompt: str, most: int, seed: int, answer: Answer) -> Answer:
        """Stream one completion into `answer`."""
        body = {
            "prompt": prompt, "max_tokens": most, "temperature": self._options.temperature, "seed": seed,
            "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
        }  # fmt: skip
        began = latest = time.monotonic()
        try:
            async with self.http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    answer.failed = f"HTTP {response.status_code}: {(await response.aread()).decode()[:200]}"
                    return answer
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now = time.monotonic()
                    latest = self._event(json.loads(line[6:]), answer, began, latest, now)
        except httpx.HTTPError as failure:
            answer.failed = f"{type(failure).__name__}: {failure}"
        except asyncio.CancelledError:
            answer.cancelled = True
            raise
        finally:
            answer.seconds = time.monotonic() - began
        return answer

    def _event(self, data: dict[str, Any], answer: Answer, began: float, latest: float, now: float) -> float:
        if "error" in data:
            answer.failed = data["error"]["message"]
        if data.get("usage"):
            answer.num_prompt = data["usage"]["prompt_tokens"]
            answer.num_cached = data["usage"]["prompt_tokens_details"]["cached_tokens"]
        ids = data["choices"][0]["token_ids"] if data.get("choices") else []
        if not ids:
            return latest
        if answer.ttft is None:
            answer.ttft = now - began
        else:
            answer.gaps += [(now - latest) / len(ids)] * len(ids)
        answer.num_tokens += len(ids)
        answer.num_steps += 1
        return now


async def run_load(kind: str, number: float, client: Client, prompts: Sequence[str], options: Any) -> list[Answer]:
    """The answers of one load; prompts are taken in order, from the first again when they are used up.

    Each load begins where the one before ended: what was asked before is known to tries and caches.
    """
    dice = random.Random(options.seed)
    most, answers = options.max_new_tokens, [Answer() for _ in range(options.requests)]

    async def one(index: int) -> None:
        await client.ask(prompts[(options.first + index) % len(prompts)], most, index, answers[index])

    if kind == "closed":
        waiting = iter(range(len(answers)))

        async def person() -> None:
            for index in waiting:
                await one(index)

        await asyncio.gather(*(person() for _ in range(int(number))))
    elif kind == "poisson":
        tasks = []
        for index in range(len(answers)):
            tasks.append(asyncio.create_task(one(index)))
            await asyncio.sleep(dice.expovariate(number))
        await asyncio.gather(*tasks)
    elif kind == "burst":
        for start in range(0, len(answers), int(number)):
            await asyncio.gather(*(one(index) for index in range(start, min(len(answers), start + int(number)))))
    else:
        people = [
            typing(client, prompts[(options.first + person) % len(prompts)], person, options)
            for person in range(int(number))
        ]
        return [answer for typed in await asyncio.gather(*people) for answer in typed]
    return answers


async def typing(client: Client, text: str, person: int, options: Any) -> list[Answer]:
    """Type on in a file, a keystroke at a time: each asks for what comes next and cancels the request before."""
    dice = random.Random(f"{options.seed} {person}")
    start = len(text) * 2 // 3
    answers: list[Answer] = []
    running: asyncio.Task[Answer] | None = None
    for key in range(options.requests):
        answers.append(Answer())
        prompt = text[: min(len(text), start + key)]
        if running is not None:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
        running = asyncio.create_task(client.ask(prompt, min(32, options.max_new_tokens), 0, answers[-1]))
        await asyncio.sleep(dice.expovariate(1 / KEY_SECONDS))
    if running is not None:
        await running
    return answers


def summary(answers: Sequence[Answer], seconds: float, options: argparse.Namespace) -> dict[str, Any]:
    """What a load's answers come to; times in milliseconds."""
    told = [answer for answer in answers if answer.ttft is not None and answer.failed is None]
    done = [answer for answer in told if not answer.cancelled]
    if not told:
        raise RuntimeError(next((answer.failed for answer in answers if answer.failed), "no request was answered"))
    good = [
        answer
        for answer in done
        if 1e3 * (answer.ttft or 0) <= options.ttft_ms
        and 1e3 * (statistics.mean(answer.gaps) if answer.gaps else 0) <= options.token_ms
    ]
    steps, tokens = sum(each.num_steps for each in done), sum(each.num_tokens for each in done)
    num_prompt = sum(answer.num_prompt for answer in done)
    return {
        "requests": len(answers),
        "completed": len(done),
        "cancelled": sum(answer.cancelled for answer in answers),
        "cancelled_before_a_token": sum(answer.cancelled and answer.ttft is None for answer in answers),
        "num_failed": sum(answer.failed is not None for answer in answers),
        "seconds": round(seconds, 3),
        "ttft_ms": quantiles([answer.ttft or 0.0 for answer in told]),
        "between_tokens_ms": quantiles([gap for answer in told for gap in answer.gaps]),
        "end_to_end_ms": quantiles([answer.seconds for answer in done]),
        "tokens_per_step": round(tokens / steps, 3) if steps else None,
        "tokens_per_second": round(sum(answer.num_tokens for answer in answers) / seconds, 1),
        "goodput_per_second": round(len(good) / seconds, 3),
        "cached_share": round(sum(answer.num_cached for answer in done) / num_prompt, 3) if num_prompt else None,
    }


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p90 and p99 in milliseconds, the nearest rank."""
    if not values:
        return None
    ordered = sorted(values)
    at = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in
          (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}  # fmt: skip
    return {name: round(1e3 * value, 2) for name, value in at.items()}


@contextlib.contextmanager
def started(
    flags: Sequence[str], options: argparse.Namespace, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A service of one's own on a free port; yields its address and its process once it is ready. Raises InputError.

    `environment` adds to this process's own.
    """
    command = [sys.executable, "-m", "lpr.serve", "--port", "0", "--no-access-log", "--lp", str(options.lp), *flags]
    command += ["--dtype", options.dtype, "--max-batch-size", str(options.batch)]
    for name in ("model", "device"):
        command += [f"--{name}", getattr(options, name)] if getattr(options, name) else []
    threads = {"OMP_NUM_THREADS": str(options.threads)} if options.threads else {}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=sys.stderr,
        text=True,
        env={**os.environ, **threads, **(environment or {})},
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        if not found:
            raise InputError(f"the service did not start: {' '.join(command)}")
        end = time.monotonic() + START_SECONDS
        while httpx.get(found[0] + "/readyz").status_code != 200:
            if process.poll() is not None or time.monotonic() > end:
                raise InputError(f"the service did not become ready: {' '.join(command)}")
            time.sleep(0.2)
        yield found[0], process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Every load against every setting, in rounds."""
    prompts = load_prompts(options.data, options.prompts)
    loads = [parse_load(each) for each in options.loads]
    unknown = [name for name in options.settings if name not in SETTINGS]
    if unknown:
        raise InputError(f"--settings {unknown[0]!r} is none of {', '.join(map(repr, SETTINGS))}")
    runs: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        urls = {"given": options.url} if options.url else {}
        for name in () if options.url else options.settings:
            urls[name], _ = stack.enter_context(started(SETTINGS[name], options))
        advance = stack.enter_context(progress(console, options.rounds * len(loads) * len(urls), "asking"))
        for url in urls.values():  # the first requests of a process are slower
            warm = argparse.Namespace(**{**vars(options), "requests": 2, "first": 0})
            asyncio.run(one_load("closed", 1, url, prompts, warm))
        first = 2
        for number in range(options.rounds):
            for kind, size in loads:
                now = argparse.Namespace(**vars(options), first=first)
                first += int(size) if kind == "typing" else options.requests
                for name, url in urls.items():
                    entry = {"name": name, "case": f"{kind}:{size:g}", "round": number}
                    call = partial(one_load, kind, size, url, prompts, now)
                    runs.append({**entry, **attempt(lambda load=call: asyncio.run(load()))})  # type: ignore[misc]
                    advance(1, f"{name}, {kind}:{size:g}")
    return {"benchmark": "serve", "lp": options.lp, "ttft_ms": options.ttft_ms, "token_ms": options.token_ms,
            "rounds": options.rounds, "runs": medians(runs), "num_failed": failed(runs)}  # fmt: skip


async def one_load(kind: str, size: float, url: str, prompts: Sequence[str], options: Any) -> dict[str, Any]:
    """One load against one service."""
    client = Client(url, options)
    began = time.monotonic()
    try:
        answers = await run_load(kind, size, client, prompts, options)
    finally:
        await client.http.aclose()
    return summary(answers, time.monotonic() - began, options)


def failed(runs: Sequence[dict[str, Any]]) -> int:
    """Requests that failed."""
    return sum(run.get("num_failed", 0) for run in runs)


def medians(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per setting and load the median round, number by number; a failed round stays as it is."""
    found = []
    for key in dict.fromkeys((run["name"], run["case"]) for run in runs):
        mine = [run for run in runs if (run["name"], run["case"]) == key]
        found += [run for run in mine if "failed" in run]
        if sound := [run for run in mine if "failed" not in run]:
            found.append({"name": key[0], "case": key[1], **_median([_without(run) for run in sound])})
    return found


def _without(run: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in run.items() if name not in ("name", "case", "round")}


def _median(values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    if not known:
        return None
    if isinstance(known[0], dict):
        return {name: _median([value[name] for value in known]) for name in known[0]}
    return statistics.median(known)


def parse_load(text: str) -> tuple[str, float]:
    """`kind:number`; raises InputError."""
    kind, _, number = text.partition(":")
    with contextlib.suppress(ValueError):
        if kind in KINDS and float(number) > 0 and (kind == "poisson" or float(number).is_integer()):
            return kind, float(number)
    raise InputError(f"--loads {text!r} is not like closed:4, poisson:2.5, burst:8 or typing:1")


def main() -> int:
    """Run the benchmark from the command line."""
    parser = model_parser("serve", "The service under load.")
    parser.add_argument("--url", help="measure the service that runs there, instead of starting some")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), metavar="S", help=", ".join(SETTINGS))
    loads = ["closed:1", "closed:4", "closed:16", "poisson:1", "burst:8", "typing:1"]
    parser.add_argument("--loads", nargs="+", default=loads, metavar="L", help="see above")
    parser.add_argument("--requests", type=whole, default=16, metavar="N", help="requests or keystrokes per load")
    parser.add_argument("--rounds", type=whole, default=3, metavar="N", help="repetitions, interleaved (3)")
    parser.add_argument("--lp", type=whole, default=1, metavar="N", help="replicas of each service (1)")
    parser.add_argument("--batch", type=whole, default=8, metavar="N", help="slots of each service (8)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T")
    parser.add_argument("--seed", type=whole, default=0, metavar="N", help="of the arrivals")
    parser.add_argument("--ttft-ms", type=float, default=500.0, metavar="MS", help="goodput: first token within (500)")
    parser.add_argument("--token-ms", type=float, default=50.0, metavar="MS", help="goodput: mean time per token (50)")
    return run_main(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
