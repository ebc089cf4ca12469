"""Clients of OpenAI's completions: prompts as token ids, answers streamed, every request bounded in time."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass
class Answer:
    """One completion as its client saw it; times in seconds from the request on."""

    text: str = ""
    num_tokens: int = 0
    first: float | None = None  # When the first text came.
    last: float = 0.0  # When the last text came.
    failed: str | None = None

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time of a token after the first one; None with fewer than two tokens."""
        if self.first is None or self.num_tokens < 2:
            return None
        return (self.last - self.first) / (self.num_tokens - 1)


@dataclass(frozen=True)
class Load:
    """What the clients ask for."""

    clients: int
    temperature: float
    tokens: int  # Most tokens of an answer.
    seconds: float  # Limit of one request.
    seeded: bool = True  # Sampled answers have a seed.


async def ask_all(url: str, model: str, prompts: Sequence[Sequence[int]], load: Load) -> tuple[list[Answer], float]:
    """The answers, in the order of the prompts, and the seconds of all.

    Each client asks again as soon as it is answered. The seed of a `seeded` answer is the number of its prompt.
    """
    answers = [Answer() for _ in prompts]
    waiting = iter(range(len(prompts)))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # llama.cpp closes some that it keeps
    async with httpx.AsyncClient(base_url=url, timeout=load.seconds, limits=limits) as http:

        async def person() -> None:
            for number in waiting:
                body = {"model": model, "prompt": list(prompts[number]), "max_tokens": load.tokens,
                        "temperature": load.temperature, "stream": True,
                        "stream_options": {"include_usage": True}}  # fmt: skip
                if load.seeded:
                    body["seed"] = number
                await ask(http, body, answers[number], load.seconds)

        began = time.monotonic()
        await asyncio.gather(*(person() for _ in range(load.clients)))
        return answers, time.monotonic() - began


async def ask(http: httpx.AsyncClient, body: dict[str, Any], answer: Answer, seconds: float) -> None:
    """Stream one completion into `answer`; what goes wrong is its `failed`."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(seconds), http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                answer.failed = f"HTTP {response.status_code}: {(await response.aread()).decode()[:200]}"
                return
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    take(json.loads(line[6:]), answer, time.monotonic() - began)
    except TimeoutError:
        answer.failed = f"no answer within {seconds:g} s"
    except (httpx.HTTPError, ValueError) as failure:
        answer.failed = f"{type(failure).__name__}: {failure}"
    if answer.failed is None and not answer.num_tokens:
        answer.failed = "the stream ended without its number of tokens"


def take(event: dict[str, Any], answer: Answer, now: float) -> None:
    """Add an event of a stream to `answer`."""
    if "error" in event:
        answer.failed = str(event["error"].get("message", event["error"]))[:200]
    if event.get("usage"):
        answer.num_tokens = event["usage"]["completion_tokens"]
    text = "".join(choice.get("text") or "" for choice in event.get("choices") or [])
    if text:
        answer.text += text
        answer.last = now
        if answer.first is None:
            answer.first = now


COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "generated": "vllm:generation_tokens_total",
}
Counts = dict[str, float]


def counts_of(url: str) -> Counts:
    """The counters of the server at `url`; without speculation, or of another server, they are 0 or missing."""
    text = httpx.get(url + "/metrics", timeout=30).text
    found = Counts()
    for name, counter in COUNTERS.items():
        values = re.findall(rf"^{counter}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        if values:
            found[name] = sum(map(float, values))
    return found


def acceptance(before: Counts, after: Counts) -> dict[str, Any]:
    """The figures of what was generated between two readings; none where nothing was drafted.

    `acceptance_length` is vLLM's: of steps that have a draft only, so a drafter that seldom drafts is flattered.
    `tokens_per_step` counts all steps of a sequence: each emits one token besides the accepted ones.
    """
    new = {name: value - before.get(name, 0.0) for name, value in after.items()}
    if not new.get("drafts") or new["generated"] <= new["accepted"]:
        return {}
    return {
        "acceptance_length": round(1 + new["accepted"] / new["drafts"], 3),
        "tokens_per_step": round(new["generated"] / (new["generated"] - new["accepted"]), 3),
        "accepted_part": round(new["accepted"] / new["drafted"], 3),
    }
