"""Draft trees for a batch of another engine's requests, by request id."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from lpr.config import TreeSizes
from lpr.core.constants import KNOTS, MAX_MATCH
from lpr.native import Chains, ChainState, SuffixIndex

LEARN_EVERY = 32
"""Tokens of a running request that are learnt together, so that requests which run beside it draft from them."""


@dataclass(eq=False)
class Running:
    state: ChainState
    num_learnt: int  # leading tokens that are learnt already, or part of the prompt


class Trees:
    """The drafting states of one rank. The same calls on all ranks give the same trees."""

    def __init__(self, num_tokens: int, depth: int, capacity: int) -> None:
        """Trees of `num_tokens` tokens, the root included, up to `depth` deep; `capacity` is that of the index."""
        self._num_tokens, self._depth = num_tokens, depth
        self._sizes = TreeSizes(trie_nodes=max(1, num_tokens - 1), branch_length=max(1, depth), trie_capacity=capacity)
        self._chains = Chains(max(1, num_tokens - 1), [1.0] * len(KNOTS))
        self._capacity = capacity
        self.reset()

    def reset(self) -> None:
        self._shared = SuffixIndex(self._capacity)
        self._running: dict[str, Running] = {}

    def draft(
        self, names: Sequence[str], prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int64 [batch * num_tokens], the root first, and the trees' mask int64 [batch * num_tokens ** 2].

        Entry (i, j) of a tree's mask is 1 if node j is node i or one of its ancestors. A tree with fewer nodes is
        filled with tokens 0 below the root, as SGLang does.
        """
        texts = list(zip(names, prompts, outputs, strict=True))
        sequences = [self._sequence(*each) for each in texts]
        news = [_behind(len(each.state), *text[1:]) for each, text in zip(sequences, texts, strict=True)]
        trees = self._chains.draft_trees([each.state for each in sequences], news, self._depth)
        for each in sequences:
            if len(each.state) - each.num_learnt >= LEARN_EVERY:
                self._learn(each)
        count = self._num_tokens
        tokens = np.zeros((len(trees), count), np.int64)
        parents = np.zeros((len(trees), count), np.int64)
        for number, (of_tree, above) in enumerate(trees):
            tokens[number, : len(of_tree)] = of_tree[:count]
            parents[number, 1 : len(above)] = above[1:count]
        mask = np.zeros((len(trees), count, count), np.int64)
        batch = np.arange(len(trees))
        for node in range(count):
            if node:
                mask[:, node] = mask[batch, parents[:, node]]
            mask[:, node, node] = 1
        return tokens.reshape(-1), mask.reshape(-1)

    def end(self, names: Collection[str]) -> None:
        """Learn the outputs of requests that left the batch, and drop their states."""
        for name in sorted(names):
            if (sequence := self._running.pop(name, None)) is not None:
                self._learn(sequence)

    def learn(self, tokens: Sequence[int]) -> None:
        self._shared.extend(list(tokens))
        self._shared.end_document()

    def _sequence(self, name: str, prompt: Sequence[int], output: Sequence[int]) -> Running:
        found = self._running.get(name)
        if found is None or len(found.state) > len(prompt) + len(output):  # the id was reused by another request
            found = self._running[name] = Running(ChainState(self._sizes, self._shared), len(prompt))
        return found

    def _learn(self, sequence: Running) -> None:
        begin = max(0, sequence.num_learnt - MAX_MATCH)
        text = sequence.state.text_from(begin)
        if len(text) > sequence.num_learnt - begin:
            self.learn(text)
            sequence.num_learnt = len(sequence.state)


def _behind(count: int, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """The tokens of a text from index `count` on, int32 [num_tokens]."""
    if count < len(prompt):
        return np.array([*prompt[count:], *output], np.int32)
    return np.array(output[count - len(prompt) :], np.int32)
