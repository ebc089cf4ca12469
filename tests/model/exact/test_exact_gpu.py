"""Exact mode on the pretend GPU: products of fixed numbers of rows, one kernel, bits of plain decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lpr import DecodeConfig, Engine, InputError, SamplingParams
from lpr.model.exact import check
from lpr.model.input_builder import Row
from lpr.model.kv_cache import KVCache
from lpr.model.runner import TreeModel
from lpr.model.self_check import self_check
from lpr.model.step_inputs import current_step
from tests.fakes.models import tiny_model
from tests.fakes.pretend_gpu import PretendGpu, gpu, guard, to_gpu
from tests.fakes.rewriting import carried_out

__all__ = ["gpu", "guard"]

PROMPTS = [[3, 5, 7, 9, 11, 13, 5, 7], [7, 8, 9] * 5]
PARAMS = [SamplingParams(max_new_tokens=10, temperature=0.9 * i, seed=i) for i in range(2)]
DECODE = DecodeConfig(window_size=4, trie_nodes=12, max_batch_size=2, max_length=192, kv_tokens=1024)

ROOM = (2 << 30) + (48 << 20), 4 << 30
"""Free and whole memory of a GPU that another engine is on already."""


@pytest.mark.slow
def test_products_that_depend_on_the_height_are_found(gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that takes another kernel for other numbers of rows, met by a model that is not pinned."""
    multiply = nn.Linear.forward

    def by_shape(self: nn.Linear, states: torch.Tensor) -> torch.Tensor:
        return multiply(self, states) * (1 + 1e-2 * (states.flatten(0, -2).shape[0] > 64))

    monkeypatch.setattr(nn.Linear, "forward", by_shape)
    self_check(TreeModel(to_gpu(tiny_model().bfloat16()), exact=True))
    monkeypatch.setattr(check.PinnedProducts, "match", lambda *_: iter(()))
    with pytest.raises(InputError, match="cannot be exact: its logits are other bits in a step of many tokens"):
        self_check(TreeModel(to_gpu(tiny_model().bfloat16()), exact=True, attention="triton"))


def replays_that_round_otherwise(patch: pytest.MonkeyPatch, rows: int) -> None:
    """A library that takes another kernel in a capture of so many rows."""
    multiply = nn.Linear.forward

    def mutant(self: nn.Linear, states: torch.Tensor) -> torch.Tensor:
        step = current_step()
        is_it = step is not None and step.tokens.numel() == rows and torch.cuda.is_current_stream_capturing()
        return multiply(self, states) * (1 + 2**-7 * is_it)

    patch.setattr(nn.Linear, "forward", mutant)


@pytest.mark.parametrize(
    "options, reason", [({"attention": "sdpa"}, "use 'triton'"), ({"compile": "on"}, "the compiler chooses")], ids=str
)
def test_what_cannot_be_exact_on_a_gpu_is_named(options: dict[str, Any], reason: str, gpu: PretendGpu) -> None:
    with pytest.raises(InputError, match=reason):
        Engine.from_model(to_gpu(tiny_model()), decode=DECODE, exact=True, **options)


def test_a_pinned_model_is_as_it_was_outside_of_steps() -> None:
    model = tiny_model()
    ids = torch.tensor([list(range(70))])
    expected = model(ids).logits
    carried_out(check.PinnedProducts(), model)
    carried_out(check.PinnedProducts(), model)
    assert torch.equal(model(ids).logits, expected)
    runner = TreeModel(model)
    row = Row(0, 0, list(range(70)), list(range(-1, 69)), list(range(70)), 70)
    found = runner.adapter.logits([row], KVCache(1, 128))
    torch.testing.assert_close(found, expected[0], atol=1e-4, rtol=0)
