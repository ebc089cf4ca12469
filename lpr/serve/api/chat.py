"""`POST /v1/chat/completions`: conversations, through the model's own template."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from lpr.serve.api.answers import answer
from lpr.serve.api.context import Context, aside, context_of, note_prefix
from lpr.serve.bodies import ChatBody, Sampling, StreamOptions
from lpr.serve.generation import Choice, Event, Generation, Wanted, decoding_of, usage_of
from lpr.serve.text.grammar import grammar_of
from lpr.serve.text.logprobs import for_chat
from lpr.serve.text.served import Served, spread

router = APIRouter()


@router.post("/v1/chat/completions", summary="Answer a conversation")
@router.post("/chat/completions", include_in_schema=False)
async def chat(body: ChatBody, request: Request) -> Response:
    """Write the next message of a conversation."""
    context = context_of(request)
    request.state.user = body.user
    await note_prefix(request)
    served = context.ready()
    ids = await aside(request, served.chat_ids, body.messages, body)
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
    form = _form(served, body, len(wanted[0].prompt_ids), context.name(request, kind, body.request_id))
    generation = Generation(
        context.service,
        wanted,
        request.receive,
        timeout=context.request_timeout,
        priority=body.priority,
        tenant=context.tenant(request),
        details=bool(body.return_sources),
    )
    return await answer(context, request, form.head["id"], generation, form, body.stream)


@dataclass(frozen=True)
class _ChatForm:
    """How an answer is to look."""

    served: Served
    head: dict[str, Any]
    num_prompt: int
    num_top: int | None
    """Alternatives per token; None: no log-probabilities."""
    token_ids: bool
    sources: bool
    options: StreamOptions
    silent: bool = False
    """Was only the cache to be filled?"""
    fields: tuple[str, ...] | None = None
    ends_with_done: bool = True

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        shown = []
        for choice in choices:
            one: dict[str, Any] = {
                "index": choice.index,
                "message": {"role": "assistant", "content": self._content(choice.text), "refusal": None},
                "logprobs": self._logprobs(choice.token_ids, choice),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            if self.token_ids:
                one["token_ids"] = choice.token_ids
            if self.sources:
                one["sources"] = choice.sources
            shown.append(one)
        answer = {**self.head, "choices": shown, "usage": usage_of(choices, self.num_prompt)}
        if self.token_ids:
            answer["prompt_token_ids"] = choices[0].job.prompt_ids
        if self.sources:
            answer["lpr"] = decoding_of(choices)
        if self.fields is not None:
            answer = {name: answer[name] for name in self.fields if name in answer}
        return answer

    def begin(self, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        """Say who speaks."""
        for choice in choices:
            yield self._delta(choice.index, {"role": "assistant", "content": ""})

    def step(self, each: Event, choices: Sequence[Choice]) -> dict[str, Any]:
        choice, chunk = each.choice, each.chunk
        data = self._delta(choice.index, {"content": self._content(each.text)})
        one = data["choices"][0]
        one["logprobs"] = self._logprobs(chunk.token_ids, chunk)
        one["finish_reason"] = choice.finish_reason
        one["stop_reason"] = choice.stop_reason
        if self.token_ids:
            one["token_ids"] = chunk.token_ids
        if self.sources:
            one["sources"] = chunk.sources or []
        if self.options.include_usage and self.options.continuous_usage_stats:
            data["usage"] = usage_of(choices, self.num_prompt)
        return data

    def end(self, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        if self.options.include_usage:
            last = {**self.head, "choices": [], "usage": usage_of(choices, self.num_prompt)}
            if self.sources:
                last["lpr"] = decoding_of(choices)
            yield last

    def _content(self, text: str) -> str:
        return "" if self.silent else text

    def _logprobs(self, ids: Sequence[int], found: Any) -> dict[str, Any] | None:
        return None if self.num_top is None else for_chat(self.served.tokens, ids, found.logprobs or [], self.num_top)

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        data = {**self.head, "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]}
        if self.options.include_usage:
            data["usage"] = None
        return data


def _form(served: Served, body: Sampling, num_prompt: int, request_id: str) -> _ChatForm:
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
    return _ChatForm(
        served, head, num_prompt, num_top, bool(body.return_token_ids), bool(body.return_sources),
        body.stream_options or StreamOptions(), silent, fields,
    )  # fmt: skip
