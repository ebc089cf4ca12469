"""The guesses of a model's multi-token-prediction head, or of its low-bit copy, for one draft. Twin: native/heads.h.

The head runs before the gather, on the rank that evaluated the end of the accepted path, and guesses the tokens after
the bonus token. The gather carries these guesses. They form a small tree. A guess is evidence, beside that of known
text, at the draft node that has the same tokens below the root (lpr.core.drafting).

A block of the payload is int32 words, equally many for each tree (rule R2): the node that ends the path, the bonus
token, the number of guesses with `COPY_BIT`, and per guess its token and a word with its parent's number (high 16 bits)
and its probability (low 16 bits).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lpr.core import constants

NUM_BLOCK_HEADER = 3
FROM_ROOT = -1
"""Value of the path's end in the block of a rank that only drafts: its guesses follow the root of the step's tree."""
COPY_BIT = 16  # bit in the word of the number of guesses: 1 for guesses of the low-bit copy, 0 for those of a head
PROBABILITY_STEPS = 65535  # a probability travels as a multiple of 1 / PROBABILITY_STEPS
Place = tuple[float, Sequence[int], int, int]


def block_words(num_guesses: int) -> int:
    """Words of a block for up to `num_guesses` guesses; 0 without a head."""
    return NUM_BLOCK_HEADER + 2 * num_guesses if num_guesses else 0


@dataclass
class HeadDraft:
    """Guess 0 is the last committed token; guess i > 0 is `tokens[i]` after `parents[i] < i`."""

    tokens: list[int] = field(default_factory=lambda: [-1])
    parents: list[int] = field(default_factory=lambda: [-1])
    steps: list[int] = field(default_factory=lambda: [0])  # the probability after the parent, in PROBABILITY_STEPS
    is_copy: bool = False  # True for guesses of the model's low-bit copy (lpr.model.self_draft)

    def add(self, parent: int, token: int, steps: int) -> int:
        """Add a guess; returns its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.steps.append(steps)
        return len(self.tokens) - 1

    def child(self, guess: int, token: int) -> int:
        """The guess of `token` after `guess`; -1 if there is none."""
        pairs = zip(self.parents, self.tokens, strict=True)
        return next((number for number, pair in enumerate(pairs) if pair == (guess, token)), -1)

    def places(self, guess: int, offset: int) -> list[Place]:
        """The evidence for what follows `guess`: one-token places, whose token is read at `offset`."""
        weight = constants.HEAD_WEIGHT / PROBABILITY_STEPS
        source = constants.COPY_KIND if self.is_copy else constants.HEAD_KIND
        return [
            (weight * steps, (token,), -offset, source)
            for token, parent, steps in zip(self.tokens, self.parents, self.steps, strict=True)
            if parent == guess
        ]

    def pack(self, end: int, bonus: int, num_guesses: int) -> np.ndarray:
        """The block [words] of guesses after the bonus token, for a path that ends at node `end`."""
        words = np.zeros(block_words(num_guesses), np.int32)
        count = min(num_guesses, len(self.tokens) - 1)
        words[:NUM_BLOCK_HEADER] = end, bonus, count | self.is_copy << COPY_BIT
        pairs = words[NUM_BLOCK_HEADER : NUM_BLOCK_HEADER + 2 * count].reshape(-1, 2)
        pairs[:, 0] = self.tokens[1 : count + 1]
        pairs[:, 1] = [self.parents[guess] << 16 | self.steps[guess] for guess in range(1, count + 1)]
        return words

    def behind(self, tokens: Sequence[int]) -> HeadDraft:
        """The guesses after these tokens; empty if it has not guessed the tokens themselves."""
        guess, found = 0, HeadDraft(is_copy=self.is_copy)
        for token in tokens:
            if (guess := self.child(guess, token)) < 0:
                return found
        found.merge(self, guess)
        return found

    def merge(self, other: HeadDraft, behind: int = 0) -> None:
        """Add the descendants of guess number `behind` of another draft, below the last committed token."""
        places = {behind: 0}
        for guess in range(behind + 1, len(other.tokens)):
            if (parent := places.get(other.parents[guess], -1)) >= 0:
                known = self.child(parent, other.tokens[guess])
                places[guess] = known if known >= 0 else self.add(parent, other.tokens[guess], other.steps[guess])

    def path_to(self, guess: int) -> list[int]:
        """The guesses from the first one after the last committed token to `guess`."""
        path: list[int] = []
        while guess > 0:
            path.append(guess)
            guess = self.parents[guess]
        return path[::-1]


def read_ahead(blocks: Iterable[np.ndarray], emitted: Sequence[int]) -> HeadDraft | None:
    """The guesses of draft-only ranks after the tokens that a step has emitted, from their blocks; None without any."""
    draft = HeadDraft(is_copy=True)
    for block in blocks:
        if (found := read_block(block, FROM_ROOT, 0)) is not None:
            draft.merge(found.behind(emitted))
    return draft if len(draft.tokens) > 1 else None


def read_block(block: np.ndarray, end: int, bonus: int) -> HeadDraft | None:
    """The guesses of a block [words] if it is for a path that ended at node `end` with `bonus`; else None."""
    pairs, count = block[NUM_BLOCK_HEADER:].reshape(-1, 2), int(block[2]) & (1 << COPY_BIT) - 1
    draft = HeadDraft(is_copy=bool(int(block[2]) >> COPY_BIT & 1))
    if block[0] != end or block[1] != bonus or not 0 < count <= len(pairs):
        return None
    for token, word in pairs[:count].tolist():
        if token < 0 or not 0 <= word >> 16 < len(draft.tokens):
            return None
        draft.add(word >> 16, token, word & PROBABILITY_STEPS)
    return draft
