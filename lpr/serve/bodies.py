"""Bodies of requests as pydantic models. Unknown fields are refused by their names, never ignored.

Names and defaults are those of OpenAI's API, of vLLM's extras to it, of llama.cpp's `/infill`, and of DeepSeek's and
Mistral's completion endpoints. Fields that some client always sends, and of which only one value can be honoured, are
literals of that value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
)

from lpr.serve import limits

_INT64 = 2**63

T = TypeVar("T")


def _at_most(most: int, size: Callable[[Any], int], what: str) -> BeforeValidator:
    """A validator that refuses values of a larger size before it looks at their elements."""

    def check(given: Any) -> Any:
        if size(given) > most:
            raise ValueError(f"more than {most} {what}")
        return given

    return BeforeValidator(check)


def _num_entries(given: Any) -> int:
    return len(given) if isinstance(given, dict) else 0


def _num_values(given: Any, most: int = limits.TEMPLATE_VALUES.most) -> int:
    """Values within JSON, counted until they are more than `most`."""
    level, count = [given], 0
    while level and count <= most:
        each = level.pop()
        count += 1
        if isinstance(each, (dict, list)):
            level += each.values() if isinstance(each, dict) else each
    return count


def _num_ids(given: Any) -> int:
    if not isinstance(given, list) or len(given) > limits.CHOICES.most:
        return len(given) if isinstance(given, list) else 0
    return sum(len(each) for each in given if isinstance(each, list))


def _num_parts(given: Any) -> int:
    """Messages, and the parts of those that have some."""
    if not isinstance(given, list) or len(given) > limits.MESSAGES.most:
        return len(given) if isinstance(given, list) else 0
    parts = (each.get(name) for each in given if isinstance(each, dict) for name in ("content", "tool_calls"))
    return len(given) + sum(len(part) for part in parts if isinstance(part, list))


def _num_tool_values(given: Any) -> int:
    return _num_values(given, limits.TOOL_VALUES.most)


# Either text or T, told apart by what was sent, so that an error is about that.
TextOr = Annotated[
    Annotated[str, Tag("str")] | Annotated[T, Tag("list-of-parts")],
    Discriminator(lambda given: "str" if isinstance(given, str) else "list-of-parts"),
]
Few = Annotated[list[T], Field(fail_fast=True)]  # the first wrong element is the error, not each of a million
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=limits.STOP_LENGTH.most)]
Stops = Stop | Annotated[Few[Stop], Field(max_length=limits.STOPS.most)] | None
StopIds = Annotated[Few[TokenId], Field(max_length=limits.STOP_IDS.most)] | None
Seed = Annotated[int, Field(ge=-_INT64, lt=2**64)] | None
Temperature = Annotated[float, Field(ge=0, le=100)]
TopK = Annotated[int, Field(ge=-1, lt=2**31)]  # 0 and -1: no limit
TopP = Annotated[float, Field(gt=0, le=1)]
MinP = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Repetition = Annotated[float, Field(gt=0, le=100)]
Choices = Annotated[int, Field(ge=1, le=limits.CHOICES.most)]
NumTop = Annotated[int, Field(ge=0, le=20)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Label = Annotated[str, StringConstraints(max_length=limits.LABEL.most)]
Names = Annotated[Few[Label], Field(max_length=limits.FIELDS.most)]
Bias = dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]]
LogitBias = Annotated[Bias, _at_most(limits.LOGIT_BIAS.most, _num_entries, "tokens")] | None
few_values = _at_most(limits.TEMPLATE_VALUES.most, _num_values, "values")
few_parts = _at_most(limits.MESSAGES.most, _num_parts, "messages and parts")
few_tool_values = _at_most(limits.TOOL_VALUES.most, _num_tool_values, "values")
Ignored = Annotated[Any, few_values]
"""A field without effect."""
FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
Grammar = Annotated[str, StringConstraints(max_length=limits.GRAMMAR.most)]


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Drop unknown fields that are null, as they ask for nothing and clients send what an answer's object held.

        Of the others one is left, to be refused.
        """
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        kept = {name: value for name, value in given.items() if name in known}
        unknown = (name for name, value in given.items() if value is not None and name not in known)
        first = next(unknown, None)  # of a million it is enough to refuse one
        return kept if first is None else {**kept, first: None}


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


class Sampling(Body):
    """Fields that completions and chats share."""

    model: Label | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: Choices | None = None
    stop: Stops = None
    seed: Seed = None
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
    priority: Annotated[int, Field(ge=-_INT64, lt=_INT64)] = 0
    """Lower is earlier. A request of priority p waits as one that arrived 10 p seconds later; beyond 10 counts as 10,
    so none starves. Requests of other keys are not passed: keys share by weight."""
    request_id: Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[\w.:-]+$")] | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    use_beam_search: Literal[False] | None = None

    # lpr's.
    return_sources: bool | None = None  # name the draft source of every token
    delivered_token_ids: Annotated[list[TokenId], Field(max_length=limits.DELIVERED.most)] | None = None
    """Output ids that came before a stream broke off: the answer goes on after them. Needs `seed` or temperature 0."""

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

    prompt: Annotated[Prompt, _at_most(limits.IDS.most, _num_ids, "token ids")]
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


class FunctionChoice(Body):
    """The name of a function."""

    name: FunctionName


class NamedChoice(Body):
    """The tool that is to be called."""

    type: Literal["function"]
    function: FunctionChoice


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
    n_predict: Annotated[int, Field(ge=-1)] | None = None
    cache_prompt: bool | None = None  # without effect: prompts are always cached, and the text is the same
    id_slot: int | None = None  # without effect: slots are found by their longest common prefix
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


class ExtraFile(Body):
    """A piece of another file."""

    text: str
    filename: Label = ""
    time: Ignored = None  # without effect: the order of the pieces counts


class InfillBody(Body):
    """llama.cpp's `POST /infill`, with the fields that llama.vim and llama.vscode send."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[Few[ExtraFile], Field(max_length=limits.PIECES.most)] = []
    prompt: str = ""
    """The text between prefix and hole: the line up to the cursor."""
    n_predict: Annotated[int, Field(ge=-1)] = -1  # -1: 512, or a quarter of the model's limit. 0: only fill the cache
    n_indent: Natural = 0  # end before a line that is indented by less than this many characters
    n_cmpl: Choices = 1
    t_max_prompt_ms: float | None = None  # without effect, as in llama.cpp
    t_max_predict_ms: float = 0
    """End after this time, once a line is complete; counted from the first token. 0: no limit."""
    cache_prompt: bool = True
    id_slot: int = -1
    samplers: Names | None = None  # of top_k, top_p, min_p, temperature and penalties, those in this list are used
    response_fields: Names | None = None
    """Answer with these fields only; "a/b" is field b of a."""
    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    repeat_penalty: Repetition = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    seed: Annotated[int, Field(ge=-1, lt=2**64)] = -1
    stop: Annotated[Few[Stop], Field(max_length=limits.STOPS.most)] = []
    stream: bool = False
    return_tokens: bool = False
    model: Label | None = None


class FimBody(Body):
    """Mistral's `POST /v1/fim/completions`."""

    model: Label | None = None
    prompt: str
    suffix: str | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    max_tokens: Positive | None = None
    min_tokens: Natural | None = None
    stream: bool | None = None
    stop: Stops = None
    random_seed: Seed = None


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
