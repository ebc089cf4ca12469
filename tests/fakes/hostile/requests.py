"""Probes of one request each: bodies that are costly to read, to check or to compile, and random ones."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from functools import cache, partial
from typing import Any

from tests.fakes.hostile.client import Answer, Client
from tests.fakes.hostile.probes import probe

BODY = 2 << 20
"""Bytes of the bodies with a million wrong elements: what a service takes by default."""
CHAT_PATH = "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
FEW = {"prompt": "a", "max_tokens": 1}
NAMES = (
    "prompt", "max_tokens", "temperature", "stop", "n", "logprobs", "suffix", "seed", "stream", "echo", "best_of",
    "logit_bias", "response_format", "messages", "x\u0000", "input_prefix", "input_suffix", "tokens", "priority",
    "min_tokens", "top_p", "tools", "return_token_ids", "stream_options", "chat_template_kwargs", "user",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 3, 1e308, 2**70, "", "a", "\ud83d", "\u0000", [], [1], ["a"], {}, {"type": "regex"}, {"1": 5},
    [[1]], "x" * 5000,
)  # fmt: skip
PATHS = ("/v1/completions", CHAT_PATH, "/infill", "/tokenize", "/detokenize", "/v1/models", "/nowhere")


@cache
def filled(start: str, element: str, end: str, size: int = BODY) -> bytes:
    """JSON of just under `size` bytes: `element` between `start` and `end`, as often as it fits."""
    count = (size - len(start) - len(end)) // (len(element) + 1)
    return (start + ",".join([element] * count) + end).encode()


# A million elements of a wrong type, in 2 MiB.
for name, path, *parts in (
    ("wrong_prompts", "/v1/completions", '{"prompt":[', "[]", "]}"),
    ("wrong_stops", "/v1/completions", '{"prompt":"a","stop":[', "1", "]}"),
    ("wrong_bias", "/v1/completions", '{"prompt":"a","logit_bias":{', '"x":""', "}}"),
    ("wrong_messages", CHAT_PATH, '{"messages":[', "1", "]}"),
    ("wrong_tokens", "/detokenize", '{"tokens":[', "{}", "]}"),
):
    probe("400", name=name)(lambda client, parts=parts, path=path: client.post(filled(*parts), path))  # type: ignore[misc]


def _unread(client: Client, method: str, path: str) -> Answer:
    # A surrogate pair, for which services may parse the body to see whether it is whole.
    return client.ask(method, path, filled('{"b":"\\ud83d\\ude00","a":[', "[]", "]}", 15 << 20), key="")


# 15 MiB of JSON without a key.
probe("401", "413", name="body_on_get")(partial(_unread, method="GET", path="/v1/models"))
probe("200", "400", "413", name="body_on_livez")(partial(_unread, method="GET", path="/livez"))
probe("401", "413", name="body_without_key")(partial(_unread, method="POST", path="/v1/completions"))


def _text(size: int) -> str:
    return "def f(x):\n    return x\n" * (size // 23)


# Long text for the model's context of 4096 tokens.
for name, path, body in (
    ("text_4_mib", "/v1/completions", lambda: {**FEW, "prompt": _text(4 << 20)}),
    ("text_2_mib", "/v1/completions", lambda: {**FEW, "prompt": _text(1_800_000)}),
    ("text_in_a_chat", CHAT_PATH, lambda: {**CHAT, "messages": [{"role": "user", "content": _text(1_800_000)}]}),
    ("text_to_infill", "/infill", lambda: {"input_prefix": _text(900_000), "input_suffix": _text(900_000)}),
    ("text_to_tokenize", "/tokenize", lambda: {"prompt": _text(1_800_000)}),
):
    probe("200", "400", "413", name=name)(lambda client, body=body, path=path: client.post(body(), path))  # type: ignore[misc]

# chat_template_kwargs that make the chat template count to 10^9, replace a token, or are 1.8 MB.
for name, value in (("overflows", {"pad": 10**9}), ("token", {"bos_token": "a"}), ("values", {"a": "x" * 1_800_000})):
    probe("400", *(("200",) if name == "values" else ()), name=f"template_{name}")(
        lambda client, value=value: client.post({**CHAT, "chat_template_kwargs": value}, CHAT_PATH)  # type: ignore[misc]
    )


def _format(kind: str, **more: Any) -> dict[str, Any]:
    return {**FEW, "response_format": {"type": kind, **more}}


@probe("400")
def grammar_chain(client: Client) -> Answer:
    """A grammar of 57 KB whose 3500 rules each name the next."""
    rules = [f'r{number}: "x" r{number + 1}\n' for number in range(3500)]
    return client.post(_format("grammar", grammar="start: r0\n" + "".join(rules) + 'r3500: "x"\n'))


@probe("400")
def schema_references(client: Client) -> Answer:
    """A JSON schema with 1000 chained references."""
    named: dict[str, Any] = {
        f"d{number}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{number + 1}"}}, "required": ["a"]}
        for number in range(1000)
    }
    schema = {"$defs": {**named, "d1000": {"type": "string"}}, "$ref": "#/$defs/d0"}
    return client.post(_format("json_schema", json_schema={"name": "a", "schema": schema}))


@probe("400")
def deep_schema(client: Client) -> Answer:
    """A JSON schema that is 5,000 objects deep."""
    schema = '{"properties":{"a":' * 5000 + "{}" + "}}" * 5000
    start = json.dumps(_format("json_schema"))[:-2]
    return client.post((start + ',"json_schema":{"name":"a","schema":' + schema + "}}}").encode())


@probe("400")
def deep_json(client: Client) -> Answer:
    """100,000 opening brackets."""
    return client.post(b"[" * 100_000)


@probe("400")
def many_choices(client: Client) -> Answer:
    """128 prompts of 128 choices each with a logit_bias: 42 KB."""
    body = f'{{"max_tokens":1,"n":128,"prompt":{json.dumps(["a"] * 128)},"logit_bias":{{'
    count = (42_000 - len(body)) // 12  # ids below the bundled model's 4096
    return client.post((body + ",".join(f'"{number:04}":1.00' for number in range(count)) + "}}").encode())


@probe("400")
def bias_of_many_digits(client: Client) -> Answer:
    """A logit_bias key of 100,000 digits."""
    return client.post({**FEW, "logit_bias": {"1" * 100_000: 1}})


@probe("200", "neighbour 200")
def priority_flood(client: Client) -> Counter[str]:
    """32 streams of priority -2^62 with one key, while another key asks once."""
    statuses = []
    body = {"prompt": "def f(", "max_tokens": 100, "ignore_eos": True, "stream": True, "priority": -(2**62)}

    def flood() -> None:
        own = Client(f"http://{client.address[0]}:{client.address[1]}", client.key)  # it keeps the last answer
        statuses.append(own.post(body).status)

    threads = [threading.Thread(target=flood) for _ in range(32)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    status = client.post(FEW, key=client.other).status
    for thread in threads:
        thread.join()
    return Counter((*statuses, f"neighbour {status}"))


@probe("421", keyless=True)
def foreign_host(client: Client) -> Answer:
    """A page of evil.example asks for the models of a service without keys (DNS rebinding)."""
    return client.ask("GET", "/v1/models", b"", "Host: evil.example", key="")


@probe("401")
def metrics_of_neighbours(client: Client) -> Answer:
    """GET /metrics without a key, under --protect-metrics."""
    return client.ask("GET", "/metrics", key="")


@probe("401")
def keys(client: Client) -> Answer:
    """Wrong keys."""
    return client.post(b'{"prompt": "a"}', key=client.dice.choice(["", "wrong", client.key[:-1], client.key + "x"]))


@probe("413")
def huge(client: Client) -> Answer:
    """A body of 20 MiB, above the limit."""
    return client.post(b'{"prompt": "' + b"a" * (20 << 20) + b'"}')


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


LONG_STOPS = ["a" * 1022 + end for end in "bcdefghijklmnopq"]


def _calls(arguments: str) -> bytes:
    message = f'{{"role":"assistant","content":[{{"type":"tool_use","id":"c","name":"f","input":{arguments}}}]}}'
    return f'{{"max_tokens":1,"messages":[{message}]}}'.encode()


SHAPES: dict[str, tuple[str, str, Any]] = {
    # Name: what it is, the path, the body.
    "stops_after_delivered": ("3,900 equal delivered ids and 16 stop strings that almost match", "/v1/completions",
        {**FEW, "temperature": 0, "max_tokens": 3950, "delivered_token_ids": [68] * 3900, "stop": LONG_STOPS}),
    "json_in_json": ("2 MB of empty lists in the input of a call", "/v1/messages",
        _calls('{"a":[' + "[]," * 690_000 + "[]]}")),
    "json_in_a_string": ("2 MB of empty lists in the arguments of a call", "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function":
            {"name": "f", "arguments": '{"a":[' + "[]," * 600_000 + "[]]}"}}]}]}),
    "wide_schema": ("a tool of 16,000 properties and as many other required names", "/v1/chat/completions",
        {**CHAT, "tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters":
            {"type": "object", "properties": {f"p{at}": {} for at in range(16_000)},
             "required": [f"q{at}" for at in range(16_000)]}}}]}),
    "echoed_scores": ("8 prompts of the whole context, echoed with 20 log-probabilities", "/v1/completions",
        {"prompt": [[68] * 4000] * 8, "echo": True, "logprobs": 20, "max_tokens": 1}),
    "many_fields": ("128 fillings with 256 response_fields of 1,000 characters", "/infill",
        {"input_prefix": "a", "input_suffix": "", "n_cmpl": 128, "n_predict": 1,
         "response_fields": [f"{at:04}" + "/a" * 498 for at in range(256)]}),
    "wrong_delivered": ("2 MB of wrong delivered ids", "/v1/completions",
        filled('{"prompt":"a","delivered_token_ids":[', '"a"', "]}")),
    "utf_16": ("half of a surrogate pair in UTF-16", "/v1/completions", '{"prompt":"a\\ud83d"}'.encode("utf-16")),
    "many_digits": ("max_tokens of 4,300 digits", "/v1/completions",
        b'{"prompt":"a","max_tokens":' + b"9" * 4300 + b"}"),
    "tiny_penalty": ("a repetition_penalty of 5e-324", "/v1/completions", {**FEW, "repetition_penalty": 5e-324}),
}  # fmt: skip
"""Bodies of the second reading."""


def _register(name: str, what: str, path: str, body: Any) -> None:
    def once(client: Client) -> Answer:
        return client.post(body, path)

    once.__name__, once.__doc__ = name, what + "."
    probe("200", "400", "413")(once)


for _name, _shape in SHAPES.items():
    _register(_name, *_shape)
