"""Answers that consist of blocks (thoughts, texts, calls), each of which begins, grows and ends in a stream."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lpr.serve.api.answers import Form, event
from lpr.serve.api.replying import Reply
from lpr.serve.generation import Choice, Event
from lpr.serve.text.reader import Piece
from lpr.serve.text.replies import Replies
from lpr.serve.text.served import Served


@dataclass
class Block:
    """One block so far."""

    index: int
    kind: Literal["thought", "text", "call"]
    id: str
    name: str = ""
    """The function's, of a call."""
    text: str = ""
    """Of a call, its arguments as JSON."""


class BlockForm(Form):
    """The common part of Anthropic's messages and OpenAI's responses. Subclasses say what blocks look like."""

    ends_with_done: ClassVar[bool] = False

    def __init__(self, served: Served, replies: Replies) -> None:
        self.served = served
        self.blocks: list[Block] = []
        self._reply = Reply(replies, served.tokens)
        self._is_open = False

    @property
    def has_calls(self) -> bool:
        """True once a tool is called."""
        return self._reply.has_calls

    @abstractmethod
    def opened(self, block: Block) -> Iterable[Any]:
        """The events of a block's beginning."""

    @abstractmethod
    def grown(self, block: Block, text: str) -> Iterable[Any]:
        """The events of more text of a block."""

    @abstractmethod
    def closed(self, block: Block) -> Iterable[Any]:
        """The events of a block's end."""

    @abstractmethod
    def finished(self, choice: Choice) -> Iterable[Any]:
        """The events after the last block."""

    def steps(self, each: Event, choices: Sequence[Choice]) -> Iterator[Any]:
        """See Form."""
        for piece in self._reply.take(each):
            yield from self._take(piece)

    def end(self, choices: Sequence[Choice]) -> Iterator[Any]:
        """See Form."""
        yield from self._close()
        yield from self.finished(choices[0])

    def encode(self, data: Any) -> bytes:
        """See Form."""
        return event(data, data["type"])

    def read(self, choice: Choice) -> None:
        """Take the whole reply of a finished choice."""
        for piece in self._reply.whole(choice):
            list(self._take(piece))

    def _take(self, piece: Piece) -> Iterator[Any]:
        kind: Any = "call" if piece.kind == "arguments" else piece.kind
        if not self._is_open or piece.kind == "call" or self.blocks[-1].kind != kind:
            yield from self._close()
            name = piece.text if piece.kind == "call" else ""
            self.blocks.append(Block(len(self.blocks), kind, self._reply.call_id(), name))
            self._is_open = True
            yield from self.opened(self.blocks[-1])
        if piece.kind != "call":
            self.blocks[-1].text += piece.text
            yield from self.grown(self.blocks[-1], piece.text)

    def _close(self) -> Iterator[Any]:
        if self._is_open:
            self._is_open = False
            yield from self.closed(self.blocks[-1])
