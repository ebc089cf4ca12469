"""The served model: its facts, tokenizer and templates, and the SamplingParams of a body."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from lpr.config import InputError, SamplingParams
from lpr.protocol import ErrorCode
from lpr.serve.bodies import Message, Sampling
from lpr.serve.errors import ApiError, bad
from lpr.serve.generation import Wanted
from lpr.serve.messages import Facts
from lpr.serve.text.chat_template import RESERVED, ChatTemplates, TemplateError
from lpr.serve.text.fim import Filler, filler
from lpr.serve.text.tokens import Tokens

_KNOWN = frozenset(field.name for field in fields(SamplingParams))


class Served:
    """A loaded model, as the front sees it."""

    def __init__(self, facts: Facts, names: Sequence[str], fim: str = "auto", chat_template: str | None = None) -> None:
        """Read the tokenizer and compile the templates; raises InputError if `fim` or a template cannot work."""
        self.facts = facts
        self.names = tuple(names)
        self.created = int(time.time())
        self.tokens = Tokens(facts.tokenizer)
        self.filler: Filler | None = filler(self.tokens, fim) if fim != "none" else None
        if self.filler is None and fim not in ("auto", "none"):
            raise InputError(f"--fim {fim}: the tokenizer of {facts.model!r} lacks this family's tokens")
        templates = {"default": chat_template} if chat_template is not None else facts.chat_templates
        try:
            self.templates = ChatTemplates(templates, facts.special_tokens)
        except TemplateError as failure:
            raise InputError(str(failure)) from failure

    @property
    def fingerprint(self) -> str:
        """OpenAI's system_fingerprint: the settings that decide a text's last bits."""
        facts = self.facts
        return f"lpr-{facts.dtype}-lp{facts.lp}-tp{facts.tp}"

    def check_model(self, name: str | None) -> str:
        """The name to answer with; raises ApiError for a model that is not served."""
        if name is None or name == "":
            return self.names[0]
        if name not in self.names:
            served = ", ".join(self.names)
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

    def chat_ids(self, messages: Sequence[Message], body: Any) -> list[int]:
        """The prompt of a conversation; raises ApiError if the model's template refuses it."""
        if not self.templates:
            message = "messages: the model has no chat template; use /v1/completions"
            raise bad("messages", message, ErrorCode.NO_CHAT_TEMPLATE)
        plain = [_plain(message) for message in messages]
        final = plain[-1].get("content") or "" if body.continue_final_message else None
        more = {"add_generation_prompt": body.add_generation_prompt, **_template_kwargs(body)}
        if final is not None:
            more["add_generation_prompt"] = False
        try:
            text = self.templates.render(plain, **more)
        except TemplateError as failure:
            raise bad("messages", f"messages: the model's chat template refuses this: {failure}") from failure
        if final is not None:
            end = text.rfind(final.strip())
            if not final.strip() or end < 0:
                raise bad("continue_final_message", "continue_final_message: the last message has no text to continue")
            text = text[: end + len(final.strip())]
        ids = self.tokens.encode(text, bool(body.add_special_tokens))
        if not ids:
            raise bad("messages", "messages: the prompt is empty")
        return ids

    def params(self, body: Sampling, num_prompt: int, max_tokens: int | None, **more: Any) -> SamplingParams:
        """The SamplingParams of a body, for a prompt of `num_prompt` tokens. `max_tokens` None means all that fit.

        Raises ApiError that names the field.
        """
        most = self.most(num_prompt)
        wanted = most if max_tokens is None else max_tokens
        if wanted > most:
            total = num_prompt + wanted
            message = f"the prompt's {num_prompt} tokens and max_tokens {wanted} are {total} tokens; the model's limit"
            raise bad("max_tokens", f"{message} is {self.facts.max_length}", ErrorCode.TOO_LONG)
        if body.min_tokens > wanted:
            raise bad("min_tokens", f"min_tokens {body.min_tokens} is above max_tokens {wanted}")
        temperature = 1.0 if body.temperature is None else body.temperature
        values: dict[str, Any] = {
            "max_new_tokens": wanted,
            "temperature": temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "top_k": max(0, body.top_k or 0),
            "min_p": body.min_p or 0.0,
            "stop": strings(body.stop),
            "stop_token_ids": tuple(dict.fromkeys([*(body.stop_token_ids or ()), *more.pop("stop_token_ids", ())])),
            "ignore_eos": body.ignore_eos,
            "min_new_tokens": body.min_tokens,
            "seed": body.seed if body.seed is not None else fresh_seed(),
            **more,
        }
        if body.repetition_penalty is not None:
            values["repetition_penalty"] = body.repetition_penalty
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(body, name):
                values[name] = getattr(body, name)
        if body.logit_bias:
            values["logit_bias"] = self._bias(body.logit_bias)
        self.check_ids(values["stop_token_ids"], "stop_token_ids")
        return sampling(values)

    def most(self, num_prompt: int) -> int:
        """Most output tokens after a prompt; raises ApiError if there is no room."""
        most = self.facts.max_length - num_prompt
        if most < 1:
            message = f"the prompt's {num_prompt} tokens leave no room; the model's limit is {self.facts.max_length}"
            raise bad("prompt", message, ErrorCode.TOO_LONG)
        return most

    def _bias(self, bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
        pairs = []
        for name, value in bias.items():
            if not name.isdecimal() or int(name) >= self.facts.vocab_size:
                raise bad("logit_bias", f"logit_bias: {name!r} is no token id of this model")
            pairs.append((int(name), value))
        return tuple(sorted(pairs))


def sampling(values: dict[str, Any]) -> SamplingParams:
    """SamplingParams of values that were checked one by one; raises ApiError for a bad combination."""
    for name in values:
        if name not in _KNOWN:  # a later engine may know it
            message = f"{name}: this version of the engine does not support it"
            raise bad(name, message, ErrorCode.UNSUPPORTED_PARAMETER)
    try:
        return SamplingParams(**values)
    except InputError as failure:
        name = str(failure).split("=")[0]
        raise bad(name, str(failure)) from failure


def spread(params: SamplingParams, prompt_ids: list[int], count: int) -> list[Wanted]:
    """`count` texts of one prompt, with consecutive seeds."""
    seeds = [params.seed, *((params.seed + index) % 2**64 for index in range(1, count))]
    return [Wanted(prompt_ids=prompt_ids, params=replace(params, seed=seed)) for seed in seeds]


def strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def fresh_seed() -> int:
    """A seed for a request that names none."""
    return secrets.randbits(32)


def _template_kwargs(body: Any) -> dict[str, Any]:
    """A body's variables for the template; raises ApiError for reserved names."""
    given: dict[str, Any] = getattr(body, "chat_template_kwargs", None) or {}
    for name in RESERVED & set(given):
        raise bad("chat_template_kwargs", f"chat_template_kwargs: {name!r} is not free to be set")
    return given


def _plain(message: Message) -> dict[str, Any]:
    """A message as chat templates know it."""
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    plain = message.model_dump(exclude_none=True, exclude={"content"})
    return {**plain, "content": content if content is not None else ""}
