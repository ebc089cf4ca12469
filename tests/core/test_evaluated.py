"""What was said of evaluated nodes off the accepted path: where it counts, and where it must not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lpr.config import DecodeConfig
from lpr.core import constants, evaluated
from lpr.core.drafting import Drafter
from lpr.core.recycle import CandidateTable
from lpr.core.tree import Source, TokenTree


def after_a_step(emitted: Sequence[int]) -> Drafter:
    """A drafter whose last tree was 5 -> 6 -> 7; the model ranked 7 and 8 highest after 6, and 9 after 7."""
    drafter = Drafter(DecodeConfig(window_size=0, trie_nodes=16).resolved(), None, CandidateTable())
    drafter.observe([1, 2, 5])
    tree = TokenTree(5)
    tree.add_chain(0, [6, 7], Source.TRIE)
    drafter.keep_candidates(tree, [0], [[99, 6], [7, 8], [9, 3]], [[1, 60], [5, 30], [1, 60]])
    drafter.observe(emitted)
    return drafter


def drafted(drafter: Drafter, root: int, *path: int) -> set[int]:
    """Tokens that are recycled candidates below the node of a path in the next tree."""
    tree = TokenTree(root)
    drafter.draft(tree, 40)
    node = 0
    for token in path:
        node = tree.find(node, token)
        assert node > 0, f"{path} is not in the tree"
    return {token for token, child in tree.children[node].items() if tree.sources[child] == Source.RECYCLED}


def test_candidates_beside_the_root_are_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {7, 8} <= drafted(after_a_step([99]), 99), "6 stood where the root stands now"
    assert 9 in drafted(after_a_step([99]), 99, 7), "and 7 below it"
    monkeypatch.setattr(constants, "MOST_SIBLINGS", 0)
    assert not drafted(after_a_step([99]), 99)


def test_nothing_stands_beside_another_place() -> None:
    """As after a step that failed, or one of which nothing was asked."""
    assert not drafted(after_a_step([99, 98]), 98)


def test_candidates_after_two_tokens_were_said_off_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 9 in drafted(after_a_step([98, 6, 7]), 7), "7 came after 6 in the tree, if not in the text"
    assert not drafted(after_a_step([98, 7]), 7), "here it does not"
    monkeypatch.setattr(evaluated, "_slot", lambda left, last: 0)
    assert not drafted(after_a_step([98, 5, 6]), 6), "the slot holds another pair"


@pytest.mark.parametrize("trie_nodes", [0, 16])
def test_the_texts_own_ngrams_are_pooled_where_no_trie_knows_them(trie_nodes: int) -> None:
    config = DecodeConfig(window_size=2, ngram_size=3, guess_set_size=2, trie_nodes=trie_nodes).resolved()
    drafter = Drafter(config)
    drafter.observe([1, 2, 3, 1])
    drafter.observe([4, 5])
    assert drafter.pool.get(1) == ([] if trie_nodes else [(1, 4, 5), (1, 2, 3)])
    assert drafter.pool.get(3) == ([] if trie_nodes else [(3, 1, 4)])
    drafter.observe([1])
    tree = TokenTree(1)
    drafter.draft(tree, 4)
    assert tree.find(tree.find(0, 4), 5) > 0, "what followed 1 before"
