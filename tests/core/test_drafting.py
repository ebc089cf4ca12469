"""Drafts: where they come from, how many, in which order; and the stores beside the trie."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lpr.config import DecodeConfig, TreeSizes
from lpr.core import constants
from lpr.core.budget import AcceptanceHistory, AdaptiveBudget
from lpr.core.drafting import Drafter
from lpr.core.noise_keys import noise_key
from lpr.core.pool import NGramPool
from lpr.core.recycle import CandidateTable
from lpr.core.step_times import KNOTS, StepTimes
from lpr.core.suffix_index import SuffixIndex
from lpr.core.tree import Source, TokenTree
from lpr.model.sampling.specification import gumbel

TEXT = st.lists(st.integers(0, 5), min_size=1, max_size=60)


def retrieval(**overrides: int) -> TreeSizes:
    return DecodeConfig(**{"window_size": 0, "trie_nodes": 64, "branch_length": 32, **overrides}).resolved()


def drafted(text: list[int], budget: int, shared: SuffixIndex | None = None, **overrides: int) -> TokenTree:
    drafter = Drafter(retrieval(**overrides), shared, None)
    drafter.observe(text)
    tree = TokenTree(text[-1])
    drafter.draft(tree, budget)
    return tree


def shared_trie(*documents: list[int]) -> SuffixIndex:
    trie = SuffixIndex(10_000)
    for document in documents:
        trie.extend(document)
        trie.end_document()
    return trie


def chain(tree: TokenTree) -> list[int]:
    """The tokens below the root, taking the first child drafted each time."""
    node, tokens = 0, []
    while tree.children[node]:
        token, node = next(iter(tree.children[node].items()))
        tokens.append(token)
    return tokens


@settings(max_examples=60)
@given(TEXT, st.lists(TEXT, max_size=3), st.integers(0, 40), st.integers(1, 8))
def test_a_draft_is_a_valid_tree_within_its_budget_and_depth(text, documents, budget, branch_length):
    tree = drafted(text, budget, shared_trie(*documents), branch_length=branch_length)
    tree.verify()
    assert len(tree) - 1 <= budget
    assert max(tree.depths) <= branch_length
    assert set(tree.tokens) <= set(text).union(*documents)


@settings(max_examples=60)
@given(TEXT, st.lists(TEXT, max_size=3), st.integers(0, 30))
def test_a_larger_budget_only_adds_nodes_after_those_of_a_smaller_one(text, documents, budget):
    shared = shared_trie(*documents)
    small, large = drafted(text, budget, shared), drafted(text, budget + 1, shared)
    size = len(small)
    assert large.tokens[:size] == small.tokens and large.parents[:size] == small.parents
    assert large.sources[:size] == small.sources
    assert len(large) - size <= 1


@settings(max_examples=40)
@given(st.lists(TEXT, min_size=1, max_size=4), TEXT)
def test_the_same_observations_give_the_same_trees(chunks, document):
    shared, table = shared_trie(document), CandidateTable()
    table.update([1, 2], [[3, 4], [5, 1]], [[5, 20], [1, 90]])
    drafters = [Drafter(DecodeConfig().resolved(), shared, table) for _ in range(2)]
    for chunk in chunks:
        trees = []
        for drafter in drafters:
            drafter.observe(chunk)
            drafter.pool.add((chunk[-1], *chunk[:3]))
            tree = TokenTree(chunk[-1])
            trees.append((drafter.draft(tree, 40), tree.tokens, tree.parents, tree.sources))
        assert trees[0] == trees[1]


@given(TEXT)
def test_observing_in_pieces_is_observing_at_once(text):
    whole, pieces = Drafter(retrieval()), Drafter(retrieval())
    whole.observe(text)
    for token in text:
        pieces.observe([token])
    trees = [TokenTree(text[-1]), TokenTree(text[-1])]
    assert whole.draft(trees[0], 20) == pieces.draft(trees[1], 20)
    assert trees[0].tokens == trees[1].tokens


def test_a_repeated_text_is_drafted_perfectly():
    passage = list(range(100, 150))
    tree = drafted([*passage, 1, 2, *passage[:16]], 48)
    assert chain(tree) == passage[16:48]
    assert {tree.sources[node] for node in tree.path_to(tree.depths.index(32))[1:]} == {Source.TRIE}


def test_a_loop_is_drafted_beyond_the_end_of_the_text():
    assert chain(drafted([7, 8, 9] * 4, 30))[:20] == ([7, 8, 9] * 7)[:20]


def test_the_outputs_of_earlier_requests_are_drafted_and_end_with_their_document():
    tree = drafted([1, 50, 51], 8, shared_trie([50, 51, 52, 53], [60, 61]))
    node = tree.children[tree.children[0][52]][53]
    assert tree.sources[node] == Source.SHARED_TRIE
    assert 60 not in tree.children[node]


def test_a_longer_match_comes_first():
    text = [1, 2, 3, 4, 90, 5, 3, 4, 91, 6, 3, 4, 92, 1, 2, 3, 4]
    tree = drafted(text, 1)
    assert tree.tokens[1] == 90


def test_a_text_continues_after_a_replaced_token():
    passage = list(range(30, 42))
    tree = drafted([20, *passage, 99], 12, shared_trie([*passage, 12, 13, 14, 15]))
    first = tree.children[0]
    assert 13 in first and 14 in tree.children[first[13]]
    assert tree.sources[first[13]] == Source.SHARED_TRIE


def test_the_budget_is_spent_where_nothing_matches():
    tree = drafted(list(range(50)), 20)
    tree.verify()
    assert len(tree) == 21


def test_a_single_token_is_no_evidence():
    assert len(drafted([4], 0)) == 1


def test_probabilities_order_the_nodes_and_never_grow_downwards():
    drafter = Drafter(retrieval())
    drafter.observe([1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 6, 1, 2])
    tree = TokenTree(2)
    probabilities = drafter.draft(tree, 30)
    assert len(probabilities) == len(tree) and probabilities[0] == 1.0
    for node in range(1, len(tree)):
        assert 0 < probabilities[node] <= probabilities[tree.parents[node]] <= 1
    for children in tree.children:
        assert sum(probabilities[node] for node in children.values()) <= 1 + 1e-9


def test_nodes_of_the_window_cost_no_budget():
    drafter = Drafter(retrieval())
    drafter.observe([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5])
    tree = TokenTree(5)
    window = tree.add_chain(0, [6, 7], Source.WINDOW)
    probabilities = drafter.draft(tree, 1)
    assert len(tree) == 4
    assert tree.sources[1:3] == [Source.WINDOW] * 2
    assert 8 in tree.children[window]
    assert probabilities[1] > probabilities[2] > 0


def test_window_nodes_have_a_probability_without_any_budget():
    drafter = Drafter(DecodeConfig(window_size=15, trie_nodes=0).resolved())
    drafter.observe([1, 2, 3])
    tree = TokenTree(3)
    tree.add_chain(0, [6, 7], Source.WINDOW)
    probabilities = drafter.draft(tree, 0)
    assert len(tree) == 3 and 1 > probabilities[1] > probabilities[2] > 0


def test_what_the_window_says_too_is_worth_more():
    worth = []
    for guess in (90, 4):
        drafter = Drafter(retrieval())
        drafter.observe([1, 2, 3, 4, 5, 1, 2, 3])
        tree = TokenTree(3)
        tree.add(0, guess, Source.WINDOW)
        probabilities = drafter.draft(tree, 10)
        worth.append(probabilities[tree.children[0][4]])
    assert worth[1] > worth[0]


@settings(max_examples=60)
@given(TEXT, st.lists(TEXT, max_size=2), st.integers(0, 40), st.lists(st.integers(0, 7), max_size=5))
def test_children_share_the_probability_of_their_parent(text, documents, budget, guesses):
    drafter = Drafter(retrieval(), shared_trie(*documents), None)
    drafter.observe(text)
    tree = TokenTree(text[-1])
    tree.add_chain(0, guesses, Source.WINDOW)
    probabilities = drafter.draft(tree, budget)
    for node, children in enumerate(tree.children):
        assert 0 <= sum(probabilities[child] for child in children.values()) <= probabilities[node] * (1 + 1e-9)


@settings(max_examples=40)
@given(TEXT, st.sampled_from([0.0001, 0.003, 0.03, 0.3]))
def test_a_price_ends_the_draft_early(text, percent):
    cost = StepTimes({(1, 256): [1 + percent * (knot - 1) for knot in KNOTS]})
    drafter, budget = Drafter(retrieval()), AdaptiveBudget(retrieval(), cost.row(1, 1))
    drafter.observe(text)
    budget.begin(1, 0)
    trees = [TokenTree(text[-1]), TokenTree(text[-1])]
    short, full = (
        drafter.draft(trees[0], 40, price=budget.request(AcceptanceHistory()).price),
        drafter.draft(trees[1], 40),
    )
    assert full[: len(short)] == short and min(short) >= percent
    assert trees[1].tokens[: len(short)] == trees[0].tokens
    assert percent < 0.3 or len(short) <= 4 or short[3] > 0.3


@pytest.mark.parametrize("budget", [0, 3, 100])
def test_without_a_trie_only_the_pool_drafts(budget):
    table = CandidateTable()
    table.update([2], [[3]], [[0]])
    drafter = Drafter(DecodeConfig(window_size=15, trie_nodes=0).resolved(), shared_trie([1, 2, 3]), table)
    drafter.observe([1, 2, 9, 1, 2])
    drafter.pool.add((2, 7, 8))
    drafter.pool.add((2, 7, 6))
    drafter.pool.add((4, 5, 5))
    tree = TokenTree(2)
    drafter.draft(tree, budget)
    assert len(tree) - 1 == min(budget, 3)
    assert set(tree.tokens[1:]) <= {7, 8, 6}
    assert set(tree.sources[1:]) <= {Source.POOL}


def test_autoregressive_drafts_nothing():
    drafter = Drafter(DecodeConfig.autoregressive().resolved(), shared_trie([1, 2, 3]), None)
    drafter.pool.add((2, 3))
    drafter.observe([1, 2, 1, 2])
    tree = TokenTree(2)
    assert drafter.draft(tree, 64) == [1.0] and len(tree) == 1


def test_recycled_candidates_extend_a_draft_where_the_trie_is_silent():
    table = CandidateTable()
    table.update([3, 40, 41], [[40, 44], [41, 45], [42, 46]], [[1, 60], [1, 60], [1, 60]])
    drafter = Drafter(retrieval(), None, table)
    drafter.observe([1, 2, 3])
    tree = TokenTree(3)
    drafter.draft(tree, 12)
    assert chain(tree)[:3] == [40, 41, 42]
    assert tree.sources[1] == Source.RECYCLED
    assert 44 in tree.children[0]


def drafted_beside_two_contexts():
    """7 came after 5 and then after 6, and the model ranked 50 and then 60 highest after it; now it comes after 5."""
    table = CandidateTable()
    table.update([7], [[70]], [[1]])
    drafter = Drafter(retrieval(), None, table)
    for before, candidate in ((5, 50), (6, 60)):
        drafter.observe([1, before, 7])
        drafter.keep_candidates(TokenTree(7), [0], [[candidate]], [[1]])
    drafter.observe([2, 5, 7])
    tree = TokenTree(7)
    drafter.draft(tree, 8)
    return {tree.tokens[node] for node in tree.children[0].values()}


def test_candidates_come_from_the_nearest_context(monkeypatch):
    assert drafted_beside_two_contexts() & {50, 60, 70} == {50}
    monkeypatch.setattr(constants, "MAX_MATCH", 1)  # the context is not looked at
    assert drafted_beside_two_contexts() & {50, 60, 70} == {50, 60}


def test_candidates_of_the_table_count_where_the_text_has_none():
    table = CandidateTable()
    table.update([7], [[70]], [[1]])
    drafter = Drafter(retrieval(), None, table)
    drafter.observe([5, 7, 5, 7])
    tree = TokenTree(7)
    drafter.draft(tree, 8)
    assert tree.find(0, 70) > 0


def hits_of_one_node(seed: int, off: int = 0, length: int = 300) -> float:
    """How often one drafted node is what argmax(log q + noise) chooses among eight tokens, all as likely."""
    tokens, table = list(range(8)), CandidateTable()
    table.update(tokens, [tokens] * 8, [[33] * 8] * 8)  # exp(-33 / 16) = 1/8
    drafter = Drafter(retrieval(trie_capacity=1), None, table, seed=seed)
    drafter.observe([0] * (1 + off))
    last, hits = 0, 0
    for position in range(1, length):
        tree = TokenTree(last)
        drafter.draft(tree, 1)
        noise = gumbel(torch.tensor([noise_key(seed, position)]), torch.arange(8))
        last = int(noise.argmax())
        hits += tree.tokens[1:] == [last]
        drafter.learn(tree, [0, 1] if tree.tokens[1:] == [last] else [0])
        drafter.observe([last])
    return hits / length


def test_the_sampling_noise_tells_which_of_several_candidates_comes():
    assert min(hits_of_one_node(seed) for seed in (0, 7, 2**64 - 1)) > 0.6
    assert max(hits_of_one_node(seed, off=1) for seed in (0, 7)) < 0.3, "the noise of another position tells nothing"


def test_a_greedy_request_has_no_noise():
    trees = []
    for seed in (None, None, 3):
        drafter = Drafter(retrieval(), None, None, seed=seed)
        drafter.observe([1, 2, 3, 4, 5, 6, 7, 8, 9])
        trees.append(TokenTree(9))
        drafter.draft(trees[-1], 4)
    assert trees[0].tokens == trees[1].tokens == [9, 9, 8, 7, 6], "the latest tokens first"
    assert trees[2].tokens != trees[0].tokens


def test_max_depth_bounds_a_draft():
    drafter = Drafter(retrieval())
    drafter.observe([1, 2, 3, 4, 5, 6, 1, 2])
    tree = TokenTree(2)
    drafter.draft(tree, 20, max_depth=2)
    assert max(tree.depths) == 2
    tree = TokenTree(2)
    drafter.draft(tree, 20, max_depth=0)
    assert len(tree) == 1


def test_the_pool_keeps_g_newest_per_token_and_the_last_used_tokens():
    pool = NGramPool(guess_set_size=2, max_keys=2)
    for ngram in [(1, 10), (1, 11), (1, 12), (2, 20)]:
        pool.add(ngram)
    assert pool.get(1) == [(1, 12), (1, 11)]
    pool.add((1, 11))
    assert pool.get(1) == [(1, 11), (1, 12)]
    pool.add((3, 30))
    assert pool.get(2) == [] and pool.get(3) == [(3, 30)] and len(pool) == 3
    pool.get(1)
    pool.add((4, 40))
    assert pool.get(3) == [] and pool.get(1)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=200), st.integers(0, 3), st.integers(0, 4))
def test_the_pool_is_bounded(ngrams, guess_set_size, max_keys):
    pool = NGramPool(guess_set_size, max_keys)
    for ngram in ngrams:
        pool.add(ngram)
    assert len(pool) <= guess_set_size * max_keys
    if ngrams and guess_set_size and max_keys:
        assert pool.get(ngrams[-1][0])[0] == ngrams[-1]


def test_the_candidate_table_keeps_the_last_candidates_of_a_token():
    table = CandidateTable()
    table.update([5, 6, 5], [[1, 2], [3, 4], [7, 8]], [[0, 255], [16, 32], [11, 40]])
    assert [token for token, _ in table.get(5)] == [7, 8]
    assert list(table.get(6)) == [(3, 16), (4, 32)]
    assert list(table.get(9)) == [] and len(table) == 2
    with pytest.raises(ValueError):
        table.update([1, 2], [[1]], [[1]])
