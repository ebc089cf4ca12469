"""Engines as benchmarks use them: one model for several contestants, sizes by node budget, and counted steps.

Which tokens a step emits does not depend on how its tree is split, so one process evaluates each whole tree and counts
what every rank would evaluate of it, by the same partition and the same pending chains
(tests/engine/test_exchange.py asserts that several ranks take these very steps).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common import ModelOptions
from lpr import DecodeConfig, Engine, EngineOptions, SamplingParams, bundled_model
from lpr.core.partition import partition
from lpr.core.state import num_computed_after
from lpr.core.tree import TokenTree
from lpr.engine.hooks import StepHooks
from lpr.engine.stats import DecodeStats
from lpr.model.loader import Loaded, load


def load_engine(options: ModelOptions, decode: DecodeConfig | None = None) -> Engine:
    """The engine of `--model`, `--dtype`, `--device` and `--exact`."""
    found = load_model(options)
    return Engine(found.loaded, decode, found.options)


@dataclass(frozen=True)
class OneModel:
    """A model for several engines, and how they run it."""

    loaded: Loaded
    options: EngineOptions


def load_model(options: ModelOptions) -> OneModel:
    """The model of `--model`, `--dtype`, `--device` and `--exact`."""
    loaded = load(str(options.model or bundled_model()), options.dtype, options.device, with_head=True)
    return OneModel(loaded, EngineOptions(dtype=options.dtype, device=options.device, exact=options.exact))


def engines_over(model: OneModel, decodes: Mapping[str, DecodeConfig]) -> dict[str, Engine]:
    """An engine for each configuration, over one model."""
    return {name: Engine(model.loaded, decode, model.options) for name, decode in decodes.items()}


def plain() -> DecodeConfig:
    """Autoregressive decoding of one request."""
    return DecodeConfig.autoregressive(max_batch_size=1)


def split_budget(kind: str, budget: int) -> DecodeConfig:
    """A configuration whose tree has at most `budget` nodes: `window`, `trie`, or half of each (`both`).

    A window takes W * (N-1) nodes and its pool G * (N-1); W = G as in the paper, N = 5.
    """
    if kind == "trie":
        return DecodeConfig(window_size=0, trie_nodes=budget - 1, max_batch_size=1)
    columns = max(1, budget // (16 if kind == "both" else 8))
    trie = 0 if kind == "window" else budget - 8 * columns
    return DecodeConfig(window_size=columns, guess_set_size=columns, trie_nodes=trie, max_batch_size=1)


def params_for(
    count: int, max_new_tokens: int, temperature: float, ignore_eos: bool = False, first_seed: int = 0
) -> list[SamplingParams]:
    """One seed per prompt; without end-of-text tokens all contestants have as much to do."""
    return [
        SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, ignore_eos=ignore_eos)
        for seed in range(first_seed, first_seed + count)
    ]


def stock_generate(model: Any, prompt: list[int], max_new_tokens: int, **more: Any) -> list[int]:
    """The ids of transformers' greedy decoding."""
    ids = torch.tensor([prompt], device=model.device)
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, **more)
    return list(out[0, len(prompt) :].tolist())


class RankCounter(StepHooks):
    """Counts what each of several ranks would evaluate of one request after the other."""

    def __init__(self, num_ranks: int, capacity: int) -> None:
        """No step counted yet; `capacity` nodes of a tree are a rank's own at most."""
        self.num_ranks = num_ranks
        self.capacity = capacity
        self.num_tokens = 0
        self.num_computed_tokens = [0] * num_ranks
        self.num_nodes = self.num_evaluated = self.num_pending = self.largest_shards = 0

    def begin_request(self, num_tokens: int) -> None:
        """The next step is the first of a sequence of `num_tokens`; it computes them on every rank."""
        self.num_tokens = num_tokens
        self.num_computed_tokens = [num_tokens - 1] * self.num_ranks

    def add(self, other: RankCounter) -> None:
        """Add what another one has counted."""
        self.num_nodes += other.num_nodes
        self.num_evaluated += other.num_evaluated
        self.num_pending += other.num_pending
        self.largest_shards += other.largest_shards

    def end_step(self, batch: Sequence[Any], outcomes: Sequence[Any], chunks: Any) -> None:
        """Count a step of the one request that runs."""
        concluded = outcomes[0].concluded
        pending = [self.num_tokens - held - 1 for held in self.num_computed_tokens]
        shards = partition(as_specified(concluded.tree), self.num_ranks, pending, self.capacity)
        self.num_computed_tokens = num_computed_after(self.num_tokens, concluded.path, shards)
        self.num_tokens += len(concluded.emitted)
        sizes = [len(shard.nodes) + chain for shard, chain in zip(shards, pending, strict=True)]
        self.num_nodes += len(concluded.tree)
        self.num_evaluated += sum(sizes)
        self.num_pending += sum(pending)
        self.largest_shards += max(sizes)


def as_specified(tree: Any) -> TokenTree:
    """A tree of either core as a tree of lpr.core, which `partition` reads."""
    copy = TokenTree(tree.tokens[0])
    for parent, token, source in zip(tree.parents[1:], tree.tokens[1:], tree.sources[1:], strict=True):
        copy.add(parent, token, source)
    return copy


def count_steps(
    engine: Engine,
    decode: DecodeConfig,
    prompts: Sequence[str],
    params: Sequence[SamplingParams],
    num_ranks: int,
    advance: Callable[[], None],
) -> tuple[DecodeStats, RankCounter]:
    """Complete `prompts` one by one, as `num_ranks` ranks of these sizes would."""
    engine.configure(decode.for_one_rank(num_ranks))
    total, counter = DecodeStats(), RankCounter(num_ranks, decode.resolved(num_ranks).owned_capacity(num_ranks))
    engine.hooks = counter
    try:
        for prompt, each in zip(prompts, params, strict=True):
            ids = engine.encode(prompt)
            counter.begin_request(len(ids))
            total.add(engine.generate([ids], each)[0].stats)
            advance()
    finally:
        engine.hooks = StepHooks()
    return total, counter
