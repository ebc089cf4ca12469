"""An entry of a stream of drafts: one finished output, in a form that a reader can check without trusting it.

A field `d` holds MessagePack: version, origin, a number that no two entries share, the length of the prompt's part, and
the tokens as little-endian int32. What the engine cannot learn is not sent: of the prompt only the tail that a trie
can match, and no candidates or scores, which belong to one request's drafting state and not to the trie.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from lpr.core.suffix_index import END, as_learnt

VERSION = 1
FIELD = b"d"
MOST_TOKENS = 4096
"""Tokens of an entry; of a longer output the last ones are sent."""
MOST_BYTES = 4 * MOST_TOKENS + 256
"""A longer entry is none of ours."""
ID_BYTES = 8


class Entry(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One output on its way to other replicas."""

    version: int
    origin: bytes
    """Which start of which replica it comes from."""
    number: bytes
    """Differs for each output of an origin: what comes twice is learnt once."""
    num_prompt: int
    """Tokens before the output: its context."""
    tokens: bytes

    def token_ids(self) -> np.ndarray:
        """The tokens, int32 [num_tokens]."""
        return np.frombuffer(self.tokens, "<i4").astype(np.int32, copy=False)


_decoder = msgspec.msgpack.Decoder(Entry)


def encode(origin: bytes, number: bytes, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> tuple[bytes, int]:
    """The entry of an output as bytes, and how many tokens it holds: of the prompt what `as_learnt` takes."""
    tokens = np.array(as_learnt(prompt_ids, token_ids)[-MOST_TOKENS:], "<i4")
    num_prompt = max(0, len(tokens) - len(token_ids))
    return msgspec.msgpack.encode(Entry(VERSION, origin, number, num_prompt, tokens.tobytes())), len(tokens)


def decode(data: object) -> Entry | None:
    """The entry that `encode` made, or None for anything else: a stream may hold what nobody of ours wrote."""
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
    """A history without ids that the model does not know, and their number; int32 [num_tokens] both ways.

    A document ends where one is dropped, so that no draft bridges the gap. END stays what it is.
    """
    outside = (tokens < END) | (tokens >= vocab_size)
    count = int(np.count_nonzero(outside))
    return (np.where(outside, np.int32(END), tokens) if count else tokens), count
