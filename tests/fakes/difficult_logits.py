"""Logits made to be difficult to sample from, and selections over them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st

from lpr.config import SamplingParams
from lpr.model.sampling.selection import Selection


def peaked(generator: torch.Generator, num_rows: int, vocabulary: int) -> torch.Tensor:
    """Logits shaped like a language model's: a few tokens far above the others."""
    logits = torch.randn(num_rows, vocabulary, generator=generator) * 3
    top = torch.randint(0, vocabulary, (num_rows, 20), generator=generator)
    return logits.scatter(1, top, torch.rand(num_rows, 20, generator=generator) * 8 + 8)


def with_holes(logits: torch.Tensor, generator: torch.Generator, value: float, share: float) -> torch.Tensor:
    return logits.masked_fill(torch.rand(logits.shape, generator=generator) < share, value)


KINDS: dict[str, Callable[[torch.Generator, int, int], torch.Tensor]] = {
    "peaked": peaked,
    "wide": lambda g, n, v: torch.randn(n, v, generator=g) * 8,
    "nearly flat": lambda g, n, v: torch.randn(n, v, generator=g) * 0.01,
    "flat": lambda g, n, v: torch.zeros(n, v),
    "few levels": lambda g, n, v: (torch.randn(n, v, generator=g) * 2).round(),
    "bfloat16": lambda g, n, v: peaked(g, n, v).bfloat16(),
    "mostly excluded": lambda g, n, v: with_holes(peaked(g, n, v), g, -torch.inf, 0.9),
    "one token left": lambda g, n, v: torch.full((n, v), -torch.inf).index_fill(1, torch.tensor([v // 2]), 1.0),
    "nothing left": lambda g, n, v: torch.full((n, v), -torch.inf),
    "some NaN": lambda g, n, v: with_holes(peaked(g, n, v), g, torch.nan, 0.2 / v),
    "some infinite": lambda g, n, v: with_holes(peaked(g, n, v), g, torch.inf, 0.2 / v),
    "huge numbers": lambda g, n, v: torch.randn(n, v, generator=g) * 1e30,
}
SIZES = (1, 2, 5, 63, 64, 65, 200, 4096, 8321, 20000)
PARAMS = [
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=0.8, top_p=0.95, seed=2),
    SamplingParams(temperature=1.0, top_k=50, seed=3),
    SamplingParams(temperature=1.3, top_k=200, top_p=0.9, min_p=0.01, seed=4),
    SamplingParams(temperature=0.7, min_p=0.05, seed=5),
]


@st.composite
def draws(draw: st.DrawFn, sizes: tuple[int, ...] = SIZES) -> tuple[torch.Tensor, Selection]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    num_rows = draw(st.integers(1, 6))
    logits = KINDS[draw(st.sampled_from(sorted(KINDS)))](generator, num_rows, draw(st.sampled_from(sizes)))
    requests = [
        (
            SamplingParams(
                temperature=draw(st.sampled_from([0.0, 0.3, 0.8, 1.0, 3.0])),
                top_k=draw(st.sampled_from([0, 0, 1, 3, 50, 63, 64, 65, 1000])),
                top_p=draw(st.sampled_from([1.0, 1.0, 1e-7, 0.25, 0.5, 0.9, 0.95, 0.999])),
                min_p=draw(st.sampled_from([0.0, 0.0, 1e-6, 0.02, 0.5, 1.0])),
                seed=draw(st.integers(0, 2**40)),
            ),
            [draw(st.integers(0, 3))],
        )
        for _ in range(num_rows)
    ]
    return logits, Selection.build(requests)
