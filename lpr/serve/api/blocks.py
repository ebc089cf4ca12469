"""Answers that consist of blocks (thoughts, texts, calls); a stream has events for a block's start, deltas and end."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lpr.protocol import Submit
from lpr.serve.api.answers import Form, event
from lpr.serve.api.replying import Reply, num_delivered
from lpr.serve.generation import Choice, Event
from lpr.serve.text.replies import Replies
from lpr.serve.text.scanner import Piece
from lpr.serve.text.served import Served

TOKEN_IDS = "lpr.token_ids"
"""Type of the event with the ids of a step, for clients that continue a stream elsewhere (lpr.fleet.resume)."""


@dataclass
class Block:
    index: int
    kind: Literal["thought", "text", "call"]
    id: str
    name: str = ""  # the function's, of a call
    text: str = ""  # for a call, its arguments as JSON


class BlockForm(Form):
    """The common part of Anthropic's messages and OpenAI's responses. Subclasses define the shape of blocks."""

    ends_with_done: ClassVar[bool] = False

    def __init__(self, served: Served, replies: Replies, wanted: Submit, shows_ids: bool) -> None:
        """The form of the reply to `wanted`; with `shows_ids` a stream has each step's token ids after its events."""
        self.served = served
        self.blocks: list[Block] = []
        self.num_prompt = wanted.num_prompt
        self.params = wanted.params
        self._is_begun = bool(wanted.delivered)
        self._shows_ids = shows_ids
        self._reply = Reply(replies, served.tokens, wanted)
        self._is_open = False

    @property
    def has_calls(self) -> bool:
        return self._reply.has_calls

    @property
    def num_thought(self) -> int:
        thoughts = "".join(block.text for block in self.blocks if block.kind == "thought")
        return len(self.served.tokens.encode(thoughts, False))

    # The events before the first block, of a block's beginning, of more text of it, of its end, and after the last.
    @abstractmethod
    def started(self) -> Iterable[Any]: ...
    @abstractmethod
    def opened(self, block: Block) -> Iterable[Any]: ...
    @abstractmethod
    def grown(self, block: Block, text: str) -> Iterable[Any]: ...
    @abstractmethod
    def closed(self, block: Block) -> Iterable[Any]: ...
    @abstractmethod
    def finished(self, choice: Choice) -> Iterable[Any]: ...

    def begin(self, choices: Sequence[Choice]) -> Iterable[Any]:
        return () if self._is_begun else self.started()

    def steps(self, each: Event, choices: Sequence[Choice]) -> Iterator[Any]:
        self._repeat(self._reply.delivered(each.choice, each.chunk.start_character))
        for piece in self._reply.take(each):
            yield from self._take(piece)
        if self._shows_ids and each.chunk.token_ids:
            yield {"type": TOKEN_IDS, "token_ids": each.chunk.token_ids}

    def end(self, choices: Sequence[Choice]) -> Iterator[Any]:
        yield from self._close()
        yield from self.finished(choices[0])

    def encode(self, data: Any) -> bytes:
        return event(data, data["type"])

    def read(self, choice: Choice) -> None:
        """Parse the whole reply of a finished choice, including the part that another service has delivered."""
        self._repeat(self._reply.delivered(choice, num_delivered(choice)))
        self._repeat(self._reply.whole(choice))

    @staticmethod
    def num_output(choice: Choice) -> int:
        """Number of a reply's tokens, including those that another service has delivered."""
        return choice.job.num_delivered + len(choice.token_ids)

    def num_cached(self, choice: Choice) -> int:
        return min(choice.usage.num_cached, self.num_prompt) if choice.usage is not None else 0

    def _repeat(self, pieces: Iterable[Piece]) -> None:
        """Process pieces without sending their events."""
        for piece in pieces:
            for _ in self._take(piece):
                pass

    def _take(self, piece: Piece) -> Iterator[Any]:
        kind: Any = "call" if piece.kind == "arguments" else piece.kind
        if not self._is_open or piece.kind == "call" or self.blocks[-1].kind != kind:
            yield from self._close()
            name = piece.text if piece.kind == "call" else ""
            self.blocks.append(Block(len(self.blocks), kind, self._reply.call_id(len(self.blocks)), name))
            self._is_open = True
            yield from self.opened(self.blocks[-1])
        if piece.kind != "call":
            self.blocks[-1].text += piece.text
            yield from self.grown(self.blocks[-1], piece.text)

    def _close(self) -> Iterator[Any]:
        if self._is_open:
            self._is_open = False
            yield from self.closed(self.blocks[-1])
