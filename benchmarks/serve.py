"""The service under load: how long clients wait, for plain decoding and lookahead, with and without prefix reuse.

    python -m benchmarks.serve --data classeval.jsonl --output benchmarks/results/serve.json

One service per setting is started on loopback and stays idle while another is measured; every round runs each load
against each of them in turn, so that what else the machine does meets all alike. Loads, as `kind:number`:

    closed:C    C clients, each of which asks again as soon as it is answered
    poisson:R   R requests a second on average, at random times
    burst:N     N requests at once, once the burst before is answered
    typing:S    S people who type on in a file: a prompt per keystroke, and the request before it cancelled

Of every request: TTFT (arrival to first token), time between tokens (a step's tokens share the time since the step
before), end to end, tokens per step. Goodput counts the requests a second that kept --ttft-ms and --token-ms. The
percentiles are of the requests of all rounds together. A request that fails is recorded as failed, never averaged.

The services learn nothing from one request for another (`--share-drafts none`): a load asks the same prompts of every
setting and, once all prompts are used up, again, so lookahead would otherwise draft from its own earlier answers.
Settings without prefix reuse meet the typing loads only, as the other loads' prompts have no prefix in common.
`--url` measures a service that runs already. `--simulate` predicts eight GPUs instead (benchmarks.simulated.service).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from benchmarks.common import attempt, model_parser, progress, run_main, whole
from benchmarks.data import prompts_of
from benchmarks.processes.services import running
from benchmarks.simulated.service import simulate, simulated_parser
from lpr.config import InputError

SETTINGS = {
    "plain": ("--window-size", "0", "--trie-nodes", "0"),
    "plain, no reuse": ("--window-size", "0", "--trie-nodes", "0", "--no-prefix-reuse"),
    "lookahead": (),
    "lookahead, no reuse": ("--no-prefix-reuse",),
}
NO_REUSE = ", no reuse"
QUICK = {"loads": ["closed:1", "closed:4", "typing:1"], "requests": 6, "max_new_tokens": 32, "rounds": 1}
"""What --quick changes: a look at whether all works, no measurement."""
KINDS = ("closed", "poisson", "burst", "typing")
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


@dataclass(frozen=True)
class Round:
    """The answers of one load, and how long it took, in seconds."""

    answers: Sequence[Answer]
    seconds: float


def summary(rounds: Sequence[Round], options: argparse.Namespace) -> dict[str, Any]:
    """What a load's rounds come to together; times in milliseconds. Raises RuntimeError if no request was answered."""
    answers = [answer for each in rounds for answer in each.answers]
    seconds = sum(each.seconds for each in rounds)
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


def flags_of(setting: str, options: argparse.Namespace) -> list[str]:
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


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Every load against every setting, in rounds."""
    if options.quick:
        options = argparse.Namespace(**{**vars(options), **QUICK})
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
            warm = argparse.Namespace(**{**vars(options), "requests": 2, "first": 0})
            asyncio.run(one_round("closed", 1, url, prompts, warm))
        first = 2
        for _ in range(options.rounds):
            for kind, size in loads:
                now = argparse.Namespace(**vars(options), first=first)
                first += int(size) if kind == "typing" else options.requests
                for name in (name for name in urls if fits(kind, name)):
                    found = asyncio.run(one_round(kind, size, urls[name], prompts, now))
                    rounds.setdefault((name, f"{kind}:{size:g}"), []).append(found)
                    advance(1, f"{name}, {kind}:{size:g}")
    runs = [
        {"name": name, "case": case, **attempt(partial(summary, found, options))}
        for (name, case), found in rounds.items()
    ]
    names = ("lp", "batch", "requests", "rounds", "max_new_tokens", "temperature", "ttft_ms", "token_ms")
    asked = {name: getattr(options, name) for name in names}
    return {"benchmark": "serve", "data": Path(options.data).name, "num_prompts": len(prompts), **asked, "runs": runs,
            "num_failed": sum(run.get("num_failed", 1) for run in runs)}  # fmt: skip


def fits(kind: str, setting: str) -> bool:
    """Is a load of this kind asked of this setting?"""
    return kind == "typing" or not setting.endswith(NO_REUSE)


async def one_round(kind: str, size: float, url: str, prompts: Sequence[str], options: Any) -> Round:
    """One load against one service, once."""
    client = Client(url, options)
    began = time.monotonic()
    try:
        answers = await run_load(kind, size, client, prompts, options)
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
    """Run the benchmark from the command line."""
    if "--simulate" in sys.argv[1:]:
        arguments = [each for each in sys.argv[1:] if each != "--simulate"]
        return run_main(simulated_parser(), simulate, arguments)
    parser = model_parser("serve", "The service under load.")
    parser.set_defaults(prompts=100, max_new_tokens=64)
    parser.add_argument("--quick", action="store_true", help="see in two minutes whether all works")
    parser.add_argument("--url", help="measure the service that runs there, instead of starting some")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), metavar="S", help=", ".join(SETTINGS))
    loads = [*(f"closed:{count}" for count in (1, 2, 4, 8, 16)), "poisson:1", "burst:8", "typing:1", "typing:4"]
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
