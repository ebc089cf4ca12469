"""Two ways for a rank to get the K/V of an accepted path that another rank evaluated: recompute it, or receive it.

    torchrun --nproc_per_node=2 -m benchmarks.kv_transfer --lengths 1 4 16

lpr recomputes: the tokens come first in the rank's next forward (its pending chain). The alternative is a broadcast of
their K and V for all layers from the rank that has them. Both are timed pairwise in one run, on the model's real
shapes: the forward of a step with and without the extra tokens, against the broadcast and the write to the cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks.common import OneLineParser, finish, table
from lpr import Engine, bundled_model
from lpr.dist.runtime import World, join, leave
from lpr.model.inputs import Row


def paired(first: Callable[[], None], second: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Median milliseconds of both, run in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats + 3):
        for function, spent in zip((first, second), times, strict=True):
            dist.barrier()
            start = time.perf_counter()
            function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            spent.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[0][3:]), statistics.median(times[1][3:])


def measure(options: argparse.Namespace, console: Console, device: str | None) -> dict[str, Any]:
    """Time both ways for every length of path."""
    engine = Engine.from_pretrained(options.model or bundled_model(), dtype=options.dtype, device=device)
    cache = engine.model.cache
    assert cache is not None
    prompt = [token % engine.model.vocab_size for token in range(options.context)]
    engine.model.fill([Row(0, 0, prompt, list(range(-1, len(prompt) - 1)), list(range(len(prompt))), 0)])

    def forward(num_pending: int) -> None:
        """A step of `nodes` nodes whose pending chain has `num_pending` tokens."""
        count = num_pending + options.nodes
        chain = list(range(-1, num_pending - 1)) + [num_pending - 1] * options.nodes
        positions = [options.context + min(i, num_pending) for i in range(count)]
        engine.model.fill([Row(0, options.context, [1] * count, chain, positions, 0)])

    def receive(count: int) -> None:
        """Broadcast the K/V of `count` tokens from rank 1 and write them to the cache."""
        for pool in cache._pools:
            rows = pool[:, options.context : options.context + count].contiguous()
            dist.broadcast(rows, src=1)
            pool[:, options.context : options.context + count] = rows

    rows = []
    for length in options.lengths:
        short, long = paired(lambda: forward(1), lambda n=length: forward(1 + n), options.repeats)  # type: ignore[misc]
        received, _ = paired(lambda n=length: receive(n), lambda: None, options.repeats)  # type: ignore[misc]
        size = sum(pool[:, :length].numel() * pool.element_size() for pool in cache._pools)
        rows.append(
            {
                "length": length,
                "recompute_ms": round(long - short, 3),
                "receive_ms": round(received, 3),
                "step_ms": round(short, 3),
                "bytes": size,
            }
        )
    cells = [[str(r["length"]), f"{r['recompute_ms']:.2f}", f"{r['receive_ms']:.2f}", f"{r['bytes']}"] for r in rows]
    console.print(table(f"step of {options.nodes} nodes", ["path", "recompute ms", "receive ms", "bytes"], cells))
    return {"benchmark": "kv_transfer", "nodes": options.nodes, "context": options.context, "runs": rows}


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = OneLineParser(prog="benchmarks.kv_transfer", description="Recompute or receive K/V of an accepted path.")
    parser.add_argument("--model", metavar="M", help="folder or hub id (default: the bundled model)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", metavar="D")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--output", metavar="FILE")
    options = parser.parse_args()
    world = World.from_environment()
    if world.size < 2:
        parser.error("needs at least two ranks: torchrun --nproc_per_node=2 -m benchmarks.kv_transfer")
    device = world.device(options.device)
    with join(world, device, 120.0) as comm:
        result = measure(options, Console(stderr=True, quiet=comm.rank != 0), device)
        if comm.rank == 0:
            finish({**result, "num_ranks": comm.size}, options.output)
    return 0


if __name__ == "__main__":
    leave(World.from_environment(), main())
