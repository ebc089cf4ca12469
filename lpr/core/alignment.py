"""Online alignment of an output with the text that it is predicted to follow. Twin: native/alignment.h.

An output that edits a text departs from it at insertions, deletions and replacements. *Cursors* are likely places of
the next token in the text. Each has a strength, on the scale of a context match's length. A token that equals the one
at a cursor strengthens the cursor. After any other token the cursor stays (insertion) or advances (replacement), and is
weaker. If the strongest cursor fails, new cursors start after occurrences of the token: near the *anchor*, the last
certain place, which covers deletions and the end of an insertion, and wherever the text has the same context, which
covers moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lpr.core import constants
from lpr.core.suffix_index import SuffixIndex


class Alignment(NamedTuple):
    """Places of the next token in a text, as indices into the tokens of its suffix index, which never evicts."""

    cursors: tuple[tuple[int, int], ...]  # place and strength (1 to MAX_MATCH), the strongest first
    anchor: int = 0  # the latest certain place
    lost: int = 0  # tokens of the output since a place was certain

    def follow(self, index: SuffixIndex, context: Sequence[int]) -> Alignment:
        """The alignment after one more token of the output, the last of `context`."""
        tokens, token = index.tokens, context[-1]
        found: dict[int, int] = {}
        for place, strength in self.cursors:
            if tokens[place] == token:
                _offer(found, place + 1, strength + 1)
            else:
                _offer(found, place + 1, strength - constants.REPLACED_COST)
                _offer(found, place, strength - constants.INSERTED_COST)
        if not self.cursors or tokens[self.cursors[0][0]] != token:
            is_lost = self.lost >= constants.LOST_AFTER
            for place, length in () if is_lost else _near(tokens, self.anchor, context):
                _offer(found, place, length + constants.NEAR_BONUS)
            for place, length in index.match(context, constants.NODE_PLACES):
                if length >= constants.LOST_MATCH or not is_lost:
                    _offer(found, place, length)
        inside = [each for each in found.items() if each[0] < len(tokens)]
        cursors = tuple(sorted(inside, key=lambda each: -each[1])[: constants.MOST_CURSORS])
        if cursors and cursors[0][1] >= constants.SURE_STRENGTH:
            return Alignment(cursors, cursors[0][0])
        return Alignment(cursors, self.anchor, self.lost + 1)


class Prediction:
    """The text that a request's output is predicted to follow, and where the output is in it."""

    def __init__(self, tokens: Sequence[int], num_prompt: int) -> None:
        """The prediction `tokens` (at least one) of an output behind `num_prompt` tokens."""
        self.index = SuffixIndex(len(tokens))
        self.index.extend(tokens)
        self.alignment = Alignment(((0, constants.FIRST_STRENGTH),))
        self._num_unseen = num_prompt

    def observe(self, tail: Sequence[int], tokens: Sequence[int]) -> None:
        """Follow committed `tokens`, the prompt's first; `tail` are those before them."""
        skipped = min(self._num_unseen, len(tokens))
        self._num_unseen -= skipped
        known = [*tail, *tokens]
        for end in range(len(tail) + skipped + 1, len(known) + 1):
            self.alignment = self.alignment.follow(self.index, known[max(0, end - constants.MAX_MATCH) : end])

    def places(self, alignment: Alignment, last: int, agrees: bool) -> Iterator[tuple[float, int]]:
        """Weight and place of the cursors after the token `last` if `agrees`, else of those after another token."""
        tokens = self.index.tokens
        for place, strength in alignment.cursors:
            if agrees == (not place or tokens[place - 1] == last):
                yield constants.PREDICTION_TRUST * constants.WEIGHTS[strength], place


def _offer(found: dict[int, int], place: int, strength: int) -> None:
    """Add a cursor; a place keeps its greatest strength."""
    if strength > 0:
        found[place] = max(found.get(place, 0), min(strength, constants.MAX_MATCH))


def _near(tokens: Sequence[int], anchor: int, context: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Places after occurrences of the last token of `context` around `anchor`, with match lengths."""
    left = constants.NEAR_PLACES
    for place in range(max(0, anchor - constants.NEAR_BEFORE), min(anchor + constants.NEAR_AFTER, len(tokens))):
        if tokens[place] == context[-1] and left:
            left -= 1
            length, most = 1, min(len(context), constants.MAX_MATCH, place + 1)
            while length < most and tokens[place - length] == context[-1 - length]:
                length += 1
            yield place + 1, length
