"""The other cases of tests/model/test_graphs.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lpr import DecodeConfig, Engine, InputError
from tests.fakes.again import again
from tests.fakes.models import tiny_model
from tests.model import test_graphs as fast
from tests.model.test_graphs import DECODE, FAMILIES, GREEDY, MIXED, captured, expected, ids, model

test_the_same_text_as_without_graphs = again(fast.test_the_same_text_as_without_graphs, "batch", [1, 8])
test_the_same_text_on_several_ranks = again(fast.test_the_same_text_on_several_ranks, "num_ranks", [3])
test_a_step_waits_for_the_device_once = again(
    fast.test_a_step_waits_for_the_device_once, "num_ranks, graphs", [(1, False), (2, True)]
)


@pytest.mark.parametrize("family, sizes", FAMILIES)
def test_model_families(family: str, sizes: dict[str, Any]) -> None:
    """Windows, soft caps, learnt positions and experts: the mask and the routing are part of the graph."""
    engine = Engine.from_model(tiny_model(family, spread=0.12, **sizes), decode=DECODE)
    plain = ids(engine, GREEDY)
    if family == "qwen3_moe":
        engine.model.model.set_experts_implementation("batched_mm")
    capturer = captured(engine)
    assert ids(engine, GREEDY) == plain
    assert engine.model.graph_reason is None and capturer.num_replays > 5


def test_captured_steps_may_be_compiled_and_others_are_not(expected: dict[str, list[list[int]]]) -> None:
    """By a backend that compiles nothing, in seconds: which steps go through the compiler, and with which ids."""
    engine = Engine.from_model(tiny_model(spread=0.12), decode=DECODE)
    torch._dynamo.reset()
    engine.model.compile(backend="eager")
    counters = torch._dynamo.utils.counters
    counters.clear()
    assert ids(engine, GREEDY) == expected["greedy"]
    assert not counters["stats"], "direct steps have any shape"
    captured(engine, DecodeConfig(window_size=0, trie_nodes=8, max_batch_size=1))
    assert engine.model.graph_reason is None
    assert 0 < counters["stats"]["unique_graphs"] <= 6 and not counters["graph_break"]
    assert ids(engine, MIXED) == expected["mixed"]
    with pytest.raises(InputError, match="it needs a GPU"):
        Engine.from_model(tiny_model(), compile="on")
