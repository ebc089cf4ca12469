"""The long tests of tests/model/test_pretend_gpu.py."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel

from lpr import Engine
from tests.fakes.again import again
from tests.fakes.models import tiny_model
from tests.fakes.pretend_gpu import PretendGpu, gpu, guard, to_gpu
from tests.model import test_pretend_gpu as fast
from tests.model.test_pretend_gpu import DECODE, GREEDY, expected, ids, model
from tests.model.test_pretend_gpu import test_families_give_the_cpus_ids as check_family

test_a_checkpoint = again(fast.test_a_checkpoint, "layers", ["unknown", "broken kernels"])


@pytest.mark.parametrize(
    "family, sizes",
    [
        ("gemma2", {"sliding_window": 9, "head_dim": 16}),
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    ],
)
def test_families_in_half_precision(family: str, sizes: dict[str, Any], gpu: PretendGpu) -> None:
    model = tiny_model(family, spread=0.12, **sizes).bfloat16()
    engine = Engine.from_model(to_gpu(model), decode=DECODE)
    assert engine.model.attention == "triton"
    assert all(len(each) == 16 for each in ids(engine, GREEDY))
    assert engine.model.graph_reason is None and gpu.num_replays > 3


@pytest.mark.parametrize("family", ["mistral", "qwen3", "gpt_neox"])
def test_more_families_give_the_cpus_ids(family: str, gpu: PretendGpu) -> None:
    check_family(family, gpu)


test_the_drop_in_waits_once_a_step = again(
    fast.test_the_drop_in_waits_once_a_step_and_not_for_each_token, "penalty", [1.0]
)
