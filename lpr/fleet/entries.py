"""An entry of a stream of drafts: one finished output, in a form that a reader can check without trusting it.

A field `d` holds MessagePack: version, origin, a number that no two entries share, the length of the prompt's part, and
the tokens as little-endian int32. Only what a suffix index uses is sent: the tail of the prompt that it can match, and
the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from lpr.core.suffix_index import END, as_learnt

VERSION = 1
FIELD = b"d"
MOST_TOKENS = 4096
"""Tokens of an entry. Of a longer output, the last ones are sent."""
MOST_BYTES = 4 * MOST_TOKENS + 256
"""Longest entry; a longer one is malformed."""
ID_BYTES = 8


class Entry(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One output of a replica."""

    version: int
    origin: bytes
    """Random id of the replica's start that wrote it."""
    number: bytes
    """Differs for each output of an origin, so that an entry sent twice is learned once."""
    num_prompt: int
    """Tokens before the output: its context."""
    tokens: bytes

    def token_ids(self) -> np.ndarray:
        """The tokens, int32 [num_tokens]."""
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
    """A history (int32 [num_tokens]) with END for ids outside the vocabulary, and the number of such ids.

    A document ends at each of them, so no draft spans the gap.
    """
    outside = (tokens < END) | (tokens >= vocab_size)
    count = int(np.count_nonzero(outside))
    return (np.where(outside, np.int32(END), tokens) if count else tokens), count
