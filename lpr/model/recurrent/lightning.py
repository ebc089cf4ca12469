"""MiniMax's lightning attention, whose scan is part of a module's forward and has no name of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lpr.model.recurrent.scans import DECAYED
from lpr.model.step_inputs import current_step


def is_lightning(module: Any) -> bool:
    """True for a layer of lightning attention."""
    return all(hasattr(module, name) for name in ("slope_rate", "qkv_proj", "output_gate", "act_fn"))


def install(model: PreTrainedModel) -> None:
    """Let the lightning attention of `model` evaluate trees within a step."""
    modules: list[Any] = [module for module in model.modules() if is_lightning(module)]
    layers = [module for module in modules if not isinstance(module.forward, partial)]  # else it is done
    for layer in layers:
        layer.forward = partial(_attend, layer, layer.forward)
    if layers:
        model.base_model.register_forward_pre_hook(_with_our_cache, with_kwargs=True)


def _with_our_cache(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Forward hook: with `use_cache` the model would ask for a cache of its own class."""
    return args, kwargs | {"use_cache": False} if current_step() is not None else kwargs


def _attend(
    layer: Any, stock: Callable[..., Any], hidden_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """As MiniMaxLightningAttention.forward: a state decays by the same factor at each token."""
    step = current_step()
    if step is None:
        found: tuple[Tensor, Tensor | None] = stock(hidden_states, *args, **kwargs)
        return found
    heads, size = layer.num_attention_heads, layer.head_dim
    joined = layer.act_fn(layer.qkv_proj(hidden_states)).unflatten(2, (heads, 3 * size)).float()
    decay = -layer.slope_rate.float().flatten().expand(joined.shape[:3])
    states, inputs = step.cache.states, [*joined.split(size, 3), decay]
    states.begin_layer(layer.layer_idx)
    if states.runs_kernels():
        out = import_module("lpr.model.recurrent.kernels").decayed(states, inputs)
    else:
        out = states.scan(DECAYED, inputs, (heads, size, size))
    out = torch.sigmoid(layer.output_gate(hidden_states)) * layer.norm(out.flatten(2).to(hidden_states.dtype))
    return layer.out_proj(out), None
