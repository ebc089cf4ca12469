"""Bodies of completions and chats, and of texts to tokenise.

Names and defaults are those of OpenAI's API and of vLLM's extras to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, model_validator

from lpr.serve import limits
from lpr.serve.bodies import fields


class StreamOptions(fields.Body):
    include_usage: bool = False
    include_obfuscation: fields.Ignored = None  # --pad-stream does this
    continuous_usage_stats: bool = False


class JsonSchema(fields.Body):
    """OpenAI's wrapper of a JSON schema."""

    name: fields.Label = "schema"
    description: fields.Grammar | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(fields.Body):
    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    regex: str | None = Field(default=None, max_length=limits.REGEX.most)
    grammar: fields.Grammar | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        for name in ("json_schema", "regex", "grammar"):
            given = getattr(self, name) is not None
            if name == self.type and not given:
                raise ValueError(f'type "{self.type}" needs the field {name}')
            if name != self.type and given:
                raise ValueError(f'the field {name} does not go with type "{self.type}"')
        return self

    @property
    def text_schema(self) -> Any:
        if self.type not in ("json_object", "json_schema"):
            return None
        schema = self.json_schema.schema_ if self.json_schema is not None else None
        return schema if schema is not None else {"type": "object"}


class TextPart(fields.Body):
    type: Literal["text"]
    text: str
    cache_control: fields.Ignored = None  # prompts are always cached
    prompt_cache_breakpoint: fields.Ignored = None
    annotations: fields.Ignored = None


class RefusalPart(fields.Body):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class Prediction(fields.Body):
    """Text that the output is likely to repeat in large part, as when a file is edited (OpenAI's predicted outputs)."""

    type: Literal["content"]
    content: fields.TextOr[Annotated[fields.Few[TextPart], Field(max_length=limits.FIELDS.most)]]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class Sampling(fields.Sampled):
    """Fields that completions and chats share."""

    n: fields.Choices | None = None
    stop: fields.Stops = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    n_predict: fields.MaybeCount | None = None  # llama.cpp's max_tokens; 0: only fill the cache
    add_special_tokens: bool | None = None  # vLLM's
    return_sources: bool | None = None  # lpr's: name the draft source of every token

    @model_validator(mode="after")
    def _streams(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: it goes with stream=true only")
        return self


Ids = Annotated[fields.Few[fields.TokenId], Field(min_length=1)]
Prompt = (
    str
    | Ids
    | Annotated[fields.Few[str], Field(min_length=1, max_length=limits.CHOICES.most)]
    | Annotated[fields.Few[Ids], Field(min_length=1, max_length=limits.CHOICES.most)]
)


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class CompletionBody(Sampling):
    """`POST /v1/completions`."""

    prompt: Annotated[Prompt, fields.few_ids]
    suffix: str | None = None
    max_tokens: Annotated[fields.Natural | None, fields.without(-1)] = 16
    best_of: fields.Choices | None = None
    echo: bool | None = None
    logprobs: fields.NumTop | None = None

    @model_validator(mode="after")
    def _predicts(self) -> CompletionBody:
        if self.n_predict == 0:
            raise ValueError("n_predict: 0 fills the cache in chats and in /infill only")
        if self.n_predict is not None:
            self.max_tokens = self.n_predict if self.n_predict > 0 else None
        return self


class CalledFunction(fields.Body):
    name: fields.FunctionName
    arguments: str


class ToolCall(fields.Body):
    id: fields.Label
    cache_control: fields.Ignored = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: fields.Natural | None = None  # of a stream's delta, which clients send back

    @classmethod
    def of(cls, id: str, name: str, arguments: str) -> ToolCall:
        function = CalledFunction.model_construct(name=name, arguments=arguments)
        return cls.model_construct(id=id, type="function", function=function)


class Function(fields.Body):
    name: fields.FunctionName
    description: fields.Grammar | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    return_: dict[str, Any] | None = Field(default=None, alias="return")  # transformers': templates show it


class Tool(fields.Body):
    type: Literal["function"]
    function: Function
    cache_control: fields.Ignored = None

    @classmethod
    def of(cls, name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None) -> Tool:
        function = Function.model_construct(name=name, description=description, parameters=parameters, strict=strict)
        return cls.model_construct(type="function", function=function)


class FunctionChoice(fields.Body):
    name: fields.FunctionName


class NamedChoice(fields.Body):
    type: Literal["function"]
    function: FunctionChoice

    @classmethod
    def of(cls, name: str) -> NamedChoice:
        return cls.model_construct(type="function", function=FunctionChoice.model_construct(name=name))


def joined(content: str | list[Any]) -> str:
    """The text of a content, whose parts have a `text` each."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


_Part = Annotated[TextPart, fields.tagged("text")] | Annotated[RefusalPart, fields.tagged("refusal")]
Parts = fields.Few[Annotated[_Part, fields.by_type()]]


class Message(fields.Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: fields.TextOr[Parts] | None = None
    name: fields.Label | None = None
    tool_call_id: fields.Label | None = None
    tool_calls: fields.Few[ToolCall] | None = None
    function_call: CalledFunction | None = None  # what a call was before there were tools
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's name of it
    thinking: str | None = None  # gpt-oss's
    refusal: str | None = None
    prefix: bool | None = None  # DeepSeek's and Mistral's: the answer goes on where this one, the last, ends
    partial: bool | None = None  # Moonshot's name of it
    annotations: fields.Ignored = None
    cache_control: fields.Ignored = None

    def plain(self) -> dict[str, Any]:
        """The message as lpr.serve.text.fitting takes it."""
        content: Any = self.content
        if isinstance(content, list):
            content = [{"type": "text", "text": part.text} for part in content]
        calls = [each.model_dump(include={"id", "type", "function"}) for each in self.tool_calls or ()]
        if self.function_call is not None:
            calls.append({"id": _FUNCTION, "type": "function", "function": self.function_call.model_dump()})
        more = {"name": self.name, "tool_call_id": self.tool_call_id, "tool_calls": calls or None}
        thought = next((each for each in (self.reasoning_content, self.reasoning, self.thinking) if each), None)
        more["reasoning_content"] = thought
        role = "tool" if self.role == "function" else self.role
        shown = {"role": role, "content": content if content or not self.refusal else self.refusal}
        return shown | {name: value for name, value in more.items() if value is not None}


_FUNCTION = "call_000000000000000000000000"  # the id of a call that has none
Messages = Annotated[fields.Few[Message], Field(min_length=1, max_length=limits.MESSAGES.most), fields.few_parts]
Tools = Annotated[fields.Few[Tool], Field(max_length=limits.TOOLS.most), fields.few_tool_values]


class ChatBody(Sampling):
    """`POST /v1/chat/completions`."""

    messages: Messages
    max_tokens: fields.Most = None
    max_completion_tokens: fields.Most = None
    logprobs: bool | None = None
    top_logprobs: fields.NumTop | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], fields.few_values] | None = None
    reasoning_effort: Effort | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[fields.Few[Literal["text"]], Field(max_length=limits.FIELDS.most)] | None = None
    response_fields: fields.Names | None = None
    t_max_predict_ms: float | None = None  # without effect where n_predict is 0, as llama.vscode sends it

    _places: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def places(self) -> Mapping[str, str]:
        """The names that messages have in the body that this chat was made of."""
        return self._places

    @model_validator(mode="after")
    def _agree(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: it goes with logprobs=true only")
        if self.t_max_predict_ms and self.n_predict != 0:
            raise ValueError("t_max_predict_ms: only 0 is supported, unless n_predict is 0")
        for at, message in enumerate(self.messages):
            if message.prefix or message.partial:
                if at + 1 < len(self.messages) or message.role != "assistant":
                    raise ValueError(f"messages.{at}.prefix: it goes with the last message, of the assistant, only")
                self.continue_final_message, self.add_generation_prompt = True, False
        given = self.model_fields_set
        if self.continue_final_message and self.add_generation_prompt and "add_generation_prompt" in given:
            raise ValueError("continue_final_message: it and add_generation_prompt exclude each other")
        return self


class TokenizeBody(fields.Body):
    """`POST /tokenize`: vLLM's `prompt` or `messages`, or llama.cpp's `content`."""

    model: fields.Label | None = None
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


class DetokenizeBody(fields.Body):
    """`POST /detokenize`."""

    model: fields.Label | None = None
    tokens: Annotated[fields.Few[fields.TokenId], Field(max_length=limits.DETOKENIZED.most)]


def placed(chat: ChatBody, places: Sequence[str]) -> ChatBody:
    """A chat whose messages have these places in the body that it was made of."""
    chat._places = {f"messages.{at}": place for at, place in enumerate(places)}
    return chat
