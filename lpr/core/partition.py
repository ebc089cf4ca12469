"""Partition: which rank evaluates which nodes of a token tree. Twin: native/partition.h.

A rank evaluates an ancestor-closed subtree, its *shard*. Every node has exactly one *owner*, whose next token is used
on all ranks (docs/rules.md, R1). Each rank owns one run of the depth-first order. Besides its run it needs only the
ancestors of the run's first node, so at most one branch per rank is evaluated twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lpr.core.tree import TokenTree


@dataclass(frozen=True)
class Shard:
    """One rank's part of a tree."""

    nodes: list[int]  # nodes to evaluate, ascending, so parents come first; the root always leads
    owned: list[int]  # the nodes whose result this rank contributes, ascending


def partition(tree: TokenTree, num_ranks: int, pending: Sequence[int], max_owned: int | None = None) -> list[Shard]:
    """Split `tree` into one shard per rank, as equal in evaluated tokens as runs of the depth-first order allow.

    `pending[r]` is the number of tokens that rank r evaluates above the root (its pending chain without the root); a
    rank with a longer chain gets fewer nodes. No rank owns more than `max_owned` nodes; ValueError if that leaves
    nodes without an owner. Deterministic: the same tree and lengths give the same shards on every rank.
    """
    if num_ranks == 1:
        everything = list(range(len(tree)))
        return [Shard(everything, everything)]
    order = depth_first(tree)
    limit = len(tree) if max_owned is None else max_owned
    if limit * num_ranks < len(tree):
        raise ValueError(f"{len(tree)} nodes do not fit {num_ranks} ranks that own at most {limit} each")
    low = max(1, -(-(len(tree) + sum(pending)) // num_ranks))
    high = len(tree) + max(pending)
    while low < high:  # the smallest size that lets the runs cover the tree
        middle = (low + high) // 2
        if sum(_run_lengths(tree, order, pending, middle, limit)) == len(tree):
            high = middle
        else:
            low = middle + 1
    lengths = _run_lengths(tree, order, pending, low, limit)
    shards, start = [], 0
    for length in lengths:
        run = order[start : start + length]
        start += length
        closure = set(run) | {0}
        if run:
            closure.update(tree.path_to(run[0]))
        shards.append(Shard(sorted(closure), sorted(run)))
    if start < len(tree):
        raise ValueError(f"{len(tree)} nodes do not fit {num_ranks} ranks that own at most {limit} each")
    return shards


def depth_first(tree: TokenTree) -> list[int]:
    """The nodes in depth-first order, children in the order in which they were drafted."""
    order: list[int] = []
    stack = [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(tree.children[node].values()))
    return order


def _run_lengths(tree: TokenTree, order: list[int], pending: Sequence[int], size: int, limit: int) -> list[int]:
    """Per rank, the number of nodes of `order` that it takes if no rank may evaluate more than `size` tokens."""
    lengths, start = [], 0
    for chain in pending:
        # The depth of the run's first node is the number of ancestors to evaluate besides the run.
        above = tree.depths[order[start]] if start < len(order) else 0
        length = max(0, min(size - chain - above, limit, len(order) - start))
        lengths.append(length)
        start += length
    return lengths
