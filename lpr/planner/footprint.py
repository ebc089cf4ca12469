"""Memory and traffic of a model on an lp x tp mesh: arithmetic over ModelFacts, without a clock or a device.

Weights, K/V and payload are exact: they follow from the shapes of the loader, the KV cache and Exchange. The other
memory of a GPU is computed as in the engine (lpr.model.reserve).
"""

import math
from dataclasses import dataclass

from lpr.config import PAGE_SIZE, DecodeConfig, InputError
from lpr.core.wire import payload_words
from lpr.engine.kv_pool import GPU_SHARE, usable_tokens
from lpr.model.graphs import MOST_COMMON
from lpr.model.input_builder import round_up
from lpr.model.low_bit.products import Form
from lpr.model.recurrent.split_heads import refusal
from lpr.model.reserve import MemoryNeeds, RankSizes, Steps, memory_needs
from lpr.planner.facts import ModelFacts, Weights
from lpr.sched.state_snapshots import SNAPSHOTS_PER_SLOT

KV_BUCKET = 256  # padding of a sequence's entries on a GPU, as in TreeModel


@dataclass(frozen=True)
class Mesh:
    """`lp` replicas of the model, each split over `tp` GPUs."""

    lp: int
    tp: int

    @property
    def num_gpus(self) -> int:
        return self.lp * self.tp

    def __str__(self) -> str:
        return f"{self.lp} x {self.tp}"


@dataclass(frozen=True)
class Traffic:
    """Collectives of one step along one axis of the mesh."""

    num_collectives: int
    payload_bytes: int
    """Bytes that a rank contributes, over all of them: before an algorithm's factor for sending them on."""


@dataclass(frozen=True)
class Footprint:
    """Memory and traffic of one GPU of a mesh."""

    mesh: Mesh
    problem: str | None  # the reason why the model cannot be split this way; the other fields are then 0
    needs: MemoryNeeds | None = None  # what the memory holds besides K/V and states
    kv_bytes: int = 0  # K/V and states of the requests that must run at once, each with a full context
    kv_token_bytes: int = 0  # K/V of one token
    state_bytes: int = 0  # states of recurrent layers with their snapshots, a part of `kv_bytes`
    step_bytes: int = 0  # least bytes that a step reads: the weights it uses and the K/V of a full context
    lp: Traffic = Traffic(0, 0)
    tp: Traffic = Traffic(0, 0)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on the fullest rank of a replica."""
        return self.needs.weights if self.needs is not None else 0

    @property
    def activation_bytes(self) -> int:
        return self.needs.layers + self.needs.logits if self.needs is not None else 0

    @property
    def total_bytes(self) -> int:
        return self.kv_bytes + (self.needs.total if self.needs is not None else 0)

    def fits(self, memory: int) -> bool:
        """True if a GPU with `memory` bytes can hold it."""
        return self.problem is None and self.total_bytes <= memory

    def pool_tokens(self, memory: int) -> int:
        """Tokens in the engine's KV cache on a GPU with `memory` bytes."""
        if self.needs is None or (free := memory - self.needs.before - self.state_bytes) <= 0:
            return 0
        return int(GPU_SHARE * usable_tokens(free, self.kv_token_bytes, self.needs.steps)) // PAGE_SIZE * PAGE_SIZE

    def left_bytes(self, memory: int) -> int:
        """Free bytes of a GPU with `memory` bytes after the KV cache is allocated; negative if it does not fit."""
        pool = self.pool_tokens(memory) * self.kv_token_bytes + self.state_bytes
        return memory - pool - (self.needs.total if self.needs is not None else 0)


def meshes(num_gpus: int) -> list[Mesh]:
    """Every lp x tp = `num_gpus`, by ascending tp; raises InputError."""
    if num_gpus < 1:
        raise InputError(f"--gpus {num_gpus} must be at least 1")
    return [Mesh(num_gpus // tp, tp) for tp in range(1, num_gpus + 1) if num_gpus % tp == 0]


def split_problem(facts: ModelFacts, tp: int) -> str | None:
    """The reason why the transformers backend cannot split the model over `tp` ranks, or None."""
    if tp == 1:
        return None
    if not facts.has_plan:
        return f"transformers has no tensor-parallel plan for {facts.model_type}"
    if (why := refusal(facts.recurrent, tp)) is not None:
        return why
    if facts.splits_queries and facts.num_heads % tp:
        return f"{tp} does not divide {facts.num_heads} attention heads"
    kv = facts.num_kv_heads
    if facts.splits_kv and kv % tp:
        if facts.fused_heads:
            return f"{tp} does not divide {kv} key/value heads, which one matrix holds with the queries"
        if tp % kv:
            return f"{tp} neither divides {kv} key/value heads nor is a multiple of them"
    return None


def shard_shape(weights: Weights, facts: ModelFacts, tp: int) -> tuple[int, ...]:
    """Shape of the largest shard of one tensor: that of rank 0, as the last rank's may be shorter."""
    shape, style = list(weights.shape), weights.style
    if weights.cut is not None:
        shape[weights.cut.axis] = weights.cut.size(tp)
        return tuple(shape)
    if tp == 1 or style in _WHOLE:
        return weights.shape
    if style in ("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise"):
        axis = max(0, len(shape) - 2)
    elif style in ("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise"):
        if len(shape) == 1 and (weights.name.endswith("bias") or style == "packed_rowwise"):
            return weights.shape  # added after the sum, by every rank
        axis = len(shape) - 1
    elif style in ("embedding_rowwise", "embedding_colwise"):
        axis = 0 if style == "embedding_rowwise" else 1
    else:
        what = f"splits {weights.name} by {style!r}, unknown here"
        raise InputError(f"the tensor-parallel plan of {facts.model_type} {what}")
    parts = tp
    if weights.name.rpartition(".")[0].endswith(("k_proj", "v_proj")) and facts.splits_kv:
        parts = min(tp, facts.num_kv_heads)  # fewer heads than ranks: several ranks hold the same one
    groups = 2 if style.startswith("packed") else 1
    shape[axis] = groups * -(-(shape[axis] // groups) // parts)
    return tuple(shape)


_WHOLE = (
    None, "replicate", "replicated_with_grad_allreduce", "sequence_parallel", "mla_kv_a_proj", "moe_tp_experts",
    "moe_identity_expert", "all_reduce", "local_params",
)  # fmt: skip


def _shard_bytes(weights: Weights, facts: ModelFacts, tp: int, element_size: int) -> int:
    return weights.count * weights.num_bytes(shard_shape(weights, facts, tp), element_size)


def weight_bytes(facts: ModelFacts, tp: int, element_size: int) -> int:
    """Bytes of weights on the fullest rank of a replica."""
    return sum(_shard_bytes(weights, facts, tp, element_size) for weights in facts.weights)


def copy_bytes(facts: ModelFacts, form: Form) -> int:
    """Bytes of a low-bit copy that a pass reads: linear layers and output head, without experts."""
    total = 0.0
    for weights in facts.weights:
        if len(weights.shape) == 2 and not weights.is_lookup and not weights.is_expert:
            is_fine = form == "int4" and facts.vocab_size not in weights.shape
            total += weights.count * weights.shape[0] * (weights.shape[1] * 0.625 if is_fine else weights.shape[1] + 4)
    return int(total)


def kv_token_bytes(facts: ModelFacts, tp: int, element_size: int) -> int:
    """Bytes of K and V of one token in all layers, on one rank."""
    parts = tp if facts.splits_kv else 1
    heads = ((each.count * max(1, each.num_heads // parts), each.key_dim + each.value_dim) for each in facts.kept)
    return (1 if facts.kv_in_fp8 else element_size) * sum(count * size for count, size in heads)


def kv_entries(decode: DecodeConfig, lp: int, max_length: int) -> int:
    """Entries of one slot of the KV cache, padded as TreeModel.allocate pads them."""
    return round_up(max_length + decode.resolved(lp).evaluated_capacity(lp) + 1, KV_BUCKET)


def requests_at_once(pool_tokens: int, length: int, num_shared: int, num_ahead: int) -> int:
    """Requests of `length` tokens that run at once in a pool if all begin with the same `num_shared` tokens.

    Each has pages of its own for the rest and a tree of `num_ahead` nodes; full pages of what they share exist once.
    """
    shared = min(num_shared, length) // PAGE_SIZE
    own = -(-(length + num_ahead) // PAGE_SIZE) - shared
    return max(0, pool_tokens // PAGE_SIZE - shared) // own


def payload_bytes(decode: DecodeConfig, lp: int) -> int:
    return 4 * payload_words(decode.resolved(lp), decode.max_batch_size, lp, decode.carries_trees(lp))


def read_bytes(facts: ModelFacts, tp: int, element_size: int, num_tokens: int) -> int:
    """Bytes of weights that a forward over `num_tokens` tokens reads on one rank, without lookup tables.

    Only experts with tokens are counted: with independent, uniform routing the share 1 - (1 - k/E)^tokens.
    """
    total = 0.0
    for weights in facts.weights:
        if weights.is_lookup:
            continue
        unused = 0.0
        if weights.is_expert and facts.num_experts and facts.experts_per_token:
            unused = (1 - facts.experts_per_token / facts.num_experts) ** num_tokens
        total += (1 - unused) * _shard_bytes(weights, facts, tp, element_size)
    return int(total)


def forward_flops(facts: ModelFacts, tp: int, num_tokens: int, num_kv: int) -> float:
    """Floating point operations of a forward on one rank: 2 per weight and token, attention, and scans over a tree."""
    used = 0.0
    for weights in facts.weights:
        if weights.is_lookup or len(weights.shape) < 2:
            continue
        share = facts.experts_per_token / facts.num_experts if weights.is_expert and facts.num_experts else 1.0
        used += share * weights.count * math.prod(shard_shape(weights, facts, tp))
    heads = facts.num_heads / tp if facts.splits_queries else facts.num_heads
    attention = 0.0
    for kept in facts.kept:
        attention += kept.count * (kept.key_dim + kept.value_dim) * (heads if kept.value_dim else facts.indexer_heads)
    return 2.0 * num_tokens * (used + attention * num_kv) + sum(each.on(tp).flops(num_tokens) for each in facts.states)


def rank_sizes(facts: ModelFacts, tp: int, element_size: int) -> RankSizes:
    """The sizes of a rank's part of the model that determine the memory of steps."""
    layers = [
        shard_shape(weights, facts, tp) for weights in facts.weights
        if len(weights.shape) == 2 and not weights.is_lookup and facts.vocab_size not in weights.shape
    ]  # fmt: skip
    return RankSizes(
        hidden=facts.hidden_size,
        widest=max((shape[0] for shape in layers), default=facts.hidden_size),
        vocab=facts.vocab_size,
        element=element_size,
        weights=weight_bytes(facts, tp, element_size),
        largest=max((element_size * math.prod(shape) for shape in layers), default=0),
    )


def tp_traffic(facts: ModelFacts, num_tokens: int, num_results: int, element_size: int, tp: int) -> Traffic:
    """The collectives of one step along tp: those of the model's own plan, and the exchange of choices at the head."""
    sizes = (each.count * each.num_bytes(num_tokens, num_results, element_size, tp) for each in facts.collectives)
    return Traffic(sum(each.count for each in facts.collectives), sum(sizes))


def footprint(
    facts: ModelFacts,
    decode: DecodeConfig,
    mesh: Mesh,
    max_length: int,
    element_size: int,
    num_full: int | None = None,
    num_graphs: int = MOST_COMMON,
) -> Footprint:
    """The footprint on `mesh` with `decode` (budgets per rank) and contexts of up to `max_length` tokens.

    The KV cache holds `num_full` contexts of that length; default: the whole batch's. Steps are `num_graphs` captured
    graphs.
    """
    problem = split_problem(facts, mesh.tp)
    if problem is not None:
        return Footprint(mesh, problem)
    batch = decode.max_batch_size
    tokens = batch * decode.resolved().num_nodes
    token_bytes, states = kv_token_bytes(facts, mesh.tp, element_size), batch * facts.state_bytes(element_size, mesh.tp)
    places = (1 + SNAPSHOTS_PER_SLOT) * states
    num_ahead = decode.resolved(mesh.lp).evaluated_capacity(mesh.lp)
    prompt = min(decode.prefill_chunk, max_length)
    steps = Steps(batch=batch, num_ahead=num_ahead, prompt=prompt, num_graphs=num_graphs)
    return Footprint(
        mesh=mesh,
        problem=None,
        needs=memory_needs(rank_sizes(facts, mesh.tp, element_size), steps, (mesh.lp > 1) + (mesh.tp > 1)),
        # One entry is spare, for padding.
        kv_bytes=((num_full or batch) * kv_entries(decode, mesh.lp, max_length) + 1) * token_bytes + places,
        kv_token_bytes=token_bytes,
        state_bytes=places,
        step_bytes=read_bytes(facts, mesh.tp, element_size, tokens) + batch * max_length * token_bytes + states,
        lp=Traffic(1, payload_bytes(decode, mesh.lp)) if mesh.lp > 1 else Traffic(0, 0),
        tp=tp_traffic(facts, tokens, tokens, element_size, mesh.tp) if mesh.tp > 1 else Traffic(0, 0),
    )


# Kernels and collectives that a compiled step launches, by the counts of tests/fakes/kernel_counts.py.
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
