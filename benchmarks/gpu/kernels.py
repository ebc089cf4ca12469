"""The kernels in benchmarks.gpu_check: compilation, agreement with their specifications, and speed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.common import attempt
from benchmarks.gpu.models import tree_step
from benchmarks.gpu.parts import Sizes, bundled, measured, median_ms, wait
from lpr import DecodeConfig, SamplingParams
from lpr.model.attention import additive
from lpr.model.capture import CudaCapturer
from lpr.model.sampling import choice, specification
from lpr.model.sampling.selection import Selection
from lpr.model.tree_mask import build_mask

VOCABULARIES = (32_016, 128_256)
LIMITS = {
    "greedy": SamplingParams(),
    "T 0.8": SamplingParams(temperature=0.8, seed=1),
    "T 0.8, top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95, seed=2),
    "T 1, top-k 50, top-p 0.9": SamplingParams(temperature=1.0, top_k=50, top_p=0.9, seed=3),
}


def warm_up(sizes: Sizes) -> dict[str, Any]:
    """Compile the kernels of a first engine; returns the chosen attention, sampling and captures, and their seconds."""
    began = time.perf_counter()
    picked = choice.gpu_pick(sizes.device) if sizes.device.type == "cuda" else specification.pick
    sampling_s = time.perf_counter() - began
    began = time.perf_counter()
    engine = bundled(DecodeConfig(window_size=5, trie_nodes=32), sizes.device, dtype=sizes.dtype)
    found = {
        "attention": engine.model.attention,
        "sampling": "specification" if picked in (specification.pick, specification.choose) else "kernel",
        "captured": engine.model.num_captures,
        "graph_reason": engine.model.graph_reason,
        "compiled": engine.model.compiled.describe() if engine.model.compiled is not None else None,
        "compile_reason": engine.model.compiled.reason if engine.model.compiled is not None else None,
        "sampling_compile_s": round(sampling_s, 2),
        "engine_s": round(time.perf_counter() - began, 2),
    }
    engine.close()
    return found


def choices(sizes: Sizes) -> dict[str, Any]:
    """Microseconds of choosing tokens by vocabulary, rows and limits: lpr's choice, and the specification."""
    on_gpu = sizes.device.type == "cuda"
    rows = []
    for vocabulary, count in product(VOCABULARIES if on_gpu else (500,), (1, 16, 64) if on_gpu else (2,)):
        logits = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(count)) * 3
        logits[:, ::997] += 8  # a few likely tokens, as a model has
        logits = logits.to(sizes.device, sizes.dtype)
        for name, params in LIMITS.items():
            selection = Selection.build([(params, range(count))]).to(sizes.device)
            versions = {"us": choice.pick, "specification_us": specification.pick}
            same = torch.equal(*(version(logits, selection) for version in versions.values()))
            row: dict[str, Any] = {"vocabulary": vocabulary, "rows": count, "limits": name, "same_ids": same}
            for column, version in versions.items():
                program = partial(version, logits, selection)
                run = CudaCapturer(sizes.device).capture(program) if on_gpu else program
                row[column] = round(1e3 * median_ms(run, sizes.device), 2)
            rows.append(row)
            measured({"rows": rows})
    wait(sizes.device)
    return {"different": sum(not row["same_ids"] for row in rows), "rows": rows}


# The attention of one layer.

HEADS = {"7B": (32, 32), "34B, 70B": (64, 8), "70B, tp 8": (8, 1)}
"""Query and K/V heads; of 70B also one of eight tensor-parallel shards."""
ATTENTION_GRID = (1, 64, 512), (512, 2048, 8192, 32768)
"""Nodes, and cached tokens."""
HEAD_DIM = 128
COLD_BYTES = 128 << 20
"""Bytes of K and V that a captured graph reads: several times any L2 cache, like a model's layers."""


def attention(sizes: Sizes, bytes_per_s: float | None) -> dict[str, Any]:
    """Tree attention of one layer by kernel and by SDPA with a dense mask, and the time to read K and V once."""
    rows = []
    for (name, heads), count, length in product(HEADS.items(), *ATTENTION_GRID):
        rows.append({"heads": name, "nodes": count, "kv": length, **attention_row(heads, count, length, sizes)})
        if bytes_per_s:
            row_bytes = 2 * heads[1] * HEAD_DIM * sizes.dtype.itemsize
            rows[-1]["floor_us"] = round(1e6 * length * row_bytes / bytes_per_s, 2)
        measured({"rows": rows})
    wins = sum(row["triton"].get("us", math.inf) < row["sdpa"].get("us", math.inf) for row in rows)
    return {"triton_wins": wins, "rows": rows}


def attention_row(heads: tuple[int, int], count: int, length: int, sizes: Sizes) -> dict[str, Any]:
    """Microseconds and error of each version for one size; a version that fails is recorded with its reason."""
    from lpr.model.kernels import attention_kernel

    [row], _ = tree_step(length - count, count, 8)
    mask = build_mask(
        [row.parents], [row.num_cached], torch.tensor(row.positions[None], device=sizes.device), sizes.device
    )
    num_heads, num_kv_heads = heads
    copies = max(2, -(-COLD_BYTES // (length * 2 * num_kv_heads * HEAD_DIM * sizes.dtype.itemsize)))
    like: dict[str, Any] = {"device": sizes.device, "dtype": sizes.dtype}
    caches = torch.randn(copies, 2, 1, length, num_kv_heads, HEAD_DIM, **like).transpose(3, 4)
    query = torch.randn(1, count, num_heads, HEAD_DIM, **like).transpose(1, 2)
    group = num_heads // num_kv_heads  # the scores of more than one K/V head may not fit
    few, key, value = (each.float() for each in (query[:, :group], caches[0, 0][:, :1], caches[0, 1][:, :1]))
    seen = mask.visible(length)[:, None]
    expected = torch.nn.functional.scaled_dot_product_attention(few, key, value, attn_mask=seen, enable_gqa=True)
    dense = additive(mask.visible(length)[:, None], sizes.dtype).repeat(1, 1, group, 1)  # made once per step

    def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        folded = query.reshape(1, num_kv_heads, -1, HEAD_DIM)
        out = torch.nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=dense)
        return out.reshape(query.shape)

    def triton(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attention_kernel.tree_attention(query, key, value, mask)

    def timed(version: Callable[..., torch.Tensor]) -> dict[str, Any]:
        error = (version(query, caches[0, 0], caches[0, 1])[:, :group].float() - expected).abs().max().item()
        if not error <= (1e-4 if sizes.dtype == torch.float32 else 2e-2):
            raise RuntimeError(f"differs from the reference by {error:.1e}")
        through_all = lambda: [version(query, *cache) for cache in caches][-1]  # noqa: E731
        run = CudaCapturer(sizes.device).capture(through_all) if sizes.device.type == "cuda" else through_all
        return {"us": round(1e3 * median_ms(run, sizes.device) / copies, 2), "error": error}

    return {version.__name__: attempt(partial(timed, version)) for version in (triton, sdpa)}
