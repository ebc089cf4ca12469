"""What padding costs a batch: the same rows padded and packed, and a long prompt that arrives among decoding requests.

    python -m benchmarks.batch --threads 1 --output benchmarks/results/batch.json

Both forms take turns within one run, timed by the processor time of the thread, so that other programs hardly show.
"equal" rows have 500 cached tokens and 32 nodes each; "ragged" ones 60 to 900 and 1 to 60; "plain" ones are equal to
the ragged in length and have one node (autoregressive decoding); in "prompt" the last row is 128 tokens of a prompt.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.common import OneLineParser, run_main, table, whole
from lpr import DecodeConfig, Engine, SamplingParams, bundled_model
from lpr.model.inputs import Row

FORMS = {"padded": False, "packed": True}
LENGTHS = (60, 900, 200, 500, 340, 620, 120, 780)
NODES = (4, 60, 10, 22, 1, 16, 40, 8)
SIZES = {"tiny": (2, 64), "middle": (4, 512)}
"""Layers and hidden size of the random models."""


def shapes(kind: str, batch: int) -> list[tuple[int, int]]:
    """Cached tokens and entries of each row."""
    if kind == "equal":
        return [(500, 32)] * batch
    nodes = NODES if kind == "ragged" else (1,) * len(NODES)
    rows = list(zip(LENGTHS, nodes, strict=True))[:batch]
    return [*rows[:-1], (0, 128)] if kind == "prompt" else rows


def row(slot: int, cached: int, count: int) -> Row:
    """A binary tree of `count` nodes below `cached` tokens."""
    parents = [(node + 1) // 2 - 1 for node in range(count)]
    depths = [(node + 1).bit_length() - 1 for node in range(count)]
    return Row(slot, cached, [1] * count, parents, [cached + depth for depth in depths], count)


def random_model(num_layers: int, hidden_size: int) -> PreTrainedModel:
    """A Llama with heads of 64 (of 16 where those would be too few), two query heads per K/V head."""
    dim = 64 if hidden_size >= 256 else 16
    config = LlamaConfig(
        vocab_size=4096, hidden_size=hidden_size, intermediate_size=11 * hidden_size // 4, num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // dim, num_key_value_heads=hidden_size // dim // 2,
        max_position_embeddings=4096, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def milliseconds(call: Callable[[], object]) -> float:
    """Processor time of one call."""
    start = time.thread_time()
    call()
    return (time.thread_time() - start) * 1e3


def time_forwards(engine: Engine, name: str, repeats: int) -> list[dict[str, Any]]:
    """Inputs and forward of one step in both forms, per batch size and kind of rows."""
    model = engine.model
    runs = []
    for batch in (4, 8):
        for kind in ("equal", "ragged", "plain", "prompt"):
            rows = [row(slot, *shape) for slot, shape in enumerate(shapes(kind, batch))]
            times: dict[str, list[float]] = {form: [] for form in FORMS}
            for _ in range(repeats + 2):
                for form, model.packed in FORMS.items():
                    times[form].append(milliseconds(lambda: model.fill(rows)))  # noqa: B023
            warm = {form: values[2:] for form, values in times.items()}
            ratios = [padded / packed for padded, packed in zip(warm["padded"], warm["packed"], strict=True)]
            medians = {f"{form}_ms": round(statistics.median(values), 2) for form, values in warm.items()}
            ratio = round(statistics.median(ratios), 2)
            runs.append({"model": name, "batch": batch, "rows": kind, **medians, "padded_over_packed": ratio})
    return runs


def arrival(engine: Engine, packed: bool, prompt_length: int) -> tuple[float, float, float]:
    """A long prompt among six decoding requests; milliseconds from then on.

    Longest wait of the six between two steps that advance them; until the long one's first token; until all is done.
    """
    engine.configure(DecodeConfig(window_size=0, trie_nodes=32))
    engine.model.packed = packed
    texts = torch.randint(0, engine.model.vocab_size, (7, prompt_length), generator=torch.Generator().manual_seed(0))
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)
    for index, text in enumerate(texts[1:].tolist()):
        engine.submit(text[: 20 * (index + 1)], params)
    for _ in range(5):
        engine.step()
    long = engine.submit(texts[0].tolist(), params)
    start = last = time.thread_time()
    longest = first = 0.0
    while not engine.is_idle:
        chunks = engine.step()
        now = time.thread_time()
        if any(chunk.request is not long for chunk in chunks):
            longest, last = max(longest, now - last), now
        if not first and any(chunk.request is long for chunk in chunks):
            first = now - start
    return longest * 1e3, first * 1e3, (time.thread_time() - start) * 1e3


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Forwards of three models, then the arrival of a prompt at the bundled one."""
    decode = DecodeConfig(max_length=2048)
    runs = []
    for name, size in SIZES.items():
        runs += time_forwards(Engine.from_model(random_model(*size), decode=decode), name, options.repeats)
    engine = Engine.from_pretrained(bundled_model(), DecodeConfig(), dtype="float32", device="cpu")
    runs += time_forwards(engine, "bundled", options.repeats)
    columns = list(runs[0])
    console.print(table("one forward", columns, [[str(run[column]) for column in columns] for run in runs]))
    arrivals: dict[str, list[tuple[float, float, float]]] = {form: [] for form in FORMS}
    for _ in range(options.arrivals):
        for form, packed in FORMS.items():
            arrivals[form].append(arrival(engine, packed, options.prompt))
    names = ("longest_wait_ms", "first_token_ms", "all_done_ms")
    medians = {
        form: dict(zip(names, [round(statistics.median(each), 1) for each in zip(*values, strict=True)], strict=True))
        for form, values in arrivals.items()
    }
    cells = [[form, *map(str, found.values())] for form, found in medians.items()]
    console.print(table(f"a prompt of {options.prompt} tokens among six requests", ["form", *names], cells))
    return {"benchmark": "batch", "runs": runs, "arrival": medians, "prompt": options.prompt}


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = OneLineParser(prog="benchmarks.batch", description="Padded against packed batches, on the CPU.")
    parser.add_argument("--repeats", type=whole, default=7, metavar="N", help="forwards per median (default 7)")
    parser.add_argument("--arrivals", type=whole, default=3, metavar="N", help="prompts per median (default 3)")
    parser.add_argument("--prompt", type=whole, default=2000, metavar="N", help="tokens of the prompt that arrives")
    parser.add_argument("--threads", type=whole, default=0, metavar="N", help="CPU threads (default: torch's choice)")
    parser.add_argument("--output", metavar="FILE", help="write the result as JSON (benchmarks/results/batch.json)")
    return run_main(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
