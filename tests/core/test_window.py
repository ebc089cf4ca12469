from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lpr.core.accept import accept
from lpr.core.tree import Source, TokenTree
from lpr.core.window import JacobiWindow


def text_at(position: int) -> int:
    """A text without repetitions, so that a guess at the wrong place cannot be right by chance."""
    return 1000 + position


def run_on_known_text(
    window: JacobiWindow, steps: int, drafted: Callable[[int], int], max_depth: int = 10**6
) -> list[tuple[int, list[tuple[int, ...]]]]:
    """Decode a text whose next token depends on its position only; returns (root position, n-grams) per step."""
    position, seen, context = 0, [], [text_at(0)]
    for step in range(steps):
        tree = TokenTree(text_at(position))
        window.add_to(tree, max_depth)
        tree.add_chain(0, [text_at(position + 1 + i) for i in range(drafted(step))], Source.TRIE)
        tree.verify()
        next_tokens = [text_at(position + depth + 1) for depth in tree.depths]
        path = accept(tree, next_tokens)
        emitted = [tree.tokens[node] for node in path[1:]] + [next_tokens[path[-1]]]
        context += emitted
        seen.append((position, window.advance(tree, next_tokens, emitted, context)))
        position += len(emitted)
    return seen


def check_on_known_text(num_columns: int, ngram_size: int, drafted: list[int]) -> None:
    """A guess that was made k steps ago stands, whatever was accepted since, at the place that it was made for."""
    window = JacobiWindow(num_columns, ngram_size, [text_at(0)])
    history = run_on_known_text(window, len(drafted), lambda step: drafted[step])
    for now, (position, ngrams) in enumerate(history):
        assert len(ngrams) == num_columns
        assert ngrams[0][0] == text_at(position)
        for column, ngram in enumerate(ngrams):
            assert len(ngram) == ngram_size
            for age in range(min(ngram_size - 1, now + 1)):
                place = position + column + ngram_size - 1 - age
                then, guesses = history[now - age]
                if place < then + len(guesses) + ngram_size - 1:
                    assert ngram[ngram_size - 1 - age] == text_at(place)
            # What is not a guess of the model is a copy of the text so far, never a guess for another place.
            for offset, token in enumerate(ngram):
                assert token == text_at(position + column + offset) or token <= text_at(position)


@settings(max_examples=50)
@given(st.integers(1, 12), st.integers(2, 6), st.lists(st.integers(0, 8), min_size=1, max_size=10))
def test_guesses_keep_their_positions(num_columns: int, ngram_size: int, drafted: list[int]) -> None:
    check_on_known_text(num_columns, ngram_size, drafted)


@pytest.mark.parametrize(("num_columns", "ngram_size"), [(15, 5), (7, 5), (10, 5), (1, 2), (1, 4), (20, 3)])
def test_comb_shape(num_columns: int, ngram_size: int) -> None:
    window = JacobiWindow(num_columns, ngram_size, list(range(1, 500)))
    tree = TokenTree(10_000)
    window.levels = [[1_000 * level + j for j in range(num_columns)] for level in range(ngram_size - 1)]
    window.add_to(tree, 10**6)
    tree.verify()
    assert len(tree) == num_columns * (ngram_size - 1)
    for column in range(num_columns):
        for level in range(ngram_size - 1):
            if (level, column) != (0, 0):
                node = tree.tokens.index(1_000 * level + column)
                assert tree.depths[node] == column + level
                path = [tree.tokens[n] for n in tree.path_to(node)]
                spine = [10_000, *range(1, column + 1)]
                assert path == spine + [1_000 * above + column for above in range(1, level + 1)]


@given(st.integers(1, 10), st.integers(2, 6), st.integers(0, 20))
def test_no_node_is_deeper_than_asked(num_columns: int, ngram_size: int, max_depth: int) -> None:
    window = JacobiWindow(num_columns, ngram_size, [1, 2, 3])
    for position, ngrams in run_on_known_text(window, 4, lambda _: 0, max_depth):
        assert position >= 0
        assert len(ngrams) <= max(0, max_depth - ngram_size + 3)
    tree = TokenTree(5)
    window.add_to(tree, max_depth)
    assert max(tree.depths) <= max_depth


def test_deterministic() -> None:
    def runs() -> list[list[int]]:
        window = JacobiWindow(9, 4, [3, 1, 4, 1, 5, 9, 2, 6])
        run_on_known_text(window, 6, lambda step: step % 3)
        return window.levels

    assert runs() == runs()
