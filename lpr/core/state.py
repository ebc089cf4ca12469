"""The replicated state of one sequence: its tokens, what drafts its next tree, and a digest of both.

Every rank holds the same state and changes it by the same pure functions of the same gathered results. `held` is
replicated too: each rank knows how many committed tokens every rank has the K/V of.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from lpr.config import DecodeConfig, SamplingParams
from lpr.core.drafting import Drafter
from lpr.core.partition import Shard
from lpr.core.recycle import CandidateTable
from lpr.core.tree import TokenTree
from lpr.core.trie import Trie
from lpr.core.window import JacobiWindow


@dataclass(frozen=True)
class TreeResult:
    """What the target model says of each node of a tree, in node order."""

    next_tokens: Sequence[int]
    """The token that the model chooses after the node."""
    candidates: Sequence[Sequence[int]]
    """Its k most likely next tokens, most likely first."""
    scores: Sequence[Sequence[int]]
    """Their scores (see lpr.core.recycle.SCORE_STEPS)."""


class SequenceState:
    """One sequence: committed tokens, drafting state, and what each rank's cache holds of it."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        config: DecodeConfig,
        num_ranks: int = 1,
        shared: Trie | None = None,
    ) -> None:
        """A sequence that starts with `prompt` (at least one token), none of which any rank holds yet."""
        self.params = params
        self.config = config
        self.tokens = list(prompt)
        self.num_prompt = len(self.tokens)
        self.held = [0] * num_ranks
        """Per rank: the number of leading tokens whose K/V it holds."""
        # Of this request only: what a step drafts then follows from the request and the shared trie, so that a job
        # that is restarted from its output file takes the same steps. (Shared by all requests, 10 ClassEval prompts
        # took 9.77 instead of 9.85 tokens per step greedily, and 2.48 instead of 2.37 at temperature 0.8.)
        self.table = CandidateTable() if config.num_recycled else None
        self.drafter = Drafter(config, shared, self.table)
        self.drafter.observe(self.tokens)
        self.window: JacobiWindow | None = None
        if config.window_size:
            self.window = JacobiWindow(config.window_size, config.ngram_size, self.tokens)
        self.probabilities: list[float] = []
        """Estimated path probability of each node of the last tree; 0 where only the window proposed it."""
        self._hash = hashlib.blake2b(array("q", self.tokens).tobytes(), digest_size=8)
        # A rank that samples its nodes by another seed would be followed by all of them, in step and wrong.
        self._hash.update(repr(params).encode())

    @property
    def num_pending(self) -> int:
        """Length of the longest pending chain of any rank, the root included."""
        return len(self.tokens) - min(self.held)

    @property
    def digest(self) -> int:
        """64-bit digest of the request, every tree drafted and every token committed so far."""
        return int.from_bytes(self._hash.digest(), "little")

    def build(self, max_depth: int) -> TokenTree:
        """Draft the next tree: the Jacobi window and the drafts under their budget, none deeper than `max_depth`."""
        tree = TokenTree(self.tokens[-1])
        if self.window is not None:
            self.window.add_to(tree, max_depth)
        budget = self.config.num_guess_nodes + self.config.trie_nodes
        self.probabilities = self.drafter.draft(tree, budget, max_depth)
        self._hash.update(array("q", tree.tokens).tobytes())
        self._hash.update(array("q", tree.parents).tobytes())
        return tree

    def advance(self, tree: TokenTree, path: Sequence[int], result: TreeResult, shards: Sequence[Shard]) -> list[int]:
        """Commit the accepted `path` and its bonus token; return the emitted tokens."""
        self.held = held_after(len(self.tokens), path, shards)
        emitted = [tree.tokens[node] for node in path[1:]]
        emitted.append(result.next_tokens[path[-1]])
        self.tokens += emitted
        self._hash.update(array("q", emitted).tobytes())
        self.drafter.observe(emitted)
        if self.table is not None:
            self.table.update(tree.tokens, result.candidates, result.scores)
        if self.window is not None:
            for ngram in self.window.advance(tree, result.next_tokens, emitted, self.tokens):
                self.drafter.pool.add(ngram)
        return emitted


def held_after(num_tokens: int, path: Sequence[int], shards: Sequence[Shard]) -> list[int]:
    """Per rank, the tokens held after a step that began with `num_tokens`: these and what it evaluated of `path`."""
    held = []
    for shard in shards:
        mine = set(shard.nodes)
        depth = 0  # the root ends every rank's pending chain, so all of them hold it now
        while depth + 1 < len(path) and path[depth + 1] in mine:
            depth += 1
        held.append(num_tokens + depth)
    return held
