"""K/V in 8 bits: a second family, samples, and pages that run out."""

from __future__ import annotations

import pytest

from lpr import DecodeConfig, SamplingParams
from tests.model.test_fp8_cache import DECODE, NEW, PLAIN, PROMPTS, check_greedy, engine

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


def test_greedy_ids_of_a_sliding_model() -> None:
    check_greedy("mistral")


def test_samples_and_pages_that_run_out() -> None:
    params = [SamplingParams(max_new_tokens=NEW, temperature=0.8, seed=seed) for seed in range(len(PROMPTS))]
    expected = [each.token_ids for each in engine(PLAIN).generate(PROMPTS, params)]
    tight = DecodeConfig(window_size=4, trie_nodes=12, max_batch_size=3, max_length=64, kv_tokens=192)
    for decode, swap in ((DECODE, 0.0), (tight, 0.0), (tight, 0.01)):
        found = engine(decode, swap_space=swap).generate(PROMPTS, params)
        assert [each.token_ids for each in found] == expected
