"""The base of all bodies, and the types of their fields, with their limits."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    StringConstraints,
    Tag,
    create_model,
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


_IGNORED = (
    # Nothing is stored, and hosted tools, whose calls `max_tool_calls` counts, are not called.
    "metadata", "client_metadata", "safety_identifier", "store", "service_tier", "verbosity", "prompt_cache_retention",
    "prompt_cache_options", "cache_control", "context_management", "max_tool_calls", "inference_geo", "speed",
    "user_profile_id", "workspace_id", "diagnostics", "betas",
    # llama.cpp's. Prompts are always cached, and slots found by their longest common prefix; contexts are not shifted.
    # Parameters of samplers count only beside those that switch them on, in `_ONLY`.
    "cache_prompt", "id_slot", "t_max_prompt_ms", "timings_per_token", "return_progress", "n_keep", "n_discard",
    "min_keep", "dynatemp_exponent", "xtc_threshold", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
    "dry_sequence_breakers", "mirostat_tau", "mirostat_eta",
)  # fmt: skip
"""Fields of every route without effect."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "dynatemp_range": (0,), "typical_p": (1,), "xtc_probability": (0,), "dry_multiplier": (0,), "mirostat": (0,),
    "top_n_sigma": (-1, 0), "n_probs": (0,), "post_sampling_probs": (False,), "lora": ([],), "grammar": ("",),
    "parse_tool_calls": (True,), "reasoning_format": ("auto", "deepseek"), "t_max_predict_ms": (0,),
    # vLLM's and others'.
    "echo": (False,), "length_penalty": (1,), "use_beam_search": (False,), "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,), "return_tokens_as_token_ids": (False,), "include_reasoning": (True,),
    "bad_words": ([],), "documents": ([],), "logits_processors": ([],), "mcp_servers": ([],), "safe_prompt": (False,),
    "top_logprobs": (0,),
}  # fmt: skip
"""Fields of which no values but these can be honoured."""
if TYPE_CHECKING:
    _Fields = Body
else:
    _fields = {name: (Ignored, None) for name in _IGNORED}
    _fields |= {name: (Annotated[Any, Only(*values)], None) for name, values in _ONLY.items()}
    _Fields = create_model("_Fields", __base__=Body, __module__=__name__, **_fields)


class Harmless(_Fields):
    """Fields that clients send to every route, and that change no text. docs/serving.md shows them."""

    repeat_last_n: Ignored = None

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
