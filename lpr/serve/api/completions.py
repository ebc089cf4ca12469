"""`POST /v1/completions`, and what DeepSeek and Mistral call it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fastapi import APIRouter, Request, Response

from lpr.config import SamplingParams
from lpr.serve.api.answers import answer
from lpr.serve.api.chat import answer_as_chat
from lpr.serve.api.context import aside, context_of, note_prefix
from lpr.serve.bodies import CompletionBody, FimBody, Prompt, StreamOptions
from lpr.serve.errors import bad
from lpr.serve.generation import Choice, Event, Generation, Wanted, decoding_of, usage_of
from lpr.serve.text.grammar import grammar_of
from lpr.serve.text.logprobs import for_completion, for_prompt, joined
from lpr.serve.text.served import Served, spread

router = APIRouter()

MOST_IN_HOLE = 512
"""Tokens of a middle where `max_tokens` is left out, if they fit."""


@router.post("/v1/completions", summary="Continue a prompt, or fill in the middle")
@router.post("/completions", include_in_schema=False)
@router.post("/beta/completions", summary="The same, under DeepSeek's path")
async def complete(body: CompletionBody, request: Request) -> Response:
    """Continue `prompt`; with `suffix`, write what belongs between the two."""
    context = context_of(request)
    request.state.user = body.user
    await note_prefix(request)
    served = context.ready()
    plan = await aside(request, _plan, served, body)
    plan.id = context.name(request, "cmpl", body.request_id)
    # Scored first, the prompts' log-probabilities can go before everything else, and their K/V is cached as well.
    scored = [_scored(ids, body.logprobs or 0) for ids in plan.prompts if plan.shows_scores and len(ids) > 1]
    generation = Generation(
        context.service,
        plan.wanted,
        request.receive,
        timeout=context.request_timeout,
        priority=body.priority,
        tenant=context.tenant(request),
        details=bool(body.return_sources),
        scored=scored,
    )
    plan.scored = generation.scored
    return await answer(context, request, plan.id, generation, plan, body.stream)


@router.post("/v1/fim/completions", summary="Fill in the middle, as Mistral's API")
async def fill(body: FimBody, request: Request) -> Response:
    """Write what belongs between `prompt` and `suffix`; the answer is shaped like a chat's."""
    context = context_of(request)
    await note_prefix(request)
    served = context.ready()
    filler = served.need_filler("suffix")
    ids = await aside(request, filler.prompt, body.prompt, body.suffix or "")
    values: dict[str, Any] = {"temperature": 0.0 if body.temperature is None else body.temperature}
    plain = CompletionBody(
        prompt=body.prompt, model=body.model, top_p=body.top_p, stop=body.stop, seed=body.random_seed,
        min_tokens=body.min_tokens or 0, stream=body.stream, **values,
    )  # fmt: skip
    most = body.max_tokens if body.max_tokens is not None else min(MOST_IN_HOLE, served.most(len(ids)))
    params = served.params(plain, len(ids), most, stop_token_ids=filler.end_ids)
    wanted = [Wanted(prompt_ids=ids, params=params)]
    return await answer_as_chat(context, request, served, plain, wanted, "fim")


def _plan(served: Served, body: CompletionBody) -> _Plan:
    """Check a body against the model; raises ApiError."""
    model = served.check_model(body.model)
    best_of = body.best_of if body.best_of is not None else body.n or 1
    if best_of < (body.n or 1):
        raise bad("best_of", f"best_of {best_of} is below n {body.n}")
    if best_of > (body.n or 1) and body.stream:
        raise bad("best_of", "best_of above n cannot be streamed: the best is known at the end only")
    if body.echo and body.suffix:
        raise bad("echo", "echo does not go with suffix")
    if body.max_tokens == 0 and not body.echo:
        raise bad("max_tokens", "max_tokens must be at least 1, unless echo asks for the prompt alone")
    prompts = _prompts(served, body)
    echoes = [""] * len(prompts)
    if body.echo:
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        given = [text for text in texts if isinstance(text, str)]
        echoes = given or [served.tokens.decode(ids, skip_special_tokens=True) for ids in prompts]
    wanted: list[Wanted] = []
    for ids in prompts if body.max_tokens != 0 else ():
        more: dict[str, Any] = {"stop_token_ids": served.need_filler("suffix").end_ids} if body.suffix else {}
        if body.logprobs is not None or best_of > (body.n or 1):
            more["logprobs"] = body.logprobs or 0
        if (grammar := grammar_of(body.response_format)) is not None:
            more["grammar"] = grammar
        params = served.params(body, len(ids), body.max_tokens, **more)
        wanted += spread(params, ids, best_of)
    return _Plan(served, body, "", model, int(time.time()), prompts, echoes, wanted, best_of)


def _scored(ids: list[int], logprobs: int) -> Wanted:
    """A request whose output is forced to be a prompt from its second token on: what the model says of each."""
    params = SamplingParams(max_new_tokens=len(ids) - 1, forced_ids=tuple(ids[1:]), logprobs=logprobs, ignore_eos=True)
    return Wanted(prompt_ids=ids[:1], params=params)


def _prompts(served: Served, body: CompletionBody) -> list[list[int]]:
    prompts: list[str | list[int]] = _listed(body.prompt)
    found = []
    for prompt in prompts:
        if body.suffix:
            if not isinstance(prompt, str):
                raise bad("suffix", "suffix goes with a prompt of text, not of token ids")
            ids = served.need_filler("suffix").prompt(prompt, body.suffix)
        elif isinstance(prompt, str):
            add = True if body.add_special_tokens is None else body.add_special_tokens
            ids = served.tokens.encode(prompt, add)
        else:
            ids = prompt
        if not ids:
            raise bad("prompt", "prompt: it is empty, and a model needs at least one token to continue")
        served.check_ids(ids, "prompt")
        found.append(ids)
    return found


def _listed(prompt: Prompt) -> list[Any]:
    """The prompts of a body, one by one."""
    if isinstance(prompt, str):
        return [prompt]
    return [prompt] if isinstance(prompt[0], int) else list(prompt)


@dataclass
class _Plan:
    """A checked request: what to generate, and what its answer is made of."""

    served: Served
    body: CompletionBody
    id: str
    model: str
    created: int
    prompts: list[list[int]]
    echoes: list[str]
    """What `echo` puts before the texts of each prompt."""
    wanted: list[Wanted]
    per_prompt: int
    """Texts that are generated per prompt (best_of)."""
    scored: Sequence[Choice] = ()
    """The prompts of more than one token as known texts, where `echo` shows their log-probabilities."""
    ends_with_done: bool = True
    _offsets: dict[int, int] = field(default_factory=dict)
    """Per choice, the characters that a stream has shown log-probabilities of."""

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        body = self.body
        shown: list[dict[str, Any]] = []
        for first in range(0, len(choices), self.per_prompt):
            best = list(choices[first : first + self.per_prompt])
            if self.per_prompt > (body.n or 1):
                best = sorted(best, key=_mean_logprob, reverse=True)[: body.n or 1]
            shown += [self._choice(choice, len(shown) + at) for at, choice in enumerate(best)]
        answer = {**self._head(), "choices": shown or self._echoed(), "usage": self._usage(choices)}
        if body.return_sources:
            answer["lpr"] = decoding_of(choices)
        return answer

    def begin(self, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        return iter(())

    def step(self, each: Event, choices: Sequence[Choice]) -> dict[str, Any]:
        data = {**self._head(), "choices": [self._delta(each)]}
        if self._options.include_usage:
            data["usage"] = self._usage(choices) if self._options.continuous_usage_stats else None
        return data

    def end(self, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        if not choices:
            for shown in self._echoed():
                yield {**self._head(), "choices": [shown]}
        if self._options.include_usage:
            last = {**self._head(), "choices": [], "usage": self._usage(choices)}
            if self.body.return_sources:
                last["lpr"] = decoding_of(choices)
            yield last

    @property
    def shows_scores(self) -> bool:
        """Are the prompts' log-probabilities part of the answer?"""
        return bool(self.body.echo) and self.body.logprobs is not None

    @cached_property
    def _scores(self) -> list[dict[str, list[Any]]] | None:
        """The log-probabilities of each prompt, where they are shown: as far as they came, once scoring has ended."""
        if not self.shows_scores:
            return None
        found = iter(self.scored)
        return [
            for_prompt(self.served.tokens, ids, next(found).logprobs if len(ids) > 1 else []) for ids in self.prompts
        ]

    @property
    def _options(self) -> StreamOptions:
        return self.body.stream_options or StreamOptions()

    def _head(self) -> dict[str, Any]:
        """The fields that every event and answer begins with."""
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.served.fingerprint,
        }

    def _usage(self, choices: Sequence[Choice]) -> dict[str, object]:
        return usage_of(choices, sum(map(len, self.prompts)))

    def _echoed(self) -> list[dict[str, Any]]:
        """The choices where nothing is generated: the prompts, if they are to be echoed."""
        finish = "abort" if any(each.finish_reason == "abort" for each in self.scored) else "length"
        scores: Sequence[dict[str, list[Any]] | None] = self._scores or (None,) * len(self.echoes)
        return [
            {"index": at, "text": text, "logprobs": logprobs, "finish_reason": finish, "stop_reason": None}
            for at, (text, logprobs) in enumerate(zip(self.echoes, scores, strict=True))
        ]

    def _choice(self, choice: Choice, index: int) -> dict[str, Any]:
        echo = self.echoes[choice.index // self.per_prompt]
        logprobs = None
        if self.body.logprobs is not None:
            logprobs = for_completion(self.served.tokens, choice.token_ids, choice.logprobs, len(echo))
            logprobs = self._after_prompt(choice, logprobs)
        shown: dict[str, Any] = {
            "index": index,
            "text": echo + choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.body.return_token_ids:
            shown |= {"token_ids": choice.token_ids, "prompt_token_ids": choice.job.prompt_ids}
        if self.body.return_sources:
            shown["sources"] = choice.sources
        return shown

    def _after_prompt(self, choice: Choice, logprobs: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """A text's log-probabilities behind those of its prompt, where they are shown."""
        return joined(self._scores[choice.index // self.per_prompt], logprobs) if self._scores else logprobs

    def _delta(self, each: Event) -> dict[str, Any]:
        choice, chunk = each.choice, each.chunk
        begins = choice.num_steps <= 1 and len(choice.token_ids) == len(chunk.token_ids)
        echo = self.echoes[choice.index // self.per_prompt]
        logprobs = None
        if self.body.logprobs is not None:
            offset = self._offsets.get(choice.index, len(echo))
            logprobs = for_completion(self.served.tokens, chunk.token_ids, chunk.logprobs or [], offset)
            self._offsets[choice.index] = offset + sum(map(len, logprobs["tokens"]))
            logprobs = self._after_prompt(choice, logprobs) if begins else logprobs
        shown: dict[str, Any] = {
            "index": choice.index,
            "text": (echo if begins else "") + each.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.body.return_token_ids:
            shown["token_ids"] = chunk.token_ids
            if begins:
                shown["prompt_token_ids"] = choice.job.prompt_ids
        if self.body.return_sources:
            shown["sources"] = chunk.sources or []
        return shown


def _mean_logprob(choice: Choice) -> float:
    return sum(each.logprob for each in choice.logprobs) / max(1, len(choice.logprobs))
