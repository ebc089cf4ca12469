"""Entries of a stream of drafts, and the queue from the thread that reads them to the steps that learn them.

An entry is one finished output, in a form that a reader can check without trusting it.
A field `d` holds MessagePack: version, origin, a number that no two entries share, the length of the prompt's part, and
the tokens as little-endian int32. Only what a suffix index uses is sent: the tail of the prompt that it can match, and
the output.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from lpr.core.suffix_index import END, as_learnt

VERSION = 1
FIELD = b"d"
MOST_TOKENS = 4096  # Tokens of an entry. Of a longer output, the last ones are sent.
MOST_BYTES = 4 * MOST_TOKENS + 256  # longest entry; a longer one is malformed
ID_BYTES = 8


class Entry(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One output of a replica."""

    version: int
    origin: bytes  # random id of the replica's start that wrote it
    number: bytes  # differs for each output of an origin, so that an entry sent twice is learned once
    num_prompt: int  # tokens before the output: its context
    tokens: bytes

    def token_ids(self) -> np.ndarray:
        return np.frombuffer(self.tokens, "<i4").astype(np.int32, copy=False)


_decoder = msgspec.msgpack.Decoder(Entry)


def encode(origin: bytes, number: bytes, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> tuple[bytes, int]:
    """The entry of an output as bytes, and its number of tokens. `as_learnt` cuts the prompt."""
    tokens = np.array(as_learnt(prompt_ids, token_ids)[-MOST_TOKENS:], "<i4")
    num_prompt = max(0, len(tokens) - len(token_ids))
    return msgspec.msgpack.encode(Entry(VERSION, origin, number, num_prompt, tokens.tobytes())), len(tokens)


def decode(data: object) -> Entry | None:
    """The entry that `encode` made; None for anything else, as any client of the store can write to a stream."""
    if not isinstance(data, bytes) or len(data) > MOST_BYTES:
        return None
    try:
        entry = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    sound = (
        entry.version == VERSION
        and len(entry.origin) == len(entry.number) == ID_BYTES
        and 0 < len(entry.tokens) <= 4 * MOST_TOKENS
        and len(entry.tokens) % 4 == 0
        and 0 <= entry.num_prompt < len(entry.tokens) // 4
    )
    return entry if sound else None


def within_vocabulary(tokens: np.ndarray, vocab_size: int) -> tuple[np.ndarray, int]:
    """A history (int32 [num_tokens]) with END, a document's end, for ids outside the vocabulary, and their number."""
    outside = (tokens < END) | (tokens >= vocab_size)
    count = int(np.count_nonzero(outside))
    return (np.where(outside, np.int32(END), tokens) if count else tokens), count


AT_ONCE = 4096  # tokens learned between two steps: 0.4 ms of the native core, 5 ms of the Python one
FULL = 1 << 18  # Tokens in the queue above which the reader pauses. What the store drops meanwhile is lost.


class Batch(NamedTuple):
    """Outputs of one tenant, learned together."""

    tenant: str
    history: np.ndarray  # int32 [num_tokens]: documents that END separates
    read_to: str  # the last entry of the stream that this batch or an earlier one covers; "" if unknown
    num_outputs: int = 0
    came: float = 0.0  # arrival of the newest of them in the store, in seconds since 1970; 0 if unknown


class Inbox:
    def __init__(self, wake: Callable[[], None]) -> None:
        """An empty queue; the reader's thread calls `wake` when it adds a batch."""
        self._wake, self._lock = wake, threading.Lock()
        self._batches: deque[Batch] = deque()
        self._num_tokens = self._num_outputs = 0

    def __len__(self) -> int:
        return self._num_outputs

    @property
    def is_full(self) -> bool:
        return self._num_tokens > FULL

    @property
    def is_empty(self) -> bool:
        return not self._batches

    def put(self, batch: Batch) -> None:
        """Add a batch, in pieces of at most `AT_ONCE` tokens."""
        *pieces, last = _pieces(batch.history)
        with self._lock:
            self._batches += [batch._replace(history=piece, read_to="", num_outputs=0) for piece in pieces]
            self._batches.append(batch._replace(history=last))
            self._num_tokens += len(batch.history)
            self._num_outputs += batch.num_outputs
        self._wake()

    def take(self) -> Batch | None:
        """The next batches of one tenant, joined to at most `AT_ONCE` tokens; None if there is none."""
        with self._lock:
            if not self._batches:
                return None
            taken = [self._batches.popleft()]
            tenant, num_tokens = taken[0].tenant, len(taken[0].history)
            while self._batches and self._batches[0].tenant == tenant:
                num_tokens += len(self._batches[0].history)
                if num_tokens > AT_ONCE:
                    break
                taken.append(self._batches.popleft())
            history = np.concatenate([batch.history for batch in taken])
            self._num_tokens -= len(history)
            num_outputs = sum(batch.num_outputs for batch in taken)
            self._num_outputs -= num_outputs
        read_to = next((batch.read_to for batch in reversed(taken) if batch.read_to), "")
        return Batch(tenant, history, read_to, num_outputs, max(batch.came for batch in taken))


def _pieces(history: np.ndarray) -> Iterator[np.ndarray]:
    """A history in pieces of at most `AT_ONCE` tokens, cut at ends of documents where there are any."""
    while len(history) > AT_ONCE:
        ends = np.flatnonzero(history[:AT_ONCE] == END)
        cut = int(ends[-1]) + 1 if len(ends) else AT_ONCE
        yield history[:cut]
        history = history[cut:]
    yield history
