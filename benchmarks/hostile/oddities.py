"""Probes with random content: malformed JSON, odd fields, wrong keys, noise, and clients that leave."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from typing import Any

from benchmarks.hostile.client import Answer, Client, read_answer
from benchmarks.hostile.probes import probe

NAMES = (
    "prompt", "max_tokens", "temperature", "stop", "n", "logprobs", "suffix", "seed", "stream", "echo", "best_of",
    "logit_bias", "response_format", "messages", "x\u0000", "input_prefix", "input_suffix", "tokens", "priority",
    "min_tokens", "top_p", "tools", "return_token_ids", "stream_options", "chat_template_kwargs", "user",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 3, 1e308, 2**70, "", "a", "\ud83d", "\u0000", [], [1], ["a"], {}, {"type": "regex"}, {"1": 5},
    [[1]], "x" * 5000,
)  # fmt: skip
PATHS = ("/v1/completions", "/v1/chat/completions", "/infill", "/tokenize", "/detokenize", "/v1/models", "/nowhere")


@probe()
def malformed(client: Client) -> Answer:
    """JSON with bytes replaced."""
    body = bytearray(json.dumps({"prompt": "a", "max_tokens": 4}).encode())
    for _ in range(client.dice.randrange(1, 5)):
        body[client.dice.randrange(len(body))] = client.dice.randrange(256)
    return client.post(bytes(body))


@probe()
def fields(client: Client) -> Answer:
    """Fields of any name and type, anywhere."""
    dice = client.dice
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 3}
    body |= {dice.choice(NAMES): dice.choice(VALUES) for _ in range(dice.randrange(1, 4))}
    return client.post(body, dice.choice(PATHS))


@probe("", "401")
def keys(client: Client) -> Answer:
    """Wrong keys."""
    return client.post(b'{"prompt": "a"}', key=client.dice.choice(["", "wrong", client.key[:-1], client.key + "x"]))


def _start(client: Client, body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return client.head("POST", "/v1/completions", "Content-Type: application/json", f"Content-Length: {size}") + body


@probe("", "left")
def drop(client: Client) -> Counter[str]:
    """A long answer whose reader leaves in the middle."""
    body = {"prompt": "def f(", "max_tokens": 3000, "stream": client.dice.random() < 0.7, "ignore_eos": True}
    with client.connect() as link:
        link.sendall(_start(client, json.dumps(body).encode()))
        end = time.monotonic() + 0.01 + client.dice.random()
        read_answer(link, end)
    return Counter(("left",))


@probe("", "left")
def unfinished(client: Client) -> Counter[str]:
    """A body that does not arrive."""
    with client.connect() as link:
        link.sendall(_start(client, b'{"prompt": ', 1000))
        client.wait(client.hold * client.dice.random())
        with contextlib.suppress(OSError):
            link.sendall(b'"a"')
    return Counter(("left",))


@probe("", "left")
def noise(client: Client) -> Counter[str]:
    """Random bytes."""
    with client.connect() as link:
        link.sendall(client.dice.randbytes(client.dice.randrange(1, 2000)))
    return Counter(("left",))


@probe("", "413")
def huge(client: Client) -> Answer:
    """A body of 20 MiB, above the limit."""
    return client.post(b'{"prompt": "' + b"a" * (20 << 20) + b'"}')
