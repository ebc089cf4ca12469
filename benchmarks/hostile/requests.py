"""Probes of one request each: bodies that are costly to read, to check or to compile."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from functools import cache
from typing import Any

from benchmarks.hostile.client import Answer, Client
from benchmarks.hostile.probes import probe

BODY = 2 << 20
"""Bytes of the bodies with a million wrong elements: what a service takes by default."""
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
FEW = {"prompt": "a", "max_tokens": 1}


@cache
def filled(start: str, element: str, end: str, size: int = BODY) -> bytes:
    """JSON of just under `size` bytes: `element` between `start` and `end`, as often as it fits."""
    count = (size - len(start) - len(end)) // (len(element) + 1)
    return (start + ",".join([element] * count) + end).encode()


def _format(kind: str, **more: Any) -> dict[str, Any]:
    return {**FEW, "response_format": {"type": kind, **more}}


@probe("1", "400")
def grammar_chain(client: Client) -> Answer:
    """A grammar of 57 KB whose 3500 rules each name the next."""
    rules = [f'r{number}: "x" r{number + 1}\n' for number in range(3500)]
    return client.post(_format("grammar", grammar="start: r0\n" + "".join(rules) + 'r3500: "x"\n'))


@probe("1", "400")
def schema_references(client: Client) -> Answer:
    """A JSON schema with 1000 chained references."""
    named: dict[str, Any] = {
        f"d{number}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{number + 1}"}}, "required": ["a"]}
        for number in range(1000)
    }
    schema = {"$defs": {**named, "d1000": {"type": "string"}}, "$ref": "#/$defs/d0"}
    return client.post(_format("json_schema", json_schema={"name": "a", "schema": schema}))


def _choices(client: Client, size: int, value: str) -> Answer:
    prompts = json.dumps(["a"] * 128)
    body = f'{{"max_tokens":1,"n":128,"prompt":{prompts},"logit_bias":{{'
    count = (size - len(body)) // (8 + len(value))  # ids below the bundled model's 4096
    return client.post((body + ",".join(f'"{number:04}":{value}' for number in range(count)) + "}}").encode())


@probe("3", "400")
def choices_13_kb(client: Client) -> Answer:
    """128 prompts of 128 choices each with a logit_bias: 13 KB."""
    return _choices(client, 13_000, "1")


@probe("3", "400")
def choices_42_kb(client: Client) -> Answer:
    """128 prompts of 128 choices each with a logit_bias: 42 KB."""
    return _choices(client, 42_000, "1.00")


@probe("4", "400")
def wrong_prompts(client: Client) -> Answer:
    """2 MiB of empty lists as prompts."""
    return client.post(filled('{"prompt":[', "[]", "]}"))


@probe("4", "400")
def wrong_nulls(client: Client) -> Answer:
    """2 MiB of nulls as prompts."""
    return client.post(filled('{"prompt":[', "null", "]}"))


@probe("4", "400")
def wrong_stops(client: Client) -> Answer:
    """A million numbers as stop strings: 2 MiB."""
    return client.post(filled('{"prompt":"a","stop":[', "1", "]}"))


@probe("4", "400")
def wrong_bias(client: Client) -> Answer:
    """2 MiB of logit_bias with keys and values of wrong types."""
    return client.post(_wrong_bias())


@cache
def _wrong_bias() -> bytes:
    return ('{"prompt":"a","logit_bias":{' + ",".join(f'"x{number}":""' for number in range(160_000)) + "}}").encode()


@probe("4", "400")
def wrong_messages(client: Client) -> Answer:
    """A million numbers as messages of a chat: 2 MiB."""
    return client.post(filled('{"messages":[', "1", "]}"), "/v1/chat/completions")


@probe("4", "400")
def wrong_tokens(client: Client) -> Answer:
    """2 MiB of empty objects as tokens to decode."""
    return client.post(filled('{"tokens":[', "{}", "]}"), "/detokenize")


def _unread(client: Client, method: str, path: str) -> Answer:
    # A surrogate pair, for which services may parse the body to see whether it is whole.
    return client.ask(method, path, filled('{"b":"\\ud83d\\ude00","a":[', "[]", "]}", 15 << 20), key="")


@probe("5", "401", "413")
def body_on_get(client: Client) -> Answer:
    """15 MiB of JSON on GET /v1/models, without a key."""
    return _unread(client, "GET", "/v1/models")


@probe("5", "200", "400", "401", "405", "413")
def body_on_options(client: Client) -> Answer:
    """15 MiB of JSON on OPTIONS, without a key."""
    return _unread(client, "OPTIONS", "/v1/completions")


@probe("5", "200", "400", "413")
def body_on_livez(client: Client) -> Answer:
    """15 MiB of JSON on GET /livez, without a key."""
    return _unread(client, "GET", "/livez")


@probe("5", "401", "413")
def body_without_key(client: Client) -> Answer:
    """15 MiB of JSON on POST /v1/completions, without a key."""
    return _unread(client, "POST", "/v1/completions")


def _text(size: int) -> str:
    return "def f(x):\n    return x\n" * (size // 23)


@probe("7", "400", "413")
def text_4_mib(client: Client) -> Answer:
    """4 MiB of text for the model's context of 4096 tokens."""
    return client.post({**FEW, "prompt": _text(4 << 20)})


@probe("7", "400", "413")
def text_2_mib(client: Client) -> Answer:
    """Text of just under 2 MiB for the model's context of 4096 tokens."""
    return client.post({**FEW, "prompt": _text(1_800_000)})


@probe("7", "400", "413")
def text_in_a_chat(client: Client) -> Answer:
    """The same in a message of a chat."""
    return client.post({**CHAT, "messages": [{"role": "user", "content": _text(1_800_000)}]}, "/v1/chat/completions")


@probe("7", "200", "400", "413")
def text_to_infill(client: Client) -> Answer:
    """The same around a hole for /infill."""
    return client.post({"input_prefix": _text(900_000), "input_suffix": _text(900_000), "n_predict": 1}, "/infill")


@probe("7", "200", "400", "413")
def text_to_tokenize(client: Client) -> Answer:
    """The same for /tokenize, whose answer may be long."""
    return client.post({"prompt": _text(1_800_000)}, "/tokenize")


@probe("9", "200", "neighbour 200")
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
    began = time.monotonic()
    status = client.post(FEW, key=client.other).status
    client.notes["neighbour_waits_s"] = round(time.monotonic() - began, 2)
    for thread in threads:
        thread.join()
    return Counter((*statuses, f"neighbour {status}"))


@probe("12", "421", keyless=True)
def foreign_host(client: Client) -> Answer:
    """A page of evil.example asks for the models of a service without keys (DNS rebinding)."""
    return client.ask("GET", "/v1/models", b"", "Host: evil.example", key="")


@probe("13", "401", flags=("--protect-metrics",))
def metrics_of_neighbours(client: Client) -> Answer:
    """GET /metrics without a key, under --protect-metrics."""
    return client.ask("GET", "/metrics", key="")


@probe("low", "400")
def bias_of_many_digits(client: Client) -> Answer:
    """A logit_bias key of 100,000 digits."""
    return client.post({**FEW, "logit_bias": {"1" * 100_000: 1}})


@probe("low", "400")
def template_that_overflows(client: Client) -> Answer:
    """chat_template_kwargs that make the chat template count to 10^9."""
    return client.post({**CHAT, "chat_template_kwargs": {"pad": 10**9}}, "/v1/chat/completions")


@probe("low", "400")
def template_token(client: Client) -> Answer:
    """chat_template_kwargs that replace bos_token."""
    return client.post({**CHAT, "chat_template_kwargs": {"bos_token": "a"}}, "/v1/chat/completions")


@probe("low", "200", "400")
def template_values(client: Client) -> Answer:
    """chat_template_kwargs of 1.8 MB."""
    return client.post({**CHAT, "chat_template_kwargs": {"a": "x" * 1_800_000}}, "/v1/chat/completions")


@probe("low", "400")
def deep_json(client: Client) -> Answer:
    """100,000 opening brackets."""
    return client.post(b"[" * 100_000)


@probe("low", "400")
def deep_schema(client: Client) -> Answer:
    """A JSON schema that is 5,000 objects deep."""
    schema = '{"properties":{"a":' * 5000 + "{}" + "}}" * 5000
    start = json.dumps(_format("json_schema"))[:-2]
    return client.post((start + ',"json_schema":{"name":"a","schema":' + schema + "}}}").encode())


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
    probe("58", "200", "400", "413")(once)


for _name, _shape in SHAPES.items():
    _register(_name, *_shape)
