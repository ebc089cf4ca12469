"""Conversations fitted to templates, and begun answers."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
from pydantic import TypeAdapter

from lpr.serve.bodies.completions import ChatBody
from lpr.serve.bodies.messages import MessagesBody
from lpr.serve.bodies.messages import as_chat as of_messages
from lpr.serve.bodies.responses import ResponsesBody
from lpr.serve.bodies.responses import as_chat as of_responses
from lpr.serve.errors import ApiError
from lpr.serve.text.chat_template import ChatTemplates
from lpr.serve.text.conversation import prompt_of
from tests.fakes.templates import CALL, CHATML, CONVERSATIONS, RESULT, SAYS, SYSTEM, TEMPLATES, TOOLS, USER, served

THINKS = (  # DeepSeek R1's and Qwen3's ways with thoughts
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and '</think>' in m.content %}"
    "<think>\n{{ m.content.split('</think>')[0].split('<think>')[-1].strip('\n') }}\n</think>\n\n"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)


def chat(**body: Any) -> ChatBody:
    return TypeAdapter(ChatBody).validate_python(body)


served_once = cache(served)


def prompt(template: str, body: ChatBody) -> str:
    model = served_once(template)
    return prompt_of(model.templates, body, model.most_characters)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_each_text_of_a_conversation_is_shown(template: str, conversation: str) -> None:
    body, words = CONVERSATIONS[conversation]
    text = prompt(TEMPLATES[template], body)
    assert [word for word in words if word not in text] == []
    assert "'type'" not in text and "None" not in text


def test_ids_of_other_services_are_the_same_for_a_call_and_its_result() -> None:
    text = prompt(TEMPLATES["short ids"], chat(messages=[USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT]))
    called, returned = re.findall(r"(?:\}|morning)([a-z0-9]{9})", text)
    assert called == returned
    assert text == prompt(
        TEMPLATES["short ids"], chat(messages=[USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT])
    )
    own = [{**CALL, "id": "AbCdEf012"}], {**RESULT, "tool_call_id": "AbCdEf012"}
    assert (
        prompt(
            TEMPLATES["short ids"], chat(messages=[USER, {"role": "assistant", "tool_calls": own[0]}, own[1]])
        ).count("AbCdEf012")
        == 2
    )


def test_instructions_become_one_message() -> None:
    body = chat(
        messages=[SYSTEM, {"role": "developer", "content": "b"}, USER, SAYS, {"role": "system", "content": "c"}, USER]
    )
    text = prompt(TEMPLATES["strict"], body)
    assert text.startswith(f"<system>{SYSTEM['content']}\n\nb\n\nc<user>") and text.count("<system>") == 1


def test_a_template_that_knows_developers_gets_them() -> None:
    known = TEMPLATES["strict"].replace("('system', 'user'", "('developer', 'system', 'user'")
    assert "<developer>b" in prompt(known, chat(messages=[{"role": "developer", "content": "b"}, USER]))
    assert "<|im_start|>system\nb" in prompt(CHATML, chat(messages=[{"role": "developer", "content": "b"}, USER]))


def test_a_text_that_no_fit_shows_is_refused_by_its_place() -> None:
    no_results = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}{% endfor %}"
    no_results += "{{ messages[1].tool_calls }}"
    body: dict[str, Any] = {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT]}
    for template, place in ((no_results, "messages.2.content"), ("{{ messages[-1].content }}", "messages.0.content")):
        with pytest.raises(ApiError) as failed:
            prompt(template, chat(**body))
        assert failed.value.param == place and failed.value.status == 400


@pytest.mark.parametrize(
    "begun", ["<", "e", "m", "im_end", "<svg", "I say ", "  two\n\n", "\n", "q", "", "a<|im_end|>\nb"]
)
def test_a_begun_answer_ends_the_prompt_as_it_was_sent(begun: str) -> None:
    turns = [USER, {"role": "assistant", "content": begun}]
    asked = [
        chat(messages=turns, continue_final_message=True, add_generation_prompt=False),
        chat(messages=[USER, {"role": "assistant", "content": begun, "prefix": True}]),
        of_messages(TypeAdapter(MessagesBody).validate_python({"max_tokens": 9, "messages": turns})),
    ]
    for template in (CHATML, CHATML.replace("(m.content or '')", "(m.content or '') | trim"), TEMPLATES["parts"]):
        end = "<|im_start|>assistant\n" if "im_start" in template else "<assistant>" if begun else "<a>"
        assert {prompt(template, body).partition("weather today")[2].partition(end)[2] for body in asked} == {begun}


def test_a_begun_thought_goes_on_and_an_ended_one_does_not() -> None:
    model = served(THINKS)
    for begun, end, is_open in (
        ("<think>\nI see", "<assistant><think>\nI see", True),
        ("<think>a</think>So ", "<assistant><think>\na\n</think>\n\nSo ", False),
        ("So", "<assistant>So", False),
        ("", "<assistant><think>\n", True),
    ):
        body = chat(
            messages=[USER, {"role": "assistant", "content": begun}],
            continue_final_message=True,
            add_generation_prompt=False,
        )
        text = prompt_of(model.templates, body, model.most_characters)
        assert text.endswith(end) and model.replies(body, text).begun == is_open


def test_no_text_goes_on_behind_calls() -> None:
    body = chat(
        messages=[USER, {"role": "assistant", "content": "a", "tool_calls": [CALL]}],
        continue_final_message=True,
        add_generation_prompt=False,
    )
    with pytest.raises(ApiError, match="continue_final_message"):
        prompt(CHATML, body)


def test_an_effort_is_the_nearest_that_the_template_takes() -> None:
    some = "{% if reasoning_effort is defined and reasoning_effort not in ('low', 'max') %}{{ raise_exception('no') }}"
    some += "{% endif %}{{ reasoning_effort }}"
    for given, shown in (("low", "low"), ("minimal", "low"), ("medium", "low"), ("xhigh", "max")):
        assert prompt(some + CHATML, chat(messages=[USER], reasoning_effort=given)).startswith(shown)
    responses = {"input": "a", "reasoning": {"effort": "low"}}
    assert prompt(some + CHATML, of_responses(TypeAdapter(ResponsesBody).validate_python(responses))).startswith("low")


def test_tools_have_the_form_that_a_template_reads() -> None:
    least = {"type": "function", "function": {"name": "f"}}
    bare = "{% for t in tools or [] %}{{ t.name + t.description }}{{ t.parameters | tojson }}{% endfor %}" + CHATML
    assert prompt(bare, chat(messages=[USER], tools=[least])).startswith('f{"type": "object", "properties": {}}')
    wrapped = "{{ tools | tojson }}" + CHATML
    full = {**TOOLS["tools"][0], "function": {**TOOLS["tools"][0]["function"], "return": {"type": "string"}}}
    shown = prompt(wrapped, chat(messages=[USER], tools=[full]))
    assert json.loads(shown.partition("<|im_start|>")[0]) == [full]


def test_a_template_that_does_not_compile_refuses_chats_only() -> None:
    model = served("{% if %}")
    with pytest.raises(ApiError, match="cannot be read"):
        prompt_of(model.templates, chat(messages=[USER]), model.most_characters)
    assert ChatTemplates({"default": "{% if %}"}, {}).learnt()["default"]["several"] is True


def test_what_was_learnt_elsewhere_is_known() -> None:
    first, second = (ChatTemplates({"default": TEMPLATES["strict"]}, {}) for _ in range(2))
    assert not second.is_known
    second.know(json.loads(json.dumps(first.learnt())))
    assert second.is_known and second.learnt() == first.learnt() and first.learnt()["default"]["several"] is False
