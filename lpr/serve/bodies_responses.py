"""The body of OpenAI's `POST /v1/responses`, and the chat that it asks for. Nothing is stored between requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

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
    JsonSchema,
    Label,
    Message,
    NamedChoice,
    Positive,
    ResponseFormat,
    Temperature,
    TextOr,
    Tool,
    ToolCall,
    TopP,
    few_parts,
    few_tool_values,
)


class Part(Body):
    """A part of a message's text."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    annotations: Ignored = None
    logprobs: Ignored = None
    prompt_cache_breakpoint: Ignored = None


Parts = Annotated[Few[Part], Field(max_length=limits.MESSAGES.most)]
Content = TextOr[Parts]


class Said(Body):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: Label | None = None
    status: Label | None = None
    phase: Label | None = None


class Called(Body):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: Label
    name: FunctionName
    arguments: str
    id: Label | None = None
    status: Label | None = None


class Returned(Body):
    """What a call has returned."""

    type: Literal["function_call_output"]
    call_id: Label
    output: Content
    id: Label | None = None
    status: Label | None = None


class Thought(Body):
    """A thought of an earlier answer."""

    type: Literal["reasoning"]
    id: Label | None = None
    summary: Parts = []
    content: Parts | None = None
    encrypted_content: str | None = None  # nothing is encrypted here
    status: Label | None = None


def _kind(item: Any) -> str:
    found = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return found if isinstance(found, str) else ""


Item = Annotated[
    Annotated[Said, Tag("message")]
    | Annotated[Called, Tag("function_call")]
    | Annotated[Returned, Tag("function_call_output")]
    | Annotated[Thought, Tag("reasoning")],
    Discriminator(_kind),
]


class FunctionTool(Body):
    """A function that a model may call."""

    type: Literal["function"]
    name: FunctionName
    description: Grammar | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunction(Body):
    """The function that is to be called."""

    type: Literal["function"]
    name: FunctionName


class Format(Body):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Label = "schema"
    description: Grammar | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """What the text is like."""

    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # without effect


class Reasoning(Body):
    """How much the model thinks, where its template has a choice."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Label | None = None  # without effect: thoughts are shown whole
    generate_summary: Label | None = None
    context: Label | None = None


class StreamChoice(Body):
    """What a stream carries besides events."""

    include_obfuscation: bool | None = None  # --pad-stream does this


class ResponsesBody(Body):
    """`POST /v1/responses`."""

    model: Label | None = None
    input: TextOr[Annotated[Few[Item], Field(min_length=1, max_length=limits.MESSAGES.most), few_parts]]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    stream_options: StreamChoice | None = None
    tools: Annotated[Few[FunctionTool], Field(max_length=limits.TOOLS.most), few_tool_values] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    store: Literal[False] | None = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=1)] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    metadata: Ignored = None
    client_metadata: Ignored = None
    user: Label | None = None
    safety_identifier: Label | None = None  # without effect
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None  # without effect


def as_chat(body: ResponsesBody) -> ChatBody:
    """The chat that a body asks for. Its fields have been validated."""
    items = [Said(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    messages = _messages(items)
    if body.instructions:
        messages.insert(0, Message.model_construct(role="system", content=body.instructions))
    choice = body.tool_choice
    if isinstance(choice, ChosenFunction):
        function = FunctionChoice.model_construct(name=choice.name)
        chosen: Any = NamedChoice.model_construct(type="function", function=function)
    else:
        chosen = choice
    same = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "user", "prompt_cache_key")
    fields = {name: getattr(body, name) for name in same}
    fields |= {"max_tokens": body.max_output_tokens, "tool_choice": chosen, "messages": messages}
    if body.reasoning is not None and body.reasoning.effort is not None:
        effort = body.reasoning.effort
        fields["chat_template_kwargs"] = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return ChatBody.model_construct(**fields, tools=_tools(body), response_format=_format(body))


def _tools(body: ResponsesBody) -> list[Tool] | None:
    return [
        Tool.model_construct(
            type="function",
            function=Function.model_construct(
                name=each.name, description=each.description, parameters=each.parameters, strict=each.strict
            ),
        )
        for each in body.tools or ()
    ] or None


def _format(body: ResponsesBody) -> ResponseFormat | None:
    format = body.text.format if body.text is not None else None
    if format is None:
        return None
    schema = JsonSchema.model_construct(name=format.name, schema_=format.schema_)
    return ResponseFormat.model_construct(
        type=format.type, json_schema=schema if format.type == "json_schema" else None
    )


def _messages(items: Sequence[Said | Called | Returned | Thought]) -> list[Message]:
    """The items as messages of a chat: a thought, a text and calls that follow one another are one of them."""
    messages: list[Message] = []
    for item in items:
        if isinstance(item, Returned):
            content = _text(item.output)
            messages.append(Message.model_construct(role="tool", content=content, tool_call_id=item.call_id))
        elif isinstance(item, Said) and item.role != "assistant":
            messages.append(Message.model_construct(role=item.role, content=_text(item.content)))
        else:
            if not messages or messages[-1].role != "assistant" or (isinstance(item, Said) and messages[-1].content):
                messages.append(Message.model_construct(role="assistant", content=None))
            _add(messages[-1], item)
    return messages


def _add(message: Message, item: Said | Called | Thought) -> None:
    """Add what an answer had to its message."""
    if isinstance(item, Said):
        message.content = _text(item.content)
    elif isinstance(item, Thought):
        message.reasoning_content = _text(item.content or item.summary) or None
    else:
        function = CalledFunction.model_construct(name=item.name, arguments=item.arguments)
        call = ToolCall.model_construct(id=item.call_id, type="function", function=function)
        message.tool_calls = [*(message.tool_calls or ()), call]


def _text(content: str | Sequence[Part]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
