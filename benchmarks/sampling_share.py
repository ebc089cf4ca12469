"""What sampling costs over greedy decoding on a CPU, with a vocabulary of 262144: whole steps, in pairs.

    OMP_NUM_THREADS=1 python -m benchmarks.sampling_share

A model of the shape of Gemma 3 270M with random weights evaluates trees of 1, 32 and 64 nodes; a greedy step and one at
temperature 0.8 and top-p 0.95 take turns. The ratio of a pair is what counts, of the processor's time with all threads,
which other work on the machine moves little. The logits are flat, which is the worst case for a limit: top-p allows
most of the vocabulary.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import RESULTS, OneLineParser, circumstances, write_json
from benchmarks.gpu.models import shapes_like, tree_step
from lpr import SamplingParams
from lpr.model.runner import TreeModel
from lpr.model.sampling.selection import Selection

SHAPE = dict(
    vocab_size=262_144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
    num_key_value_heads=1, head_dim=256, max_position_embeddings=32_768, sliding_window=512,
)  # fmt: skip
KINDS = {
    "T 0.8": SamplingParams(temperature=0.8, seed=1),
    "T 0.8, top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95, seed=1),
}


def measure(runner: TreeModel, nodes: int, params: SamplingParams, pairs: int) -> dict[str, Any]:
    """The processor's milliseconds of a greedy and of a sampled step of `nodes` nodes, and the ratios of `pairs`."""
    rows, greedy = tree_step(200, nodes, runner.vocab_size)
    candidates = 8 if nodes > 1 else 0
    times: dict[str, list[float]] = {"greedy": [], "sampled": []}
    for _ in range(pairs + 1):
        for name in times:
            began = time.process_time()
            selection = greedy if name == "greedy" else Selection.build([(params, rows[0].positions)])
            runner.evaluate(rows, selection, candidates)
            times[name].append(1e3 * (time.process_time() - began))
    ratios = [mine / its for its, mine in zip(*(times[name][1:] for name in times), strict=True)]
    return {
        "nodes": nodes,
        "pairs": pairs,
        **{f"{name}_ms": round(statistics.median(times[name][1:]), 2) for name in times},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(each, 3) for each in ratios],
    }


def main() -> int:
    """Run the command line."""
    parser = OneLineParser(prog="benchmarks.sampling_share", description="Sampling over greedy on a CPU, in pairs.")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 32, 64])
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--output", metavar="FILE", default=str(RESULTS / "sampling_share.json"))
    options = parser.parse_args()
    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma3_text", **{**SHAPE, "num_hidden_layers": options.layers})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    runner = TreeModel(model)
    runner.allocate(1, 300, max(options.nodes), shapes_like(runner))
    rows = []
    for nodes in options.nodes:
        for name, params in KINDS.items():
            rows.append({"sampling": name, **measure(runner, nodes, params, options.pairs)})
            print(json.dumps(rows[-1]), flush=True)
    about = {"benchmark": "sampling_share", "layers": options.layers, "vocabulary": SHAPE["vocab_size"]}
    write_json(Path(options.output), {**about, **circumstances(), "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
