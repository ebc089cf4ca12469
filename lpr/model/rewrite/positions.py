"""Fixes for code of single model families that uses cache rows where a tree needs positions.

The two differ once a step's nodes branch. Each rewrite replaces one function and has no effect outside a step.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from lpr.model.rewrite.base import EachModule, Rewrite, Setting, Stage, WrappedForward
from lpr.model.step_inputs import current_step


class RelativeDistances(WrappedForward):
    """Inkling's attention adds a bias by distance, counted in cache rows."""

    name = "distances by position"

    def find(self, module: Any, setting: Setting) -> Callable[..., torch.Tensor] | None:
        return _relative_logits if hasattr(module, "rel_extent") and hasattr(module, "proj") else None


def _relative_logits(
    module: Any, stock: Callable[..., torch.Tensor], states: torch.Tensor, *rows: torch.Tensor
) -> torch.Tensor:
    """As InklingRelativeLogits.forward: [B, H, T, KV] of `states` [B, T, H, D]."""
    step = current_step()
    if step is None:
        return stock(states, *rows)
    if step.packed:
        raise TypeError("a bias per cache row needs padded inputs")
    logits = (states @ module.proj).transpose(1, 2)
    distance = (step.positions[:, :, None] - step.blocks[0].kv_positions[:, None])[:, None]
    index = distance.clamp(0, module.rel_extent - 1).expand(-1, logits.shape[1], -1, -1)
    return logits.gather(-1, index).masked_fill((distance < 0) | (distance >= module.rel_extent), 0.0)


class _OutsideSteps:
    """True outside a step: in a step it disables the model's own code, which a rewrite replaces."""

    def __init__(self, stock: Any) -> None:
        self.stock = stock

    def __bool__(self) -> bool:
        return current_step() is None


class QueryTemperature(EachModule):
    """Llama 4's layers without rope scale their queries by the position, computed as cached length + row.

    self_check cannot detect it: its short text does not reach the first change of the scale (default: position 8192).
    """

    name, stage = "temperature by position", Stage.TREE

    def find(self, module: Any, setting: Setting) -> bool | None:
        tunes = getattr(module, "attn_temperature_tuning", None) and hasattr(module, "q_proj") and not module.use_rope
        return True if tunes else None

    def apply(self, module: Any, found: bool) -> None:
        module.attn_temperature_tuning = _OutsideSteps(module.attn_temperature_tuning)
        module.q_proj.register_forward_hook(partial(_scaled, module.floor_scale, module.attn_scale))

    def undo(self, module: Any) -> None:
        module.attn_temperature_tuning = module.attn_temperature_tuning.stock
        hooks = module.q_proj._forward_hooks
        for key in [key for key, hook in hooks.items() if getattr(hook, "func", None) is _scaled]:
            del hooks[key]


def _scaled(floor_scale: float, attn_scale: float, module: Any, args: Any, query: torch.Tensor) -> torch.Tensor | None:
    step = current_step()
    if step is None:
        return None
    scale = torch.log1p(torch.floor((step.positions.float() + 1.0) / floor_scale)) * attn_scale + 1.0
    return (query * scale[..., None]).to(query.dtype)


class FalconLayers(Rewrite):
    """Falcon's layers compare the attention's name with "sdpa": they get a config of their own with that name."""

    name, stage = "attention name of layers", Stage.TREE

    def match(self, model: Any, setting: Setting) -> Iterator[tuple[str, Any]]:
        if getattr(getattr(model, "config", None), "model_type", None) != "falcon":
            return
        own = copy.copy(model.config)
        own.__class__ = type("SdpaConfig", (type(own),), {"_attn_implementation": "sdpa"})  # whatever is set later
        for name, _ in model.named_modules():
            if name.endswith(".self_attention"):
                yield name, own

    def apply(self, module: Any, found: Any) -> None:
        module.stock_config, module.config = module.config, found

    def undo(self, module: nn.Module) -> None:
        module.config = vars(module).pop("stock_config")
