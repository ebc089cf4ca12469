"""`POST /v1/chat/completions`: conversations, through the model's own template."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from lpr.serve.context import Context, context_of
from lpr.serve.errors import ApiError
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
from lpr.serve.logprobs import for_chat
from lpr.serve.protocol import ChatBody, Sampling, StreamOptions
from lpr.serve.served import Served, spread
from lpr.serve.sse import COMMENT, DONE, EventStream, error_event, event

router = APIRouter()


@dataclass(frozen=True)
class _Shape:
    """How an answer is to look."""

    served: Served
    head: dict[str, Any]
    num_prompt: int
    num_top: int | None
    """Alternatives per token; None: no log-probabilities."""
    token_ids: bool
    sources: bool
    options: StreamOptions | None
    silent: bool = False
    """Was only the cache to be filled?"""
    fields: tuple[str, ...] | None = None


@router.post("/v1/chat/completions", summary="Answer a conversation")
@router.post("/chat/completions", include_in_schema=False)
async def chat(body: ChatBody, request: Request) -> Response:
    """Write the next message of a conversation."""
    context = context_of(request)
    served = context.ready()
    ids = served.chat_ids(body.messages, body)
    more: dict[str, Any] = {}
    if body.logprobs:
        more["logprobs"] = body.top_logprobs or 0
    if (grammar := grammar_of(body.response_format)) is not None:
        more["grammar"] = grammar
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if body.n_predict is not None and body.n_predict >= 0:
        most = max(1, body.n_predict)
    params = served.params(body, len(ids), most, **more)
    wanted = spread(params, ids, body.n or 1)
    return await answer_as_chat(context, request, served, body, wanted, "chatcmpl")


async def answer_as_chat(
    context: Context, request: Request, served: Served, body: Sampling, wanted: list[Wanted], kind: str
) -> Response:
    """Generate what is wanted and answer in the shape of a chat."""
    shape = _shape(served, body, len(wanted[0].prompt_ids), context.name(request, kind, body.request_id))
    generation = Generation(
        context.service,
        wanted,
        request.receive,
        timeout=context.request_timeout,
        priority=body.priority,
        tenant=context.tenant(request),
        details=bool(body.return_sources),
    )
    if body.stream:
        events = _events(shape, context, generation, request)
        return EventStream(events, context.request_timeout, generation.cancel)
    async with context.running(request, shape.head["id"], generation):
        try:
            await generation.finish()
        except DisconnectedError:
            return Response(status_code=499)
    return JSONResponse(_whole(shape, generation.choices))


def _shape(served: Served, body: Sampling, num_prompt: int, request_id: str) -> _Shape:
    head = {
        "id": request_id,
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": int(time.time()),
        "model": served.check_model(body.model),
        "system_fingerprint": served.fingerprint,
    }
    num_top, silent, fields = None, False, None
    if isinstance(body, ChatBody):
        num_top = (body.top_logprobs or 0) if body.logprobs else None
        silent = body.n_predict == 0
        fields = tuple(body.response_fields) if body.response_fields is not None else None
    return _Shape(
        served, head, num_prompt, num_top, bool(body.return_token_ids), bool(body.return_sources),
        body.stream_options, silent, fields,
    )  # fmt: skip


def _whole(shape: _Shape, choices: Sequence[Choice]) -> dict[str, Any]:
    shown = []
    for choice in choices:
        content = "" if shape.silent else choice.text
        one: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": "assistant", "content": content, "refusal": None},
            "logprobs": _logprobs(shape, choice.token_ids, choice),
            "finish_reason": choice.finish_reason,
        }
        if shape.token_ids:
            one["token_ids"] = choice.token_ids
        if shape.sources:
            one["sources"] = choice.sources
        shown.append(one)
    answer = {**shape.head, "choices": shown, "usage": usage_of(choices, shape.num_prompt)}
    if shape.token_ids:
        answer["prompt_token_ids"] = choices[0].job.prompt_ids
    if shape.sources:
        answer["lpr"] = decoding_of(choices)
    if shape.fields is not None:
        answer = {name: answer[name] for name in shape.fields if name in answer}
    return answer


def _logprobs(shape: _Shape, ids: Sequence[int], choice: Any) -> dict[str, Any] | None:
    if shape.num_top is None:
        return None
    return for_chat(shape.served.tokens, ids, choice.logprobs or [], shape.num_top)


async def _events(
    shape: _Shape, context: Context, generation: Generation, request: Request
) -> AsyncGenerator[bytes, None]:
    """The stream of an answer: who speaks, then one event per step and choice."""
    options = shape.options
    usage = options is not None and options.include_usage
    try:
        async with context.running(request, shape.head["id"], generation):
            for choice in generation.choices:
                yield event(_delta(shape, choice.index, {"role": "assistant", "content": ""}, usage))
            async for each in generation.events(KEEP_ALIVE):
                if each is None:
                    yield COMMENT
                    continue
                if each.choice.error is not None:
                    raise failure_of(each.choice.error)
                data = _step(shape, each, usage)
                if usage and options is not None and options.continuous_usage_stats:
                    data["usage"] = usage_of(generation.choices, shape.num_prompt)
                yield event(data)
            if usage:
                last = {**shape.head, "choices": [], "usage": usage_of(generation.choices, shape.num_prompt)}
                if shape.sources:
                    last["lpr"] = decoding_of(generation.choices)
                yield event(last)
    except ApiError as failure:
        yield error_event(failure)
    except DisconnectedError:
        return
    yield DONE


def _step(shape: _Shape, each: Event, usage: bool) -> dict[str, Any]:
    choice, chunk = each.choice, each.chunk
    content = "" if shape.silent else each.text
    data = _delta(shape, choice.index, {"content": content}, usage)
    one = data["choices"][0]
    one["logprobs"] = _logprobs(shape, chunk.token_ids, chunk)
    one["finish_reason"] = choice.finish_reason
    if shape.token_ids:
        one["token_ids"] = chunk.token_ids
    if shape.sources:
        one["sources"] = chunk.sources or []
    return data


def _delta(shape: _Shape, index: int, delta: dict[str, Any], usage: bool) -> dict[str, Any]:
    one = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
    data = {**shape.head, "choices": [one]}
    if usage:
        data["usage"] = None
    return data
