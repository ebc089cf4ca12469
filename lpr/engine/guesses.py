"""The prediction head's part of a step: which path a rank takes for the accepted one, and what follows it.

The guesses travel in the step's one gather, so they are made before the rank knows the others' results. It walks its
own part of each tree by its own results. The rank that evaluated the end of the path sees that no child follows: it
guesses what comes after the bonus token. Of the others each keeps what its part has of the path. The block names the
end and the bonus token, so where the owners' results give another path all ranks drop the guesses alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lpr.core.accept import NOT_A_NUMBER
from lpr.core.heads import block_words
from lpr.engine.request import Request
from lpr.model.heads.guesses import Chain
from lpr.model.input_builder import Row
from lpr.model.runner import TreeModel
from lpr.native import StepDraft, TokenTree


@dataclass(frozen=True)
class Followed:
    """The accepted path of a tree, as far as a rank's part of it and its own results show it."""

    place: int  # of the tree among the rank's, and of its row
    index: int  # of the tree among all
    entries: list[int]  # of the row: its pending chain and the path
    end: int  # the last node
    bonus: int  # the token after it
    is_end: bool  # True if no child holds that token: the path ends here


def follow_all(draft: StepDraft, rows: Sequence[Row], results: torch.Tensor | None) -> list[Followed]:
    """The paths of this rank's trees by its `results`; none of a tree with a failure."""
    next_tokens = results[:, 0].tolist() if results is not None else []
    shards, start = draft.shards, 0
    all_followed: list[Followed] = []
    for place, (index, row) in enumerate(zip(draft.mine, rows, strict=True)):
        mine, tree = shards[index], draft.trees[index]
        assert mine is not None and tree is not None, "this rank has drafted the tree"
        found = next_tokens[start : start + row.num_results]
        start += row.num_results
        if not row.num_results or NOT_A_NUMBER in found:
            continue
        path, bonus, is_end = follow(tree, list(mine[draft.rank].nodes), found)
        if bonus < 0:
            continue
        above = row.num_entries - row.num_results
        entries = [*range(above), *(above + each for each, _ in path)]
        all_followed.append(Followed(place, index, entries, path[-1][1], bonus, is_end))
    return all_followed


def guess(
    model: TreeModel,
    decoding: Sequence[Request],
    filling: Sequence[tuple[Request, Sequence[int]]],
    draft: StepDraft,
    rows: Sequence[Row],
    fills: Sequence[Row],
    results: torch.Tensor | None,
    num_guesses: int,
) -> np.ndarray | None:
    """Let the head follow what this rank has evaluated; its blocks int32 [own trees, words], None without a head.

    `rows` and `fills` are the rank's, of requests of `decoding` and `filling` (StepPlan), `results` those of `rows`.
    """
    if not num_guesses:
        return None
    chains: list[Chain] = []
    ends: list[tuple[int, Followed]] = []  # with the number of the chain
    for each in follow_all(draft, rows, results):
        row = rows[each.place]
        tokens = [*row.tokens[each.entries[1:]].tolist(), each.bonus]
        if each.is_end and not model.rests:
            ends.append((len(chains), each))
        chains.append(Chain(row, each.entries, tokens, decoding[each.index].params if each.is_end else None))
    filled = [request for request, counts in filling if counts[draft.rank]]
    for request, row in zip(filled, fills, strict=True):
        known = request.running.tokens[row.num_cached + 1 : row.num_cached + row.num_entries + 1]
        chains.append(Chain(row, range(row.num_entries), list(known), None))
    blocks = np.zeros((len(draft.mine), block_words(num_guesses)), np.int32)
    if chains:
        drafts = model.guess(chains)
        for number, each in ends:
            blocks[each.place] = drafts[number].pack(each.end, each.bonus, num_guesses)
    return blocks


def follow(
    tree: TokenTree, nodes: Sequence[int], next_tokens: Sequence[int]
) -> tuple[list[tuple[int, int]], int, bool]:
    """The accepted path as far as `nodes`, a rank's part of `tree`, have it, by their `next_tokens`.

    Returns the path as pairs (place among `nodes`, node), the token after its last node, and True if it ends there.
    """
    place = {node: index for index, node in enumerate(nodes)}
    path, token = [(0, 0)], next_tokens[0]
    while token >= 0 and (child := tree.find(path[-1][1], token)) >= 0:
        if child not in place:
            return path, token, False
        path.append((place[child], child))
        token = next_tokens[place[child]]
    return path, token, True
