"""The prediction head's part of a step: predict the accepted path from local results, and guess what follows it.

The step's one gather carries the guesses, so they are made before the rank knows the other ranks' results. The rank
walks its own shard of each tree by its own results. The rank that evaluated the end of the path sees that no child
follows, and guesses the tokens after the bonus token. Every other rank keeps its part of the path. A block names the
path's end and the bonus token, so if the owners' results give another path, all ranks drop the guesses.
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
    """The accepted path of a tree, as predicted from a rank's shard and its own results."""

    place: int  # index of the tree among the rank's, and of its row
    index: int  # index of the tree among all
    entries: list[int]  # entries of the row: its pending chain and the path
    end: int  # the last node
    bonus: int  # the token after it
    is_end: bool  # True if no child holds that token: the path ends here


def follow_all(draft: StepDraft, rows: Sequence[Row], results: torch.Tensor | None) -> list[Followed]:
    """The predicted paths of this rank's trees, from its `results`; trees with a failure are left out."""
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
    """Feed this rank's evaluated entries to the head; returns its blocks, int32 [own trees, words], None without one.

    `rows` and `fills` are of the requests `decoding` and `filling` (StepPlan); `results` are those of `rows`.
    """
    if not num_guesses:
        return None
    chains: list[Chain] = []
    ends: list[tuple[int, Followed]] = []  # (index of the chain, path)
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
    """The accepted path within `nodes`, a rank's part of `tree`, by their `next_tokens`.

    Returns the path as pairs (index in `nodes`, node), the token after its last node, and True if the path ends there.
    """
    place = {node: index for index, node in enumerate(nodes)}
    path, token = [(0, 0)], next_tokens[0]
    while token >= 0 and (child := tree.find(path[-1][1], token)) >= 0:
        if child not in place:
            return path, token, False
        path.append((place[child], child))
        token = next_tokens[place[child]]
    return path, token, True
