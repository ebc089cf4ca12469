"""Incremental parsing of one choice's reply: the pieces of each step, and calls in the shape of chats."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from lpr.protocol import Submit
from lpr.serve.generation import Choice, Event
from lpr.serve.text.replies import Replies
from lpr.serve.text.scanner import Piece
from lpr.serve.text.tokens import Tokens


class Reply:
    def __init__(self, replies: Replies, tokens: Tokens, wanted: Submit) -> None:
        """A parser of the reply to `wanted`. Ids of calls depend on prompt and seed, the same in every service."""
        seed = wanted.params.seed % 2**64
        self._replies, self._tokens = replies, tokens
        self._salt = blake2b(array("q", wanted.prompt_ids).tobytes(), key=seed.to_bytes(8, "little"))
        self._reader = replies.reader()
        self._is_begun = False

    @property
    def has_calls(self) -> bool:
        return self._reader.num_calls > 0

    def call_id(self, number: int) -> str:
        """An id for the call, or other block, number `number`."""
        salt = self._salt.copy()
        salt.update(number.to_bytes(8, "little"))
        return self._replies.call_id(salt.hexdigest())

    def delivered(self, choice: Choice, num_characters: int) -> list[Piece]:
        """Before the first step: the pieces of the `num_characters` that another service has delivered."""
        is_first, self._is_begun = not self._is_begun, True
        if not is_first or not choice.job.num_delivered:
            return []
        ids = choice.job.token_ids[: choice.job.num_delivered]
        skip = choice.job.submit.params.skip_special_tokens
        return self._reader.feed(self._tokens.decode(ids, skip_special_tokens=skip)[: max(0, num_characters)])

    def take(self, each: Event) -> list[Piece]:
        self.delivered(each.choice, each.chunk.start_character)
        reason = each.choice.finish_reason
        return self._reader.feed(each.text, reason is not None, cut=reason != "stop")

    def whole(self, choice: Choice) -> list[Piece]:
        self.delivered(choice, num_delivered(choice))
        return self._reader.feed(choice.text, True, cut=choice.finish_reason != "stop")

    def deltas(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """New calls and additions to calls in `pieces`, in the shape of a chat's `tool_calls`."""
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            if piece.kind == "call":
                begun = {"index": piece.call, "id": self.call_id(piece.call), "type": "function"}
                calls[piece.call] = {**begun, "function": {"name": piece.text, "arguments": ""}}
            elif piece.kind == "arguments":
                call = calls.setdefault(piece.call, {"index": piece.call, "function": {"arguments": ""}})
                call["function"]["arguments"] += piece.text
        return list(calls.values())


def num_delivered(choice: Choice) -> int:
    """Number of a finished choice's characters that another service has delivered."""
    return (choice.job.num_characters or 0) - len(choice.text)
