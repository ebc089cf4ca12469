"""The base of all bodies, and the types of their fields, with their limits."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from math import isfinite
from typing import Annotated, Any, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    StringConstraints,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from lpr.serve import limits
from lpr.serve.errors import TAG

INT64 = 2**63

SAMPLER_LETTERS = {
    "e": "penalties", "d": "dry", "k": "top_k", "y": "typ_p", "p": "top_p", "s": "top_n_sigma", "m": "min_p",
    "x": "xtc", "t": "temperature", "i": "infill",
}  # fmt: skip
"""llama.cpp's names of samplers, by its letters."""

T = TypeVar("T")


def _at_most(most: int, size: Callable[[Any], int], what: str) -> BeforeValidator:
    """A validator that refuses values of a larger size before it looks at their elements."""

    def check(given: Any) -> Any:
        if size(given) > most:
            raise ValueError(f"more than {most} {what}")
        return given

    return BeforeValidator(check)


def num_values(given: Any, most: int = limits.TEMPLATE_VALUES.most, are_small: bool = True) -> int:
    """Values within JSON, counted up to `most`; raises ValueError for a large number if they are to be small."""
    level, count = [given], 0
    while level and count <= most:
        each = level.pop()
        count += 1
        if isinstance(each, (dict, list)):
            level += each.values() if isinstance(each, dict) else each
        elif not are_small:
            continue
        elif not isfinite(each) if isinstance(each, float) else isinstance(each, int) and each.bit_length() > 64:
            raise ValueError("a number is not finite, or an integer has more than 64 bits")
    return count


def _num_entries(given: Any, kind: type[dict[Any, Any] | list[Any]] = dict) -> int:
    return len(given) if isinstance(given, kind) else 0


def _num_ids(given: Any) -> int:
    if not isinstance(given, list) or len(given) > limits.CHOICES.most:
        return _num_entries(given, list)
    return sum(len(each) for each in given if isinstance(each, list))


def _num_parts(given: Any) -> int:
    """Messages, and the parts of those that have some."""
    if not isinstance(given, list) or len(given) > limits.MESSAGES.most:
        return _num_entries(given, list)
    parts = (each.get(name) for each in given if isinstance(each, dict) for name in ("content", "tool_calls"))
    return len(given) + sum(len(part) for part in parts if isinstance(part, list))


def without(*values: int) -> BeforeValidator:
    """A validator that takes these values for null."""
    return BeforeValidator(lambda given: None if isinstance(given, int) and given in values else given)


def _names_of_samplers(given: Any) -> Any:
    """llama.cpp's letters as names of samplers."""
    if not isinstance(given, str):
        return given
    if unknown := set(given) - set(SAMPLER_LETTERS):
        raise ValueError(f"{min(unknown)!r} is none of {''.join(SAMPLER_LETTERS)}")
    return [SAMPLER_LETTERS[letter] for letter in given]


def by_type(default: str = "") -> Discriminator:
    """Tells members of a union apart by their `type`; each has a `tagged` one."""

    def tag(given: Any) -> str | None:
        found = given.get("type", default) if isinstance(given, dict) else getattr(given, "type", None)
        return TAG + found if isinstance(found, str) else None

    return Discriminator(tag)


def tagged(name: str) -> Tag:
    return Tag(TAG + name)


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
Seed = Annotated[Annotated[int, Field(ge=-INT64, lt=2**64)] | None, without(-1)]  # -1: a random one
Temperature = Annotated[float, Field(ge=0, le=100)]
TopK = Annotated[int, Field(ge=-1, lt=2**31)]  # 0 and -1: no limit
TopP = Annotated[float, Field(gt=0, le=1)]
MinP = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Repetition = Annotated[float, Field(ge=1e-3, le=100)]
Choices = Annotated[int, Field(ge=1, le=limits.CHOICES.most)]
NumTop = Annotated[int, Field(ge=0, le=20)]
Int = Annotated[int, Field(ge=-INT64, lt=INT64)]
Natural = Annotated[int, Field(ge=0, lt=1 << 256)]  # a message about it has room for its digits
Positive = Annotated[int, Field(ge=1, lt=1 << 256)]
MaybeCount = Annotated[int, Field(ge=-1, lt=INT64)]  # -1: as many as fit
Most = Annotated[Positive | None, without(-1)]  # -1 and null: as many tokens as fit
Label = Annotated[str, StringConstraints(max_length=limits.LABEL.most)]
Names = Annotated[Few[Label], Field(max_length=limits.FIELDS.most)]
Samplers = Annotated[Names, BeforeValidator(_names_of_samplers)]
Bias = dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]]
LogitBias = Annotated[Bias, _at_most(limits.LOGIT_BIAS.most, _num_entries, "tokens")] | None
few_values = _at_most(limits.TEMPLATE_VALUES.most, num_values, "values")
few_ids = _at_most(limits.IDS.most, _num_ids, "token ids")
few_parts = _at_most(limits.MESSAGES.most, _num_parts, "messages and parts")
few_tool_values = _at_most(limits.TOOL_VALUES.most, partial(num_values, most=limits.TOOL_VALUES.most), "values")
few_call_values = _at_most(
    limits.CALL_VALUES.most, partial(num_values, most=limits.CALL_VALUES.most, are_small=False), "values"
)
Ignored = Annotated[Any, few_values]  # a field without effect


class Only:
    """Metadata of a field of which no other values can be honoured."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._checked, handler(source))

    def _checked(self, given: Any) -> Any:
        if given not in self.values:
            raise ValueError(f"only {' or '.join(map(json.dumps, self.values))} is supported")
        return given


FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
Grammar = Annotated[str, StringConstraints(max_length=limits.GRAMMAR.most)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Drop nulls that ask for nothing: those of unknown fields and of fields that have another default.

        Clients send what an answer's object held. Of the other unknown fields one is left, to be refused.
        """
        if not isinstance(given, dict):
            return given
        known = _known(cls)
        kept = {name: value for name, value in given.items() if name in known and (value is not None or known[name])}
        unknown = (name for name, value in given.items() if value is not None and name not in known)
        first = next(unknown, None)  # of a million it is enough to refuse one
        return kept if first is None else {**kept, first: None}


@cache
def _known(kind: type[Body]) -> dict[str, bool]:
    """The fields of a body; False: null stands for the default."""
    return {
        field.alias or name: field.is_required() or type(None) in get_args(field.annotation)
        for name, field in kind.model_fields.items()
    }


class Harmless(Body):
    """Fields that clients send to every route, and that change no text. docs/serving.md shows them."""

    metadata: Ignored = None
    client_metadata: Ignored = None
    safety_identifier: Ignored = None
    store: Ignored = None  # nothing is stored
    service_tier: Ignored = None
    verbosity: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
    cache_control: Ignored = None
    context_management: Ignored = None
    max_tool_calls: Ignored = None  # counts calls of hosted tools
    inference_geo: Ignored = None
    speed: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None
    diagnostics: Ignored = None
    betas: Ignored = None
    # llama.cpp's. Parameters of samplers count only beside those that switch them on, below.
    cache_prompt: Ignored = None  # prompts are always cached, and the text is the same
    id_slot: Ignored = None  # slots are found by their longest common prefix
    t_max_prompt_ms: Ignored = None  # as in llama.cpp
    timings_per_token: Ignored = None
    return_progress: Ignored = None
    n_keep: Ignored = None  # contexts are not shifted
    n_discard: Ignored = None
    min_keep: Ignored = None
    dynatemp_exponent: Ignored = None
    xtc_threshold: Ignored = None
    dry_base: Ignored = None
    dry_allowed_length: Ignored = None
    dry_penalty_last_n: Ignored = None
    dry_sequence_breakers: Ignored = None
    mirostat_tau: Ignored = None
    mirostat_eta: Ignored = None
    repeat_last_n: Ignored = None

    dynatemp_range: Annotated[Any, Only(0)] = None
    typical_p: Annotated[Any, Only(1)] = None
    xtc_probability: Annotated[Any, Only(0)] = None
    dry_multiplier: Annotated[Any, Only(0)] = None
    mirostat: Annotated[Any, Only(0)] = None
    top_n_sigma: Annotated[Any, Only(-1, 0)] = None
    n_probs: Annotated[Any, Only(0)] = None
    post_sampling_probs: Annotated[Any, Only(False)] = None
    lora: Annotated[Any, Only([])] = None
    grammar: Annotated[Any, Only("")] = None
    parse_tool_calls: Annotated[Any, Only(True)] = None
    reasoning_format: Annotated[Any, Only("auto", "deepseek")] = None
    t_max_predict_ms: Annotated[Any, Only(0)] = None
    # vLLM's and others'.
    echo: Annotated[Any, Only(False)] = None
    length_penalty: Annotated[Any, Only(1)] = None
    use_beam_search: Annotated[Any, Only(False)] = None
    include_stop_str_in_output: Annotated[Any, Only(False)] = None
    spaces_between_special_tokens: Annotated[Any, Only(True)] = None
    return_tokens_as_token_ids: Annotated[Any, Only(False)] = None
    include_reasoning: Annotated[Any, Only(True)] = None
    bad_words: Annotated[Any, Only([])] = None
    documents: Annotated[Any, Only([])] = None
    logits_processors: Annotated[Any, Only([])] = None
    mcp_servers: Annotated[Any, Only([])] = None
    safe_prompt: Annotated[Any, Only(False)] = None
    top_logprobs: Annotated[Any, Only(0)] = None

    @model_validator(mode="after")
    def _counts_all(self) -> Harmless:
        neutral = {"repeat_penalty": 1, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
        is_on = any(getattr(self, name, None) not in (None, value) for name, value in neutral.items())
        if self.repeat_last_n not in (None, -1) and is_on:
            raise ValueError("repeat_last_n: penalties count the whole text, and only -1 is supported beside them")
        return self


class Resumable(Harmless):
    """lpr's fields of a stream that can go on at another service."""

    seed: Seed = None
    return_token_ids: bool | None = None
    delivered_token_ids: Annotated[Few[TokenId], Field(max_length=limits.DELIVERED.most)] | None = None
    """Output ids that came before a stream broke off: the answer goes on after them. Needs `seed` or temperature 0."""


class Sampled(Resumable):
    """Fields that all routes obey, but for /infill, which has llama.cpp's."""

    model: Label | None = None
    user: Label | None = None  # only written to the access log
    prompt_cache_key: Label | None = None  # for routers (lpr.fleet.affinity): the same text comes from every replica
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias = None

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
    skip_special_tokens: bool | None = None

    # Other names of the above.
    random_seed: Seed = None  # Mistral's
    repeat_penalty: Repetition | None = None  # llama.cpp's
    samplers: Samplers | None = None
    """llama.cpp's: of top_k, top_p, min_p, temperature and penalties, those in this list are used."""

    @model_validator(mode="after")
    def _renamed(self) -> Sampled:
        for name, other in (("seed", "random_seed"), ("repetition_penalty", "repeat_penalty")):
            if getattr(self, name) is None and getattr(self, other) is not None:
                setattr(self, name, getattr(self, other))
        return self

    def sampled(self) -> dict[str, Any]:
        """These fields, for the chat that a body asks for."""
        return {name: getattr(self, name) for name in Sampled.model_fields}
