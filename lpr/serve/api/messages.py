"""`POST /v1/messages`, Anthropic's API, and the count of its tokens."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from lpr.protocol import ErrorCode, Submit
from lpr.serve.api.answers import answer
from lpr.serve.api.blocks import Block, BlockForm
from lpr.serve.api.chat import chat_asked, chat_ids, prepare
from lpr.serve.api.context import STREAM, begin, context_of
from lpr.serve.api.parsing import JsonRoute
from lpr.serve.bodies.messages import CountBody, MessagesBody
from lpr.serve.errors import ApiError, anthropic_error
from lpr.serve.generation import Choice
from lpr.serve.text.replies import Replies
from lpr.serve.text.served import Served

router = APIRouter(route_class=JsonRoute)

_DELTAS = {"text": ("text_delta", "text"), "thought": ("thinking_delta", "thinking"),
           "call": ("input_json_delta", "partial_json")}  # fmt: skip


@router.post("/v1/messages", summary="Answer a conversation, as Anthropic's API", responses=STREAM)
async def messages(body: MessagesBody, request: Request) -> Response:
    """Write the next message of a conversation."""
    chat = chat_asked(request, body)
    context, served = await begin(request, chat.user)
    wanted, replies = await prepare(request, chat, body.max_tokens)
    name = context.name(request, "msg", body.request_id)
    form = _MessageForm(served, replies, wanted[0], body, name)
    return await answer(context, request, name, context.generation(request, chat, wanted), form, body.stream)


@router.post("/v1/messages/count_tokens", summary="Tokens of a conversation, as Anthropic's API")
async def count_tokens(body: CountBody, request: Request) -> dict[str, int]:
    """Count the tokens of the prompt that a conversation makes."""
    served = context_of(request).ready()
    served.check_model(body.model)
    chat = chat_asked(request, body)
    served.replies(chat, "")
    return {"input_tokens": len(await chat_ids(request, served, chat))}


_END = {"stop_reason": None, "stop_sequence": None, "stop_details": None}
_USAGE: dict[str, Any] = {
    "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 0,
    "inference_geo": None,
    "server_tool_use": None,
    "service_tier": "standard",
    "output_tokens_details": None,
}


class _MessageForm(BlockForm):
    def __init__(self, served: Served, replies: Replies, wanted: Submit, body: MessagesBody, id: str) -> None:
        super().__init__(served, replies, wanted, bool(body.return_token_ids))
        head = {"id": id, "type": "message", "role": "assistant", "model": served.check_model(body.model)}
        self._head = {**head, "container": None}

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        if choices[0].finish_reason == "abort":
            raise _cancelled()
        self.read(choices[0])
        content = [self._shown(block) for block in self.blocks]
        return {**self._head, "content": content, **self._end(choices[0]), "usage": self._usage(choices[0])}

    def started(self) -> Iterator[dict[str, Any]]:
        usage = {**_USAGE, "input_tokens": self.num_prompt, "output_tokens": 0}
        empty: dict[str, Any] = {"content": [], **_END, "usage": usage}
        yield {"type": "message_start", "message": {**self._head, **empty}}

    def opened(self, block: Block) -> Iterator[dict[str, Any]]:
        yield {"type": "content_block_start", "index": block.index, "content_block": self._shown(block)}

    def grown(self, block: Block, text: str) -> Iterator[dict[str, Any]]:
        kind, name = _DELTAS[block.kind]
        yield {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}

    def closed(self, block: Block) -> Iterator[dict[str, Any]]:
        yield {"type": "content_block_stop", "index": block.index}

    def finished(self, choice: Choice) -> Iterator[dict[str, Any]]:
        if choice.finish_reason == "abort":
            yield from self.failed(_cancelled())
            return
        yield {"type": "message_delta", "delta": self._end(choice), "usage": self._usage(choice)}
        yield {"type": "message_stop"}

    def failed(self, failure: ApiError) -> Iterator[dict[str, Any]]:
        yield anthropic_error(failure.status, failure.message)

    def _shown(self, block: Block) -> dict[str, Any]:
        if block.kind == "text":
            return {"type": "text", "text": block.text, "citations": None}
        if block.kind == "thought":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        called = {"id": block.id, "name": block.name, "input": _object(block.text)}
        return {"type": "tool_use", **called, "caller": {"type": "direct"}}

    def _end(self, choice: Choice) -> dict[str, Any]:
        stop = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        reason = "max_tokens" if choice.finish_reason == "length" else "stop_sequence" if stop else "end_turn"
        if self.has_calls and reason == "end_turn":
            reason = "tool_use"
        return {**_END, "stop_reason": reason, "stop_sequence": stop}

    def _usage(self, choice: Choice) -> dict[str, Any]:
        cached = self.num_cached(choice)
        usage = {**_USAGE, "input_tokens": self.num_prompt - cached, "cache_read_input_tokens": cached}
        thought = {"thinking_tokens": self.num_thought}
        return {**usage, "output_tokens": self.num_output(choice), "output_tokens_details": thought}


def _cancelled() -> ApiError:
    """The error of a cancelled request: no `stop_reason` applies, and clients do not retry it automatically."""
    return ApiError(ErrorCode.CANCELLED, "the request was cancelled")


def _object(text: str) -> Any:
    """The arguments of a call as an object; incomplete ones, or other values, under a single key."""
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        value = text
    return value if isinstance(value, dict) else {"arguments": value}
