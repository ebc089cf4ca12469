"""RMS norms and gated MLPs of transformers, recognised by their source, whatever their class is called.

Each replacement computes inside a step alone; outside it the module's own forward does, which the self-check compares.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lpr.model.cpu.products import PrepackedLinear
from lpr.model.fused.elementwise import DTYPES, Activation, Weighing, gate, rms_norm
from lpr.model.fused.source import fingerprint
from lpr.model.packing import Pack, PackedLinear, fit
from lpr.model.step_inputs import current_step

_NORMS = {
    "261bf2cef17aaded": Weighing.ROUNDED,
    "465992225008e2f4": Weighing.ONE_PLUS,
    "314ed5788d9f1bf8": Weighing.WIDE,
}
"""Forms of RMSNorm.forward: Llama's, Gemma's and OLMo 2's."""
_GEMMA_NORM = "4cce7ef75bf57831"
"""`_norm` of GemmaRMSNorm, which its forward calls."""
_GATED_MLP = "f22ff3850ac208d9"
"""MLP.forward of Llama: down_proj(act_fn(gate_proj(x)) * up_proj(x))."""
_ACTIVATIONS = {"SiLU": Activation.SILU, "SiLUActivation": Activation.SILU, "GELUTanh": Activation.GELU_TANH}
"""Classes of torch and of transformers' ACT2FN."""


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
    weighing = _NORMS.get(fingerprint(type(module).forward)) if isinstance(module, nn.Module) else None
    weight: Any = getattr(module, "weight", None)
    if weighing is None or weight is None or weight.dim() != 1 or not weight.is_contiguous():
        return None
    if weight.dtype not in DTYPES.get(weight.device.type, ()):
        return None
    if weighing is Weighing.ONE_PLUS and fingerprint(type(module)._norm) != _GEMMA_NORM:
        return None
    epsilon = module.eps if weighing is Weighing.ONE_PLUS else module.variance_epsilon
    return Norm(OwnForward(module), weight.data, float(epsilon), int(weighing))


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
    activation = _ACTIVATIONS.get(type(getattr(module, "act_fn", None)).__name__)
    if activation is None or fingerprint(type(module).forward) != _GATED_MLP:
        return None
    gate_up, down = pack_of(module.gate_proj, module.up_proj), pack_of(module.down_proj)
    if gate_up is None or down is None or len(set(gate_up.sizes)) > 1:
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
