"""The kernels between matrix products against transformers' modules; without a GPU in Triton's interpreter."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from lpr.model.fused.elementwise import Activation, Weighing

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs the package triton", allow_module_level=True)
from lpr.model.kernels import elementwise_kernel

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"),
]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
"""The interpreter's casts to bfloat16 truncate."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def near(found: Tensor, expected: Tensor) -> bool:
    tolerance = TOLERANCE[found.dtype]
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def random(*size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(*size, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [24, 64, 576])
def test_norms(width: int, dtype: torch.dtype) -> None:
    states, added, weight = (random(*size, width, dtype=dtype) for size in ((2, 15), (2, 15), (1,)))
    for kind, weighing in zip((LlamaRMSNorm, Gemma2RMSNorm, Olmo2RMSNorm), Weighing, strict=True):
        norm = kind(width, eps=1e-5)
        norm.weight = nn.Parameter(weight[0], requires_grad=False)
        assert near(elementwise_kernel.rms_norm(states, weight[0], 1e-5, weighing), norm(states))
    total = states.clone()
    found = elementwise_kernel.rms_norm(total, weight[0], 1e-5, 0, added)
    assert torch.equal(total, states + added)
    assert torch.equal(found, elementwise_kernel.rms_norm(total, weight[0], 1e-5, 0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_among_any_number_of_rows(dtype: torch.dtype) -> None:
    states, weight = random(1, 33, 576, dtype=dtype), random(576, dtype=dtype)
    whole = elementwise_kernel.rms_norm(states, weight, 1e-6, 0)
    for row in (0, 17, 32):
        alone = elementwise_kernel.rms_norm(states[:, row : row + 1].contiguous(), weight, 1e-6, 0)
        assert torch.equal(alone, whole[:, row : row + 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 24, 64])
def test_norms_and_rotations_of_heads(width: int, dtype: torch.dtype) -> None:
    """Of the first heads of a row, in place; the others stay."""
    states = random(2, 7, 14 * width, dtype=dtype)
    weight, cosines, sines = (random(*size, width, dtype=dtype) for size in ((), (2, 7), (2, 7)))
    heads = states.unflatten(2, (14, width)).transpose(1, 2)
    norm = LlamaRMSNorm(width, eps=1e-5)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    found = states.clone()
    elementwise_kernel.norm_heads(found, weight, 1e-5, 0, 9 * width, 3)
    parts = found.unflatten(2, (14, width)).transpose(1, 2)
    assert near(parts[:, 9:12], norm(heads[:, 9:12]))
    assert torch.equal(parts[:, :9], heads[:, :9]) and torch.equal(parts[:, 12:], heads[:, 12:])
    expected, _ = apply_rotary_pos_emb(heads[:, :11], heads[:, :1], cosines, sines)
    found = states.clone()
    elementwise_kernel.rotate(found, cosines, sines, 11)
    parts = found.unflatten(2, (14, width)).transpose(1, 2)
    assert near(parts[:, :11], expected)
    assert torch.equal(parts[:, 11:], heads[:, 11:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "queries", "keys"), [(16, 6, 2), (24, 9, 9), (64, 3, 1)])
def test_keys_and_values_go_to_rows_of_the_cache(width: int, queries: int, keys: int, dtype: torch.dtype) -> None:
    """The queries are rotated in place; other rows, and parts of a pool that lie between the heads, stay."""
    states = random(2, 7, (queries + 2 * keys) * width, dtype=dtype)
    cosines, sines = random(2, 7, width, dtype=dtype), random(2, 7, width, dtype=dtype)
    rows = torch.tensor([30, 2, 3, 17, 9, 0, 31, 8, 7, 6, 5, 21, 22, 1])
    pools = random(2, 32, keys, 2 * width, dtype=dtype)
    sides, before = [pool[:, :, :width] for pool in pools], pools.clone()
    rotated, found = states.clone(), states.clone()
    elementwise_kernel.rotate(rotated, cosines, sines, queries + keys)
    elementwise_kernel.place(found, cosines, sines, queries, rows, *sides)
    by_head = rotated.flatten(0, 1).unflatten(1, (-1, width))
    assert torch.equal(found[..., : queries * width], rotated[..., : queries * width])
    assert torch.equal(found[..., queries * width :], states[..., queries * width :])
    for pool, first in zip(before, (queries, queries + keys), strict=True):
        pool[rows, :, :width] = by_head[:, first : first + keys]
    assert torch.equal(pools, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [5, 96, 1500])
def test_gates(width: int, dtype: torch.dtype) -> None:
    """Also of numbers that overflow, and of such that are none."""
    states = random(1, 9, 2 * width, dtype=torch.float32) * 8
    states[0, 0, :5] = torch.tensor([float("nan"), float("inf"), 90.0, -90.0, -200.0])
    gates, values = states.to(dtype).chunk(2, -1)
    for activation, expected in zip(Activation, (F.silu(gates), F.gelu(gates, approximate="tanh")), strict=True):
        assert near(elementwise_kernel.gate(states.to(dtype), activation), expected * values)


def test_no_rows() -> None:
    nothing = random(1, 0, 48, dtype=torch.float32)
    assert elementwise_kernel.rms_norm(nothing, random(48, dtype=torch.float32), 1e-5, 0).shape == nothing.shape
    assert elementwise_kernel.gate(nothing, 0).shape == (1, 0, 24)
    elementwise_kernel.rotate(nothing, nothing, nothing, 1)
    side = random(4, 1, 48, dtype=torch.float32)
    elementwise_kernel.place(nothing, nothing, nothing, 1, torch.arange(0), side, side)
