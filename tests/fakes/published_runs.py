"""gpt-fast's published tensor-parallel runs, and their prediction by lpr.planner.

They are tokens per second in bf16, batch 1, on A100-80GB (its README, "Benchmarks"; the copy bandwidth of that machine,
limited to 330 W per GPU, is given as about 1700 GB/s). It shards the layers, not the embedding and the output head.
The two fitted constants of lpr.planner.prediction come from two of these runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lpr.planner.facts import ModelFacts
from lpr.planner.footprint import kv_token_bytes, read_bytes
from lpr.planner.hardware import GPUS, LINKS, Network, all_reduce
from lpr.planner.prediction import Inputs, Machine, forward_seconds, tp_seconds

GPT_FAST: dict[str, dict[int, float]] = {
    "llama-2-7b": {1: 104.9, 2: 168.8, 4: 254.0, 8: 328.4},
    "llama-3.1-8b": {1: 93.8, 2: 149.1, 4: 217.2, 8: 276.0},
    "llama-2-70b": {2: 21.3, 4: 38.0, 8: 62.5},
    "llama-3.1-70b": {2: 16.0, 4: 37.5, 8: 58.8},
}
FITTED = ("llama-2-7b", (1, 8))
"""The model and the numbers of GPUs that the constants were fitted to."""
KV = 128
"""Rows of K/V that a step of such a run reads on average: short prompts and 200 tokens."""
A100 = Machine(GPUS["a100-80gb"], Network(LINKS["nvlink-a100"], LINKS["ib-hdr"]))


@dataclass(frozen=True)
class Check:
    """A published rate and the predicted one."""

    model: str
    num_gpus: int
    published: float
    predicted: float
    is_fitted: bool

    @property
    def ratio(self) -> float:
        """Predicted over published."""
        return self.predicted / self.published


def gpt_fast_layout(facts: ModelFacts) -> ModelFacts:
    """The model as gpt-fast splits it: only layers, with two all-reduces in each."""
    weights = tuple(
        each if "*" in each.name else replace(each, style=None) for each in facts.weights
    )  # * stands for a layer's number
    reduces = tuple(
        replace(each, count=2 * facts.num_layers)
        for each in facts.collectives
        if each.kind == "all_reduce" and each.width == facts.hidden_size
    )
    return replace(facts, weights=weights, collectives=reduces)


def predicted_rate(facts: ModelFacts, num_gpus: int, inputs: Inputs) -> float:
    """Tokens per second of gpt-fast on `num_gpus` A100."""
    layout = gpt_fast_layout(facts)
    forward = forward_seconds(layout, num_gpus, 2, 1, KV, A100, inputs)
    return 1 / (forward + tp_seconds(layout, num_gpus, 2, 1, A100, inputs))


def check_published(facts: dict[str, ModelFacts], inputs: Inputs) -> list[Check]:
    """Every published rate against the predicted one; `facts` has the models of GPT_FAST."""
    return [
        Check(name, num, rate, predicted_rate(facts[name], num, inputs), name == FITTED[0] and num in FITTED[1])
        for name, rates in GPT_FAST.items()
        for num, rate in rates.items()
    ]


def fit(facts: ModelFacts) -> tuple[float, float]:
    """`bandwidth_fraction` and `launch` from Llama-2-7B on one and on eight GPUs."""
    layout, rates = gpt_fast_layout(facts), GPT_FAST[FITTED[0]]

    def bytes_read(num_gpus: int) -> float:
        return read_bytes(layout, num_gpus, 2, 1) + KV * kv_token_bytes(layout, num_gpus, 2)

    bandwidth = bytes_read(1) * rates[1]
    left = 1 / rates[8] - bytes_read(8) / bandwidth
    [reduce] = layout.collectives
    nccl = all_reduce(A100.network, 8, reduce.width * 2).seconds
    return bandwidth / A100.gpu.bandwidth, left / reduce.count - nccl
