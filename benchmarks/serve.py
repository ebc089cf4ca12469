"""The service under load: waiting times of clients, for plain decoding and lookahead, with and without prefix reuse.

    python -m benchmarks.serve --data classeval.jsonl --output benchmarks/results/serve.json

One service per setting runs on loopback; every round runs each load against each service in turn. Loads, as
`kind:number`:

    closed:C    C clients, each of which asks again as soon as it is answered
    poisson:R   R requests a second on average, at random times
    burst:N     N requests at once, once the burst before is answered
    typing:S    S people who type on in a file: a prompt per keystroke, and the request before it cancelled

The result has time to first token (TTFT), time between tokens (a step's tokens share the time since the step before),
end to end, and tokens per step. Goodput counts the requests a second within --ttft-ms and --token-ms. Percentiles are
of the requests of all rounds. A request that fails is recorded as failed, never averaged.

The services do not learn from one request for another (`--share-drafts none`), because a load sends the same prompts to
every setting and repeats them once all are used. Settings without prefix reuse get the typing loads only, as the other
loads' prompts share no prefix. `--url` measures a running service.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from benchmarks.common import DataOptions, Flag, Whole, attempt, progress, run_main
from benchmarks.data import prompts_of
from benchmarks.processes.services import running
from lpr.config import InputError

SETTINGS = {
    "plain": ("--window-size", "0", "--trie-nodes", "0"),
    "plain, no reuse": ("--window-size", "0", "--trie-nodes", "0", "--no-prefix-reuse"),
    "lookahead": (),
    "lookahead, no reuse": ("--no-prefix-reuse",),
}
NO_REUSE = ", no reuse"
QUICK = {"loads": ("closed:1", "closed:4", "typing:1"), "requests": 6, "max_new_tokens": 32, "rounds": 1}
"""The options that --quick changes."""
KINDS = ("closed", "poisson", "burst", "typing")
KEY_SECONDS = 0.2
"""Mean time between two keystrokes."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions(DataOptions):
    """The service under load."""

    prompts: Whole = 100
    """Use the first N prompts."""
    max_new_tokens: Whole = 64
    """Tokens per prompt."""
    quick: Flag = False
    """Check in two minutes that everything works."""
    url: str | None = None
    """Measure the service that runs there, instead of starting some."""
    settings: tuple[str, ...] = tuple(SETTINGS)
    """Settings of the services."""
    loads: tuple[str, ...] = (
        *("closed:1", "closed:2", "closed:4", "closed:8", "closed:16"),
        *("poisson:1", "burst:8", "typing:1", "typing:4"),
    )
    """Loads, as kind:number."""
    requests: Whole = 16
    """Requests or keystrokes per load."""
    rounds: Whole = 3
    """Repetitions, interleaved."""
    lp: Whole = 1
    """Replicas of each service."""
    batch: Whole = 8
    """Slots of each service."""
    temperature: float = 0.0
    """Temperature of the requests."""
    seed: Whole = 0
    """Seed of the arrivals."""
    ttft_ms: float = 500.0
    """Goodput: limit of the time to the first token."""
    token_ms: float = 50.0
    """Goodput: limit of the mean time per token."""


@dataclass
class Answer:
    """One request as its client saw it; times in seconds."""

    ttft: float | None = None
    gaps: list[float] = field(default_factory=list)
    """Per token after the first step: its share of the time since the previous step."""
    seconds: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    cancelled: bool = False
    failed: str | None = None


class Client:
    """A client of one service."""

    def __init__(self, url: str, options: ServeOptions) -> None:
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


async def run_load(
    kind: str, number: float, client: Client, prompts: Sequence[str], options: ServeOptions, first: int
) -> list[Answer]:
    """The answers of one load, with prompts from number `first` on, cyclically.

    Each load begins where the load before ended, because draft indexes and prefix caches hold earlier prompts.
    """
    dice = random.Random(options.seed)
    most, answers = options.max_new_tokens, [Answer() for _ in range(options.requests)]

    async def one(index: int) -> None:
        await client.ask(prompts[(first + index) % len(prompts)], most, index, answers[index])

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
            typing(client, prompts[(first + person) % len(prompts)], person, options) for person in range(int(number))
        ]
        return [answer for typed in await asyncio.gather(*people) for answer in typed]
    return answers


async def typing(client: Client, text: str, person: int, options: ServeOptions) -> list[Answer]:
    """Type on in a file: each keystroke sends a request and cancels the request before."""
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


@dataclass(frozen=True)
class Round:
    """The answers of one load, and its seconds."""

    answers: Sequence[Answer]
    seconds: float


def summary(rounds: Sequence[Round], options: ServeOptions) -> dict[str, Any]:
    """The figures of a load's rounds, times in milliseconds; raises RuntimeError if no request was answered."""
    answers = [answer for each in rounds for answer in each.answers]
    seconds = sum(each.seconds for each in rounds)
    answered = [answer for answer in answers if answer.ttft is not None and answer.failed is None]
    done = [answer for answer in answered if not answer.cancelled]
    if not answered:
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
        "ttft_ms": quantiles([answer.ttft or 0.0 for answer in answered]),
        "between_tokens_ms": quantiles([gap for answer in answered for gap in answer.gaps]),
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


def flags_of(setting: str, options: ServeOptions) -> list[str]:
    """The flags of a service of one setting."""
    flags = [
        "--no-access-log",
        "--lp",
        str(options.lp),
        "--dtype",
        options.dtype,
        "--max-batch-size",
        str(options.batch),
    ]
    for name in ("model", "device"):
        flags += [f"--{name}", getattr(options, name)] if getattr(options, name) else []
    flags += ["--exact"] if options.exact else []
    return [*flags, "--share-drafts", "none", *SETTINGS[setting]]


def measure(options: ServeOptions, console: Console) -> dict[str, Any]:
    """Every load against every setting, in rounds."""
    if options.quick:
        options = replace(options, **QUICK)  # type: ignore[arg-type]
    prompts = prompts_of(options)
    loads = [parse_load(each) for each in options.loads]
    unknown = [name for name in options.settings if name not in SETTINGS]
    if unknown:
        raise InputError(f"--settings {unknown[0]!r} is none of {', '.join(map(repr, SETTINGS))}")
    rounds: dict[tuple[str, str], list[Round]] = {}
    with contextlib.ExitStack() as stack:
        urls = {"given": options.url} if options.url else {}
        for name in () if options.url else options.settings:
            urls[name] = stack.enter_context(running(flags_of(name, options), options.threads)).url
        pairs = [(kind, size, name) for kind, size in loads for name in urls if fits(kind, name)]
        advance = stack.enter_context(progress(console, options.rounds * len(pairs), "asking"))
        for url in urls.values():  # the first requests of a process are slower
            asyncio.run(one_round("closed", 1, url, prompts, replace(options, requests=2), 0))
        first = 2
        for _ in range(options.rounds):
            for kind, size in loads:
                for name in (name for name in urls if fits(kind, name)):
                    found = asyncio.run(one_round(kind, size, urls[name], prompts, options, first))
                    rounds.setdefault((name, f"{kind}:{size:g}"), []).append(found)
                    advance(1, f"{name}, {kind}:{size:g}")
                first += int(size) if kind == "typing" else options.requests
    runs = [
        {"name": name, "case": case, **attempt(partial(summary, found, options))}
        for (name, case), found in rounds.items()
    ]
    names = ("lp", "batch", "requests", "rounds", "max_new_tokens", "temperature", "ttft_ms", "token_ms")
    asked = {name: getattr(options, name) for name in names}
    return {"data": Path(options.data).name, "num_prompts": len(prompts), **asked, "runs": runs,
            "num_failed": sum(run.get("num_failed", 1) for run in runs)}  # fmt: skip


def fits(kind: str, setting: str) -> bool:
    """True if this setting gets loads of this kind."""
    return kind == "typing" or not setting.endswith(NO_REUSE)


async def one_round(
    kind: str, size: float, url: str, prompts: Sequence[str], options: ServeOptions, first: int
) -> Round:
    """One load against one service, once."""
    client = Client(url, options)
    began = time.monotonic()
    try:
        answers = await run_load(kind, size, client, prompts, options, first)
    finally:
        await client.http.aclose()
    return Round(answers, time.monotonic() - began)


def parse_load(text: str) -> tuple[str, float]:
    """`kind:number`; raises InputError."""
    kind, _, number = text.partition(":")
    with contextlib.suppress(ValueError):
        if kind in KINDS and float(number) > 0 and (kind == "poisson" or float(number).is_integer()):
            return kind, float(number)
    raise InputError(f"--loads {text!r} is not like closed:4, poisson:2.5, burst:8 or typing:1")


def main() -> int:
    """Run the command line; returns the exit code."""
    return run_main("serve", ServeOptions, measure)


if __name__ == "__main__":
    sys.exit(main())
