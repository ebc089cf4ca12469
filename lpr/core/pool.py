"""A request's n-gram pool of lookahead decoding (Fu et al. 2024, section 3.2, algorithm 2). Twin: native/pool.h."""

from __future__ import annotations

from collections.abc import Sequence


class NGramPool:
    """N-grams by their first token; the least recently used are dropped first."""

    __slots__ = ("_rows", "guess_set_size", "max_keys")

    def __init__(self, guess_set_size: int, max_keys: int = 4096) -> None:
        """A pool of at most `guess_set_size` n-grams (G) for each of at most `max_keys` first tokens."""
        self.guess_set_size = guess_set_size
        self.max_keys = max_keys
        # Dictionaries keep insertion order: the last first token and the last n-gram of each are the newest.
        self._rows: dict[int, dict[tuple[int, ...], None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def add(self, ngram: Sequence[int]) -> None:
        """Remember `ngram` (at least two tokens) as the newest of its first token."""
        if self.guess_set_size < 1 or self.max_keys < 1:
            return
        key = ngram[0]
        row = self._rows.pop(key, None)
        if row is None:
            row = {}
            if len(self._rows) >= self.max_keys:
                del self._rows[next(iter(self._rows))]
        self._rows[key] = row
        entry = tuple(ngram)
        row.pop(entry, None)
        row[entry] = None
        if len(row) > self.guess_set_size:
            del row[next(iter(row))]

    def add_text(self, before: Sequence[int], tokens: Sequence[int], size: int) -> None:
        """Add the n-grams of `size` tokens that end in `tokens`, which follow `before`.

        For the prompt this is POOL_FROM_PROMPT of the authors' code.
        """
        text = [*before, *tokens]
        for end in range(max(size, len(before) + 1), len(text) + 1):
            self.add(text[end - size : end])

    def get(self, token: int) -> list[tuple[int, ...]]:
        """The n-grams that start with `token`, the newest first; marks the token as most recently used."""
        row = self._rows.pop(token, None)
        if row is None:
            return []
        self._rows[token] = row
        return list(reversed(row))
