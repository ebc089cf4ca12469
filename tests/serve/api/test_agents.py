"""What agents speak: calls of tools in chats, OpenAI's responses and Anthropic's messages, by the SDKs of both."""

import json
import socket
import threading

import httpx
import pytest

from lpr.fleet.resume import Resumption
from tests.fakes.fake_driver import facts, served, tokenizer_json, wait_for

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools> <tool_call></tool_call>"
    "{% endif %}{% for message in messages %}<{{ message.role }}>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments.city }}]"
    "{% endfor %}"
    "</{{ message.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if enable_thinking %}<think>{% endif %}{# </think> #}"
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA}}
CALLS = 'Ok.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n' * 2
USER = [{"role": "user", "content": "u"}]


@pytest.fixture(scope="module")
def service():
    import anthropic  # five seconds, which only the worker that needs it spends
    import openai

    said = facts(tokenizer=tokenizer_json(), vocab_size=4096, max_length=2048, chat_templates={"default": TEMPLATE},
                 generation={"temperature": 0.25, "top_k": 7, "max_new_tokens": 99})  # fmt: skip
    with served(said) as running:
        running.openai = openai.OpenAI(base_url=running.url + "/v1", api_key="none", timeout=120, max_retries=0)
        running.anthropic = anthropic.Anthropic(base_url=running.url, api_key="none", timeout=120, max_retries=0)
        running.driver.per_step = 3
        yield running
        running.openai.close()
        running.anthropic.close()


@pytest.fixture(autouse=True)
def says_calls(service):
    service.driver.text = CALLS


def prompt_of(service):
    return service.front.context.served.tokens.decode(service.driver.submitted[-1].token_ids)


def ask(service, path="/v1/chat/completions", **body):
    return service.client.post(path, json={"messages": USER, **body})


# Chats.


@pytest.mark.slow
def test_a_chat_calls_tools_and_goes_on_with_their_results(service):
    create = service.openai.chat.completions.create
    answer = create(model="fake", messages=USER, tools=[TOOL])
    said = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls" and said.content == "Ok.Ok."
    assert [json.loads(call.function.arguments) for call in said.tool_calls] == [{"city": "Rome"}] * 2
    assert len({call.id for call in said.tool_calls}) == 2
    assert '"name": "weather"' in prompt_of(service)
    result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "sunny"}
    create(model="fake", messages=[*USER, said.model_dump(), result], tools=[TOOL])
    assert prompt_of(service).endswith("[weather Rome][weather Rome]</assistant><tool>sunny</tool><assistant>")


def test_a_stream_of_calls_adds_up_to_the_answer(service):
    with service.openai.chat.completions.stream(model="fake", messages=USER, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        choice = stream.get_final_completion().choices[0]
    assert kinds.count("tool_calls.function.arguments.delta") >= 4
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert choice.finish_reason == "tool_calls" and calls == [("weather", {"city": "Rome"})] * 2
    assert choice.message.content == "Ok.Ok."


def test_one_call_where_several_are_not_wanted_and_none_where_none_is(service):
    one = ask(service, tools=[TOOL], parallel_tool_calls=False).json()["choices"][0]["message"]
    assert len(one["tool_calls"]) == 1
    none = ask(service, tools=[TOOL], tool_choice="none").json()["choices"][0]
    assert none["message"] == {"role": "assistant", "content": CALLS, "refusal": None} and "tools" not in prompt_of(
        service
    )


def test_required_calls_have_a_grammar_and_chosen_ones_do_not(service):
    named = {"type": "function", "function": {"name": "weather"}}
    for more, held in (({}, False), ({"tool_choice": "required"}, True), ({"tool_choice": named}, True)):
        ask(service, tools=[TOOL], **more).raise_for_status()
        grammar = service.driver.submitted[-1].params.grammar
        assert bool(grammar) == held and ("weather" in grammar) == held
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    ask(service, tools=[strict]).raise_for_status()
    assert "TEXT" in service.driver.submitted[-1].params.grammar
    form = {"type": "json_object"}
    ask(service, tools=[TOOL], response_format=form).raise_for_status()
    assert "weather" in service.driver.submitted[-1].params.grammar


@pytest.mark.parametrize(
    "body, param",
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [{**TOOL, "function": {"name": "f", "parameters": {"default": 2**70}}}]}, "tools"),
        ({"tools": [TOOL], "response_format": {"type": "regex", "regex": "a"}}, "response_format"),
        ({"tools": [{**TOOL, "function": {"name": "a b"}}]}, "tools.0.function.name"),
        (
            {"tools": [{**TOOL, "function": {"name": "f", "parameters": {"type": "x"}}}], "tool_choice": "required"},
            "tools",
        ),
    ],
)
def test_a_wrong_tool_is_a_400_that_names_it(service, body, param):
    for padding in (0, 20_000):  # checked here, and in a process of its own
        answer = ask(service, **{**body, "user": "x"}, messages=[{"role": "user", "content": "u" + " " * padding}])
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param


def test_a_family_that_is_not_known_refuses_tools():
    with served() as other:
        error = ask(other, tools=[TOOL]).json()["error"]
        assert error["param"] == "tools" and "no calls in a form that is known" in error["message"]


def test_thoughts_are_told_apart(service):
    service.driver.text = "<think>\nhm\n</think>\n\nYes."
    for stream in (False, True):
        answer = ask(service, stream=stream)
        if not stream:
            message = answer.json()["choices"][0]["message"]
        else:
            lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if "{" in line]
            deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
            message = {
                name: "".join(each.get(name, "") for each in deltas) for name in ("reasoning_content", "content")
            }
        assert (message["reasoning_content"], message["content"]) == ("hm", "Yes.")
    service.driver.text = "hm</think>Yes."
    begun = ask(service, chat_template_kwargs={"enable_thinking": True}).json()["choices"][0]["message"]
    assert (begun["reasoning_content"], begun["content"]) == ("hm", "Yes.")


def test_a_stream_goes_on_within_a_call(service):
    """Another service has delivered the beginning: what it has said is read, and not said again."""
    ids = service.front.context.served.tokens.encode(CALLS)
    half = len(ids) // 4
    body = {"tools": [TOOL], "temperature": 0, "stream": True, "max_tokens": 200}
    texts = []
    for more in ({}, {"delivered_token_ids": ids[:half]}):
        lines = [line for line in ask(service, **body, **more).text.splitlines() if line.startswith("data: {")]
        deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        texts.append("".join(call["function"]["arguments"] for call in calls if call["index"] == 1))
    assert texts == ['{"city": "Rome"}'] * 2


# Defaults and metrics.


def test_the_models_own_defaults_count_where_a_request_gives_none(service):
    ask(service).raise_for_status()
    params = service.driver.submitted[-1].params
    assert (params.temperature, params.top_k, params.max_new_tokens) == (0.25, 7, 99)
    ask(service, temperature=1, top_k=0, max_tokens=150).raise_for_status()
    params = service.driver.submitted[-1].params
    assert (params.temperature, params.top_k, params.max_new_tokens) == (1.0, 0, 150)


def test_answers_carry_speculative_metrics_that_add_up(service):
    def counters():
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        lines = [line.split() for line in service.client.get("/metrics").text.splitlines() if line[:1] != "#"]
        return [sum(float(v) for k, v in lines if k.startswith(f"vllm:spec_decode_{name}_total")) for name in names]

    before, found = counters(), []
    for stream in (False, True):
        more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = ask(service, **more).text
        last = [line.removeprefix("data: ") for line in answer.splitlines() if '"metrics"' in line]
        assert len(last) == 1
        found.append(json.loads(last[0])["metrics"]["speculative_decoding"])
    after = counters()
    for at, name in enumerate(("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")):
        assert sum(each[name] for each in found) == after[at] - before[at]
    for each in found:
        histogram = each["acceptance_histogram"]
        assert sum(histogram) == each["num_spec_steps"] and len(histogram) == each["num_spec_tokens"] + 1
        assert sum(at * count for at, count in enumerate(histogram)) == each["num_accepted_draft_tokens"]
        assert each["mean_acceptance_length"] == 1 + each["num_accepted_draft_tokens"] / each["num_spec_steps"]
    assert "metrics" not in ask(service, n=2).json()


# Responses.

RESPONSE_TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}


def test_a_response_calls_tools_and_goes_on_with_their_results(service):
    create = service.openai.responses.create
    answer = create(model="fake", input="u", instructions="Be kind.", tools=[RESPONSE_TOOL], store=False)
    kinds = [item.type for item in answer.output]
    assert answer.status == "completed" and kinds == ["message", "function_call", "message", "function_call"]
    assert answer.output_text == "Ok.Ok." and answer.usage.total_tokens > answer.usage.output_tokens > 0
    call = answer.output[1]
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})
    assert "<system>Be kind.</system><user>u</user>" in prompt_of(service)
    items = [{"role": "user", "content": [{"type": "input_text", "text": "u"}]}]
    items += [item.model_dump(exclude_none=True) for item in answer.output[:2]]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    create(model="fake", input=items, tools=[RESPONSE_TOOL], store=False)
    assert prompt_of(service).endswith(
        "<user>u</user><assistant>Ok.[weather Rome]</assistant><tool>sunny</tool><assistant>"
    )


def test_functions_in_namespaces_are_called_by_their_own_names(service):
    """Codex's form. Web search, which OpenAI hosts, is left out beside other tools, and is no tool alone."""
    service.driver.text = CALLS.replace("weather", "sky.weather")
    space = {"type": "namespace", "name": "sky", "description": "d", "tools": [RESPONSE_TOOL]}
    search = {"type": "web_search", "external_web_access": False}
    same = {"model": "fake", "store": False, "tools": [space, search]}
    with service.openai.responses.stream(input="u", **same) as stream:
        call = stream.get_final_response().output[1]
    assert (call.namespace, call.name, json.loads(call.arguments)) == ("sky", "weather", {"city": "Rome"})
    assert '"name": "sky.weather"' in prompt_of(service) and "web_search" not in prompt_of(service)
    items = [{"role": "user", "content": "u"}, call.model_dump(exclude_none=True)]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    chosen = {"type": "function", "name": "weather", "namespace": "sky"}
    service.openai.responses.create(input=items, tool_choice=chosen, **same)
    assert "<assistant>[sky.weather Rome]</assistant>" in prompt_of(service)
    assert "sky.weather" in service.driver.submitted[-1].params.grammar
    for tools in ([search], [space, space], [RESPONSE_TOOL, {"type": "file_search", "vector_store_ids": ["x"]}]):
        answer = service.client.post("/v1/responses", json={"input": "u", "tools": tools})
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("tools")


def test_a_stream_of_a_response_adds_up_to_it(service):
    with service.openai.responses.stream(model="fake", input="u", tools=[RESPONSE_TOOL], store=False) as stream:
        events = list(stream)
        answer = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    assert [item.type for item in answer.output] == ["message", "function_call"] * 2
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in deltas) == '{"city": "Rome"}' * 2 and len(deltas) > 2


def test_a_response_that_is_cut_off_or_thinks(service):
    short = service.openai.responses.create(model="fake", input="u", max_output_tokens=2)
    assert short.status == "incomplete" and short.incomplete_details.reason == "max_output_tokens"
    service.driver.text = "hm</think>Yes."
    answer = service.openai.responses.create(model="fake", input="u", reasoning={"effort": "low"})
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output_text == "Yes." and answer.usage.output_tokens_details.reasoning_tokens > 0
    items = [{"role": "user", "content": "u"}, *(item.model_dump(exclude_none=True) for item in answer.output)]
    service.openai.responses.create(model="fake", input=items).model_dump()


def test_a_response_keeps_to_a_schema(service):
    form = {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}}
    answer = service.openai.responses.create(model="fake", input="u", text=form)
    assert "city" in service.driver.submitted[-1].params.grammar
    assert answer.text.format.to_dict() == form["format"]
    plain = service.client.post("/v1/responses", json={"input": "u", "text": {"verbosity": "low"}}).json()
    assert plain["text"] == {"format": {"type": "text"}, "verbosity": "low"}, "no name, as that of a schema"


def test_nothing_is_stored_and_the_answer_says_so(service):
    answer = service.openai.responses.create(model="fake", input="u", store=True)
    assert answer.to_dict()["store"] is False


def test_the_tool_to_blame_is_named(service):
    good = {"type": "object", "properties": {"a": {"type": "string"}}}
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": f"f{at}", "parameters": each}} for at, each in
             enumerate((good, bad))]  # fmt: skip
    body = {"messages": [{"role": "user", "content": "u"}], "tools": tools, "tool_choice": "required"}
    for path in ("/v1/chat/completions", "/beta/chat/completions"):
        answer = service.client.post(path, json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
        assert answer.json()["error"]["message"].startswith("tools: f1: ")
        assert service.client.post(path, json={**body, "tools": tools[:1]}).status_code == 200


@pytest.mark.parametrize(
    "name, value",
    [("previous_response_id", "resp_1"), ("conversation", "c"), ("background", True), 
     ("input", [{"type": "item_reference", "id": "x"}])],
)  # fmt: skip
def test_a_response_that_would_need_a_store_is_refused(service, name, value):
    answer = service.client.post("/v1/responses", json={"input": "u", name: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(name)


@pytest.mark.parametrize(
    "body, message",
    [
        ({"input": [{"type": "image"}]}, "input.0: type 'image' is none of 'message', 'function_call'"),
        ({"input": [{"type": None}]}, "input.0: this is no object with a type"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input.0.output: this field is required"),
        ({"tools": [{"type": "mcp"}]}, "tools.0: type 'mcp' is none of 'function', 'namespace', 'web_search'"),
        ({"tools": [{**RESPONSE_TOOL, "parameters": {"x": float("inf")}}]}, "tools: a number is not finite"),
        ({"metadata": {"x": 10**30}, "stream": True}, "metadata: a number is not finite, or an integer has more"),
        (
            {"tools": [{**RESPONSE_TOOL, "parameters": {"$ref": "#"}}], "tool_choice": "required"},
            "tools: weather: no",
        ),
        ({"max_output_tokens": 10**20}, "the prompt's 12 tokens and max_output_tokens 100000000000000000000 are"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text.format.schema: Invalid type"),
        ({"text": 1}, "text: this should be an object"),
    ],
)
def test_what_is_odd_in_a_response_is_named(service, body, message):
    answer = service.client.post(
        "/v1/responses", content=json.dumps({"input": "u", **body}), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(message), answer.text


# Messages.

ANTHROPIC_TOOL = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}


def test_a_message_calls_tools_and_goes_on_with_their_results(service):
    create = service.anthropic.messages.create
    system = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
    same = {"model": "fake", "max_tokens": 100_000, "system": system, "tools": [ANTHROPIC_TOOL]}
    answer = create(messages=USER, **same)
    assert answer.stop_reason == "tool_use" and [block.type for block in answer.content] == ["text", "tool_use"] * 2
    call = answer.content[1]
    assert (answer.content[0].text, call.name, call.input) == ("Ok.", "weather", {"city": "Rome"})
    assert "<system>Be kind.</system><user>u</user>" in prompt_of(service)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    said = [block.model_dump(exclude_none=True) for block in answer.content[:2]]
    messages = [*USER, {"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    create(messages=messages, **same)
    assert prompt_of(service).endswith(
        "<user>u</user><assistant>Ok.[weather Rome]</assistant><tool>sunny</tool><assistant>"
    )
    num = service.anthropic.messages.count_tokens(model="fake", messages=USER, system=system, tools=[ANTHROPIC_TOOL])
    used = answer.usage
    assert num.input_tokens == used.input_tokens + used.cache_read_input_tokens


def test_a_stream_of_a_message_adds_up_to_it(service):
    same = {"model": "fake", "max_tokens": 500, "tools": [ANTHROPIC_TOOL]}
    with service.anthropic.messages.stream(messages=USER, **same) as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert answer.stop_reason == "tool_use" and [block.type for block in answer.content] == ["text", "tool_use"] * 2
    assert answer.content[3].input == {"city": "Rome"} and answer.usage.output_tokens > 0


def test_stops_thoughts_and_choices_of_messages(service):
    same = {"model": "fake", "messages": USER}
    assert service.anthropic.messages.create(max_tokens=2, **same).stop_reason == "max_tokens"
    any_tool = {"type": "any", "disable_parallel_tool_use": True}
    service.anthropic.messages.create(
        max_tokens=9, tools=[ANTHROPIC_TOOL], tool_choice=any_tool, stop_sequences=["x"], **same
    )
    sent = service.driver.submitted[-1].params
    assert "weather" in sent.grammar and sent.stop == ("x",)
    service.driver.text = "hm</think>Yes."
    answer = service.anthropic.messages.create(max_tokens=2000, thinking={"type": "adaptive"}, **same)
    assert [block.type for block in answer.content] == ["thinking", "text"] and answer.content[0].thinking == "hm"


def test_a_message_that_the_client_has_begun_goes_on(service):
    begun = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}]
    service.anthropic.messages.create(model="fake", max_tokens=9, messages=begun)
    assert prompt_of(service).endswith("<user>u</user><assistant>It is")


def test_errors_of_messages_have_anthropics_shape(service):
    import anthropic

    with pytest.raises(anthropic.NotFoundError):
        service.anthropic.messages.create(model="other model", max_tokens=5, messages=USER)
    with pytest.raises(anthropic.BadRequestError) as caught:
        image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
        service.anthropic.messages.create(model="fake", max_tokens=5, messages=[{"role": "user", "content": [image]}])
    assert caught.value.body["type"] == "error" and "image" in caught.value.body["error"]["message"]
    for body in (
        {"messages": []},
        {"messages": USER, "nonsense": 1},
        {"messages": USER, "tools": [{"type": "web_search_20250305", "name": "w"}]},
    ):
        answer = service.client.post("/v1/messages", json={"max_tokens": 5, **body})
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


def steps_of(stream, path, service, cut=10**9):
    """What a router passes on of `cut` bytes of a service's stream; all its bytes without one."""
    head, got = {"Content-Type": "application/json"}, b""
    with service.client.stream("POST", path, content=stream.body, headers=head) as answer:
        for part in answer.iter_raw():
            got += stream.feed(part[:cut])
            cut -= len(part)
            if cut <= 0:
                break
    return got


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/responses", {"input": "u", "tools": [RESPONSE_TOOL]}),
        ("/v1/messages", {"messages": USER, "max_tokens": 500, "tools": [ANTHROPIC_TOOL]}),
    ],
)
@pytest.mark.slow(first=1)
def test_a_stream_of_blocks_goes_on_at_another_service(service, path, body):
    """Byte for byte, wherever it breaks off, within texts and calls, but for what any two answers are called."""
    fields = {**body, "stream": True, "temperature": 0.5, "seed": 3}

    def plain(data):
        events = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: ")]
        for event in events:
            for name in ("response", "message"):
                event[name] = {**event.get(name, {}), "id": "", "created_at": 0, "completed_at": 0}
        return events

    whole = steps_of(Resumption.of(path, fields), path, service)
    assert b"lpr.token_ids" not in whole and whole.count(b"event: ") > 15
    with_ids = steps_of(Resumption.of(path, {**fields, "return_token_ids": True}), path, service)
    assert b"lpr.token_ids" in with_ids
    for cut in range(300, len(with_ids), len(with_ids) // 12):
        stream = Resumption.of(path, fields)
        got = steps_of(stream, path, service, cut)
        assert not stream.is_complete and (stream.delivered or not got)
        assert plain(got + steps_of(stream, path, service)) == plain(whole) and stream.is_complete
    ids = stream.delivered
    rest = service.client.post(path, json={**fields, "stream": False, "delivered_token_ids": ids[: len(ids) // 2]})
    assert rest.json()["usage"]["output_tokens"] == len(ids) and rest.text.count("Rome") == 2


@pytest.mark.parametrize(
    "path, body", [("/v1/responses", {"input": "u"}), ("/v1/messages", {"messages": USER, "max_tokens": 9})]
)
@pytest.mark.slow(first=1)
def test_a_failure_within_a_stream_is_an_event(path, body):
    from lpr.protocol import Chunk, ErrorCode, Failure

    with served() as other:
        other.driver.hold = True
        other.driver.pause = 0.01

        def fail(*_):
            submit = other.driver.submitted[-1]
            other.driver.running.clear()
            other.driver.say(Chunk(submit.id, [], "", "error", Failure(ErrorCode.GENERATION_FAILED, "it broke")))

        with other.client.stream("POST", path, json={**body, "stream": True}) as answer:
            while not other.driver.submitted:
                pass
            other.call(fail)
            text = answer.read().decode()
    assert "it broke" in text and ("event: error" in text or "event: response.failed" in text) and "[DONE]" not in text


# Ends.

ROUTES = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "u", "store": False},
    "/v1/messages": {"messages": USER, "max_tokens": 50},
}
REASONS = {
    "/v1/chat/completions": '"finish_reason":"abort"',
    "/v1/responses": '"status":"incomplete"',
    "/v1/messages": '"error":{"type":"api_error","message":"the request was cancelled"}',
}
"""What an answer says whose request was deleted."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_a_client_that_goes_ends_its_request_on_every_route(service, path, stream):
    driver = service.driver
    driver.hold = True
    aborted, begin = len(driver.aborted), len(driver.submitted)
    try:
        link = socket.create_connection(("127.0.0.1", service.front.port))
        body = json.dumps({"model": "fake", "stream": stream, **ROUTES[path]}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        link.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        wait_for(lambda: len(driver.submitted) > begin)
        link.close()
        wait_for(lambda: len(driver.aborted) > aborted)
        wait_for(lambda: not service.front.context.open)
        assert service.front.service.num_waiting == 0
    finally:
        driver.hold = False


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_anthropic_raises_for_a_deleted_request_and_does_not_ask_again(service, stream):
    import anthropic

    service.driver.hold = True
    begin, failures = len(service.driver.submitted), []

    def ask():
        client = anthropic.Anthropic(base_url=service.url, api_key="none", timeout=120, max_retries=2)
        how = {"model": "fake", "max_tokens": 50, "messages": USER, "extra_headers": {"X-Request-Id": "again"}}
        try:
            if stream:
                with client.messages.stream(**how) as events:
                    events.get_final_message()
            else:
                client.messages.create(**how)
        except anthropic.APIStatusError as failure:
            failures.append(failure)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        wait_for(lambda: service.client.delete("/v1/requests/again").status_code == 200)
        thread.join(20)
        assert [failure.body["error"]["type"] for failure in failures] == ["api_error"]
        assert len(service.driver.submitted) == begin + 1
    finally:
        service.driver.hold = False


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.slow(first=3)
def test_delete_ends_a_request_of_every_route_with_what_it_has(service, path, stream):
    service.driver.hold = True
    body, named = {"model": "fake", "stream": stream, **ROUTES[path]}, {"X-Request-Id": "mine"}
    answers = []

    def ask():
        answers.append(httpx.post(service.url + path, json=body, headers=named, timeout=120))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        wait_for(lambda: service.client.delete("/v1/requests/mine").status_code == 200)
        thread.join(20)
        has_no_reason = path == "/v1/messages" and not stream
        assert answers[0].status_code == (499 if has_no_reason else 200), answers[0].text
        assert REASONS[path] in answers[0].text and "end_turn" not in answers[0].text
        wait_for(lambda: not service.front.context.open)
    finally:
        service.driver.hold = False
