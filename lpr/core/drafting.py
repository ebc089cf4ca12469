"""Best-first drafting: the evidence of all sources in one heap. Twins: native/drafting.h, native/search.h.

The evidence for what follows a node is a list of *places* in known text whose left context agrees with the node's:
places in the request's own suffix index, in the shared one, in pooled n-grams, or among recycled candidates. A child's
score is its share of the evidence's weight, of which a part is kept back for tokens that the evidence does not hold
(the escape of PPM, Cleary and Witten 1984):

    score(child) = weight(child) / (weight(all) + novelty)
    p(child) = p(node) * how often children of such a score were right        (lpr.core.calibration)

A child inherits the places that led to it, one token further on, so a copied passage costs one step of an index per
node. The probability that the children leave of p(node) is an entry of the same heap, the escape: when its turn comes,
the next source, in order of falling context (two tokens, one token, a context with one token replaced, none), shares
that probability out. So the budget goes to depth where a long match is sure of itself and to breadth elsewhere, and a
source costs nothing until its turn comes. Nodes that the tree held before (the Jacobi window's) are children like
others and cost no budget.

A model with prediction heads guesses what follows the last token (lpr.core.heads). Its guesses join the evidence of
the first source at the nodes that they reach. Those of a low-bit copy of the model come before all evidence: its share
alone chooses their cells, and what they leave of p(node) is shared out among the others.

A request may bring a prediction of its output (lpr.core.alignment). Its cursors behind the node's token are asked with
the first source, the others with the one that replaces a token.

Recycled candidates count by their context (lpr.core.evaluated): those that followed the last token where the context
agrees longest, and those of rejected siblings; where there are none, the table's. A request's sampling noise is known
and changes a child's odds (lpr.core.noise_keys).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import islice
from math import ldexp
from typing import Any

from lpr.config import TreeSizes
from lpr.core import constants
from lpr.core.alignment import Alignment, Prediction
from lpr.core.budget import Price, band_of
from lpr.core.calibration import Calibration, cell_within, first_cell
from lpr.core.evaluated import EvaluatedNodes
from lpr.core.heads import HeadDraft
from lpr.core.noise_keys import KnownNoise
from lpr.core.pool import NGramPool
from lpr.core.recycle import CandidateTable
from lpr.core.suffix_index import SuffixIndex
from lpr.core.tree import Source, TokenTree

Place = tuple[float, Sequence[int], int, int]
"""Weight, text, index of the next token in it (a negative token ends the text), source."""
FindPlaces = Callable[[list[int], int], list[Place]]
"""A source: the evidence for what follows a context, given the depth of the node that ends it."""
Tried = Mapping[int, object]
_NOTHING: Tried = {}

_RECYCLED_SOURCE = int(Source.RECYCLED)
_HELD = int(Source.WINDOW)
_HELD_TOO = _HELD + constants.SEVERAL
_PREDICTED_ORDERS = (0, 2)
_GUESSES = (constants.HEAD_KIND, constants.COPY_KIND)
_KINDS_OF_HEAD = (constants.HEAD_KIND, constants.HEAD_KIND + constants.SEVERAL)
_ESCAPE = -1
_RECENT = -2


class Drafter:
    """Drafts for one sequence. Deterministic: the same observations, shared index and table give the same tree."""

    def __init__(
        self,
        config: TreeSizes,
        shared: SuffixIndex | None = None,
        table: CandidateTable | None = None,
        seed: int | None = None,
        prediction: Sequence[int] = (),
        num_prompt: int = 0,
    ) -> None:
        """A drafter that only reads the `shared` suffix index and the `table` of recycled candidates.

        `seed` is that of a request that samples, 64 bits. The output, behind `num_prompt` tokens, is expected to follow
        `prediction` where it can.
        """
        self.config = config
        self.seed = seed
        self.calibration = Calibration(seed is not None)
        self.pool = NGramPool(config.guess_set_size if config.window_size else 0)
        self._own = SuffixIndex(config.trie_capacity)
        self._indexes = [(self._own, 1.0, int(Source.TRIE))]
        if shared is not None:
            self._indexes.append((shared, constants.SHARED_TRUST, int(Source.SHARED_TRIE)))
        self._table = table
        self._tail: list[int] = []
        self._num_observed = 0
        self._evaluated = EvaluatedNodes()
        self._cells: list[int] = []  # of the last draft's nodes
        self._recent: dict[int, None] = {}  # in the order of last use
        self.head: HeadDraft | None = None
        """The guesses of the model's head for the next draft."""
        self._prediction = Prediction(prediction, num_prompt) if len(prediction) and config.trie_nodes else None
        self._sources: list[FindPlaces] = [self._ngrams]
        if config.trie_nodes:
            self._sources = [self._two_tokens, self._one_token, self._one_replaced]

    def observe(self, tokens: Sequence[int]) -> None:
        """Add committed tokens in order, the prompt first."""
        if self.config.trie_nodes:
            self._own.extend(tokens)
            recent = self._recent
            for token in tokens:
                recent.pop(token, None)
                recent[token] = None
        elif self.pool.guess_set_size:  # a suffix index holds them
            self.pool.add_text(self._tail, tokens, self.config.ngram_size)
        if self._prediction is not None:
            self._prediction.observe(self._tail, tokens)
        self._tail = [*self._tail, *tokens[-constants.MAX_MATCH :]][-constants.MAX_MATCH :]
        self._num_observed += len(tokens)

    def draft(
        self,
        tree: TokenTree,
        budget: int,
        max_depth: int | None = None,
        price: Price | None = None,
        trusts: Sequence[float] | None = None,
    ) -> list[float]:
        """Add up to `budget` nodes to `tree`, best first; return each node's calibrated path probability.

        The tree's root is the last observed token. A node that the tree already holds costs no budget. No node is
        deeper than `config.branch_length` or `max_depth`. The list is [len(tree)], 1 at the root and 0 at nodes held
        before that are less likely than those drafted; the probabilities of a node's children sum to its own at most.
        A larger budget adds nodes and changes none. The draft ends where the best remaining entry is less likely than
        the floor of `price`. Path probabilities count `trusts` times, by band of depths (lpr.core.budget.band_of).
        """
        deepest = self.config.branch_length if max_depth is None else min(self.config.branch_length, max_depth)
        probabilities = [1.0] + [0.0] * (len(tree) - 1)
        self._cells = [-1] * len(tree)
        if deepest < 1 or (budget < 1 and len(tree) == 1):
            return probabilities
        recent = list(islice(reversed(self._recent), constants.RECENT_TOKENS))
        limit = len(tree) + max(0, budget)
        noise = KnownNoise(self.seed, self._num_observed)
        search = _Search(tree, self._sources, self._tail, recent, self.calibration.frequencies, limit, price, noise)
        search.prediction, search.head = self._prediction, self.head if self.config.trie_nodes else None
        search.trusts = trusts
        search.expand(0, 1.0, [], 0)
        for node, probability, places, offset, cell in search:
            if node == len(probabilities):
                probabilities.append(probability)
                self._cells.append(cell)
                if price is not None:
                    price.take(probability)
            else:
                probabilities[node] = probability
                self._cells[node] = cell
            if tree.depths[node] < deepest:
                if places:
                    search.expand(node, probability, places, offset)
                else:
                    search.ask_later(node, probability, 0, {})
        return probabilities

    def learn(self, tree: TokenTree, path: Sequence[int], is_open: bool = False) -> None:
        """Calibrate by the accepted `path` of `tree`, which the last draft made; before `observe`.

        A path that `is_open` ends with the last known token (Calibration.observe).
        """
        self.calibration.observe(tree, path, self._cells, is_open)

    @property
    def cells(self) -> list[int]:
        """Of the last draft's nodes, -1 where no source of the search proposed one (lpr.core.calibration)."""
        return self._cells

    def keep_candidates(
        self,
        tree: TokenTree,
        path: Sequence[int],
        candidates: Sequence[Sequence[int]],
        scores: Sequence[Sequence[int]],
    ) -> None:
        """Keep the candidates and scores of all nodes of `tree`, which accepted `path`; before `observe`."""
        if self.config.trie_nodes:
            before = self._tail[-2] if len(self._tail) > 1 else -1
            self._evaluated.keep(tree, path, self._num_observed, before, candidates, scores)

    def continuation(self, tokens: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """The likeliest text behind the last observed token and `tokens`: up to `count` tokens, and the share of each.

        It follows the matches of the last two tokens and more; [] where the text has none.
        """
        if not self.config.trie_nodes:
            return [], []
        context = [*self._tail, *tokens][-constants.MAX_MATCH :]
        places = [
            (trust * constants.WEIGHTS[length], index.tokens, place)
            for index, trust, _ in self._indexes
            for place, length in index.match(context, constants.NODE_PLACES)
        ]
        found, shares = list[int](), list[float]()
        while len(found) < count and places:
            offset, total = len(found), 0.0
            weights: dict[int, float] = {}
            for weight, text, place in places:
                token = text[place + offset] if place + offset < len(text) else -1
                if token >= 0:
                    total += weight
                    weights[token] = weights.get(token, 0.0) + weight
            if not weights:
                break
            best = max(weights, key=weights.__getitem__)  # of equals the first
            found.append(best)
            shares.append(weights[best] / (total + constants.NOVELTIES[min(offset, constants.MAX_MATCH)]))
            places = [each for each in places if each[2] + offset < len(each[1]) and each[1][each[2] + offset] == best]
        return found, shares

    # Sources: each returns the evidence for the token after `context`, the tokens up to and including a node.

    def _two_tokens(self, context: list[int], depth: int) -> list[Place]:
        """Places after at least the last two tokens and, at the root, the pooled n-grams."""
        places = [] if depth else self._ngrams(context, depth)
        limit = constants.NODE_PLACES if depth else constants.ROOT_PLACES
        for index, trust, source in self._indexes:
            tokens = index.tokens
            for place, length in index.match(context, limit):
                places.append((trust * constants.WEIGHTS[length], tokens, place, source))
        return places

    def _ngrams(self, context: list[int], depth: int) -> list[Place]:
        """The pooled n-grams that start with the root."""
        if depth:
            return []
        return [
            (constants.WEIGHTS[constants.POOL_MATCH], ngram, 1, int(Source.POOL))
            for ngram in self.pool.get(context[-1])
        ]

    def _one_token(self, context: list[int], depth: int) -> list[Place]:
        """Places after the last token, and its recycled candidates."""
        last = context[-1]
        places: list[Place] = []
        for index, trust, source in self._indexes:
            tokens, weight = index.tokens, trust * constants.GROWTH
            for place in index.match_last(last, constants.NODE_PLACES):
                places.append((weight, tokens, place, source))
        if self._table is not None:
            own = [place for _, _, place, source in places if source == Source.TRIE]
            rows = self._evaluated.nearest(self._own, own, context)
            _add_candidates(places, [zip(*row, strict=True) for row in rows] or [self._table.get(last)], 1.0)
            if depth <= constants.MAX_MATCH:
                rows = self._evaluated.of_siblings(self._num_observed, context[len(context) - depth :])
                _add_candidates(places, [zip(*row, strict=True) for row in rows], constants.SIBLING_TRUST)
        return places

    def _one_replaced(self, context: list[int], depth: int) -> list[Place]:
        """Places after the tokens before the last: text that goes on after one replaced token."""
        before = context[:-1]
        places: list[Place] = []
        for index, trust, source in self._indexes:
            tokens, trust = index.tokens, constants.REPLACED_TRUST * trust
            for place, length in index.match(before, constants.NODE_PLACES):
                places.append((trust * constants.WEIGHTS[length - 1], tokens, place + 1, source))
        return places


def _add_candidates(places: list[Place], rows: Sequence[Iterable[tuple[int, int]]], trust: float) -> None:
    """Add rows of candidates and scores, which share their weight, to `places`."""
    share = trust / max(1, len(rows))
    for row in rows:
        for token, score in row:
            places.append((share * constants.CANDIDATE_WEIGHTS[score], (token,), 0, _RECYCLED_SOURCE))


class _Search:
    """The heap of one draft; iterating adds the best node left and yields what led to it.

    Heap entries are (-rank, serial number, node, token, payload, offset): a child to make of `node`, with its
    cell and evidence as payload, an escape, whose payload is (next source, probability kept back, tokens that
    need no second trial), or a recent token (see `_try_recent`).
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
        """A search that adds no node to a tree of `limit` nodes, and ends below the floor of `price`."""
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
        """Offer the children of `node` by `places`, `offset` tokens on, or by the first source that knows any."""
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
            # Guesses take no part of the weight of what the text alone proposes: a bad head does not dilute it.
            whole = total + guessed_total if len(row) > 1 and row[1][3] == constants.HEAD_KIND else total
            cell = first + cell_within(kind, ldexp(row[0] / (whole - row[0]), octaves))
            row[0] = -1 if is_copied else cell
            known += frequencies[cell]
            chances.append((token, row, frequencies[cell], False))
        # The others share what the copy leaves: it has seen all that they know.
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
        """Let the source number `order` share out the probability `kept` among children of `node`, in its turn."""
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
        """Offer `node` the next recent token that has not been tried; `left` is what earlier ones left of `kept`."""
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
        """The trust of this depth by that of the one above: 1 but where a band of depths begins."""
        if self.trusts is None or depth & (depth - 1):
            return 1.0
        return self.trusts[band_of(depth)] / (self.trusts[band_of(depth - 1)] if depth > 1 else 1.0)

    def _recent_order(self, depth: int) -> list[tuple[float, int, int]]:
        """The recent tokens below nodes at `depth`, the latest or, by known noise, the likeliest first.

        Each is (-frequency, rank, cell).
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
        """The places of the prediction behind `node` (Prediction.places)."""
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
        """The head's guesses for what follows `node`, as places whose token is read `offset` tokens on."""
        head = self.head
        guess = -1 if head is None else self._guess_of(head, node)
        return [] if head is None or guess < 0 else head.places(guess, offset)

    def _is_copied(self, node: int) -> bool:
        """True if the model's copy has chosen what follows `node`.

        What else is proposed there is right only where the copy is wrong, and says nothing about its cells.
        """
        if self.head is None or not self.head.is_copy:
            return False
        guess = self._guess_of(self.head, node)
        return guess >= 0 and guess in self.head.parents[1:]

    def _guess_of(self, head: HeadDraft, node: int) -> int:
        """The guess that is `node`; -1 if the head has not guessed it."""
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
