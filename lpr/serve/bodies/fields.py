"""The base of all bodies, and the types of their fields, with their limits."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Annotated, Any, TypeVar

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
from lpr.serve.errors import TAG

INT64 = 2**63

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


def num_values(given: Any, most: int = limits.TEMPLATE_VALUES.most, are_small: bool = True) -> int:
    """Values within JSON, counted until they are more than `most`.

    Raises ValueError for a number that is too large, if they are to be small.
    """
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
    return num_values(given, limits.TOOL_VALUES.most)


def _num_call_values(given: Any) -> int:
    return num_values(given, limits.CALL_VALUES.most, are_small=False)


def by_type(default: str = "") -> Discriminator:
    """Tells members of a union apart by their `type`; each has a `tagged` one."""

    def tag(given: Any) -> str | None:
        found = given.get("type", default) if isinstance(given, dict) else getattr(given, "type", None)
        return TAG + found if isinstance(found, str) else None

    return Discriminator(tag)


def tagged(name: str) -> Tag:
    """The tag of a member of a union `by_type`."""
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
Seed = Annotated[int, Field(ge=-INT64, lt=2**64)] | None
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
Label = Annotated[str, StringConstraints(max_length=limits.LABEL.most)]
Names = Annotated[Few[Label], Field(max_length=limits.FIELDS.most)]
Bias = dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]]
LogitBias = Annotated[Bias, _at_most(limits.LOGIT_BIAS.most, _num_entries, "tokens")] | None
few_values = _at_most(limits.TEMPLATE_VALUES.most, num_values, "values")
few_ids = _at_most(limits.IDS.most, _num_ids, "token ids")
few_parts = _at_most(limits.MESSAGES.most, _num_parts, "messages and parts")
few_tool_values = _at_most(limits.TOOL_VALUES.most, _num_tool_values, "values")
few_call_values = _at_most(limits.CALL_VALUES.most, _num_call_values, "values")
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


class Resumable(Body):
    """lpr's fields of a stream that can go on at another service."""

    seed: Seed = None
    return_token_ids: bool | None = None
    delivered_token_ids: Annotated[Few[TokenId], Field(max_length=limits.DELIVERED.most)] | None = None
    """Output ids that came before a stream broke off: the answer goes on after them. Needs `seed` or temperature 0."""
