"""`POST /v1/completions`, and what DeepSeek and Mistral call it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from lpr.serve.chat import answer_as_chat
from lpr.serve.context import Context, context_of
from lpr.serve.errors import ApiError, bad
from lpr.serve.generation import (
    KEEP_ALIVE,
    Choice,
    DisconnectedError,
    Event,
    Generation,
    Wanted,
    decoding_of,
    failure_of,
    usage_of,
)
from lpr.serve.grammar import grammar_of
from lpr.serve.logprobs import for_completion
from lpr.serve.protocol import CompletionBody, FimBody, Prompt
from lpr.serve.served import Served, spread
from lpr.serve.sse import COMMENT, DONE, EventStream, error_event, event

router = APIRouter()


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

    @property
    def num_prompt(self) -> int:
        return sum(map(len, self.prompts))

    def head(self) -> dict[str, Any]:
        """The fields that every event and answer begins with."""
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.served.fingerprint,
        }

    def echo(self, choice: Choice) -> str:
        """What comes before a choice's text."""
        return self.echoes[choice.index // self.per_prompt]

    def prompt_of(self, choice: Choice) -> list[int]:
        """The prompt of a choice."""
        return self.prompts[choice.index // self.per_prompt]


@router.post("/v1/completions", summary="Continue a prompt, or fill in the middle")
@router.post("/completions", include_in_schema=False)
@router.post("/beta/completions", summary="The same, under DeepSeek's path")
async def complete(body: CompletionBody, request: Request) -> Response:
    """Continue `prompt`; with `suffix`, write what belongs between the two."""
    context = context_of(request)
    served = context.ready()
    return await _answer(_plan(served, body, context.name(request, "cmpl", body.request_id)), context, request)


@router.post("/v1/fim/completions", summary="Fill in the middle, as Mistral's API")
async def fill(body: FimBody, request: Request) -> Response:
    """Write what belongs between `prompt` and `suffix`; the answer is shaped like a chat's."""
    context = context_of(request)
    served = context.ready()
    filler = served.need_filler("suffix")
    ids = filler.prompt(body.prompt, body.suffix or "")
    values: dict[str, Any] = {"temperature": 0.0 if body.temperature is None else body.temperature}
    plain = CompletionBody(
        prompt=body.prompt, model=body.model, top_p=body.top_p, stop=body.stop, seed=body.random_seed,
        min_tokens=body.min_tokens or 0, stream=body.stream, **values,
    )  # fmt: skip
    params = served.params(plain, len(ids), body.max_tokens or 512, stop_token_ids=filler.end_ids)
    wanted = [Wanted(prompt_ids=ids, params=params)]
    return await answer_as_chat(context, request, served, plain, wanted, "fim")


def _plan(served: Served, body: CompletionBody, request_id: str) -> _Plan:
    """Check a body against the model; raises ApiError."""
    model = served.check_model(body.model)
    best_of = body.best_of if body.best_of is not None else body.n or 1
    if best_of < (body.n or 1):
        raise bad("best_of", f"best_of {best_of} is below n {body.n}")
    if best_of > (body.n or 1) and body.stream:
        raise bad("best_of", "best_of above n cannot be streamed: the best is known at the end only")
    if body.echo and body.logprobs is not None:
        raise bad("echo", "echo with logprobs is not supported: log-probabilities of a prompt are not kept")
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
    return _Plan(served, body, request_id, model, int(time.time()), prompts, echoes, wanted, best_of)


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


async def _answer(plan: _Plan, context: Context, request: Request) -> Response:
    body = plan.body
    generation = Generation(
        context.service,
        plan.wanted,
        request.receive,
        timeout=context.request_timeout,
        priority=body.priority,
        tenant=context.tenant(request),
        details=bool(body.return_sources),
    )
    if body.stream:
        return EventStream(_events(plan, context, generation, request), context.request_timeout, generation.cancel)
    async with context.running(request, plan.id, generation):
        try:
            await generation.finish()
        except DisconnectedError:
            return Response(status_code=499)
    return JSONResponse(_whole(plan, generation.choices))


def _whole(plan: _Plan, choices: Sequence[Choice]) -> dict[str, Any]:
    body = plan.body
    shown: list[dict[str, Any]] = []
    for first in range(0, len(choices), plan.per_prompt):
        best = list(choices[first : first + plan.per_prompt])
        if plan.per_prompt > (body.n or 1):
            best = sorted(best, key=_mean_logprob, reverse=True)[: body.n or 1]
        shown += [_choice(plan, choice, len(shown) + at) for at, choice in enumerate(best)]
    if not choices:  # echo alone
        shown = [
            {"index": at, "text": text, "logprobs": None, "finish_reason": "length"}
            for at, text in enumerate(plan.echoes)
        ]
    answer = {**plan.head(), "choices": shown, "usage": usage_of(choices, plan.num_prompt)}
    if body.return_sources:
        answer["lpr"] = decoding_of(choices)
    return answer


def _mean_logprob(choice: Choice) -> float:
    return sum(each.logprob for each in choice.logprobs) / max(1, len(choice.logprobs))


def _choice(plan: _Plan, choice: Choice, index: int) -> dict[str, Any]:
    body, echo = plan.body, plan.echo(choice)
    logprobs = None
    if body.logprobs is not None:
        logprobs = for_completion(plan.served.tokens, choice.token_ids, choice.logprobs, len(echo))
    shown: dict[str, Any] = {
        "index": index,
        "text": echo + choice.text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
    }
    if body.return_token_ids:
        shown |= {"token_ids": choice.token_ids, "prompt_token_ids": plan.prompt_of(choice)}
    if body.return_sources:
        shown["sources"] = choice.sources
    return shown


async def _events(
    plan: _Plan, context: Context, generation: Generation, request: Request
) -> AsyncGenerator[bytes, None]:
    """The stream of an answer: one event per step and choice."""
    options = plan.body.stream_options
    try:
        async with context.running(request, plan.id, generation):
            offsets = [len(plan.echo(choice)) for choice in generation.choices]
            if not generation.choices:
                for at, text in enumerate(plan.echoes):
                    shown = {"index": at, "text": text, "logprobs": None, "finish_reason": "length"}
                    yield event({**plan.head(), "choices": [shown]})
            async for each in generation.events(KEEP_ALIVE):
                if each is None:
                    yield COMMENT
                    continue
                if each.choice.error is not None:
                    raise failure_of(each.choice.error)
                data = {**plan.head(), "choices": [_delta(plan, each, offsets)]}
                if options is not None and options.include_usage:
                    continuous = options.continuous_usage_stats
                    data["usage"] = usage_of(generation.choices, plan.num_prompt) if continuous else None
                yield event(data)
            if options is not None and options.include_usage:
                usage = usage_of(generation.choices, plan.num_prompt)
                last = {**plan.head(), "choices": [], "usage": usage}
                if plan.body.return_sources:
                    last["lpr"] = decoding_of(generation.choices)
                yield event(last)
    except ApiError as failure:
        yield error_event(failure)
    except DisconnectedError:
        return
    yield DONE


def _delta(plan: _Plan, each: Event, offsets: list[int]) -> dict[str, Any]:
    choice, chunk = each.choice, each.chunk
    begins = choice.num_steps <= 1 and len(choice.token_ids) == len(chunk.token_ids)
    text = (plan.echo(choice) if begins else "") + each.text
    logprobs = None
    if plan.body.logprobs is not None:
        logprobs = for_completion(plan.served.tokens, chunk.token_ids, chunk.logprobs or [], offsets[choice.index])
        offsets[choice.index] += sum(map(len, logprobs["tokens"]))
    shown: dict[str, Any] = {
        "index": choice.index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
    }
    if plan.body.return_token_ids:
        shown["token_ids"] = chunk.token_ids
        if begins:
            shown["prompt_token_ids"] = plan.prompt_of(choice)
    if plan.body.return_sources:
        shown["sources"] = chunk.sources or []
    return shown
