"""`prediction` in completions and chats: OpenAI's form, its counts in `usage`, and one line for every bad form."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from lpr.serve.text.windows import window_of
from tests.fakes.fake_driver import FakeDriver, served

CONTENT = "def f(x):\n    return x + 1\n"
FORMS: dict[str, Any] = {
    "text": {"type": "content", "content": CONTENT},
    "parts": {"type": "content", "content": [{"type": "text", "text": each} for each in CONTENT.splitlines(True)]},
}
ROUTES = {
    "/v1/completions": {"prompt": "def f(x):", "max_tokens": 8},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8},
}


@pytest.fixture(scope="module")
def service() -> Iterator[SimpleNamespace]:
    with served() as running:
        yield running


def counts(usage: dict[str, Any]) -> tuple[int, int]:
    details = usage["completion_tokens_details"]
    assert set(details) == {"accepted_prediction_tokens", "rejected_prediction_tokens"}
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", ROUTES)
def test_a_prediction_reaches_the_ranks_and_is_counted(service: SimpleNamespace, path: str, form: str) -> None:
    body = {**ROUTES[path], "prediction": FORMS[form], "temperature": 0}
    plain = service.client.post(path, json={**body, "prediction": None}).json()
    assert "completion_tokens_details" not in plain["usage"] and service.driver.submitted[-1].prediction == []
    answer = service.client.post(path, json=body).json()
    text = service.front.context.served.tokens.decode(service.driver.submitted[-1].prediction)
    assert text == CONTENT
    num = answer["usage"]["completion_tokens"]
    assert counts(answer["usage"]) == (num, num) and answer["choices"] == plain["choices"]
    with service.client.stream(
        "POST", path, json={**body, "stream": True, "stream_options": {"include_usage": True}}
    ) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert counts(events[-1]["usage"]) == (num, num)
    two = service.client.post(path, json={**body, "n": 2}).json()
    assert counts(two["usage"]) == (2 * num, 2 * num)


BAD: dict[str, Any] = {
    "a text": CONTENT, "a list": [CONTENT], "no type": {"content": CONTENT}, "no content": {"type": "content"},
    "another type": {"type": "text", "content": CONTENT}, "a number": {"type": "content", "content": 5},
    "a null": {"type": "content", "content": None}, "texts": {"type": "content", "content": [CONTENT]},
    "a picture": {"type": "content", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
    "a field": {"type": "content", "content": CONTENT, "more": 1},
    "many parts": {"type": "content", "content": [{"type": "text", "text": "x"}] * 257},
}  # fmt: skip


@pytest.mark.parametrize("form", BAD)
@pytest.mark.parametrize("path", ROUTES)
def test_a_bad_form_is_a_400_of_one_line(service: SimpleNamespace, path: str, form: str) -> None:
    before = len(service.driver.submitted)
    response = service.client.post(path, json={**ROUTES[path], "prediction": BAD[form]})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"].startswith("prediction") and "\n" not in error["message"]
    assert len(service.driver.submitted) == before


CODE = "def f(x):\n    return x + 1\n\n\nprint(f(2))\n"
AT = CODE.replace("+", "<|user_cursor|>+")
WINDOWS = {
    "Zeta 2.0": f"<[fim-suffix]>\nend\n<[fim-prefix]><filename>a.py\nx\n<<<<<<< CURRENT\n{AT}=======\n<[fim-middle]>",
    "Zeta 2.1": f"<[fim-suffix]>\nend\n<[fim-prefix]><filename>a.py\nx\n<|marker_1|>{AT}<|marker_2|>\n<[fim-middle]>",
    "Zeta 1": f"### Excerpt:\n```a.py\n<|editable_region_start|>\n{AT}<|editable_region_end|>\n```\n\n### Response:\n",
    "Sweep": f"<|file_sep|>original/a.py\nold\n<|file_sep|>current/a.py\n{CODE}<|file_sep|>updated/a.py\n",
}


@pytest.mark.parametrize("kind", WINDOWS)
def test_the_window_that_a_prompt_has_rewritten_is_its_prediction(service: SimpleNamespace, kind: str) -> None:
    window = window_of(WINDOWS[kind])
    assert CODE in window and len(window) < len(CODE) + 60
    body = {**ROUTES["/v1/completions"], "prompt": WINDOWS[kind]}
    answer = service.client.post("/v1/completions", json=body).json()
    text = service.front.context.served.tokens.decode(service.driver.submitted[-1].prediction)
    assert text == window and "completion_tokens_details" not in answer["usage"]


@pytest.mark.parametrize(
    "prompt", ["", "=======\n<[fim-middle]>", "<<<<<<< CURRENT\n", WINDOWS["Zeta 2.0"] + "x", CODE]
)
def test_prompts_without_a_window(prompt: str) -> None:
    assert window_of(prompt) == ""


def test_a_long_prediction_is_cut_to_what_an_output_can_be(service: SimpleNamespace) -> None:
    body = {**ROUTES["/v1/completions"], "prediction": {"type": "content", "content": CONTENT * 3000}}
    assert service.client.post("/v1/completions", json=body).status_code == 200
    assert len(service.driver.submitted[-1].prediction) == service.driver.facts.max_length


def test_counts_survive_ranks_that_are_lost_and_started_again() -> None:
    def prepare(driver: FakeDriver) -> None:
        driver.pause = 0.02
        driver.text = "return x + 1\n" * 10

    with served(prepare=prepare) as service:
        while not httpx.get(service.url + "/readyz").is_success:
            time.sleep(0.01)
        body = {**ROUTES["/v1/completions"], "max_tokens": 40, "stream": True, "prediction": FORMS["text"]}
        body["stream_options"] = {"include_usage": True}
        events = []
        with httpx.stream("POST", service.url + "/v1/completions", json=body, timeout=120) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line[6:]))
                    ranks = service.starts[-1]
                    if len(events) == 4:
                        service.call(lambda ranks=ranks: ranks.end(-9))
                    elif len(events) == 9:
                        service.call(lambda ranks=ranks: ranks.take_over())
        assert len(service.starts) == 2 and len(service.starts[-1].drivers) == 2
        usage = events[-1]["usage"]
        assert counts(usage) == (usage["completion_tokens"], usage["completion_tokens"]) == (40, 40)
