from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lpr.core.accept import accept
from lpr.core.tree import Source, TokenTree, ancestor_bits
from lpr.model.input_builder import ancestor_matrix


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 40) -> TokenTree:
    tree = TokenTree(draw(st.integers(0, 9)))
    for _ in range(draw(st.integers(0, max_nodes))):
        tree.add(draw(st.integers(0, len(tree) - 1)), draw(st.integers(0, 4)), Source.TRIE)
    return tree


@given(trees())
def test_trees_hold_their_specification(tree: TokenTree) -> None:
    tree.verify()


@given(trees(), st.data())
def test_equal_edges_are_one_node(tree: TokenTree, data: st.DataObject) -> None:
    size = len(tree)
    node = data.draw(st.integers(0, size - 1))
    if node:
        assert tree.add(tree.parents[node], tree.tokens[node], Source.POOL) == node
        assert len(tree) == size


def break_parent(tree: TokenTree) -> None:
    tree.parents[2] = 2


def break_depth(tree: TokenTree) -> None:
    tree.depths[2] += 1


def break_edge(tree: TokenTree) -> None:
    tree.tokens[2] = tree.tokens[1]


def break_children(tree: TokenTree) -> None:
    tree.children[0].clear()


def break_length(tree: TokenTree) -> None:
    tree.sources.append(0)


@pytest.mark.parametrize("fault", [break_parent, break_depth, break_edge, break_children, break_length])
def test_verify_finds_faults(fault) -> None:
    tree = TokenTree(7)
    tree.add(0, 1, Source.TRIE)
    tree.add(0, 2, Source.TRIE)
    tree.add(1, 3, Source.TRIE)
    tree.verify()
    fault(tree)
    with pytest.raises(AssertionError):
        tree.verify()


@given(trees())
def test_ancestors(tree: TokenTree) -> None:
    expected = np.zeros((len(tree), len(tree)), bool)
    for node in range(len(tree)):
        expected[node, tree.path_to(node)] = True
    assert (ancestor_matrix(tree.parents) == expected).all()
    bits = ancestor_bits(tree.parents)
    assert all(bool(bits[i] >> j & 1) == expected[i, j] for i in range(len(tree)) for j in range(len(tree)))


@given(trees(), st.integers(0, 2**32 - 1))
def test_accepts_what_plain_decoding_would_emit(tree: TokenTree, salt: int) -> None:
    def model(path: tuple[int, ...]) -> int:
        return hash((salt, path)) % 5

    tokens = [tuple(tree.tokens[n] for n in tree.path_to(node)) for node in range(len(tree))]
    path = accept(tree, [model(each) for each in tokens])
    emitted = [tree.tokens[node] for node in path[1:]] + [model(tokens[path[-1]])]
    text = (tree.tokens[0],)
    for token in emitted:
        assert token == model(text)
        text += (token,)
    # The path is as long as the tree allows.
    assert emitted[-1] not in tree.children[path[-1]]
