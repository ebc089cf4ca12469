"""Recycled candidates (Token Recycling, Luo et al. 2024, arXiv 2408.08696). Twin: native/recycle.h.

Each evaluated node, accepted or not, has k most likely next tokens. The table keeps, per token, those of the last node
that held it. They widen a draft where the suffix index has no match.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

SCORE_STEPS = 16  # a score is round(-16 * ln p), at most 255: p = exp(-score / 16) within 3 %, down to 1.2e-7
MAX_SCORE = 255

_UNKNOWN: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


def probability_of(score: int) -> float:
    return math.exp(-score / SCORE_STEPS)


class CandidateTable:
    """Token -> its last seen candidates; bounded by the vocabulary."""

    __slots__ = ("_rows",)

    def __init__(self) -> None:
        self._rows: dict[int, tuple[Sequence[int], Sequence[int]]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def update(
        self, tokens: Sequence[int], candidates: Sequence[Sequence[int]], scores: Sequence[Sequence[int]]
    ) -> None:
        """Keep evaluated nodes, later ones over earlier ones.

        `tokens` is [n]; `candidates` and `scores` (0 to 255, see `SCORE_STEPS`) are [n, k], most likely first.
        """
        # Stored without conversion: every node of every step is stored, few are read.
        self._rows.update(zip(tokens, zip(candidates, scores, strict=True), strict=True))

    def get(self, token: int) -> Iterator[tuple[int, int]]:
        """Pairs of a candidate and its score, most likely first; none for an unknown token."""
        return zip(*self._rows.get(token, _UNKNOWN), strict=True)
