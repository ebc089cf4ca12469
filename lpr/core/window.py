"""The Jacobi window of lookahead decoding (Fu et al. 2024, section 3.1), a comb of tree nodes. Twin: native/window.h.

The window guesses the text ahead of the root in W columns and N-1 levels. Level l of column j is a guess at
the token `j + l` places after the root, made at most l steps ago. Level 0 is the *spine*, a chain from
the root (column 0's level 0 is the root itself); a column's higher levels are a chain that hangs from its
spine node. The model's next token after a column's last level is a new guess, `j + N - 1` places ahead, so
each column yields one n-gram a step, and the guesses of a step become one level: the next spine is level 1.

All guesses keep their absolute position: when a step commits `a` tokens, the new root is `a` places ahead,
the levels move down by one and the columns left by `a - 1`. Columns that move in from the right start as
copies of tokens that the window or the text already holds, chosen by arithmetic (R4: no unkeyed randomness).
"""

from __future__ import annotations

from collections.abc import Sequence

from lpr.core.tree import Source, TokenTree


class JacobiWindow:
    """The guesses of one sequence: `levels[l][j]` is level l of column j; `levels[0][0]`, the root, is not used."""

    def __init__(self, num_columns: int, ngram_size: int, context: Sequence[int]) -> None:
        """A window of W columns that yields n-grams of N tokens, first filled from the tokens of `context`."""
        self.num_columns = num_columns
        self.num_levels = ngram_size - 1
        self._fill = 0
        self.levels = [self._fresh(num_columns, context) for _ in range(self.num_levels)]
        self._nodes: list[list[int]] = []

    def _fresh(self, count: int, context: Sequence[int]) -> list[int]:
        """`count` tokens picked from the last 256 of `context` by a fixed stride that no short cycle shares."""
        recent = context[-256:]
        tokens = [recent[(self._fill + i) * 101 % len(recent)] for i in range(count)]
        self._fill += count
        return tokens

    def add_to(self, tree: TokenTree, max_depth: int) -> None:
        """Add the comb under the root, without nodes deeper than `max_depth`; keeps the node of each guess."""
        spine = [0]
        for token in self.levels[0][1 : max_depth + 1]:
            spine.append(tree.add(spine[-1], token, Source.WINDOW))
        self._nodes = []
        for column, node in enumerate(spine):
            chain = [node]
            for level in range(1, min(self.num_levels, max_depth - column + 1)):
                chain.append(tree.add(chain[-1], self.levels[level][column], Source.WINDOW))
            self._nodes.append(chain)

    def advance(
        self, tree: TokenTree, next_tokens: Sequence[int], committed: Sequence[int], context: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """Move the window by a step; return the n-grams of the columns, first token first.

        `tree` is that of `add_to`, `next_tokens[i]` the model's choice after its node i, `committed` the tokens that
        the step emitted (at least one) and `context` the sequence's tokens, `committed` included. A column that
        `max_depth` cut short yields nothing and starts afresh.
        """
        tokens = tree.tokens
        ngrams = []
        guesses: list[int] = []
        for chain in self._nodes:
            if len(chain) == self.num_levels:
                guesses.append(next_tokens[chain[-1]])
                ngrams.append((*[tokens[node] for node in chain], guesses[-1]))
        self.levels = [level[: len(guesses)] for level in self.levels[1:]] + [guesses]
        moved = len(committed) - 1
        for level, row in enumerate(self.levels):
            row = row[moved:]
            self.levels[level] = row + self._fresh(self.num_columns - len(row), context)
        self._nodes = []
        return ngrams
