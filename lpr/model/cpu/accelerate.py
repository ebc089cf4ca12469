"""Replaces the parts of a model that are known, from whole layers down to single norms."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lpr import native
from lpr.model.cpu.decoder_layer import join_layers, layer_of
from lpr.model.cpu.modules import mlp_of, norm_of
from lpr.model.cpu.products import prepack


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
    """Pack the weights of `model`, which must be on a CPU and have no other user, and replace what is known of it.

    Layers stay callable as before; their weights are copies from then on (`PrepackedLinear.weight`).
    """
    result = Accelerated(prepack(model))
    if native.rms_norm is None:
        return result
    for kind, find in (("layers", layer_of), ("mlps", mlp_of), ("norms", norm_of)):
        inside = {id(part) for layer in result.modules.get("layers", ()) for part in layer.modules()}
        for module in model.modules():
            if id(module) in inside or "forward" in vars(module):
                continue
            replacement: Any = find(module)
            if replacement is not None:
                module.forward = replacement
                result.modules.setdefault(kind, []).append(module)
    join_layers(model)
    return result
