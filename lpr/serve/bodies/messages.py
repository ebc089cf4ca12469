"""Bodies of Anthropic's `POST /v1/messages`, and the chat that each asks for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from lpr.serve import limits
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
from lpr.serve.bodies.fields import (
    Body,
    Few,
    FunctionName,
    Grammar,
    Harmless,
    Ignored,
    Label,
    Positive,
    Sampled,
    Stop,
    TextOr,
    by_type,
    few_call_values,
    few_parts,
    few_tool_values,
    tagged,
)


class Text(Body):
    type: Literal["text"]
    text: str
    cache_control: Ignored = None  # prompts are always cached
    citations: Ignored = None


Texts = Annotated[Few[Text], Field(max_length=limits.MESSAGES.most)]


class ToolUse(Body):
    type: Literal["tool_use"]
    id: Label
    name: FunctionName
    input: Annotated[dict[str, Any], few_call_values]
    cache_control: Ignored = None
    caller: Ignored = None
    toolset_name: Ignored = None


class ToolResult(Body):
    type: Literal["tool_result"]
    tool_use_id: Label
    content: TextOr[Texts] | None = None
    is_error: bool | None = None
    cache_control: Ignored = None


class Thinking(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None  # thoughts are shown as they are


class RedactedThinking(Body):
    """A thought of another service's answer, which says nothing here."""

    type: Literal["redacted_thinking"]
    data: str


Block = Annotated[
    Annotated[Text, tagged("text")]
    | Annotated[ToolUse, tagged("tool_use")]
    | Annotated[ToolResult, tagged("tool_result")]
    | Annotated[Thinking, tagged("thinking")]
    | Annotated[RedactedThinking, tagged("redacted_thinking")],
    by_type(),
]


class Turn(Body):
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
    """Of the client's user. All else is without effect."""

    model_config = ConfigDict(extra="ignore")

    user_id: Label | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Effort | None = None
    format: OutputFormat | None = None
    task_budget: Ignored = None


class CountBody(Harmless):
    """`POST /v1/messages/count_tokens`."""

    model: Label | None = None
    messages: Annotated[Few[Turn], Field(min_length=1, max_length=limits.MESSAGES.most), few_parts]
    system: TextOr[Texts] | None = None
    tools: Annotated[Few[Declared], Field(max_length=limits.TOOLS.most), few_tool_values] | None = None
    tool_choice: Choice | None = None
    thinking: Thoughts | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


class MessagesBody(CountBody, Sampled):
    """`POST /v1/messages`."""

    max_tokens: Positive
    """At most what fits into the model's context: clients send numbers for models with a longer one."""
    stop_sequences: Annotated[Few[Stop], Field(max_length=limits.STOPS.most)] | None = None
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
    fields: dict[str, Any] = {"messages": messages, "model": body.model, "tools": tools or None}
    if (chosen := body.tool_choice) is not None:
        same = {"any": "required"}.get(chosen.type, chosen.type)
        fields["tool_choice"] = NamedChoice.of(chosen.name) if chosen.name is not None else same
        fields["parallel_tool_calls"] = not chosen.disable_parallel_tool_use
    last = messages[-1] if messages else None
    if last is not None and last.role == "assistant" and last.content is not None and not last.tool_calls:
        fields |= {"continue_final_message": True, "add_generation_prompt": False}  # the client has begun the answer
    if body.thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    config = body.output_config or OutputConfig()
    fields["reasoning_effort"] = config.effort
    if (form := config.format or body.output_format) is not None:
        schema = JsonSchema.model_construct(name="schema", schema_=form.schema_)
        fields["response_format"] = ResponseFormat.model_construct(type="json_schema", json_schema=schema)
    if isinstance(body, MessagesBody):
        fields |= {**body.sampled(), "stop": body.stop_sequences}
        if body.metadata is not None and body.metadata.user_id is not None:
            fields["user"] = body.metadata.user_id
    return placed(ChatBody.model_construct(**fields), places)


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
