"""Renders the prompt of a conversation: in the front if it is short and simple, else in a sandbox process."""

from collections.abc import Iterable
from typing import Any

from lpr.protocol import ErrorCode
from lpr.serve import limits
from lpr.serve.bodies.completions import ChatBody, TokenizeBody
from lpr.serve.bodies.fields import num_values
from lpr.serve.errors import bad
from lpr.serve.text.chat_template import CONTINUE, ChatTemplates, render_prompt
from lpr.serve.text.fitting import Plain, object_of, text_of


def prompt_of(templates: ChatTemplates, body: ChatBody | TokenizeBody, most: int) -> str:
    """The prompt of a conversation in at most `most` characters, by the model's template; raises ApiError."""
    return render_prompt(templates, *conversation(templates, body), most)


def is_simple(body: ChatBody | TokenizeBody) -> bool:
    """True if a conversation has no calls, tools and template variables, so that rendering takes linear time."""
    more = isinstance(body, ChatBody) and (body.chat_template_kwargs or body.tools)
    return not more and not any(message.tool_calls or message.function_call for message in body.messages or ())


def check_templates(templates: ChatTemplates) -> None:
    """Raise ApiError if there is no chat template, or one that cannot be read."""
    if not templates:
        message = "messages: the model has no chat template; use /v1/completions"
        raise bad("messages", message, ErrorCode.NO_CHAT_TEMPLATE)
    if templates.failure is not None:
        raise bad("messages", f"messages: {templates.failure}; use /v1/completions", ErrorCode.NO_CHAT_TEMPLATE)


def conversation(templates: ChatTemplates, body: ChatBody | TokenizeBody) -> tuple[list[Plain], dict[str, Any]]:
    """The messages and variables for the model's template; raises ApiError."""
    check_templates(templates)
    given: dict[str, Any] = getattr(body, "chat_template_kwargs", None) or {}
    for name in templates.reserved & set(given):
        raise bad("chat_template_kwargs", f"chat_template_kwargs: {name!r} is not free to be set")
    messages = [message.plain() for message in body.messages or ()]
    _check_calls(messages)
    variables: dict[str, Any] = {"add_generation_prompt": body.add_generation_prompt}
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        variables |= {"reasoning_effort": body.reasoning_effort, "enable_thinking": body.reasoning_effort != "none"}
    variables |= given
    if body.continue_final_message:
        last = messages[-1]
        if last["role"] == "assistant" and last.keys() <= {"role", "content"} and not text_of(last["content"]):
            messages, variables["add_generation_prompt"] = messages[:-1], True  # nothing is begun
        else:
            variables |= {"add_generation_prompt": False, CONTINUE: True}
    if isinstance(body, ChatBody) and body.tools and body.tool_choice != "none":
        variables["tools"] = [
            tool.model_dump(exclude_none=True, by_alias=True, exclude={"cache_control"}) for tool in body.tools
        ]
    return messages, variables


def _check_calls(messages: Iterable[Plain]) -> None:
    """Raise ApiError for call arguments with too many values; short texts need no check."""
    most = limits.CALL_VALUES.most
    texts = (call["function"]["arguments"] for message in messages for call in message.get("tool_calls") or ())
    for text in texts:
        if len(text) > most and num_values(object_of(text), most, are_small=False) > most:
            raise bad("messages", f"messages: the arguments of a call have more than {most} values")
