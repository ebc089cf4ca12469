"""The served model in the front: facts, tokenizer and templates; and the SamplingParams of a body."""

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from lpr.config import InputError, SamplingParams
from lpr.protocol import ErrorCode, Submit
from lpr.serve import limits
from lpr.serve.bodies.completions import ChatBody, NamedChoice, Sampling, TokenizeBody
from lpr.serve.bodies.fields import SAMPLER_LETTERS
from lpr.serve.errors import ApiError, bad, too_long
from lpr.serve.messages import Facts
from lpr.serve.text.calls import NAMES
from lpr.serve.text.chat_template import MOST_RENDERED, ChatTemplates
from lpr.serve.text.fim import Filler, filler
from lpr.serve.text.fitting import text_of
from lpr.serve.text.forms import Thoughts
from lpr.serve.text.replies import Family, Replies
from lpr.serve.text.tokens import Tokens
from lpr.serve.text.windows import window_of

_SAMPLED = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
"""Fields of a body that are SamplingParams, where they are given."""
_NEUTRAL: dict[str, dict[str, float]] = {
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
}
"""llama.cpp's names of samplers, each with the values that disable it."""
_UNUSED = {"infill", "typical_p", "min_keep", *SAMPLER_LETTERS.values()} - _NEUTRAL.keys()
"""Other allowed names in `samplers`: they are disabled by their own parameters; "infill" is nearly greedy."""
_DIGITS = 10  # digits of a token's id


class Served:
    """A loaded model, as the front sees it."""

    def __init__(
        self,
        facts: Facts,
        names: Sequence[str],
        fim: str = "auto",
        chat_template: str | None = None,
        defaults: Mapping[str, Any] | None = None,
        call_parser: str = "auto",
    ) -> None:
        """Read the tokenizer and compile the templates; raises InputError if `fim` or a template cannot work.

        `defaults` are sampling parameters of requests that leave them out (see lpr.serve.text.defaults). `call_parser`
        is as --tool-call-parser.
        """
        self.facts = facts
        self._defaults = {"temperature": 1.0, **(defaults or {})}
        self.names = tuple(names)
        self.adapters: Callable[[], Iterable[str]] = tuple  # names of the adapters that there are now
        self.created = int(time.time())
        self.tokens = Tokens(facts.tokenizer)
        self.filler = filler(self.tokens, fim) if fim != "none" else None
        if self.filler is None and fim not in ("auto", "none"):
            raise InputError(f"--fim {fim}: the tokenizer of {facts.model!r} lacks this family's tokens")
        templates = {"default": chat_template} if chat_template is not None else facts.chat_templates
        self.templates = ChatTemplates(templates, facts.special_tokens)
        if chat_template is not None and self.templates.failure is not None:
            raise InputError(self.templates.failure)
        self.family = Family.of(self.templates.tool_source, call_parser)

    @property
    def fingerprint(self) -> str:
        """OpenAI's system_fingerprint: a hash of the settings that may affect rounding."""
        return f"lpr-{self.facts.dtype}-lp{self.facts.lp}-tp{self.facts.tp}"

    def check_model(self, name: str | None) -> str:
        """The name to answer with; raises ApiError for a model that is not served."""
        if not name or name == self.facts.model:  # the value of --model, which may be a path
            return self.names[0]
        if name not in self.names and name not in self.adapters():
            served = ", ".join([*self.names, *self.adapters()])
            message = f"the model {name!r} is not served here; {served} is"
            raise ApiError(ErrorCode.MODEL_NOT_FOUND, message, "model")
        return name

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raise ApiError for ids outside the vocabulary."""
        outside = [token for token in ids if token >= self.facts.vocab_size]
        if outside:
            raise bad(param, f"{param}: {outside[0]} is not in the vocabulary of {self.facts.vocab_size} tokens")

    def need_filler(self, param: str) -> Filler:
        """The filler; raises ApiError for a model without FIM tokens."""
        if self.filler is None:
            message = f"{param}: the model {self.names[0]!r} has no tokens for filling in the middle"
            raise bad(param, message, ErrorCode.NO_FIM)
        return self.filler

    def check_length(self, text: str, param: str = "prompt") -> int:
        """The least number of tokens of a long text; raises ApiError if it exceeds the model's limit."""
        if len(text) <= self.facts.max_length or self.tokens.lengths is None:
            return 0
        least = self.tokens.lengths.least_tokens(text)
        if least > self.facts.max_length:
            raise too_long(f"{len(text)} characters, which are at least {least} tokens,", self.facts.max_length, param)
        return least

    @property
    def most_characters(self) -> int:
        lengths = self.tokens.lengths
        return MOST_RENDERED if lengths is None else limits.CONTEXT.most * lengths.longest * self.facts.max_length

    def replies(self, body: ChatBody, prompt: str) -> Replies:
        """The parser settings of a conversation's replies; raises ApiError for unsupported tools."""
        family, thoughts, format = self.family, self.family.thoughts, body.response_format
        is_begun = thoughts is not None and _is_open(thoughts, prompt, body)
        if format is not None and format.type in ("regex", "grammar"):  # which the whole text keeps to
            family, is_begun = Family(family.format, None), False
        tools = self._callable(body)
        return Replies(
            family=family,
            tools=tools,
            choice="auto" if not tools or body.tool_choice in (None, "auto") else "required",
            is_strict=any(tool.function.strict for tool in body.tools or ()),
            several=body.parallel_tool_calls is not False and not isinstance(body.tool_choice, NamedChoice),
            begun=is_begun,
        )

    def _callable(self, body: ChatBody) -> Mapping[str, Mapping[str, Any]]:
        """The schemas of the functions that may be called, by their names; raises ApiError."""
        choice, format = body.tool_choice, body.response_format
        if not body.tools or choice == "none":
            if choice not in (None, "none", "auto"):
                raise bad("tool_choice", "tool_choice: there are no tools to choose from")
            return {}
        if self.family.format is None:
            message = f"tools: the chat template of {self.names[0]!r} has no calls in a form that is known: "
            raise bad("tools", message + ", ".join(NAMES))
        if format is not None and format.type in ("regex", "grammar"):
            raise bad("response_format", f'response_format of type "{format.type}" does not go with tools')
        schemas = {tool.function.name: tool.function.parameters or {} for tool in body.tools}
        if len(schemas) < len(body.tools):
            raise bad("tools", "tools: two have the same name")
        if not isinstance(choice, NamedChoice):
            return schemas
        name = choice.function.name
        if name not in schemas:
            raise bad("tool_choice", f"tool_choice: there is no tool {name!r}")
        return {name: schemas[name]}

    def chat_ids(self, text: str, body: ChatBody | TokenizeBody) -> list[int]:
        """The prompt of a conversation's text; raises ApiError."""
        self.check_length(text, "messages")
        ids = self.tokens.encode(text, bool(body.add_special_tokens))
        if not ids:
            raise bad("messages", "messages: the prompt is empty")
        return ids

    def room(self, body: Sampling, num_prompt: int, max_tokens: int | None) -> int:
        """Most output tokens of a request; `max_tokens` None: the default, or all that fit. Raises ApiError."""
        most = self.most(num_prompt)
        wanted = min(most, self._defaults.get("max_new_tokens", most)) if max_tokens is None else max_tokens
        if wanted > most:
            total = num_prompt + wanted
            message = f"the prompt's {num_prompt} tokens and max_tokens {wanted} are {total} tokens; the model's limit"
            raise bad("max_tokens", f"{message} is {self.facts.max_length}", ErrorCode.TOO_LONG)
        if body.min_tokens > wanted:
            raise bad("min_tokens", f"min_tokens {body.min_tokens} is above max_tokens {wanted}")
        return wanted

    def params(self, body: Sampling, room: int, **more: Any) -> SamplingParams:
        """The SamplingParams of a body, for `room` tokens of output. Raises ApiError."""
        values: dict[str, Any] = {
            **self._defaults,
            **{name: value for name in _SAMPLED if (value := getattr(body, name)) is not None},
            "max_new_tokens": room,
            "stop": (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
            "stop_token_ids": tuple(dict.fromkeys([*(body.stop_token_ids or ()), *more.pop("stop_token_ids", ())])),
            "ignore_eos": body.ignore_eos,
            "min_new_tokens": body.min_tokens,
            "seed": body.seed if body.seed is not None else fresh_seed(),
            "logit_bias": self._bias(body.logit_bias or {}),
            "skip_special_tokens": body.skip_special_tokens is not False,
            **more,
        }
        if body.n_predict != 0:  # else nothing of the text is shown
            for kind in _NEUTRAL.keys() - samplers_of(body.samplers):
                values |= _NEUTRAL[kind]
        values["top_k"] = max(0, values.get("top_k", 0))
        self.check_ids(values["stop_token_ids"], "stop_token_ids")
        return sampling(values)

    def delivered(self, body: Sampling, params: SamplingParams) -> Sequence[int]:
        """The delivered output ids that `body` continues; raises ApiError if that is impossible."""
        name, ids = "delivered_token_ids", body.delivered_token_ids or []
        if not ids:
            return ids
        for field in ("n", "best_of"):
            if (getattr(body, field, None) or 1) > 1:
                raise bad(name, f"{name} goes with one text: {field} must be 1")
        if getattr(body, "echo", None):
            raise bad(name, f"{name} does not go with echo")
        if body.seed is None and params.temperature > 0:
            raise bad(name, f"{name} needs the seed that the text was begun with, or temperature 0")
        self.check_ids(ids, name)
        if len(ids) > params.max_new_tokens:
            raise bad(name, f"{name}: {len(ids)} ids are more than max_tokens {params.max_new_tokens}")
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.facts.eos_token_ids)}
        if ended := ends.intersection(ids[:-1]):
            raise bad(name, f"{name}: {min(ended)} ends the text, and others follow")
        return ids

    def prediction(self, body: Sampling, prompt: str) -> list[int]:
        """The ids that the output may follow: those of `body`, or of the window that the prompt asks to rewrite."""
        text = body.prediction.text if body.prediction is not None else window_of(prompt)
        longest = self.facts.max_length
        return self.tokens.encode(self.tokens.head(text, longest), False)[:longest] if text else []

    def most(self, num_prompt: int) -> int:
        """Most output tokens after a prompt; raises ApiError if there is no room."""
        most = self.facts.max_length - num_prompt
        if most < 1:
            raise too_long(f"{num_prompt} tokens", self.facts.max_length)
        return most

    def _bias(self, bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
        for name in bias:
            if not name.isdecimal() or len(name) > _DIGITS or int(name) >= self.facts.vocab_size:
                raise bad("logit_bias", f"logit_bias: {name[:40]!r} is no token id of this model")
        return tuple(sorted((int(name), value) for name, value in bias.items()))


def sampling(values: dict[str, Any]) -> SamplingParams:
    """SamplingParams from individually validated values; raises ApiError for an invalid combination."""
    try:
        return SamplingParams(**values)
    except InputError as failure:
        raise bad(str(failure).split("=")[0], str(failure)) from failure


def spread(wanted: Submit, count: int) -> list[Submit]:
    """`count` texts of one prompt, with consecutive seeds."""
    params = wanted.params
    seeds = [params.seed, *((params.seed + index) % 2**64 for index in range(1, count))]
    return [msgspec.structs.replace(wanted, params=params.vary(seed=seed)) for seed in seeds]


def samplers_of(given: Sequence[str] | None) -> set[str]:
    """The samplers that llama.cpp's `samplers` name; raises ApiError for those that are not known."""
    used = set(_NEUTRAL if given is None else given)
    for name in used - _NEUTRAL.keys() - _UNUSED:
        known = ", ".join(sorted(_NEUTRAL.keys() | _UNUSED))
        raise bad("samplers", f"samplers: {name!r} is not supported; {known} are")
    return used


def fresh_seed() -> int:
    return secrets.randbits(32)


def _is_open(thoughts: Thoughts, prompt: str, body: ChatBody) -> bool:
    """True if the reply goes on in a thought that the template or the client has begun."""
    begun = text_of(body.messages[-1].plain()["content"]) if body.continue_final_message else ""
    if any(mark in begun for mark in thoughts):
        return begun.rfind(thoughts[0]) > begun.rfind(thoughts[1])
    return prompt.removesuffix(begun).rstrip().endswith(thoughts[0])
