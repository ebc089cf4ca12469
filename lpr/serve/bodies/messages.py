"""Bodies of Anthropic's `POST /v1/messages`, and the chat that each asks for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from lpr.serve import limits
from lpr.serve.bodies import fields
from lpr.serve.bodies.completions import (
    ChatBody,
    Effort,
    JsonSchema,
    Message,
    NamedChoice,
    ResponseFormat,
    Tool,
    ToolCall,
    joined,
    placed,
)


class Text(fields.Body):
    type: Literal["text"]
    text: str
    cache_control: fields.Ignored = None  # prompts are always cached
    citations: fields.Ignored = None


Texts = Annotated[fields.Few[Text], Field(max_length=limits.MESSAGES.most)]


class ToolUse(fields.Body):
    type: Literal["tool_use"]
    id: fields.Label
    name: fields.FunctionName
    input: Annotated[dict[str, Any], fields.few_call_values]
    cache_control: fields.Ignored = None
    caller: fields.Ignored = None
    toolset_name: fields.Ignored = None


class ToolResult(fields.Body):
    type: Literal["tool_result"]
    tool_use_id: fields.Label
    content: fields.TextOr[Texts] | None = None
    is_error: bool | None = None
    cache_control: fields.Ignored = None


class Thinking(fields.Body):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None  # thoughts are shown as they are


class RedactedThinking(fields.Body):
    """A thought of another service's answer, which says nothing here."""

    type: Literal["redacted_thinking"]
    data: str


Block = Annotated[
    Annotated[Text, fields.tagged("text")]
    | Annotated[ToolUse, fields.tagged("tool_use")]
    | Annotated[ToolResult, fields.tagged("tool_result")]
    | Annotated[Thinking, fields.tagged("thinking")]
    | Annotated[RedactedThinking, fields.tagged("redacted_thinking")],
    fields.by_type(),
]


class Turn(fields.Body):
    role: Literal["user", "assistant", "system"]
    content: fields.TextOr[fields.Few[Block]]


class Declared(fields.Body):
    """A tool of the client's own."""

    type: Literal["custom"] | None = None
    name: fields.FunctionName
    description: fields.Grammar | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: fields.Ignored = None
    eager_input_streaming: bool | None = None  # arguments always stream
    input_examples: fields.Ignored = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class Choice(fields.Body):
    type: Literal["auto", "any", "tool", "none"]
    name: fields.FunctionName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> Choice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError('a name goes with type "tool", and with no other')
        return self


class Thoughts(fields.Body):
    """Whether the model thinks first, where its template has a choice."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: fields.Positive | None = None  # without effect
    display: fields.Label | None = None


class Metadata(fields.Body):
    """Of the client's user. All else is without effect."""

    model_config = ConfigDict(extra="ignore")

    user_id: fields.Label | None = None


class OutputFormat(fields.Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(fields.Body):
    effort: Effort | None = None
    format: OutputFormat | None = None
    task_budget: fields.Ignored = None


class CountBody(fields.Harmless):
    """`POST /v1/messages/count_tokens`."""

    model: fields.Label | None = None
    messages: Annotated[fields.Few[Turn], Field(min_length=1, max_length=limits.MESSAGES.most), fields.few_parts]
    system: fields.TextOr[Texts] | None = None
    tools: Annotated[fields.Few[Declared], Field(max_length=limits.TOOLS.most), fields.few_tool_values] | None = None
    tool_choice: Choice | None = None
    thinking: Thoughts | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


class MessagesBody(CountBody, fields.Sampled):
    """`POST /v1/messages`."""

    max_tokens: fields.Positive
    """At most what fits into the model's context: clients send numbers for models with a longer one."""
    stop_sequences: Annotated[fields.Few[fields.Stop], Field(max_length=limits.STOPS.most)] | None = None
    metadata: Metadata | None = None


def as_chat(body: CountBody) -> ChatBody:
    """The chat that a body asks for. Its fields have been validated."""
    messages: list[Message] = []
    places: list[str] = []
    if body.system:
        messages.append(Message.model_construct(role="system", content=joined(body.system)))
        places.append("system")
    for at, turn in enumerate(body.messages):
        messages += _messages(turn)
        places += [f"messages.{at}"] * (len(messages) - len(places))
    tools = [Tool.of(each.name, each.description, each.input_schema, each.strict) for each in body.tools or ()]
    values: dict[str, Any] = {"messages": messages, "model": body.model, "tools": tools or None}
    if (chosen := body.tool_choice) is not None:
        same = {"any": "required"}.get(chosen.type, chosen.type)
        values["tool_choice"] = NamedChoice.of(chosen.name) if chosen.name is not None else same
        values["parallel_tool_calls"] = not chosen.disable_parallel_tool_use
    last = messages[-1] if messages else None
    if last is not None and last.role == "assistant" and last.content is not None and not last.tool_calls:
        values |= {"continue_final_message": True, "add_generation_prompt": False}  # the client has begun the answer
    if body.thinking is not None:
        values["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    config = body.output_config or OutputConfig()
    values["reasoning_effort"] = config.effort
    if (form := config.format or body.output_format) is not None:
        schema = JsonSchema.model_construct(name="schema", schema_=form.schema_)
        values["response_format"] = ResponseFormat.model_construct(type="json_schema", json_schema=schema)
    if isinstance(body, MessagesBody):
        values |= {**body.sampled(), "stop": body.stop_sequences}
        if body.metadata is not None and body.metadata.user_id is not None:
            values["user"] = body.metadata.user_id
    return placed(ChatBody.model_construct(**values), places)


def _messages(turn: Turn) -> Iterator[Message]:
    """A turn as messages of a chat: each result of a tool is one of its own."""
    blocks = [Text(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content
    for block in blocks:
        if isinstance(block, ToolResult):
            content = joined(block.content or "")
            yield Message.model_construct(role="tool", content=content, tool_call_id=block.tool_use_id)
    texts = [block for block in blocks if isinstance(block, Text)]
    used = [block for block in blocks if isinstance(block, ToolUse)]
    calls = [ToolCall.of(each.id, each.name, json.dumps(each.input, ensure_ascii=False)) for each in used]
    thoughts = "\n".join(block.thinking for block in blocks if isinstance(block, Thinking))
    if texts or calls or thoughts:
        said: dict[str, Any] = {"content": joined(texts) if texts else None, "reasoning_content": thoughts or None}
        yield Message.model_construct(role=turn.role, tool_calls=calls or None, **said)
