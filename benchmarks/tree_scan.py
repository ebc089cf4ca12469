"""What a tree costs a recurrent layer's scan over a chain of as many entries, pair by pair.

    python -m benchmarks.tree_scan --threads 1

Sizes are those of one layer of Qwen3-Next, Falcon H1, Kimi Linear, Jamba and RecurrentGemma 9B. A pair is the torch
code's scan over a chain of `nodes` entries, as a prompt's chunk is one, and over a random tree of as many; each builds
its mask and advances the state along a path of 4.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from benchmarks.common import Options, run_main
from lpr.model.recurrent.diagonal import Gated, Selective
from lpr.model.recurrent.scans import Path, Scan, decayed_attention, delta_rule
from lpr.model.recurrent.tree import Tree


@dataclass(frozen=True, kw_only=True)
class TreeScanOptions(Options):
    """A tree's scan against a chain's."""

    nodes: int = 64
    """Entries of the tree and of the chain."""
    pairs: int = 40
    """Pairs of each rule."""


def rules(count: int) -> dict[str, tuple[Scan, Sequence[Tensor], Tensor]]:
    """Scan, inputs of one row and state by name."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, count, *shape) * 0.1

    def steps(*shape: int) -> Tensor:
        return torch.rand(1, count, *shape) * 0.1

    heads = normal(32, 128), normal(32, 128), normal(32, 128)
    state = torch.randn(1, 32, 128, 128)
    few = normal(32, 128), normal(32, 128), normal(32, 64)
    return {
        "gated delta rule": (delta_rule, [*heads, -steps(32), steps(32)], state),
        "SSD": (decayed_attention, [*few, -steps(32)], torch.randn(1, 32, 128, 64)),
        "KDA": (delta_rule, [*heads, -steps(32, 128), steps(32)], state),
        "Mamba 1": (
            Selective(-torch.rand(8192, 16)).scan,
            [normal(8192), steps(8192), normal(16), normal(16)],
            torch.randn(1, 8192, 16),
        ),
        "RG-LRU": (Gated().scan, [normal(4096), -steps(4096)], torch.randn(1, 4096, 1)),
    }


def seconds(scan: Scan, inputs: Sequence[Tensor], state: Tensor, parents: np.ndarray) -> float:
    """One scan with a tree made for it, and the state behind a path."""
    began = time.perf_counter()
    device, path = state.device, [0]
    for entry in range(1, parents.shape[1]):
        if parents[0, entry] == path[-1] and len(path) < 4:
            path.append(entry)
    _, written = scan(inputs, state, Tree(parents, device))
    written.after(state, Path(torch.tensor([path]), torch.ones(1, len(path)).bool(), torch.tensor(path[-1:])))
    return time.perf_counter() - began


def measure(options: TreeScanOptions, console: Console) -> dict[str, Any]:
    """Medians of both, and of the pairs' ratios."""
    torch.manual_seed(0)
    dice = np.random.default_rng(0)
    chain = np.arange(-1, options.nodes - 1)[None]
    tree = np.array([[-1, *(int(dice.integers(max(0, entry - 8), entry)) for entry in range(1, options.nodes))]])
    rows = []
    for name, given in rules(options.nodes).items():
        pairs = [tuple(seconds(*given, each) for each in (chain, tree)) for _ in range(options.pairs + 3)][3:]
        medians = [statistics.median(each) for each in zip(*pairs, strict=True)]
        ratio = statistics.median(second / first for first, second in pairs)
        found = {f"{form}_ms": round(1e3 * each, 3) for form, each in zip(("chain", "tree"), medians, strict=True)}
        rows.append({"rule": name, **found, "tree_over_chain": round(ratio, 3)})
    return {"nodes": options.nodes, "pairs": options.pairs, "rows": rows}


def main() -> int:
    """Run the command line; returns the exit code."""
    return run_main("tree_scan", TreeScanOptions, measure)


if __name__ == "__main__":
    sys.exit(main())
