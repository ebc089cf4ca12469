"""Drafts for another engine: one chain of tokens per sequence (vLLM) or one tree (SGLang). Twin: native/chains.h.

Such an engine exposes only each sequence's text. The accepted path is inferred from it: the drafted tree is walked
along the new tokens. This shows the right child of every node on the path, also among children that the engine never
verified, so calibration learns from the whole tree instead of the chain alone.

The chain of a tree is the path with the greatest expected gain. Chains are then cut together: a step of B sequences
with their k likeliest tokens takes the time t(B + k) and emits B + p_1 + ... + p_k tokens, and k maximises tokens per
time. A step without drafts may take less than t(B), because verification adds work in an engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lpr.config import TreeSizes
from lpr.core import constants
from lpr.core.budget import Price, Promises
from lpr.core.calibration import Calibration
from lpr.core.drafting import Drafter
from lpr.core.step_times import least_slopes, times_at
from lpr.core.suffix_index import SuffixIndex
from lpr.core.tree import TokenTree


class FixedPrice(Price):
    """A price that does not rise."""

    def __init__(self, floor: float) -> None:
        self.floor = floor

    def take(self, probability: float) -> None:
        """Ignored."""


class ChainRecord:
    """Calibration and acceptance over all sequences of a server; the start of a new sequence."""

    def __init__(self) -> None:
        self.calibration = Calibration()
        self.acceptance = Promises()


class ChainState:
    """One sequence of another engine: its text, and its drafting state."""

    __slots__ = ("_acceptance", "_chain", "_drafter", "_is_readable", "_probabilities", "_tree", "tokens")

    def __init__(self, config: TreeSizes, shared: SuffixIndex | None = None) -> None:
        """An empty sequence, which drafts from its own text and from the `shared` index."""
        self.tokens: list[int] = []  # the text read so far
        self._drafter = Drafter(config, shared)
        self._acceptance = Promises()
        self._is_readable = True
        self._tree: TokenTree | None = None
        self._chain: list[int] = []
        self._probabilities: list[float] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def continues_in(self, text: np.ndarray) -> bool:
        """True if `text` (int32 [num_tokens]) begins with the tokens read."""
        count = len(self.tokens)
        return count <= len(text) and text[:count].tolist() == self.tokens

    def text_from(self, begin: int) -> list[int]:
        """The tokens read from index `begin` on; [] if the text contains placeholders (negative ids)."""
        return self.tokens[begin:] if self._is_readable else []

    def read(self, text: np.ndarray, record: ChainRecord) -> None:
        """Read `text`, which begins with the tokens read; `record` is that of all sequences."""
        self.extend(text[len(self.tokens) :].tolist(), record)

    def extend(self, news: list[int], record: ChainRecord) -> None:
        """Read the tokens `news` that follow those read; `record` is that of all sequences."""
        if not self.tokens and news:
            self._drafter.calibration = record.calibration.copy()
        self.tokens += news
        self._is_readable = self._is_readable and min(news, default=0) >= 0
        if not self._is_readable or not news:
            return
        if self._tree is not None:
            self._learn(self._tree, news, record)
            self._tree = None
        self._drafter.observe(news)

    def _learn(self, tree: TokenTree, news: list[int], record: ChainRecord) -> None:
        path = [0]
        for token in news:
            node = tree.find(path[-1], token)
            if node < 0:
                break
            path.append(node)
        is_open = len(path) > len(news)
        self._drafter.learn(tree, path, is_open)
        record.calibration.observe(tree, path, self._drafter.cells, is_open)
        accepted = 0
        while accepted < min(len(self._chain), len(news)) and self._chain[accepted] == news[accepted]:
            accepted += 1
        # If the text ends within the chain, the engine did not verify the rest of it, which then does not count.
        num_verified = accepted if accepted == len(news) else len(self._chain)
        offered = 0.0
        for probability in self._probabilities[:num_verified]:
            offered += probability
        self._acceptance.record_step(offered, accepted, constants.TRUST_MEMORY)
        record.acceptance.record_step(offered, accepted, constants.LONG_MEMORY)

    def draft(self, depth: int, num_nodes: int, floor: float, first_trust: float) -> list[float]:
        """Draft a chain of at most `depth` tokens; returns their expected gains, in falling order.

        The chain is chosen from a tree of `num_nodes` nodes. A token below the probability `floor` does not pay.
        """
        self._chain, self._probabilities = [], []
        if depth < 1 or not self._is_readable or not self.tokens:
            return []
        trust = self._acceptance.trust(first_trust)
        tree = self._tree = TokenTree(self.tokens[-1])
        probabilities = self._drafter.draft(tree, num_nodes, depth, FixedPrice(floor / trust))
        best, gains = [-1] * len(tree), [0.0] * len(tree)
        for node in range(len(tree) - 1, 0, -1):
            gain = min(1.0, trust * probabilities[node]) - floor
            if best[node] >= 0:
                gain += gains[best[node]]
            gains[node] = gain
            parent = tree.parents[node]
            if gain > 0.0 and (best[parent] < 0 or gain >= gains[best[parent]]):
                best[parent] = node
        node = best[0]
        while node >= 0:
            self._chain.append(tree.tokens[node])
            self._probabilities.append(probabilities[node])
            node = best[node]
        return [min(1.0, trust * each) for each in self._probabilities]

    def draft_tree(self, depth: int, num_nodes: int) -> tuple[list[int], list[int]]:
        """Draft a tree of at most `num_nodes` nodes below the last token; returns tokens and parents, the root first.

        A node's parent has a smaller index; the root's is -1.
        """
        self._chain, self._probabilities = [], []
        if not self.tokens:
            raise ValueError("a sequence without tokens has no root")
        tree = TokenTree(self.tokens[-1])
        if depth >= 1 and self._is_readable:
            self._tree = tree
            self._drafter.draft(tree, num_nodes, depth, FixedPrice(0.0))
        return list(tree.tokens), list(tree.parents)

    def keep(self, count: int) -> list[int]:
        """Cut the drafted chain to `count` tokens; returns them."""
        del self._chain[count:], self._probabilities[count:]
        return list(self._chain)


class Chains:
    """Drafts for the sequences of a batch."""

    def __init__(self, num_nodes: int, times: Sequence[float]) -> None:
        """Chains chosen among `num_nodes` nodes per sequence. `times` are those of a step at `constants.KNOTS`."""
        if num_nodes < 1 or len(times) != len(constants.KNOTS):
            raise ValueError(f"num_nodes={num_nodes} must be at least 1, times must be {len(constants.KNOTS)}")
        self.times = list(times)  # times of a step at `constants.KNOTS` tokens, in any unit; set before a draft
        self.plain_part = 1.0
        """Time of a step without drafts, relative to `times` at as many tokens; set before a draft."""
        self._num_nodes = num_nodes
        self._record = ChainRecord()

    def draft(
        self, states: Sequence[ChainState], texts: Sequence[np.ndarray], depths: Sequence[int]
    ) -> list[list[int]]:
        """Read the sequences' `texts` (int32 [num_tokens] each), and draft at most `depths` tokens for each."""
        for state, text in zip(states, texts, strict=True):
            state.read(text, self._record)
        if not states:
            return []
        floor, first_trust = self._floor(len(states)), self._record.acceptance.trust()
        ranked: list[tuple[float, int]] = []
        for number, (state, depth) in enumerate(zip(states, depths, strict=True)):
            ranked += [(gain, number) for gain in state.draft(depth, self._num_nodes, floor, first_trust)]
        ranked.sort(key=lambda each: -each[0])
        tokens = np.cumsum([float(len(states)), *(gain for gain, _ in ranked)])
        times = times_at(len(states) + np.arange(len(tokens)), self.times)
        times[0] *= self.plain_part
        rates = tokens / times
        counts = [0] * len(states)
        for _, number in ranked[: int(np.argmax(rates))]:
            counts[number] += 1
        return [state.keep(count) for state, count in zip(states, counts, strict=True)]

    def draft_trees(
        self, states: Sequence[ChainState], news: Sequence[np.ndarray], depth: int
    ) -> list[tuple[list[int], list[int]]]:
        """Read the sequences' `news` (int32 [num_tokens] each), and draft a tree of equal size for each."""
        for state, tokens in zip(states, news, strict=True):
            state.extend(tokens.tolist(), self._record)
        return [state.draft_tree(depth, self._num_nodes) for state in states]

    def _floor(self, count: int) -> float:
        """The probability below which no token pays in a step of `count` sequences."""
        counts, row = np.array([float(count)]), np.array(self.times)
        return count / float(times_at(counts, row)[0]) * float(least_slopes(counts, row)[0])
