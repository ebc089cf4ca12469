"""Projections of the same input merged into one matrix product: Q, K and V, and an MLP's gate and up projection.

Small matrix products leave most of a GPU idle. At load the weights of such projections are made contiguous
(lpr.model.rewrite.merged_loading): the first projection that is called computes all, and the others return their part.
Every module keeps its name, parameters and shape. Tensor-parallel ranks merge their shards. Quantised or hooked
modules, and types other than `nn.Linear`, are not merged.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lpr.model.rewrite.base import Rewrite, Setting, Stage
from lpr.model.rewrite.sharded_layers import ReducedLinear, VocabularyHead, summed
from lpr.model.step_inputs import storage_of

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of projections that a module applies to one input, in the order of their use."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LINEAR = (nn.Linear, ReducedLinear, VocabularyHead)

ROOM = 0.2
"""Share of a GPU's memory that must be free to copy weights for merging, because copies leave holes: 2.5 GiB for 7B, 5
for 13B and 9 to 16 for 34B in a model of torch's allocator."""


class Pack:
    """The weights [sum of outputs, inputs] of a group and, within a forward, their products with its input."""

    sizes: list[int]  # outputs of the members
    dtype: torch.dtype
    bias: torch.Tensor | None
    group: dist.ProcessGroup | None = None  # of the ranks whose products are summed, if the inputs are split
    _input: torch.Tensor | None = None
    _outputs: Sequence[torch.Tensor] = ()

    def __init__(self, members: Sequence[nn.Linear]) -> None:
        """Make each member's parameters views of the pack, which is a copy unless they are contiguous already."""
        self.sizes = [len(each.weight) for each in members]  # not out_features: a shard has fewer
        self.weight = joined([each.weight.data for each in members])
        self.dtype, self.group = self.weight.dtype, group_of(members[0])
        has_bias = members[0].bias is not None
        self.bias = joined([each.bias.data for each in members]) if has_bias else None
        biases = self.bias.split(self.sizes) if self.bias is not None else [None] * len(members)
        for each, weight, bias in zip(members, self.weight.split(self.sizes), biases, strict=True):
            each.weight.data = weight
            if bias is not None:
                each.bias.data = bias

    @property
    def own_bias(self) -> torch.Tensor | None:
        """The bias that `multiply` adds: none if a sum of products gets it."""
        return self.bias if self.group is None else None

    def multiply(self, given: torch.Tensor) -> torch.Tensor:
        """The outputs [..., sum of sizes] for `given` [..., inputs], or this rank's part of their sum."""
        return F.linear(given, self.weight, self.own_bias)

    def whole(self, given: torch.Tensor) -> torch.Tensor:
        """The outputs, summed over ranks if the inputs are split."""
        product = self.multiply(given)
        return product if self.group is None else summed(product, self.group, self.bias)

    def part(self, place: int, given: torch.Tensor) -> torch.Tensor:
        """The output of member `place` for an input [..., inputs]: [..., its outputs]."""
        if self._input is not given:
            self._input = given
            self._outputs = self.whole(given).split(self.sizes, -1)
        part = self._outputs[place]
        if place == len(self.sizes) - 1:  # the last call of a forward frees the products
            self._input, self._outputs = None, ()
        return part


class PackedLinear(nn.Linear):
    """A member of a pack, made from an `nn.Linear`, with its fields."""

    pack: Pack
    place: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) if torch.is_grad_enabled() else self.pack.part(self.place, input)


class MergedLinear(Rewrite):
    """On a GPU, merges projections of one input, if their weights are contiguous or there is room to copy them."""

    name, stage = "merged projections", Stage.FASTER

    def __init__(self, has_room: Callable[[torch.device], bool] | None = None) -> None:
        self._has_room = has_room or has_room_to_pack

    def why_not(self, model: nn.Module, setting: Setting) -> str | None:
        return "on a CPU prepacked products merge them" if setting.device.type == "cpu" else None

    def match(self, model: nn.Module, setting: Setting) -> Iterator[tuple[str, list[Any]]]:
        for name, module in model.named_modules():
            for names in GROUPS:
                members: list[Any] = [getattr(module, each, None) for each in names]
                if fit(members):
                    held = [each.weight.data for each in members]
                    if held[0].is_meta or lie_together(held) or self._has_room(setting.device):
                        yield name, members

    def apply(self, module: nn.Module, found: list[Any]) -> None:
        share(Pack(found), found, PackedLinear)

    def undo(self, module: nn.Module) -> None:
        """As Rewrite.undo; the weights stay contiguous."""
        members: list[Any] = [each for each in module.children() if isinstance(each, PackedLinear)]
        for member in members:
            member.__class__ = nn.Linear if member.pack.group is None else ReducedLinear
            del member.pack, member.place


def lie_together(parts: Sequence[torch.Tensor]) -> bool:
    """True if the parts are contiguous in memory, in order."""
    if len(set(map(storage_of, parts))) > 1 or not all(each.is_contiguous() for each in parts):
        return False
    ends = [each.storage_offset() + each.numel() for each in parts]
    return all(each.storage_offset() == end for each, end in zip(parts[1:], ends[:-1], strict=True))


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts concatenated: a view if they are contiguous, else a copy."""
    if not lie_together(parts):
        return torch.cat(list(parts))
    return parts[0].as_strided((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].stride())


def has_room_to_pack(device: torch.device) -> bool:
    """True while at least the share ROOM of a GPU's memory is free: merging leaves holes."""
    if device.type != "cuda":
        return True
    free, total = torch.cuda.mem_get_info(device)
    return bool(free > ROOM * total)


def inputs_of(module: nn.Module) -> Iterator[list[Any]]:
    """The children of a module that have one input, together (None for those that it lacks), and each child alone."""
    for names in GROUPS:
        yield [getattr(module, each, None) for each in names]
    yield from ([each] for each in module.children())


def share(pack: Pack, members: Sequence[Any], made: type[nn.Linear]) -> None:
    """Make `members` layers of the class `made`, of one pack."""
    for place, member in enumerate(members):
        member.__class__ = made
        member.pack, member.place = pack, place


def group_of(layer: Any) -> dist.ProcessGroup | None:
    """The ranks whose products are summed to the layer's output; None if its inputs are not split."""
    if isinstance(layer, ReducedLinear):
        return layer.group
    pack = getattr(layer, "pack", None)
    return pack.group if isinstance(pack, Pack) else None


def fit(members: Sequence[Any]) -> bool:
    """True for plain layers, or parts of such ones, whose weights may be merged."""
    if not all(type(each) in LINEAR and is_plain(each) and each.weight.dtype in DTYPES for each in members):
        return False
    kinds = {
        (type(each), each.weight.shape[1], each.weight.dtype, each.weight.device, each.bias is None) for each in members
    }
    return len(kinds) == 1 and len({id(each.weight) for each in members}) == len(members)


def is_plain(module: nn.Module) -> bool:
    """True for a module without hooks, and with tensors of torch's own as parameters."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    held = [each for each in module._parameters.values() if each is not None]
    is_own = "forward" not in vars(module) and not parametrize.is_parametrized(module)
    return is_own and not any(hooks) and not any(map(is_traceable_wrapper_subclass, held))
