"""The state of one sequence: its tokens on all ranks, and on its home ranks its drafting state. Twin: native/state.h.

Every rank updates its state by the same pure functions of the same gathered results. All ranks hold the tokens and the
number of tokens whose K/V each rank holds. The drafting state, recycled candidates included, exists on home ranks only:
a rank does not pay for the drafts of requests that others serve. When a rank becomes a home rank, all home ranks
rebuild this state from the tokens, before their next draft.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lpr.config import SamplingParams, TreeSizes
from lpr.core.accept import NOT_A_NUMBER, likely
from lpr.core.budget import AcceptanceHistory, Draft, DraftRequest
from lpr.core.digest import MASK64, Digest
from lpr.core.drafting import Drafter
from lpr.core.heads import HeadDraft
from lpr.core.partition import Shard
from lpr.core.recycle import CandidateTable
from lpr.core.suffix_index import SuffixIndex
from lpr.core.tree import TokenTree
from lpr.core.window import JacobiWindow

Counts = tuple[int, int, int, dict[tuple[int, int], int], dict[tuple[int, int], int]]
"""As SequenceState.take_counts."""


@dataclass(frozen=True, slots=True)
class TreeResult:
    """The target model's results for each node of a tree, in node order."""

    next_tokens: Sequence[int]  # the next token after the node, or a code below 0 (lpr.core.accept)
    candidates: Sequence[Sequence[int]]  # the k most likely next tokens, most likely first
    scores: Sequence[Sequence[int]]  # their scores (lpr.core.recycle.SCORE_STEPS)


class SequenceState:
    """One sequence: committed tokens, drafting state, and how much of it each rank's KV cache holds."""

    def __init__(
        self,
        tokens: list[int],
        params: SamplingParams,
        config: TreeSizes,
        num_ranks: int = 1,
        shared: SuffixIndex | None = None,
        num_computed_tokens: Sequence[int] | None = None,
        longest: int | None = None,
        stop_ids: Collection[int] = (),
        prediction: Sequence[int] = (),
        num_prompt: int = 0,
    ) -> None:
        """A sequence that continues `tokens` (at least one), a list that grows with it.

        Rank r holds the K/V of the first `num_computed_tokens[r]` tokens; default: none. The sequence ends with
        `longest` tokens, or with one of `stop_ids`. The tokens after the first `num_prompt` are expected to follow
        `prediction`.
        """
        self._longest, self._stop_ids = longest, frozenset(stop_ids)
        self.params = params
        self.config = config
        self.tokens = tokens
        self.num_computed_tokens = list(num_computed_tokens or [0] * num_ranks)
        """Per rank: the number of leading tokens whose K/V it holds."""
        self._homes = list(range(len(self.num_computed_tokens)))
        # One table per request: drafts then depend only on the request and the shared suffix index, so a job that is
        # restarted from its output file takes the same steps. (With one table for all requests, 10 ClassEval prompts
        # gave 9.77 instead of 9.85 tokens per step greedily, and 2.48 instead of 2.37 at temperature 0.8.)
        self.table: CandidateTable | None = None  # the recycled candidates of `drafter`
        self._shared = shared
        self._prediction, self._num_prompt = prediction, num_prompt
        self.drafter: Drafter | None = None  # on home ranks only; made at the first draft
        self.window: JacobiWindow | None = None
        self.acceptance = AcceptanceHistory()
        self.is_suspect = False
        """True if the last logits were not numbers. The next tree is the root alone, to find the cause."""
        self.care_at = 0
        """The length from which on `StepDraft.conclude` names the sequence as grown."""
        self.num_steps = self.num_emitted = 0
        """Published steps and their tokens, with those of an earlier state of the request."""
        self._counts = [0, 0, 0]
        self._drafted_nodes, self._accepted_nodes = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        self.probabilities: list[float] = []
        """Estimated path probability of each node drafted last; 0 where only the window proposed it."""
        self._drafted, self._committed = Digest(), Digest()
        # The parameters are included: if a rank sampled its nodes with another seed, all ranks would use its tokens and
        # no later digest would differ.
        for words in (self.tokens, repr(params).encode(), self.num_computed_tokens, prediction):
            self._committed.update(words)

    @property
    def homes(self) -> list[int]:
        """The ranks that evaluate its trees, ascending. If a rank joins, all of them rebuild their drafting state."""
        return self._homes

    @homes.setter
    def homes(self, ranks: Sequence[int]) -> None:
        if not set(ranks) <= set(self._homes):
            self.forget_drafts()
        self._homes = list(ranks)

    def forget_drafts(self) -> None:
        """Drop the drafting state: on a rank that is no longer a home rank, or on all home ranks."""
        self.drafter, self.table, self.window, self.probabilities = None, None, None, []
        self.acceptance = AcceptanceHistory()

    def _begin_drafting(self) -> Drafter:
        """Make the drafter from the tokens, as all home ranks do before the same step."""
        seed = self.params.seed & MASK64 if self.params.temperature > 0 else None
        self.table = CandidateTable() if self.config.num_recycled else None
        drafter = self.drafter = Drafter(
            self.config, self._shared, self.table, seed, self._prediction, self._num_prompt
        )
        drafter.observe(self.tokens)
        self._drafted = Digest()
        self._drafted.update([self.digest])
        return drafter

    @property
    def num_pending(self) -> int:
        """Length of the longest pending chain of any home rank, the root included."""
        return len(self.tokens) - min([self.num_computed_tokens[rank] for rank in self.homes])

    def num_above(self, rank: int) -> int:
        """Length of a rank's pending chain without the root."""
        return len(self.tokens) - 1 - self.num_computed_tokens[rank]

    @property
    def max_depth(self) -> int:
        """Greatest depth of a node that could still be emitted and followed by a bonus token."""
        longest = self._longest if self._longest is not None else len(self.tokens) + self.config.num_nodes
        return longest - len(self.tokens) - 1

    @property
    def digest(self) -> int:
        """64-bit digest of the request and every token committed so far, the same on all ranks."""
        return self._committed.value

    def continuation(self, tokens: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """As Drafter.continuation; nothing on a rank that has not drafted the sequence."""
        return self.drafter.continuation(tokens, count) if self.drafter is not None else ([], [])

    def build(self, max_depth: int, request: DraftRequest) -> Draft:
        """Draft the next tree: the Jacobi window if it runs, then drafts, none deeper than `max_depth`."""
        drafter = self.drafter or self._begin_drafting()
        tree = TokenTree(self.tokens[-1])
        if self.is_suspect:
            max_depth = 0
        if not request.window:
            self.window = None
        elif self.window is None or self.window.num_columns != request.window:
            self.window = JacobiWindow(request.window, self.config.ngram_size, self.tokens)
        if self.window is not None:
            self.window.add_to(tree, max_depth)
        num_window = len(tree)
        self.probabilities = drafter.draft(tree, request.nodes, max_depth, request.price, request.trusts)
        return Draft(tree, self.probabilities, num_window, request.trusts)

    def may_end(self, emitted: Sequence[int]) -> bool:
        """True if the sequence is as long as allowed, or if one of its last tokens `emitted` ends it."""
        is_full = self._longest is not None and len(self.tokens) >= self._longest
        return is_full or not self._stop_ids.isdisjoint(emitted)

    def count(self, tree: TokenTree, path: Sequence[int], num_emitted: int) -> None:
        """Count a step for `take_counts`."""
        self._counts = [old + new for old, new in zip(self._counts, (1, len(tree), num_emitted), strict=True)]
        self.num_steps, self.num_emitted = self.num_steps + 1, self.num_emitted + num_emitted
        nodes = list(zip(map(int, tree.sources), tree.depths, strict=True))
        self._drafted_nodes.update(nodes)
        self._accepted_nodes.update([nodes[node] for node in path])

    def take_counts(self) -> Counts | None:
        """Steps, nodes and tokens since the last call, and drafted and accepted nodes by source and depth.

        None without a step.
        """
        counts, drafted, accepted = self._counts, self._drafted_nodes, self._accepted_nodes
        self._counts, self._drafted_nodes, self._accepted_nodes = [0, 0, 0], Counter(), Counter()
        return (counts[0], counts[1], counts[2], dict(drafted), dict(accepted)) if counts[0] else None

    def tree_digest(self, tree: TokenTree) -> int:
        """64-bit digest of this tree, which is about to be evaluated, and all before it; the same on its home ranks.

        A sequence without a source of drafts has roots alone, which follow from the tokens.
        """
        sizes = self.config
        if not (sizes.trie_nodes or sizes.window_size or sizes.num_recycled or sizes.num_guesses):
            return self.digest
        assert self.drafter is not None, "only ranks that have drafted a tree know it"
        for words in (tree.tokens, tree.parents, [self.drafter.calibration.digest]):
            self._drafted.update(words)
        return self._drafted.value

    def advance(
        self,
        tree: TokenTree,
        path: Sequence[int],
        result: TreeResult,
        shards: Sequence[Shard],
        head: HeadDraft | None = None,
    ) -> list[int]:
        """Commit the accepted `path` and its bonus token; return the emitted tokens. `head` guesses the next tokens.

        After a failure there is no bonus token. A rank with NaN logits keeps no K/V of the step: an attention weight of
        0 times NaN is NaN, so one bad node breaks all that share its forward. The next step evaluates the root alone,
        which shows whether a draft or the root itself fails.
        """
        emitted = [tree.tokens[node] for node in path[1:]]
        bonus = result.next_tokens[path[-1]]
        if bonus >= 0:
            emitted.append(bonus)
        has_nan = [has_nan_result(shard, result) for shard in shards]
        held = num_computed_after(len(self.tokens), path, shards)
        self.tokens += emitted
        self.num_computed_tokens = [
            min(after, len(self.tokens) - 1) if shard.nodes and not has_nan else before
            for before, after, has_nan, shard in zip(self.num_computed_tokens, held, has_nan, shards, strict=True)
        ]
        self._committed.update(emitted)
        self.is_suspect = bonus == NOT_A_NUMBER
        if self.drafter is not None:
            if self.table is not None and result.candidates[0]:
                self.table.update(tree.tokens, result.candidates, result.scores)
            self._learn(self.drafter, tree, path, result, emitted)
            self.drafter.head = head
            if head is not None and head.is_copy:
                self.acceptance.pause = 0  # the copy's passes for the next tree are already paid for
        return emitted

    def _learn(
        self, drafter: Drafter, tree: TokenTree, path: Sequence[int], result: TreeResult, emitted: Sequence[int]
    ) -> None:
        """Update the drafting state by a step that emitted these tokens."""
        succeeded = result.next_tokens[path[-1]] >= 0
        if succeeded:
            drafter.learn(tree, path)
        if self.table is not None and result.candidates[0]:
            drafter.keep_candidates(tree, path, result.candidates, result.scores)
        drafter.observe(emitted)
        if self.window is not None and succeeded:
            for ngram in self.window.advance(tree, likely(result.next_tokens), emitted, self.tokens):
                drafter.pool.add(ngram)
        elif self.window is not None:
            self.window = JacobiWindow(self.window.num_columns, self.config.ngram_size, self.tokens)


def has_nan_result(shard: Shard, result: TreeResult) -> bool:
    """True if a rank that evaluated `shard` met logits that are not numbers."""
    if NOT_A_NUMBER not in result.next_tokens:
        return False
    return any(result.next_tokens[node] == NOT_A_NUMBER for node in shard.owned)


def num_computed_after(num_tokens: int, path: Sequence[int], shards: Sequence[Shard]) -> list[int]:
    """Per rank, the tokens whose K/V it holds after a step: the first `num_tokens` and its part of `path`."""
    held = []
    for shard in shards:
        mine = set(shard.nodes)
        depth = 0  # the root ends every rank's pending chain, so each rank has its K/V after the step
        while depth + 1 < len(path) and path[depth + 1] in mine:
            depth += 1
        held.append(num_tokens + depth)
    return held
