"""The body of OpenAI's `POST /v1/responses`, and the chat that it asks for. Nothing is stored between requests."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, field_validator, model_validator

from lpr.serve import limits
from lpr.serve.bodies import fields
from lpr.serve.bodies.completions import (
    ChatBody,
    Effort,
    Function,
    FunctionChoice,
    JsonSchema,
    Message,
    NamedChoice,
    ResponseFormat,
    Tool,
    ToolCall,
    joined,
    placed,
)


class Part(fields.Body):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"]
    text: str
    cache_control: fields.Ignored = None
    annotations: fields.Ignored = None
    logprobs: fields.Ignored = None
    prompt_cache_breakpoint: fields.Ignored = None

    @model_validator(mode="before")
    @classmethod
    def _refused(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("type") == "refusal" and "refusal" in given:
            return {"text" if name == "refusal" else name: value for name, value in given.items()}
        return given


Parts = Annotated[fields.Few[Part], Field(max_length=limits.MESSAGES.most)]
Content = fields.TextOr[Parts]


class Said(fields.Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: fields.Label | None = None
    status: fields.Label | None = None
    phase: fields.Label | None = None


class Called(fields.Body):
    type: Literal["function_call"]
    call_id: fields.Label
    name: fields.FunctionName
    namespace: fields.FunctionName | None = None
    arguments: str
    id: fields.Label | None = None
    status: fields.Label | None = None


class Returned(fields.Body):
    type: Literal["function_call_output"]
    call_id: fields.Label
    output: Content
    id: fields.Label | None = None
    status: fields.Label | None = None


class Thought(fields.Body):
    type: Literal["reasoning"]
    id: fields.Label | None = None
    summary: Parts = []
    content: Parts | None = None
    encrypted_content: str | None = None  # nothing is encrypted here
    status: fields.Label | None = None


Item = Annotated[
    Annotated[Said, fields.tagged("message")]
    | Annotated[Called, fields.tagged("function_call")]
    | Annotated[Returned, fields.tagged("function_call_output")]
    | Annotated[Thought, fields.tagged("reasoning")],
    fields.by_type("message"),
]


class FunctionTool(Function):
    type: Literal["function"]


class Namespace(fields.Body):
    """Functions that a client keeps apart. The model knows them as NAMESPACE.FUNCTION."""

    type: Literal["namespace"]
    name: fields.FunctionName
    description: fields.Grammar | None = None
    tools: Annotated[fields.Few[FunctionTool], Field(max_length=limits.TOOLS.most)]


class WebSearch(fields.Body):
    """A tool that OpenAI hosts, and that agents always offer. Beside others it is left out."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["web_search"]


Offered = Annotated[
    Annotated[FunctionTool, fields.tagged("function")]
    | Annotated[Namespace, fields.tagged("namespace")]
    | Annotated[WebSearch, fields.tagged("web_search")],
    fields.by_type(),
]


class ChosenFunction(FunctionChoice):
    type: Literal["function"]
    namespace: fields.FunctionName | None = None


class Format(JsonSchema):
    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(fields.Body):
    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # without effect


class Reasoning(fields.Body):
    """How much the model thinks, where its template has a choice."""

    effort: Effort | None = None
    summary: fields.Label | None = None  # without effect: thoughts are shown whole
    generate_summary: fields.Label | None = None
    context: fields.Label | None = None


class StreamChoice(fields.Body):
    include_obfuscation: bool | None = None  # --pad-stream does this


Included = Literal[
    "reasoning.encrypted_content", "web_search_call.action.sources", "web_search_call.results",
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
]  # fmt: skip
"""What answers may include: all is without effect, as nothing is encrypted, and no hosted tool is called."""


class ResponsesBody(fields.Sampled):
    """`POST /v1/responses`."""

    input: fields.TextOr[
        Annotated[fields.Few[Item], Field(min_length=1, max_length=limits.MESSAGES.most), fields.few_parts]
    ]
    instructions: str | None = None
    max_output_tokens: fields.Most = None
    stream_options: StreamChoice | None = None
    tools: Annotated[fields.Few[Offered], Field(max_length=limits.TOOLS.most), fields.few_tool_values] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    store: bool | None = None  # nothing is stored, and the answer says so
    include: Annotated[list[Included], Field(max_length=len(get_args(Included)))] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None

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
    return name if namespace is None else f"{namespace}.{name}"


def as_chat(body: ResponsesBody) -> ChatBody:
    """The chat that a body asks for. Its fields have been validated."""
    items = [Said(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    messages, places = _messages(items)
    if body.instructions:
        messages.insert(0, Message.model_construct(role="system", content=body.instructions))
        places.insert(0, "instructions")
    choice: Any = body.tool_choice
    if isinstance(choice, ChosenFunction):
        choice = NamedChoice.of(qualified(choice.name, choice.namespace))
    tools = [Tool.of(name, each.description, each.parameters, each.strict) for name, _, each in body.functions]
    values = body.sampled() | {"messages": messages, "tools": tools or None, "tool_choice": choice}
    values |= {"max_tokens": body.max_output_tokens, "parallel_tool_calls": body.parallel_tool_calls}
    values["reasoning_effort"] = body.reasoning.effort if body.reasoning is not None else None
    if body.text is not None and (format := body.text.format) is not None:
        schema = format if format.type == "json_schema" else None
        values["response_format"] = ResponseFormat.model_construct(type=format.type, json_schema=schema)
    return placed(ChatBody.model_construct(**values), places)


def _messages(items: Sequence[Said | Called | Returned | Thought]) -> tuple[list[Message], list[str]]:
    """The items as messages of a chat: a thought, a text and calls that follow one another are one of them.

    Each has a place, the name of its first item.
    """
    messages: list[Message] = []
    places: list[str] = []
    for at, item in enumerate(items):
        if isinstance(item, Returned):
            content = joined(item.output)
            messages.append(Message.model_construct(role="tool", content=content, tool_call_id=item.call_id))
        elif isinstance(item, Said) and item.role != "assistant":
            messages.append(Message.model_construct(role=item.role, content=joined(item.content)))
        else:
            if not messages or messages[-1].role != "assistant" or (isinstance(item, Said) and messages[-1].content):
                messages.append(Message.model_construct(role="assistant", content=None))
            _add(messages[-1], item)
        places += [f"input.{at}"] * (len(messages) - len(places))
    return messages, places


def _add(message: Message, item: Said | Called | Thought) -> None:
    if isinstance(item, Said):
        message.content = joined(item.content)
    elif isinstance(item, Thought):
        message.reasoning_content = joined(item.content or item.summary) or None
    else:
        call = ToolCall.of(item.call_id, qualified(item.name, item.namespace), item.arguments)
        message.tool_calls = [*(message.tool_calls or ()), call]
