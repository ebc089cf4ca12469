"""Exact mode's matrix products: restricted to numbers of rows M at which a row has the same bits.

A library chooses its kernel by the shape. On a GPU all products have the same number of rows. On a CPU `find_gemm_rows`
tests products when a model is loaded: with MKL and AVX2 a float32 row has the same bits for any M of four or more, in
lpr's own products for every M.
"""

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lpr import native
from lpr.model.attention.sparse import selects
from lpr.model.cpu.products import Prepacked, PrepackedLinear
from lpr.model.exact.functions import NARROW, Size, in_pieces, narrow_product
from lpr.model.families import has_experts
from lpr.model.low_bit.layers import CodedLinear
from lpr.model.rewrite.base import Rewrite, Setting, Stage
from lpr.model.rewrite.sharded_layers import local
from lpr.model.step_inputs import GemmRows

GPU_ROWS = 64  # M of every product on a GPU: about where arithmetic takes as long as reading the weights
MOST_FILLED = 16  # most rows to which a small step may be padded to reach the range
_LEAST_RANGE = 4  # shorter ranges may agree by chance, and a row's place in the product then matters
_TESTED_ROWS = (*range(1, 34), 40, 48, 64, 65, 96, 128, 129, 192, 256, 257, 384, 512)
_MOST_ROWS = 513
MOST_LOGITS = 66  # most rows of the output head that are tested: few steps have more results

Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def refusal(model: Any, own_attention: bool) -> str | None:
    """The reason, from its class and config, why the logits of `model` depend on a step's shape; None without one."""
    config = model.config.get_text_config(decoder=True)
    if own_attention:
        return "its attention is its own code, which adds in the order of cache rows"
    if selects(config):
        return "its sparse attention selects tokens by scores whose last bits depend on a step's shape"
    if has_experts(config) and model.device.type != "cpu":
        return "its experts' matrix products are as high as a step has tokens for them"
    is_coded = any(isinstance(each, CodedLinear) for each in model.modules())
    if is_coded or getattr(model, "hf_quantizer", None) is not None:
        return "its quantised matrix products are not known to be the same for every height"
    return None


def find_gemm_rows(model: nn.Module) -> GemmRows | str:
    """Test a product of each shape with torch's present number of threads; the highest range of M that all share.

    Returns a string instead, which names the first product that leaves no range starting at MOST_FILLED rows or fewer.
    """
    bits = hashlib.blake2b(digest_size=8)
    bits.update(b"without the extension" if native.attend_in_order is None else b"with it")  # attention differs
    ranges = [(1, _MOST_ROWS)]
    for name, size, multiply, most in _products(model):
        found = _ranges(multiply, size, most, bits)
        if most == MOST_LOGITS:
            found[0] = found[0][0], _MOST_ROWS  # logits are computed in pieces of MOST_LOGITS rows
        ranges = [
            (max(low, other_low), min(high, other_high))
            for low, high in ranges
            for other_low, other_high in found
            if other_high - other_low >= _LEAST_RANGE and max(low, other_low) <= min(MOST_FILLED, high, other_high)
        ]
        if not ranges:
            return f"{name} {size[:2]} in {str(size[2])[6:]}"
    return GemmRows(*ranges[0], torch.get_num_threads(), bits=int.from_bytes(bits.digest(), "little"))


def tried_sizes(model: nn.Module) -> set[Size]:
    """The sizes of the products that `find_gemm_rows` tries, as PyTorch computes them."""
    every = (each for name, module in model.named_modules() for each in _kinds(name, module))
    return {size for kind, _, size in every if kind != "packed"}


def _ranges(multiply: Product, size: Size, most: int, bits: hashlib.blake2b) -> list[tuple[int, int]]:
    """Ranges of M up to `most`, the highest first, in which `multiply` gives a row the same bits.

    The bits in the highest range are added to the digest `bits`.
    """
    num_in, num_out, dtype = size
    rows, weight, bias = cancelling(num_in, num_out, most, dtype)
    highest, start = multiply(rows, weight, bias), 0
    bits.update(highest.contiguous().view(torch.uint8).numpy().tobytes())
    found = [(most, most)]
    for num_rows in reversed([each for each in _TESTED_ROWS if each < most]):
        first = (most - num_rows) // 2
        product = multiply(rows[first : first + num_rows], weight, bias)
        if torch.equal(product, highest[first - start : first - start + num_rows]):
            found[-1] = num_rows, found[-1][1]
        else:
            found.append((num_rows, num_rows))
            highest, start = product, first
    return found


def cancelling(num_in: int, num_out: int, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [n, in], a weight [out, in] and a bias [out] whose product is zero except for rounding errors.

    In half precision the output's rounding would hide the error of a sum. Here only the error is left, so another order
    of additions is visible.
    """
    generator = torch.Generator().manual_seed(0)
    half = num_in // 2
    rows, weight = torch.zeros(num_rows, num_in), torch.zeros(num_out, num_in)
    order = torch.randperm(num_in, generator=generator)
    first, second = order[:half], order[half : 2 * half]
    rows[:, first] = torch.randn(num_rows, half, generator=generator).to(dtype).float()
    rows[:, second] = -rows[:, first]
    weight[:, first] = torch.randn(num_out, half, generator=generator)
    weight[:, second] = weight[:, first]
    return rows.to(dtype), weight.to(dtype), torch.zeros(num_out, dtype=dtype)


def _products(model: nn.Module) -> Iterator[tuple[str, Size, Product, int]]:
    """A matrix product of every shape that `model` computes with its weights: name, size, function, most rows."""
    known = set()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for name, module in model.named_modules():
        for kind, has_bias, size in _kinds(name, module):
            if (kind, has_bias, size) not in known:
                known.add((kind, has_bias, size))
                plain = _linear if has_bias else _linear_alone
                products: dict[str, Product] = {"conv": _conv1d, "plain": plain, "narrow": narrow_product}
                product = _packed(has_bias) if kind == "packed" else products[kind]
                yield name, size, product, MOST_LOGITS if module is head else _MOST_ROWS


def _kinds(name: str, module: Any) -> Iterator[tuple[str, bool, Size]]:
    """The products of a module itself: kind, True with a bias, and size."""
    if isinstance(module, PrepackedLinear):
        yield "packed", module.bias is not None, (module.in_features, sum(module.pack.sizes), module.pack.dtype)
        if name.endswith("dt_proj"):  # Mamba multiplies by its weight
            yield "plain", False, (module.in_features, module.out_features, module.pack.dtype)
    elif isinstance(module, nn.Linear | Conv1D):
        weight = local(module.weight.detach())
        size = weight.shape if isinstance(module, Conv1D) else weight.shape[::-1]
        kind = "conv" if isinstance(module, Conv1D) else "narrow" if len(weight) <= NARROW else "plain"
        yield kind, module.bias is not None, (*size, weight.dtype)
    elif not isinstance(module, nn.Embedding) and not any(isinstance(each, nn.Conv1d) for each in module.children()):
        for weight in module.parameters(recurse=False):  # of routers, in float32 too, and of experts
            if weight.dim() in (2, 3) and not isinstance(module, nn.Conv1d):
                size = weight.shape[-2:] if getattr(module, "is_transposed", False) else weight.shape[:-3:-1]
                kind = "conv" if getattr(module, "is_transposed", False) else "narrow" if size[1] <= NARROW else "plain"
                for dtype in dict.fromkeys((weight.dtype, torch.float32) if weight.dim() == 2 else (weight.dtype,)):
                    yield kind, False, (*size, dtype)


def _packed(has_bias: bool) -> Product:
    """A product that packs its weight at the first call and reuses it."""
    packs: list[Prepacked] = []

    def multiply(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if not packs:
            packs.append(Prepacked(weight, bias if has_bias else None, [len(weight)]))
        return packs[0].multiply(rows[None])[0]

    return multiply


def _conv1d(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, rows, weight.T.contiguous())


def _linear(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(rows[None], weight, bias)[0]


def _linear_alone(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(rows[None], weight)[0]


class PinnedProducts(Rewrite):
    """In steps of exact mode, products with the model's weights use only the allowed numbers of rows."""

    name, stage = "products at fixed heights", Stage.EXACT

    def why_not(self, model: nn.Module, setting: Setting) -> str | None:
        return None if setting.exact else "exact mode is off"

    def match(self, model: nn.Module, setting: Setting) -> Iterator[tuple[str, int | None]]:
        head = getattr(model, "get_output_embeddings", lambda: None)()
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | Conv1D) and not isinstance(getattr(*_multiplier(module)), partial):
                yield name, MOST_LOGITS if module is head else None

    def apply(self, module: nn.Module, found: int | None) -> None:
        owner, name = _multiplier(module)
        setattr(owner, name, partial(in_pieces, getattr(owner, name), limit=found))

    def undo(self, module: nn.Module) -> None:
        owner, name = _multiplier(module)
        vars(owner).pop(name, None)


def _multiplier(module: nn.Module) -> tuple[Any, str]:
    return (module.pack, "multiply") if isinstance(module, PrepackedLinear) else (module, "forward")
