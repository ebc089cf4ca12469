"""What a request's statistics count, node by node."""

from __future__ import annotations

import pytest

from lpr import SamplingParams
from lpr.config import TreeSizes
from lpr.core.state import SequenceState
from lpr.core.tree import Source, TokenTree
from lpr.engine.stats import DecodeStats, SourceCount


def test_nodes_count_for_the_source_and_the_depth_at_which_they_hang():
    tree = TokenTree(0)
    chain = [0]
    for token in range(1, 6):
        chain.append(tree.add(chain[-1], token, Source.TRIE if token < 5 else Source.RECYCLED))
    tree.add(0, 9, Source.WINDOW)
    state = SequenceState([0], SamplingParams(), TreeSizes())
    state.count(tree, chain[:5], 5)
    counts = state.take_counts()
    assert counts is not None and counts[2] == 5 and state.take_counts() is None
    stats = DecodeStats(num_tokens=5)
    stats.count(counts)
    assert stats.usage(0).accepted_per_depth == [1, 1, 1, 1]
    assert stats.sources == {"trie": SourceCount(4, 4), "recycled": SourceCount(1, 0), "window": SourceCount(1, 0)}
    assert (stats.num_steps, stats.num_nodes, stats.tokens_per_step) == (1, 7, 5.0)
    total = DecodeStats()
    for _ in range(3):
        total.add(stats)
    assert total.sources["trie"] == SourceCount(12, 12) and total.num_nodes == 21
    assert total.tokens_per_step == pytest.approx(5.0)
