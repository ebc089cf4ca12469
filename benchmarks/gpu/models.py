"""The parts of benchmarks.gpu_check that take models of real shapes with random weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.gpu.parts import Sizes, measured, median_ms, wait
from lpr import InputError
from lpr.model.input_builder import Row
from lpr.model.kv_cache import KVCache
from lpr.model.low_bit.copy import make_copy
from lpr.model.low_bit.products import FORMS
from lpr.model.runner import TreeModel
from lpr.model.sampling.selection import Selection
from lpr.model.self_check import self_check
from lpr.planner.facts import config_from


def random_model(shape: dict[str, Any], sizes: Sizes) -> PreTrainedModel:
    """A model of the configuration `shape` with random weights, made on the device."""
    torch.manual_seed(0)
    with torch.device(sizes.device):
        return AutoModelForCausalLM.from_config(config_from(shape), dtype=sizes.dtype).eval()


def tree_step(num_cached: int, count: int, vocab_size: int) -> tuple[list[Row], Selection]:
    """A greedy step of one random tree of `count` nodes after `num_cached` committed tokens."""
    generator = torch.Generator().manual_seed(count)
    parents = [-1] + [int(torch.randint(node, (), generator=generator)) for node in range(1, count)]
    depths = [0] * count
    for node in range(1, count):
        depths[node] = depths[parents[node]] + 1
    tokens = torch.randint(vocab_size, (count,), generator=generator).tolist()
    return [Row(0, num_cached, tokens, parents, [num_cached + depth for depth in depths], count)], Selection.build([])


def shapes_like(runner: TreeModel) -> KVCache:
    """A cache after one forward, for its layer shapes."""
    like = KVCache(1, 32)
    rows, _ = tree_step(0, 2, runner.vocab_size)
    runner.adapter.logits(rows, like)
    return like


def step_times(model: PreTrainedModel, sizes: Sizes, bytes_per_s: float | None) -> dict[str, Any]:
    """t(n) of `model`: as graphs and eager, and the floor, which is bytes read over bandwidth.

    One node and 64 over the shortest length come first, in both forms; then the rest.
    """
    embedding: Any = model.get_input_embeddings().weight
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    if not model.config.tie_word_embeddings:
        weights -= embedding.numel() * embedding.element_size()
    result: dict[str, Any] = {"weight_bytes": weights, "rows": []}
    runners: dict[str, TreeModel] = {}
    for form in ("graphs", "eager"):
        runner = TreeModel(model, graphs=form == "graphs")
        runner.allocate(1, max(sizes.lengths), max(sizes.nodes), shapes_like(runner))
        if form == "eager" or runner.graphs is not None:
            runners[form] = runner
    shortest, first = sizes.lengths[0], (1, sizes.few_nodes[-2])
    for form, runner in runners.items():
        _time_row(result, form, runner, shortest, first, sizes, bytes_per_s)
    for form, runner in runners.items():
        nodes = sizes.nodes if form == "graphs" or sizes.device.type != "cuda" else sizes.few_nodes
        for length in sizes.lengths:
            _time_row(result, form, runner, length, nodes, sizes, bytes_per_s)
    if "graphs" in runners:
        runner = runners["graphs"]
        result["graphs"] = {"captured": runner.num_captures, "reason": runner.graph_reason}
        result["replay_equals_program"] = replay_equals_program(runner, sizes)
    return result


def _time_row(
    result: dict[str, Any], form: str, runner: TreeModel, length: int, nodes: Sequence[int], sizes: Sizes,
    bytes_per_s: float | None,
) -> None:  # fmt: skip
    """Add the times of steps of `nodes` to the row of a form and a length, one by one, and note each."""
    assert runner.cache is not None
    rows = result["rows"]
    row = next((row for row in rows if (row["form"], row["kv"]) == (form, length)), None)
    if row is None:
        row = {"form": form, "kv": length, "nodes": [], "ms": []}
        rows.append(row)
    for count in nodes:
        if count in row["nodes"]:
            continue
        step = tree_step(length, count, runner.vocab_size)
        ms = median_ms(partial(runner.evaluate, *step, 8), sizes.device)
        times = sorted([*zip(row["nodes"], row["ms"], strict=True), (count, round(ms, 4))])
        row["nodes"], row["ms"] = [each for each, _ in times], [each for _, each in times]
        if bytes_per_s:
            read = result["weight_bytes"] + length * runner.cache.bytes_per_token
            row["floor_ms"] = round(read / bytes_per_s * 1e3, 4)
            row["over_floor"] = [round(each / row["floor_ms"], 3) for each in row["ms"]]
        measured(result)


def replay_equals_program(runner: TreeModel, sizes: Sizes) -> dict[str, bool]:
    """True, by nodes, if a graph replayed on another step gives the same bits as its uncaptured program."""
    found, graphs = {}, runner.graphs
    assert graphs is not None and runner.cache is not None
    for count in sizes.few_nodes:
        rows, selection = tree_step(sizes.lengths[0] - 3, max(1, count - 1), runner.vocab_size)
        replayed = graphs.evaluate(rows, selection, 8)
        shape = graphs.shape_of(rows, selection, 8)
        if replayed is None or shape is None:
            continue
        replayed = replayed.clone()
        with torch.no_grad():
            words = torch.empty(shape.num_words, dtype=torch.int32)
            shape.place(words.numpy(), rows, selection, runner.cache)
            inputs, asked = shape.read(words.to(sizes.device), runner.cache)
            logits = (runner.compiled or runner.adapter).forward(inputs, runner.cache)
            results = runner.sampler.results(logits, asked, 8, fixed_shapes=True)
        mine = results[: len(replayed)] if shape.num_kept else results[-len(replayed) :]
        found[str(count)] = bool(torch.equal(replayed, mine))
    return found


def checks(model: PreTrainedModel) -> str:
    """The outcome of the self-check of a model."""
    try:
        self_check(TreeModel(model, graphs=False))
    except InputError as failure:
        return str(failure)
    return "passed"


def copies(model: PreTrainedModel, sizes: Sizes) -> dict[str, Any]:
    """Milliseconds of a pass of the model's low-bit copies, by sequences of a token each: as graphs and eager."""
    result: dict[str, Any] = {}
    for form in FORMS:
        made = make_copy(model, form)
        result[form] = {"mib": round(made.num_bytes / 2**20, 1)}
        for name in ("graphs", "eager"):
            runner = TreeModel(model, graphs=name == "graphs")
            runner.use_copy(partial(lambda each: each, made), shapes_like(runner), max(sizes.clients))
            assert runner.self_drafter is not None
            result[form][name] = {count: round(ms, 4) for count, ms in runner.self_drafter.first_ms.items()}
            result[form]["reason"] = result[form].get("reason") or runner.self_drafter.graph_reason
            measured(result)
    return result


def profile_step(model: PreTrainedModel, sizes: Sizes) -> dict[str, Any]:
    """The operators that take longest in a step of 64 nodes, eager and as a graph."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = sizes.device.type == "cuda"
    result: dict[str, Any] = {}
    for graphs in (False, True) if on_gpu else (False,):
        runner = TreeModel(model, graphs=graphs)
        runner.allocate(1, max(sizes.lengths), max(sizes.nodes), shapes_like(runner))
        evaluate = partial(
            runner.evaluate, *tree_step(sizes.lengths[0], sizes.few_nodes[-2], runner.vocab_size), num_candidates=8
        )
        wall = median_ms(evaluate, sizes.device)
        start = time.perf_counter()
        evaluate()
        host = (time.perf_counter() - start) * 1e3
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
        with profile(activities=activities) as profiler:
            evaluate()
            wait(sizes.device)
        attribute = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        spent = sorted(profiler.key_averages(), key=lambda each: -getattr(each, attribute))
        total = sum(getattr(each, attribute) for each in spent)
        result["graphs" if graphs else "eager"] = {
            "wall_ms": round(wall, 3),
            "launch_ms": round(host, 3),
            "total_us": round(total, 1),
            "top": [
                {"name": each.key[:90], "count": each.count, "us": round(getattr(each, attribute), 1)}
                for each in spent[:15]
            ],
        }
    return result


HYBRID = dict(
    model_type="qwen3_5_text", vocab_size=32000, hidden_size=2048, intermediate_size=6144, num_hidden_layers=8,
    num_attention_heads=16, num_key_value_heads=2, head_dim=256, tie_word_embeddings=False,
)  # fmt: skip
"""A fourth of the layers of a model of 3B: three with the gated delta rule to one with attention."""
TINY_HYBRID = dict(
    model_type="qwen3_5_text", vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16,
    num_attention_heads=4, num_key_value_heads=2, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=8, linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"],
)  # fmt: skip


def hybrid_step(sizes: Sizes) -> dict[str, Any]:
    """Milliseconds of a chain and of a tree of 64 nodes: recurrent layers by Triton kernels, and by torch code.

    `difference` is the largest between their logits of the tree, over the range of the logits.
    """
    on_gpu, count = sizes.device.type == "cuda", max(sizes.few_nodes[:3])
    model = random_model(HYBRID if on_gpu else TINY_HYBRID, sizes)
    result: dict[str, Any] = {"nodes": count}
    logits = []
    for name, attention in {"kernels": "triton", "torch": "sdpa"}.items() if on_gpu else {"torch": "sdpa"}.items():
        runner, cache = TreeModel(model, attention), KVCache(1, 256)
        rows, selection = tree_step(100, count, runner.vocab_size)
        prompt = Row.chain(0, 0, [3, 5, 7, 9] * 25, 0)
        runner.adapter.logits([prompt], cache)
        cache.commit(prompt, range(100))
        logits.append(runner.adapter.logits(rows, cache).float())
        runner.allocate(1, 512, count, cache)
        chain = [Row.chain(0, 100, rows[0].tokens.tolist(), count)]
        steps = {"chain_ms": chain, "tree_ms": rows}
        result[name] = {
            key: round(median_ms(partial(runner.evaluate, each, selection, 8), sizes.device), 3)
            for key, each in steps.items()
        }
        result[name]["captured"] = runner.num_captures
    if on_gpu:
        first, second = logits
        result["difference"] = ((first - second).abs().max() / (second.max() - second.min())).item()
    return result
