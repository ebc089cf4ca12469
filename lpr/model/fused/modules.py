"""Fused RMS norms and gated MLPs of transformers, recognised by their behaviour (lpr.model.fused.probe).

A replacement is used in steps only; outside a step the module's own forward runs, and the self-check compares the two.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lpr.model.cpu.products import PrepackedLinear
from lpr.model.fused.elementwise import DTYPES, gate, is_available, rms_norm
from lpr.model.fused.probe import activation_of, weighing_of
from lpr.model.rewrite.base import NewForward, OwnForward, Setting
from lpr.model.rewrite.merged_linear import Pack, PackedLinear, fit
from lpr.model.step_inputs import current_step


def in_step() -> bool:
    """True if replacements are used: in a step, without gradients."""
    return current_step() is not None and not torch.is_grad_enabled()


@dataclass(frozen=True, eq=False)
class Norm:
    plain: OwnForward
    weight: Tensor
    epsilon: float
    weighing: int

    def __call__(self, states: Tensor) -> Tensor:
        if not in_step() or states.dtype is not self.weight.dtype:
            return self.plain(states)
        return self.of(states.contiguous())

    def of(self, states: Tensor, added: Tensor | None = None) -> Tensor:
        """The norm of `states`, contiguous; with `added`, they become the sum of both first, in place."""
        return rms_norm(states, self.weight, self.epsilon, self.weighing, added)


def norm_of(module: Any, device: str | None = None) -> Norm | None:
    """The fused form of the norm `module` for a device type; None if it is unknown."""
    weight: Any = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not weight.is_contiguous():
        return None
    if weight.dtype not in DTYPES.get(device or weight.device.type, ()) or (found := weighing_of(module)) is None:
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
        return self.of(states) if in_step() else self.plain(states)

    def of(self, states: Tensor) -> Tensor:
        return self.down.whole(gate(self.gate_up.multiply(states), self.activation))


def mlp_of(module: Any, device: str | None = None) -> GatedMlp | None:
    """The fused form of the MLP `module`; None if it is unknown or not packed."""
    if not all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        return None
    gate_up, down = pack_of(module.gate_proj, module.up_proj), pack_of(module.down_proj, device=device)
    if gate_up is None or down is None or len(set(gate_up.sizes)) > 1:
        return None
    if (activation := activation_of(module, gate_up.dtype)) is None:
        return None
    return GatedMlp(OwnForward(module), gate_up, down, int(activation))


def pack_of(*members: Any, device: str | None = None) -> Pack | None:
    """The pack of exactly these layers, in order; made here for a single layer on a GPU. None if there is none."""
    if len(members) == 1 and fit(members) and (device or members[0].weight.device.type) == "cuda":
        members[0].pack = pack = Pack(members)  # where adapters find it
        return pack
    if not all(isinstance(each, (PackedLinear, PrepackedLinear)) for each in members):
        return None
    pack = members[0].pack
    is_whole = len(pack.sizes) == len(members) and all(each.pack is pack for each in members)
    return pack if is_whole and [each.place for each in members] == list(range(len(members))) else None


class Fused(NewForward):
    def why_not(self, model: nn.Module, setting: Setting) -> str | None:
        if is_available(setting.device):
            return None
        return "it needs " + ("lpr's extension" if setting.device.type == "cpu" else "a GPU and the package triton")


class GatedMlps(Fused):
    """Gated MLPs as two products and one elementwise call."""

    name = "gated MLPs"

    def find(self, module: Any, setting: Setting) -> GatedMlp | None:
        return mlp_of(module, setting.device.type)


class RmsNorms(Fused):
    name = "RMS norms"

    def find(self, module: Any, setting: Setting) -> Norm | None:
        return norm_of(module, setting.device.type)
