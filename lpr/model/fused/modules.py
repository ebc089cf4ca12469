"""RMS norms and gated MLPs of transformers, recognised by what they do (lpr.model.fused.probe).

Each replacement computes inside a step alone; outside it the module's own forward does, which the self-check compares.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lpr.model.cpu.products import PrepackedLinear
from lpr.model.fused.elementwise import DTYPES, gate, rms_norm
from lpr.model.fused.probe import activation_of, weighing_of
from lpr.model.rewrite.merged_linear import Pack, PackedLinear, fit
from lpr.model.step_inputs import current_step


def in_step() -> bool:
    """True where the replacements compute: in a step, without gradients."""
    return current_step() is not None and not torch.is_grad_enabled()


class OwnForward:
    """The forward of a module's class, for what replaces it on the module.

    The module is not kept alive: as its replacement holds this, a dropped model would keep its weights until the
    collector runs, and that counts objects and not bytes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._forward: Any = type(module).forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `module.forward`."""
        return self._forward(self._module(), *args, **kwargs)

    def __reduce__(self) -> tuple[type[OwnForward], tuple[nn.Module | None]]:
        return OwnForward, (self._module(),)  # in a copy of the model, that of the module's copy


@dataclass(frozen=True, eq=False)
class Norm:
    """The forward of an RMS norm."""

    plain: OwnForward
    weight: Tensor
    epsilon: float
    weighing: int

    def __call__(self, states: Tensor) -> Tensor:
        """As the module's own forward."""
        if not in_step() or states.dtype is not self.weight.dtype:
            found: Tensor = self.plain(states)
            return found
        return self.of(states.contiguous())

    def of(self, states: Tensor, added: Tensor | None = None) -> Tensor:
        """The norm of `states`, contiguous; with `added`, they become the sum of both first, in place."""
        return rms_norm(states, self.weight, self.epsilon, self.weighing, added)


def norm_of(module: Any) -> Norm | None:
    """What computes the norm `module`; None if it is not a known one."""
    weight: Any = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not weight.is_contiguous():
        return None
    if weight.dtype not in DTYPES.get(weight.device.type, ()) or (found := weighing_of(module)) is None:
        return None
    weighing, epsilon = found
    return Norm(OwnForward(module), weight.data, epsilon, int(weighing))


@dataclass(frozen=True, eq=False)
class GatedMlp:
    """The forward of an MLP: down(activation(gate(x)) * up(x))."""

    plain: OwnForward
    gate_up: Pack
    down: Pack
    activation: int

    def __call__(self, states: Tensor) -> Tensor:
        """As the module's own forward."""
        found: Tensor = self.of(states) if in_step() else self.plain(states)
        return found

    def of(self, states: Tensor) -> Tensor:
        """The output for `states` [..., D]."""
        return self.down.multiply(gate(self.gate_up.multiply(states), self.activation))


def mlp_of(module: Any) -> GatedMlp | None:
    """What computes the MLP `module`; None if it is not a known one, or not packed."""
    if not all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        return None
    gate_up, down = pack_of(module.gate_proj, module.up_proj), pack_of(module.down_proj)
    if gate_up is None or down is None or len(set(gate_up.sizes)) > 1:
        return None
    if (activation := activation_of(module, gate_up.dtype)) is None:
        return None
    return GatedMlp(OwnForward(module), gate_up, down, int(activation))


def pack_of(*members: Any) -> Pack | None:
    """The pack that has these layers and no others, in this order; None if there is none."""
    if len(members) == 1 and fit(members) and members[0].weight.is_cuda:
        return Pack(members)
    if not all(isinstance(each, (PackedLinear, PrepackedLinear)) for each in members):
        return None
    pack: Pack = members[0].pack
    is_whole = len(pack.sizes) == len(members) and all(each.pack is pack for each in members)
    return pack if is_whole and [each.place for each in members] == list(range(len(members))) else None
