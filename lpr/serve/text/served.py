"""The served model: its facts, tokenizer and templates, and the SamplingParams of a body."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lpr.config import InputError, SamplingParams
from lpr.protocol import ErrorCode
from lpr.serve.bodies import Message, ResponseFormat, Sampling
from lpr.serve.errors import ApiError, bad
from lpr.serve.jobs import Wanted
from lpr.serve.messages import Facts
from lpr.serve.text.chat_template import RESERVED, ChatTemplates, TemplateError
from lpr.serve.text.fim import Filler, filler
from lpr.serve.text.tokens import Tokens


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
        return f"lpr-{self.facts.dtype}-lp{self.facts.lp}-tp{self.facts.tp}"

    def check_model(self, name: str | None) -> str:
        """The name to answer with; raises ApiError for a model that is not served."""
        if not name or name == self.facts.model:  # as --model has it, which may be a path
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
        given: dict[str, Any] = getattr(body, "chat_template_kwargs", None) or {}
        for name in RESERVED & set(given):
            raise bad("chat_template_kwargs", f"chat_template_kwargs: {name!r} is not free to be set")
        more = {"add_generation_prompt": body.add_generation_prompt, **given}
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
        """The SamplingParams of a body after `num_prompt` tokens; `max_tokens` None: all that fit. Raises ApiError."""
        most = self.most(num_prompt)
        wanted = most if max_tokens is None else max_tokens
        if wanted > most:
            total = num_prompt + wanted
            message = f"the prompt's {num_prompt} tokens and max_tokens {wanted} are {total} tokens; the model's limit"
            raise bad("max_tokens", f"{message} is {self.facts.max_length}", ErrorCode.TOO_LONG)
        if body.min_tokens > wanted:
            raise bad("min_tokens", f"min_tokens {body.min_tokens} is above max_tokens {wanted}")
        values: dict[str, Any] = {
            "max_new_tokens": wanted,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "top_k": max(0, body.top_k or 0),
            "min_p": body.min_p or 0.0,
            "stop": (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
            "stop_token_ids": tuple(dict.fromkeys([*(body.stop_token_ids or ()), *more.pop("stop_token_ids", ())])),
            "ignore_eos": body.ignore_eos,
            "min_new_tokens": body.min_tokens,
            "seed": body.seed if body.seed is not None else fresh_seed(),
            "repetition_penalty": 1.0 if body.repetition_penalty is None else body.repetition_penalty,
            "presence_penalty": body.presence_penalty or 0.0,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "logit_bias": self._bias(body.logit_bias or {}),
            **more,
        }
        self.check_ids(values["stop_token_ids"], "stop_token_ids")
        return sampling(values)

    def delivered(self, body: Sampling, params: SamplingParams) -> Sequence[int]:
        """The output ids that `body` goes on after; raises ApiError if it cannot."""
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
    try:
        return SamplingParams(**values)
    except InputError as failure:
        raise bad(str(failure).split("=")[0], str(failure)) from failure


def spread(params: SamplingParams, prompt_ids: list[int], count: int, delivered: Sequence[int] = ()) -> list[Wanted]:
    """`count` texts of one prompt, with consecutive seeds, after the `delivered` output ids."""
    seeds = [params.seed, *((params.seed + index) % 2**64 for index in range(1, count))]
    params_of = [replace(params, seed=seed) for seed in seeds]
    return [Wanted(prompt_ids=prompt_ids, params=each, delivered=delivered) for each in params_of]


def fresh_seed() -> int:
    """A seed for a request that names none."""
    return secrets.randbits(32)


def _plain(message: Message) -> dict[str, Any]:
    """A message as chat templates know it."""
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    plain = message.model_dump(exclude_none=True, exclude={"content"})
    return {**plain, "content": content if content is not None else ""}


def grammar_of(wanted: ResponseFormat | None) -> str:
    """The grammar in llguidance's JSON form, or "" for plain text.

    Raises ApiError for one that cannot be read, and if llguidance is not installed.
    """
    if wanted is None or wanted.type == "text":
        return ""
    try:
        import llguidance
    except ImportError as failure:
        message = "response_format needs the package llguidance: pip install 'lpr[grammar]'"
        raise bad("response_format", message, ErrorCode.NOT_INSTALLED) from failure
    matcher = llguidance.LLMatcher
    fields = {"json_schema": "json_schema.schema", "regex": "regex", "grammar": "grammar"}
    param = "response_format." + fields.get(wanted.type, "type")
    try:
        if wanted.type == "json_object":
            grammar = matcher.grammar_from_json_schema({"type": "object"})
        elif wanted.type == "json_schema":
            schema = wanted.json_schema.schema_ if wanted.json_schema is not None else None
            grammar = matcher.grammar_from_json_schema(schema if schema is not None else {"type": "object"})
        elif wanted.type == "regex":
            grammar = matcher.grammar_from_regex(wanted.regex or "")
        else:
            lark = wanted.grammar or ""
            if "::=" in lark:  # llama.cpp's GBNF
                lark = str(llguidance.gbnf_to_lark.gbnf_to_lark(lark))
            grammar = json.dumps({"grammars": [{"lark_grammar": lark}]})
    except ValueError as failure:
        raise bad(param, f"{param}: {_line(failure)}") from failure
    if problem := matcher.validate_grammar(grammar):
        raise bad(param, f"{param}: {_line(problem)}")
    return str(grammar)


def _line(problem: object) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return (lines[0] if lines else "it cannot be read")[:300]
