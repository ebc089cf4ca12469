"""The trie of seen text, without nodes: a token history and chains of equal contexts through it.

A continuation is a place in the history, so the branches of a trie need no storage of their own: two places
share a branch for as long as their tokens agree. What is stored per token is the token and two links, to the
previous place where the same token ended and to the previous place where the same two tokens ended (the hash
chains of LZ77 compressors, Ziv and Lempel 1977, after Deutsch's deflate). Following the links from the newest
place back gives the most recent occurrences of a suffix, whatever the size of the history.

Insertion is O(1) per token, memory is O(capacity), a query costs O(places asked for).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

END = -1
"""Stands in the history between documents, where no continuation goes on."""

MAX_MATCH = 16
"""Longest match length that is told apart; more agreeing tokens say nothing more about the next one."""

_NONE = -1
_SHIFT = 32


class Trie:
    """Documents of tokens, the oldest forgotten first; `tokens[position - base]` is the token at a position."""

    __slots__ = ("base", "capacity_tokens", "pairs", "previous_pair", "previous_token", "singles", "tokens")

    def __init__(self, capacity_tokens: int) -> None:
        """An empty trie that holds at most `capacity_tokens` tokens, ends of documents included."""
        if capacity_tokens < 1:
            raise ValueError(f"capacity_tokens={capacity_tokens} must be at least 1")
        self.capacity_tokens = capacity_tokens
        self.base = 0
        """Position of the oldest token held; positions count all tokens ever seen."""
        self.tokens = array("i")
        self.previous_token = array("q")
        self.previous_pair = array("q")
        self.singles: dict[int, int] = {}
        self.pairs: dict[int, int] = {}

    def __len__(self) -> int:
        """Tokens held, ends of documents included."""
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append `tokens` (each >= 0) to the current document."""
        history, singles, pairs = self.tokens, self.singles, self.pairs
        last = history[-1] if history else END
        position = self.base + len(history)
        for token in tokens:
            history.append(token)
            self.previous_token.append(singles.get(token, _NONE))
            singles[token] = position
            if last == END:
                self.previous_pair.append(_NONE)
            else:
                key = last << _SHIFT | token
                self.previous_pair.append(pairs.get(key, _NONE))
                pairs[key] = position
            last = token
            position += 1
            if len(history) > self.capacity_tokens:
                self._evict()

    def end_document(self) -> None:
        """End the current document: matches and continuations never reach across this point."""
        if self.tokens and self.tokens[-1] != END:
            self.tokens.append(END)
            self.previous_token.append(_NONE)
            self.previous_pair.append(_NONE)
            if len(self.tokens) > self.capacity_tokens:
                self._evict()

    def _evict(self) -> None:
        """Forget a 64th of the capacity at once: moving the rest down then costs O(1) per token."""
        history, base = self.tokens, self.base
        count = max(len(history) - self.capacity_tokens, self.capacity_tokens // 64)
        last = END
        for index in range(count):
            token = history[index]
            if token != END:
                if self.singles[token] == base + index:
                    del self.singles[token]
                if last != END and self.pairs[last << _SHIFT | token] == base + index:
                    del self.pairs[last << _SHIFT | token]
            last = token
        # The first token kept lost its left neighbour: its pair can no longer be matched or found for deletion.
        if last != END and count < len(history) and history[count] != END:
            key = last << _SHIFT | history[count]
            if self.pairs[key] == base + count:
                del self.pairs[key]
        del history[:count], self.previous_token[:count], self.previous_pair[:count]
        self.base += count

    def match(self, suffix: Sequence[int], limit: int = 64) -> list[tuple[int, int]]:
        """Find where the end of `suffix` was seen: (index into `tokens` of what followed, match length).

        Looks at the `limit` latest places where the last two tokens agree, the newest first, and leaves out
        those that nothing follows. Match lengths (2 to `MAX_MATCH`) do not cross the start of a document.
        """
        found: list[tuple[int, int]] = []
        if len(suffix) < 2:
            return found
        history, base, links = self.tokens, self.base, self.previous_pair
        size = len(history)
        reach = min(len(suffix), MAX_MATCH)
        index = self.pairs.get(suffix[-2] << _SHIFT | suffix[-1], _NONE) - base
        # Index 0 has lost its left neighbour, so no pair ends there.
        while index > 0 and limit:
            limit -= 1
            after = index + 1
            if after < size and history[after] >= 0:
                length = 2
                most = min(reach, after)
                while length < most and history[index - length] == suffix[-1 - length]:
                    length += 1
                found.append((after, length))
            index = links[index] - base
        return found

    def continuation(self, index: int, length: int) -> list[int]:
        """Up to `length` tokens from `index` into `tokens` on, to the end of the document at most."""
        tokens = self.tokens[index : index + length].tolist()
        return tokens[: tokens.index(END)] if END in tokens else tokens

    def match_last(self, token: int, limit: int = 16) -> list[int]:
        """Indices into `tokens` of what followed the latest occurrences of `token`, the newest first."""
        history, base, links = self.tokens, self.base, self.previous_token
        size = len(history)
        found: list[int] = []
        index = self.singles.get(token, _NONE) - base
        while index >= 0 and limit:
            limit -= 1
            after = index + 1
            if after < size and history[after] >= 0:
                found.append(after)
            index = links[index] - base
        return found
