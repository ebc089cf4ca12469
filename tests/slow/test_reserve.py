"""The long tests of tests/model/test_reserve.py."""

from __future__ import annotations

import re

import pytest

from lpr import DecodeConfig, Engine, InputError
from tests.fakes.again import again
from tests.fakes.models import tiny_model
from tests.fakes.pretend_gpu import PretendGpu, gpu, guard, to_gpu
from tests.model import test_reserve as fast
from tests.model.test_reserve import load_and_pack

test_the_worked_examples_fit_as_they_are_told = again(
    fast.test_the_worked_examples_fit_as_they_are_told, "name", fast.EXAMPLES, without=fast.FEW
)


def test_an_engine_without_room_says_what_its_memory_is_for(gpu: PretendGpu) -> None:
    """At its start as one line, and with a quarter of that memory as an error."""
    decode = DecodeConfig(window_size=3, trie_nodes=8, max_batch_size=2, max_length=64)
    gpu.memory = 2850 << 20, 80 << 30  # little K/V: a pretended capture copies it
    assert re.fullmatch(
        r"memory in GiB: context 0.62, weights 0.00, loading 0.00, nccl 0.00, layers 0.0\d, logits 0.00, graphs 1.50, "
        r"workspaces 0.50; K/V of \d+ tokens [\d.]+, left [\d.]+",
        str(Engine.from_model(to_gpu(tiny_model()), decode=decode).memory),
    )
    gpu.memory = 1 << 30, 80 << 30
    with pytest.raises(InputError, match=r"there is K/V for 0 tokens .* the other parts in GiB: .* graphs 1.50"):
        Engine.from_model(to_gpu(tiny_model()), decode=decode)
