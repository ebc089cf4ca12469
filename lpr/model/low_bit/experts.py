"""Experts with rounded weights, which transformers holds as parameters [experts, outputs, inputs]."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from lpr.model.low_bit.products import Form, LowBitPack

_NAMES = {True: "gate_up_proj", False: "up_proj"}
"""The parameter of the first product, of experts with a gate or without."""


class LowBitExperts:
    """The forward of a module of experts: each expert that a token has chosen, one after the other."""

    def __init__(self, module: Any, form: Form) -> None:
        """Round the weights of `module`, of which `can_round_experts` is true, and take them from it."""
        name = _NAMES[module.has_gate]
        first, second = (module._parameters.pop(each).detach() for each in (name, "down_proj"))
        self.first = [LowBitPack(each, None, [len(each)], form) for each in first]
        self.second = [LowBitPack(each, None, [len(each)], form) for each in second]
        self._module: Any = weakref.ref(module)  # in a cycle, a dropped copy would keep its weights

    @property
    def num_bytes(self) -> int:
        """Bytes of the rounded weights."""
        return sum(each.num_bytes for each in (*self.first, *self.second))

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The sum [tokens, D] over the experts `top_k_index` [tokens, k] of each token, by `top_k_weights`."""
        result, module = torch.zeros_like(hidden_states), self._module()
        activate = module._apply_gate if module.has_gate else module.act_fn
        for expert in top_k_index.unique().tolist():
            tokens, places = (top_k_index == expert).nonzero(as_tuple=True)
            inner = activate(self.first[expert].multiply(hidden_states[tokens]))
            found = self.second[expert].multiply(inner) * top_k_weights[tokens, places, None]
            result.index_add_(0, tokens, found.to(result.dtype))
        return result


def can_round_experts(module: Any) -> bool:
    """True for experts on a CPU that are two products without bias and what lies between them."""
    if not hasattr(module, "_apply_gate") or "forward" in vars(module) or module._is_expert_parallel:
        return False
    is_simple = not (module.has_bias or module.is_transposed or module.has_post_expert_norm)
    names = {_NAMES[module.has_gate], "down_proj"}
    if not is_simple or set(module._parameters) != names or module._forward_hooks or module._forward_pre_hooks:
        return False
    weights = [module._parameters[each] for each in names]
    return all(type(each) is nn.Parameter and each.dim() == 3 and each.device.type == "cpu" for each in weights)
