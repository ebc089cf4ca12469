"""The size of a step's trees: as many nodes as pay. Twin: native/budget.h.

A node is worth the probability that it is on the accepted path, and costs the time that it adds to the step. With the
drafts' path probabilities p and step times t, a step of the k best drafted nodes of a batch of B emits
B + p_1 + ... + p_k tokens in t(nodes) milliseconds, and k is chosen for the most tokens per millisecond. So the budget
goes to the sequences and branches that gain most, shrinks where time is dear, and is 0 where drafts do not pay: then
the step is plain decoding. In a batch they must pay by more than step times may err (`constants.LEAST_GAIN`). All ranks
decide alike, because probabilities and step times are replicated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lpr.config import TreeSizes
from lpr.core import constants
from lpr.core.step_times import least_slopes, times_at
from lpr.core.tree import Source, TokenTree


class ExpectedTokens:
    """Expected tokens and time of a step while its trees are drafted, one after the other.

    Drafting may stop after any node, so the best step has at least the rate reached so far.
    """

    __slots__ = ("_node_ms", "_num_nodes", "_rate", "_times", "_tokens")

    def __init__(self, tokens: float, times: Sequence[float], node_ms: Sequence[float]) -> None:
        """A step that emits `tokens` without drafts; times[n] are its milliseconds with n drafted nodes.

        node_ms[n] is the least average cost of a node after n, over all numbers of further nodes.
        """
        self._tokens = tokens
        self._times = times
        self._node_ms = node_ms
        self._num_nodes = 0
        self._rate = tokens / times[0]

    @property
    def price(self) -> float:
        """Tokens that a further node must be worth for any larger step to have more tokens per millisecond.

        At a rate r, with n nodes and k more worth p each, (r t(n) + k p) / t(n + k) exceeds r only if p exceeds
        r (t(n + k) - t(n)) / k.
        """
        return self._rate * self._node_ms[self._num_nodes]

    def add(self, gain: float) -> None:
        """Add a node that is expected to be worth `gain` tokens."""
        self._tokens += gain
        self._num_nodes = min(self._num_nodes + 1, len(self._times) - 1)
        self._rate = max(self._rate, self._tokens / self._times[self._num_nodes])


class Price:
    """Least path probability at which a node of one sequence pays; it rises with the rate of its step."""

    __slots__ = ("_expected_tokens", "_least", "floor")

    def __init__(self, expected: ExpectedTokens) -> None:
        """The price in a step of `expected`."""
        self._expected_tokens = expected
        self._least = math.inf
        self.floor = expected.price
        """No node with a lower path probability can pay.

        In a batch this holds for the nodes drafted so far. Nodes of sequences drafted later may displace some of them,
        or make the step large enough to reach a cheaper part of the step times.
        """

    def take(self, probability: float) -> None:
        """Count a drafted node of this path probability (see `_falling`)."""
        expected, self._least = self._expected_tokens, min(self._least, probability)
        expected.add(self._least)
        self.floor = expected.price


@dataclass(frozen=True)
class DraftRequest:
    """The size of a sequence's draft."""

    nodes: int  # most nodes to draft besides the Jacobi window's
    price: Price | None  # stops drafting when nodes no longer pay; None: no early stop
    window: int  # columns of the Jacobi window; 0: it does not run
    trusts: Sequence[float] | None = None
    """Per band of depths, the factor of path probabilities (AcceptanceHistory.trusts); None: 1."""


@dataclass
class Draft:
    """A drafted tree before `cut`."""

    tree: TokenTree
    probabilities: list[float]
    """[len(tree)], each node's path probability times its trust, 1 at the root. A node of the window that no other
    source proposed has 0."""
    num_window: int  # number of leading nodes (root and Jacobi window), which `cut` keeps
    trusts: Sequence[float] | None = None  # as in its DraftRequest


@dataclass
class Promises:
    """Expected and actual numbers of accepted nodes; older steps count less."""

    expected: float = 0.0  # sum of path probabilities
    accepted: float = 0.0  # accepted nodes

    def trust(self, first: float = 1.0) -> float:
        """Factor for path probabilities: accepted over expected nodes so far; `first` before any."""
        return (first * constants.TRUSTED_NODES + self.accepted) / (constants.TRUSTED_NODES + self.expected)

    def record_step(self, offered: float, accepted: int, memory: float, idle: float = constants.PLAIN_MEMORY) -> None:
        """Count a step whose drafts promised `offered` nodes, of which `accepted` were accepted.

        Of what was counted before, `memory` remains, or `idle` where nothing is offered.
        """
        weight = min(1.0, constants.MOST_PROMISED / offered) if offered else 0.0
        memory = memory if offered else idle
        self.expected = memory * self.expected + weight * offered
        self.accepted = memory * self.accepted + weight * accepted


def band_of(depth: int) -> int:
    """The band of a depth from 1: octaves, as a copied passage that breaks off does so within the first few tokens."""
    return min(depth.bit_length(), constants.NUM_BANDS) - 1


def _no_offer() -> list[float]:
    return [0.0] * constants.NUM_BANDS


@dataclass
class AcceptanceHistory:
    """Expected and accepted nodes of a sequence's drafts, by depth.

    A copied passage ends at one token, and all deeper nodes of the chain fail together. So the acceptance of deep nodes
    says little about that of shallow ones, and the other way round.
    """

    by_band: list[Promises] = field(default_factory=lambda: [Promises() for _ in range(constants.NUM_BANDS)])
    offered: list[float] = field(default_factory=_no_offer)
    """Per band, the expected accepted nodes of the running step's tree, with all trusts 1."""
    quiet: int = 0  # steps in a row whose best size was no draft at all
    pause: int = 0  # plain steps until drafts are tried again
    is_new: bool = True  # True until a step of the sequence is counted

    def trusts(self, first: Sequence[float] = (1.0,) * constants.NUM_BANDS) -> list[float]:
        """Per band, the factor for path probabilities; `first` before any trial.

        Factors never rise with depth, so no node becomes more likely than its parent.
        """
        found, last = list[float](), math.inf
        for promises, each in zip(self.by_band, first, strict=True):
            last = min(last, promises.trust(each))
            found.append(last)
        return found

    def record_step(self, offered: Sequence[float], accepted: Sequence[int], memory: float, idle: float) -> None:
        """Count a step by band (Promises.record_step)."""
        self.is_new = False
        for promises, promised, kept in zip(self.by_band, offered, accepted, strict=True):
            promises.record_step(promised, kept, memory, idle)

    def count(self, drafted: bool, is_far: bool) -> None:
        """Count a step with or without drafted nodes; `is_far` if its best node was worth far less than its price."""
        if self.pause:
            self.pause -= 1
        elif drafted:
            self.quiet = 0
        else:
            self.quiet += 1
            if self.quiet >= constants.QUIET_STEPS:
                longest = constants.LONGEST_FAR_PAUSE if is_far else constants.LONGEST_PAUSE
                self.pause = min(longest, 2 ** (self.quiet - constants.QUIET_STEPS + 1))


class FixedBudget:
    """Trees of the configured size."""

    def __init__(self, config: TreeSizes, num_ranks: int = 1) -> None:
        """The sizes of `config`, for trees that up to `num_ranks` ranks share."""
        parts = sizes_by_homes(config, num_ranks)
        self._requests = [
            DraftRequest(each.num_guess_nodes + each.trie_nodes, None, each.window_size) for each in parts
        ]
        self._request = self._requests[-1]

    def begin(self, count: int, pending: int, num_homes: int) -> None:
        """As AdaptiveBudget.begin; only the number of home ranks matters."""
        self._request = self._requests[num_homes - 1]

    def request(self, history: AcceptanceHistory) -> DraftRequest:
        return self._request

    def cut(self, drafts: Sequence[Draft], histories: Sequence[AcceptanceHistory]) -> None:
        """Keeps all nodes."""

    def observe(
        self, trees: Sequence[TokenTree], paths: Sequence[Sequence[int]], histories: Sequence[AcceptanceHistory]
    ) -> None:
        """Does nothing: fixed sizes do not adapt."""


class AdaptiveBudget:
    """Trees of the size that promises the most tokens per millisecond."""

    def __init__(self, config: TreeSizes, times: Sequence[float], num_ranks: int = 1) -> None:
        """Sizes up to those of `config`, for trees that `num_ranks` ranks evaluate.

        `times` are milliseconds at `constants.KNOTS` of a step of one sequence (StepTimes.row).
        """
        self.times = times  # Milliseconds at `constants.KNOTS` of a step like the running one
        self.other_tokens = 0.0
        """Expected tokens of other requests in the running step; they wait for it too."""
        self._step = (1, 0)
        self._parts = sizes_by_homes(config, num_ranks)
        self._spread(num_ranks)
        self._first_yield = (
            constants.FIRST_WINDOW_YIELD,
            max(0.0, constants.POOL_YIELD * math.log2((1 + config.window_size) / 3)),
        )
        self._yield = self._first_yield  # tokens a step that the window and its pool are expected to earn
        self.window = False
        if self._window_nodes:
            earned = total(self._first_yield)
            plain, wide = self._milliseconds(np.array([1, 1 + self._window_nodes]))
            self.window = bool((1 + earned) / wide > 1 / plain)
        self._segment: list[tuple[float, float]] = []
        self._all, self._first_trees = AcceptanceHistory(), AcceptanceHistory()
        self._expected_tokens: ExpectedTokens | None = None

    def _spread(self, num_homes: int) -> None:
        """Set the number of ranks that evaluate each tree."""
        sizes = self._parts[num_homes - 1]
        self.num_ranks = num_homes
        self._limit, self._columns, self._window_nodes = sizes.num_nodes - 1, sizes.window_size, sizes.num_window_nodes

    def begin(self, count: int, pending: int, num_homes: int | None = None) -> None:
        """Begin a step of `count` sequences, whose trees `num_homes` ranks evaluate together; default: all ranks.

        `pending` counts the tokens that a rank evaluates besides the trees. `times` and `other_tokens` are set before.
        """
        self._expected_tokens = None
        self._spread(num_homes if num_homes is not None else len(self._parts))
        # With one rank, pending tokens are tokens of prompts. Nodes are cheap beside a prompt, but they delay the
        # prompt's first token, so they are priced as in a step without it.
        self._step = (count, pending if self.num_ranks > 1 else 0)

    def request(self, history: AcceptanceHistory) -> DraftRequest:
        """The draft of the step's next sequence: none while it pauses, else all nodes that might pay."""
        if history.pause:
            return DraftRequest(0, None, 0)
        held = self._window_nodes if self.window else 0
        if self._expected_tokens is None:
            tokens = self._step[0] + self.other_tokens
            self._expected_tokens = ExpectedTokens(tokens, *self._price_nodes(np.array(self.times), *self._step, held))
        trusts = self._all.trusts()
        if history.is_new:
            # How predictable a text's beginning is depends on the workload; calibration by match length cannot tell.
            trusts = self._first_trees.trusts(trusts)
        columns = self._columns if self.window else 0
        return DraftRequest(self._limit - held, Price(self._expected_tokens), columns, history.trusts(trusts))

    def cut(self, drafts: Sequence[Draft], histories: Sequence[AcceptanceHistory]) -> None:
        """Truncate the trees to the nodes that pay; a sequence that keeps none for several steps pauses drafting."""
        if not any(len(draft.tree) > 1 for draft in drafts):
            for history in histories:  # no arithmetic in plain decoding
                history.offered = _no_offer()
                history.count(False, is_far=True)
            return
        count, _ = self._step
        falling = [_falling(draft) for draft in drafts]
        gains = np.sort(np.concatenate(falling))[::-1]
        tokens = count + self.other_tokens + np.concatenate([[0.0], np.cumsum(gains)])
        sizes = sum(draft.num_window for draft in drafts) + np.arange(len(tokens))
        times = self._milliseconds(sizes)
        rates = tokens / times
        best = int(np.argmax(rates))
        if rates[best] < (1 + constants.LEAST_GAIN * (1 - 1 / count)) * rates[0]:
            best = 0
        threshold = gains[best - 1] if best else np.inf
        near_price = constants.NEAR_PRICE * float(rates[0] * (times[1] - times[0])) if len(gains) else 0.0
        for draft, history, each in zip(drafts, histories, falling, strict=True):
            kept = int(np.count_nonzero(each >= threshold))
            draft.tree.truncate(draft.num_window + kept)
            history.offered = _offered(draft)
            history.count(len(draft.tree) > 1, is_far=not len(each) or each[0] < near_price)
        if self._window_nodes:
            self._weigh_window(tokens, count)

    def observe(
        self, trees: Sequence[TokenTree], paths: Sequence[Sequence[int]], histories: Sequence[AcceptanceHistory]
    ) -> None:
        """Count the accepted `paths`: accepted against expected nodes, and the window's yield while it runs."""
        is_plain = True
        for tree, path, history in zip(trees, paths, histories, strict=True):
            accepted = [0] * constants.NUM_BANDS
            for node in path[1:]:
                accepted[band_of(tree.depths[node])] += tree.sources[node] != Source.WINDOW
            is_first = history.is_new
            history.record_step(history.offered, accepted, constants.TRUST_MEMORY, constants.PLAIN_MEMORY)
            if is_first:
                self._first_trees.record_step(history.offered, accepted, constants.LONG_MEMORY, constants.PLAIN_MEMORY)
            if any(history.offered):
                is_plain = False
                self._all.record_step(history.offered, accepted, constants.LONG_MEMORY, constants.LONG_MEMORY)
        if is_plain:  # per step: most sequences of a large batch have no draft
            none = constants.NUM_BANDS * [0]
            self._all.record_step(none, none, constants.PLAIN_MEMORY, constants.PLAIN_MEMORY)
        if not trees or not self._parts[-1].num_window_nodes:
            return
        news, weight = self._first_yield, constants.WINDOW_RETURN
        if self.window:
            sources = [tree.sources[node] for tree, path in zip(trees, paths, strict=True) for node in path]
            news = (sources.count(Source.WINDOW) / len(trees), sources.count(Source.POOL) / len(trees))
            weight = constants.WINDOW_MEMORY
        by_window, by_pool = (old + weight * (new - old) for old, new in zip(self._yield, news, strict=True))
        self._yield = by_window, by_pool

    def _price_nodes(self, row: np.ndarray, count: int, pending: int, held: int) -> tuple[list[float], list[float]]:
        """Per number of drafted nodes: milliseconds of the step, and the least average cost of further nodes.

        Each of the step's `count` sequences has `held` window nodes.
        """
        nodes = np.arange(count * self._limit + 1)
        per_rank = (count * (1 + held) + nodes) / self.num_ranks + pending
        return times_at(per_rank, row).tolist(), (least_slopes(per_rank, row) / self.num_ranks).tolist()

    def _weigh_window(self, tokens: np.ndarray, count: int) -> None:
        """Compare the step with and without a window; switch at the end of a segment.

        The window's nodes count against the node limit of a step. If the limit binds, the window must earn more than
        the drafted nodes that it displaces. While it runs these were not drafted, and their gain is extrapolated as
        1/n.
        """
        by_window, by_pool = self._yield
        held, drafted = count * self._window_nodes, len(tokens) - 1
        left = count * self._limit - held
        if self.window:
            wide, plain = tokens + count * by_window, tokens
            if drafted and drafted >= left:
                further = (tokens[-1] - tokens[-2]) * drafted / (drafted + np.arange(1.0, held + 1))
                plain = np.concatenate([plain, tokens[-1] + np.cumsum(further)])
            plain = np.maximum(plain - count * by_pool, count + self.other_tokens)
        else:
            wide, plain = tokens[: left + 1] + count * (by_window + by_pool), tokens
        best_wide = (wide / self._milliseconds(np.arange(len(wide)) + (count + held))).max()
        best_plain = (plain / self._milliseconds(np.arange(len(plain)) + count)).max()
        self._segment.append((float(best_wide), float(best_plain)))
        if len(self._segment) == constants.WINDOW_SEGMENT:
            self.window = total([each for each, _ in self._segment]) > total([each for _, each in self._segment])
            self._segment.clear()

    def _milliseconds(self, sizes: np.ndarray) -> np.ndarray:
        """Milliseconds of steps whose trees have `sizes` nodes in total."""
        return times_at(np.ceil(sizes / self.num_ranks) + self._step[1], self.times)


def sizes_by_homes(config: TreeSizes, num_ranks: int) -> list[TreeSizes]:
    """The tree sizes for 1, 2, ... `num_ranks` home ranks."""
    return [config.of_ranks(some, num_ranks) for some in range(1, num_ranks + 1)]


def total(values: Sequence[float]) -> float:
    """The sum from left to right: since Python 3.12 `sum` rounds differently, and ranks must agree to the last bit."""
    result = 0.0
    for value in values:
        result += value
    return result


def _falling(draft: Draft) -> np.ndarray:
    """Path probabilities of the nodes after the window, none higher than one drafted before it.

    Nodes are drafted in nearly falling order. Made monotone, the nodes above any threshold are a prefix of the draft.
    """
    return np.minimum.accumulate(np.array(draft.probabilities[draft.num_window :], dtype=float))


def _offered(draft: Draft) -> list[float]:
    """Per band, the expected accepted nodes of the tree without its window, with all trusts 1."""
    offered = _no_offer()
    for node in range(draft.num_window, len(draft.tree)):
        band = band_of(draft.tree.depths[node])
        offered[band] += draft.probabilities[node] / (draft.trusts[band] if draft.trusts is not None else 1.0)
    return offered
