"""Kernels and collectives that a compiled step launches on a rank, by the counts of tests/fakes/kernel_counts.py."""

from __future__ import annotations

from lpr.planner.facts import ModelFacts

COUNTED = ("llama", "mistral")  # model types whose layers were counted
LAYER = 10
"""Norm, queries to values, rotation and cache writes, attention in two, output, norm, gate and up, SiLU, down."""
ENDS = 2  # the last norm and the head; the embedding is part of the first layer's norm
AROUND = {False: (8, 18), True: (27, 45)}
"""Inputs and greedy choice around the forward of one token, and of a tree; True: among parts of the vocabulary."""


def step_launches(facts: ModelFacts, tp: int, is_tree: bool = True) -> int | None:
    """Launches of a captured, compiled step on each of `tp` ranks, a collective being one; None if never counted."""
    if facts.model_type not in COUNTED:
        return None
    reduces = sum(each.count for each in facts.collectives if each.kind == "all_reduce")
    split = reduces + 1 if tp > 1 else 0  # the embedding ends at a collective, and is a kernel of its own
    return LAYER * facts.num_layers + ENDS + split + AROUND[tp > 1][is_tree]
