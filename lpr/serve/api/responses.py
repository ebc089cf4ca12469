"""`POST /v1/responses`, OpenAI's API for agents, without what a service would have to store."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from lpr.protocol import Submit
from lpr.serve.api.answers import answer
from lpr.serve.api.blocks import Block, BlockForm
from lpr.serve.api.chat import chat_asked, prepare
from lpr.serve.api.context import STREAM, begin
from lpr.serve.api.parsing import JsonRoute
from lpr.serve.bodies.responses import Format, Reasoning, ResponsesBody, TextOptions, WebSearch
from lpr.serve.errors import ApiError, renaming
from lpr.serve.generation import Choice
from lpr.serve.text.replies import Replies
from lpr.serve.text.served import Served

router = APIRouter(route_class=JsonRoute)

_ECHOED = ("instructions", "max_output_tokens", "metadata", "user", "safety_identifier", "prompt_cache_key")
_SAMPLED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
_OWN_NAMES = {"max_tokens": "max_output_tokens", "messages": "input", "chat_template_kwargs": "reasoning",
              "response_format.json_schema": "text.format", "response_format": "text.format"}  # fmt: skip
_PREFIX = {"text": "msg", "thought": "rs", "call": "fc"}


@router.post("/v1/responses", summary="Answer a conversation of items", responses=STREAM)
@router.post("/responses", include_in_schema=False)
async def respond(body: ResponsesBody, request: Request) -> Response:
    """Write the next items of a conversation."""
    context, served = await begin(request, body.user)
    chat = chat_asked(request, body)
    with renaming(_OWN_NAMES):
        wanted, replies = await prepare(request, chat)
    name = context.name(request, "resp", body.request_id)
    form = _ResponseForm(served, replies, wanted[0], body, name)
    return await answer(context, request, name, context.generation(request, chat, wanted), form, body.stream)


class _ResponseForm(BlockForm):
    def __init__(self, served: Served, replies: Replies, wanted: Submit, body: ResponsesBody, id: str) -> None:
        super().__init__(served, replies, wanted, bool(body.return_token_ids))
        self._number = 0
        self._names = {shown: (each.name, namespace) for shown, namespace, each in body.functions if namespace}
        self._head = {
            **{"id": id, "object": "response", "created_at": int(time.time())},
            "model": served.check_model(body.model),
            **{name: getattr(body, name) for name in _ECHOED},
            **{name: getattr(wanted.params, name) for name in _SAMPLED},
            "reasoning": {
                "effort": None,
                "summary": None,
                **(body.reasoning or Reasoning()).model_dump(exclude_none=True),
            },
            "tools": [tool.model_dump() for tool in body.tools or () if not isinstance(tool, WebSearch)],
            "tool_choice": body.model_dump(include={"tool_choice"}, exclude_none=True).get("tool_choice", "auto"),
            "text": _text(body.text or TextOptions()),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "store": False,
            "truncation": "disabled",
            **{"background": False, "service_tier": "default", "top_logprobs": 0},
            **{"previous_response_id": None, "max_tool_calls": None},
        }

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        self.read(choices[0])
        return self._response(choices[0])

    def started(self) -> Iterator[dict[str, Any]]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._state("in_progress"))

    def opened(self, block: Block) -> Iterator[dict[str, Any]]:
        item = self._item(block, "in_progress")
        if block.kind != "call":
            item["content"] = []
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind != "call":
            yield self._event("response.content_part.added", **self._place(block), part=_part(block))

    def grown(self, block: Block, text: str) -> Iterator[dict[str, Any]]:
        yield self._event(f"response.{_NAMES[block.kind]}.delta", **self._place(block), delta=text, **_logprobs(block))

    def closed(self, block: Block) -> Iterator[dict[str, Any]]:
        said = {"arguments": block.text, **self._name(block)} if block.kind == "call" else {"text": block.text}
        yield self._event(f"response.{_NAMES[block.kind]}.done", **self._place(block), **said, **_logprobs(block))
        if block.kind != "call":
            yield self._event("response.content_part.done", **self._place(block), part=_part(block))
        item = self._item(block, "completed")
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def finished(self, choice: Choice) -> Iterator[dict[str, Any]]:
        response = self._response(choice)
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, failure: ApiError) -> Iterator[dict[str, Any]]:
        error = {"code": failure.shown_code or "server_error", "message": failure.body()["error"]["message"]}
        yield self._event("response.failed", response=self._state("failed", error=error))

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": f"{_PREFIX[block.kind]}_{block.id}", "output_index": block.index}
        return place if block.kind == "call" else {**place, "content_index": 0}

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        head = {"id": f"{_PREFIX[block.kind]}_{block.id}", "status": status}
        if block.kind == "call":
            called = {"call_id": block.id, **self._name(block), "arguments": block.text}
            return {**head, "type": "function_call", **called}
        if block.kind == "thought":
            return {**head, "type": "reasoning", "summary": [], "content": [_part(block)]}
        return {**head, "type": "message", "role": "assistant", "content": [_part(block)]}

    def _name(self, block: Block) -> dict[str, str]:
        """The name of a call's function, as the client knows it."""
        name, namespace = self._names.get(block.name, (block.name, None))
        return {"name": name} if namespace is None else {"name": name, "namespace": namespace}

    def _state(self, status: str, **more: Any) -> dict[str, Any]:
        output = [self._item(block, "completed") for block in self.blocks]
        empty = {"error": None, "incomplete_details": None, "usage": None, "completed_at": None}
        return {**self._head, "status": status, "output": output, **empty, **more}

    def _response(self, choice: Choice) -> dict[str, Any]:
        is_whole = choice.finish_reason == "stop"
        why = None if is_whole else {"reason": "max_output_tokens" if choice.finish_reason == "length" else "cancelled"}
        usage = {
            "input_tokens": self.num_prompt,
            "input_tokens_details": {"cached_tokens": self.num_cached(choice)},
            "output_tokens": self.num_output(choice),
            "output_tokens_details": {"reasoning_tokens": self.num_thought},
            "total_tokens": self.num_prompt + self.num_output(choice),
        }
        done = int(time.time()) if is_whole else None
        status = "completed" if is_whole else "incomplete"
        return self._state(status, incomplete_details=why, usage=usage, completed_at=done)


_NAMES = {"text": "output_text", "thought": "reasoning_text", "call": "function_call_arguments"}


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "thought":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _logprobs(block: Block) -> dict[str, Any]:
    return {"logprobs": []} if block.kind == "text" else {}


def _text(options: TextOptions) -> dict[str, Any]:
    """The `text` field of a response: only a schema has a name."""
    said = options.model_dump(by_alias=True, exclude_none=True)
    form = options.format or Format()
    return said if form.type == "json_schema" else {**said, "format": {"type": form.type}}
