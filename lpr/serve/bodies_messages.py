"""Bodies of Anthropic's `POST /v1/messages`, and the chat that each asks for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lpr.serve import limits
from lpr.serve.bodies import (
    Body,
    CalledFunction,
    ChatBody,
    Few,
    Function,
    FunctionChoice,
    FunctionName,
    Grammar,
    Ignored,
    Label,
    Message,
    NamedChoice,
    Positive,
    Stop,
    Temperature,
    TextOr,
    Tool,
    ToolCall,
    TopK,
    TopP,
    few_parts,
    few_tool_values,
)


class Text(Body):
    """A block of text."""

    type: Literal["text"]
    text: str
    cache_control: Ignored = None  # prompts are always cached
    citations: Ignored = None


Texts = Annotated[Few[Text], Field(max_length=limits.MESSAGES.most)]


class ToolUse(Body):
    """A call that an earlier answer made."""

    type: Literal["tool_use"]
    id: Label
    name: FunctionName
    input: dict[str, Any]
    cache_control: Ignored = None
    caller: Ignored = None


class ToolResult(Body):
    """What a call has returned."""

    type: Literal["tool_result"]
    tool_use_id: Label
    content: TextOr[Texts] | None = None
    is_error: bool | None = None
    cache_control: Ignored = None


class Thinking(Body):
    """A thought of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None  # thoughts are shown as they are


class RedactedThinking(Body):
    """A thought of another service's answer, which says nothing here."""

    type: Literal["redacted_thinking"]
    data: str


Block = Annotated[Text | ToolUse | ToolResult | Thinking | RedactedThinking, Field(discriminator="type")]


class Turn(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: TextOr[Few[Block]]


class Declared(Body):
    """A tool of the client's own."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: Grammar | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Ignored = None
    eager_input_streaming: bool | None = None  # arguments always stream
    input_examples: Ignored = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class Choice(Body):
    """Which tool is to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> Choice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError('a name goes with type "tool", and with no other')
        return self


class Thoughts(Body):
    """Whether the model thinks first, where its template has a choice."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Positive | None = None  # without effect
    display: Label | None = None


class Metadata(Body):
    """Of the client's user."""

    user_id: Label | None = None


class CountBody(Body):
    """`POST /v1/messages/count_tokens`."""

    model: Label | None = None
    messages: Annotated[Few[Turn], Field(min_length=1, max_length=limits.MESSAGES.most), few_parts]
    system: TextOr[Texts] | None = None
    tools: Annotated[Few[Declared], Field(max_length=limits.TOOLS.most), few_tool_values] | None = None
    tool_choice: Choice | None = None
    thinking: Thoughts | None = None
    cache_control: Ignored = None
    context_management: Ignored = None  # without effect, as the next one
    output_config: Ignored = None


class MessagesBody(CountBody):
    """`POST /v1/messages`."""

    max_tokens: Positive
    """At most what fits into the model's context: clients send numbers for models with a longer one."""
    stop_sequences: Annotated[Few[Stop], Field(max_length=limits.STOPS.most)] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


def as_chat(body: CountBody) -> ChatBody:
    """The chat that a body asks for. Its fields have been validated."""
    messages: list[Message] = []
    if body.system:
        messages.append(Message.model_construct(role="system", content=_text(body.system)))
    for turn in body.messages:
        messages += _messages(turn)
    chosen = body.tool_choice
    fields: dict[str, Any] = {"messages": messages, "model": body.model, "tools": _tools(body)}
    if chosen is not None:
        fields["tool_choice"] = {"any": "required", "tool": _named(chosen.name)}.get(chosen.type, chosen.type)
        fields["parallel_tool_calls"] = not chosen.disable_parallel_tool_use
    if body.thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    if isinstance(body, MessagesBody):
        fields |= {name: getattr(body, name) for name in ("stream", "temperature", "top_k", "top_p")}
        fields |= {"stop": body.stop_sequences, "user": body.metadata.user_id if body.metadata is not None else None}
    return ChatBody.model_construct(**fields)


def _tools(body: CountBody) -> list[Tool] | None:
    return [
        Tool.model_construct(
            type="function",
            function=Function.model_construct(
                name=each.name, description=each.description, parameters=each.input_schema, strict=each.strict
            ),
        )
        for each in body.tools or ()
    ] or None


def _named(name: str | None) -> NamedChoice | str:
    function = FunctionChoice.model_construct(name=name)
    return NamedChoice.model_construct(type="function", function=function) if name is not None else "required"


def _messages(turn: Turn) -> Iterator[Message]:
    """A turn as messages of a chat: each result of a tool is one of its own."""
    blocks = [Text(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content
    for block in blocks:
        if isinstance(block, ToolResult):
            yield Message.model_construct(
                role="tool", content=_text(block.content or ""), tool_call_id=block.tool_use_id
            )
    texts = [block for block in blocks if isinstance(block, Text)]
    calls = [_call(block) for block in blocks if isinstance(block, ToolUse)]
    thoughts = "\n".join(block.thinking for block in blocks if isinstance(block, Thinking))
    if texts or calls or thoughts:
        yield Message.model_construct(
            role=turn.role,
            content=_text(texts) if texts else None,
            tool_calls=calls or None,
            reasoning_content=thoughts or None,
        )


def _call(block: ToolUse) -> ToolCall:
    arguments = json.dumps(block.input, ensure_ascii=False)
    function = CalledFunction.model_construct(name=block.name, arguments=arguments)
    return ToolCall.model_construct(id=block.id, type="function", function=function)


def _text(content: str | list[Text]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
