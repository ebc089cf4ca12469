"""Streams that outlive their service: a router continues one at another service, from the received token ids.

stream = Resumption.of(path, fields)
while not stream.is_complete:               # a service may be lost between any two bytes
    async for data in send(stream.body):
        yield stream.feed(data)
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

BLOCK_ROUTES = frozenset(("/v1/responses", "/responses", "/v1/messages"))
"""Routes with named events, several or none per step."""
ROUTES = BLOCK_ROUTES | {
    "/v1/completions", "/completions", "/beta/completions", "/v1/chat/completions", "/chat/completions",
}  # fmt: skip
"""Paths whose streams can be continued."""
_HIDDEN = ("token_ids", "prompt_token_ids")
_GIVEN_UP = "unavailable"  # code of the error of a service that ends before a stream does (lpr.serve.errors)
_OVERLOADED = "overloaded_error"  # type of the same error in Anthropic's shape, which has no codes
_TOKEN_IDS = "lpr.token_ids"  # type of the event with a step's ids (lpr.serve.api.blocks)
_ENDS = ("message_stop", "error", "response.completed", "response.incomplete", "response.failed")


class Resumption:
    """One stream of one text."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """The stream that a body with these fields asks for."""
        self.is_complete = False  # True once the stream has ended as the last service wanted it to
        self.delivered: list[int] = list(fields.get("delivered_token_ids") or ())
        self._fields = {**fields, "return_token_ids": True}
        if fields.get("seed") in (None, -1):  # it decides the ids of calls, too
            self._fields["seed"] = secrets.randbits(32)
        self._hidden = () if fields.get("return_token_ids") else _HIDDEN
        self._rest, self._is_lost, self._has_begun, self._is_finished, self._has_usage = b"", False, False, False, False

    @classmethod
    def of(cls, path: str, fields: Mapping[str, Any]) -> Resumption | None:
        """The stream of a request; None if it does not stream, or if the stream cannot be continued."""
        prompt = fields.get("prompt")
        is_many = isinstance(prompt, list) and not (prompt and all(isinstance(each, int) for each in prompt))
        is_one = all(fields.get(name) in (None, 1) for name in ("n", "best_of"))
        before = fields.get("delivered_token_ids") or []
        is_wrong = not isinstance(before, list) or not all(type(each) is int for each in before)
        if path not in ROUTES or fields.get("stream") is not True or fields.get("echo") or is_many or not is_one:
            return None
        if is_wrong:  # the service says so
            return None
        return _BlockResumption(fields) if path in BLOCK_ROUTES else cls(fields)

    @property
    def body(self) -> bytes:
        """The body for the next service, with the ids of all complete events; incomplete events are dropped."""
        self._rest, self._is_lost = b"", False
        more = {"delivered_token_ids": self.delivered} if self.delivered else {}
        return json.dumps({**self._fields, **more}).encode()

    def feed(self, data: bytes) -> bytes:
        """Process a part of a service's answer; returns complete events for the client."""
        shown, hidden = b"", 0
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            if self._is_lost:  # the service's own end of the lost stream is not passed on
                break
            if event == b"data: [DONE]":
                self.is_complete = True
            elif event.startswith((b"data: {", b"event: ")):
                kept = self._take(event)
                hidden += len(event) - len(kept) + (0 if kept else 2)
                event = kept
            elif event.startswith(b":."):  # padding of --pad-stream is passed on
                event, hidden = b":" + b"." * hidden + event[1:], 0
            shown += event + b"\n\n" if event else b""
        return shown

    def _take(self, event: bytes) -> bytes:
        """An event without fields that the client did not request; empty if the client must not get it."""
        data = json.loads(event[6:])
        if "error" in data and data["error"].get("code") == _GIVEN_UP:
            self._is_lost = True
            return b""
        if not data.get("choices"):
            shown, self._has_usage = not self._has_usage, True
            return event if shown else b""
        for choice in data["choices"]:
            self.delivered += choice.get("token_ids") or ()
            is_role = "role" in choice.get("delta", {})
            if (is_role and self._has_begun) or self._is_finished:  # it came from the service before
                return b""
            self._is_finished = choice.get("finish_reason") is not None
            for name in self._hidden:
                choice.pop(name, None)
        self._has_begun = True
        if not self._hidden:
            return event
        return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


class _BlockResumption(Resumption):
    """A stream of responses or messages. The events of a step are held back until its token ids arrive."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self._shows_ids = not self._hidden
        self._held: list[dict[str, Any]] = []
        self._number = 0
        self._first: dict[str, Any] = {}  # what the response was called at first

    @property
    def body(self) -> bytes:
        self._held.clear()
        return super().body

    def _take(self, event: bytes) -> bytes:
        data = json.loads(event.partition(b"\ndata: ")[2])
        error = data.get("error") or data.get("response", {}).get("error") or {}
        if error.get("code") == _GIVEN_UP or error.get("type") == _OVERLOADED:
            self._is_lost = True
            return b""
        is_ids = data["type"] == _TOKEN_IDS
        if not is_ids or self._shows_ids:
            self._held.append(data)
        if is_ids:
            self.delivered += data["token_ids"]
        self.is_complete = data["type"] in _ENDS
        return self._shown() if is_ids or self.is_complete else b""

    def _shown(self) -> bytes:
        """The events held back, numbered and named as in an uninterrupted stream."""
        events = []
        for data in self._held:
            if "sequence_number" in data:
                data["sequence_number"] = self._number
                self._number += 1
            if "response" in data:
                self._first = self._first or {name: data["response"][name] for name in ("id", "created_at")}
                data["response"].update(self._first)
            text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
            events.append(f"event: {data['type']}\ndata: {text}".encode())
        self._held.clear()
        return b"\n\n".join(events)
