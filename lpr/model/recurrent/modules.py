"""Layers whose convolution or scan has no name of its own in transformers: their module's forward is replaced.

RecurrentGemma's gated linear recurrence (De et al., arXiv 2402.19427), and ZAYA's convolutions of queries and keys
(CCA, arXiv 2510.04476), which are two in a row, with values that come from the token before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from lpr.model.recurrent.diagonal import Gated
from lpr.model.recurrent.scans import Rule
from lpr.model.step_inputs import current_step

GATED = Rule(Gated().scan, Gated.padding)


def _same(x: Tensor) -> Tensor:
    return x


def is_griffin(module: Any) -> bool:
    """True for RecurrentGemma's recurrent block."""
    return all(hasattr(module, name) for name in ("rg_lru", "conv_1d", "linear_y"))


def is_cca(module: Any) -> bool:
    """True for ZAYA's projection of queries, keys and values."""
    return all(hasattr(module, name) for name in ("conv_qk_depthwise", "conv_qk_grouped", "v_proj_delayed"))


def replaced(model: PreTrainedModel) -> list[Any]:
    """The modules of `model` that are replaced here; the Triton kernels know none of them."""
    return [module for module in model.modules() if is_griffin(module) or is_cca(module)]


def install(model: PreTrainedModel) -> None:
    """Let these layers of `model` evaluate trees within a step."""
    for index, layer in enumerate(getattr(model.base_model, "layers", [])):
        for module in layer.modules():
            if isinstance(module.forward, partial):
                continue
            if is_griffin(module):
                module.rg_lru._rnn_scan = partial(_scan, module.rg_lru._rnn_scan)
                module.forward = partial(_griffin, index, module, module.forward)
            elif is_cca(module):
                module.forward = partial(_cca, module, module.forward)


def _griffin(
    index: int, block: Any, stock: Callable[..., Any], inputs: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """As RecurrentGemmaRecurrentBlock.forward of layer `index`."""
    step = current_step()
    if step is None:
        return stock(inputs, position_ids, *args, **kwargs)
    states = step.cache.states
    gate, x = block.act_fn(block.linear_y(inputs)), block.linear_x(inputs).transpose(1, 2)
    states.begin_convolution(index, 0)
    x = states.convolve(x, block.conv_1d.weight[:, 0], block.conv_1d.bias, _same)
    return block.linear_out(block.rg_lru(x.transpose(1, 2), position_ids) * gate), None


def _scan(
    stock: Callable[..., Any], hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """As RecurrentGemmaRglru._rnn_scan: the first token of a sequence takes no state."""
    step = current_step()
    if step is None:
        return stock(hidden_states, recurrent_gate, reset, *args, **kwargs)
    decay = (recurrent_gate * ~reset).float().log()
    out = step.cache.states.scan(GATED, [hidden_states.float(), decay], (hidden_states.shape[2], 1))
    return out.to(hidden_states.dtype), None


def _cca(
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
    late = layer.v_proj_delayed  # of the first token it takes a zero, and adds its bias
    delayed = states.windows(F.linear(hidden_states, late.weight).transpose(1, 2), 2)[..., 0].transpose(1, 2)
    delayed = delayed if late.bias is None else delayed + late.bias
    value = torch.cat([layer.v_proj_current(hidden_states), delayed], -1).unflatten(2, (-1, layer.head_dim))
    return mixed_query + query, mixed_key + key, value
