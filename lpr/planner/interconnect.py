"""An alpha-beta model of NCCL's collectives: the one by which NCCL picks its algorithms.

Latencies and efficiencies are those of NCCL 2.8's tuning table (src/graph/tuning.cc, for A100 and NVLink): per
algorithm (ring, tree) and protocol (LL, LL128, Simple) a base latency, a latency per hop for NVLink, PCI and network,
and the reached share of the bus bandwidth. Small messages take LL, large ones Simple. Inside a host NCCL's tree is a
chain, so its hops count like a ring's; between hosts it is binary. The launch of a collective is not included
(lpr.planner.prediction).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MICRO = 1e-6


@dataclass(frozen=True)
class Link:
    """A link between GPUs, inside a host or between hosts."""

    name: str
    hardware: int
    """Column of the latency table: 0 NVLink, 1 PCI, 2 network."""
    bandwidth: float
    """Bytes per second that one GPU can send while it receives as much."""


LINKS = {
    link.name: link
    for link in (
        # A100: 12 NVLinks of 25 GB/s each way (data sheet: 600 GB/s both ways); NCCL counts on 235 of these 300.
        Link("nvlink-a100", 0, 235e9),
        # H100: 18 links, 450 GB/s each way (data sheet: 900 both ways); the same share of it as on the A100.
        Link("nvlink-h100", 0, 352e9),
        # B200: 900 GB/s each way (data sheet: 1.8 TB/s both ways); the same share of it.
        Link("nvlink-b200", 0, 705e9),
        # Sixteen lanes: 16 GT/s with 128b/130b make 31.5 GB/s each way (PCIe 4.0), 63 GB/s (PCIe 5.0); about 80 % is
        # left after packet headers.
        Link("pcie4", 1, 25e9),
        Link("pcie5", 1, 50e9),
        # One adapter per GPU: 200 Gbit/s (HDR) and 400 Gbit/s (NDR), 25 and 50 GB/s; about 90 % of it for payload.
        Link("ib-hdr", 2, 22e9),
        Link("ib-ndr", 2, 45e9),
    )
}


@dataclass(frozen=True)
class _Protocol:
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
    """The links of a job's machines."""

    inside: Link
    between: Link
    gpus_per_host: int = 8

    def hosts(self, num_ranks: int) -> int:
        """Hosts of `num_ranks` ranks."""
        return -(-num_ranks // self.gpus_per_host)


@dataclass(frozen=True)
class CollectiveTime:
    """Seconds of one collective, and the algorithm that NCCL would take."""

    seconds: float
    algorithm: str


def all_reduce(network: Network, num_ranks: int, num_bytes: int) -> CollectiveTime:
    """Time of summing `num_bytes` over `num_ranks` ranks, without the launch: the best of ring and tree."""
    return _best(network, num_ranks, num_bytes, is_reduce=True)


def all_gather(network: Network, num_ranks: int, num_bytes: int) -> CollectiveTime:
    """Time of gathering `num_bytes` from each rank, without the launch: a ring, the only algorithm NCCL has for it."""
    return _best(network, num_ranks, num_bytes * num_ranks, is_reduce=False)


def _best(network: Network, num_ranks: int, num_bytes: int, is_reduce: bool) -> CollectiveTime:
    if num_ranks == 1:
        return CollectiveTime(0.0, "none")
    hosts = min(num_ranks, network.hosts(num_ranks))
    rounds = 2 if is_reduce else 1
    found = []
    for protocol in _PROTOCOLS:
        if protocol.is_tree and not is_reduce:
            continue
        inside, between = protocol.hops[network.inside.hardware], protocol.hops[network.between.hardware]
        bandwidth = network.inside.bandwidth if hosts == 1 else min(network.inside.bandwidth, network.between.bandwidth)
        if protocol.is_tree:
            hops = (num_ranks / hosts - 1) * inside + math.log2(hosts) * between
            moved = 2.0 * num_bytes
        else:
            hops = (num_ranks - hosts) * inside + (hosts - 1) * between
            moved = rounds * num_bytes * (num_ranks - 1) / num_ranks
        seconds = (protocol.base + rounds * hops) * MICRO + moved / (bandwidth * protocol.share)
        found.append(CollectiveTime(seconds, protocol.name))
    return min(found, key=lambda each: each.seconds)
