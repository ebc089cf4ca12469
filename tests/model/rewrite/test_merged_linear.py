"""Packs of layers that ranks share: parts of a sum, and the bias once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lpr.model.cpu.products import PrepackedLinear, PrepackedProducts
from lpr.model.cpu.tiles import can_tile
from lpr.model.low_bit.products import round_linear
from lpr.model.rewrite.base import Setting, carry_out, undo
from lpr.model.rewrite.merged_linear import Pack
from lpr.model.rewrite.sharded_layers import ReducedLinear

CPU = Setting(torch.device("cpu"))


def parts_of(whole: nn.Linear) -> list[nn.Sequential]:
    """Two ranks' modules, each with half of the inputs of `whole`; their group is the rank's number."""
    found = []
    for rank, weight in enumerate(whole.weight.data.chunk(2, 1)):
        part: Any = nn.Linear(weight.shape[1], len(weight), dtype=weight.dtype)
        part.weight.data, part.bias.data = weight.contiguous(), whole.bias.data.clone()
        part.__class__, part.group = ReducedLinear, rank
        found.append(nn.Sequential(part))
    return found


@pytest.fixture
def whole() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 32).requires_grad_(False)


def summed_by(monkeypatch: pytest.MonkeyPatch, products: list[torch.Tensor]) -> None:
    """Let `all_reduce` of a rank add the other rank's product, which `products` has."""
    sums = "lpr.model.rewrite.sharded_layers.dist.all_reduce"
    monkeypatch.setattr(sums, lambda product, group: product.add_(products[1 - group]))


@pytest.mark.parametrize("kind", ["merged", "prepacked", "low-bit"])
@torch.no_grad()
def test_ranks_sum_their_products_and_add_the_bias_once(
    kind: str, whole: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "prepacked" and not can_tile(torch.float32, 32):
        pytest.skip("this processor has no AVX2")
    given, packs = torch.randn(3, 64), []
    ranks = parts_of(whole)
    for model in ranks:
        if kind == "merged":
            packs.append(Pack([model[0]]))
        elif kind == "prepacked":
            assert carry_out(PrepackedProducts(), model, CPU)
            packs.append(model[0].pack)
        else:
            packs.append(round_linear([model[0]], "int8"))
    halves = given.chunk(2, 1)
    products = [pack.multiply(half) for pack, half in zip(packs, halves, strict=True)]
    summed_by(monkeypatch, products)
    expected = whole(given)
    for pack, model, half in zip(packs, ranks, halves, strict=True):
        tolerance = 0.05 if kind == "low-bit" else 1e-5
        for found in (pack.whole(half), model[0](half)):
            assert (found - expected).abs().max() < tolerance


@torch.no_grad()
def test_a_prepacked_part_becomes_a_part_again(whole: nn.Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = parts_of(whole)[1], torch.randn(2, 32)
    product = model[0].multiply(given)
    rewrite = PrepackedProducts()
    if not carry_out(rewrite, model, CPU):
        pytest.skip("this processor has no AVX2")
    assert type(model[0]) is PrepackedLinear
    undo(rewrite, model)
    assert type(model[0]) is ReducedLinear and model[0].group == 1
    summed_by(monkeypatch, [torch.zeros_like(product)])
    assert torch.equal(model[0](given), product + whole.bias)
