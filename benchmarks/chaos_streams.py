"""Requests of all kinds, their streams, and the comparison of a stream with the undisturbed one."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

PROMPTS = (
    "def fibonacci(n):\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\n\n\ndef read_lines(path):\n    ",
    "for i in range(10):\n    for j in range(10):\n        ",
    "def quicksort(values):\n    if len(values) < 2:\n        return values\n    ",
    '"""Tools for graphs."""\n\n\nclass Graph:\n    ',
)
REGEX = "[a-z]{2,9}( [a-z]{2,9}){30,60}"


@dataclass
class Output:
    """A stream as its client saw it, without step boundaries."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish: str | None = None
    offsets: list[int] = field(default_factory=list)  # Where the text of each token begins, from `logprobs`.
    logprobs: list[float] = field(default_factory=list)
    num_tokens: int = 0  # From usage.
    failed: str | None = None

    def exact(self) -> tuple[object, ...]:
        """Everything that must be equal: all but log-probabilities, whose last bits depend on the rows of a step."""
        return self.text, self.ids, self.finish, self.offsets, len(self.logprobs), self.num_tokens


def bodies(count: int, seed: int) -> list[dict[str, Any]]:
    """Requests at temperature 0 and 0.8, with penalties, stop strings, least lengths, log-probabilities, grammars."""
    dice = random.Random(seed)
    has_grammar = importlib.util.find_spec("llguidance") is not None
    made: list[dict[str, Any]] = []
    for index in range(count):
        body: dict[str, Any] = {
            "prompt": dice.choice(PROMPTS) + dice.choice(("", "x = ", "# note\n    ")),
            "max_tokens": dice.choice((60, 150, 300)),
            "temperature": (0, 0.8)[index % 2],
            "seed": index,
            "ignore_eos": True,
        }
        if dice.random() < 0.4:
            body |= {"presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
        if dice.random() < 0.3:
            body["stop"] = dice.choice((["\n\n\n", "return None"], ["self.items", "  # "], ["print("]))
        if dice.random() < 0.3:
            body |= {"top_p": 0.95, "top_k": 40}
        if dice.random() < 0.4:
            body["logprobs"] = 2
        if has_grammar and index % 8 == 5:
            body["response_format"] = {"type": "regex", "regex": REGEX}
            del body["ignore_eos"]
        if dice.random() < 0.2:
            body |= {"min_tokens": 20}
        made.append(body)
    return made


class Clients:
    """Clients that send the next request as soon as they are answered."""

    def __init__(self, url: str, asked: list[dict[str, Any]]) -> None:
        """Send the requests `asked` repeatedly."""
        self.asked = asked
        self.wanted: list[Output] = []
        """The undisturbed answers."""
        self.events: list[float] = []
        """Times of all events of all clients (time.monotonic)."""
        self.num_streams = 0
        self.failed: list[str] = []
        self.different: list[str] = []
        self.largest_difference = 0.0
        """Between log-probabilities."""
        self._http = httpx.AsyncClient(base_url=url, timeout=900, limits=httpx.Limits(max_connections=None))

    async def close(self) -> None:
        """Disconnect."""
        await self._http.aclose()

    async def undisturbed(self, num_clients: int) -> None:
        """Record the answers before any loss."""
        gate = asyncio.Semaphore(num_clients)

        async def one(body: dict[str, Any]) -> Output:
            async with gate:
                return await self.ask(body, stream=True)

        self.wanted = list(await asyncio.gather(*(one(body) for body in self.asked)))

    async def work(self, seed: str, ending: asyncio.Event) -> None:
        """Send random requests until `ending`, and compare."""
        dice = random.Random(seed)
        while not ending.is_set():
            index = dice.randrange(len(self.asked))
            stream = dice.random() < 0.9
            found = await self.ask(self.asked[index], stream)
            self.num_streams += 1
            self.compare(self.asked[index], found, self.wanted[index])

    def compare(self, body: dict[str, Any], found: Output, wanted: Output) -> None:
        """Record a failure or a difference of an answer."""
        if found.failed is not None:
            self.failed.append(found.failed)
            return
        if found.exact() != wanted.exact():
            self.different.append(f"{json.dumps(body)}: {found.exact()!r} is not {wanted.exact()!r}")
        for one, other in zip(found.logprobs, wanted.logprobs, strict=False):
            self.largest_difference = max(self.largest_difference, abs(one - other))

    async def ask(self, body: dict[str, Any], stream: bool) -> Output:
        """One request to its end; a failure is in `failed`."""
        output = Output()
        more: dict[str, Any] = {"return_token_ids": True}
        if stream:
            more |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self._http.stream("POST", "/v1/completions", json={**body, **more}) as response:
                if response.status_code != 200:
                    output.failed = f"HTTP {response.status_code}: {(await response.aread()).decode()[:300]}"
                elif not stream:
                    self._take(json.loads(await response.aread()), output)
                else:
                    await self._read(response, output)
        except httpx.HTTPError as failure:
            output.failed = f"{type(failure).__name__}: {failure}"
        return output

    async def _read(self, response: httpx.Response, output: Output) -> None:
        done = False
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                self._take(json.loads(line[6:]), output)
                self.events.append(time.monotonic())
            done = done or line == "data: [DONE]"
        if not done and output.failed is None:
            output.failed = "the stream ended without [DONE]"

    def _take(self, data: dict[str, Any], output: Output) -> None:
        if "error" in data:
            output.failed = data["error"]["message"]
        for choice in data.get("choices") or ():
            output.text += choice["text"]
            output.ids += choice["token_ids"]
            output.finish = choice["finish_reason"] or output.finish
            if choice["logprobs"] is not None:
                output.offsets += choice["logprobs"]["text_offset"]
                output.logprobs += choice["logprobs"]["token_logprobs"]
        if data.get("usage"):
            output.num_tokens = data["usage"]["completion_tokens"]


def pauses(events: list[float], losses: list[float], end: float) -> Iterator[float]:
    """Per loss, the longest time in seconds without any event until the next loss (or `end`).

    `events`, `losses` and `end` are times on one clock, `events` and `losses` in order.
    """
    for index, loss in enumerate(losses):
        until = losses[index + 1] if index + 1 < len(losses) else end
        within = [loss, *(event for event in events if loss < event < until)]
        yield max(after - before for before, after in zip(within, [*within[1:], until], strict=True))
