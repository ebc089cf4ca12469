"""The parts of benchmarks.gpu_check: each measures or compares one thing and returns a dictionary for JSON.

Those that need models of real shapes are in benchmarks.gpu.models.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.engines import plain
from lpr import DecodeConfig, Engine, InputError, SamplingParams, bundled_model
from lpr.core.step_times import KNOTS
from lpr.model.graph_capture import CudaCapturer
from lpr.model.sampling import choice, specification
from lpr.model.sampling.selection import Selection
from lpr.planner.facts import read_preset
from tests.fakes.compared import Group, Worlds

MODELS = ("codellama-7b", "codellama-13b", "codellama-34b")
TINY = dict(
    model_type="llama", vocab_size=128, max_position_embeddings=2048, hidden_size=64, intermediate_size=96,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, rope_theta=1e4,
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Sizes of models and workloads: as the papers' models, or tiny for a test of this program."""

    device: torch.device
    models: dict[str, dict[str, Any]]
    lengths: tuple[int, ...]  # Cached lengths of t(n).
    nodes: tuple[int, ...]
    few_nodes: tuple[int, ...]  # Numbers of nodes that are also timed without graphs.
    copy_bytes: int
    num_prompts: int
    max_new_tokens: int
    clients: tuple[int, ...]  # Of recorded text.
    num_steps: int  # Of each of their rows.
    dtype: torch.dtype

    @classmethod
    def real(cls, device: torch.device) -> Sizes:
        """CodeLlama 7B, 13B and 34B in bf16."""
        nodes = tuple(knot for knot in KNOTS if knot <= 512)
        shapes = {name: read_preset(name)["config"] for name in MODELS}
        few, clients = (1, 8, 64, 256), (1, 4, 16, 64)
        return cls(device, shapes, (512, 2048, 8192), nodes, few, 1 << 31, 8, 128, clients, 60, torch.bfloat16)

    @classmethod
    def tiny(cls, device: torch.device) -> Sizes:
        """For any machine, in seconds."""
        return cls(device, {"tiny": TINY}, (32, 64), (1, 2, 8), (1, 8), 1 << 20, 2, 12, (2,), 4, torch.float32)


_listeners: list[Callable[[dict[str, Any]], None]] = []


@contextmanager
def listened(listener: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Call `listener` with what a section has so far, whenever it has measured something."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.pop()


def measured(result: dict[str, Any]) -> None:
    """Note what a section has so far: a section that is cut off keeps it."""
    for listener in _listeners:
        listener(result)


def bundled(decode: DecodeConfig, device: torch.device, **options: Any) -> Engine:
    """An engine with the bundled model; nothing is compiled, which would take most of a section's time."""
    return Engine.from_pretrained(bundled_model(), decode, device=str(device), compile="off", **options)


def wait(device: torch.device) -> None:
    """Wait until the device is idle."""
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
    """Bytes per second, read and written, of a copy on the device, for the floor of t(n)."""
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
    plain = bundled(DecodeConfig.autoregressive(), torch.device("cpu"), dtype="float32", graphs=False)
    expected = {name: _ids(plain, prompts, params) for name, params in kinds.items()}
    decode = DecodeConfig(window_size=5, trie_nodes=32, max_batch_size=4)
    result: dict[str, Any] = {"prompts": len(prompts), "max_new_tokens": tokens, "ids": expected}
    all_ids = []
    for graphs in (True, False):
        engine = bundled(decode, sizes.device, dtype="float32", graphs=graphs)
        found = {name: _ids(engine, prompts, params) for name, params in kinds.items()}
        result["graphs" if graphs else "eager"] = {
            "equal_to_cpu": {name: _same(found[name], expected[name]) for name in kinds},
            "captured": engine.model.num_captures,
            "graph_reason": engine.model.graph_reason,
        }
        all_ids.append(found)
        measured(result)
    captured, eager = all_ids
    result["graphs_equal_to_eager"] = {name: _same(captured[name], eager[name]) for name in kinds}
    return result


def _ids(engine: Engine, prompts: Sequence[str], params: SamplingParams) -> list[list[int]]:
    return [done.token_ids for done in engine.generate(prompts, params)]


def _same(one: list[list[int]], other: list[list[int]]) -> int:
    """The number of prompts with equal ids."""
    return sum(mine == theirs for mine, theirs in zip(one, other, strict=True))


def exact_mode(sizes: Sizes, prompts: Sequence[str]) -> dict[str, Any]:
    """The bundled model in half precision, with and without `exact`: bits of logits, and ids with graphs.

    Logits are those of benchmarks.exactness: of each token of plain decoding, against a window and a batch of trees.
    """
    half = torch.bfloat16 if sizes.device.type == "cuda" else sizes.dtype
    result: dict[str, Any] = {"dtype": str(half), "prompts": len(prompts)}
    params = SamplingParams(max_new_tokens=sizes.max_new_tokens, ignore_eos=True)
    both = DecodeConfig(window_size=5, trie_nodes=32, max_batch_size=4)
    for exact in (False, True):
        load = partial(bundled, plain(), sizes.device, dtype=half, exact=exact)
        try:
            engine = load(graphs=False)
        except InputError as refused:
            result["refused"] = str(refused)
            return result
        ids = [engine.encode(prompt) for prompt in prompts]
        group = Group(Worlds(None, str(half), exact, engine=engine), ids, [params] * len(ids))
        result["exact" if exact else "usual"] = group.run(["window", "both, batch of 4, fills of 32"])
        engine.close()
        found = []
        for decode in (plain(), both):
            engine = load()
            engine.configure(decode)
            found.append(_ids(engine, prompts, params))
            engine.close()
        result["equal with exact" if exact else "equal without"] = _same(*found)
        measured(result)
    return result


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
