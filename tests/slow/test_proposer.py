"""The long tests of tests/vllm/test_proposer.py."""

from __future__ import annotations

import numpy as np
import psutil
import pytest

from lpr.vllm import Proposer
from tests.vllm.test_proposer import LONGEST, VOCABULARY, config


def test_memory_is_bounded_over_100_000_outputs() -> None:
    proposer = Proposer(config(capacity=20_000, num_nodes=1))
    random_ = np.random.default_rng(0)
    process, sizes = psutil.Process(), list[int]()
    tokens, sampled = random_.integers(0, VOCABULARY, (8, LONGEST), np.int32), [[1, 1, 1]] * 8
    counts = np.full(8, 12, np.int32)
    for number in range(100_000 // 8):
        tokens[:, :12] = random_.integers(0, VOCABULARY, (8, 12))
        proposer.propose(sampled, counts, tokens)
        if number % 2500 == 2499:
            sizes.append(process.memory_info().rss)
    assert sizes[-1] < sizes[0] + (8 << 20), sizes
