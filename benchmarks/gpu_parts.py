"""The parts of benchmarks.gpu_check: each measures or compares one thing and returns a dictionary for JSON."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lpr import DecodeConfig, Engine, InputError, SamplingParams, bundled_model
from lpr.config import AUTOMATIC
from lpr.core.step_times import KNOTS
from lpr.model.cache import TreeCache
from lpr.model.graphs import CudaCapturer
from lpr.model.inputs import Row, build_inputs
from lpr.model.runner import TreeModel
from lpr.model.sampling import Selection
from lpr.model.self_check import self_check
from lpr.model.static_inputs import NODE_BUCKETS, StaticShape, static_shape

LLAMA = {"vocab_size": 32016, "max_position_embeddings": 16384, "rope_theta": 1e6}
MODELS: dict[str, dict[str, Any]] = {
    "codellama-7b": dict(
        LLAMA, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32
    ),
    "codellama-13b": dict(
        LLAMA, hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40
    ),
    "codellama-34b": dict(
        LLAMA,
        hidden_size=8192,
        intermediate_size=22016,
        num_hidden_layers=48,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=32000,
    ),
}
TINY: dict[str, Any] = {
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True)
class Sizes:
    """How large everything is: as the papers' models, or tiny for a test of this program."""

    device: torch.device
    models: dict[str, dict[str, Any]]
    lengths: tuple[int, ...]
    """Cached lengths of t(n)."""
    nodes: tuple[int, ...]
    few_nodes: tuple[int, ...]
    """Numbers of nodes that are also timed without graphs."""
    copy_bytes: int
    num_prompts: int
    max_new_tokens: int
    dtype: torch.dtype

    @classmethod
    def real(cls, device: torch.device) -> Sizes:
        """CodeLlama 7B, 13B and 34B in bf16."""
        nodes = tuple(knot for knot in KNOTS if knot <= 512)
        return cls(device, MODELS, (512, 2048, 8192), nodes, (1, 8, 64, 256), 1 << 31, 8, 128, torch.bfloat16)

    @classmethod
    def tiny(cls, device: torch.device) -> Sizes:
        """For any machine, in seconds."""
        return cls(device, {"tiny": TINY}, (32, 64), (1, 2, 8), (1, 8), 1 << 20, 2, 12, torch.float32)


def wait(device: torch.device) -> None:
    """Until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(call: Callable[[], object], device: torch.device, seconds: float = 0.25, most: int = 30) -> float:
    """Median milliseconds of `call` with all of its work, after two warm-ups."""
    times: list[float] = []
    began = 0.0
    for number in range(most + 2):
        wait(device)
        start = time.perf_counter()
        call()
        wait(device)
        if number == 1:
            began = time.perf_counter()
        if number > 1:
            times.append((time.perf_counter() - start) * 1e3)
            if len(times) >= 5 and time.perf_counter() - began > seconds:
                break
    return statistics.median(times)


def bandwidth(sizes: Sizes) -> dict[str, Any]:
    """Bytes per second, read and written, of a copy on the device: what the floor of t(n) is counted with."""
    source = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=sizes.device)
    target = torch.empty_like(source)
    ms = median_ms(lambda: target.copy_(source), sizes.device)
    return {"bytes": sizes.copy_bytes, "ms": round(ms, 4), "bytes_per_s": 2 * sizes.copy_bytes / ms * 1e3}


# The bundled model.


def correctness(sizes: Sizes, prompts: Sequence[str]) -> dict[str, Any]:
    """Ids of the bundled model in fp32: on the device with and without graphs, against plain decoding on the CPU."""
    tokens = sizes.max_new_tokens
    sampled = SamplingParams(max_new_tokens=tokens, temperature=0.8, top_p=0.95, seed=7)
    kinds = {"greedy": SamplingParams(max_new_tokens=tokens), "seeded": sampled}
    plain = Engine.from_pretrained(
        bundled_model(), DecodeConfig.autoregressive(), "float32", "cpu", costs=None, graphs=False
    )
    expected = {name: _ids(plain, prompts, params) for name, params in kinds.items()}
    decode = DecodeConfig(window_size=5, trie_nodes=32, max_batch_size=4)
    result: dict[str, Any] = {"prompts": len(prompts), "max_new_tokens": tokens}
    for graphs in (False, True):
        engine = Engine.from_pretrained(bundled_model(), decode, "float32", str(sizes.device), graphs=graphs)
        found = {name: _ids(engine, prompts, params) for name, params in kinds.items()}
        result["graphs" if graphs else "eager"] = {
            "equal_to_cpu": {name: _same(found[name], expected[name]) for name in kinds},
            "captured": engine.model.num_captures,
            "graph_reason": engine.model.graph_reason,
        }
        result.setdefault("_ids", []).append(found)
    eager, captured = result.pop("_ids")
    result["graphs_equal_to_eager"] = {name: _same(captured[name], eager[name]) for name in kinds}
    result["ids"] = expected
    return result


def _ids(engine: Engine, prompts: Sequence[str], params: SamplingParams) -> list[list[int]]:
    return [done.token_ids for done in engine.generate(prompts, params)]


def _same(one: list[list[int]], other: list[list[int]]) -> int:
    """How many prompts have equal ids."""
    return sum(mine == theirs for mine, theirs in zip(one, other, strict=True))


def end_to_end(sizes: Sizes, prompts: Sequence[str]) -> dict[str, Any]:
    """Tokens per second of the bundled model, one request at a time: transformers, plain lpr, lookahead."""
    device, tokens = sizes.device, sizes.max_new_tokens
    stock: Any = AutoModelForCausalLM.from_pretrained(bundled_model(), dtype="auto")
    stock.to(device)
    result: dict[str, Any] = {}
    encode = Engine.from_pretrained(bundled_model(), DecodeConfig.autoregressive(), device=str(device), graphs=False)
    ids = [encode.encode(prompt) for prompt in prompts]
    result["transformers eager"] = _rate(lambda prompt: generate(stock, prompt, tokens), ids, device)
    for graphs in (False, True) if device.type == "cuda" else (False,):
        settings = {"autoregressive": DecodeConfig.autoregressive(max_batch_size=1)}
        settings["auto"] = DecodeConfig(max_batch_size=1)
        engine = Engine.from_pretrained(bundled_model(), settings["auto"], device=str(device), graphs=graphs)
        for name, decode in settings.items():
            engine.configure(decode)
            numbers: list[tuple[int, int]] = []

            def complete(prompt: list[int], engine: Engine = engine, numbers: Any = numbers) -> int:
                params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
                stats = engine.generate([prompt], params)[0].stats
                numbers.append((stats.num_tokens, stats.num_steps))
                return stats.num_tokens

            label = f"lpr {name}, {'graphs' if graphs else 'eager'}"
            result[label] = _rate(complete, ids, device)
            emitted, steps = (sum(column) for column in zip(*numbers, strict=True))
            result[label]["tokens_per_step"] = round(emitted / steps, 3)
            result[label]["sizes"] = {field: getattr(engine.config, field) for field in AUTOMATIC}
    return result


def generate(model: Any, prompt: list[int], tokens: int, **more: Any) -> int:
    """Transformers' greedy decoding of exactly `tokens` tokens."""
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        **more,
    )
    return out.shape[1] - len(prompt)


def _rate(complete: Callable[[list[int]], int], prompts: Sequence[list[int]], device: torch.device) -> dict[str, Any]:
    complete(prompts[0])  # warms up
    emitted, began = 0, time.perf_counter()
    for prompt in prompts:
        emitted += complete(prompt)
    wait(device)
    return {"tokens": emitted, "tokens_per_s": round(emitted / (time.perf_counter() - began), 1)}


def host_share(sizes: Sizes, prompt: str) -> dict[str, Any]:
    """Median milliseconds of a step before its gather, in it, and after: what overlap could hide, and behind what."""
    graphs = sizes.device.type == "cuda"
    result = {}
    for nodes in (1, 32, 64):
        decode = DecodeConfig(window_size=0, trie_nodes=nodes - 1, max_batch_size=1)
        engine = Engine.from_pretrained(bundled_model(), decode, device=str(sizes.device), graphs=graphs)
        gather, marks = engine.comm.gather, [0.0, 0.0]

        def timed(payload: torch.Tensor, gather: Any = gather, marks: list[float] = marks) -> torch.Tensor:
            marks[0] = time.perf_counter()
            gathered = gather(payload)
            marks[1] = time.perf_counter()
            return gathered

        engine.comm.gather = timed  # type: ignore[method-assign]
        request = engine.submit(prompt, SamplingParams(max_new_tokens=sizes.max_new_tokens, ignore_eos=True))
        parts: list[tuple[float, float, float]] = []
        while request.finish_reason is None:
            began = time.perf_counter()
            engine.step()
            parts.append((marks[0] - began, marks[1] - marks[0], time.perf_counter() - marks[1]))
        columns = zip(*parts[2:], strict=True)
        names = ("before_gather_ms", "gather_ms", "after_gather_ms")
        result[f"{nodes} nodes"] = {
            name: round(statistics.median(column) * 1e3, 4) for name, column in zip(names, columns, strict=True)
        }
    return result


# Models of real shapes with random weights.


def random_model(shape: dict[str, Any], sizes: Sizes) -> PreTrainedModel:
    """A Llama of `shape` with random weights, made on the device."""
    theta = shape.get("rope_theta", 1e4)
    rest = {name: value for name, value in shape.items() if name != "rope_theta"}
    config = AutoConfig.for_model(
        "llama", rope_parameters={"rope_type": "default", "rope_theta": theta}, bos_token_id=1, eos_token_id=2, **rest
    )
    torch.manual_seed(0)
    with torch.device(sizes.device):
        return AutoModelForCausalLM.from_config(config, dtype=sizes.dtype).eval()


def tree_step(num_cached: int, count: int, vocab_size: int) -> tuple[list[Row], Selection]:
    """A greedy step of one random tree of `count` nodes below `num_cached` committed tokens."""
    generator = torch.Generator().manual_seed(count)
    parents = [-1] + [int(torch.randint(node, (), generator=generator)) for node in range(1, count)]
    depths = [0] * count
    for node in range(1, count):
        depths[node] = depths[parents[node]] + 1
    tokens = torch.randint(vocab_size, (count,), generator=generator).tolist()
    return [Row(0, num_cached, tokens, parents, [num_cached + depth for depth in depths], count)], Selection.build([])


def shapes_like(runner: TreeModel) -> TreeCache:
    """A cache that has seen one forward, for its layer shapes."""
    like = TreeCache(1, 32)
    rows, _ = tree_step(0, 2, runner.vocab_size)
    runner.logits(build_inputs(rows, 32, runner.device), like)
    return like


def step_times(name: str, model: PreTrainedModel, sizes: Sizes, bytes_per_s: float | None) -> dict[str, Any]:
    """t(n) of `model` for every cached length, as graphs and eager, and the floor: bytes read over bandwidth."""
    embedding: Any = model.get_input_embeddings().weight
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    if not model.config.tie_word_embeddings:
        weights -= embedding.numel() * embedding.element_size()
    result: dict[str, Any] = {"weight_bytes": weights, "rows": []}
    for graphs in (True, False):
        runner = TreeModel(model, graphs=graphs)
        runner.allocate(1, max(sizes.lengths), max(sizes.nodes), shapes_like(runner))
        if graphs and runner.graphs is None:
            continue
        assert runner.cache is not None
        per_token = sum(pool[:, 0].numel() * pool.element_size() for pool in runner.cache._pools)
        for length in sizes.lengths:
            nodes = sizes.nodes if graphs or sizes.device.type != "cuda" else sizes.few_nodes
            times = []
            for count in nodes:
                rows, selection = tree_step(length, count, runner.vocab_size)
                times.append(median_ms(partial(runner.evaluate, rows, selection, 8), sizes.device))
            row: dict[str, Any] = {"form": "graphs" if graphs else "eager", "kv": length, "nodes": list(nodes)}
            row["ms"] = [round(each, 4) for each in times]
            if bytes_per_s:
                row["floor_ms"] = round((weights + length * per_token) / bytes_per_s * 1e3, 4)
                row["over_floor"] = [round(each / row["floor_ms"], 3) for each in times]
            result["rows"].append(row)
        if graphs:
            result["graphs"] = {"captured": runner.num_captures, "reason": runner.graph_reason}
            result["replay_equals_program"] = replay_equals_program(runner, sizes)
    return result


def replay_equals_program(runner: TreeModel, sizes: Sizes) -> dict[str, bool]:
    """Is a replayed graph's result that of its own uncaptured program, bit for bit, for a step it was not made from?"""
    found, graphs = {}, runner.graphs
    assert graphs is not None
    for count in sizes.few_nodes:
        rows, selection = tree_step(sizes.lengths[0] - 3, max(1, count - 1), runner.vocab_size)
        replayed = graphs.evaluate(rows, selection, 8)
        shape = graphs.shape_of(rows, selection, 8)
        if replayed is None or shape is None:
            continue
        replayed = replayed.clone()
        with torch.no_grad():
            words = torch.from_numpy(shape.place(rows, selection)).to(sizes.device)
            results = run_static(runner, shape, words)
        found[str(count)] = bool(torch.equal(replayed, results[-rows[0].num_results :]))
    return found


def checks(model: PreTrainedModel) -> str:
    """What the self-check at load says of a model."""
    try:
        self_check(TreeModel(model, graphs=False))
    except InputError as failure:
        return str(failure)
    return "passed"


def profile_step(model: PreTrainedModel, sizes: Sizes) -> dict[str, Any]:
    """Where one step of 64 nodes spends its time, eager and as a graph: the operators that take longest."""
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


def stock_rates(model: PreTrainedModel, sizes: Sizes, compiled: bool) -> dict[str, Any]:
    """Tokens per second of transformers' own greedy decoding of a large model."""
    prompt, tokens = list(range(3, 67)), 32
    more = {"cache_implementation": "static"} if compiled else {}
    model.set_attn_implementation("sdpa")
    return _rate(lambda ids: generate(model, ids, tokens, **more), [prompt, prompt], sizes.device)


def run_static(runner: TreeModel, shape: StaticShape, words: torch.Tensor) -> torch.Tensor:
    """What a graph of `shape` does, without a graph."""
    inputs, selection = shape.read(words)
    return runner._compute(inputs, selection, 8)


def compiled_step(model: PreTrainedModel, sizes: Sizes) -> dict[str, Any]:
    """A step of one token and one of a tree through torch.compile, captured as graphs: what fusion would gain."""
    plain, fused = TreeModel(model, graphs=False), {}
    on_gpu = sizes.device.type == "cuda"
    plain.allocate(1, max(sizes.lengths), max(sizes.nodes), shapes_like(plain))
    assert plain.cache is not None
    capturer = CudaCapturer(sizes.device) if on_gpu else None
    for count in (1, max(2, sizes.few_nodes[-2])):
        step = tree_step(sizes.lengths[0], count, plain.vocab_size)
        shape = static_shape(*step, 8, 1, plain.cache.rows_per_slot, NODE_BUCKETS[-1])
        assert shape is not None
        words = torch.from_numpy(shape.place(*step)).to(sizes.device)
        times = {}
        for compiled in (False, True):
            torch._dynamo.reset()
            model._compiled_call_impl = None
            if compiled:
                model.compile(dynamic=False)
            began = time.perf_counter()
            with torch.no_grad():
                program = partial(run_static, plain, shape, words)
                run = capturer.capture(program) if capturer is not None else program
                name = "compiled" if compiled else "plain"
                run()
                times[f"{name}_first_s"] = round(time.perf_counter() - began, 2)
                times[f"{name}_ms"] = round(median_ms(run, sizes.device), 4)
        fused[f"{shape.num_entries} entries"] = times
    return fused
