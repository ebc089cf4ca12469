"""Measurements that predictions start from: tokens per step and host times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lpr.config import DecodeConfig, InputError
from lpr.core.step_times import interpolate
from lpr.core.wire import payload_words


@dataclass(frozen=True)
class Drafted:
    """Measured yield of trees of one total node budget. The split over ranks cannot change it."""

    temperature: float
    budget: int
    """Drafted nodes per step on all ranks together."""
    tokens_per_step: float
    nodes: float
    """Nodes of the whole tree, the root included."""
    is_extrapolated: bool = False
    """Beyond the largest measured budget: along the logarithm of the budget."""

    def payload_bytes(self, lp: int) -> int:
        """Bytes of a rank's payload in the step's all-gather."""
        decode = DecodeConfig(window_size=0, trie_nodes=self.budget - 1)
        return 4 * payload_words(decode.resolved(), 1, lp, decode.carries_trees(lp))


@dataclass(frozen=True)
class Measured:
    """All measurements of a prediction."""

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
        steps = math.log2(last.budget / before.budget)
        budget = 2 * last.budget
        while budget <= 64 * lp:
            doublings = math.log2(budget / last.budget) / steps
            grown = last.tokens_per_step + doublings * (last.tokens_per_step - before.tokens_per_step)
            found.append(Drafted(nearest, budget, grown, last.nodes * budget / last.budget, True))
            budget *= 2
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
    """Measurements from the JSON of lpr/assets/measured.json; raises InputError."""
    try:
        drafted, extra = [], {}
        for each in values["acceptance"]:
            extra[each["temperature"]] = tuple((ranks, nodes) for ranks, nodes in each["ranks_extra"])
            for budget, tokens, nodes in each["budget_tokens_nodes"]:
                drafted.append(Drafted(each["temperature"], budget, tokens, nodes))
        host = {each["temperature"]: tuple((n, ms) for n, ms in each["nodes_ms"]) for each in values["host"]}
        return Measured(tuple(drafted), extra, host, values["source"])
    except (KeyError, TypeError, ValueError) as failure:
        raise InputError(f"the measurements lack or misname {failure}") from failure
