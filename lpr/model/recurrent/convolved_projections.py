"""ZAYA's convolutions of queries and keys (CCA, arXiv 2510.04476), which are no named functions in transformers.

There are two in sequence, with values from the previous token, so the module's forward is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpr.model.rewrite.base import Setting, WrappedForward
from lpr.model.step_inputs import current_step


class ConvolvedProjections(WrappedForward):
    """ZAYA's projection of queries, keys and values follows a tree."""

    name = "convolutions over trees"

    def find(self, module: Any, setting: Setting) -> Callable[..., Any] | None:
        is_cca = all(hasattr(module, name) for name in ("conv_qk_depthwise", "conv_qk_grouped", "v_proj_delayed"))
        return _project if is_cca else None


def has_convolved_projections(model: nn.Module) -> bool:
    """True if `model` has such modules; the Triton kernels do not know them."""
    return any(hasattr(module, "conv_qk_depthwise") for module in model.modules())


def _project(
    layer: Any, stock: Callable[..., Any], hidden_states: Tensor, cache: Any = None, mask: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As ZayaCCAProjection.forward."""
    step = current_step()
    if step is None:
        found: tuple[Tensor, Tensor, Tensor] = stock(hidden_states, cache, mask)
        return found
    states, groups = step.cache.states, layer.num_key_value_groups
    query, key = layer.q_proj(hidden_states), layer.k_proj(hidden_states)
    states.begin_convolution(layer.layer_idx, 0)
    windows = states.windows(torch.cat([query, key], -1).transpose(1, 2), layer.conv_kernel_size + 1)
    rows, channels, count, width = windows.shape
    mixed = windows.transpose(1, 2).reshape(rows * count, channels, width)
    mixed = layer.conv_qk_grouped(layer.conv_qk_depthwise(mixed)).view(rows, count, channels)
    mixed_query, mixed_key = (
        each.unflatten(2, (-1, layer.head_dim)) for each in mixed.split((query.shape[2], key.shape[2]), 2)
    )
    query, key = (each.unflatten(2, (-1, layer.head_dim)) for each in (query, key))
    query = (query + key.repeat_interleave(groups, 2)) * 0.5
    key = query.unflatten(2, (-1, groups)).mean(3)
    states.begin_convolution(layer.layer_idx, 1)
    late = layer.v_proj_delayed  # the first token has a zero input plus the bias
    delayed = states.windows(F.linear(hidden_states, late.weight).transpose(1, 2), 2)[..., 0].transpose(1, 2)
    delayed = delayed if late.bias is None else delayed + late.bias
    value = torch.cat([layer.v_proj_current(hidden_states), delayed], -1).unflatten(2, (-1, layer.head_dim))
    return mixed_query + query, mixed_key + key, value
