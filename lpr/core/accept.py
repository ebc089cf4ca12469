"""Acceptance: follow the target model's own choices down the tree. Twin: native/accept.h.

A node's result is one number. A value of 0 or more is the next token id. A negative value is one of the two failure
codes below, or an encoded guess (`as_guess`): the node is off every path of chosen tokens, so the request's logits
processors were not run there.
"""

from __future__ import annotations

from collections.abc import Sequence

from lpr.core.tree import TokenTree

NOT_A_NUMBER = -1  # the logits after the node contain NaN, or all are -inf
PROCESSOR_FAILED = -2  # a logits processor of the request raised an error, or masked every token


def as_guess(token: int) -> int:
    """Encode a guessed token as a code below `PROCESSOR_FAILED`, or decode such a code (the map is its own inverse)."""
    return -3 - token


def likely(next_tokens: Sequence[int]) -> list[int]:
    """Per node, a token to draft from: the chosen token, the guess, or 0 after a failure."""
    return [code if code >= 0 else max(0, as_guess(code)) for code in next_tokens]


def accept(tree: TokenTree, next_tokens: Sequence[int]) -> list[int]:
    """Return the accepted path, nodes from the root downwards.

    `next_tokens[i]` is the token that the target model chooses after node i, or a code below 0. The path goes on while
    some child of its last node holds that choice, so every accepted token is the one that plain decoding would have
    emitted, whichever source drafted it. The path ends at a failure, and before a node that has only a guess. The
    emitted tokens are those of `path[1:]` and, unless the last node failed, one bonus token, `next_tokens[path[-1]]`.
    """
    path = [0]
    while (node := tree.find(path[-1], next_tokens[path[-1]])) >= 0:
        if next_tokens[node] < PROCESSOR_FAILED:
            break
        path.append(node)
    return path
