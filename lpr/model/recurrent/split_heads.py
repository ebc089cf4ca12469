"""A tensor-parallel plan for gated delta nets and Mamba 2, which transformers replicates.

Each rank has some of the heads: their rows of every projection, their channels of the convolution, their states. The
output projection is all-reduced. A Mamba 2 layer shares B and C among the heads of a group; with fewer groups than
ranks, several ranks share a group, and its norm's variance is summed over them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lpr.model.rewrite.sharded_layers import generic_name, local

Parts = tuple[tuple[int, int], ...]
"""(size, number of units) of each part along an axis; a rank has the same share of every part."""


@dataclass(frozen=True)
class Cut:
    """A tensor that is read whole and then sliced along `axis`, because a rank's share is not one range."""

    axis: int
    parts: Parts

    def size(self, tp: int) -> int:
        return share(self.parts, tp)

    def places(self, rank: int, tp: int) -> Tensor:
        """The entries of a rank, int64."""
        found, start = [], 0
        for size, units in self.parts:
            first = start + rank * units // tp * (size // units)
            found.append(torch.arange(first, first + share(((size, units),), tp)))
            start += size
        return torch.cat(found)


def share(parts: Parts, tp: int) -> int:
    """The size of a rank's share; with fewer units than ranks, several ranks have the same unit."""
    return sum(size // units * max(1, units // tp) for size, units in parts)


@dataclass(frozen=True)
class SplitLayer:
    units: int  # number of heads to divide; in a delta net the key heads, each with its value heads
    groups: int  # groups of heads that share B and C; 0 without any
    heads: Parts  # parts of the scan's states
    channels: Parts  # parts of the convolution's states
    sizes: Mapping[str, Parts]  # by name, the layer's size attributes that become those of a rank
    styles: Mapping[str, str]  # by name in the layer, the style of transformers' plan
    has_other_norm: bool = False  # True if its gated norm is not Mamba 2's, the only one that supports a shared group
    cuts: Mapping[str, Cut] = field(default_factory=dict)  # by name in the layer, the cuts of parameters and buffers


def split_layers(model: nn.Module) -> dict[str, SplitLayer]:
    """By name, the recurrent layers of `model` that can be split by heads, with the split."""
    found = {name: _delta(each) or _mamba2(each) for name, each in model.named_modules()}
    return {name: each for name, each in found.items() if each is not None}


def _split(layer: Any, named: Mapping[str, Parts], output: str, **how: Any) -> SplitLayer:
    """The split of a layer whose projections and parameters `named` have these parts, by ranges or by cuts."""
    styles, cuts = {output: "rowwise"}, dict[str, Cut]()
    for owner, parts in named.items():
        total = sum(size for size, _ in parts)
        tensors = {
            name: each
            for name, each in [*layer.named_parameters(), *layer.named_buffers()]
            if name in (owner, f"{owner}.weight", f"{owner}.bias")
        }
        is_range = len(parts) == 1 and any(each.dim() == 2 for each in tensors.values())
        if is_range:
            styles[owner] = "colwise"
            continue
        if any(each.dim() == 2 for each in tensors.values()):
            styles[owner] = "replicate"
        cuts |= {name: Cut(list(each.shape).index(total), parts) for name, each in tensors.items()}
    return SplitLayer(styles=styles, cuts=cuts, channels=named["conv1d"], **how)


def _has(layer: Any, *names: str) -> bool:
    return all(hasattr(layer, name) for name in names)


def _delta(layer: Any) -> SplitLayer | None:
    """Qwen 3 Next, Qwen 3.5 and related models, and OLMo hybrid."""
    if not _has(layer, "num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv1d", "A_log"):
        return None
    units = layer.num_k_heads
    key, value, head = (layer.key_dim, units), (layer.value_dim, units), (layer.num_v_heads, units)
    mixed = 2 * (layer.key_dim + layer.value_dim), units  # the queries, keys, values and gates of one head of keys
    parts: dict[str, Parts] = {
        "conv1d": (key, key, value), "in_proj_qkv": (key, key, value), "in_proj_qkvz": (mixed,),
        "in_proj_ba": ((2 * layer.num_v_heads, units),), "q_proj": (key,), "k_proj": (key,),
    }  # fmt: skip
    parts |= dict.fromkeys(("in_proj_z", "v_proj", "g_proj"), (value,))
    parts |= dict.fromkeys(("in_proj_a", "in_proj_b", "a_proj", "b_proj", "A_log", "dt_bias"), (head,))
    sizes: dict[str, Parts] = {"num_k_heads": ((units, units),), "num_v_heads": (head,)}
    sizes |= {"key_dim": (key,), "value_dim": (value,), "conv_dim": (key, key, value)}
    output = "out_proj" if hasattr(layer, "out_proj") else "o_proj"
    return _split(layer, parts, output, units=units, groups=0, heads=(head,), sizes=sizes)


def _mamba2(layer: Any) -> SplitLayer | None:
    if not _has(layer, "in_proj", "n_groups", "num_heads", "intermediate_size", "ssm_state_size", "conv1d", "dt_bias"):
        return None
    units, groups = layer.num_heads, layer.n_groups
    inner, group, head = (layer.intermediate_size, units), (groups * layer.ssm_state_size, groups), (units, units)
    channels: Parts = (inner, group, group)
    parts: dict[str, Parts] = {"in_proj": (inner, *channels, head), "conv1d": channels, "norm": (inner,)}
    parts |= dict.fromkeys(("A_log", "D", "dt_bias"), (head,)) | {"mup_vector": parts["in_proj"]}
    sizes: dict[str, Parts] = {"num_heads": (head,), "intermediate_size": (inner,), "conv_dim": channels}
    sizes |= {"n_groups": ((groups, groups),), "norm.n_groups": ((groups, groups),)}
    norm = getattr(layer, "norm", None)
    is_other = hasattr(norm, "weight") and not hasattr(norm, "group_size")
    how = {"units": units, "groups": groups, "has_other_norm": is_other}
    return _split(layer, parts, "out_proj", heads=(head,), sizes=sizes, **how)


def own_plan(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Generic names and styles that differ from the `plan` of transformers."""
    layers = split_layers(model)
    found = {
        generic_name(f"{name}.{each}"): style for name, layer in layers.items() for each, style in layer.styles.items()
    }
    if any(layer.groups for layer in layers.values()):  # the plans of these families have only the ends and experts
        found |= {name: style for name, style in _others(model) if name not in plan}
    return found


def _others(model: nn.Module) -> Iterable[tuple[str, str]]:
    """Plain attention and plain feed-forward layers; a packed one is cut."""
    for name, module in model.named_modules():
        children = {each for each, child in module.named_children() if type(child) is nn.Linear}
        own = generic_name(name)
        if children == {"q_proj", "k_proj", "v_proj", "o_proj"} == set(dict(module.named_children())):
            yield from [(f"{own}.{each}_proj", "rowwise" if each == "o" else "colwise") for each in "qkvo"]
        elif children in ({"up_proj", "down_proj"}, {"gate_proj", "up_proj", "down_proj"}):
            yield from [(f"{own}.{each}", "rowwise" if each == "down_proj" else "colwise") for each in sorted(children)]


def refusal(layers: Iterable[SplitLayer], tp: int) -> str | None:
    """The reason why recurrent layers cannot be split over `tp` ranks, or None."""
    for layer in layers:
        if layer.units % tp:
            return f"{tp} does not divide the {layer.units} heads of its recurrent layers"
        if layer.groups and layer.groups % tp and tp % layer.groups:
            return f"{tp} neither divides the {layer.groups} groups of its recurrent heads nor is a multiple of them"
        if layer.groups < tp and layer.has_other_norm:
            return f"{tp} exceeds the {layer.groups} groups of its recurrent layers, whose norm is their own"
    return None


class SharedGroupNorm(nn.Module):
    """The gated norm of Mamba 2 where ranks share a group: takes a rank's channels [..., C]."""

    group: dist.ProcessGroup
    weight: Tensor
    variance_epsilon: float
    group_size: int
    place: tuple[int, int]  # this rank's group, and the number of groups

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        dtype, hidden = hidden_states.dtype, hidden_states.float()
        if gate is not None:
            hidden = hidden * F.silu(gate.float())
        mine, count = self.place
        squares = F.pad(hidden.pow(2).sum(-1, keepdim=True), (mine, count - 1 - mine))
        dist.all_reduce(squares, group=self.group)
        hidden = hidden * torch.rsqrt(squares[..., mine : mine + 1] / self.group_size + self.variance_epsilon)
        return self.weight * hidden.to(dtype)


def cut_layers(model: nn.Module, group: dist.ProcessGroup, rank: int, tp: int) -> None:
    """Slice the tensors that every rank has read whole, after the styles of `own_plan` are applied."""
    for name, split in split_layers(model).items():
        layer: Any = model.get_submodule(name)
        for key, cut in split.cuts.items():
            path, _, leaf = key.rpartition(".")
            owner: Any = layer.get_submodule(path)
            whole = local(getattr(owner, leaf).detach())
            mine = whole.index_select(cut.axis, cut.places(rank, tp).to(whole.device))
            is_parameter = leaf in owner._parameters
            setattr(owner, leaf, nn.Parameter(mine, requires_grad=False) if is_parameter else mine)
            if isinstance(owner, nn.Linear):
                owner.split_outputs = cut  # type: ignore[assignment]  # for adapters
        for key, parts in split.sizes.items():
            path, _, leaf = key.rpartition(".")
            owner = layer
            for each in path.split(".") if path else ():
                owner = getattr(owner, each, None)
            if hasattr(owner, leaf):
                setattr(owner, leaf, share(parts, tp))
        if split.groups and split.groups < tp and hasattr(getattr(layer, "norm", None), "group_size"):
            layer.norm.__class__, layer.norm.group = SharedGroupNorm, group
            layer.norm.place = rank * split.groups // tp, split.groups
