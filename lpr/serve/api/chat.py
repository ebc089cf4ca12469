"""`POST /v1/chat/completions`: conversations, through the model's own template."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from lpr.protocol import Chunk, ErrorCode, Submit
from lpr.serve.api.answers import OpenAIForm, answer
from lpr.serve.api.context import STREAM, aside, begin, context_of, is_long, key_name, unless_gone
from lpr.serve.api.parsing import JsonRoute
from lpr.serve.api.replying import Reply
from lpr.serve.bodies.completions import ChatBody, Sampling, TokenizeBody
from lpr.serve.bodies.fields import Body
from lpr.serve.bodies.packed import pack
from lpr.serve.checks import chat_of
from lpr.serve.errors import ApiError, bad, renaming
from lpr.serve.generation import Choice, Event
from lpr.serve.sandbox import ExhaustedError
from lpr.serve.text.conversation import check_templates, is_simple, prompt_of
from lpr.serve.text.replies import PLAIN, Replies
from lpr.serve.text.scanner import Piece
from lpr.serve.text.served import Served, spread
from lpr.serve.text.tokens import LONG

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", summary="Answer a conversation", responses=STREAM)
@router.post("/chat/completions", include_in_schema=False)
@router.post("/beta/chat/completions", include_in_schema=False)  # DeepSeek's path for answers that go on
async def chat(body: ChatBody, request: Request) -> Response:
    """Write the next message of a conversation."""
    await begin(request, body.user)
    return await answer_as_chat(request, body, *await prepare(request, body))


async def prepare(request: Request, body: ChatBody, ceiling: int | None = None) -> tuple[list[Submit], Replies]:
    """The requests of a conversation, of at most `ceiling` tokens, and their replies' parser; raises ApiError."""
    context = context_of(request)
    served = context.ready()
    with renaming(body.places):
        text = await chat_text(request, served, body)
        replies = served.replies(body, text)
        ids = await _encoded(request, served, text, body)
        most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        if body.n_predict is not None and body.n_predict >= 0:
            most = max(1, body.n_predict)
        more: dict[str, Any] = {"logprobs": body.top_logprobs or 0} if body.logprobs else {}
        context.service.check_room(body.n or 1, len(ids) * (body.n or 1))
        if ceiling is not None:
            most = min(ceiling, served.most(len(ids)))
        room = served.room(body, len(ids), most)
        held = replies.grammar(
            served.tokens, body.response_format.text_schema if body.response_format is not None else None
        )
        more["grammar"] = await context.grammar(request, body.response_format, held, replies.tools)
        if replies.shows_special(served.tokens):
            more["skip_special_tokens"] = False
        params = served.params(body, room, **more)
        prediction = await aside(request, served.prediction, body, text)
        wanted = Submit.of(ids, params, served.delivered(body, params), prediction=prediction)
        return spread(wanted, body.n or 1), replies


async def chat_ids(request: Request, served: Served, body: ChatBody | TokenizeBody) -> list[int]:
    """The prompt of a conversation; raises ApiError."""
    return await _encoded(request, served, await chat_text(request, served, body), body)


async def chat_text(request: Request, served: Served, body: ChatBody | TokenizeBody) -> str:
    """The prompt of a conversation as text; raises ApiError."""
    _, text, refused = getattr(request.state, "rendered", (None, None, None))
    if refused is not None:
        raise ApiError(ErrorCode(refused[0]), *refused[1:])
    if text is not None:
        return str(text)
    check_templates(served.templates)
    if not served.templates.is_known:
        await unless_gone(request.receive, context_of(request).learn(served))
    if is_simple(body) and not is_long(request):
        return prompt_of(served.templates, body, served.most_characters)
    # A client's variables can make a template's work arbitrarily large.
    try:
        packed = pack(body)
        rendering = context_of(request).checks.run("render", packed, key=key_name(request), size=len(packed))
        return str(await unless_gone(request.receive, rendering))
    except (ExhaustedError, OverflowError, RecursionError) as failure:
        name = next((name for name in ("chat_template_kwargs", "tools") if getattr(body, name, None)), "messages")
        why = f"with these the model's chat template needs {failure}"
        if not isinstance(failure, ExhaustedError):
            why = "a number has too many digits, or values are nested too deeply"
        raise bad(name, f"{name}: {why}") from failure


def chat_asked(request: Request, body: Body) -> ChatBody:
    """The chat of a body. For a long body it has no messages: the process that checked it has rendered them."""
    known, _, _ = getattr(request.state, "rendered", (None, None, None))
    chat = known if known is not None else chat_of(body)
    assert isinstance(chat, ChatBody)
    return chat


async def _encoded(request: Request, served: Served, text: str, body: ChatBody | TokenizeBody) -> list[int]:
    if len(text) <= LONG:
        return served.chat_ids(text, body)
    return await context_of(request).aside(request, len(text), partial(served.chat_ids, text, body))


async def answer_as_chat(
    request: Request, body: Sampling, wanted: list[Submit], replies: Replies = PLAIN, kind: str = "chatcmpl"
) -> Response:
    """Generate the requests `wanted` and answer in the shape of a chat."""
    context = context_of(request)
    name = context.name(request, kind, body.request_id)
    form = _ChatForm(context.ready(), body, name, wanted[0].num_prompt, replies)
    return await answer(context, request, name, context.generation(request, body, wanted), form, body.stream)


class _ChatForm(OpenAIForm):
    def __init__(self, served: Served, body: Sampling, id: str, num_prompt: int, replies: Replies) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(served, body, id, kind, num_prompt)
        chat = body if isinstance(body, ChatBody) else None
        self._num_top = (chat.top_logprobs or 0) if chat is not None and chat.logprobs else None
        """Alternatives per token; None without log-probabilities."""
        self._is_silent = chat is not None and chat.n_predict == 0  # the request only fills the cache
        self._fields = chat.response_fields if chat is not None else None
        self._replies = replies
        self._read: dict[int, Reply] = {}

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        answer = super().whole(choices)
        return answer if self._fields is None else {name: answer[name] for name in self._fields if name in answer}

    def extras(self, choices: Sequence[Choice]) -> dict[str, Any]:
        prompt = {"prompt_token_ids": choices[0].job.submit.prompt_ids} if self.body.return_token_ids else {}
        return {**prompt, **super().extras(choices)}

    def choices(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        shown = []
        for choice in choices:
            content, logprobs = {"message": self._message(choice)}, self._logprobs(choice.token_ids, choice)
            more = {"token_ids": choice.token_ids, "sources": choice.sources}
            shown.append(self.shown(choice.index, content, logprobs, choice, **more))
        return shown

    def begin(self, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        for choice in choices:
            if choice.job.num_delivered:  # another service has begun the message
                continue
            delta = {"role": "assistant", "content": ""}
            yield self.event({"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None})

    def delta(self, each: Event) -> dict[str, Any]:
        choice, chunk = each.choice, each.chunk
        content = {"delta": self._delta(each)}
        logprobs = self._logprobs(chunk.token_ids, chunk)
        more = {"token_ids": chunk.token_ids, "sources": chunk.sources or []}
        return self.shown(choice.index, content, logprobs, choice, **more)

    def finish_reason(self, choice: Choice) -> str | None:
        has_called = choice.index in self._read and self._read[choice.index].has_calls
        return "tool_calls" if has_called and choice.finish_reason == "stop" else choice.finish_reason

    def _message(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._content(choice.text), "refusal": None}
        if self._replies.is_plain:
            return message
        reply = self._reply(choice)
        delta = self._parts(reply, reply.whole(choice))
        calls = [{name: call[name] for name in ("id", "type", "function")} for call in delta.pop("tool_calls", ())]
        if calls:
            message["tool_calls"] = calls
        return {**message, "content": None if calls else "", **delta}

    def _delta(self, each: Event) -> dict[str, Any]:
        if self._replies.is_plain:
            return {"content": self._content(each.text)}
        reply = self._reply(each.choice)
        return self._parts(reply, reply.take(each))

    def _parts(self, reply: Reply, pieces: Sequence[Piece]) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        for kind, name in (("thought", "reasoning_content"), ("text", "content")):
            if text := "".join(piece.text for piece in pieces if piece.kind == kind):
                shown[name] = self._content(text)
        if calls := reply.deltas(pieces):
            shown["tool_calls"] = calls
        return shown

    def _reply(self, choice: Choice) -> Reply:
        if choice.index not in self._read:
            self._read[choice.index] = Reply(self._replies, self.served.tokens, choice.job.submit)
        return self._read[choice.index]

    def _content(self, text: str) -> str:
        return "" if self._is_silent else text

    def _logprobs(self, ids: Sequence[int], found: Choice | Chunk) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        content = []
        for token, each in zip(ids, found.logprobs or [], strict=True):
            top = [self._token(*other) for other in each.top[: self._num_top]]
            content.append({**self._token(token, each.logprob), "top_logprobs": top})
        return {"content": content}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        tokens = self.served.tokens
        return {"token": tokens.text_of(token), "logprob": logprob, "bytes": list(tokens.bytes_of(token))}
