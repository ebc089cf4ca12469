"""The front over real sockets, with a driver that needs no model: what clients see, and what reaches the driver."""

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import httpx
import pytest
from starlette.requests import Request

from lpr.config import InputError
from lpr.protocol import Chunk, ErrorCode, Failure
from lpr.serve.api.answers import answer
from lpr.serve.api.context import Context
from lpr.serve.api.middleware import Keys
from lpr.serve.errors import ApiError
from lpr.serve.front import Front
from lpr.serve.options import ServeArgs
from tests.fakes import fake_driver
from tests.fakes.fake_driver import facts, served, tokenizer_json, wait_for

TEXT = "return x + 1\n"
PROMPT = "def f(x):\n    "


@pytest.fixture(scope="module")
def service():
    with served() as running:
        yield running


def events(response):
    """The data of a stream's events, and whether it ended with [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    done = lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines if line != "[DONE]"], done


def error_of(response, status, param=None):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    return error


# Completions.


def test_a_completion_has_openais_shape_and_counts(service):
    answer = service.client.post("/v1/completions", json={"prompt": PROMPT}).json()
    assert answer["object"] == "text_completion" and answer["model"] == "fake" and answer["id"].startswith("cmpl-")
    choice = {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    assert answer["choices"] == [choice]
    usage = answer["usage"]
    assert usage["completion_tokens"] == 6 and usage["total_tokens"] == usage["prompt_tokens"] + 6
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}


def test_a_stream_is_one_event_per_step_and_ends_with_done(service):
    body = {"prompt": PROMPT, "stream": True, "stream_options": {"include_usage": True}}
    response = service.client.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    steps, done = events(response)
    assert done and [event["choices"][0]["text"] for event in steps[:-1]] == ["return x", " + ", "1\n"]
    assert [event["usage"] for event in steps[:-1]] == [None] * 3
    assert steps[-1]["choices"] == [] and steps[-1]["usage"]["completion_tokens"] == 6
    assert len({event["id"] for event in steps}) == 1


def test_continuous_usage_counts_up(service):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": PROMPT, "stream": True, "stream_options": options}
    steps, _ = events(service.client.post("/v1/completions", json=body))
    assert [event["usage"]["completion_tokens"] for event in steps] == [2, 4, 6, 6]


def test_prompts_and_n_give_choices_in_order_with_seeds_that_follow(service):
    begin = len(service.driver.submitted)
    body = {"prompt": ["a", "b"], "n": 2, "seed": 7, "max_tokens": 3}
    answer = service.client.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    sent = service.driver.submitted[begin:]
    assert [request.params.seed for request in sent] == [7, 8, 7, 8]
    assert sent[0].token_ids == sent[1].token_ids != sent[2].token_ids


def test_token_ids_go_in_and_come_out(service):
    body = {"prompt": [316, 295], "return_token_ids": True}
    choice = service.client.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["prompt_token_ids"] == [316, 295] == service.driver.submitted[-1].token_ids
    assert len(choice["token_ids"]) == 6


def test_echo_puts_the_prompt_before_the_text(service):
    answer = service.client.post("/v1/completions", json={"prompt": PROMPT, "echo": True}).json()
    assert answer["choices"][0]["text"] == PROMPT + TEXT
    begin = len(service.driver.submitted)
    alone = service.client.post("/v1/completions", json={"prompt": PROMPT, "echo": True, "max_tokens": 0}).json()
    assert alone["choices"][0]["text"] == PROMPT and len(service.driver.submitted) == begin
    steps, _ = events(service.client.post("/v1/completions", json={"prompt": PROMPT, "echo": True, "stream": True}))
    assert "".join(event["choices"][0]["text"] for event in steps) == PROMPT + TEXT


def test_every_parameter_reaches_the_driver(service):
    body = {
        "prompt": PROMPT, "max_tokens": 40, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3,
        "stop": ["a", "b"], "stop_token_ids": [9], "ignore_eos": True, "min_tokens": 2, "repetition_penalty": 1.2,
    }  # fmt: skip
    service.client.post("/v1/completions", json=body).raise_for_status()
    params = service.driver.submitted[-1].params
    assert (params.max_new_tokens, params.temperature, params.top_p, params.top_k) == (40, 0.7, 0.9, 5)
    assert (params.min_p, params.seed, params.stop, params.stop_token_ids) == (0.1, 3, ("a", "b"), (9,))
    assert (params.ignore_eos, params.min_new_tokens, params.repetition_penalty) == (True, 2, 1.2)


def test_a_request_without_a_seed_gets_one_of_its_own(service):
    for _ in range(2):
        service.client.post("/v1/completions", json={"prompt": PROMPT}).raise_for_status()
    first, second = service.driver.submitted[-2:]
    assert first.params.seed != second.params.seed and first.params.temperature == 1.0


@pytest.mark.parametrize("path", ["/v1/completions", "/beta/completions", "/completions"])
def test_suffix_makes_a_prompt_for_filling_in(service, path):
    body = {"prompt": "a = ", "suffix": "\nprint(a)"}
    service.client.post(path, json=body).raise_for_status()
    sent = service.driver.submitted[-1]
    tokens = service.front.context.served.tokens
    before, after = tokens.encode("a = "), tokens.encode("\nprint(a)")
    assert sent.token_ids == [4096, *before, 4097, *after, 4098]
    assert tokens.id_of("<|fim_pad|>") in sent.params.stop_token_ids


def test_mistrals_path_answers_like_a_chat(service):
    body = {"prompt": "a = ", "suffix": "\nprint(a)", "max_tokens": 8, "random_seed": 5}
    answer = service.client.post("/v1/fim/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == TEXT
    assert service.driver.submitted[-1].params.seed == 5


def test_mistrals_path_without_max_tokens_takes_what_fits(service):
    for prompt, most in (("a = ", None), ("a = 1\n" * 60, None), ("a = ", 7)):
        body = {"prompt": prompt, "suffix": "\n", **({"max_tokens": most} if most is not None else {})}
        service.client.post("/v1/fim/completions", json=body).raise_for_status()
        sent = service.driver.submitted[-1]
        assert sent.params.max_new_tokens == (most or 512 - len(sent.token_ids))
    error_of(service.client.post("/v1/fim/completions", json={"prompt": "a", "max_tokens": 0}), 400, "max_tokens")
    error_of(service.client.post("/v1/fim/completions", json={"prompt": "a " * 2000}), 400, "prompt")
    with served(facts(max_length=4096)) as long:
        long.client.post("/v1/fim/completions", json={"prompt": "a = ", "suffix": "\n"}).raise_for_status()
        assert long.driver.submitted[-1].params.max_new_tokens == 512


# What is refused.


@pytest.mark.parametrize(
    "body, param",
    [
        ({"prompt": "a", "nonsense": 1}, "nonsense"),
        ({"prompt": "a", "tools": []}, "tools"),
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [5000000]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": -2}, "max_tokens"),
        ({"prompt": "a", "typical_p": 0.9}, "typical_p"),
        ({"prompt": "a", "repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n"),
        ({"prompt": "a", "samplers": ["mirostat"]}, "samplers"),
        ({"prompt": "a", "samplers": "kq"}, "samplers"),
        ({"prompt": "a", "stream_options": {}}, "stream_options"),
        ({"prompt": "a", "max_tokens": 100000}, "max_tokens"),
        ({"prompt": "a " * 2000}, "prompt"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "temperature": "1"}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "top_k": 1.5}, "top_k"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 2, "best_of": 1}, "best_of"),
        ({"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"prompt": "a", "min_tokens": 17}, "min_tokens"),
        ({"prompt": [1], "suffix": "b"}, "suffix"),
        ({"prompt": "a", "use_beam_search": True}, "use_beam_search"),
        ({"prompt": "a", "stop_token_ids": [99999]}, "stop_token_ids"),
        ({"prompt": "a", "response_format": {"type": "regex", "regex": "("}}, "response_format.regex"),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(service, body, param):
    begin = len(service.driver.submitted)
    error = error_of(service.client.post("/v1/completions", json=body), 400, param)
    assert error["type"] == "invalid_request_error" and error["message"]
    assert len(service.driver.submitted) == begin


_SAY = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("temperature", ["1e-39", "5e-324", "1e39", "1e999", "NaN", "-1e-300"])
@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": _SAY}),
        ("/v1/messages", {"messages": _SAY, "max_tokens": 4}),
        ("/v1/responses", {"input": "a"}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ],
)
def test_a_temperature_that_float32_does_not_have_is_a_400_on_every_route(service, path, body, temperature):
    begin, content = len(service.driver.submitted), json.dumps(body)[:-1] + f', "temperature": {temperature}}}'
    answer = service.client.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert "temperature" in answer.text or "JSON" in answer.text
    assert len(service.driver.submitted) == begin


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"null", b'{"prompt": "\\ud800"}', b"\xff", b'{"a' + b"[" * 99999]
)
def test_a_body_that_is_no_request_is_a_400(service, content):
    headers = {"Content-Type": "application/json"}
    response = service.client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_other_content_types_are_refused(service):
    error_of(service.client.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"}), 415)


def test_unknown_models_paths_and_methods(service):
    error_of(service.client.post("/v1/completions", json={"prompt": "a", "model": "gpt"}), 404, "model")
    error_of(service.client.get("/v1/models/gpt"), 404, "model")
    error_of(service.client.get("/nowhere"), 404)
    assert "POST" in service.client.get("/v1/completions").headers["allow"]
    assert service.client.post("/v1/completions", json={"prompt": "a", "model": "other"}).json()["model"] == "other"


def test_a_model_without_the_tokens_refuses_suffix_and_infill():
    with served(facts(tokenizer=tokenizer_json(), vocab_size=4096, chat_templates={})) as plain:
        error = error_of(plain.client.post("/v1/completions", json={"prompt": "a", "suffix": "b"}), 400, "suffix")
        assert error["code"] == "fim_not_supported"
        error_of(plain.client.post("/infill", json={"input_prefix": "a", "input_suffix": "b"}), 400, "input_suffix")
        error_of(plain.client.post("/v1/fim/completions", json={"prompt": "a", "suffix": "b"}), 400, "suffix")
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        error_of(plain.client.post("/v1/chat/completions", json=chat), 400, "messages")
        # Where nothing follows, there is no hole: every model can go on.
        answer = plain.client.post("/infill", json={"input_prefix": "a", "input_suffix": "\n", "n_predict": 4}).json()
        assert answer["content"] and TEXT.startswith(answer["content"])


# Chats.


def test_a_chat_goes_through_the_models_template(service):
    body = {
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]}]
    }
    answer = service.client.post("/v1/chat/completions", json=body).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    tokens = service.front.context.served.tokens
    assert tokens.decode(service.driver.submitted[-1].token_ids) == "<system>s</system><user>u</user><assistant>"


def test_a_chat_streams_its_role_first(service):
    body = {"messages": [{"role": "user", "content": "u"}], "stream": True}
    steps, done = events(service.client.post("/v1/chat/completions", json=body))
    assert done and steps[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"]["content"] for event in steps) == TEXT
    assert steps[-1]["choices"][0]["finish_reason"] == "stop"
    assert {event["object"] for event in steps} == {"chat.completion.chunk"}


def test_a_final_message_is_continued(service):
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "I say "}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    service.client.post("/v1/chat/completions", json=body).raise_for_status()
    tokens = service.front.context.served.tokens
    assert tokens.decode(service.driver.submitted[-1].token_ids) == "<user>u</user><assistant>I say "


def test_the_template_is_told_more(service):
    def ask(**kwargs):
        body = {"messages": [{"role": "user", "content": "u"}], "chat_template_kwargs": kwargs}
        return service.client.post("/v1/chat/completions", json=body)

    tokens = service.front.context.served.tokens
    for kwargs, end in (({"thinking": False}, "<assistant>"), ({"add_generation_prompt": False}, "")):
        ask(**kwargs).raise_for_status()
        assert tokens.decode(service.driver.submitted[-1].token_ids) == "<user>u</user>" + end
    for name in ("messages", "tools", "documents", "self"):
        error = error_of(ask(**{name: []}), 400, "chat_template_kwargs")
        assert name in error["message"]


def test_an_answer_dumped_by_openais_client_can_be_sent_back(service):
    openai = pytest.importorskip("openai")
    messages = [{"role": "user", "content": "u"}]
    with openai.OpenAI(base_url=service.url + "/v1", api_key="none", timeout=120, max_retries=0) as client:
        said = client.chat.completions.create(model="fake", messages=messages).choices[0].message.model_dump()
        assert {"tool_calls", "function_call", "audio", "annotations"} <= set(said)
        client.chat.completions.create(model="fake", messages=[*messages, said, *messages])


@pytest.mark.parametrize("name", ["web_search_options", "functions", "messages.0.audio"])
def test_an_unknown_field_is_refused_unless_it_is_null(service, name):
    def ask(value):
        message = {"role": "user", "content": "u"}
        body = {"messages": [message]}
        (message if name.startswith("messages") else body)[name.rpartition(".")[2]] = value
        return service.client.post("/v1/chat/completions", json=body)

    assert ask(None).status_code == 200
    for value in (1, "", [], {}, False):
        assert error_of(ask(value), 400, name)["code"] == "unsupported_parameter"


def test_what_llama_vim_sends_to_a_chat_is_understood(service):
    warm = {
        "id_slot": 1, "messages": [{"role": "user", "content": "u"}], "samplers": [], "n_predict": 0, "stream": False,
        "cache_prompt": True, "response_fields": [""],
    }  # fmt: skip
    assert service.client.post("/v1/chat/completions", json=warm).json() == {}
    assert service.driver.submitted[-1].params.max_new_tokens == 1


# llama.cpp's /infill.

VIM = {
    "id_slot": 0, "input_prefix": "def f(x):\n", "input_suffix": "\nprint(f(2))\n", "prompt": "    ", "n_predict": 16,
    "input_extra": [{"text": "import os\n", "time": [1, 2], "filename": "a.py"}], "stop": [], "n_indent": 0,
    "top_k": 40, "top_p": 0.9, "samplers": ["top_k", "top_p", "infill"], "stream": False, "cache_prompt": True,
    "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
    "response_fields": ["content", "timings/prompt_n", "timings/prompt_ms", "timings/predicted_n", "truncated",
                        "tokens_cached"],
}  # fmt: skip


def test_what_llama_vim_sends_is_understood(service):
    answer = service.client.post("/infill", json=VIM).json()
    assert answer["content"] == TEXT and answer["timings/predicted_n"] == 6 and answer["truncated"] is False
    assert set(answer) == set(VIM["response_fields"])
    sent = service.driver.submitted[-1]
    assert sent.params.temperature == 0 and sent.params.top_k == 40
    text = service.front.context.served.tokens.decode(sent.token_ids)
    assert text == (
        "<|repo_name|>repository\n<|file_sep|>a.py\nimport os\n<|file_sep|>current\n"
        "<|fim_prefix|>def f(x):\n    <|fim_suffix|>\nprint(f(2))\n<|fim_middle|>"
    )


def test_n_predict_0_only_warms_the_cache(service):
    warm = {**VIM, "n_predict": 0, "samplers": [], "response_fields": [""], "t_max_predict_ms": 1}
    assert service.client.post("/infill", json=warm).json() == {}
    answer = service.client.post("/infill", json={**warm, "response_fields": None}).json()
    assert answer["content"] == "" and answer["tokens_predicted"] == 0
    assert service.driver.submitted[-1].params.max_new_tokens == 1


def test_infill_streams_without_done_as_llama_cpp(service):
    steps, done = events(service.client.post("/infill", json={**VIM, "stream": True, "response_fields": None}))
    assert not done and [event["stop"] for event in steps] == [False, False, True]
    assert "".join(event["content"] for event in steps) == TEXT and "timings" in steps[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_middle_that_ends_by_its_indentation_is_counted_as_stopped(stream):
    with served() as service:
        driver, num_steps = service.driver, 0

        def before_step(running):
            nonlocal num_steps
            num_steps += 1
            if num_steps > 1:
                raise asyncio.CancelledError  # no further step

        driver.text, driver.per_step, driver.before_step = "return x\nprint(1)\nfoo = 3\n", 8, before_step
        body = {**VIM, "n_indent": 4, "stream": stream, "response_fields": None}
        response = service.client.post("/infill", json=body)
        steps = events(response)[0] if stream else [response.json()]
        assert "".join(step["content"] for step in steps) == "return x\n"
        assert [step["stop"] for step in steps] == ([False, True] if stream else [True])
        assert steps[-1]["stop_type"] == "eos" and steps[-1]["timings"]["cache_n"] == 3
        assert steps[-1]["tokens_predicted"] == 8
        assert driver.finished == [1] and not driver.aborted and not service.front.service.num_waiting
        assert counted(service, "vllm:request_success_total") == 1
        assert counted(service, "vllm:request_success_total", 'finished_reason="stop"') == 1
        assert counted(service, "vllm:prefix_cache_hits_total") == 3 and counted(service, "lpr:steps_total") == 2


def test_a_prompt_that_does_not_fit_keeps_what_is_nearest_to_the_hole(service):
    long = {**VIM, "input_prefix": "a = 1\n" * 500, "input_suffix": "b = 2\n" * 500, "response_fields": None}
    answer = service.client.post("/infill", json=long).json()
    sent = service.driver.submitted[-1]
    assert answer["truncated"] is True and len(sent.token_ids) + 16 <= 512
    text = service.front.context.served.tokens.decode(sent.token_ids)
    assert "a = 1\n    <|fim_suffix|>b = 2\n" in text and text.endswith("<|fim_middle|>")


@pytest.mark.parametrize(
    "name, value", [("samplers", ["mirostat"]), ("n_predict", -2), ("lora", [1]), ("n_indent", -1)]
)
def test_infill_refuses_by_name(service, name, value):
    error_of(service.client.post("/infill", json={**VIM, name: value}), 400, name)


# Tokens, models, metrics.


def test_tokens_there_and_back(service):
    ids = service.client.post("/tokenize", json={"prompt": "def é(x):", "return_token_strs": True}).json()
    assert service.client.post("/detokenize", json={"tokens": ids["tokens"]}).json()["prompt"] == "def é(x):"
    assert len(ids["token_strs"]) == ids["count"] and ids["max_model_len"] == 512
    assert service.client.post("/tokenize", json={"content": "def"}).json()["tokens"] == ids["tokens"][:1]
    error_of(service.client.post("/detokenize", json={"tokens": [10**6]}), 400, "tokens")
    assert service.client.post("/tokenize", json={}).status_code == 400


def test_logprobs_in_both_shapes():
    with served() as service:
        body = {"prompt": PROMPT, "logprobs": 2, "max_tokens": 2}
        found = service.client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
        assert found["tokens"] == ["return", " x"] and found["token_logprobs"] == [-0.5, -0.5]
        assert found["text_offset"] == [0, 6] and len(found["top_logprobs"][0]) == 2
        whole = service.client.post("/v1/completions", json={**body, "echo": True}).json()["choices"][0]
        ids = service.driver.submitted[-1].token_ids
        scored = service.driver.submitted[-2]
        assert (scored.token_ids, scored.params.forced_ids, scored.params.logprobs) == (ids[:1], tuple(ids[1:]), 2)
        echoed = whole["logprobs"]
        assert "".join(echoed["tokens"]) == whole["text"] == PROMPT + "return x"
        assert echoed["token_logprobs"] == [None, *[-0.5] * (len(ids) + 1)] and echoed["top_logprobs"][0] is None
        for at, text in zip(echoed["text_offset"], echoed["tokens"], strict=True):
            assert whole["text"][at:].startswith(text)
        steps, _ = events(service.client.post("/v1/completions", json={**body, "echo": True, "stream": True}))
        for name, values in echoed.items():
            assert [each for step in steps for each in step["choices"][0]["logprobs"][name]] == values
        alone = service.client.post("/v1/completions", json={**body, "echo": True, "max_tokens": 0}).json()
        assert alone["choices"][0]["logprobs"] == {name: values[: len(ids)] for name, values in echoed.items()}
        assert alone["usage"]["completion_tokens"] == 0
        body = {"messages": [{"role": "user", "content": "u"}], "logprobs": True, "top_logprobs": 1, "max_tokens": 1}
        found = service.client.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
        assert found[0]["token"] == "return" and found[0]["bytes"] == list(b"return")
        assert [each["token"] for each in found[0]["top_logprobs"]] == ["return"]
        assert service.driver.submitted[-1].params.logprobs == 1


def test_metrics_have_vllms_names(service):
    service.client.post("/v1/completions", json={"prompt": PROMPT}).raise_for_status()
    text = service.client.get("/metrics").text
    names = (
        "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket", 
        "e2e_request_latency_seconds_bucket",
        "request_queue_time_seconds_bucket", "request_prefill_time_seconds_bucket",
        "request_decode_time_seconds_bucket", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
        "prompt_tokens_total", "generation_tokens_total", "request_success_total", "prefix_cache_queries_total",
        "prefix_cache_hits_total", "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_per_pos_total",
    )  # fmt: skip
    for name in names:
        assert re.search(rf'^vllm:{name}{{[^}}]*model_name="fake"', text, re.M), name
    assert re.search(r"^vllm:prefix_cache_hits_total{.*} [1-9]", text, re.M)
    assert re.search(r'^lpr:draft_nodes_total{.*source="trie".*} [1-9]', text, re.M)


def counted(service, name, label=""):
    """A counter's value, summed over its labels but for `label`."""
    text = service.client.get("/metrics").text
    return sum(float(value) for value in re.findall(rf"^{name}{{.*{label}.*}} (\S+)$", text, re.M))


def test_scoring_a_prompt_is_part_of_its_request_and_no_output(service):
    def counts():
        names = ("vllm:request_success_total", "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count",
                 "vllm:prompt_tokens_total", "lpr:steps_total")  # fmt: skip
        return [counted(service, name) for name in names]

    before = counts()
    body = {"prompt": PROMPT, "echo": True, "logprobs": 0, "max_tokens": 4}
    usage = service.client.post("/v1/completions", json=body).json()["usage"]
    *requests, steps = [new - old for new, old in zip(counts(), before, strict=True)]
    assert requests == [1, 4, 1, usage["prompt_tokens"]]
    assert steps == 2 + (usage["prompt_tokens"] - 1) // 2, "the ranks took the steps of both"


def test_the_schema_lists_the_endpoints_and_one_kind_of_error(service):
    schema = service.client.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/infill", "/tokenize", "/readyz"} <= set(schema["paths"])
    assert all("422" not in each["responses"] for path in schema["paths"].values() for each in path.values())
    assert {"type": "http", "scheme": "bearer"} in schema["components"]["securitySchemes"].values()


# Long texts.

LONG = "a = 1\n" * 4000
CHAT = {"messages": [{"role": "user", "content": LONG}]}


@pytest.fixture(scope="module")
def roomy():
    with served(facts(max_length=1 << 16)) as running:
        yield running


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/fim/completions", {"prompt": LONG, "suffix": "b"}),
        ("/v1/chat/completions", CHAT),
        ("/infill", {"input_prefix": LONG, "input_suffix": "b"}),
        ("/tokenize", {"content": LONG}),
    ],
)
def test_others_are_answered_while_a_long_text_is_encoded(roomy, monkeypatch, path, body):
    begun, answered = threading.Event(), threading.Event()

    def slow(self, text, *_, **__):
        begun.set()
        assert answered.wait(20), "nothing else was answered meanwhile"
        return [5]

    for name in ("encode", "encode_piece"):
        monkeypatch.setattr(f"lpr.serve.text.tokens.Tokens.{name}", slow)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(httpx.post(roomy.url + path, json=body, timeout=60)))
    thread.start()
    assert begun.wait(10)
    assert httpx.get(roomy.url + "/livez", timeout=60).status_code == 200
    answered.set()
    thread.join(60)
    assert answers[0].status_code == 200


def test_what_never_fits_is_not_asked_for_again(service):
    """512 texts are more than an empty queue takes: a client that waits and tries again would do so for ever."""
    answer = service.client.post("/v1/completions", json={"prompt": ["a"] * 128, "n": 4})
    assert "512 texts at once" in error_of(answer, 400)["message"] and "retry-after" not in answer.headers


# Ends.


@pytest.mark.parametrize("stream", [False, True])
def test_a_dropped_connection_aborts(service, stream):
    service.driver.hold = True
    aborted, begin = len(service.driver.aborted), len(service.driver.submitted)
    try:
        link = socket.create_connection(("127.0.0.1", service.front.port))
        body = json.dumps({"prompt": PROMPT, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        link.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        wait_for(lambda: len(service.driver.submitted) > begin)
        link.close()
        wait_for(lambda: len(service.driver.aborted) > aborted)
        wait_for(lambda: not service.front.context.open)
        assert service.front.service.num_waiting == 0
    finally:
        service.driver.hold = False


def test_delete_ends_a_request_with_what_it_has(service):
    service.driver.hold = True
    answers = []
    body = {"prompt": PROMPT, "request_id": "mine"}
    thread = threading.Thread(target=lambda: answers.append(httpx.post(service.url + "/v1/completions", json=body)))
    thread.start()
    try:
        wait_for(lambda: service.client.delete("/v1/requests/mine").status_code == 200)
        thread.join(10)
        assert answers[0].json()["choices"][0]["finish_reason"] == "abort"
        error_of(service.client.delete("/v1/requests/mine"), 404, "request_id")
    finally:
        service.driver.hold = False


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("most", [0, 4])
def test_delete_while_a_prompt_is_scored_ends_the_request_with_what_it_has(most, stream):
    with served() as service:
        service.driver.before_step = lambda running: setattr(service.driver, "hold", True)  # after one step
        body = {"prompt": PROMPT, "echo": True, "logprobs": 0, "max_tokens": most, "request_id": "me", "stream": stream}
        answers = ask_in_thread(service, **body)
        wait_for(lambda: service.driver.hold)
        wait_for(lambda: service.front.service.num_running and service.client.delete("/v1/requests/me").is_success)
        response = answers()
        assert response.status_code == 200, response.text
        choice = (events(response)[0][0] if stream else response.json())["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (PROMPT, "abort")
        logprobs = choice["logprobs"]["token_logprobs"]
        assert logprobs in ([None], [None, -0.5, -0.5]) and len(choice["logprobs"]["tokens"]) == len(logprobs)
        wait_for(lambda: len(service.driver.aborted) == 1)
        wait_for(lambda: not service.front.context.open)
        assert len(service.driver.submitted) == 1


def test_the_same_id_twice_at_once_is_refused(service):
    service.driver.hold = True
    body = {"prompt": PROMPT, "request_id": "twice"}
    thread = threading.Thread(target=lambda: httpx.post(service.url + "/v1/completions", json=body))
    thread.start()
    try:
        wait_for(lambda: ("", "cmpl-twice") in service.front.context.open)
        error_of(service.client.post("/v1/completions", json=body), 400, "request_id")
    finally:
        service.driver.hold = False
        thread.join(10)


@pytest.mark.parametrize("stream", [False, True])
def test_one_x_request_id_serves_several_requests_at_once(service, stream):
    service.driver.hold = True
    begin, headers = len(service.driver.submitted), {"X-Request-Id": "trace-1"}
    answers = [ask_in_thread(service, headers=headers, stream=stream) for _ in range(3)]
    try:
        wait_for(lambda: len(service.driver.submitted) == begin + 3)
        assert len(service.front.context.open) == 3
    finally:
        service.driver.hold = False
    responses = [answer() for answer in answers]
    assert [each.status_code for each in responses] == [200] * 3
    assert {each.headers["x-request-id"] for each in responses} == {"trace-1"}
    ids = [events(each)[0][0]["id"] if stream else each.json()["id"] for each in responses]
    assert "cmpl-trace-1" in ids and len(set(ids)) == 3
    assert all(re.fullmatch("cmpl-trace-1(-[0-9a-f]{8})?", id) for id in ids)
    wait_for(lambda: not service.front.context.open)


def test_delete_ends_all_that_came_with_an_x_request_id(service):
    service.driver.hold = True
    begin, headers = len(service.driver.submitted), {"X-Request-Id": "trace-2"}
    answers = [ask_in_thread(service, headers=headers) for _ in range(2)]
    try:
        wait_for(lambda: len(service.driver.submitted) == begin + 2)
        assert service.client.delete("/v1/requests/trace-2").status_code == 200
        assert [answer().json()["choices"][0]["finish_reason"] for answer in answers] == ["abort"] * 2
    finally:
        service.driver.hold = False


def test_a_stream_has_its_id_before_its_first_event():
    """Two requests can be taken before either answer begins, and one that never begins gives its id back."""
    context = Context(service=SimpleNamespace(weights={}), metrics=None, args=ServeArgs())
    request = Request({"type": "http", "state": {"request_id": "a"}})

    class Idle:
        choices = ()
        num_cancelled = 0

        def cancel(self):
            self.num_cancelled += 1

    async def reader(message):
        raise OSError("it has gone")

    async def go():
        first = context.name(request, "cmpl", "a")
        response = await answer(context, request, first, Idle(), None, True)
        with pytest.raises(ApiError):
            context.name(request, "cmpl", "a")
        with pytest.raises(OSError):
            await response({}, None, reader)
        assert context.name(request, "cmpl", "a") == first and not context.open

    asyncio.run(go())


def test_an_error_of_the_engine_is_an_error_in_both_forms(service):
    service.driver.hold = True
    begin = len(service.driver.submitted)
    answers = []

    def ask(stream):
        body = {"prompt": PROMPT, "stream": stream}
        answers.append(httpx.post(service.url + "/v1/completions", json=body, timeout=120))

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(service.driver.submitted) == begin + 2)
    for sent in service.driver.submitted[begin:]:
        service.call(
            lambda sent=sent: service.driver.say(
                Chunk(sent.id, [], "", "error", Failure(ErrorCode.GENERATION_FAILED, "NaN"))
            )
        )
    for thread in threads:
        thread.join(10)
    service.driver.hold = False
    whole = next(answer for answer in answers if answer.status_code != 200)
    error_of(whole, 500)
    stream = next(answer for answer in answers if answer.status_code == 200)
    steps, done = events(stream)
    assert done and steps[-1]["error"]["message"] == "NaN"


def test_a_request_that_takes_too_long_is_ended():
    with served(request_timeout=0.3) as service:
        service.driver.hold = True
        error = error_of(service.client.post("/v1/completions", json={"prompt": PROMPT}), 504)
        assert error["code"] == "timeout"
        wait_for(lambda: len(service.driver.aborted) == 1)
        steps, done = events(service.client.post("/v1/completions", json={"prompt": PROMPT, "stream": True}))
        assert done and steps[-1]["error"]["code"] == "timeout"


def test_a_model_is_loaded_once_not_with_each_message(monkeypatch):
    """The program has the collector skip what is there then: earlier the endpoints are missing, and often is costly."""
    loads = []
    monkeypatch.setattr(fake_driver, "Front", partial(fake_driver.Front, loaded=lambda: loads.append(1)))
    with served() as service:
        service.client.post("/v1/completions", json={"prompt": PROMPT}).raise_for_status()
        assert loads == [1]


def test_scoring_and_generating_have_one_deadline():
    with served(request_timeout=2.0) as service:
        # What is scored is held back for most of the time, what is generated for ever.
        def before_step(running):
            if any(not each.params.forced_ids for each in running):
                raise asyncio.CancelledError  # no further step

        service.driver.hold, service.driver.before_step = True, before_step
        answer = ask_in_thread(service, echo=True, logprobs=0)
        wait_for(lambda: service.driver.submitted)
        time.sleep(1.5)
        service.driver.hold = False
        released = time.monotonic()
        assert error_of(answer(), 504)["code"] == "timeout"
        assert time.monotonic() - released < 1.9


def test_silence_is_filled_with_comments(monkeypatch):
    monkeypatch.setattr("lpr.serve.api.answers.KEEP_ALIVE", 0.05)
    with served() as service:
        service.driver.hold = True
        with service.client.stream("POST", "/v1/completions", json={"prompt": PROMPT, "stream": True}) as response:
            lines = response.iter_lines()
            assert next(lines) == ": keep-alive"
            service.driver.hold = False
            assert "data: [DONE]" in list(lines)


# Under load.


def test_a_full_queue_is_a_429_that_says_when_to_come_back():
    with served(max_queue=2) as service:
        service.driver.hold = True
        room = 4 + 1 + 2  # slots, the one on hand, the queue
        threads = [ask_in_thread(service) for _ in range(room)]
        wait_for(lambda: busy(service) == (4, room - 4))
        response = service.client.post("/v1/completions", json={"prompt": PROMPT})
        error_of(response, 429)
        assert int(response.headers["retry-after"]) >= 1
        error_of(service.client.post("/v1/completions", json={"prompt": PROMPT, "n": 7}), 429)
        service.driver.hold = False
        assert all(answer().status_code == 200 for answer in threads), "nothing accepted is dropped"


def test_scoring_and_generating_have_their_room_from_the_start():
    with served(max_queue=1) as service:
        service.driver.hold = True
        begun = [ask_in_thread(service) for _ in range(4)]
        wait_for(lambda: len(service.driver.submitted) == 4)
        scored = {"prompt": PROMPT, "echo": True, "logprobs": 0, "max_tokens": 2}
        begun.append(ask_in_thread(service, **scored))
        wait_for(lambda: len(service.driver.submitted) == 5)
        error_of(service.client.post("/v1/completions", json={"prompt": PROMPT}), 429)
        service.driver.hold = False
        answers = [answer() for answer in begun]
        assert [answer.status_code for answer in answers] == [200] * 5
        service.driver.hold = True
        begun = [ask_in_thread(service) for _ in range(5)]
        wait_for(lambda: busy(service) == (4, 1))
        error_of(service.client.post("/v1/completions", json=scored), 429)
        service.driver.hold = False
        assert all(answer().status_code == 200 for answer in begun)


def test_queued_tokens_are_limited_too():
    with served(max_queued_tokens=20) as service:
        service.driver.hold = True
        answers = [ask_in_thread(service) for _ in range(7)]
        wait_for(lambda: service.front.service.num_queued_tokens > 0)
        error_of(service.client.post("/v1/completions", json={"prompt": "a b c d e f g h i j k l m n o p q"}), 429)
        service.driver.hold = False
        for answer in answers:
            assert answer().status_code == 200


def test_priority_goes_first_and_order_is_kept():
    with served() as service:
        service.driver.hold = True
        answers = [ask_in_thread(service, prompt=f"first {index}") for index in range(5)]
        wait_for(lambda: len(service.driver.submitted) == 5)
        for number, (name, priority) in enumerate((("late", 5), ("normal", 0), ("early", -5)), 1):
            answers.append(ask_in_thread(service, prompt=name, priority=priority))
            wait_for(lambda number=number: busy(service) == (4, 1 + number))
        service.driver.hold = False
        assert all(answer().status_code == 200 for answer in answers)
        tokens = service.front.context.served.tokens
        sent = {submit.id: tokens.decode(submit.token_ids) for submit in service.driver.submitted}
        begun = [sent[id] for id in service.driver.begun[4:]]
        assert [begun[0], begun[1][:5], *begun[2:]] == ["early", "first", "normal", "late"]


def busy(service):
    """Requests that run, and requests that wait."""
    return service.front.service.num_running, service.front.service.num_waiting


def ask_in_thread(service, headers=None, **body):
    answers = []
    url, body = service.url + "/v1/completions", {"prompt": PROMPT, **body}
    thread = threading.Thread(target=lambda: answers.append(httpx.post(url, json=body, headers=headers, timeout=30)))
    thread.start()

    def answer():
        thread.join(30)
        return answers[0]

    return answer


# Start and end.


def test_before_the_model_is_loaded_health_says_so():
    with served(connect=False) as service:
        assert service.client.get("/livez").status_code == 200
        response = service.client.get("/readyz")
        assert response.status_code == 503 and "starting" in response.json()["reason"]
        assert service.client.post("/v1/completions", json={"prompt": "a"}).headers["retry-after"]
        error_of(service.client.post("/v1/completions", json={"prompt": "a"}), 503)
        error_of(service.client.get("/v1/models"), 503)
        assert service.client.get("/metrics").status_code == 200


def test_a_silent_driver_is_neither_ready_nor_live(monkeypatch):
    monkeypatch.setattr("lpr.serve.mesh_state.STALE_PULSE", 0.5)
    with served() as service:
        service.driver.pulses = False
        service.driver.hold = True
        wait_for(lambda: service.client.get("/livez").status_code == 503)
        assert "nothing for" in service.client.get("/readyz").json()["reason"]
        service.driver.pulses = True
        wait_for(lambda: service.client.get("/livez").status_code == 200)


def test_draining_finishes_what_is_open_and_takes_nothing_new():
    with served() as service:
        service.driver.hold = True
        answer = ask_in_thread(service)
        wait_for(lambda: len(service.driver.submitted) == 1)
        service.call(service.front.stop)
        wait_for(lambda: service.client.get("/readyz").status_code == 503)
        response = service.client.post("/v1/completions", json={"prompt": "a"})
        assert error_of(response, 503)["code"] == "shutting_down" and response.headers["retry-after"]
        service.driver.hold = False
        assert answer().json()["choices"][0]["text"] == TEXT
        assert service.ended() == 0 and service.driver.stopped


def test_draining_finishes_a_request_whose_prompt_is_scored():
    with served() as service:
        service.driver.hold = True
        answer = ask_in_thread(service, echo=True, logprobs=0)
        wait_for(lambda: len(service.driver.submitted) == 1)
        service.call(service.front.stop)
        wait_for(lambda: service.client.get("/readyz").status_code == 503)
        service.driver.hold = False
        response = answer()
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["text"] == PROMPT + TEXT
        assert service.ended() == 0


def test_what_cannot_finish_in_time_is_handed_back():
    with served(shutdown_timeout=0.3) as service:
        service.driver.hold = True
        answer = ask_in_thread(service)
        wait_for(lambda: len(service.driver.submitted) == 1)
        service.call(service.front.stop)
        assert error_of(answer(), 503)["code"] == "unavailable"
        assert service.ended() == 0


def test_lost_ranks_end_streams_with_an_error_and_the_front_with_1(capsys):
    with served() as service:
        service.driver.hold = True
        answer = ask_in_thread(service)
        wait_for(lambda: len(service.driver.submitted) == 1)
        service.call(service.driver.vanish)
        assert error_of(answer(), 503)["message"] == "the ranks were lost"
        assert service.ended() == 1


# Keys, origins, sizes.


def test_keys_are_asked_for_except_for_health(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# keys\nalice secret-a\nsecret-b\n")
    with served(api_key="secret-c,secret-d", api_key_file=keys) as service:

        def ask(**headers):
            return service.client.post("/v1/completions", json={"prompt": "a"}, headers=headers)

        error = error_of(ask(), 401)
        assert error["type"] == "authentication_error" and ask().headers["www-authenticate"] == "Bearer"
        error_of(ask(Authorization="Bearer wrong"), 401)
        error_of(ask(Authorization="Basic secret-a"), 401)
        for key in ("secret-a", "secret-b", "secret-c", "secret-d"):
            assert ask(Authorization=f"Bearer {key}").status_code == 200
        assert ask(**{"X-Api-Key": "secret-a"}).status_code == 200
        for path in ("/health", "/livez", "/readyz", "/metrics"):
            assert service.client.get(path).status_code == 200
        error_of(service.client.get("/v1/models"), 401)
    with served(api_key="a", protect_all=True, connect=False) as service:
        error_of(service.client.get("/metrics"), 401)


def test_white_space_is_no_part_of_a_key_and_a_name_may_have_several(tmp_path):
    path = tmp_path / "keys"
    path.write_text("alice old\nalice new\nbob c\n")
    keys = Keys.read(" a, b \n,", path)
    assert [keys.name_of(each) for each in ("old", "new", "c")] == ["alice", "alice", "bob"]
    assert None not in (keys.name_of("a"), keys.name_of("b")) and keys.name_of(" b") is None
    assert len(keys.names) == 4 and keys.names[2:] == ["alice", "bob"]


def test_one_key_cannot_end_the_request_of_another(tmp_path):
    with served(api_key="a,b") as service:
        service.driver.hold = True
        body, of = {"prompt": PROMPT, "request_id": "mine"}, lambda key: {"Authorization": f"Bearer {key}"}
        thread = threading.Thread(
            target=lambda: httpx.post(service.url + "/v1/completions", json=body, headers=of("a"), timeout=120)
        )
        thread.start()
        wait_for(lambda: service.front.context.open)
        error_of(service.client.delete("/v1/requests/mine", headers=of("b")), 404, "request_id")
        other = threading.Thread(
            target=lambda: httpx.post(service.url + "/v1/completions", json=body, headers=of("b"), timeout=120)
        )
        other.start()
        wait_for(lambda: len(service.front.context.open) == 2)  # ids of one key are free for another
        assert service.client.delete("/v1/requests/mine", headers=of("b")).status_code == 200
        other.join(10)
        assert service.client.delete("/v1/requests/mine", headers=of("a")).status_code == 200
        thread.join(10)


def test_origins_and_sizes():
    with served(cors=("https://a.example",), max_body=1000) as service:
        headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        response = service.client.options("/v1/completions", headers=headers)
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        assert (
            "access-control-allow-origin" not in service.client.get("/health", headers={"Origin": "https://b"}).headers
        )
        error_of(service.client.post("/v1/completions", json={"prompt": "a" * 2000}), 413)
        headers = {"Content-Type": "application/json"}
        response = service.client.post("/v1/completions", content=iter([b" " * 600] * 4), headers=headers)
        error_of(response, 413)


def test_the_access_log_is_json_with_the_requests_id(capfd):
    with served(access_log=True) as service:
        headers = {"X-Request-Id": "abc"}
        body = {"prompt": PROMPT, "user": "u-1"}
        response = service.client.post("/v1/completions", json=body, headers=headers)
        assert response.headers["x-request-id"] == "abc" and response.json()["id"] == "cmpl-abc"
        chat = {"messages": [{"role": "user", "content": "u"}], "user": "u-2"}
        service.client.post("/v1/chat/completions", json=chat, headers={"X-Request-Id": "def"}).raise_for_status()
        service.client.post("/tokenize", json={"prompt": "a"}, headers={"X-Request-Id": "ghi"}).raise_for_status()
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    line = next(line for line in lines if line["id"] == "abc")
    assert line["status"] == 200 and line["path"] == "/v1/completions" and line["completion_tokens"] == 6
    assert [each.get("user") for each in lines] == ["u-1", "u-2", None]


@pytest.mark.parametrize(
    "flags, said",
    [
        ({"api_key_file": "nowhere"}, "cannot read --api-key-file nowhere: No such file"),
        ({"chat_template": "nowhere"}, "cannot read --chat-template nowhere"),
        ({"tls_cert": "nowhere"}, "cannot read --tls-cert nowhere"),
    ],
)
def test_unreadable_files_are_one_line(flags, said):
    from pathlib import Path

    with pytest.raises(InputError, match=said):
        Front(ServeArgs(port=0, **{name: Path(value) for name, value in flags.items()}), [])


def test_a_port_in_use_is_one_line_and_code_2():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "lpr.serve", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.strip() == f"lpr.serve: error: cannot listen at 127.0.0.1:{port}: Address already in use"


def test_the_front_imports_no_torch():
    code = "import sys, lpr.serve.__main__; sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def test_https(tmp_path):
    openssl = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    try:
        for name in ("other.pem", "key.pem"):
            command = [*openssl, "-out", cert, "-keyout", tmp_path / name]
            subprocess.run(command, check=True, capture_output=True, timeout=300)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    with pytest.raises(InputError, match="--tls-cert .* and --tls-key .*other.pem cannot be used"):
        Front(ServeArgs(port=0, tls_cert=cert, tls_key=tmp_path / "other.pem"), [])
    with served(tls_cert=cert, tls_key=key, connect=False) as service:
        url = service.url.replace("http:", "https:")
        assert httpx.get(url + "/livez", verify=False).status_code == 200
