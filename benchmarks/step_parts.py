"""Where the time of a forward goes on a CPU: matrix products, attention, the rest of the layers, layout, sampling.

    python -m benchmarks.step_parts --model FOLDER --dtype float32 --threads 2 --output step_parts.json

Each model is loaded twice: as lpr runs it, and with transformers' own modules. Both are timed by turns at each shape.
Beside each step stand its limits: the time of reading weights and K/V once at the machine's bandwidth, and of the
matrix products at its rate. Both are measured before, by the same threads.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.common import ModelOptions, run_main
from benchmarks.engines import load_model
from lpr.model.cpu.products import Prepacked, PrepackedLinear, can_pack
from lpr.model.fused.accelerate import accelerate
from lpr.model.kernels.native_attention import LayerRule, attend_pages
from lpr.model.paged_cache import PagedCache
from lpr.model.runner import TreeModel
from lpr.model.sampling.sampler import Sampler
from lpr.model.sampling.selection import Selection
from lpr.model.self_check import self_check
from lpr.model.step_inputs import Row, StepInputs

NUM_CANDIDATES = 8
"""Candidates of each node in a step with drafts."""
_TIMES = 9
"""Times that a limit is measured; the shortest counts."""


@dataclass(frozen=True, kw_only=True)
class PartsOptions(ModelOptions):
    """Parts of a forward's time."""

    rows: tuple[int, ...] = (1, 4, 16, 64)
    """Tree nodes of a request."""
    requests: tuple[int, ...] = (1, 8)
    """Requests in a step."""
    cached: int = 600
    """Committed tokens of each request."""
    repeats: int = 9
    """Steps of which the median is taken."""


def measure(options: PartsOptions, console: Console) -> dict[str, Any]:
    """Time the parts at each shape, of both forms of the model."""
    torch.set_grad_enabled(False)
    forms = {"plain": _runner(options, faster=False), "lpr": _runner(options, faster=True)}
    runner, cache, size = forms["plain"]
    bandwidth, rate = read_bandwidth(), product_rate(next(runner.model.parameters()).dtype)
    multiplied = sum(each.weight.numel() for each in runner.model.modules() if isinstance(each, nn.Linear))
    console.print(
        f"ceiling: {size / 1e6:.0f} MB of weights once per step, {bandwidth / 1e9:.1f} GB/s, {rate / 1e9:.0f} GFlop/s"
    )
    runs = []
    for count in options.requests:
        for rows in options.rows:
            times: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in forms}
            for _ in range(options.repeats + 1):
                for name, (runner, cache, _size) in forms.items():
                    for part, seconds in _step(runner, cache, count, rows, options.cached).items():
                        times[name][part].append(seconds)
            found = {
                name: {part: round(statistics.median(each[1:]) * 1e3, 2) for part, each in parts.items()}
                for name, parts in times.items()
            }
            limit = {
                "reading": round((size + count * options.cached * cache.bytes_per_token) / bandwidth * 1e3, 2),
                "products": round(2 * multiplied * count * rows / rate * 1e3, 2),
            }
            runs.append({"requests": count, "rows": rows, "limit_ms": limit, "ms": found})
            console.print(runs[-1])
    speeds = {"gigabytes_per_second": round(bandwidth / 1e9, 1), "gigaflops": round(rate / 1e9)}
    return {"weight_bytes": size, **speeds, "runs": runs}


def read_bandwidth() -> float:
    """Bytes per second of reading memory beyond the caches; the best of several readings of 256 MiB."""
    data = torch.ones(1 << 26)
    return data.nbytes / min(_seconds(data.sum) for _ in range(_TIMES))


def product_rate(dtype: torch.dtype) -> float:
    """Flops per second of one large matrix product, by the faster of torch's and, where there is one, lpr's."""
    side = 2048
    left, right = (torch.randn(side, side).to(dtype) for _ in range(2))
    ways = [lambda: F.linear(left, right)]
    if can_pack(dtype, side):
        pack = Prepacked.of(right, None)
        ways.append(lambda: pack.multiply(left))
    return 2 * side**3 / min(_seconds(way) for _ in range(_TIMES) for way in ways)


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _runner(options: PartsOptions, faster: bool) -> tuple[TreeModel, PagedCache, int]:
    """A model with `cached` tokens in each slot of its cache, and the bytes of its weights."""
    loaded = load_model(options).loaded
    size = sum(each.numel() * each.element_size() for each in loaded.model.parameters())
    if faster:
        accelerate(loaded.model)
    runner = TreeModel(loaded.model)
    cache = self_check(runner).resized(max(options.requests), options.cached + max(options.rows) + 32)
    assert isinstance(cache, PagedCache)
    tokens = torch.arange(options.cached).remainder(runner.vocab_size).tolist()
    for slot in range(max(options.requests)):
        runner.adapter.logits([Row.chain(slot, 0, tokens, 1)], cache)
    return runner, cache, size


def _step(runner: TreeModel, cache: PagedCache, count: int, rows: int, cached: int) -> dict[str, float]:
    """Seconds of the parts of one step: a root with leaves, for each of `count` requests."""
    adapter = runner.adapter
    batch = [
        Row(slot, cached, range(rows), [-1] + [0] * (rows - 1), [cached] + [cached + 1] * (rows - 1), rows)
        for slot in range(count)
    ]
    name: str = adapter.model.config.get_text_config(decoder=True)._attn_implementation
    attend, spent = ALL_ATTENTION_FUNCTIONS[name], [0.0]
    ALL_ATTENTION_FUNCTIONS[name] = _timed(attend, spent)
    try:
        start = time.perf_counter()
        inputs = adapter.step_inputs(batch, cache)
        laid_out = time.perf_counter()
        logits = adapter.forward(inputs, cache)
        done = time.perf_counter()
    finally:
        ALL_ATTENTION_FUNCTIONS[name] = attend
    Sampler().results(logits, Selection.build([]), NUM_CANDIDATES if rows > 1 else 0)
    sampled = time.perf_counter()
    products = _products(adapter.model, count * rows)
    if not spent[0] and inputs.pages is not None:  # layers are one call each
        spent[0] = _attention(adapter.model, inputs, cache)
    rest = done - laid_out - spent[0] - products
    return {
        "step": sampled - start, "layout": laid_out - start, "products": products, "attention": spent[0],
        "rest of the forward": rest, "choice": sampled - done,
    }  # fmt: skip


def _attention(model: nn.Module, inputs: StepInputs, cache: PagedCache) -> float:
    """Seconds of the attention of all layers of a step, by itself."""
    rule, dtype = LayerRule(), next(model.parameters()).dtype
    layers: list[Any] = [each for each in model.modules() if hasattr(each, "layer_idx") and hasattr(each, "q_proj")]
    query = torch.randn(*inputs.tokens.shape, layers[0].q_proj.out_features).to(dtype)
    query = query.unflatten(2, (-1, layers[0].head_dim)).transpose(1, 2)
    start = time.perf_counter()
    for layer in layers:
        keys, values = (side.transpose(0, 1) for side in cache.layer_tensors[layer.layer_idx])
        attend_pages(inputs.pages, query, keys, values, rule, layer.scaling)
    return time.perf_counter() - start


def _timed(attend: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        found = attend(*args, **kwargs)
        spent[0] += time.perf_counter() - start
        return found

    return timed


def _products(model: nn.Module, height: int) -> float:
    """Seconds of all matrix products of a forward of `height` rows, by themselves."""
    layers: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, PrepackedLinear):
            layers.setdefault(id(module.pack), (module.in_features, module.pack.multiply))
        elif isinstance(module, nn.Linear):
            layers[id(module)] = module.in_features, module
    dtype = next(model.parameters()).dtype
    given = {width: torch.randn(1, height, width).to(dtype) for width, _ in layers.values()}
    start = time.perf_counter()
    for width, multiply in layers.values():
        multiply(given[width])
    return time.perf_counter() - start


def main() -> int:
    """Run the command line; returns the exit code."""
    return run_main("step_parts", PartsOptions, measure)


if __name__ == "__main__":
    sys.exit(main())
