"""Calls of tools by a real model, held to their schemas by grammars, through the SDKs of OpenAI and Anthropic.

The model is the bundled one, which knows no tools: only the grammar makes its calls valid.
"""

import json
import re
import time

import anthropic
import httpx
import openai
import psutil
import pytest
from serving import SMALL, make_model, serving

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
    flags = ("--served-model-name", "m", "claude", "--share-drafts", "none")  # so that a call takes many steps again
    with serving(folder, *flags, *SMALL, lp=2) as running:
        yield running


def check(arguments):
    assert set(arguments) == {"unit", "note"} and arguments["unit"] in ("C", "F")
    assert 40 <= len(arguments["note"]) <= 60


def chat_stream(service, on_event=lambda number: None, **more):
    """The calls of a streamed chat, as their names and arguments, and how it ended."""
    body = {**SAMPLED, "messages": USER, "tools": [CHAT_TOOL], "tool_choice": "required", "seed": 5, "stream": True}
    calls, finish, number = {}, None, 0
    with httpx.stream("POST", service.url + "/v1/chat/completions", json={**body, **more}, timeout=150) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            number += 1
            on_event(number)
            choice = json.loads(line[6:])["choices"][0]
            finish = choice["finish_reason"] or finish
            for each in choice["delta"].get("tool_calls", ()):
                call = calls.setdefault(each["index"], ["", ""])
                call[0] += each["function"].get("name", "")
                call[1] += each["function"]["arguments"]
    return list(calls.values()), finish, number


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
    assert [each["id"] for each in service.client.get("/v1/models").json()["data"]] == ["m", "claude"]
    assert service.client.get("/v1/models/claude").json()["id"] == "claude"
    assert service.client.get("/v1/models/gpt").status_code == 404


def test_a_driver_that_is_killed_within_a_call_leaves_it_unchanged(service):
    """The other of two ranks takes over."""
    wanted, finish, number = chat_stream(service)
    check(json.loads(wanted[0][1]))
    assert finish == "tool_calls" and number > 10

    def kill(at):
        if at == 8:
            ranks = psutil.Process(service.process.pid).children(recursive=True)
            ranks = [each for each in ranks if "lpr.serve.ranks.rank" in each.cmdline()]
            next(each for each in ranks if each.environ().get("RANK") == "0").kill()

    assert chat_stream(service, kill)[:2] == (wanted, finish)
    end = time.monotonic() + 20
    while not re.search(r'event="takeover".* 1\.0$', found := service.client.get("/metrics").text, re.M):
        assert time.monotonic() < end, "\n".join(line for line in found.splitlines() if "rank_event" in line)
        time.sleep(0.05)
