"""Calls of tools by a real model, held to their schemas by grammars, through the SDKs of OpenAI and Anthropic.

The model is the bundled one, which knows no tools: only the grammar makes its calls valid.
"""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import anthropic
import httpx
import openai
import psutil
import pytest

from tests.fakes import other_clients as clients
from tests.fakes.serving import SMALL, make_model, serving

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}# {{ tool | tojson }}\n{% endfor %}{# <tool_call></tool_call> #}{% endif %}"
    "{% for message in messages %}# {{ message.role }}: {{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}def {% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "note": {"type": "string", "minLength": 40, "maxLength": 60}},
    "required": ["unit", "note"],
    "additionalProperties": False,
}
USER = [{"role": "user", "content": "the weather"}]
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
SAMPLED = {"model": "m", "temperature": 0.8, "max_tokens": 300, "parallel_tool_calls": False}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("model"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    flags = (
        "--served-model-name",
        "m",
        "claude",
        "fake",
        "--share-drafts",
        "none",
    )  # so that a call takes many steps again
    with serving(folder, *flags, *SMALL, lp=2) as running:
        yield running


def check(arguments):
    assert set(arguments) == {"unit", "note"} and arguments["unit"] in ("C", "F")
    assert 40 <= len(arguments["note"]) <= 60


def pieces_of_chat(event):
    return [call["function"]["arguments"] for call in event["choices"][0]["delta"].get("tool_calls", ())]


def pieces_of_response(event):
    return [event["delta"]] if event["type"] == "response.function_call_arguments.delta" else []


def pieces_of_message(event):
    return [event["delta"].get("partial_json", "")] if event["type"] == "content_block_delta" else []


BODY = {"temperature": 0, "stream": True}
TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA}
ONE = {"type": "any", "disable_parallel_tool_use": True}
ROUTES = {
    "/v1/chat/completions": (
        {**SAMPLED, **BODY, "messages": USER, "tools": [CHAT_TOOL], "tool_choice": "required"}, pieces_of_chat,
    ),
    "/v1/responses": (
        {**BODY, "model": "m", "input": "u", "tools": [TOOL], "tool_choice": "required", "max_output_tokens": 300,
         "parallel_tool_calls": False, "store": False}, pieces_of_response,
    ),
    "/v1/messages": (
        {**BODY, "model": "claude", "max_tokens": 300, "messages": USER, "tool_choice": ONE,
         "tools": [{"name": "weather", "input_schema": SCHEMA}]}, pieces_of_message,
    ),
}  # fmt: skip
"""The body of a stream that calls the tool, and what of an event belongs to its arguments."""


def streamed_arguments(service, path, after=lambda number: None):
    """The arguments of the call of a stream, and in how many pieces they came; `after` is called with each number."""
    body, pieces_of = ROUTES[path]
    pieces = []
    with httpx.stream("POST", service.url + path, json=body, timeout=150) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for piece in filter(None, pieces_of(json.loads(line[6:]))):
                    pieces.append(piece)
                    after(len(pieces))
    return "".join(pieces), len(pieces)


def test_openais_sdk_makes_the_round_trip(service):
    with openai.OpenAI(base_url=service.url + "/v1", api_key="none", timeout=100, max_retries=0) as client:
        asked = {**SAMPLED, "tools": [CHAT_TOOL], "seed": 7}
        named = {"type": "function", "function": {"name": "weather"}}
        with client.chat.completions.stream(messages=USER, tool_choice=named, **asked) as stream:
            said = stream.get_final_completion().choices[0]
        assert said.finish_reason == "tool_calls" and len(said.message.tool_calls) == 1
        call = said.message.tool_calls[0]
        check(json.loads(call.function.arguments))
        whole = client.chat.completions.create(messages=USER, tool_choice=named, **asked).choices[0]
        assert whole.message.tool_calls[0].function.arguments == call.function.arguments
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        messages = [*USER, whole.message.model_dump(exclude_none=True), result]
        last = client.chat.completions.create(messages=messages, tool_choice="none", model="m", max_tokens=8)
        assert last.usage.completion_tokens > 0 and last.choices[0].finish_reason in ("length", "stop")
        tool = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
        asked = {"model": "m", "input": "u", "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
        with client.responses.stream(**asked, max_output_tokens=300, store=False) as stream:
            found = stream.get_final_response()
        check(json.loads(found.output[0].arguments))


def test_anthropics_sdk_makes_the_round_trip(service):
    with anthropic.Anthropic(base_url=service.url, api_key="none", timeout=100, max_retries=0) as client:
        asked = {"model": "claude", "max_tokens": 300, "tools": [{"name": "weather", "input_schema": SCHEMA}]}
        one = {"type": "any", "disable_parallel_tool_use": True}
        with client.messages.stream(messages=USER, tool_choice=one, **asked) as stream:
            said = stream.get_final_message()
        assert said.stop_reason == "tool_use" and [block.type for block in said.content] == ["tool_use"]
        check(said.content[0].input)
        result = {"type": "tool_result", "tool_use_id": said.content[0].id, "content": "sunny"}
        blocks = [{"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
        last = client.messages.create(messages=[*USER, *blocks], **{**asked, "max_tokens": 8})
        assert last.usage.output_tokens > 0


def test_models_by_alias(service):
    assert [each["id"] for each in service.client.get("/v1/models").json()["data"]] == ["m", "claude", "fake"]
    assert service.client.get("/v1/models/claude").json()["id"] == "claude"
    assert service.client.get("/v1/models/gpt").status_code == 404


def test_nodes_sdk_makes_the_round_trip(service):
    if clients.node_modules() is None:
        pytest.skip("needs node, and $LPR_NODE_MODULES with the package openai in it (npm install openai)")
    found = clients.ask_with_node(service.url, "required")
    finish, called, of_response = found["calls"]
    assert finish == "tool_calls" and found["after"] > 0 and len(called) == len(of_response) == 1
    for name, arguments in (*called, *of_response):
        assert name == "weather" and json.loads(arguments)["city"] in ("Rome", "Oslo")


def metric(service, pattern):
    """The value of a metric, -1 without it."""
    found = re.search(rf"^{pattern} (\S+)$", service.client.get("/metrics").text, re.M)
    return float(found[1]) if found else -1.0


def wait_for(service, pattern, value):
    end = time.monotonic() + 150
    while metric(service, pattern) != value:
        assert time.monotonic() < end, f"{pattern} is {metric(service, pattern)}"
        time.sleep(0.05)


def kill_the_driver(service):
    family = psutil.Process(service.process.pid).children(recursive=True)
    ranks = [each for each in family if "lpr.serve.ranks.rank" in each.cmdline() and "RANK" in each.environ()]
    # The first to come drives, and of those that came together rank 0.
    min(ranks, key=lambda each: (each.create_time(), each.environ()["RANK"])).kill()


def test_a_driver_that_is_killed_within_calls_leaves_them_unchanged(service):
    """The other of two ranks takes over, and has calls of all protocols to go on with."""
    wait_for(service, "lpr:lp(?:\\{.*\\})?", 2.0)
    takeovers = "lpr:rank_events_total\\{.*takeover.*\\}"
    before, wanted = metric(service, takeovers), {}
    for path in ROUTES:
        wanted[path], number = streamed_arguments(service, path)
        check(json.loads(wanted[path]))
        assert number > 6
    is_killed = []

    def kill():
        """Unless one of the calls has ended before the others had their third piece."""
        if service.client.get("/readyz").json()["running"] == len(ROUTES):
            kill_the_driver(service)
            is_killed.append(True)

    at_third = threading.Barrier(len(ROUTES), kill, timeout=150)

    def stream(path):
        return streamed_arguments(service, path, lambda number: number == 3 and at_third.wait())[0]

    for _ in range(20):
        with ThreadPoolExecutor(len(ROUTES)) as pool:
            assert dict(zip(ROUTES, pool.map(stream, ROUTES), strict=True)) == wanted
        if is_killed:
            break
    assert is_killed
    wait_for(service, takeovers, before + 1)
