"""Best-first drafting: the evidence of all sources in one heap. Twin: native/drafting.h.

The evidence for what follows a node is a list of *places* in known text whose left context agrees with the node's:
places in the request's own suffix index, in the shared one, in pooled n-grams, or among recycled candidates. A child's
score is its share of the evidence's weight, of which a part is kept back for tokens that the evidence does not hold
(the escape of PPM, Cleary and Witten 1984):

    score(child) = weight(child) / (weight(all) + novelty)
    p(child) = p(node) * how often children of such a score were right        (lpr.core.calibration)

A child inherits the places that led to it, advanced by one token, so a copied passage costs one index step per node.
The part of p(node) that the children do not claim is an entry of the same heap, the escape. When the escape is popped,
the next source distributes that probability; sources are ordered by falling context (two tokens, one token, a context
with one token replaced, none). So the budget goes to depth after a long match and to breadth elsewhere, and a source
costs nothing before its escape is popped. Nodes that the tree already held (the Jacobi window's) are children like
others and cost no budget.

A model with prediction heads guesses what follows the last token (lpr.core.heads). Its guesses join the evidence of
the first source at the nodes that they reach. Guesses of a low-bit copy of the model take precedence over all evidence:
their cells depend on the copy's share alone, and the other children share the rest of p(node).

A request may include a prediction of its output (lpr.core.alignment). Cursors after the node's token join the first
source, other cursors the source that replaces a token.

Recycled candidates are chosen by context (lpr.core.evaluated): those after the occurrences of the last token with the
longest match, and those of rejected siblings; if there are none, those of the table. A request's sampling noise is
known and changes a child's odds (lpr.core.noise_keys).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from lpr.config import TreeSizes
from lpr.core import constants
from lpr.core.alignment import Prediction
from lpr.core.budget import Price
from lpr.core.calibration import Calibration
from lpr.core.evaluated import EvaluatedNodes
from lpr.core.heads import HeadDraft
from lpr.core.noise_keys import KnownNoise
from lpr.core.pool import NGramPool
from lpr.core.recycle import CandidateTable
from lpr.core.search import FindPlaces, Place, Search
from lpr.core.suffix_index import SuffixIndex
from lpr.core.tree import Source, TokenTree

_RECYCLED_SOURCE = int(Source.RECYCLED)


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

        `seed` (64 bits) belongs to a request that samples; None: greedy. The output, after `num_prompt` tokens, is
        expected to follow `prediction`.
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
        self.head: HeadDraft | None = None  # the guesses of the model's head for the next draft
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
        elif self.pool.guess_set_size:  # a suffix index would hold these n-grams already
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
        deeper than `config.branch_length` or `max_depth`. The list is [len(tree)], 1 at the root and 0 at nodes that
        the tree already held and the search did not reach; the probabilities of a node's children sum to at most its
        own. A larger budget adds nodes and changes none. The draft ends when the best remaining entry is less likely
        than the floor of `price`. Path probabilities are multiplied by `trusts`, per band of depths
        (lpr.core.budget.band_of).
        """
        deepest = self.config.branch_length if max_depth is None else min(self.config.branch_length, max_depth)
        probabilities = [1.0] + [0.0] * (len(tree) - 1)
        self._cells = [-1] * len(tree)
        if deepest < 1 or (budget < 1 and len(tree) == 1):
            return probabilities
        recent = list(islice(reversed(self._recent), constants.RECENT_TOKENS))
        limit = len(tree) + max(0, budget)
        noise = KnownNoise(self.seed, self._num_observed)
        search = Search(tree, self._sources, self._tail, recent, self.calibration.frequencies, limit, price, noise)
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
        """Calibrate by the accepted `path` of the last drafted `tree`; call it before `observe`.

        If the path `is_open`, the token after it is not known (Calibration.observe).
        """
        self.calibration.observe(tree, path, self._cells, is_open)

    @property
    def cells(self) -> list[int]:
        """Per node of the last draft, its cell (lpr.core.calibration); -1 if no source of the search proposed it."""
        return self._cells

    def keep_candidates(
        self,
        tree: TokenTree,
        path: Sequence[int],
        candidates: Sequence[Sequence[int]],
        scores: Sequence[Sequence[int]],
    ) -> None:
        """Keep the candidates and scores of all nodes of `tree`, whose accepted path is `path`; before `observe`."""
        if self.config.trie_nodes:
            before = self._tail[-2] if len(self._tail) > 1 else -1
            self._evaluated.keep(tree, path, self._num_observed, before, candidates, scores)

    def continuation(self, tokens: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """The likeliest text after the last observed token and `tokens`: up to `count` tokens, and the share of each.

        It follows matches of at least the last two tokens; [] if there is none.
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
            best = max(weights, key=weights.__getitem__)  # the first of equals
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
