"""Estimates of GPU memory: one sum for the start of an engine and for `lpr.plan`.

Memory used before the K/V cache is sized, and memory that steps need beside it. *Estimated* values were not measured.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from lpr.model.graph_inputs import NODE_BUCKETS, PACKED_BUCKETS, bucket_of, node_buckets, power_of_two
from lpr.model.graphs import MAX_GRAPHS, MOST_COMMON, PENDING
from lpr.model.rewrite.merged_loading import IN_FLIGHT

CONTEXT = 640 << 20
"""Bytes of the CUDA context and the kernels of torch's libraries, outside torch's allocator. Estimated."""
COMMUNICATOR = 24 * 3 * ((512 << 10) + (4800 << 10) + (4 << 20))
"""Bytes of NCCL, per mesh axis: 24 channels, a ring's connection and two of a tree, each with buffers for its
protocols LL, LL128 and Simple (NCCL 2.x, src/include/device.h, NCCL_BUFFSIZE). Estimated; NVLS may take as much."""
GRAPH_BYTES = 8 << 20  # bytes of a captured graph: its nodes and their arguments. Estimated.
WORKSPACES = 512 << 20  # bytes of cuBLAS for each stream, Triton, and lazily loaded kernels. Estimated.
PARTIAL_SUMS = 8  # most float32 copies of attention's output that split-KV writes
FLOAT_COPIES = 3  # float32 copies of all logits where no kernel chooses tokens


@dataclass(frozen=True, kw_only=True)
class RankSizes:
    """Sizes of one rank's part of a model that determine the memory of steps."""

    hidden: int
    widest: int  # most outputs of a projection in a layer
    vocab: int
    element: int  # bytes of a value
    weights: int  # bytes of all weights
    largest: int  # bytes of the largest weight in a layer


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The sizes of the steps that memory is reserved for."""

    batch: int
    num_ahead: int  # nodes of a tree
    prompt: int  # tokens of the longest piece of a prompt
    num_graphs: int = MOST_COMMON  # captured graphs; 0: steps are launched kernel by kernel
    mask_rows: int = 0  # columns of a dense mask; 0: attention reads ancestors as bits
    by_kernel: bool = True  # True if kernels choose tokens, without a copy of the logits
    packed: bool = False  # True if graphs are of packed steps, pieces of prompts among them
    num_followed: int = 0  # guesses of each sequence that a prediction head follows at a depth; 0: there is no head
    num_passed: int = 0  # results of the largest pass of a low-bit copy; 0: no pass has a graph

    @property
    def num_results(self) -> int:
        """Results of the largest decoding step, padded as its graph is."""
        if not self.packed:
            return self.num_entries
        return bucket_of(self.batch * self.num_ahead, PACKED_BUCKETS)

    @property
    def num_entries(self) -> int:
        """Entries of the largest graph, or decoding step."""
        if self.packed:
            return max(self.num_results, PACKED_BUCKETS[-1])
        if self.num_ahead == 1:
            return self.batch
        longest = min(bucket_of(self.num_ahead + PENDING, NODE_BUCKETS), NODE_BUCKETS[-1])
        return self.batch * max(self.num_ahead, bucket_of(longest, node_buckets(self.batch, 1)))


@dataclass(frozen=True, kw_only=True)
class MemoryNeeds:
    """Bytes of one GPU, except for the K/V cache."""

    context: int
    weights: int
    loading: int  # temporary memory of loading: weights of `IN_FLIGHT` layers, which leave holes afterwards
    nccl: int
    layers: int  # activations of a step and of a prompt chunk
    logits: int
    graphs: int
    workspaces: int

    @property
    def before(self) -> int:
        """Bytes used before the cache is sized."""
        return self.context + self.weights + self.loading + self.nccl

    @property
    def steps(self) -> int:
        """Bytes that steps need beside the cache: the reserve."""
        return self.layers + self.logits + self.graphs + self.workspaces

    @property
    def total(self) -> int:
        return self.before + self.steps

    def tell(self) -> str:
        """The parts in GiB, as one line."""
        return ", ".join(f"{each.name} {getattr(self, each.name) / 2**30:.2f}" for each in fields(self))


def memory_needs(sizes: RankSizes, steps: Steps, num_axes: int = 0) -> MemoryNeeds:
    """The sum, with communicators of `num_axes` axes of the mesh.

    Logits are held twice in the model's dtype: by a graph, and for sampling outside of it; those of a head's guesses
    and of a copy's passes once, and twice in float32. Graphs of both are captured behind those of the start. A layer's
    input, projections and partial sums of attention exist for one layer at a time. Graphs share one pool, of the size
    that the largest needs; a prompt chunk does not use it.
    """

    def layer(num_entries: int) -> int:
        row = (4 * sizes.hidden + 3 * sizes.widest + steps.mask_rows) * sizes.element
        return num_entries * (row + sizes.hidden * PARTIAL_SUMS * 4)

    copies = 2 * sizes.element + (0 if steps.by_kernel else FLOAT_COPIES * 4)
    guessed = max(power_of_two(steps.batch) * steps.num_followed, steps.num_passed)
    num_graphs = steps.num_graphs + (MAX_GRAPHS - MOST_COMMON if steps.num_graphs and guessed else 0)
    return MemoryNeeds(
        context=CONTEXT,
        weights=sizes.weights,
        loading=IN_FLIGHT * sizes.largest,
        nccl=num_axes * COMMUNICATOR,
        layers=layer(steps.num_entries) + layer(steps.prompt),
        logits=((steps.num_results + steps.batch) * copies + guessed * (sizes.element + 2 * 4)) * sizes.vocab,
        graphs=num_graphs * GRAPH_BYTES,
        workspaces=WORKSPACES,
    )


def sizes_of(model: Any) -> RankSizes:
    """The sizes of a model that is loaded, with this rank's part of it."""
    config = model.config.get_text_config(decoder=True)
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    at_ends = {id(each.weight) for each in ends if each is not None}
    held = list(model.parameters())
    layers = [each for each in held if each.dim() == 2 and id(each) not in at_ends]
    return RankSizes(
        hidden=int(config.hidden_size),
        widest=max((len(each) for each in layers), default=int(config.hidden_size)),
        vocab=int(config.vocab_size),
        element=max(each.element_size() for each in held if each.dim() == 2),
        weights=sum(each.numel() * each.element_size() for each in held),
        largest=max((each.numel() * each.element_size() for each in layers), default=0),
    )


def free_bytes(device: torch.device) -> int | None:
    """Free bytes of `device`, or None where they are unknown (a CPU without /proc).

    torch's cached memory between live tensors does not count, because no large tensor fits there.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not meminfo.exists():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
