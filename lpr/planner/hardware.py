"""GPUs and links by their data sheets, and the time of NCCL's collectives.

Bandwidths are what a vendor states, so a time computed from them is a floor. Sources, per line: NVIDIA data sheets of
the A100 (80 GB and 40 GB SXM, June 2021), H100 SXM (2023), H200 SXM (2024), L40S (2023), A10 (2021) and the DGX B200
(2024: 64 TB/s, 1440 GB and 72 PFLOP/s dense FP8 for eight GPUs; bf16 is half of that). Arithmetic is dense bf16 on
tensor cores, without sparsity.

Collectives follow the alpha-beta model by which NCCL picks its algorithms: latencies and efficiencies of NCCL 2.8's
tuning table (src/graph/tuning.cc, for A100 and NVLink). Per algorithm (ring, tree) and protocol (LL, LL128, Simple) it
has a base latency, a latency per hop for NVLink, PCI and network, and the reached share of the bus bandwidth. Inside a
host NCCL's tree is a chain, so its hops count like a ring's; between hosts it is binary. The launch of a collective is
not included (lpr.planner.prediction).
"""

import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lpr.config import InputError
from lpr.files import asset


@dataclass(frozen=True)
class Link:
    """A link between GPUs, inside a host or between hosts."""

    name: str
    hardware: int  # column of the latency table: 0 NVLink, 1 PCI, 2 network
    bandwidth: float  # bytes per second that one GPU can send while it receives as much


_TABLE = tomllib.loads(asset("hardware.toml").read_text(encoding="utf-8"))
LINKS = {row["name"]: Link(**row) for row in _TABLE["link"]}


class _Protocol(NamedTuple):
    name: str
    is_tree: bool
    base: float
    hops: tuple[float, float, float]
    share: float


_PROTOCOLS = (
    _Protocol("ring LL", False, 3.6, (0.47, 1.0, 2.7), 0.25),
    _Protocol("ring LL128", False, 10.0, (1.9, 2.5, 4.0), 0.92),
    _Protocol("ring Simple", False, 8.4, (3.4, 5.7, 9.6), 1.0),
    _Protocol("tree LL", True, 4.4, (0.52, 1.0, 5.0), 0.9 / 3.8),
    _Protocol("tree LL128", True, 4.4, (1.2, 1.9, 8.5), 0.9 * 7 / 9),
)


@dataclass(frozen=True)
class Network:
    inside: Link
    between: Link
    gpus_per_host: int = 8


@dataclass(frozen=True)
class CollectiveTime:
    """Seconds of one collective, and the algorithm that NCCL would take."""

    seconds: float
    algorithm: str


def all_reduce(network: Network, num_ranks: int, num_bytes: int) -> CollectiveTime:
    """Time of summing `num_bytes` over `num_ranks` ranks, without the launch: the best of ring and tree."""
    return _best(network, num_ranks, num_bytes, _PROTOCOLS, rounds=2)


def all_gather(network: Network, num_ranks: int, num_bytes: int) -> CollectiveTime:
    """Time of gathering `num_bytes` from each rank, without the launch: a ring, the only algorithm NCCL has for it."""
    rings = [protocol for protocol in _PROTOCOLS if not protocol.is_tree]
    return _best(network, num_ranks, num_bytes * num_ranks, rings, rounds=1)


def _best(network: Network, num_ranks: int, num_bytes: int, choice: Sequence[_Protocol], rounds: int) -> CollectiveTime:
    if num_ranks == 1:
        return CollectiveTime(0.0, "none")
    hosts = min(num_ranks, -(-num_ranks // network.gpus_per_host))
    bandwidth = network.inside.bandwidth if hosts == 1 else min(network.inside.bandwidth, network.between.bandwidth)
    found = []
    for protocol in choice:
        inside, between = protocol.hops[network.inside.hardware], protocol.hops[network.between.hardware]
        if protocol.is_tree:
            hops = (num_ranks / hosts - 1) * inside + math.log2(hosts) * between
            moved = 2.0 * num_bytes
        else:
            hops = (num_ranks - hosts) * inside + (hosts - 1) * between
            moved = rounds * num_bytes * (num_ranks - 1) / num_ranks
        seconds = (protocol.base + rounds * hops) * 1e-6 + moved / (bandwidth * protocol.share)
        found.append(CollectiveTime(seconds, protocol.name))
    return min(found, key=lambda each: each.seconds)


GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: int  # bytes that a program can have; data sheets count in powers of ten or two, nvidia-smi shows these
    bandwidth: float  # bytes per second of its memory, by the data sheet
    flops: float  # dense bf16 floating point operations per second, by the data sheet
    link: str  # what usually joins several of them inside a host; a name of LINKS


GPUS = {row["name"]: Gpu(**{**row, "memory": row["memory"] * GIB}) for row in _TABLE["gpu"]}
DEFAULT_GPU = "a100-80gb"  # the machine of the lookahead decoding paper


def parse_size(text: str, flag: str) -> int:
    """Bytes of a size such as 80GiB or 80GB; raises InputError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?))?B\s*", text.upper())
    if match is None or float(match[1]) <= 0:
        raise InputError(f"{flag} {text!r} is no size; write a number and a unit, such as 80GiB or 80GB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " "))


def parse_bandwidth(text: str, flag: str) -> float:
    """Bytes per second of a bandwidth such as 2039GB/s or 3.35TB; raises InputError."""
    return float(parse_size(re.sub(r"(/s|ps)$", "", text.strip(), flags=re.IGNORECASE), flag))


def gpu_named(name: str) -> Gpu:
    """A GPU of the table; raises InputError."""
    if name.lower() not in GPUS:
        raise InputError(f"--gpu {name!r} is none of {', '.join(GPUS)}; or give --gpu-memory and --bandwidth")
    return GPUS[name.lower()]
