"""Predicted tokens per second of a model on a mesh, with an uncertainty.

On the one GPU that has run lpr, an H200, steps of a 7B model took 1.2 to 1.6 times the predicted forward.

A step takes `max(bytes / bandwidth, operations / arithmetic) + collectives + host`. Acceptance length (tokens per step)
and host time are measured. Two constants are fitted to gpt-fast's published runs of Llama-2-7B on 1 and on 8 A100; its
other runs are the check (tests/planner/test_prediction.py). Every uncertain input has a slow and a fast value, whose
effects are added as squares of logarithms, as for independent errors.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from lpr.config import DecodeConfig
from lpr.core.step_times import interpolate
from lpr.core.wire import NUM_HEADER, payload_words
from lpr.planner.facts import ModelFacts
from lpr.planner.footprint import Mesh, forward_flops, kv_token_bytes, read_bytes
from lpr.planner.hardware import Gpu, Network, all_gather, all_reduce


@dataclass(frozen=True)
class Drafted:
    """Measured yield of trees of one total node budget. The split over ranks cannot change it."""

    temperature: float
    budget: int  # drafted nodes per step on all ranks together
    tokens_per_step: float
    nodes: float  # nodes of the whole tree, the root included
    is_extrapolated: bool = False  # beyond the largest measured budget: along the logarithm of the budget

    def payload_bytes(self, lp: int) -> int:
        decode = DecodeConfig(window_size=0, trie_nodes=self.budget - 1)
        return 4 * payload_words(decode.resolved(), 1, lp, decode.carries_trees(lp))


@dataclass(frozen=True)
class Measured:
    """All measurements of a prediction: tokens per step and host times."""

    drafted: tuple[Drafted, ...]
    extra_nodes: Mapping[float, tuple[tuple[float, float], ...]]
    """Temperature to (ranks, nodes): nodes of the busiest rank beyond its equal part of the tree, for ancestors that
    others own and for uncomputed tokens."""
    host_ms: Mapping[float, tuple[tuple[float, float], ...]]
    """Temperature to (nodes of the whole tree, milliseconds of the host per step)."""
    source: str

    def ways(self, temperature: float, lp: int) -> list[Drafted]:
        """The candidate trees: every measured budget, and larger ones up to 64 nodes per rank."""
        nearest = min((each.temperature for each in self.drafted), key=lambda each: abs(each - temperature))
        found = sorted((each for each in self.drafted if each.temperature == nearest), key=lambda each: each.budget)
        before, last = found[-2:]
        gain = (last.tokens_per_step - before.tokens_per_step) / math.log2(last.budget / before.budget)
        for doublings in range(1, int(math.log2(max(1.0, 64 * lp / last.budget))) + 1):
            grown = last.tokens_per_step + doublings * gain
            found.append(Drafted(nearest, last.budget << doublings, grown, last.nodes * 2**doublings, True))
        return found

    def shard_nodes(self, drafted: Drafted, lp: int) -> float:
        """Nodes and pending tokens that the busiest of `lp` ranks evaluates."""
        known = self.extra_nodes[drafted.temperature]
        extra = interpolate([nodes for _, nodes in known], math.log2(lp), [math.log2(ranks) for ranks, _ in known])
        return drafted.nodes / lp + extra

    def host_seconds(self, temperature: float, tree_nodes: float) -> float:
        """Host time of a step; every rank drafts the whole tree."""
        known = self.host_ms[min(self.host_ms, key=lambda each: abs(each - temperature))]
        return max(0.0, interpolate([ms for _, ms in known], tree_nodes, [n for n, _ in known])) * 1e-3


def read_measured(values: Mapping[str, Any]) -> Measured:
    """Measurements from the JSON of lpr/assets/measured.json."""
    accepted = values["acceptance"]
    drafted = tuple(Drafted(each["temperature"], *row) for each in accepted for row in each["budget_tokens_nodes"])
    extra = {each["temperature"]: tuple(map(tuple, each["ranks_extra"])) for each in accepted}
    host = {each["temperature"]: tuple(map(tuple, each["nodes_ms"])) for each in values["host"]}
    return Measured(drafted, extra, host, values["source"])


@dataclass(frozen=True)
class Inputs:
    """The uncertain inputs of a prediction; the defaults are the middle values."""

    bandwidth_fraction: float = 0.683
    """Of the data sheet's memory bandwidth. Fitted to Llama-2-7B on one A100 (104.9 tokens/s): 82 % of the 1700 GB/s
    that a copy reached there."""
    flops_fraction: float = 0.55  # Of the data sheet's arithmetic, for products as narrow as a tree. Assumed.
    launch: float = 16.4e-6
    """Seconds per collective besides NCCL's own model. Fitted to Llama-2-7B on eight A100 (328.4 tokens/s)."""
    collectives: float = 1.0  # factor on the time of all collectives
    host: float = 1.0  # factor on the host's measured time per step
    acceptance: float = 1.0  # factor on tokens per step of every mesh
    scaling: float = 1.0  # exponent of the gain in tokens per step by further ranks: 1 as measured, 0 no gain


SPREAD: dict[str, tuple[float, float]] = {
    "bandwidth_fraction": (0.75 / 0.82, 0.90 / 0.82),  # 75 to 90 % of what a copy reaches
    "flops_fraction": (0.40 / 0.55, 0.75 / 0.55),
    "collectives": (2.0, 0.5),
    "host": (2.0, 0.5),  # measured on two busy cores of a server
    "acceptance": (0.90, 1.09),  # sampled; greedy: see GREEDY_ACCEPTANCE
    # With eight times the nodes, retrieval gained 5-6 % on traces of 7B and 15B code models (cold), and all drafts of
    # the bundled model 31-37 %: ln 1.055 / ln 1.37 = 0.17.
    "scaling": (0.17, 1.2),
}
"""Slow and fast factor of every input (for `scaling`: the value)."""

GREEDY_ACCEPTANCE = (0.66, 1.43)
"""Replaces SPREAD's for greedy decoding. Both are the quartiles over prompts divided by the mean, measured with the
bundled model on 12 ClassEval prompts (64 nodes, 128 tokens): greedy 5.6 to 12.1 of 8.4, at temperature 0.8 2.02 to 2.45
of 2.24. Greedy text repeats itself on some prompts and not on others."""

ONE_GPU_BUDGET = 64
"""Nodes that one GPU drafts by default (DecodeConfig's trie); the gain by further nodes is the uncertain `scaling`."""

EAGER_LAYER_SECONDS = 1.22e-3
"""Launching a layer's kernels one by one: Llama-7B ran at 25.5 tokens/s so on an A100 (PyTorch blog, "Accelerating
generative AI II: gpt-fast", November 2023), 39 ms for 32 layers. Captured graphs do not have this."""


@dataclass(frozen=True)
class Machine:
    gpu: Gpu
    network: Network
    is_eager: bool = False  # kernels are launched one by one instead of as a captured graph


class StepTime(NamedTuple):
    forward: float
    tp: float
    lp: float
    host: float

    @property
    def total(self) -> float:
        return sum(self)


@dataclass(frozen=True)
class Estimate:
    """A prediction: the middle value, and those with every uncertain input at its slow and at its fast value."""

    low: float
    mid: float
    high: float

    def __str__(self) -> str:
        low, mid, high = (f"{each:.0f}" if each >= 100 else f"{each:.3g}" for each in (self.low, self.mid, self.high))
        return f"{mid} ({low} to {high})"


@dataclass(frozen=True)
class Prediction:
    mesh: Mesh
    drafted: Drafted | None  # the best tree by prediction; None: plain decoding
    tokens_per_second: Estimate
    tokens_per_step: float
    step: StepTime


def forward_seconds(
    facts: ModelFacts, tp: int, element_size: int, nodes: float, kv: int, machine: Machine, inputs: Inputs,
    batch: int = 1,
) -> float:  # fmt: skip
    """Roofline of one forward on one rank over `nodes` entries of `batch` sequences with `kv` cached tokens each."""
    bytes_read = read_bytes(facts, tp, element_size, max(1, round(nodes)))
    bytes_read += batch * (kv * kv_token_bytes(facts, tp, element_size) + facts.state_bytes(element_size, tp))
    memory = bytes_read / (machine.gpu.bandwidth * inputs.bandwidth_fraction)
    arithmetic = forward_flops(facts, tp, 1, kv) * nodes / (machine.gpu.flops * inputs.flops_fraction)
    launches = EAGER_LAYER_SECONDS * facts.num_layers if machine.is_eager else 0.0
    return max(memory, arithmetic, launches)


def tp_seconds(facts: ModelFacts, tp: int, element_size: int, nodes: float, machine: Machine, inputs: Inputs) -> float:
    """The collectives of one step inside a replica, one after the other."""
    total = 0.0
    for collective in facts.collectives if tp > 1 else ():
        num_bytes = collective.num_bytes(nodes, nodes, element_size, tp)
        if collective.kind == "all_reduce":
            time = all_reduce(machine.network, tp, num_bytes)
        else:
            time = all_gather(machine.network, tp, -(-num_bytes // tp))
        total += collective.count * (time.seconds + inputs.launch)
    return total * inputs.collectives


def lp_seconds(mesh: Mesh, payload_bytes: int, machine: Machine, inputs: Inputs) -> float:
    """The step's one all-gather, over all ranks of the mesh (a replica's ranks take part for the digest)."""
    if mesh.num_gpus == 1:
        return 0.0
    time = all_gather(machine.network, mesh.num_gpus, payload_bytes)
    return (time.seconds + inputs.launch) * inputs.collectives


def spread(value: Callable[[Inputs], float], inputs: Inputs, temperature: float | None = None) -> Estimate:
    """`value` at the middle inputs, and the combined effect of all slow and of all fast values."""
    middle = value(inputs)
    down = up = 0.0
    for name, sides in (SPREAD | ({"acceptance": GREEDY_ACCEPTANCE} if temperature == 0 else {})).items():
        for side in sides:
            changed = side if name == "scaling" else getattr(inputs, name) * side
            move = math.log(value(replace(inputs, **{name: changed})) / middle)
            down, up = (down + move**2, up) if move < 0 else (down, up + move**2)
    return Estimate(middle * math.exp(-math.sqrt(down)), middle, middle * math.exp(math.sqrt(up)))


@dataclass(frozen=True)
class Setting:
    """The workload for which meshes are compared."""

    facts: ModelFacts
    machine: Machine
    measured: Measured
    kv: int
    element_size: int
    temperature: float | None  # None: plain decoding
    batch: int = 1

    def rate(self, mesh: Mesh, drafted: Drafted | None, inputs: Inputs) -> float:
        """Tokens per second of all sequences together. A step yields at least one token."""
        tokens = 1.0
        if drafted is not None:
            known = [each for each in self.measured.drafted if each.temperature == drafted.temperature]
            base = min(known, key=lambda each: abs(each.budget - ONE_GPU_BUDGET)).tokens_per_step
            gain = max(1.0, drafted.tokens_per_step / base)
            tokens = max(1.0, drafted.tokens_per_step / gain * inputs.acceptance * gain**inputs.scaling)
        return self.batch * tokens / self.step(mesh, drafted, inputs).total

    def step(self, mesh: Mesh, drafted: Drafted | None, inputs: Inputs) -> StepTime:
        """The parts of a step; without `drafted` one of plain decoding."""
        if drafted is None:
            return self.step_of(mesh, 1.0, 1.0, 4 * NUM_HEADER, inputs)
        nodes = self.measured.shard_nodes(drafted, mesh.lp)
        return self.step_of(mesh, nodes, drafted.nodes, drafted.payload_bytes(mesh.lp), inputs)

    def step_of(self, mesh: Mesh, nodes: float, tree: float, payload: int, inputs: Inputs) -> StepTime:
        """The parts of a step that evaluates `nodes` entries a rank and sends `payload` bytes; `tree` nodes in all."""
        replica, batch = (self.facts, mesh.tp, self.element_size, nodes * self.batch), self.batch
        return StepTime(
            forward=forward_seconds(*replica, self.kv, self.machine, inputs, batch),
            tp=tp_seconds(*replica, self.machine, inputs),
            lp=lp_seconds(mesh, payload * batch, self.machine, inputs),
            host=self.measured.host_seconds(self.temperature or 0.0, tree) * inputs.host * batch,
        )


def predict(setting: Setting, mesh: Mesh) -> Prediction:
    """The prediction for `mesh` with its best tree."""
    inputs, at = Inputs(), setting.temperature
    trees = [] if at is None else setting.measured.ways(at, mesh.lp)
    best = max([None, *trees], key=lambda each: setting.rate(mesh, each, inputs))
    step = setting.step(mesh, best, inputs)
    rates = spread(lambda changed: setting.rate(mesh, best, changed), inputs, at)
    return Prediction(mesh, best, rates, rates.mid * step.total / setting.batch, step)


def advantage(setting: Setting, first: Prediction, second: Prediction) -> Estimate:
    """Tokens per second of `first` over those of `second`; errors that both share cancel out."""
    rates = [partial(setting.rate, each.mesh, each.drafted) for each in (first, second)]
    return spread(lambda changed: rates[0](changed) / rates[1](changed), Inputs(), setting.temperature)
