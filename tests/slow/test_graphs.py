"""The other cases of tests/model/test_graphs.py."""

from __future__ import annotations

from tests.fakes.again import again
from tests.model import test_graphs as fast
from tests.model.test_graphs import expected, model

test_the_same_text_as_without_graphs = again(fast.test_the_same_text_as_without_graphs, "batch", [1, 8])
test_the_same_text_on_several_ranks = again(fast.test_the_same_text_on_several_ranks, "num_ranks", [1, 2])
test_model_families = again(fast.test_model_families, "family, sizes", fast.FAMILIES[2:])
