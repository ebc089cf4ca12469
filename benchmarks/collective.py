"""Time of a step's one collective: the all-gather of fixed-size payloads, between real ranks that do nothing else.

    torchrun --nproc_per_node=2 -m benchmarks.collective --bytes 20 2192 4368

The ranks meet in front of every gather, so that none waits there for another's work, and the time is the slowest
rank's until the result is on its host. Gloo between CPUs, NCCL between GPUs, as in a job.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks.common import OneLineParser, finish, table, whole
from lpr.config import DecodeConfig
from lpr.dist.comm import Comm
from lpr.dist.runtime import World, join, leave

WARM_UP = 10


def payload_bytes(decode: DecodeConfig, num_ranks: int) -> int:
    """Bytes that each of `num_ranks` ranks contributes to a step under `decode` (lpr.engine.exchange)."""
    return 4 * decode.resolved(num_ranks).payload_words(decode.max_batch_size, num_ranks)


def gather_times(comm: Comm, device: torch.device, size: int, repeats: int) -> list[float]:
    """Milliseconds of `repeats` gathers of `size` bytes per rank, each the slowest rank's."""
    payload = torch.zeros(-(-size // 4), dtype=torch.int32, device=device)
    mine = []
    for _ in range(WARM_UP + repeats):
        dist.barrier()
        began = time.perf_counter()
        comm.gather(payload)
        mine.append(int((time.perf_counter() - began) * 1e9))
    times = comm.gather(torch.tensor(mine[WARM_UP:], dtype=torch.int64).view(torch.int32))
    return [ns / 1e6 for ns in times.contiguous().view(torch.int64).amax(0).tolist()]


def measure(options: argparse.Namespace, comm: Comm, device: torch.device) -> dict[str, Any]:
    """Time the gathers of every size."""
    runs = []
    for size in options.bytes:
        times = sorted(gather_times(comm, device, size, options.repeats))
        worst = times[int(0.99 * (len(times) - 1))]
        runs.append({"bytes": size, "median_ms": round(statistics.median(times), 4), "p99_ms": round(worst, 4)})
    return {
        "benchmark": "collective",
        "num_ranks": comm.size * comm.tp_size,
        "backend": dist.get_backend(),
        "device": str(device),
        "runs": runs,
    }


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = OneLineParser(prog="benchmarks.collective", description="Time of the all-gather of a step.")
    parser.add_argument("--bytes", type=whole, nargs="+", required=True, metavar="N", help="payloads, per rank")
    parser.add_argument("--repeats", type=whole, default=300, metavar="N", help="gathers of each size (default 300)")
    parser.add_argument("--device", metavar="D", help="cpu or cuda (default: a GPU per rank if there are GPUs)")
    parser.add_argument("--output", metavar="FILE")
    options = parser.parse_args()
    if not options.repeats or not all(options.bytes):
        parser.error("--repeats and --bytes must be at least 1")
    world = World.from_environment()
    if world.size < 2:
        parser.error("needs at least two ranks: torchrun --nproc_per_node=2 -m benchmarks.collective")
    device = world.device(options.device)
    with join(world, device, 60.0) as comm:
        result = measure(options, comm, torch.device(device or "cpu"))
        if comm.rank == 0:
            cells = [[str(r["bytes"]), f"{r['median_ms']:.3f}", f"{r['p99_ms']:.3f}"] for r in result["runs"]]
            title = f"all-gather between {comm.size} ranks, {result['backend']}"
            Console(stderr=True).print(table(title, ["bytes per rank", "median ms", "p99 ms"], cells))
            finish(result, options.output)
    return 0


if __name__ == "__main__":
    leave(World.from_environment(), main())
