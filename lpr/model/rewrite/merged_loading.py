"""Makes the weights of projections of one input contiguous on a GPU while a checkpoint is read.

Merging them after the load takes memory for each group, and leaves holes that do not fit the next group: 34B did not
load on 80 GB. Here the memory of all layers is allocated when the first weight arrives. Each weight is copied to its
place, and its read buffer is reused by the next one, so besides the weights only `IN_FLIGHT` buffers are in use.
`merged_linear` then finds contiguous weights and copies nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lpr.model.rewrite.merged_linear import DTYPES, GROUPS
from lpr.model.rewrite.sharded_layers import local

IN_FLIGHT = 6
"""Weights on the device besides their copies: transformers reads with four threads, hands one over, one may wait."""


@contextmanager
def laid_side_by_side(device: torch.device) -> Iterator[None]:
    """Context: models created within get contiguous weights when they are read to `device`.

    torch's hooks report every registered module and parameter; transformers first creates modules without memory, and
    then registers each weight as it arrives.
    """
    layout = Layout(device)
    hooks = (
        register_module_module_registration_hook(layout.note),
        register_module_parameter_registration_hook(layout.place),  # type: ignore[arg-type]  # it may return another
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Layout:
    """The memory of the linear layers of models that are being read.

    All of it is allocated when the first weight arrives, so that no allocation comes from the holes of read buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._parents: dict[nn.Module, None] = {}
        self._places: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()

    def note(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if any(name == names[-1] for names in GROUPS):
            self._parents[parent] = None

    def place(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """Called when a module registers a parameter; returns it copied to its place, if that is allocated."""
        if parameter is None or type(module) is not nn.Linear or parameter.device.type != self.device.type:
            return None
        if self.device.index not in (None, parameter.device.index):
            return None
        for members in [each for parent in self._parents for each in _members(parent)]:
            self._take(members)
        self._parents.clear()
        mine, place = local(parameter.data), self._places.get(module, {}).pop(name, None)
        if place is None or (place.shape, place.dtype) != (mine.shape, mine.dtype):
            return None
        made = nn.Parameter(_like(place.copy_(mine), parameter.data), parameter.requires_grad)
        vars(made).update(vars(parameter))  # transformers' note that it has a value
        return made

    def _take(self, members: Sequence[nn.Linear]) -> None:
        """Allocate the memory of layers whose weights have not arrived."""
        for name in ("weight", "bias"):
            held: list[Any] = [getattr(each, name) for each in members]
            if any(each is None or not each.is_meta for each in held):
                continue
            parts = [local(each.data) for each in held]
            kinds = {(each.shape[1:], each.dtype) for each in parts}
            if len(kinds) > 1 or parts[0].dtype not in DTYPES or any(map(is_traceable_wrapper_subclass, parts)):
                continue
            sizes = [len(each) for each in parts]
            whole = torch.empty(sum(sizes), *parts[0].shape[1:], dtype=parts[0].dtype, device=self.device)
            for member, place in zip(members, whole.split(sizes), strict=True):
                self._places.setdefault(member, {})[name] = place


def _members(parent: nn.Module) -> list[list[nn.Linear]]:
    """The linear layers of a module, group by group; the others alone."""
    layers = {name: child for name, child in parent.named_children() if type(child) is nn.Linear}
    found = [[layers.pop(name) for name in names] for names in GROUPS if all(name in layers for name in names)]
    return found + [[layer] for layer in layers.values()]


def _like(part: Tensor, given: Tensor) -> Tensor:
    """`part` as `given` holds it, which may be split over ranks."""
    if not isinstance(given, DTensor):
        return part
    where = given.device_mesh, given.placements
    return DTensor.from_local(part, *where, run_check=False, shape=given.shape, stride=given.stride())
