"""Exact attention in C++: the bits of its specification, which is written here lane by lane in NumPy."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lpr import native
from lpr.model.attention import in_order

pytestmark = pytest.mark.skipif(native.attend_in_order is None, reason="no extension")
LANES = 16
F32 = np.float32


def lanes_of(values: np.ndarray, fill: float = 0.0) -> np.ndarray:
    """[..., blocks, LANES] of [..., n]."""
    missing = -values.shape[-1] % LANES
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)], constant_values=fill)
    return padded.reshape(*values.shape[:-1], -1, LANES)


def total(blocks: np.ndarray) -> np.ndarray:
    """The sum of [..., blocks, LANES]: block after block, then halves upon halves."""
    lanes = np.zeros((*blocks.shape[:-2], LANES), F32)
    for block in range(blocks.shape[-2]):
        lanes = lanes + blocks[..., block, :]
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def exponential(x: np.ndarray) -> np.ndarray:
    """Cephes' expf for x <= 0, without a fused operation."""
    small = x < F32(-87)
    held = np.where(small, F32(-87), x)
    whole = (held * F32(1.44269504088896341) - F32(0.5)).astype(np.int32)
    n = whole.astype(F32)
    r = held - n * F32(0.693359375)
    r = r - n * F32(-2.12194440e-4)
    p = np.full_like(r, 1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + F32(factor)
    p = p * (r * r) + r + F32(1)
    return np.where(small, F32(0), p * ((whole + 127) << 23).astype(np.int32).view(F32))


def specified(query: np.ndarray, keys: np.ndarray, values: np.ndarray, sink: float | None) -> np.ndarray:
    """One head's `query` [D], scaled, over its path: `keys` [n, D], `values` [n, Dv]."""
    scores = total(lanes_of(query * keys))
    highest = scores.max() if sink is None else max(scores.max(), F32(sink))
    weights = exponential(lanes_of(scores, -np.inf) - highest)
    whole = total(weights)
    if sink is not None:
        whole = whole + exponential(np.array([F32(sink) - highest]))[0]
    found = np.zeros(values.shape[1], F32)
    for weight, value in zip(weights.flatten(), values, strict=False):
        found = found + value * weight
    return found / whole


def tree(count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [-1, 0, *(generator.randrange(node) for node in range(2, count))]


def path_of(parents: list[int], entry: int, num_cached: int) -> list[int]:
    rows = []
    while entry >= 0:
        rows.insert(0, num_cached + entry)
        entry = parents[entry]
    return list(range(num_cached)) + rows


@pytest.mark.parametrize(
    "num_heads, num_kv_heads, width, value_width, num_cached, window",
    [(9, 3, 64, 64, 70, None), (4, 4, 20, 12, 10, None), (6, 1, 128, 80, 130, 33), (5, 1, 16, 36, 0, None)],
)
def test_bits_are_those_of_the_specification(
    num_heads: int, num_kv_heads: int, width: int, value_width: int, num_cached: int, window: int | None
) -> None:
    torch.manual_seed(width)
    parents, count, sinks = tree(24, width), 24, None if width == 20 else torch.randn(num_heads)
    num_kv = num_cached + count + 40
    query = torch.randn(1, num_heads, count, width)
    key, value = torch.randn(num_kv, num_kv_heads, width), torch.randn(num_kv, num_kv_heads, value_width)
    mask = torch.full((count, num_kv), -1e9)
    for entry in range(count):
        mask[entry, path_of(parents, entry, num_cached)[-window if window else None :]] = 0
    paths = in_order.find_paths(mask)
    scale = width**-0.5
    found = in_order.attend(query, key.transpose(0, 1)[None], value.transpose(0, 1)[None], [paths], scale, sinks=sinks)
    asked = (query * scale).numpy()
    for entry in range(count):
        rows = path_of(parents, entry, num_cached)[-window if window else None :]
        assert paths.rows[paths.starts[entry] : paths.starts[entry + 1]].tolist() == rows
        for head in range(num_heads):
            own = head * num_kv_heads // num_heads
            sink = None if sinks is None else float(sinks[head])
            wanted = specified(asked[0, head, entry], key[rows, own].numpy(), value[rows, own].numpy(), sink)
            assert np.array_equal(found[0, head, entry].numpy(), wanted), (entry, head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_it_is_attention(dtype: torch.dtype, softcap: float | None) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 6, 9, 24).to(dtype), torch.randn(2, 3, 40, 24).to(dtype)
    value = torch.randn(2, 3, 40, 16).to(dtype)
    mask = torch.zeros(2, 9, 40).masked_fill_(torch.ones(9, 40).triu(32) > 0, -1e9)
    paths = [in_order.find_paths(each) for each in mask]
    found = in_order.attend(query, key, value, paths, 0.2, softcap)
    scores = query.double() @ key.double().repeat_interleave(2, 1).transpose(2, 3) * 0.2
    scores = torch.tanh(scores / softcap) * softcap if softcap else scores
    weights = torch.softmax(scores.masked_fill(mask[:, None] != 0, -torch.inf), -1)
    wanted = weights @ value.double().repeat_interleave(2, 1)
    assert torch.allclose(found.double(), wanted, atol={torch.float32: 1e-6}.get(dtype, 1e-2))
    assert found.dtype == dtype and (dtype == torch.float32 or (found - wanted.to(dtype)).abs().max() < 0.02)


def test_what_nobody_sees_and_what_is_not_a_number() -> None:
    query, key, value = torch.ones(1, 1, 2, 4), torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4)
    value[0, 0, 2], key[0, 0, 2] = torch.nan, torch.inf
    paths = in_order.find_paths(torch.tensor([[-1.0, -1.0, -1.0], [0.0, 0.0, -1.0]]))
    found = in_order.attend(query, key, value, [paths], 1.0)
    assert found[0, 0].tolist() == [[0.0] * 4, [1.0] * 4], "a row behind what is visible adds nothing, whatever it is"
    paths = in_order.find_paths(torch.tensor([[0.0, 0.0, 0.0], [0.0, -1.0, -1.0]]))
    found = in_order.attend(query, key, value, [paths], 1.0)
    assert found[0, 0, 0].isnan().all() and found[0, 0, 1].tolist() == [1.0] * 4
