"""The other cases of tests/engine/test_lossless.py."""

from __future__ import annotations

from tests.engine import test_lossless as fast
from tests.fakes.again import again

NUM_PROMPTS = {"trie": 9, "small": 5, "both": 2, "wide": 3}
"""Of trie, small and wide more than a batch holds."""
CASES = [(name, NUM_PROMPTS.get(name, 3)) for name in fast.CONFIGS]

test_greedy_equals_transformers = again(fast.test_greedy_equals_transformers, "name, count", CASES)
test_sampling_equals_plain_decoding = again(
    fast.test_sampling_equals_plain_decoding_with_the_seed, "name, count", CASES
)
test_batches_equal_single_runs_and_transformers = again(
    fast.test_batches_equal_single_runs_and_transformers, "family", fast.FAMILIES, without=("gemma2", "gpt2")
)
