"""The heap of a draft, in which the evidence of all sources competes (see lpr.core.drafting). Twin: native/search.h."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from math import ldexp
from typing import Any

from lpr.core import constants
from lpr.core.alignment import Alignment, Prediction
from lpr.core.budget import Price, band_of
from lpr.core.calibration import cell_within, first_cell
from lpr.core.heads import HeadDraft
from lpr.core.noise_keys import KnownNoise
from lpr.core.tree import Source, TokenTree

Place = tuple[float, Sequence[int], int, int]
"""Weight, text, index of the next token in it (a negative token ends the text), source."""
FindPlaces = Callable[[list[int], int], list[Place]]
"""A source: the evidence for what follows a context, given the depth of the node that ends it."""
Tried = Mapping[int, object]
_NOTHING: Tried = {}

_HELD = int(Source.WINDOW)
_HELD_TOO = _HELD + constants.SEVERAL
_PREDICTED_ORDERS = (0, 2)
_GUESSES = (constants.HEAD_KIND, constants.COPY_KIND)
_KINDS_OF_HEAD = (constants.HEAD_KIND, constants.HEAD_KIND + constants.SEVERAL)
_ESCAPE = -1
_RECENT = -2


class Search:
    """The heap of one draft; each iteration adds the best remaining node and yields its evidence.

    Heap entries are (-probability, serial number, node, token, payload, offset): a new child of `node`, with its
    cell and evidence as payload; an escape, with (next source, reserved probability, tokens already tried) as payload;
    or a recent token (see `_try_recent`).
    """

    def __init__(
        self,
        tree: TokenTree,
        sources: list[FindPlaces],
        tail: list[int],
        recent: list[int],
        frequencies: Sequence[float],
        limit: int,
        price: Price | None,
        noise: KnownNoise,
    ) -> None:
        """A search that ends at `limit` nodes, or when the best entry is below the floor of `price`."""
        self._tree = tree
        self._sources = sources
        self._tail = tail
        self._recent = recent
        self._frequencies = frequencies
        self._limit = limit
        self._price = price
        self._noise = noise
        self._orders: dict[int, list[tuple[float, int, int]]] = {}
        self._heap: list[tuple[float, int, int, int, Any, int]] = []
        self._serial = 0
        self.prediction: Prediction | None = None
        self.trusts: Sequence[float] | None = None
        self._alignments: dict[int, Alignment] = {}
        self.head: HeadDraft | None = None
        self._guesses: dict[int, int] = {0: 0}

    def expand(
        self, node: int, probability: float, places: list[Place], offset: int, order: int = 0, tried: Tried = _NOTHING
    ) -> None:
        """Push the children of `node` that `places` give at `offset`, or those of the first source that has any."""
        heap, serial = self._heap, self._serial
        held = _NOTHING if order or tried else self._tree.children[node]
        guessed = [] if order or tried else self._guessed(node, offset)
        if places:
            places = [*guessed, *places]
        stage = 0
        while True:
            rows: dict[int, list[Any]] = {}  # token -> [weight, places...]
            total = guessed_total = 0.0
            for place in places:
                try:
                    token = place[1][place[2] + offset]
                except IndexError:
                    continue
                if token < 0:
                    continue
                weight = place[0]
                if place[3] in _GUESSES:
                    guessed_total += weight
                else:
                    total += weight
                if token in tried:
                    continue
                row = rows.get(token)
                if row is None:
                    rows[token] = [weight, place]
                else:
                    row[0] += weight
                    row.append(place)
            if rows:
                break
            if order == len(self._sources):
                if held:
                    break
                self._try_recent(node, probability, probability, 0, tried)
                return
            places, offset = self._sources[order](self._context(node), self._tree.depths[node]), 0
            if self.prediction is not None and order in _PREDICTED_ORDERS:
                places = [*self._predicted(self.prediction, node, order == 0), *places]
            if not order:
                places = [*guessed, *places]
            stage = order
            order += 1
        for token in held:
            if token not in rows:
                rows[token] = [0.0]
        total += (
            constants.NOVELTIES[offset] if offset < constants.MAX_MATCH else constants.NOVELTIES[constants.MAX_MATCH]
        )
        frequencies = self._frequencies
        depth = self._tree.depths[node]
        first = first_cell(stage, depth)
        known = copied = 0.0
        is_copied = self._is_copied(node)
        chances: list[tuple[int, list[Any], float, bool]] = []
        for token, row in rows.items():
            if is_copied and len(row) > 1 and row[1][3] == constants.COPY_KIND:
                kind = constants.COPY_KIND + constants.SEVERAL * (len(row) > 2 or token in held)
                share = row[1][0]
                row[0] = cell = first + cell_within(kind, share / (constants.HEAD_WEIGHT - share))
                copied += frequencies[cell]
                chances.append((token, row, frequencies[cell], True))
                continue
            if token in held:
                kind = _HELD_TOO if len(row) > 1 else _HELD
            else:
                kind = row[1][3] if len(row) == 2 else row[1][3] + constants.SEVERAL
            octaves = 0 if kind in _KINDS_OF_HEAD else self._noise.octaves(depth, token)
            # The weight of head guesses does not count for tokens that only text proposes: a bad head does not dilute
            # text.
            whole = total + guessed_total if len(row) > 1 and row[1][3] == constants.HEAD_KIND else total
            cell = first + cell_within(kind, ldexp(row[0] / (whole - row[0]), octaves))
            row[0] = -1 if is_copied else cell
            known += frequencies[cell]
            chances.append((token, row, frequencies[cell], False))
        # Children from text share the rest: the copy's choice already accounts for the text.
        by_copy = probability if copied <= constants.MOST_KNOWN else probability * constants.MOST_KNOWN / copied
        rest = probability - by_copy * copied
        scale = rest if known <= constants.MOST_KNOWN else rest * constants.MOST_KNOWN / known
        step = self._step_of_trust(depth + 1)
        by_copy, trusted = by_copy * step, scale * step
        for token, row, frequency, is_copy in chances:
            serial += 1
            chance = min(probability, (by_copy if is_copy else trusted) * frequency)
            heappush(heap, (-chance, serial, node, token, row, offset + 1))
        self._serial = serial
        self.ask_later(node, rest - scale * known, order, {**rows, **tried} if tried else rows)

    def ask_later(self, node: int, kept: float, order: int, tried: Tried) -> None:
        """Push an escape: when popped, source number `order` distributes `kept` among new children of `node`."""
        self._serial += 1
        heappush(self._heap, (-constants.DELAY * kept, self._serial, node, _ESCAPE, (order, kept, tried), 0))

    def __iter__(self) -> Iterator[tuple[int, float, list[Place], int, int]]:
        """Yield (node, path probability, evidence for its children, offset into it, cell); no node twice."""
        tree, heap, price = self._tree, self._heap, self._price
        while heap:
            rank, _, node, token, payload, offset = heappop(heap)
            if price is not None and -rank < price.floor:
                return
            if token == _ESCAPE:
                order, kept, tried = payload
                self.expand(node, kept, [], 0, order, tried)
                continue
            places: list[Place] = []
            source = int(Source.TRIE)
            if token == _RECENT:
                index, kept, left, tried, cell = payload
                token = self._recent[self._recent_order(tree.depths[node])[index][1]]
                self._try_recent(node, kept, left + rank / self._step_of_trust(tree.depths[node] + 1), index + 1, tried)
            else:
                cell, *places = payload
                if places:
                    source = places[0][3]
            if len(tree) == self._limit and token not in tree.children[node]:
                return
            yield tree.add(node, token, source), -rank, places, offset, cell

    def _try_recent(self, node: int, kept: float, left: float, index: int, tried: Tried) -> None:
        """Push the next untried recent token as a child of `node`; `left` of `kept` remains after earlier ones."""
        recent, order = self._recent, self._recent_order(self._tree.depths[node])
        while index < len(order) and recent[order[index][1]] in tried:
            index += 1
        if index < len(order):
            self._serial += 1
            frequency, _, cell = order[index]
            probability = min(kept * -frequency, left) * self._step_of_trust(self._tree.depths[node] + 1)
            payload = (index, kept, left, tried, -1 if self._is_copied(node) else cell)
            heappush(self._heap, (-probability, self._serial, node, _RECENT, payload, 0))

    def _step_of_trust(self, depth: int) -> float:
        """Trust of this depth over that of its parent's: 1 except at the first depth of a band."""
        if self.trusts is None or depth & (depth - 1):
            return 1.0
        return self.trusts[band_of(depth)] / (self.trusts[band_of(depth - 1)] if depth > 1 else 1.0)

    def _recent_order(self, depth: int) -> list[tuple[float, int, int]]:
        """(-frequency, index, cell) of the recent tokens for nodes at `depth`.

        They are in order of recency or, if the sampling noise is known, of likelihood.
        """
        order = self._orders.get(depth)
        if order is None:
            first, order = first_cell(constants.RECENT_STAGE, depth), []
            for rank, token in enumerate(self._recent):
                cell = first + cell_within(
                    constants.RECENT_KIND, ldexp(1.0 / (rank + 1), self._noise.octaves(depth, token))
                )
                order.append((-self._frequencies[cell], rank, cell))
            if self._noise.is_known:
                order.sort()
            self._orders[depth] = order
        return order

    def _predicted(self, prediction: Prediction, node: int, agrees: bool) -> list[Place]:
        """The places of the prediction after `node` (Prediction.places)."""
        alignments = self._alignments
        alignments.setdefault(0, prediction.alignment)
        above, below = node, list[int]()
        while above not in alignments:
            below.append(above)
            above = self._tree.parents[above]
        for each in reversed(below):
            alignments[each] = alignments[self._tree.parents[each]].follow(prediction.index, self._context(each))
        tokens = prediction.index.tokens
        found = prediction.places(alignments[node], self._tree.tokens[node], agrees)
        return [(weight, tokens, place, int(Source.PREDICTION)) for weight, place in found]

    def _guessed(self, node: int, offset: int) -> list[Place]:
        """The head's guesses after `node`, as places whose token is read at `offset`."""
        head = self.head
        guess = -1 if head is None else self._guess_of(head, node)
        return [] if head is None or guess < 0 else head.places(guess, offset)

    def _is_copied(self, node: int) -> bool:
        """True if the model's low-bit copy has guessed the token after `node`.

        Other proposals there are right only if the copy is wrong, so they do not count in the calibration.
        """
        if self.head is None or not self.head.is_copy:
            return False
        guess = self._guess_of(self.head, node)
        return guess >= 0 and guess in self.head.parents[1:]

    def _guess_of(self, head: HeadDraft, node: int) -> int:
        """The number of the guess at `node`; -1 if the head has not guessed it."""
        if node not in self._guesses:
            above = self._guess_of(head, self._tree.parents[node])
            self._guesses[node] = head.child(above, self._tree.tokens[node]) if above >= 0 else -1
        return self._guesses[node]

    def _context(self, node: int) -> list[int]:
        """The last tokens up to and including `node`; enough of them for the longest match."""
        tokens, parents = self._tree.tokens, self._tree.parents
        path: list[int] = []
        while node and len(path) < constants.MAX_MATCH:
            path.append(tokens[node])
            node = parents[node]
        path.reverse()
        return self._tail + path
