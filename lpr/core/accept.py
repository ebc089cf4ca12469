"""Acceptance: follow the target model's own choices down the tree."""

from __future__ import annotations

from collections.abc import Sequence

from lpr.core.tree import TokenTree


def accept(tree: TokenTree, next_tokens: Sequence[int]) -> list[int]:
    """Return the accepted path, nodes from the root downwards.

    `next_tokens[i]` is the token that the target model chooses after node i. The path goes on while some
    child of its last node holds that choice, so every accepted token is the one that plain decoding would have
    emitted, whoever drafted it. The emitted tokens are those of `path[1:]` and one bonus token,
    `next_tokens[path[-1]]`: a step always emits at least one.
    """
    path = [0]
    node: int | None = 0
    while (node := tree.children[path[-1]].get(next_tokens[path[-1]])) is not None:
        path.append(node)
    return path
