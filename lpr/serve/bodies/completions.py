"""Bodies of completions and chats, and of texts to tokenise.

Names and defaults are those of OpenAI's API and of vLLM's extras to it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from lpr.serve import limits
from lpr.serve.bodies.fields import (
    Body,
    Choices,
    Few,
    FunctionName,
    Grammar,
    Int,
    Label,
    LogitBias,
    MaybeCount,
    MinP,
    Names,
    Natural,
    NumTop,
    Penalty,
    Positive,
    Repetition,
    Resumable,
    StopIds,
    Stops,
    Temperature,
    TextOr,
    TokenId,
    TopK,
    TopP,
    few_ids,
    few_parts,
    few_tool_values,
    few_values,
)


class StreamOptions(Body):
    """What a stream carries besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Body):
    """OpenAI's wrapper of a JSON schema."""

    name: Label = "schema"
    description: Grammar | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    regex: str | None = Field(default=None, max_length=limits.REGEX.most)
    grammar: Grammar | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        for name in ("json_schema", "regex", "grammar"):
            given = getattr(self, name) is not None
            if name == self.type and not given:
                raise ValueError(f'type "{self.type}" needs the field {name}')
            if name != self.type and given:
                raise ValueError(f'the field {name} does not go with type "{self.type}"')
        return self


class TextPart(Body):
    """A part of a content."""

    type: Literal["text"]
    text: str


class Prediction(Body):
    """Text that the output is likely to repeat in large part, as when a file is edited (OpenAI's predicted outputs)."""

    type: Literal["content"]
    content: TextOr[Annotated[Few[TextPart], Field(max_length=limits.FIELDS.most)]]

    @property
    def text(self) -> str:
        """The content, whose parts follow each other."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class Sampling(Resumable):
    """Fields that completions and chats share."""

    model: Label | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: Choices | None = None
    stop: Stops = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: Label | None = None  # only written to the access log
    prediction: Prediction | None = None
    prompt_cache_key: Label | None = None  # for routers (lpr.fleet.affinity): the same text comes from every replica

    # vLLM's.
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: Repetition | None = None
    min_tokens: Natural = 0
    ignore_eos: bool = False
    stop_token_ids: StopIds = None
    priority: Int = 0
    """Lower is earlier. A request of priority p waits as one that arrived 10 p seconds later; beyond 10 counts as 10,
    so none starves. Requests of other keys are not passed: keys share by weight."""
    request_id: Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[\w.:-]+$")] | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    use_beam_search: Literal[False] | None = None

    # lpr's.
    return_sources: bool | None = None  # name the draft source of every token

    @model_validator(mode="after")
    def _streams(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream=true only")
        return self


Ids = Annotated[Few[TokenId], Field(min_length=1)]
Prompt = (
    str
    | Ids
    | Annotated[Few[str], Field(min_length=1, max_length=limits.CHOICES.most)]
    | Annotated[Few[Ids], Field(min_length=1, max_length=limits.CHOICES.most)]
)


class CompletionBody(Sampling):
    """`POST /v1/completions`."""

    prompt: Annotated[Prompt, few_ids]
    suffix: str | None = None
    max_tokens: Natural | None = 16
    best_of: Choices | None = None
    echo: bool | None = None
    logprobs: NumTop | None = None


class CalledFunction(Body):
    """The function of a call, and its arguments as JSON."""

    name: FunctionName
    arguments: str


class ToolCall(Body):
    """A call that a message made."""

    id: Label
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Natural | None = None  # of a stream's delta, which clients send back

    @classmethod
    def of(cls, id: str, name: str, arguments: str) -> ToolCall:
        """A call of validated fields."""
        function = CalledFunction.model_construct(name=name, arguments=arguments)
        return cls.model_construct(id=id, type="function", function=function)


class Function(Body):
    """A function that a model may call."""

    name: FunctionName
    description: Grammar | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that a model may call."""

    type: Literal["function"]
    function: Function

    @classmethod
    def of(cls, name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None) -> Tool:
        """A tool of validated fields."""
        function = Function.model_construct(name=name, description=description, parameters=parameters, strict=strict)
        return cls.model_construct(type="function", function=function)


class FunctionChoice(Body):
    """The name of a function."""

    name: FunctionName


class NamedChoice(Body):
    """The tool that is to be called."""

    type: Literal["function"]
    function: FunctionChoice

    @classmethod
    def of(cls, name: str) -> NamedChoice:
        """The choice of a validated name."""
        return cls.model_construct(type="function", function=FunctionChoice.model_construct(name=name))


def joined(content: str | list[Any]) -> str:
    """The text of a content, whose parts have a `text` each."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class Message(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Few[TextPart] | None = None
    name: Label | None = None
    tool_call_id: Label | None = None
    tool_calls: Few[ToolCall] | None = None
    reasoning_content: str | None = None
    refusal: None = None


Messages = Annotated[Few[Message], Field(min_length=1, max_length=limits.MESSAGES.most), few_parts]
Tools = Annotated[Few[Tool], Field(max_length=limits.TOOLS.most), few_tool_values]


class ChatBody(Sampling):
    """`POST /v1/chat/completions`."""

    messages: Messages
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], few_values] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[Few[Literal["text"]], Field(max_length=limits.FIELDS.most)] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    # llama.vim sends these to a chat as well.
    n_predict: MaybeCount | None = None
    cache_prompt: bool | None = None  # without effect: prompts are always cached, and the text is the same
    id_slot: Int | None = None  # without effect: slots are found by their longest common prefix
    samplers: Names | None = None
    response_fields: Names | None = None

    @model_validator(mode="after")
    def _agree(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs=true only")
        given = self.model_fields_set
        if self.continue_final_message and self.add_generation_prompt and "add_generation_prompt" in given:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        return self


class TokenizeBody(Body):
    """`POST /tokenize`: vLLM's `prompt` or `messages`, or llama.cpp's `content`."""

    model: Label | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None  # llama.cpp's name, whose default is false
    parse_special: Literal[True] | None = None
    add_generation_prompt: bool = True
    continue_final_message: Literal[False] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> TokenizeBody:
        if sum(value is not None for value in (self.prompt, self.content, self.messages)) != 1:
            raise ValueError("give one of prompt, content and messages")
        return self


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: Label | None = None
    tokens: Annotated[Few[TokenId], Field(max_length=limits.DETOKENIZED.most)]
