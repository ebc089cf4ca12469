"""Replaces the parts of a model that are known, from whole layers down to single norms."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from lpr.model.cpu.products import prepack
from lpr.model.fused.decoder_layer import DecoderLayer, join_layers, layer_of
from lpr.model.fused.elementwise import is_available
from lpr.model.fused.modules import GatedMlp, Norm, mlp_of, norm_of
from lpr.model.packing import has_room_to_pack, pack_projections


@dataclass(frozen=True)
class Accelerated:
    """What of a model was replaced."""

    num_packs: int = 0
    """Packed matrix products."""
    modules: dict[str, list[nn.Module]] = field(default_factory=dict)
    """Modules with another forward: "layers", "mlps", "norms"."""

    def undo(self) -> None:
        """Give the modules their own forward back; weights stay packed."""
        for module in (each for kind in self.modules.values() for each in kind):
            vars(module).pop("forward", None)
        self.modules.clear()

    @property
    def counts(self) -> dict[str, int]:
        """How many of each kind."""
        return dict(Counter(packs=self.num_packs, **{kind: len(found) for kind, found in self.modules.items()}))


def accelerate(model: nn.Module) -> Accelerated:
    """Pack the weights of `model`, which must have no other user, and replace what is known of it.

    Layers stay callable as before; on a CPU their weights are copies from then on (`PrepackedLinear.weight`).
    """
    device = next(model.parameters()).device
    on_gpu = device.type == "cuda"
    num_packs = pack_projections(model, partial(has_room_to_pack, device)) if on_gpu else prepack(model)
    return Accelerated(num_packs, replace_known(model, device))


def replace_known(model: nn.Module, device: torch.device) -> dict[str, list[nn.Module]]:
    """Replace the forwards of what is known of `model` on `device`, whose weights are packed; the modules by kind."""
    modules: dict[str, list[nn.Module]] = {}
    if not is_available(device):
        return modules
    for kind, find in (("layers", layer_of), ("mlps", mlp_of), ("norms", norm_of)):
        inside = {id(part) for layer in modules.get("layers", ()) for part in layer.modules()}
        for module in model.modules():
            if id(module) in inside or "forward" in vars(module):
                continue
            replacement: Any = find(module)
            if replacement is not None:
                module.forward = replacement
                modules.setdefault(kind, []).append(module)
    join_layers(model)
    return modules


def restore_known(model: nn.Module) -> None:
    """Give modules whose forwards `replace_known` has replaced their own."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), DecoderLayer | GatedMlp | Norm):
            del module.forward
