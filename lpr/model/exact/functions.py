"""Exact mode on a CPU for a model's own code: PyTorch functions whose bits depend on the shape.

PyTorch computes exponentials differently after the last whole vector and at the borders between threads. A product with
a weight outside PyTorch's layers, such as a router's or an expert's, has as many rows as the model's code passes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lpr.model.rewrite.base import Setting, Stage, WrappedForward
from lpr.model.step_inputs import current_step

VECTOR = 64  # most values that an elementwise operator processes at once: two AVX-512 vectors in half precision
MOST = (1 << 15) - VECTOR  # most values that PyTorch processes in one thread
NARROW = 15  # most outputs for which a library uses matrix-vector products, in which a row's bits depend on its place
ELEMENTWISE = {
    F.silu, F.gelu, F.softplus, F.mish, F.elu, F.selu, torch.sigmoid, Tensor.sigmoid, torch.rsqrt, Tensor.rsqrt,
    torch.exp2, Tensor.exp2, torch.log1p, Tensor.log1p,
}  # fmt: skip
"""Functions with different code for tails. (exp, tanh, erf, sine and cosine have the same.)"""
_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm}
_SUMS = {torch.einsum, torch.baddbmm, F.conv1d}
_linear = F.linear
Size = tuple[int, int, torch.dtype]  # inputs, outputs and dtype of a product


class InexactError(ValueError):
    """A model's own code adds in an order that depends on a step's shape. (`@` would swallow a TypeError.)"""


class FixedFunctions(TorchFunctionMode):
    """Evaluates such functions in whole vectors, and products at the allowed numbers of rows.

    Raises InexactError for a product that was not tested when the model was loaded.
    """

    def __init__(self, sizes: set[Size]) -> None:
        super().__init__()
        self.sizes = sizes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if current_step() is None:  # an interrupt may have left the mode on
            return func(*args, **kwargs)
        if func in ELEMENTWISE:
            return _in_whole_vectors(partial(func, **kwargs), *args)
        if func is _linear:
            return self._multiply(partial(func, **kwargs), *args)
        if func in _PRODUCTS and args[0].shape[-1] > 1:  # with one input there is no sum
            if args[0].dim() == 2 < args[1].dim():
                return self._multiply(_linear, args[1].transpose(-2, -1), args[0]).transpose(-2, -1)
            return self._multiply(func, *args)
        if func is torch.addmm:
            return self._multiply(lambda part, weight: func(args[0], part, weight), *args[1:])
        if func in _SUMS:
            raise InexactError(f"{func.__name__} in its own code adds in an order that depends on a step's shape")
        return func(*args, **kwargs)

    def _multiply(self, func: Callable[..., Tensor], states: Tensor, weight: Tensor, *bias: Any) -> Tensor:
        if type(weight) not in (Tensor, nn.Parameter):  # split over ranks, in a layer of PyTorch's
            return func(states, weight, *bias)
        if states.dim() == weight.dim() > 2 and states.shape[-1] <= NARROW:  # a batched product: one matrix per token
            parts = zip(states.float().split(1, -1), weight.float().split(1, -2), strict=True)
            return sum((one * row for one, row in parts), torch.zeros(())).to(states.dtype)
        is_linear = getattr(func, "func", func) is _linear
        size = weight.shape[::-1] if is_linear else weight.shape
        if is_linear and len(weight) <= NARROW:
            return narrow_product(states, weight, *bias, **getattr(func, "keywords", {}))
        if weight.dim() != 2 or (*size, weight.dtype) not in self.sizes:
            raise InexactError(f"its own code multiplies by {tuple(weight.shape)}, in an order that is not known here")
        return in_pieces(lambda part: func(part, weight, *bias), states)


def narrow_product(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` with a weight of NARROW rows or fewer."""
    wide = states.float()
    sums = torch.stack([(wide * each).sum(-1) for each in weight.float()], -1)
    return (sums if bias is None else sums + bias.float()).to(states.dtype)


def _in_whole_vectors(func: Callable[..., Tensor], values: Tensor, *args: Any) -> Tensor:
    flat, count = values.reshape(-1), values.numel()
    if count % VECTOR:
        flat = F.pad(flat, (0, -count % VECTOR))
    if flat.numel() > MOST and torch.get_num_threads() > 1:
        flat = torch.cat([func(part, *args) for part in flat.split(MOST)])
    else:
        flat = func(flat, *args)
    return flat[:count].view(values.shape)


def in_pieces(multiply: Callable[[Tensor], Tensor], states: Tensor, limit: int | None = None) -> Tensor:
    """`multiply` of `states` [..., D], in pieces with an allowed number of rows, at most `limit`."""
    step, count = current_step(), states.shape[:-1].numel()
    if step is None or step.gemm_rows is None:
        return multiply(states)
    states = states.contiguous()  # transposed ones take another kernel
    fewest, most = step.gemm_rows.fewest, min(step.gemm_rows.most, limit or step.gemm_rows.most)
    if fewest <= count <= most:
        return multiply(states)
    pieces = list(states.flatten(0, -2).split(most))
    if len(pieces[-1]) < fewest:
        pieces[-1] = F.pad(pieces[-1], (0, 0, 0, fewest - len(pieces[-1])))
    return torch.cat([multiply(piece) for piece in pieces])[:count].unflatten(0, states.shape[:-1])


class FixedExperts(WrappedForward):
    """Experts compute their tokens one expert after the other, by products of allowed numbers of rows."""

    name, stage = "experts one by one", Stage.EXACT

    def why_not(self, model: nn.Module, setting: Setting) -> str | None:
        return None if setting.exact else "exact mode is off"

    def find(self, module: Any, setting: Setting) -> Callable[..., Any] | None:
        return _one_by_one if hasattr(module, "has_post_expert_norm") else None


def _one_by_one(module: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    step = current_step()
    if step is None or step.gemm_rows is None:
        return stock(*args, **kwargs)
    return type(module).forward.__wrapped__(module, *args, **kwargs)
