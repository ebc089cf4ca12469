"""The kernels in benchmarks.gpu_check: compilation, agreement with their specifications, and speed."""

from __future__ import annotations

import time
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.gpu.parts import Sizes, bundled, measured, median_ms, wait
from lpr import DecodeConfig, SamplingParams
from lpr.model.capture import CudaCapturer
from lpr.model.sampling import choice, specification
from lpr.model.sampling.selection import Selection

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
