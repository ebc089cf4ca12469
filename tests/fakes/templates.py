"""Small chat templates with the traits of real ones, and conversations of three APIs."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from lpr.serve.bodies import messages, responses
from lpr.serve.bodies.completions import ChatBody
from lpr.serve.messages import Facts
from lpr.serve.text.served import Served

NAME, CITY, OTHER = "get_weather", "Ljubljana", "Maribor"
TOOL = {
    "name": NAME, "description": "The weather of a town.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}  # fmt: skip
CALL = {
    "id": "call_0123456789abcdef01234567",
    "type": "function",
    "function": {"name": NAME, "arguments": json.dumps({"city": CITY})},
}
AGAIN = {
    "id": "toolu_76543210",
    "type": "function",
    "function": {"name": NAME, "arguments": json.dumps({"city": OTHER})},
}
RESULT = {"role": "tool", "tool_call_id": CALL["id"], "content": "rain since morning"}
RESULT_2 = {"role": "tool", "tool_call_id": AGAIN["id"], "content": "sunny and dry"}
USER = {"role": "user", "content": "How is the weather today"}
ASKS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
SAYS = {"role": "assistant", "content": "Bring an umbrella then"}
THANKS = {"role": "user", "content": "Thank you very much"}
SYSTEM = {"role": "system", "content": "Answer in short sentences"}
LATER = {"role": "system", "content": "The user is on holiday"}
TOOLS = {"tools": [{"type": "function", "function": TOOL}]}

CHATS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "user": ({"messages": [USER]}, ["How is"]),
    "system": ({"messages": [SYSTEM, USER]}, ["short sentences", "How is"]),
    "turns": ({"messages": [SYSTEM, USER, SAYS, THANKS]}, ["short sentences", "umbrella", "Thank you"]),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "First part"},
                                                   {"type": "text", "text": "Second part", "cache_control": {}}]}]},
        ["First part", "Second part"],
    ),
    "developer": ({"messages": [{**SYSTEM, "role": "developer"}, USER]}, ["short sentences", "How is"]),
    "developer after system": (
        {"messages": [SYSTEM, {**LATER, "role": "developer"}, USER]}, ["short sentences", "on holiday", "How is"],
    ),
    "system later": ({"messages": [SYSTEM, USER, SAYS, LATER, THANKS]}, ["short sentences", "on holiday", "Thank you"]),
    "system last": ({"messages": [USER, LATER]}, ["How is", "on holiday"]),
    "users in a row": ({"messages": [USER, THANKS]}, ["How is", "Thank you"]),
    "assistant first": ({"messages": [SAYS, THANKS]}, ["umbrella", "Thank you"]),
    "system alone": ({"messages": [SYSTEM]}, ["short sentences"]),
    "call": ({"messages": [USER, ASKS, RESULT], **TOOLS}, ["How is", CITY, "rain since"]),
    "call without tools": ({"messages": [USER, ASKS, RESULT]}, ["How is", CITY, "rain since"]),
    "call and text": (
        {"messages": [USER, {**ASKS, "content": "I look it up"}, RESULT, SAYS, THANKS], **TOOLS},
        ["I look it up", CITY, "rain since", "umbrella", "Thank you"],
    ),
    "call and thought": (
        {"messages": [USER, {**ASKS, "reasoning_content": "I need data"}, RESULT], **TOOLS}, [CITY, "rain since"],
    ),
    "call, text and thought": (
        {"messages": [USER, {**ASKS, "reasoning_content": "I need data", "content": "I look it up"}, RESULT], **TOOLS},
        ["I look it up", CITY, "rain since"],
    ),
    "two calls": (
        {"messages": [USER, {**ASKS, "tool_calls": [CALL, AGAIN]}, RESULT, RESULT_2], **TOOLS},
        [CITY, "rain since", OTHER, "sunny and"],
    ),
    "user after result": ({"messages": [USER, ASKS, RESULT, THANKS], **TOOLS}, [CITY, "rain since", "Thank you"]),
    "functions": (
        {"messages": [USER, {"role": "assistant", "content": None, "function_call": CALL["function"]},
                      {"role": "function", "name": NAME, "content": "rain since morning"}], **TOOLS},
        [CITY, "rain since"],
    ),
}  # fmt: skip
AGENT = "You are a coding agent."


def _said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


RESPONSES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "Codex's": (
        {
            "model": "m", "instructions": AGENT, "stream": True, "store": False,
            "include": ["reasoning.encrypted_content"],
            "input": [_said("developer", "Sandbox: none."), _said("user", "list files")], "parallel_tool_calls": False,
            "tools": [{"type": "function", "strict": False, **TOOL}], "tool_choice": "auto", "prompt_cache_key": "k",
            "reasoning": {"effort": "medium", "summary": "auto"}, "text": {"verbosity": "low"},
        },
        [AGENT, "Sandbox: none", "list files"],
    ),
    "Codex's next": (
        {
            "model": "m", "instructions": AGENT, "tools": [{"type": "function", **TOOL}],
            "input": [
                _said("user", "list files"),
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I need data"}]},
                {"type": "function_call", "call_id": "call_1", **CALL["function"]},
                {"type": "function_call_output", "call_id": "call_1", "output": "rain since morning"},
            ],
        },
        [AGENT, "list files", CITY, "rain since"],
    ),
}  # fmt: skip
MESSAGES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "Claude Code's": (
        {
            "model": "m", "max_tokens": 32000, "stream": True, "metadata": {"user_id": "u", "session": "s"},
            "system": [{"type": "text", "text": AGENT, "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
            "messages": [
                {"role": "user", "content": [
                    {"type": "text", "text": "<system-reminder>a</system-reminder>"},
                    {"type": "text", "text": "list files", "cache_control": {"type": "ephemeral"}},
                ]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "I need data", "signature": "s"},
                    {"type": "text", "text": "I look it up"},
                    {"type": "tool_use", "id": "toolu_1", "name": NAME, "input": {"city": CITY}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": False,
                     "content": "rain since morning"},
                    {"type": "text", "text": "and now tomorrow"},
                ]},
            ],
            "tools": [{"name": NAME, "description": TOOL["description"], "input_schema": TOOL["parameters"]}],
            "thinking": {"type": "enabled", "budget_tokens": 31999}, "context_management": {"edits": []},
            "output_config": {"effort": "medium"},
        },
        [AGENT, "system-reminder", "list files", "I look it up", CITY, "rain since", "and now"],
    ),
}  # fmt: skip
CONVERSATIONS: dict[str, tuple[ChatBody, list[str]]] = {
    **{name: (TypeAdapter(ChatBody).validate_python(body), words) for name, (body, words) in CHATS.items()},
    **{
        name: (responses.as_chat(TypeAdapter(responses.ResponsesBody).validate_python(body)), words)
        for name, (body, words) in RESPONSES.items()
    },
    **{
        name: (messages.as_chat(TypeAdapter(messages.MessagesBody).validate_python(body)), words)
        for name, (body, words) in MESSAGES.items()
    },
}


_END = "{% if add_generation_prompt %}<a>{% endif %}"
_CALLS = "{% for c in m.tool_calls or [] %}<c>{{ c.function.name }} {{ c.function.arguments | tojson }}</c>{% endfor %}"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}" + _CALLS + "{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "plain": CHATML,
    "strict": (  # Qwen 3.5: one message of instructions, the first, and at least one of the user
        "{% set ns = namespace(u=false) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.u = true %}{% endif %}"
        "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
        "{% if m.role not in ('system', 'user', 'assistant', 'tool') %}{{ raise_exception('role') }}{% endif %}"
        "<{{ m.role }}>{{ m.content or '' }}" + _CALLS + "{% endfor %}"
        "{% if not ns.u %}{{ raise_exception('no user') }}{% endif %}" + _END
    ),
    "parts": (  # Idefics 3: a text has no parts, and vanishes
        "{% for m in messages %}<{{ m.role }}>{% for p in m.content or [] %}{% if p.type == 'text' %}"
        "{{ p.text }}{% endif %}"
        "{% endfor %}" + _CALLS + "{% endfor %}" + _END
    ),
    "alternating": (  # Gemma: no instructions, turns alternate; besides, results are shown
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('system') }}"
        "{% endif %}{% if m.role in ('user', 'assistant') and not m.tool_calls %}"
        ""
        "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{% endif %}<{{ m.role }}>{{ m.content or '' }}" + _CALLS + "{% endfor %}" + _END
    ),
    "short ids": (  # Mistral: 9 letters and digits, no text beside calls, instructions in the last message of the user
        "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}"
        "{% set messages = messages[1:] %}{% endif %}"
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' or (m.role == 'assistant' and "
        "m.tool_calls is undefined) %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('alternate') }}"
        "{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'user' %}[INST]{% if loop.last and s is defined %}{{ s }} {% endif %}"
        "{{ m.content }}[/INST]{% elif m.tool_calls is defined %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
        "{{ raise_exception('ids') }}{% endif %}[C]{{ c.function | tojson }}{{ c.id }}{% endfor %}"
        "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% elif m.role == 'tool' %}"
        "{% if m.tool_call_id is undefined or "
        "m.tool_call_id | length != 9 %}{{ raise_exception('ids') }}{% endif %}[R]{{ m.content }}{{ m.tool_call_id }}"
        "{% else %}{{ raise_exception('role') }}{% endif %}{% endfor %}"
    ),
    "text arguments": (  # DeepSeek V3: arguments are joined to text, a missing content is none
        "{% for m in messages %}{% if m.tool_calls %}{{ '<a>' + ('' if m.content is none else m.content) }}"
        "{% for c in m.tool_calls %}{{ c.function.name + '\n' + c.function.arguments }}{% endfor %}"
        "{% elif m.role in ('system', 'user', 'assistant', 'tool') %}{{ '<' + m.role + '>' + m.content }}{% endif %}"
        "{% endfor %}" + _END
    ),
    "one call": (  # Llama 3.1: one call in a message, and no text
        "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one') }}"
        "{% endif %}<a>{% set c = m.tool_calls[0].function %}{{ c.name }}{% for k, v in c.arguments.items() %}"
        "{{ k }}={{ v }}"
        "{% endfor %}{% else %}<{{ 'ipython' if m.role == 'tool' else m.role }}>{{ m.content | trim }}{% endif %}"
        "{% endfor %}" + _END
    ),
    "thought or text": (  # gpt-oss: instructions first, a thought or a text beside one call
        "{% if messages[0].role in ('developer', 'system') %}<developer>{{ messages[0].content }}"
        "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
        "<t>{{ m.content or m.thinking }}<c>{{ m.tool_calls[0].function.name }}"
        "{{ m.tool_calls[0].function.arguments | tojson }}{% else %}<f>{{ m.content }}{% endif %}"
        "{% elif m.role == 'tool' %}<r>{{ m.content | tojson }}{% elif m.role == 'user' %}<u>{{ m.content }}{% endif %}"
        "{% endfor %}" + _END
    ),
    "named results": (  # a result names its function
        "{% for m in messages %}{% if m.role == 'tool' %}{{ '<r>' + m.name + ':' + m.content }}{% else %}"
        "<{{ m.role }}>{{ m.content or '' }}" + _CALLS + "{% endif %}{% endfor %}" + _END
    ),
}  # fmt: skip
"""By their traits. All show calls, so each conversation can be fitted to them."""


@cache
def _tokenizer() -> str:
    from importlib.resources import files

    return (files("lpr") / "assets" / "bundled" / "tokenizer.json").read_text(encoding="utf-8")


def served(template: str, **facts: Any) -> Served:
    """A model with this chat template, and the bundled tokenizer."""
    values: dict[str, Any] = {
        "model": "m", "vocab_size": 4096, "max_length": 4096, "max_batch_size": 4, "page_size": 16, "num_pages": 128,
        "lp": 1, "tp": 1, "device": "cpu", "dtype": "float32", "eos_token_ids": [0], "tokenizer": _tokenizer(),
        "special_tokens": {"eos_token": "</s>", "bos_token": "<s>"}, "chat_templates": {"default": template},
    }  # fmt: skip
    return Served(Facts(**{**values, **facts}), ["m"])
