"""Exact mode's matrix products, at heights (rows) that agree: a library chooses its kernel by the shape.

All products on a GPU have one height. On a CPU `find_heights` tries them out when a model is loaded: a float32
row of MKL's with AVX2 has the same bits in any product of four rows or more, lpr's own products at every height.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lpr import native
from lpr.model.attention.sparse import selects
from lpr.model.cpu.products import Prepacked, PrepackedLinear
from lpr.model.families import has_experts
from lpr.model.rewrite.base import Rewrite, Setting, Stage
from lpr.model.rewrite.sharded_layers import local
from lpr.model.step_inputs import Heights, current_step

HEIGHT = 64  # rows of every product on a GPU, which reads weights for about as long as it multiplies 64 rows by them
MOST_FILLED = 16  # rows to which a step may be padded, so that its products round as those of more rows do
_UNKNOWN_HEIGHT = 4  # rows of a step of a model whose weights are multiplied by code that is not known here
_HEIGHTS = (*range(1, 34), 40, 48, 64, 65, 96, 128, 129, 192, 256, 257, 384, 512)
_MOST_ROWS = 513
MOST_LOGITS = 66  # rows of the output head that are tried: few steps have more results
_VECTOR = 64
"""Values that an elementwise operator of PyTorch takes at once on a CPU, at most: two vectors of AVX-512 in half
precision."""

Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def refusal(model: Any, own_attention: bool) -> str | None:
    """The reason in its class and config why the logits of `model` depend on a step's shape; None if there is none."""
    config = model.config.get_text_config(decoder=True)
    if own_attention:
        return "its attention is its own code, which adds in the order of cache rows"
    if selects(config):
        return "its sparse attention selects tokens by scores whose last bits depend on a step's shape"
    if has_experts(config):
        return "its experts' matrix products are as high as a step has tokens for them"
    if getattr(model, "hf_quantizer", None) is not None:
        return "its quantised matrix products are not known to be the same for every height"
    return None


def find_heights(model: nn.Module) -> Heights | str:
    """Try a product of each shape with as many threads as torch has now; of several ranges of heights the highest.

    Returns, in place of heights, the first product with which none are left whose least is MOST_FILLED or fewer rows.
    """
    bits = hashlib.blake2b(digest_size=8)
    bits.update(b"without the extension" if native.attend_in_order is None else b"with it")  # attention differs
    is_known, dtype = _all_known(model), next(model.parameters()).dtype
    ranges = [(1 if is_known else _UNKNOWN_HEIGHT, _MOST_ROWS)]
    for name, size, multiply, most in _products(model):
        found = _ranges(multiply, *size, most, dtype, bits)
        if most == MOST_LOGITS:
            found[0] = found[0][0], _MOST_ROWS  # it is cut at MOST_LOGITS in any case
        ranges = [
            (max(low, other_low), min(high, other_high))
            for low, high in ranges
            for other_low, other_high in found
            if other_low < other_high  # at one height alone, a row's place may matter
            and max(low, other_low) <= min(MOST_FILLED, high, other_high)
        ]
        if not ranges or (not is_known and ranges[0][1] < _MOST_ROWS):  # what code of its own multiplies is not cut
            return f"{name} {size} in {str(dtype)[6:]}"
    fewest, most = ranges[0]
    widths = [width for _, size, _, most_rows in _products(model) if most_rows == _MOST_ROWS for width in size]
    multiple = max(map(_multiple, widths), default=1)
    config: Any = getattr(model, "config", None)
    capped = config is not None and getattr(config.get_text_config(), "final_logit_softcapping", None)
    head = _multiple(config.get_text_config().vocab_size) if capped else 1
    digest = int.from_bytes(bits.digest(), "little")
    return Heights(fewest, most, torch.get_num_threads(), multiple, head, digest)


def _multiple(width: int) -> int:
    """Rows of `width` values that fill whole vectors: what is left over, PyTorch computes with another exp or tanh."""
    return _VECTOR // gcd(_VECTOR, width)


def _ranges(
    multiply: Product, num_in: int, num_out: int, most: int, dtype: torch.dtype, bits: hashlib.blake2b
) -> list[tuple[int, int]]:
    """Ranges of heights up to `most`, the highest first, in which `multiply` gives a row the same bits.

    `bits` takes in those of the highest.
    """
    rows, weight, bias = cancelling(num_in, num_out, most, dtype)
    highest, start = multiply(rows, weight, bias), 0
    bits.update(highest.contiguous().view(torch.uint8).numpy().tobytes())
    found = [(most, most)]
    for height in reversed([each for each in _HEIGHTS if each < most]):
        first = (most - height) // 2
        product = multiply(rows[first : first + height], weight, bias)
        if torch.equal(product, highest[first - start : first - start + height]):
            found[-1] = height, found[-1][1]
        else:
            found.append((height, height))
            highest, start = product, first
    return found


def cancelling(num_in: int, num_out: int, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [n, in], a weight [out, in] and a bias [out] whose product is zero but for the errors of its additions.

    Half precision rounds an error of a sum away; here nothing else is left, so another order of additions shows.
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


def _products(model: nn.Module) -> Iterator[tuple[str, tuple[int, int], Product, int]]:
    """A matrix product of every shape that `model` computes with its weights: name, (in, out), itself, most rows."""
    known = set()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | Conv1D):
            continue
        if isinstance(module, PrepackedLinear):
            kind, size = "packed", [module.in_features, sum(module.pack.sizes)]
        else:
            shape = list(local(module.weight.detach()).shape)
            kind, size = ("conv", shape) if isinstance(module, Conv1D) else ("plain", shape[::-1])
        has_bias = module.bias is not None
        if (kind, has_bias, *size) not in known:
            known.add((kind, has_bias, *size))
            multiply = _linear if has_bias else _linear_alone
            product = {"packed": _packed(has_bias), "conv": _conv1d, "plain": multiply}[kind]
            yield name, (size[0], size[1]), product, MOST_LOGITS if module is head else _MOST_ROWS


def _packed(has_bias: bool) -> Product:
    """A product that lays its weight out at the first call; the later ones have the same."""
    packs: list[Prepacked] = []

    def multiply(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if not packs:
            packs.append(Prepacked.of(weight, bias if has_bias else None))
        return packs[0].multiply(rows[None])[0]

    return multiply


def _conv1d(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, rows, weight.T.contiguous())


def _linear(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(rows[None], weight, bias)[0]


def _linear_alone(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(rows[None], weight)[0]


def _all_known(model: nn.Module) -> bool:
    return all(
        isinstance(module, nn.Linear | Conv1D | nn.Embedding)
        for module in model.modules()
        if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    )


class PinnedProducts(Rewrite):
    """Products with the model's weights keep to the heights of a step in exact mode; otherwise nothing changes."""

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
        setattr(owner, name, partial(_in_pieces, getattr(owner, name), limit=found))

    def undo(self, module: nn.Module) -> None:
        owner, name = _multiplier(module)
        vars(owner).pop(name, None)


def _multiplier(module: nn.Module) -> tuple[Any, str]:
    """The object and the name of its method that multiplies for `module`."""
    return (module.pack, "multiply") if isinstance(module, PrepackedLinear) else (module, "forward")


def _in_pieces(multiply: Callable[[Tensor], Tensor], states: Tensor, limit: int | None = None) -> Tensor:
    """`multiply` of `states` [..., D], in pieces of as many rows as agree, and of `limit` at most."""
    step, count = current_step(), states.shape[:-1].numel()
    if step is None or step.heights is None:
        return multiply(states)
    fewest, most = step.heights.fewest, min(step.heights.most, limit or step.heights.most)
    if fewest <= count <= most:
        return multiply(states)
    pieces = list(states.flatten(0, -2).split(most))
    if len(pieces[-1]) < fewest:
        pieces[-1] = F.pad(pieces[-1], (0, 0, 0, fewest - len(pieces[-1])))
    return torch.cat([multiply(piece) for piece in pieces])[:count].unflatten(0, states.shape[:-1])
