"""The body of OpenAI's `POST /v1/responses`, and the chat that it asks for. Nothing is stored between requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator

from lpr.serve import limits
from lpr.serve.bodies.completions import (
    ChatBody,
    Function,
    FunctionChoice,
    JsonSchema,
    Message,
    NamedChoice,
    ResponseFormat,
    Tool,
    ToolCall,
    joined,
)
from lpr.serve.bodies.fields import (
    Body,
    Few,
    FunctionName,
    Grammar,
    Ignored,
    Label,
    Positive,
    Resumable,
    Temperature,
    TextOr,
    TopP,
    by_type,
    few_parts,
    few_tool_values,
    tagged,
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
    namespace: FunctionName | None = None
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


Item = Annotated[
    Annotated[Said, tagged("message")]
    | Annotated[Called, tagged("function_call")]
    | Annotated[Returned, tagged("function_call_output")]
    | Annotated[Thought, tagged("reasoning")],
    by_type("message"),
]


class FunctionTool(Function):
    """A function that a model may call."""

    type: Literal["function"]


class Namespace(Body):
    """Functions that a client keeps apart. The model knows them as NAMESPACE.FUNCTION."""

    type: Literal["namespace"]
    name: FunctionName
    description: Grammar | None = None
    tools: Annotated[Few[FunctionTool], Field(max_length=limits.TOOLS.most)]


class WebSearch(Body):
    """A tool that OpenAI hosts, and that agents always offer. Beside others it is left out."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["web_search"]


Offered = Annotated[
    Annotated[FunctionTool, tagged("function")]
    | Annotated[Namespace, tagged("namespace")]
    | Annotated[WebSearch, tagged("web_search")],
    by_type(),
]


class ChosenFunction(FunctionChoice):
    """The function that is to be called."""

    type: Literal["function"]
    namespace: FunctionName | None = None


class Format(JsonSchema):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"


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


class ResponsesBody(Resumable):
    """`POST /v1/responses`."""

    model: Label | None = None
    input: TextOr[Annotated[Few[Item], Field(min_length=1, max_length=limits.MESSAGES.most), few_parts]]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    stream_options: StreamChoice | None = None
    tools: Annotated[Few[Offered], Field(max_length=limits.TOOLS.most), few_tool_values] | None = None
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

    @field_validator("tools")
    @classmethod
    def _callable(cls, tools: list[Any] | None) -> list[Any] | None:
        if tools and all(isinstance(each, WebSearch) for each in tools):
            raise ValueError("web_search is hosted by OpenAI, and there is no other tool to call")
        return tools

    @property
    def functions(self) -> list[tuple[str, str | None, Function]]:
        """Each function after the name that the model knows and its namespace."""
        inner = [
            (each.name, function) for each in self.tools or () if isinstance(each, Namespace) for function in each.tools
        ]
        outer = [(None, each) for each in self.tools or () if isinstance(each, FunctionTool)]
        return [(qualified(each.name, namespace), namespace, each) for namespace, each in [*outer, *inner]]


def qualified(name: str, namespace: str | None) -> str:
    """The name by which the model knows a function."""
    return name if namespace is None else f"{namespace}.{name}"


def as_chat(body: ResponsesBody) -> ChatBody:
    """The chat that a body asks for. Its fields have been validated."""
    items = [Said(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    messages = _messages(items)
    if body.instructions:
        messages.insert(0, Message.model_construct(role="system", content=body.instructions))
    choice = body.tool_choice
    same = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "user", "prompt_cache_key")
    fields: dict[str, Any] = {name: getattr(body, name) for name in (*same, *Resumable.model_fields)}
    fields |= {"messages": messages, "max_tokens": body.max_output_tokens, "response_format": _format(body)}
    if isinstance(choice, ChosenFunction):
        fields["tool_choice"] = NamedChoice.of(qualified(choice.name, choice.namespace))
    else:
        fields["tool_choice"] = choice
    fields["tools"] = [
        Tool.of(name, each.description, each.parameters, each.strict) for name, _, each in body.functions
    ] or None
    if body.reasoning is not None and body.reasoning.effort is not None:
        effort = body.reasoning.effort
        fields["chat_template_kwargs"] = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return ChatBody.model_construct(**fields)


def _format(body: ResponsesBody) -> ResponseFormat | None:
    format = body.text.format if body.text is not None else None
    if format is None:
        return None
    schema = format if format.type == "json_schema" else None
    return ResponseFormat.model_construct(type=format.type, json_schema=schema)


def _messages(items: Sequence[Said | Called | Returned | Thought]) -> list[Message]:
    """The items as messages of a chat: a thought, a text and calls that follow one another are one of them."""
    messages: list[Message] = []
    for item in items:
        if isinstance(item, Returned):
            content = joined(item.output)
            messages.append(Message.model_construct(role="tool", content=content, tool_call_id=item.call_id))
        elif isinstance(item, Said) and item.role != "assistant":
            messages.append(Message.model_construct(role=item.role, content=joined(item.content)))
        else:
            if not messages or messages[-1].role != "assistant" or (isinstance(item, Said) and messages[-1].content):
                messages.append(Message.model_construct(role="assistant", content=None))
            _add(messages[-1], item)
    return messages


def _add(message: Message, item: Said | Called | Thought) -> None:
    """Add what an answer had to its message."""
    if isinstance(item, Said):
        message.content = joined(item.content)
    elif isinstance(item, Thought):
        message.reasoning_content = joined(item.content or item.summary) or None
    else:
        call = ToolCall.of(item.call_id, qualified(item.name, item.namespace), item.arguments)
        message.tool_calls = [*(message.tool_calls or ()), call]
