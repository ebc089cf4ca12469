"""Products with rounded weights: right at every shape, the same bits for any number of rows, AVX2 or AVX-512."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lpr import native
from lpr.model.cpu import tiles
from lpr.model.cpu.products import PrepackedLinear
from lpr.model.cpu.tiles import Tiles, can_tile
from lpr.model.low_bit.coded import VALUES, Coding, Kind
from lpr.model.low_bit.layers import CodedTiles
from lpr.model.low_bit.products import FORMS, Form, LowBitLinear, Rounded, round_linear
from lpr.model.low_bit.tiles import Int4Tiles, Int8Tiles
from tests.fakes.rewriting import merge_projections, prepack

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (5, 3), (33, 8), (100, 34), (64, 576), (96, 1537), (31, 512), (40, 2050)]
TESTED_ROWS = (*range(1, 34), 126, 127, 200)
ERRORS = {"int8": 0.5 / 127, "fp8": 2.0**-4, "int4": 0.55 / 15}
"""The largest error of a weight: over the largest of its row, of itself in fp8, over the range of its group in int4."""


@pytest.fixture(params=["widest vectors", "AVX2"])
def vectors(request: pytest.FixtureRequest) -> Iterator[str]:
    if native.use_narrow_vectors is None or not can_tile(torch.float32, 2):
        pytest.skip("this machine allows no tiles")
    native.use_narrow_vectors(request.param == "AVX2")
    yield request.param
    native.use_narrow_vectors(False)


def tiles_of(bits: int, num_out: int, num_in: int) -> tuple[Int8Tiles | Int4Tiles, Tensor, Tensor]:
    """A random weight, laid out and dense in float64, and the part of it that rounded rows are multiplied by.

    It has the extreme values.
    """
    if bits == 8:
        values = torch.randint(-127, 128, (num_out, num_in), dtype=torch.int8)
        values[0], scale = 127, torch.rand(num_out) + 0.01
        dense = values.double() * scale.double()[:, None]
        return Int8Tiles(values, scale), dense, dense
    groups = torch.randint(0, 16, (num_out, -(-num_in // 32), 32), dtype=torch.uint8)
    groups[0] = 15
    scale, low = torch.rand(groups.shape[:2]).bfloat16(), torch.randn(groups.shape[:2]).bfloat16()
    scaled = (groups.double() * scale.double()[..., None]).flatten(1)[:, :num_in]
    dense = scaled + low.double().repeat_interleave(32, 1)[:, :num_in]
    return Int4Tiles(groups, scale, low, num_in), dense, scaled


LEVELS = {8: 2.0**-16, 4: 1.0 / 253}
"""Largest error of a rounded value over the largest."""


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_products_beside_float64(num_out: int, num_in: int, dtype: torch.dtype, bits: int, vectors: str) -> None:
    torch.manual_seed(num_out)
    packed, weight, rounded = tiles_of(bits, num_out, num_in)
    assert torch.allclose(packed.to_dense(torch.float32), weight.float(), rtol=1e-6, atol=1e-6)
    bias = torch.randn(num_out)
    rows = torch.randn(2, 100, num_in)
    rows[0, 3], rows[1, 7] = 5.0, 0.0  # the largest sums of all, and none
    rows = rows.to(dtype)
    expected = rows.double() @ weight.T + bias
    found = packed.multiply(rows, bias)
    assert found.dtype is dtype and found.shape == expected.shape
    levels = LEVELS[bits] * rows.double().abs().amax(2, keepdim=True) * rounded.abs().sum(1)  # if all go one way
    rounding = (2.0**-8 if dtype is torch.bfloat16 else 1e-6) * expected.abs()
    assert ((found - expected).abs() <= levels + rounding + 1e-5 * num_in**0.5).all()
    error = (found - expected).norm() / expected.norm()
    assert error < {8: 1e-4, 4: 0.01}[bits] + (0.004 if dtype is torch.bfloat16 else 0)
    assert not torch.equal(packed.multiply(rows, None), found), "the bias counts"


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_at_every_height_with_any_threads_and_vectors(
    dtype: torch.dtype, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native.use_narrow_vectors is None or not can_tile(torch.float32, 2):
        pytest.skip("this machine allows no tiles")
    packed, rows = tiles_of(bits, 70, 1100)[0], torch.randn(210, 1100).to(dtype)
    full, wholes = Tiles(torch.randn(70, 1100)), []
    for narrow in (False, True):
        native.use_narrow_vectors(narrow)
        try:
            whole = packed.multiply(rows, None)
            wholes.append((whole, full.multiply(rows.float(), None)))
            for num_rows in TESTED_ROWS:
                assert torch.equal(packed.multiply(rows[9 : 9 + num_rows], None), whole[9 : 9 + num_rows])
            for count in (1, 2):
                monkeypatch.setattr(tiles, "team_size", lambda count=count: count)
                assert torch.equal(packed.multiply(rows, None), whole)
        finally:
            native.use_narrow_vectors(False)
    assert all(map(torch.equal, *wholes)), "low-bit and full products have the same bits with AVX2"


@pytest.mark.parametrize(("bits", "far", "near"), [(8, 512, 1.0), (4, 32, 3.0)])
def test_each_part_of_a_row_has_a_scale_of_its_own(bits: int, far: int, near: float, vectors: str) -> None:
    """One huge value costs the precision of its own part alone: here the other values of its part are zero."""
    packed, weight, _ = tiles_of(bits, 32, 1024)
    rows = torch.randn(1, 1024)
    expected = rows.double()[:, :-far] @ weight[:, :-far].T
    rows[0, -far:] = 0.0
    rows[0, 1000] = 1e6
    found = packed.multiply(rows, None).double() - 1e6 * weight[:, 1000]
    assert ((found - expected).abs() <= near + 1e6 * weight[:, 1000].abs() * 1e-6).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_values_that_are_not_finite_show(bits: int, vectors: str) -> None:
    packed = tiles_of(bits, 40, 600)[0]
    for bad in (float("nan"), float("inf"), float("-inf")):
        rows = torch.randn(3, 600)
        rows[1, 599] = bad
        found = packed.multiply(rows, None)
        assert not found[1].isfinite().any() and found[[0, 2]].isfinite().all()


@pytest.mark.parametrize("bits", [8, 4])
def test_what_does_not_fit_is_refused(bits: int, vectors: str) -> None:
    packed = tiles_of(bits, 8, 6)[0]
    with pytest.raises(TypeError, match="float64"):
        packed.multiply(torch.randn(1, 6).double(), None)
    with pytest.raises(TypeError, match="of 6 inputs"):
        packed.multiply(torch.randn(1, 8), None)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
def test_rounding(num_out: int, num_in: int, form: Form) -> None:
    torch.manual_seed(num_in)
    weight = torch.randn(num_out, num_in)
    weight[0] = 0.0
    weight[-1] *= 1e-4
    found = Rounded(weight, form).to_dense(torch.float32)
    largest = weight.abs().amax(1, keepdim=True)
    size = {"int8": largest, "fp8": weight.abs() + largest / 448 / 32}.get(form)
    if size is None:
        groups = torch.nn.functional.pad(weight, (0, -num_in % 32)).unflatten(1, (-1, 32))
        size = (groups.amax(2) - groups.amin(2)).repeat_interleave(32, 1)[:, :num_in]
        size = size + 0.3 * groups.abs().amax(2).repeat_interleave(32, 1)[:, :num_in] / 15  # scales are bfloat16
    assert found.shape == weight.shape and ((found - weight).abs() <= ERRORS[form] * size * 1.01 + 1e-9).all()
    assert not torch.equal(found, weight) or num_in == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_layers_of_a_pack(form: Form, dtype: torch.dtype, has_bias: bool) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(40, size, bias=has_bias).to(dtype) for size in (24, 8, 9)]
    rows, weights = torch.randn(3, 40).to(dtype), [layer.weight.detach().clone() for layer in layers]
    with torch.no_grad():
        full = [layer(rows) for layer in layers]
        pack = round_linear(layers, form)
        found = [layer(rows) for layer in layers]
        expected = [nn.functional.linear(rows, layer.weight, layer.bias) for layer in layers]
    assert all(type(layer) is LowBitLinear and not dict(layer.named_parameters()).get("weight") for layer in layers)
    for layer, one, other, whole, weight in zip(layers, found, expected, full, weights, strict=True):
        assert layer.weight.shape == weight.shape and layer.weight.dtype is dtype
        is_coarse = dtype is torch.bfloat16 or form == "int4"
        assert torch.allclose(one.float(), other.float(), atol=2e-2 if is_coarse else 1e-4)
        assert not torch.equal(one, whole)
    assert pack.num_bytes <= (64 * (32 + 2 * 4) if form == "int4" else 64 * (40 + 4))


def test_layers_that_are_packed_leave_their_pack() -> None:
    for pack in (lambda module: prepack(module), lambda module: merge_projections(module)):
        torch.manual_seed(1)
        holder = nn.Module()
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(holder, name, nn.Linear(16, 8))
        members = [holder.q_proj, holder.k_proj, holder.v_proj]
        weight = torch.cat([each.weight.detach().clone() for each in members])
        pack(holder)
        made = round_linear(members, "int8")
        assert all(isinstance(each, PrepackedLinear) and each.pack is made for each in members)
        assert torch.allclose(torch.cat([each.weight for each in members]), weight, atol=0.51 / 127 * 0.25)


@pytest.mark.parametrize("has_zero", [False, True])
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "fp4"])
def test_weights_of_checkpoints_are_multiplied_as_floats(vectors: str, kind: Kind, has_zero: bool) -> None:
    """As exact as float32, with the same bits for every number of rows and with either kind of vectors."""
    generator = torch.Generator().manual_seed(3)
    for outputs, inputs, group in ((40, 70, 70), (64, 256, 32), (33, 1300, 1300), (100, 640, 128)):
        coding = Coding(kind, inputs, group, has_zero)
        codes = torch.randint(0, 256, (outputs, inputs), generator=generator, dtype=torch.uint8)
        codes = codes & 15 if kind in VALUES else torch.where(codes & 127 == 127, 1, codes)  # e4m3's NaN
        zero = torch.randint(-8, 8, (outputs, coding.num_groups), generator=generator) if has_zero else None
        rows = coding.encode(codes, torch.rand(outputs, coding.num_groups, generator=generator) + 0.1, zero)
        laid, bias = CodedTiles(coding, rows), torch.randn(outputs, generator=generator)
        assert torch.equal(laid.rows(), rows)
        given = torch.randn(30, inputs, generator=generator)
        expected = given.double() @ coding.to_dense(rows, torch.float32).double().T + bias
        alone = torch.cat([laid.multiply(each[None], bias) for each in given])
        assert (alone - expected).abs().max() < 2e-6 * expected.abs().max()
        for num_rows in (2, 3, 5, 6, 7, 12, 13, 30):
            assert torch.equal(laid.multiply(given[:num_rows], bias), alone[:num_rows])
        assert native.use_narrow_vectors is not None
        native.use_narrow_vectors(vectors != "AVX2")
        assert torch.equal(laid.multiply(given, bias), alone)
        native.use_narrow_vectors(vectors == "AVX2")
        half = laid.multiply(given.bfloat16(), bias)
        expected = given.bfloat16().double() @ coding.to_dense(rows, torch.float32).double().T + bias
        assert half.dtype is torch.bfloat16
        assert (half - expected).abs().max() < 5e-3 * expected.abs().max()
