"""One choice's reply as it is read: its pieces with each step, and its calls in the shape of chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lpr.serve.generation import Choice, Event
from lpr.serve.text.reader import Piece
from lpr.serve.text.replies import Replies
from lpr.serve.text.tokens import Tokens


class Reply:
    """The reply of one choice."""

    def __init__(self, replies: Replies, tokens: Tokens) -> None:
        self._replies, self._tokens = replies, tokens
        self._reader = replies.reader()
        self._is_begun = False

    @property
    def has_calls(self) -> bool:
        """True once it calls a tool."""
        return self._reader.num_calls > 0

    def call_id(self) -> str:
        """An id for a call."""
        return self._replies.call_id()

    def take(self, each: Event) -> list[Piece]:
        """The pieces that are certain with a step."""
        self._skip(each.choice, each.chunk.start_character)
        return self._reader.feed(each.text, each.choice.finish_reason is not None)

    def whole(self, choice: Choice) -> list[Piece]:
        """All pieces of a finished choice."""
        self._skip(choice, (choice.job.num_characters or 0) - len(choice.text))
        return self._reader.feed(choice.text, True)

    def deltas(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """The calls among some pieces, or what they add to calls, in the shape of a chat's `tool_calls`."""
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            if piece.kind == "call":
                function = {"name": piece.text, "arguments": ""}
                calls[piece.call] = {
                    "index": piece.call,
                    "id": self.call_id(),
                    "type": "function",
                    "function": function,
                }
            elif piece.kind == "arguments":
                call = calls.setdefault(piece.call, {"index": piece.call, "function": {"arguments": ""}})
                call["function"]["arguments"] += piece.text
        return list(calls.values())

    def _skip(self, choice: Choice, num_characters: int) -> None:
        """Before the first step, read what another service has delivered, and show nothing of it."""
        if choice.job.num_delivered and not self._is_begun:
            ids = choice.job.token_ids[: choice.job.num_delivered]
            skip = choice.job.params.skip_special_tokens
            self._reader.feed(self._tokens.decode(ids, skip_special_tokens=skip)[: max(0, num_characters)])
        self._is_begun = True
