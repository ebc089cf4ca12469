"""From the body of a conversation to its prompt: in the front if it is short and simple, else in another process."""

from __future__ import annotations

import json
from typing import Any

from lpr.protocol import ErrorCode
from lpr.serve import limits
from lpr.serve.bodies.completions import ChatBody, Message, TokenizeBody, joined
from lpr.serve.bodies.fields import num_values
from lpr.serve.errors import bad
from lpr.serve.text.chat_template import ChatTemplates, render_prompt


def prompt_of(templates: ChatTemplates, body: ChatBody | TokenizeBody, most: int) -> str:
    """The prompt of a conversation in at most `most` characters, by the model's template; raises ApiError."""
    variables = _variables(templates, body)
    messages = [_plain(message) for message in body.messages or ()]
    text = render_prompt(templates, messages, variables, most)
    if not body.continue_final_message:
        return text
    final = str(messages[-1].get("content") or "").strip()
    end = text.rfind(final)
    if not final or end < 0:
        raise bad("continue_final_message", "continue_final_message: the last message has no text to continue")
    return text[: end + len(final)]


def is_simple(body: ChatBody | TokenizeBody) -> bool:
    """True if nothing but the length of its messages decides how much work a template has with a conversation."""
    more = isinstance(body, ChatBody) and (body.chat_template_kwargs or body.tools)
    return not more and not any(message.tool_calls for message in body.messages or ())


def _variables(templates: ChatTemplates, body: ChatBody | TokenizeBody) -> dict[str, Any]:
    if not templates:
        message = "messages: the model has no chat template; use /v1/completions"
        raise bad("messages", message, ErrorCode.NO_CHAT_TEMPLATE)
    given: dict[str, Any] = getattr(body, "chat_template_kwargs", None) or {}
    for name in templates.reserved & set(given):
        raise bad("chat_template_kwargs", f"chat_template_kwargs: {name!r} is not free to be set")
    variables = {"add_generation_prompt": body.add_generation_prompt, **given}
    if body.continue_final_message:
        variables["add_generation_prompt"] = False
    if isinstance(body, ChatBody) and body.tools and body.tool_choice != "none":
        variables["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    return variables


def _plain(message: Message) -> dict[str, Any]:
    """A message as chat templates know it."""
    content = joined(message.content) if message.content is not None else None
    plain = message.model_dump(exclude_none=True, exclude={"content"})
    for call in plain.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    empty = None if plain.get("tool_calls") else ""
    return {**plain, "content": content if content is not None else empty}


def _arguments(text: str) -> Any:
    """The arguments of a call as templates take them: an object, if they are one."""
    try:
        value = json.loads(text) if text else {}
        if "\\ud" in text.lower():  # half of a surrogate pair is no text
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return text
    if num_values(value, limits.CALL_VALUES.most, are_small=False) > limits.CALL_VALUES.most:
        raise bad("messages", f"messages: the arguments of a call have more than {limits.CALL_VALUES.most} values")
    return value if isinstance(value, dict) else text
