"""A step's two halves on the host: from the states to what goes up to the device, and from its results back to them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lpr.core import headers
from lpr.core.accept import accept
from lpr.core.budgets import Budgets
from lpr.core.carried import node_words, read_tree
from lpr.core.partition import Shard, partition
from lpr.core.state import SequenceState, TreeResult, has_nan_result
from lpr.core.tree import TokenTree

WORD_BITS = 64


@dataclass
class StepDraft:
    """What a step evaluates of its decoding sequences: a tree of each that this rank serves, split over its ranks."""

    states: Sequence[SequenceState]
    trees: list[TokenTree | None]
    """None where other ranks serve the sequence, which alone draft its tree; once concluded, all trees."""
    shards: list[list[Shard] | None]
    """Per tree, each rank's part of it; None as for `trees`."""
    rank: int
    """This rank."""
    served: Sequence[Sequence[int]]
    """Per rank, the trees that it evaluates, in the order of its rows."""
    num_entries: list[int] = field(default_factory=list)
    """Per rank, the tokens that it has evaluated, pending chains and nodes; once concluded."""

    def __len__(self) -> int:
        """Number of trees."""
        return len(self.trees)

    @property
    def has_nodes(self) -> bool:
        """Has one of this rank's trees more than its root?"""
        return any(len(self._tree(index)) > 1 for index in self.mine)

    @property
    def mine(self) -> Sequence[int]:
        """The trees that this rank evaluates."""
        return self.served[self.rank]

    def _tree(self, index: int) -> TokenTree:
        tree = self.trees[index]
        assert tree is not None, "this rank has not drafted the tree"
        return tree

    def _shard(self, index: int) -> Shard:
        split = self.shards[index]
        assert split is not None, "this rank has not drafted the tree"
        return split[self.rank]

    def rows(self) -> list[tuple[int, int, np.ndarray]]:
        """This rank's part of each tree of its own: tokens computed before, nodes to evaluate, and `row_entries`."""
        found = []
        for index in self.mine:
            state, shard = self.states[index], self._shard(index)
            entries = row_entries(state, self._tree(index), shard, self.rank)
            found.append((state.num_computed_tokens[self.rank], len(shard.nodes), entries))
        return found

    def placement(self, capacity: int) -> np.ndarray:
        """Where this rank's results belong, int64 [3, n]: of every node that it owns two places, and its words.

        The first place is that among the nodes of all rows, the second that in a table of `capacity` places for each
        tree. The words say what else travels of the node (see lpr.core.carried).
        """
        sources: list[int] = []
        targets: list[int] = []
        words = [np.empty(0, np.int64)]
        start = 0
        for place, index in enumerate(self.mine):
            shard = self._shard(index)
            words.append(node_words(self._tree(index), shard.owned))
            sources += [start + int(entry) for entry in np.searchsorted(shard.nodes, shard.owned)]
            targets += range(place * capacity, place * capacity + len(shard.owned))
            start += len(shard.nodes)
        return np.stack([np.array(sources, np.int64), np.array(targets, np.int64), np.concatenate(words)])

    def headers(self, digest: int, num_command_bytes: int, num_candidates: int, is_compared: bool) -> np.ndarray:
        """What this rank says besides its results (see lpr.core.headers), int32 [words].

        `digest` is of what all ranks hold. Trees are signed if there is a rank to compare them with.
        """
        signed = [self.states[index].sign_tree(self._tree(index)) if is_compared else 0 for index in self.mine]
        owned = [len(self._shard(index).owned) for index in self.mine]
        return headers.pack(digest, num_command_bytes, num_candidates, signed, owned)

    def agrees(self, said: np.ndarray) -> bool:
        """Do all ranks hold the same by their headers, int32 [world ranks, words]?"""
        return headers.agree(said, self.served)

    def conclude(self, values: np.ndarray, said: np.ndarray, budgets: Budgets) -> list[Conclusion]:
        """Accept a path of each tree by what the ranks say of its nodes, and advance the states and `budgets`.

        `values` is int32 [ranks, trees, capacity, result_words(k) or more] (see TreeResult.from_payloads), each rank's
        trees as `served` says. Where this rank does not serve all trees, the last two words are those of
        lpr.core.carried. `said` are the headers of these ranks, int32 [ranks, words].
        """
        concluded, places = [], self.places()
        self.num_entries = [0] * len(self.served)
        for index, state in enumerate(self.states):
            homes, tree, split = state.homes, self.trees[index], self.shards[index]
            is_mine = tree is not None
            if tree is None or split is None:
                where = enumerate(places[index])
                owned = [headers.num_owned(said, rank, place) if rank in homes else 0 for rank, place in where]
                tree, split = read_tree(values[..., -2:], homes, places[index], owned, len(self.served))
                self.trees[index], self.shards[index] = tree, split
                state.forget_drafts()
            num_candidates = min(headers.num_candidates(said, rank) for rank in homes)
            result = TreeResult.from_payloads(values, places[index], split, num_candidates)
            path = accept(tree, result.next_tokens)
            kept = kept_entries(state, path, result, split[self.rank], self.rank) if is_mine else []
            bonus = result.next_tokens[path[-1]]
            for rank in homes:
                chain = len(state.tokens) - 1 - state.num_computed_tokens[rank]
                self.num_entries[rank] += chain + len(split[rank].nodes)
            emitted = state.advance(tree, path, result, split)
            failure = bonus if bonus < 0 else None
            may_end = failure is not None or state.may_end(emitted)
            concluded.append(Conclusion(tree, split, result.next_tokens, path, emitted, kept, failure, may_end))
        for homes, members in groups(self.states, self.mine):
            trees = [concluded[index].tree for index in members]
            histories = [self.states[index].acceptance for index in members]
            budgets.of(homes).observe(trees, [concluded[index].path for index in members], histories)
        return concluded

    def places(self) -> list[list[int]]:
        """Per tree and rank, where in that rank's results the tree is; 0 where it is not."""
        found = [[0] * len(self.served) for _ in self.trees]
        for rank, served in enumerate(self.served):
            for place, index in enumerate(served):
                found[index][rank] = place
        return found


@dataclass(frozen=True)
class Conclusion:
    """What a step did to one sequence."""

    tree: TokenTree
    shards: list[Shard]
    next_tokens: Sequence[int]
    """Per node (see TreeResult)."""
    path: list[int]
    """Accepted nodes from the root downwards."""
    emitted: list[int]
    """The tokens of the path below the root, and the bonus token."""
    kept: list[int] | None
    """Entries of this rank's row whose K/V stays; None where the rank met logits that are not numbers."""
    failure: int | None
    """Why there is no bonus token (a code of lpr.core.accept)."""
    may_end: bool
    """Is there a failure, or may the sequence end here (see SequenceState.may_end)?"""

    @property
    def is_spoilt(self) -> bool:
        """Did this rank meet logits that are not numbers?"""
        return self.kept is None


def draft_step(
    states: Sequence[SequenceState],
    depths: Sequence[int],
    budgets: Budgets,
    num_ranks: int,
    max_owned: int,
    rank: int,
    served: Sequence[Sequence[int]] | None = None,
) -> StepDraft:
    """Draft a tree per sequence that `rank` serves, none deeper than its entry of `depths`; cut all, and split them.

    Sequences with the same home ranks share a budget. `served` says per rank which of the sequences have it as a home
    rank, in the order of its rows; default: all of them.
    """
    if served is None:
        served = [list(range(len(states)))] * num_ranks
    trees: list[TokenTree | None] = [None] * len(states)
    shards: list[list[Shard] | None] = [None] * len(states)
    budgets.begin_step()
    for homes, members in groups(states, served[rank]):
        these = [states[index] for index in members]
        budget = budgets.of(homes)
        budget.begin(len(these), *workload(these, homes, served), len(homes))
        drafts = [
            state.build(depths[index], budget.request(state.acceptance))
            for state, index in zip(these, members, strict=True)
        ]
        budget.cut(drafts, [state.acceptance for state in these])
        for state, index, draft in zip(these, members, drafts, strict=True):
            trees[index], shards[index] = draft.tree, split(state, draft.tree, num_ranks, max_owned)
    return StepDraft(states, trees, shards, rank, served)


def groups(states: Sequence[SequenceState], members: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Sets of home ranks, and those of `members` that have just these, both in the order of the states."""
    found: dict[tuple[int, ...], list[int]] = {}
    for index in sorted(members):
        found.setdefault(tuple(states[index].homes), []).append(index)
    return [(list(homes), those) for homes, those in found.items()]


def kept_entries(
    state: SequenceState, path: Sequence[int], result: TreeResult, shard: Shard, rank: int
) -> list[int] | None:
    """The entries of a rank's row whose K/V stays: its pending chain, and the path as far as it evaluated it."""
    if has_nan_result(shard, result):
        return None
    if not shard.nodes:
        return []
    above = len(state.tokens) - state.num_computed_tokens[rank] - 1
    entry = {node: above + i for i, node in enumerate(shard.nodes)}
    on_path = itertools.takewhile(entry.__contains__, path)
    return [*range(above), *(entry[node] for node in on_path)]


def cache_moves(concluded: Sequence[Conclusion], first_rows: Sequence[int]) -> np.ndarray:
    """The cache rows that a step's accepted entries lie in, and those where they belong: int64 [2, n].

    `first_rows` are the cache rows of each row's first entry. What lies where it belongs is left out.
    """
    moves = [
        (first + entry, first + index)
        for each, first in zip(concluded, first_rows, strict=True)
        for index, entry in enumerate(each.kept or ())
        if entry != index
    ]
    return np.array(moves, np.int64).reshape(-1, 2).T


def workload(
    states: Sequence[SequenceState],
    homes: Sequence[int] | None = None,
    served: Sequence[Sequence[int]] | None = None,
) -> tuple[int, int]:
    """What a step costs besides its nodes: the most pending tokens of a rank, and the longest cached length.

    The ranks are `homes`, default: all. What else they evaluate by `served` (see `draft_step`) counts a token each.
    """
    if not states:
        return 0, 0
    pending = [
        sum(len(state.tokens) - 1 - state.num_computed_tokens[rank] for state in states)
        + (len(served[rank]) - len(states) if served is not None else 0)
        for rank in (homes if homes is not None else range(len(states[0].num_computed_tokens)))
    ]
    return max(pending), max(len(state.tokens) for state in states)


def split(state: SequenceState, tree: TokenTree, num_ranks: int, max_owned: int | None) -> list[Shard]:
    """The shards of `tree`; home ranks with a longer pending chain get fewer nodes, other ranks none."""
    pending = [len(state.tokens) - state.num_computed_tokens[rank] - 1 for rank in state.homes]
    shards = partition(tree, len(state.homes), pending, max_owned)
    if len(state.homes) == num_ranks:
        return shards
    of_homes = dict(zip(state.homes, shards, strict=True))
    return [of_homes.get(rank) or Shard([], []) for rank in range(num_ranks)]


def row_entries(state: SequenceState, tree: TokenTree, shard: Shard, rank: int) -> np.ndarray:
    """Tokens, parents and positions, int32 [3, entries], of a rank's part of a step.

    It is the rank's pending chain, which ends in the root, and the shard's nodes below it. Parents are entries; -1
    attaches to the committed tokens that the rank has computed.
    """
    computed = state.num_computed_tokens[rank]
    chain = state.tokens[computed:]
    above = len(chain) - 1
    entry = {node: above + i for i, node in enumerate(shard.nodes)}
    root_position = computed + above
    tokens = chain + [tree.tokens[node] for node in shard.nodes[1:]]
    parents = list(range(-1, above)) + [entry[tree.parents[node]] for node in shard.nodes[1:]]
    positions = list(range(computed, root_position)) + [root_position + tree.depths[node] for node in shard.nodes]
    return np.array([tokens, parents, positions], np.int32)


def place_rows(
    words: np.ndarray,
    batch: int,
    num_entries: int,
    slots: Sequence[int],
    rows_per_slot: int,
    num_cached: Sequence[int],
    entries: Sequence[np.ndarray],
) -> None:
    """Write a step's rows into int32 `words`: B rows of T entries each, those of each row at its end.

    In this order: ancestors in bits [B, T, 2 * ceil(T / 64)], tokens, positions and cache rows [B, T], committed and
    real entries [B]. `entries` are int32 [3, n] per row (see `row_entries`); rows beyond them are empty. What is not an
    entry is written to the spare row of its slot.
    """
    num_words = -(-num_entries // WORD_BITS)
    sizes = [(batch, num_entries, 2 * num_words), *[(batch, num_entries)] * 3, (batch,), (batch,)]
    ends = np.cumsum([int(np.prod(size)) for size in sizes]).tolist()
    begins = [0, *ends[:-1]]
    parts = [words[begin:end].reshape(size) for begin, end, size in zip(begins, ends, sizes, strict=True)]
    words[: ends[-1]] = 0
    bits, tokens, positions, write_rows, cached, real = parts
    for index, slot in enumerate(slots):
        write_rows[index] = (slot + 1) * rows_per_slot - 1  # the spare row
        if index >= len(entries) or not entries[index].shape[1]:
            continue
        count = entries[index].shape[1]
        first = num_entries - count
        tokens[index, first:], parents, positions[index, first:] = entries[index]
        bits[index, first:] = ancestor_words(parents, num_words).view(np.int32)
        write_rows[index, first:] = np.arange(count) + (slot * rows_per_slot + num_cached[index])
        cached[index], real[index] = num_cached[index], count


def ancestor_words(parents: Sequence[int] | np.ndarray, num_words: int) -> np.ndarray:
    """`core.tree.ancestor_bits` as little-endian words: uint64 [n, num_words], 64 * num_words >= n.

    Pointer doubling: after round k an entry holds its ancestors up to distance 2^k, so a chain of 512 entries takes
    nine rounds and a flat tree one or two.
    """
    count = len(parents)
    jump = np.full(count + 1, count, np.int64)  # the last row stands for "no parent"
    jump[:count] = parents
    jump[jump < 0] = count
    words = np.zeros((count + 1, num_words), np.uint64)
    entry = np.arange(count)
    words[entry, entry // WORD_BITS] = np.left_shift(np.uint64(1), (entry % WORD_BITS).astype(np.uint64))
    while jump.min() < count:
        words |= words[jump]
        jump = jump[jump]
    return words[:count]
