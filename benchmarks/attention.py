"""Tree attention on a GPU: Triton kernel, FlexAttention and SDPA with a dense mask, against the time to read K and V.

`python -m benchmarks.attention` times one layer's attention for the heads of CodeLlama 7B, 34B and 70B (the last two
have the same, so 70B is measured as one of eight tensor-parallel shards too). Calls are captured in a CUDA graph that
goes through several copies of K and V, more than the L2 cache holds, as the layers of a model do. The floor of a row
is the bytes of K and V that are read, over the bandwidth that a large copy reached on the same device.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console

from benchmarks.common import OneLineParser, run_main, table, whole
from lpr.config import InputError
from lpr.model.attention import additive
from lpr.model.kernels import flex, reference
from lpr.model.kernels.mask import TreeMask, build_mask

HEADS = {"7B": (32, 32), "34B, 70B": (64, 8), "70B, tp 8": (8, 1)}
HEAD_DIM = 128
NODES = (1, 16, 64, 128, 512)
LENGTHS = (512, 2048, 8192, 32768)
COLD_BYTES = 128 << 20
"""Bytes of K and V that a captured graph goes through, several times any L2 cache."""

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy of 1 GiB."""
    source = torch.randint(0, 255, (1 << 30,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = graph_seconds(lambda: target.copy_(source), 1)
    return 2 * source.numel() / seconds


def graph_seconds(calls: Callable[[], Any], num_calls: int, repeats: int = 20) -> float:
    """Median seconds of a call, by replays of a captured graph that makes `num_calls` of them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles and allocates, which a capture must not
        calls()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    times = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / num_calls)
    return statistics.median(times[3:])


def random_mask(num_nodes: int, num_cached: int, device: torch.device) -> TreeMask:
    """A tree whose nodes hang under a random one of the eight before them."""
    generator = torch.Generator().manual_seed(num_nodes)
    draws = torch.randint(1, 9, (num_nodes,), generator=generator).tolist()
    parents = [max(-1, node - back) for node, back in enumerate(draws)]
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    positions = torch.tensor([depths], device=device) + num_cached
    return build_mask([parents], [num_cached], positions, device)


def versions(mask: TreeMask, group: int, num_kv: int, dtype: torch.dtype) -> dict[str, Attention]:
    """The three, as functions of query, key and value; SDPA's mask is made once per step, so it is not in its time."""
    from lpr.model.kernels import triton_kernel

    dense = additive(mask.visible(num_kv)[:, None], dtype).repeat(1, 1, group, 1)

    def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        folded = query.reshape(1, key.shape[1], -1, query.shape[3])
        out = torch.nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=dense)
        return out.reshape(query.shape)

    return {
        "triton": lambda query, key, value: triton_kernel.tree_attention(query, key, value, mask),
        "flex": lambda query, key, value: flex.tree_attention(query, key, value, mask),
        "sdpa": sdpa,
    }


def measure_row(
    heads: tuple[int, int], num_nodes: int, num_kv: int, chosen: Sequence[str], dtype: torch.dtype
) -> dict[str, Any]:
    """Microseconds and error of each version for one size; a version that fails is recorded with its message."""
    device = torch.device("cuda")
    num_heads, num_kv_heads = heads
    mask = random_mask(num_nodes, num_kv - num_nodes, device)
    row_bytes = 2 * num_kv_heads * HEAD_DIM * dtype.itemsize
    copies = max(2, -(-COLD_BYTES // (num_kv * row_bytes)))
    caches = torch.randn(copies, 2, 1, num_kv, num_kv_heads, HEAD_DIM, device=device, dtype=dtype).transpose(3, 4)
    query = torch.randn(1, num_nodes, num_heads, HEAD_DIM, device=device, dtype=dtype).transpose(1, 2)
    group = num_heads // num_kv_heads  # the reference's scores for more than one K/V head may not fit
    expected = reference.tree_attention(query[:, :group], caches[0, 0][:, :1], caches[0, 1][:, :1], mask).float()
    made: dict[str, Any] = {"floor_bytes": num_kv * row_bytes}
    for name, version in versions(mask, group, num_kv, dtype).items():
        if name not in chosen:
            continue
        try:
            out = version(query, caches[0, 0], caches[0, 1])[:, :group].float()
            error = (out - expected).abs().max().item()
            if not error <= (1e-4 if dtype == torch.float32 else 2e-2):
                raise RuntimeError(f"differs from the reference by {error:.1e}")

            def through_all(version: Attention = version) -> None:
                for key, value in caches:
                    version(query, key, value)

            made[name] = {"us": round(1e6 * graph_seconds(through_all, copies), 2), "error": error}
        except Exception as failure:  # one version's failure is a result
            lines = str(failure).strip().splitlines() or [""]
            made[name] = {"failed": f"{type(failure).__name__}: {lines[0]}"[:200]}
    return made


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All sizes, as a table on stderr and a dictionary."""
    if not torch.cuda.is_available():
        raise InputError("this benchmark needs a CUDA device: it times GPU kernels")
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    bandwidth = copy_bandwidth(torch.device("cuda"))
    console.print(f"a copy of 1 GiB moves {bandwidth / 1e12:.2f} TB/s, read and written; floor = K and V once at that")
    rows, cells = [], []
    for label, heads in HEADS.items():
        for num_nodes in options.nodes:
            for num_kv in options.lengths:
                row = measure_row(heads, num_nodes, num_kv, options.versions, dtype)
                row["floor_us"] = round(1e6 * row.pop("floor_bytes") / bandwidth, 2)
                rows.append({"heads": label, "nodes": num_nodes, "kv": num_kv, **row})
                times = [str(row[name].get("us", "failed")) for name in options.versions]
                cells.append([label, str(num_nodes), str(num_kv), str(row["floor_us"]), *times])
    console.print(table("us per layer", ["heads", "nodes", "KV", "floor", *options.versions], cells))
    wins = {name: sum(_fastest(row, options.versions) == name for row in rows) for name in options.versions}
    return {"benchmark": "attention", "dtype": options.dtype, "copy_bytes_per_s": bandwidth, "wins": wins, "rows": rows}


def _fastest(row: dict[str, Any], chosen: Sequence[str]) -> str | None:
    timed = [name for name in chosen if "us" in row[name]]
    return min(timed, key=lambda name: row[name]["us"], default=None)


def main() -> int:
    """Command line."""
    parser = OneLineParser(prog="benchmarks.attention", description="tree attention on a GPU")
    parser.add_argument("--nodes", type=whole, nargs="+", default=NODES, metavar="N", help="nodes of the tree")
    parser.add_argument(
        "--lengths", type=whole, nargs="+", default=LENGTHS, metavar="N", help="cache rows, nodes included"
    )
    names = ("triton", "flex", "sdpa")
    parser.add_argument(
        "--versions", nargs="+", default=names, choices=names, help="what to time (flex compiles per size)"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--output", metavar="FILE", help="write the result as JSON")
    parser.set_defaults(threads=0)
    return run_main(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
