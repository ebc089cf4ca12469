"""The suffix index: a trie of seen text without nodes (Zhao et al. 2024). Twin: native/suffix_index.h.

It is a token history with linked lists of equal contexts. A continuation is a place in the history, so branches need no
storage: two places share a branch as long as their tokens agree. Stored per token are the token and two links: to the
previous occurrence of the token, and to the previous occurrence of the pair that ends with it (the hash chains of LZ77
compressors, Ziv and Lempel 1977, as in Deutsch's deflate). Followed from the newest place back, the links give the most
recent occurrences of a suffix, in time independent of the size of the history.

Insertion is O(1) per token, memory O(capacity), a query O(places asked for). Single insertions are bounded too: the
oldest tokens are evicted a few at a time, and the index of pairs is split into shards, because a dictionary of a
million entries stalls for 0.1 s when it grows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from lpr.core.constants import MAX_MATCH

END = -1  # separates documents in the history; no continuation crosses it

_NONE = -1
_SHIFT = 32
_SHARDS = 61


class SuffixIndex:
    """Documents of tokens, the oldest evicted first; `tokens[position - base]` is the token at a position."""

    __slots__ = ("base", "capacity_tokens", "pairs", "previous_pair", "previous_token", "singles", "start", "tokens")

    def __init__(self, capacity_tokens: int) -> None:
        """An empty index that holds at most `capacity_tokens` tokens, ends of documents included."""
        if capacity_tokens < 1:
            raise ValueError(f"capacity_tokens={capacity_tokens} must be at least 1")
        self.capacity_tokens = capacity_tokens
        self.base = 0  # position of `tokens[0]`; positions count all tokens ever seen
        self.start = 0
        """Index into `tokens` of the oldest token held; those before it are evicted and not yet deleted."""
        self.tokens = array("i")
        self.previous_token = array("q")
        self.previous_pair = array("q")
        self.singles: dict[int, int] = {}
        self.pairs: list[dict[int, int]] = [{} for _ in range(_SHARDS)]
        """Latest position of each pair of tokens: the pair (a, b) is in `pairs[(7a + b) % 61]`, as a << 32 | b."""

    @property
    def num_entries(self) -> int:
        """Entries of all containers: tokens, two links for each, and the latest places."""
        links = len(self.previous_token) + len(self.previous_pair)
        return len(self.tokens) + links + len(self.singles) + sum(map(len, self.pairs))

    @classmethod
    def from_history(cls, tokens: Sequence[int] | np.ndarray, capacity_tokens: int) -> SuffixIndex:
        """The index of the newest `capacity_tokens` of `tokens`, whose documents are separated by END."""
        index = cls(capacity_tokens)
        index._append(np.asarray(tokens, np.int32)[-capacity_tokens:].tolist())
        return index

    def __len__(self) -> int:
        return len(self.tokens) - self.start

    def history(self) -> array[int]:
        """The tokens held, oldest first, documents separated by END."""
        return self.tokens[self.start :]

    def extend(self, tokens: Iterable[int]) -> None:
        """Append `tokens` (each >= 0) to the current document."""
        self._append(tokens)

    def end_document(self) -> None:
        """End the current document: matches and continuations never reach across this point."""
        if len(self) and self.tokens[-1] != END:
            self._append([END])

    def insert(self, history: np.ndarray) -> None:
        """Append the documents of `history`, int32 [num_tokens], separated by END; ends the last document as well.

        Into an empty index the history is copied as it is, so that its length is the same on all ranks.
        """
        if not len(self) and not self.base:
            self._append(history[-self.capacity_tokens :].tolist())
            history = history[:0]
        for token in history.tolist():
            if token == END:
                self.end_document()
            else:
                self._append([token])
        self.end_document()

    def _append(self, tokens: Iterable[int]) -> None:
        """Append tokens and ends of documents; evict the oldest beyond the capacity."""
        history, singles, pairs = self.tokens, self.singles, self.pairs
        last = history[-1] if len(self) else END
        position = self.base + len(history)
        limit = self.capacity_tokens + self.start
        for token in tokens:
            history.append(token)
            self.previous_token.append(_NONE if token == END else singles.get(token, _NONE))
            if token != END:
                singles[token] = position
            if END in (last, token):
                self.previous_pair.append(_NONE)
            else:
                key = last << _SHIFT | token
                shard = pairs[(7 * last + token) % _SHARDS]
                self.previous_pair.append(shard.get(key, _NONE))
                shard[key] = position
            last = token
            position += 1
            if len(history) > limit:
                limit = self._evict()

    def _evict(self) -> int:
        """Evict the oldest tokens, a few more than needed; returns the new maximum length of `tokens`.

        The arrays are cut only when a 16th of the capacity is evicted, so moving the rest is O(1) per token.
        """
        history, base, start = self.tokens, self.base, self.start
        stop = start + max(len(self) - self.capacity_tokens, min(64, self.capacity_tokens // 64))
        last = END
        for index in range(start, stop):
            token = history[index]
            if token != END:
                if self.singles[token] == base + index:
                    del self.singles[token]
                if last != END:
                    self._forget_pair(last, token, base + index)
            last = token
        # The first token kept lost its left neighbour: its pair can no longer be matched or found for deletion.
        if last != END and stop < len(history) and history[stop] != END:
            self._forget_pair(last, history[stop], base + stop)
        self.start = stop
        if stop > self.capacity_tokens // 16:
            del history[:stop], self.previous_token[:stop], self.previous_pair[:stop]
            self.base += stop
            self.start = 0
        return self.capacity_tokens + self.start

    def _forget_pair(self, left: int, right: int, position: int) -> None:
        """Delete the pair from the index if its latest occurrence is at `position`."""
        shard, key = self.pairs[(7 * left + right) % _SHARDS], left << _SHIFT | right
        if shard[key] == position:
            del shard[key]

    def match(self, suffix: Sequence[int], limit: int = 64) -> list[tuple[int, int]]:
        """Places after the end of `suffix`: index into `tokens` of the token that followed, and match length.

        These are the `limit` latest places where the last two tokens agree, the newest first, without those that end
        a document. Match lengths (2 to `MAX_MATCH`) do not cross the start of a document.
        """
        found: list[tuple[int, int]] = []
        if len(suffix) < 2:
            return found
        history, base, links = self.tokens, self.base, self.previous_pair
        size = len(history)
        reach = min(len(suffix), MAX_MATCH)
        left, right = suffix[-2], suffix[-1]
        index = self.pairs[(7 * left + right) % _SHARDS].get(left << _SHIFT | right, _NONE) - base
        start = self.start  # the token here has no left neighbour any more, so no pair ends here
        while index > start and limit:
            limit -= 1
            after = index + 1
            if after < size and history[after] >= 0:
                length = 2
                most = min(reach, after - start)
                while length < most and history[index - length] == suffix[-1 - length]:
                    length += 1
                found.append((after, length))
            index = links[index] - base
        return found

    def match_last(self, token: int, limit: int = 16) -> list[int]:
        """Indices into `tokens` of the tokens after the latest occurrences of `token`, the newest first."""
        history, base, links = self.tokens, self.base, self.previous_token
        size, start = len(history), self.start
        found: list[int] = []
        index = self.singles.get(token, _NONE) - base
        while index >= start and limit:
            limit -= 1
            after = index + 1
            if after < size and history[after] >= 0:
                found.append(after)
            index = links[index] - base
        return found


def as_learnt(prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[int]:
    """The document of a finished output: the end of its prompt, as long as the longest match, and the output.

    If the same prompt comes again, its first step finds the output. More of the prompt gains nothing (dev/LOG.md).
    """
    return [*prompt_ids[-MAX_MATCH:], *token_ids]
