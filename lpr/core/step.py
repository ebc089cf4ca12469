"""The two host phases of a step: drafting and splitting the trees, then accepting paths. Twin: native/step.h.

Each phase is one call: `draft_step` returns the inputs of the forward and the gather, `StepDraft.conclude` takes the
gathered payloads and returns each sequence's outcome.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lpr.core import wire
from lpr.core.accept import accept
from lpr.core.budgets import Budgets
from lpr.core.constants import LONGEST_CATCH_UP
from lpr.core.digest import Digest
from lpr.core.heads import read_ahead, read_block
from lpr.core.partition import Shard, partition
from lpr.core.rows import row_entries
from lpr.core.state import SequenceState, TreeResult, has_nan_result
from lpr.core.tree import TokenTree


@dataclass(frozen=True)
class Conclusion:
    """The outcome of a step for one sequence."""

    tree: TokenTree
    shards: list[Shard]  # per rank, its part of the tree
    next_tokens: Sequence[int]  # per node (TreeResult)
    path: list[int]  # accepted nodes from the root downwards
    emitted: list[int]  # the tokens of the path below the root, and the bonus token
    has_nan: bool  # True if this rank met logits that are not numbers; it keeps no K/V of the step then
    failure: int | None  # why there is no bonus token (a code of lpr.core.accept)
    may_end: bool  # True after a failure, or if the sequence may end here (SequenceState.may_end)


class Concluded(list[Conclusion]):
    """The conclusions of all sequences of a step, and the indices of those that need attention."""

    def __init__(self) -> None:
        """Those of a step whose sequences follow."""
        super().__init__()
        self._states: list[SequenceState] = []
        self.ending: list[int] = []
        """The sequences that may end (Conclusion.may_end)."""
        self.grown: list[int] = []
        """The sequences that are as long as their `care_at`."""
        self.with_nan: list[int] = []
        """The sequences with `Conclusion.has_nan`."""

    def add(self, conclusion: Conclusion, state: SequenceState) -> None:
        """Append the conclusion of the sequence with the state `state`."""
        is_grown = len(state.tokens) >= state.care_at
        marks = (self.ending, conclusion.may_end), (self.grown, is_grown), (self.with_nan, conclusion.has_nan)
        for indices, is_one in marks:
            if is_one:
                indices.append(len(self))
        self.append(conclusion)
        self._states.append(state)

    def publish(self) -> None:
        """Count the step in each of its states (SequenceState.take_counts); a second call does nothing."""
        for state, each in zip(self._states, self, strict=False):
            state.count(each.tree, each.path, len(each.emitted))
        self._states.clear()


@dataclass
class StepDraft:
    """The drafted trees of a step: one per sequence that this rank serves, split over the sequence's home ranks."""

    states: Sequence[SequenceState]
    rank: int  # this rank
    served: wire.Served  # per rank, the trees that it evaluates, in the order of its rows
    capacity: int  # most nodes of a tree that a rank may own
    trees: list[TokenTree | None]
    """None if only other ranks serve the sequence and draft its tree (see Conclusion)."""
    shards: list[list[Shard] | None]  # per tree, each rank's part of it; None as for `trees`
    num_candidates: int = 0
    """Candidates per node: 0 if no tree has a draft, because computing them slows plain decoding by 4 %."""
    columns: np.ndarray = field(default_factory=lambda: np.empty((3, 0), np.int64))
    """Int64 [3, n], per tree of this rank: tokens computed before, nodes to evaluate, and all entries to evaluate."""
    entries: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """`row_entries` of each tree of this rank, one after the other."""
    placement: np.ndarray = field(default_factory=lambda: np.empty((3, 0), np.int64))
    """Int64 [3, n], per node that this rank owns: its index among the evaluated nodes of all rows, its index in the
    payload's tables, and its words (wire.node_words)."""
    header: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """This rank's header of the payload (lpr.core.wire)."""
    num_entries: list[int] = field(default_factory=list)
    """Per rank, the evaluated tokens (pending chains and nodes); set by `conclude`."""

    def __len__(self) -> int:
        return len(self.trees)

    @property
    def mine(self) -> Sequence[int]:
        return self.served[self.rank]

    @property
    def totals(self) -> tuple[int, int, int]:
        """Entries of all rows, those with results, and the most cached tokens and entries of a row."""
        cached, results, entries = self.columns
        return int(entries.sum()), int(results.sum()), int((cached + entries).max(initial=0))

    def own(self, index: int) -> tuple[TokenTree, Shard]:
        """A tree that this rank has drafted, and its part of it."""
        tree, shards = self.trees[index], self.shards[index]
        assert tree is not None and shards is not None, "this rank has not drafted the tree"
        return tree, shards[self.rank]

    def conclude(
        self,
        payloads: np.ndarray,
        width: int,
        budgets: Budgets,
        num_guesses: int = 0,
        drafting: Sequence[int] = (),
    ) -> tuple[Concluded, np.ndarray]:
        """Accept a path of each tree, and advance the states and `budgets`.

        `payloads` is int32 [world ranks, words], with tables of `width` words a node and room for `num_guesses` of a
        head (lpr.core.wire); of the tp ranks of a replica the first one's payload counts (rule R6). Also returns the
        entries whose K/V must move, int64 [3, n]: this rank's row, the source entry and the target entry. Ranks of
        `drafting` serve no tree and draft for all. Raises ValueError, before anything has changed, if the ranks'
        headers differ or a payload holds no valid tree.
        """
        if not wire.headers_agree(payloads, self.served):
            raise ValueError("the headers of the ranks differ")
        if drafting and len(self.states) > wire.room_of(payloads.shape[1], self.capacity, width, num_guesses):
            raise ValueError("the payloads do not hold the drafts of all trees")
        payloads = payloads[:: len(payloads) // len(self.served)]
        tables = wire.tables_of(payloads, self.capacity, width, num_guesses)
        blocks = wire.blocks_of(payloads, self.capacity, width, num_guesses)
        concluded = Concluded()
        kept: dict[int, list[int]] = {}
        self.num_entries = [0] * len(self.served)
        for index, state in enumerate(self.states):
            is_mine = self.trees[index] is not None
            tree, shards, result = self._read(index, payloads, tables)
            path = accept(tree, result.next_tokens)
            has_nan = is_mine and has_nan_result(shards[self.rank], result)
            if is_mine and not has_nan:
                kept[index] = kept_entries(state, path, shards[self.rank], self.rank)
            for rank in state.homes:
                self.num_entries[rank] += state.num_above(rank) + len(shards[rank].nodes)
            bonus = result.next_tokens[path[-1]]
            places = wire.places_of(index, self.served)
            sent = [blocks[rank, places[rank]] for rank in state.homes] if num_guesses else []
            head = next(filter(None, (read_block(block, path[-1], bonus) for block in sent)), None)
            if num_guesses and bonus >= 0:
                ahead = [blocks[rank, index] for rank in drafting]
                head = read_ahead(ahead, [*(tree.tokens[node] for node in path[1:]), bonus]) or head
            emitted = state.advance(tree, path, result, shards, head)
            failure = bonus if bonus < 0 else None
            may_end = failure is not None or state.may_end(emitted)
            each = Conclusion(tree, shards, result.next_tokens, path, emitted, has_nan, failure, may_end)
            concluded.add(each, state)
        for homes, members in groups(self.states, self.mine):
            trees = [concluded[index].tree for index in members]
            histories = [self.states[index].acceptance for index in members]
            budgets.of(homes).observe(trees, [concluded[index].path for index in members], histories)
        moves = [
            (row, entry, place)
            for row, index in enumerate(self.mine)
            for place, entry in enumerate(kept.get(index, ()))
            if entry != place
        ]
        return concluded, np.array(moves, np.int64).reshape(-1, 3).T

    def _read(self, index: int, payloads: np.ndarray, tables: np.ndarray) -> tuple[TokenTree, list[Shard], TreeResult]:
        """A tree, its shards and its results, from the payloads of its home ranks."""
        homes, places = self.states[index].homes, wire.places_of(index, self.served)
        tree, shards = self.trees[index], self.shards[index]
        if tree is None or shards is None:
            counts = [0] * len(self.served)
            for rank in homes:
                counts[rank] = int(wire.tree_header(payloads[rank], places[rank])[2])
            words = tables[..., -wire.NUM_NODE_WORDS :]
            tree, shards = wire.read_tree(words, homes, places, counts, len(self.served))
            self.states[index].forget_drafts()
        k = min(wire.num_candidates(payloads[rank]) for rank in homes)
        return tree, shards, wire.read_result(tables, places, shards, k)


def draft_step(
    states: Sequence[SequenceState],
    budgets: Budgets,
    rank: int,
    served: wire.Served,
    capacity: int,
    num_candidates: int = 0,
    num_command_bytes: int = 0,
    digests: Sequence[int] | None = None,
    num_threads: int = 1,
) -> StepDraft:
    """Draft a tree for each of `states` that `rank` serves, cut the trees to the nodes that pay, and split them.

    `served` lists, per rank, the sequences of which it is a home rank, in the order of its rows. Sequences with the
    same home ranks share a budget. `digests` are those of other replicated state; None if there is no rank to compare
    with. The twin drafts and concludes large trees on `num_threads` threads, which changes no result.
    """
    num_ranks = len(served)
    draft = StepDraft(states, rank, served, capacity, [None] * len(states), [None] * len(states))
    for homes, members in groups(states, served[rank]):
        these = [states[index] for index in members]
        budget = budgets.of(homes)
        budget.begin(len(these), most_pending(these, homes, served), len(homes))
        drafts = [state.build(state.max_depth, budget.request(state.acceptance)) for state in these]
        budget.cut(drafts, [state.acceptance for state in these])
        for state, index, each in zip(these, members, drafts, strict=True):
            draft.trees[index], draft.shards[index] = each.tree, split(state, each.tree, num_ranks, capacity)
    own = [draft.own(index) for index in draft.mine]
    if any(len(tree) > 1 for tree, _ in own):
        draft.num_candidates = num_candidates
    rows = [row_entries(states[i], *each, rank) for i, each in zip(draft.mine, own, strict=True)]
    cached = [states[index].num_computed_tokens[rank] for index in draft.mine]
    num_results = [len(shard.nodes) for _, shard in own]
    draft.columns = np.array([cached, num_results, [each.shape[1] for each in rows]], np.int64)
    draft.entries = np.concatenate([np.empty(0, np.int32), *[each.reshape(-1) for each in rows]])
    draft.placement = placement(own, capacity)
    shared = Digest()
    tree_digests = [0] * len(own)
    if digests is not None:
        shared.update([*(state.digest for state in states), *digests])
        tree_digests = [states[index].tree_digest(tree) for index, (tree, _) in zip(draft.mine, own, strict=True)]
    counts = [len(shard.owned) for _, shard in own]
    draft.header = wire.pack_header(shared.value, num_command_bytes, draft.num_candidates, tree_digests, counts)
    return draft


def groups(states: Sequence[SequenceState], members: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Per set of home ranks, those of `members` that have exactly these; both in the order of the states."""
    found: dict[tuple[int, ...], list[int]] = {}
    for index in sorted(members):
        found.setdefault(tuple(states[index].homes), []).append(index)
    return [(list(homes), those) for homes, those in found.items()]


def expectations(
    states: Sequence[SequenceState], num_ranks: int, first_tokens: float, first_steps: int
) -> tuple[dict[tuple[int, ...], tuple[int, int, float]], list[int]]:
    """What is known of a step beforehand, by home ranks: sequences, most tokens of one, and tokens that they may emit.

    A sequence is expected to emit its mean, in which `first_steps` of `first_tokens` count as well. Also returns the
    pending tokens of each rank, roots excluded.
    """
    found: dict[tuple[int, ...], tuple[int, int, float]] = {}
    pending = [0] * num_ranks
    for state in states:
        mean = (first_tokens * first_steps + state.num_emitted) / (first_steps + state.num_steps)
        count, longest, expected = found.get(tuple(state.homes), (0, 0, 0.0))
        found[tuple(state.homes)] = count + 1, max(longest, len(state.tokens)), expected + mean
        for rank in state.homes:
            pending[rank] += state.num_above(rank)
    return found, pending


def most_pending(states: Sequence[SequenceState], homes: Sequence[int], served: wire.Served) -> int:
    """The most tokens that one of `homes` evaluates besides the trees of `states`.

    A tree of another sequence that the rank serves counts as one token, and the rest of a prompt as nothing.
    """
    above = [[state.num_above(rank) for state in states] for rank in homes]
    chains = [sum(count for count in counts if count <= LONGEST_CATCH_UP) for counts in above]
    return max(chain + len(served[rank]) - len(states) for chain, rank in zip(chains, homes, strict=True))


def split(state: SequenceState, tree: TokenTree, num_ranks: int, max_owned: int) -> list[Shard]:
    """The shards of `tree`; home ranks with a longer pending chain get fewer nodes, other ranks none."""
    pending = [state.num_above(rank) for rank in state.homes]
    of_homes = dict(zip(state.homes, partition(tree, len(pending), pending, max_owned), strict=True))
    return [of_homes.get(rank) or Shard([], []) for rank in range(num_ranks)]


def placement(own: Sequence[tuple[TokenTree, Shard]], capacity: int) -> np.ndarray:
    """`StepDraft.placement`."""
    sources: list[int] = []
    targets: list[int] = []
    words = [np.empty(0, np.int64)]
    start = 0
    for place, (tree, shard) in enumerate(own):
        words.append(wire.node_words(tree, shard.owned))
        sources += [start + int(entry) for entry in np.searchsorted(shard.nodes, shard.owned)]
        targets += range(place * capacity, place * capacity + len(shard.owned))
        start += len(shard.nodes)
    return np.stack([np.array(sources, np.int64), np.array(targets, np.int64), np.concatenate(words)])


def kept_entries(state: SequenceState, path: Sequence[int], shard: Shard, rank: int) -> list[int]:
    """The entries of a rank's row whose K/V is kept: its pending chain, and the evaluated part of the path."""
    if not shard.nodes:
        return []
    above = state.num_above(rank)
    entry = {node: above + i for i, node in enumerate(shard.nodes)}
    on_path = itertools.takewhile(entry.__contains__, path)
    return [*range(above), *(entry[node] for node in on_path)]
