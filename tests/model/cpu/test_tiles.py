"""Matrix products in C++: right at every shape, and a row's bits depend on nothing but the row."""

from __future__ import annotations

import pytest
import torch

from lpr.model.cpu import tiles
from lpr.model.cpu.tiles import Tiles, can_tile

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(5, 2), (33, 8), (100, 34), (64, 576), (96, 1536)]


def needs(dtype: torch.dtype) -> None:
    if not can_tile(dtype, 2):
        pytest.skip(f"this machine allows no tiles of {dtype}")


def test_weights_that_are_bfloat16_lie_as_such_and_have_the_bits_of_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    needs(torch.float32)
    weight, rows = torch.randn(100, 1100).bfloat16().float(), torch.randn(130, 1100)
    halves = Tiles(weight)
    monkeypatch.setattr(tiles, "_halves", lambda weight: weight)
    floats = Tiles(weight)
    assert halves._panels.numel() * 2 == floats._panels.numel() * halves._panels.itemsize
    assert torch.equal(halves.to_dense(weight.dtype), weight) and torch.equal(floats.to_dense(weight.dtype), weight)
    for num_rows in (*range(1, 30), 56, 57, 130):
        assert torch.equal(halves.multiply(rows[:num_rows], None), floats.multiply(rows[:num_rows], None))


def test_a_weight_that_is_not_bfloat16_or_has_no_pairs_lies_as_it_is() -> None:
    needs(torch.float32)
    weight = torch.randn(40, 64).bfloat16().float()
    assert Tiles(weight)._panels.dtype is torch.bfloat16
    weight[3, 7] += 2.0**-20
    assert torch.equal(Tiles(weight).to_dense(weight.dtype), weight)
    odd = torch.randn(40, 63).bfloat16().float()
    assert torch.equal(Tiles(odd).to_dense(odd.dtype), odd) and Tiles(odd)._panels.dtype is torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_products_beside_float64(num_out: int, num_in: int, dtype: torch.dtype) -> None:
    needs(dtype)
    torch.manual_seed(num_out)
    weight, bias = torch.randn(num_out, num_in).to(dtype), torch.randn(num_out)
    rows = torch.randn(2, 150, num_in).to(dtype)  # more than go past the weights together
    packed = Tiles(weight)
    assert torch.equal(packed.to_dense(dtype), weight)
    expected = rows.double() @ weight.double().T + bias
    found = packed.multiply(rows, bias)
    error = 2.0**-8 if dtype is torch.bfloat16 else 1e-6 * num_in**0.5
    assert ((found - expected).abs() <= error * (expected.abs() + num_in**0.5)).all()
    assert not torch.equal(packed.multiply(rows, None), found), "the bias counts"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_at_every_height_and_with_any_threads(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(dtype)
    packed, rows = Tiles(torch.randn(70, 1100).to(dtype)), torch.randn(200, 1100).to(dtype)
    whole = packed.multiply(rows, None)
    for num_rows in (*range(1, 32), 42, 64, 127, 128):
        assert torch.equal(packed.multiply(rows[9 : 9 + num_rows], None), whole[9 : 9 + num_rows])
    for count in (1, 2):
        monkeypatch.setattr(tiles, "team_size", lambda count=count: count)
        assert torch.equal(packed.multiply(rows, None), whole)


def test_long_sums_lose_no_more_than_the_librarys() -> None:
    needs(torch.float32)
    weight, rows = torch.randn(64, 14336), torch.randn(64, 14336)
    exact = rows.double() @ weight.double().T
    ours, theirs = ((each - exact).norm() for each in (Tiles(weight).multiply(rows, None), rows @ weight.T))
    assert ours < 2 * theirs


def test_what_does_not_fit_is_refused() -> None:
    needs(torch.bfloat16)
    packed = Tiles(torch.randn(8, 6).bfloat16())
    with pytest.raises(TypeError, match="float32"):
        packed.multiply(torch.randn(1, 6), None)
    with pytest.raises(TypeError, match="of 6 inputs"):
        packed.multiply(torch.randn(1, 8).bfloat16(), None)
    assert not can_tile(torch.float16, 6)
    assert not can_tile(torch.bfloat16, 7), "inputs are multiplied in pairs"
