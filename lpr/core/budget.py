"""How many nodes a step's trees get: as many as pay.

A node pays by the chance that it is on the accepted path, and costs what it adds to the time of the step. With the
drafts' path probabilities p and the table of step times t, a step of the k best drafted nodes of a batch of B emits
B + p_1 + ... + p_k tokens in t(nodes) milliseconds, and k is chosen for the most tokens per millisecond. So the
budget goes to the sequences and branches that gain most, shrinks where time is dear, and is nothing where drafts do
not pay: then the step is plain decoding. Every rank decides alike: probabilities and table are replicated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lpr.config import TreeSizes
from lpr.core.beside import Rows
from lpr.core.step_times import KNOTS, SHORTEST_KV, last_slope, times_at
from lpr.core.tree import Source, TokenTree

WINDOW_SEGMENT = 16
"""Steps between two decisions whether the Jacobi window runs: it needs several steps to show what it yields."""
WINDOW_MEMORY = 0.05
"""Weight of a step in the moving average of what the window yields."""
WINDOW_RETURN = 0.01
"""Per step without a window, how far the estimate of its yield goes back to the first guess: it is tried again."""
QUIET_STEPS = 4
"""After so many steps in a row that were best without any draft, a sequence is decoded plainly for a while."""
LONGEST_PAUSE, LONGEST_FAR_PAUSE = 8, 32
"""Most steps between two trials whether drafts pay again; the pause doubles up to this. Far: see `NEAR_PRICE`."""
NEAR_PRICE = 0.5
"""A sequence whose best node is worth less than this part of its price is far from paying."""
TRUSTED_NODES = 2.0
"""Promised nodes that a sequence is believed for before any of them was tried."""
TRUST_MEMORY = 0.95
"""Per step with drafts, what is left of earlier evidence of how far a sequence's promises hold."""
PLAIN_MEMORY = 0.99
"""The same per plain step: what failed long ago is tried again."""
MOST_PROMISED = 2.0
"""Promised nodes that a step counts for at most: a long chain that breaks at once is one failure, not sixty."""
LONG_MEMORY = 0.995
"""The same for all sequences together, by which a new one is judged at first."""


class ExpectedTokens:
    """Expected tokens and time of a step while its trees are drafted, one after the other.

    What they come to at any time is a step that could be taken, so the best has at least that rate.
    """

    __slots__ = ("_node_ms", "_num_nodes", "_rate", "_times", "_tokens")

    def __init__(self, tokens: float, times: Sequence[float], node_ms: Sequence[float]) -> None:
        """A step that emits `tokens` without drafts; times[n] are its milliseconds with n drafted nodes.

        node_ms[n] is the least that further nodes after n cost on average, however many they are.
        """
        self._tokens = tokens
        self._times = times
        self._node_ms = node_ms
        self._num_nodes = 0
        self._rate = tokens / times[0]

    @property
    def price(self) -> float:
        """Tokens that a further node must be worth, at least, for any larger step to have more tokens per millisecond.

        With a rate r that the step has already, n nodes and k more worth p each, (r t(n) + k p) / t(n + k) exceeds r
        only if p exceeds r (t(n + k) - t(n)) / k.
        """
        return self._rate * self._node_ms[self._num_nodes]

    def add(self, gain: float) -> None:
        """Take in a node that is expected to be worth `gain` tokens."""
        self._tokens += gain
        self._num_nodes = min(self._num_nodes + 1, len(self._times) - 1)
        self._rate = max(self._rate, self._tokens / self._times[self._num_nodes])


class Price:
    """What a node of one sequence must promise to pay; it rises with what its step earns already."""

    __slots__ = ("_expected_tokens", "_least", "_trust", "floor")

    def __init__(self, expected: ExpectedTokens, trust: float) -> None:
        """The price in a step of `expected`, for a sequence whose promises are worth `trust` of what they say."""
        self._expected_tokens = expected
        self._trust = trust
        self._least = math.inf
        self.floor = expected.price / trust
        """No node with a lower path probability can pay."""

    def take(self, probability: float) -> None:
        """Take in that a node of such a path probability was drafted; see `_falling`."""
        expected, self._least = self._expected_tokens, min(self._least, probability)
        expected.add(min(1.0, self._trust * self._least))
        self.floor = expected.price / self._trust


@dataclass(frozen=True)
class DraftRequest:
    """What to draft for one sequence."""

    nodes: int
    """Most nodes to draft besides the Jacobi window's."""
    price: Price | None
    """When to stop before that; None for never."""
    window: int
    """Columns of the Jacobi window; 0: it does not run."""


@dataclass
class Draft:
    """A drafted tree, before it is cut to size."""

    tree: TokenTree
    probabilities: list[float]
    """[len(tree)], path probability of each node, 1 at the root; the window's own nodes have 0 or the heap's value."""
    num_window: int
    """The first nodes, root and Jacobi window, which stay."""


@dataclass
class AcceptanceHistory:
    """How the drafts of a sequence have fared of late; what the next ones are believed to be worth."""

    expected: float = 0.0
    """Accepted nodes that the probabilities of the drafts promised, older steps for less."""
    accepted: float = 0.0
    """Those of them that came."""
    offered: float = 0.0
    """What the tree of the running step promises."""
    quiet: int = 0
    """Steps in a row whose best size was no draft at all."""
    pause: int = 0
    """Plain steps until drafts are tried again."""

    def trust(self, first: float = 1.0) -> float:
        """Factor for promised probabilities: what came of earlier ones, `first` without any."""
        return (first * TRUSTED_NODES + self.accepted) / (TRUSTED_NODES + self.expected)

    def record_step(self, offered: float, accepted: int, memory: float) -> None:
        """Take in how many nodes a step's drafts promised, and how many of them were accepted."""
        weight = min(1.0, MOST_PROMISED / offered) if offered else 0.0
        memory = memory if offered else PLAIN_MEMORY
        self.expected = memory * self.expected + weight * offered
        self.accepted = memory * self.accepted + weight * accepted

    def count(self, drafted: bool, is_far: bool) -> None:
        """Take in whether a step kept any draft, and if it kept none, whether that was a near thing."""
        if self.pause:
            self.pause -= 1
        elif drafted:
            self.quiet = 0
        else:
            self.quiet += 1
            if self.quiet >= QUIET_STEPS:
                longest = LONGEST_FAR_PAUSE if is_far else LONGEST_PAUSE
                self.pause = min(longest, 2 ** (self.quiet - QUIET_STEPS + 1))


class Budget(Protocol):
    """How large the trees of a step become."""

    def begin(self, count: int, pending: int, kv: int, num_homes: int | None = None) -> None:
        """Begin a step of `count` sequences, whose trees `num_homes` ranks evaluate together; default: all ranks.

        `pending` counts the tokens that a rank evaluates besides the trees, `kv` the longest cached length.
        """
        ...

    def request(self, history: AcceptanceHistory) -> DraftRequest:
        """What to draft for the next sequence of the step."""
        ...

    def cut(self, drafts: Sequence[Draft], histories: Sequence[AcceptanceHistory]) -> None:
        """Cut the trees of the step to what pays."""
        ...

    def observe(
        self, trees: Sequence[TokenTree], paths: Sequence[Sequence[int]], histories: Sequence[AcceptanceHistory]
    ) -> None:
        """Take in which path of each tree was accepted."""
        ...


class FixedBudget:
    """Trees of the configured size, whatever they cost."""

    def __init__(self, config: TreeSizes, num_ranks: int = 1) -> None:
        """The sizes of `config`, which are numbers and which `num_ranks` ranks spend together."""
        parts = sizes_by_homes(config, num_ranks)
        self._requests = [
            DraftRequest(each.num_guess_nodes + each.trie_nodes, None, each.window_size) for each in parts
        ]
        self._request = self._requests[-1]

    def begin(self, count: int, pending: int, kv: int, num_homes: int | None = None) -> None:
        """Every step is alike, but for its ranks."""
        self._request = self._requests[num_homes - 1 if num_homes is not None else -1]

    def request(self, history: AcceptanceHistory) -> DraftRequest:
        """Always the same."""
        return self._request

    def cut(self, drafts: Sequence[Draft], histories: Sequence[AcceptanceHistory]) -> None:
        """Everything stays."""

    def observe(
        self, trees: Sequence[TokenTree], paths: Sequence[Sequence[int]], histories: Sequence[AcceptanceHistory]
    ) -> None:
        """Nothing is learnt."""


class AdaptiveBudget:
    """Trees of the size that promises the most tokens per millisecond."""

    def __init__(self, config: TreeSizes, cost: Rows, num_ranks: int = 1) -> None:
        """Sizes up to those of `config`, by the times of `cost`, for trees that `num_ranks` ranks evaluate."""
        self.cost = cost
        self._parts = sizes_by_homes(config, num_ranks)
        self._spread(num_ranks)
        # Measured beside a trie at temperature 0.8: windows of 4, 8, 16 and 32 columns gave 0.10 to 0.18 tokens a step
        # and their pool 0.09, 0.20, 0.40 and 0.55 (dev/LOG.md, strong scaling).
        self._first_yield = (0.14, max(0.0, 0.16 * math.log2((1 + config.window_size) / 3)))
        self._yield = self._first_yield
        """Tokens a step that the window, and that its pool, are expected to earn."""
        self.window = False
        if self._window_nodes:
            earned = total(self._first_yield)
            self.window = (1 + earned) / self._time(1 + self._window_nodes) > 1 / self._time(1)
        self.beside = 0.0
        """Tokens that other requests are expected to get in the running step, which lasts as long for all."""
        self._segment: list[tuple[float, float]] = []
        self._all = AcceptanceHistory()
        self._step = (1, 0, SHORTEST_KV)
        self._expected_tokens: ExpectedTokens | None = None
        self._prices: tuple[Sequence[float], tuple[int, ...], list[float], list[float]] | None = None
        """Row and sizes of the last step, and what its nodes would cost: mostly those of the next one too."""

    def _spread(self, num_homes: int) -> None:
        """Let so many ranks evaluate each tree."""
        sizes = self._parts[num_homes - 1]
        self.num_ranks = num_homes
        self._limit, self._columns, self._window_nodes = sizes.num_nodes - 1, sizes.window_size, sizes.num_window_nodes

    def begin(self, count: int, pending: int, kv: int, num_homes: int | None = None) -> None:
        """Begin a step."""
        self._step = (count, pending, kv)
        self._expected_tokens = None
        self._spread(num_homes if num_homes is not None else len(self._parts))

    def request(self, history: AcceptanceHistory) -> DraftRequest:
        """Nothing for a sequence that pauses; else whatever might pay."""
        if history.pause:
            return DraftRequest(0, None, 0)
        held = self._window_nodes if self.window else 0
        if self._expected_tokens is None:
            self._expected_tokens = self._without_drafts(held)
        price = Price(self._expected_tokens, history.trust(self._all.trust()))
        return DraftRequest(self._limit - held, price, self._columns if self.window else 0)

    def cut(self, drafts: Sequence[Draft], histories: Sequence[AcceptanceHistory]) -> None:
        """Keep the nodes that pay; a sequence without any, several times in a row, pauses."""
        if not any(len(draft.tree) > 1 for draft in drafts):
            for history in histories:  # plain decoding stays as cheap as it is without a budget
                history.offered = 0.0
                history.count(False, is_far=True)
            return
        count, pending, kv = self._step
        row = self.cost.row(count, kv)
        first = self._all.trust()
        falling = [
            np.minimum(1.0, history.trust(first) * _falling(draft))
            for draft, history in zip(drafts, histories, strict=True)
        ]
        gains = np.sort(np.concatenate(falling))[::-1]
        tokens = count + self.beside + np.concatenate([[0.0], np.cumsum(gains)])
        sizes = sum(draft.num_window for draft in drafts) + np.arange(len(tokens))
        times = self._times(sizes, pending, row)
        rates = tokens / times
        best = int(np.argmax(rates))
        threshold = gains[best - 1] if best else np.inf
        near_price = NEAR_PRICE * float(rates[0] * (times[1] - times[0])) if len(gains) else 0.0
        for draft, history, each in zip(drafts, histories, falling, strict=True):
            kept = int(np.count_nonzero(each >= threshold))
            draft.tree.truncate(draft.num_window + kept)
            history.offered = total(draft.probabilities[draft.num_window : draft.num_window + kept])
            history.count(len(draft.tree) > 1, is_far=not len(each) or each[0] < near_price)
        if self._window_nodes:
            self._weigh_window(tokens, count, pending, row)

    def observe(
        self, trees: Sequence[TokenTree], paths: Sequence[Sequence[int]], histories: Sequence[AcceptanceHistory]
    ) -> None:
        """Learn how far promises held, and what the window yields while it runs; forget that while it does not."""
        for tree, path, history in zip(trees, paths, histories, strict=True):
            accepted = sum(tree.sources[node] != Source.WINDOW for node in path[1:])
            history.record_step(history.offered, accepted, TRUST_MEMORY)
            self._all.record_step(history.offered, accepted, LONG_MEMORY)
        if not trees or not self._parts[-1].num_window_nodes:
            return
        news, weight = self._first_yield, WINDOW_RETURN
        if self.window:
            sources = [tree.sources[node] for tree, path in zip(trees, paths, strict=True) for node in path]
            news = (sources.count(Source.WINDOW) / len(trees), sources.count(Source.POOL) / len(trees))
            weight = WINDOW_MEMORY
        self._yield = tuple(old + weight * (new - old) for old, new in zip(self._yield, news, strict=True))  # type: ignore[assignment]

    def _without_drafts(self, held: int) -> ExpectedTokens:
        """The step without drafts, whose sequences have `held` window nodes each."""
        count, pending, kv = self._step
        found, sizes = self.cost.row(count, kv), (count, pending, held)
        key = (*sizes, self.num_ranks)
        if self._prices is None or self._prices[0] is not found or self._prices[1] != key:
            self._prices = (found, key, *self._price_nodes(np.array(found), *sizes))
        return ExpectedTokens(count + self.beside, *self._prices[2:])

    def _price_nodes(self, row: np.ndarray, count: int, pending: int, held: int) -> tuple[list[float], list[float]]:
        """Milliseconds of the step by its drafted nodes, and the least that further ones cost on average."""
        nodes = np.arange(count * self._limit + 1)
        per_rank = (count * (1 + held) + nodes) / self.num_ranks + pending
        times = times_at(per_rank, row)
        # t(n) is linear between the knots, so on average nodes are cheapest up to one of these, or far beyond the last.
        ahead = np.array(KNOTS) - per_rank[:, None]
        slopes = np.where(ahead > 1e-9, (row - times[:, None]) / np.maximum(ahead, 1e-9), np.inf)
        cheapest = np.minimum(slopes.min(1), last_slope(row)) / self.num_ranks
        return times.tolist(), cheapest.tolist()

    def _weigh_window(self, tokens: np.ndarray, count: int, pending: int, row: Sequence[float]) -> None:
        """Compare the step with and without a window; switch at the end of a segment.

        Its nodes are taken from those that a step may have, so where these are all spent it must earn more than the
        last of them promise; or, while it runs, than further ones would, which are taken to promise 1/n.
        """
        by_window, by_pool = self._yield
        held, drafted = count * self._window_nodes, len(tokens) - 1
        left = count * self._limit - held
        if self.window:
            wide, plain = tokens + count * by_window, tokens
            if drafted and drafted >= left:
                further = (tokens[-1] - tokens[-2]) * drafted / (drafted + np.arange(1.0, held + 1))
                plain = np.concatenate([plain, tokens[-1] + np.cumsum(further)])
            plain = np.maximum(plain - count * by_pool, count + self.beside)
        else:
            wide, plain = tokens[: left + 1] + count * (by_window + by_pool), tokens
        best_wide = (wide / self._times(np.arange(len(wide)) + (count + held), pending, row)).max()
        best_plain = (plain / self._times(np.arange(len(plain)) + count, pending, row)).max()
        self._segment.append((float(best_wide), float(best_plain)))
        if len(self._segment) == WINDOW_SEGMENT:
            self.window = total([each for each, _ in self._segment]) > total([each for _, each in self._segment])
            self._segment.clear()

    def _time(self, size: int) -> float:
        return float(self._times(np.array([size]), 0, self.cost.row(1, 1))[0])

    def _times(self, sizes: np.ndarray, pending: int, row: Sequence[float]) -> np.ndarray:
        """Milliseconds of steps whose trees have `sizes` nodes together, and `pending` further tokens on each rank."""
        return times_at(np.ceil(sizes / self.num_ranks) + pending, row)


def sizes_by_homes(config: TreeSizes, num_ranks: int) -> list[TreeSizes]:
    """The sizes of a tree that 1, 2, ... or all of `num_ranks` ranks evaluate."""
    return [config.of_ranks(some, num_ranks) for some in range(1, num_ranks + 1)]


def total(values: Sequence[float]) -> float:
    """The sum from left to right: since Python 3.12 `sum` rounds differently, and ranks must agree to the last bit."""
    result = 0.0
    for value in values:
        result += value
    return result


def _falling(draft: Draft) -> np.ndarray:
    """Path probabilities of the nodes after the window, none higher than one drafted before it.

    Nodes come best first, up to what an estimate changes later; so the nodes above any threshold are the first ones.
    """
    return np.minimum.accumulate(np.array(draft.probabilities[draft.num_window :], dtype=float))
