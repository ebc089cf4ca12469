"""Streams that outlive their service: how a router continues one at another service, by the token ids that came.

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

ROUTES = frozenset(
    ("/v1/completions", "/completions", "/beta/completions", "/v1/chat/completions", "/chat/completions")
)
"""Paths whose streams can be continued."""
_HIDDEN = ("token_ids", "prompt_token_ids")
_GIVEN_UP = "unavailable"
"""Code of the error of a service that ends before a stream does (lpr.serve.errors)."""


class Resumption:
    """One stream of one text."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """The stream that a body with these fields asks for."""
        self.is_complete = False
        """True once the stream has ended as the last service wanted it to."""
        self.delivered: list[int] = list(fields.get("delivered_token_ids") or ())
        self._fields = {**fields, "return_token_ids": True}
        if fields.get("temperature") != 0 and fields.get("seed") is None:
            self._fields["seed"] = secrets.randbits(32)
        self._hidden = () if fields.get("return_token_ids") else _HIDDEN
        self._rest, self._is_lost, self._has_begun, self._is_finished, self._has_usage = b"", False, False, False, False

    @classmethod
    def of(cls, path: str, fields: Mapping[str, Any]) -> Resumption | None:
        """The stream that a request asks for; None if it asks for none, or for one that cannot be continued."""
        prompt = fields.get("prompt")
        is_many = isinstance(prompt, list) and not (prompt and all(isinstance(each, int) for each in prompt))
        is_one = all(fields.get(name) in (None, 1) for name in ("n", "best_of"))
        if path not in ROUTES or fields.get("stream") is not True or fields.get("echo") or is_many or not is_one:
            return None
        return cls(fields)

    @property
    def body(self) -> bytes:
        """The body for the next service. What of an event came before is dropped: the ids of whole events count."""
        self._rest, self._is_lost = b"", False
        more = {"delivered_token_ids": self.delivered} if self.delivered else {}
        return json.dumps({**self._fields, **more}).encode()

    def feed(self, data: bytes) -> bytes:
        """Take a part of a service's answer; the part of the stream that the client gets, in whole events."""
        shown, hidden = b"", 0
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            if self._is_lost:  # what follows is the end that the service made of it
                break
            if event == b"data: [DONE]":
                self.is_complete = True
            elif event.startswith(b"data: {"):
                kept = self._take(event)
                hidden += len(event) - len(kept) + (0 if kept else 2)
                event = kept
            elif event.startswith(b":."):  # what --pad-stream adds, so that sizes stay as they are
                event, hidden = b":" + b"." * hidden + event[1:], 0
            shown += event + b"\n\n" if event else b""
        return shown

    def _take(self, event: bytes) -> bytes:
        """An event without what the client has not asked for; empty if it must not get it."""
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
