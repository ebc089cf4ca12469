"""Acceptance: follow the target model's own choices down the tree. Twin: native/accept.h.

A node's result is one number. From 0 on it is the next token. Below 0 it is one of the two failures here, or a guess
(`as_guess`) at a node that no path of chosen tokens leads to, so that the request's logits processors were not run.
"""

from __future__ import annotations

from collections.abc import Sequence

from lpr.core.tree import TokenTree

NOT_A_NUMBER = -1  # the model's logits after the node are not numbers, or all -inf: there is nothing to choose from
PROCESSOR_FAILED = -2  # a logits processor of the request raised an error, or left nothing to choose from


def as_guess(token: int) -> int:
    """The code of a guess at a next token, and the token of such a code (below `PROCESSOR_FAILED`)."""
    return -3 - token


def likely(next_tokens: Sequence[int]) -> list[int]:
    """A token for every node, to draft from: the chosen one, the guess, or 0 after a failure."""
    return [code if code >= 0 else max(0, as_guess(code)) for code in next_tokens]


def accept(tree: TokenTree, next_tokens: Sequence[int]) -> list[int]:
    """Return the accepted path, nodes from the root downwards.

    `next_tokens[i]` is the token that the target model chooses after node i, or a code below 0. The path goes on while
    some child of its last node holds that choice, so every accepted token is the one that plain decoding would have
    emitted, whoever drafted it. It ends at a failure, and before a node of which there is but a guess. The emitted
    tokens are those of `path[1:]` and, unless it failed, one bonus token, `next_tokens[path[-1]]`.
    """
    path = [0]
    while (node := tree.find(path[-1], next_tokens[path[-1]])) >= 0:
        if next_tokens[node] < PROCESSOR_FAILED:
            break
        path.append(node)
    return path
