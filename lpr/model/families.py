"""Shims for single model families, and the families that cannot run a tree.

A few families add a bias or cut a window by *cache row*, where a tree needs it by *position*: the two differ once a
step's nodes branch. Each shim replaces that one spot of a loaded model and changes nothing outside a step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from transformers import PreTrainedModel

from lpr.model.attention import sparse
from lpr.model.recurrent.plug import install, is_pluggable
from lpr.model.step_inputs import StepInputs, current_step
from lpr.model.transformers_versions import CACHE_ARGUMENTS, cache_argument

_RECURRENT_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""Kinds in `config.layer_types` that fold the past into a state: state-space, convolution and linear attention."""
_RECURRENT = "recurrent state: {} the past into one state by code of its own, which cannot follow a tree's branches"


_INKLING_2 = "recurrent state behind convolutions whose weights each token chooses, as it does attention sinks"
_REASONS = {
    **dict.fromkeys(("inkling2_text", "inkling2_loop_text"), _INKLING_2),
    "rwkv": "recurrent state in no cache: its forward returns it in a list",
    "xlm": "its forward takes no cache of keys and values: what it calls a cache is a dictionary",
    "xlstm": "recurrent state in a cache of its own, scaled by a running maximum",
}


def refusal(model: PreTrainedModel) -> str | None:
    """The reason in its config why this model cannot evaluate a tree; None if it has none."""
    config: Any = model.config.get_text_config(decoder=True)
    if getattr(config, "use_bidirectional_attention", False) in (True, "all"):
        return "tokens of its prompt attend to later ones"
    kinds = getattr(config, "layer_types", None)
    if kinds and "reference_sliding_attention" in kinds:
        return "the window of its reference_sliding_attention layers begins where a prompt ends"
    if config.model_type in _REASONS:
        return _REASONS[config.model_type]
    if is_recurrent(model) and not is_pluggable(model):
        recurrent = sorted(_RECURRENT_LAYERS.intersection(kinds or ()))
        return _RECURRENT.format(f"its {recurrent[0]} layers fold" if recurrent else "it folds")
    if kinds and (reason := sparse.refusal(config)) is not None:
        return reason
    if cache_argument(type(model).forward) is None:
        return f"its forward takes no cache of keys and values ({', '.join(CACHE_ARGUMENTS)})"
    return None


def is_recurrent(model: PreTrainedModel) -> bool:
    """True if layers fold the past into a state."""
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    return bool(_RECURRENT_LAYERS.intersection(kinds)) if kinds else bool(model._is_stateful)


def has_experts(config: Any) -> bool:
    """True for a mixture of experts."""
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rope parameters of a config and those that it gives for kinds of layers."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def position_limit(config: Any) -> tuple[int, str] | None:
    """The number of positions up to which batches are exact, and why, if it is less than the model's own.

    Longrope (Phi-3 128k) takes other frequencies for *all* rows of a forward, at all positions, as soon as one
    position passes the original context. Drafts and neighbours in the batch would then change a text.
    """
    if limit := getattr(config, "log_scaling_n_floor", None):  # Inkling
        return int(limit), "beyond them attention is scaled by the cache row of a token"
    for each in rope_parameters(config):
        if each.get("rope_type") == "longrope":
            name = "original_max_position_embeddings"
            if limit := each.get(name) or getattr(config, name, None):
                return int(limit), "beyond them longrope changes the frequencies of every row in the batch"
    return None


def adapt(model: PreTrainedModel) -> None:
    """Make the spots of `model` that count cache rows count positions within a step; once per model."""
    install(model)
    config = model.config.get_text_config(decoder=True)
    shim = sparse.adapt_indexers if sparse.selects(config) else _SHIMS.get(config.model_type)
    if shim is not None and not getattr(model, "_lpr_adapted", False):
        shim(model)
        model._lpr_adapted = True  # type: ignore[assignment]


def _cached_positions(step: StepInputs) -> torch.Tensor:
    """[B, KV]: the position of what each cache row holds; a model that needs them keeps its batches padded."""
    if step.packed:
        raise TypeError("a bias per cache row needs padded inputs")
    return step.blocks[0].kv_positions


def _by_position(bias: torch.Tensor, step: StepInputs) -> torch.Tensor:
    """[B, H, 1, KV] from `bias` [B, H, 1, S], whose last axis is a position: the bias of each cache row."""
    index = _cached_positions(step).clamp(max=bias.shape[3] - 1)[:, None, None, :]
    return bias.gather(3, index.expand(-1, bias.shape[1], 1, -1))


def _all_rows(module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Forward hook: in a step, a 2-D mask of every cache row, so that the model builds its ALiBi for all of them."""
    step = current_step()
    if step is not None:
        kwargs["attention_mask"] = torch.ones_like(_cached_positions(step))
    return args, kwargs


def _positioned_alibi(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """BLOOM's and Falcon's builder of ALiBi [B * H, 1, S] from a 2-D mask, by position within a step."""

    def build(attention_mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
        alibi, step = stock(attention_mask, num_heads, dtype), current_step()
        return alibi if step is None else _by_position(alibi.unflatten(0, (-1, num_heads)), step).flatten(0, 1)

    build.stock = stock  # type: ignore[attr-defined]
    return build


def _bloom(model: Any) -> None:
    trunk = model.base_model
    trunk.build_alibi_tensor = _positioned_alibi(trunk.build_alibi_tensor)
    trunk.register_forward_pre_hook(_all_rows, with_kwargs=True)


def _falcon(model: Any) -> None:
    """ALiBi is slope * row, from a function of the module; layers compare the attention's name with "sdpa".

    Their eager branch adds ALiBi twice, so the layers keep "sdpa", the default, in a config of their own.
    """
    own = copy.copy(model.config)
    own.__class__ = type("SdpaConfig", (type(own),), {"_attn_implementation": "sdpa"})  # whatever is set later
    for layer in model.base_model.h:
        layer.self_attention.config = own
    if not model.config.alibi:
        return
    code: Any = import_module(type(model).__module__)
    if not hasattr(code.build_alibi_tensor, "stock"):
        code.build_alibi_tensor = _positioned_alibi(code.build_alibi_tensor)
    model.base_model.register_forward_pre_hook(_all_rows, with_kwargs=True)


class _BiasPerSequence:
    """MPT's bias of a step, [B, H, 1, KV], for attention code that slices a bias [H, 1, S] without a batch axis."""

    def __init__(self, bias: torch.Tensor) -> None:
        self.bias, self.shape = bias, bias.shape[1:]

    def size(self, dim: int) -> int:
        """No longer than the keys on any axis: there is nothing to cut off."""
        return 0

    def __getitem__(self, slices: Any) -> torch.Tensor:
        return self.bias


def _mpt(model: Any) -> None:
    """ALiBi is slope * (row - last row), one for the whole batch."""
    trunk = model.base_model
    stock = trunk.build_mpt_alibi_tensor

    def build(num_heads: int, sequence_length: int, *args: Any, **kwargs: Any) -> torch.Tensor | _BiasPerSequence:
        step = current_step()
        if step is None:
            return stock(num_heads, sequence_length, *args, **kwargs)
        batch, num_kv = _cached_positions(step).shape
        alibi = stock(num_heads, num_kv, *args, **kwargs)  # softmax ignores where the zero of the bias lies
        return _BiasPerSequence(_by_position(alibi.expand(batch, -1, -1, -1), step))

    trunk.build_mpt_alibi_tensor = build


class _PositionWindow:
    """GPT-Neo's causal buffer [1, 1, S, S], which its attention slices by row, as a window of positions in a step."""

    def __init__(self, stock: torch.Tensor, window: int) -> None:
        self.stock, self.window = stock, window

    def __getitem__(self, slices: Any) -> torch.Tensor:
        step = current_step()
        if step is None:
            return self.stock[slices]
        distance = step.positions[:, None, :, None] - _cached_positions(step)[:, None, None, :]
        return distance < self.window  # what comes later or on another branch, the mask hides


def _gpt_neo(model: Any) -> None:
    """Local layers cut their window out of a buffer by row."""
    for block in model.base_model.h:
        attention = block.attn.attention
        stock = attention.bias
        del attention.bias  # a buffer that no checkpoint holds; torch lets only tensors take its place
        local = attention.attention_type == "local"
        attention.bias = _PositionWindow(stock, model.config.window_size if local else stock.shape[3])


def _inkling(model: Any) -> None:
    """Attention adds a bias by distance, counted in cache rows."""
    for module in model.modules():
        if hasattr(module, "rel_extent") and hasattr(module, "proj"):
            module.forward = partial(_relative_logits, module, module.forward)


def _relative_logits(
    module: Any, stock: Callable[..., torch.Tensor], states: torch.Tensor, *rows: torch.Tensor
) -> torch.Tensor:
    """As InklingRelativeLogits.forward: [B, H, T, KV] of `states` [B, T, H, D]."""
    step = current_step()
    if step is None:
        return stock(states, *rows)
    logits = (states @ module.proj).transpose(1, 2)
    distance = (step.positions[:, :, None] - _cached_positions(step)[:, None])[:, None]
    index = distance.clamp(0, module.rel_extent - 1).expand(-1, logits.shape[1], -1, -1)
    return logits.gather(-1, index).masked_fill((distance < 0) | (distance >= module.rel_extent), 0.0)


def _gpt_neox_japanese(model: Any) -> None:
    """Attention takes a `view` of the keys, which the cache returns as a strided view of its rows."""
    for layer in model.base_model.layers:
        layer.attention._attn = partial(_with_contiguous_keys, layer.attention._attn)


def _with_contiguous_keys(
    attend: Callable[..., Any], query: torch.Tensor, key: torch.Tensor, *rest: Any, **kwargs: Any
) -> Any:
    return attend(query, key.contiguous(), *rest, **kwargs)


class _OutsideSteps:
    """True outside a step: switches a model's own code off where a shim does its work."""

    def __bool__(self) -> bool:
        return current_step() is None


def _llama4(model: Any) -> None:
    """Layers without rope scale their queries by a temperature of the position, counted as cached length + row.

    self_check's short text does not reach the first step of that temperature (position 8192 by default).
    """
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", None) and hasattr(module, "q_proj") and not module.use_rope:
            module.attn_temperature_tuning = _OutsideSteps()
            module.q_proj.register_forward_hook(partial(_scaled, module.floor_scale, module.attn_scale))


def _scaled(floor_scale: float, attn_scale: float, module: Any, args: Any, query: torch.Tensor) -> torch.Tensor | None:
    step = current_step()
    if step is None:
        return None
    scale = torch.log1p(torch.floor((step.positions.float() + 1.0) / floor_scale)) * attn_scale + 1.0
    return (query * scale[..., None]).to(query.dtype)


_SHIMS: dict[str, Callable[[Any], None]] = {
    "bloom": _bloom,
    "falcon": _falcon,
    "gpt_neo": _gpt_neo,
    "gpt_neox_japanese": _gpt_neox_japanese,
    "inkling_text": _inkling,
    "llama4_text": _llama4,
    "mpt": _mpt,
}
