"""Decoder layers of Llama's structure with fused parts; on a CPU all layers in one call, if all their parts are known.

On a GPU a layer takes nine launches instead of 42; its last sum is made in the norm of the next layer. On a CPU a step
reads all weights, which evicts the interpreter's data from the caches: 30 calls per layer instead of one take a sixth
of a one-token step. Layers that tensor-parallel ranks share have collectives between their parts, so each part is a
call.

Layers are recognised by lpr.model.fused.probe, independent of their class: Llama, SmolLM, Mistral, Qwen 2 and 3,
Granite, Gemma and others, and Mixtral and Qwen 3 MoE with their own experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lpr import native
from lpr.model.attention.layer_rules import LayerRule
from lpr.model.attention.native import NATIVE, NATIVE_EXACT
from lpr.model.cpu.tiles import Address
from lpr.model.fused.elementwise import norm_heads, place, rotate
from lpr.model.fused.modules import Fused, GatedMlp, Norm, in_step, mlp_of, norm_of, pack_of
from lpr.model.fused.probe import is_decoder_layer
from lpr.model.kv_cache import KVCache, Pair
from lpr.model.rewrite.base import OwnForward, Setting
from lpr.model.rewrite.merged_linear import Pack
from lpr.model.step_inputs import StepInputs, current_step
from lpr.model.threads import team_size
from lpr.model.transformers_versions import cache_argument


@dataclass(frozen=True)
class Run:
    """Consecutive layers that one call computes."""

    layers: list[int]
    call: Any  # native.DecoderLayers


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """The fused forward of a decoder layer in a step; outside a step the layer's own forward."""

    plain: OwnForward
    cache_argument: str
    attention: Any
    mlp: Callable[[Tensor], Tensor]  # the module, or its fused form (GatedMlp)
    norms: tuple[Norm, Norm]  # before attention and before the MLP
    head_norms: tuple[Norm, Norm] | None  # for the heads of queries and of keys
    qkv: Pack
    out: Pack
    multiplier: float  # factor of attention's and MLP's outputs in the residual
    whole: Any = field(init=False)  # the same layer as one call (native.DecoderLayer); None if a part of it is unknown
    run: Run | None = field(init=False)
    """The layers computed when this one is called; None if there is no such call, or an earlier layer has it."""
    others: Sequence[DecoderLayer] = field(init=False)  # on a GPU the layers that are computed behind this one
    follows: bool = field(init=False, default=False)  # True if the layer is in the run of an earlier one

    def __post_init__(self) -> None:
        object.__setattr__(self, "whole", _whole(self))
        self.begin([self])

    def begin(self, layers: Sequence[DecoderLayer]) -> None:
        """Compute all `layers`, of which this is the first, when this one is called."""
        wholes, run = [each.whole for each in layers], None
        if native.DecoderLayers is not None and None not in wholes:
            run = Run([each.attention.layer_idx for each in layers], native.DecoderLayers(wholes))
        object.__setattr__(self, "run", run)
        object.__setattr__(self, "others", layers[1:])
        for each in layers[1:]:
            object.__setattr__(each, "follows", True)

    def __reduce__(self) -> tuple[type[DecoderLayer], tuple[Any, ...]]:
        """A copy has other weights, so its native call is built again."""
        return DecoderLayer, tuple(getattr(self, each.name) for each in fields(self) if each.init)

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        *,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        cache = kwargs.pop(self.cache_argument, None)
        if not in_step() or position_embeddings is None or cache is None:
            kwargs |= {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": use_cache}
            kwargs[self.cache_argument] = cache
            return self.plain(hidden_states, position_embeddings=position_embeddings, **kwargs)
        attention, step = self.attention, current_step()
        assert step is not None
        if self.follows and attention.layer_idx <= step.computed:
            return hidden_states
        step.computed = -1
        name = attention.config._attn_implementation
        is_known = name in (NATIVE, NATIVE_EXACT) and step.adapters is None  # the native call has no adapters
        if self.run is not None and is_known and isinstance(attention_mask, LayerRule):
            sides = [cache.layer_tensors.get(index) for index in self.run.layers]
            if None not in sides:
                step.computed = self.run.layers[-1]
                return self._in_one_call(hidden_states.contiguous(), position_embeddings, sides, step, attention_mask)
        how = attention_mask, position_embeddings, cache, step
        given, added = self._part(hidden_states.contiguous(), None, *how, **kwargs)
        if given.is_cuda and not torch.compiler.is_compiling():
            for each in self.others:
                given, added = each._part(given, added, *how, **kwargs)
                step.computed = each.attention.layer_idx
        return given.add_(added)

    def _part(
        self, given: Tensor, added: Tensor | None, mask: Any, embeddings: Pair, cache: Any, step: StepInputs, **how: Any
    ) -> Pair:
        """The layer's output in two parts, whose sum it is; its input, too, may be in two parts."""
        attention = self.attention
        states = self.qkv.multiply(self.norms[0].of(given, added))
        queries, keys, values = self._heads(states, *embeddings, cache, step)
        attend = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
        mixed, _ = attend(attention, queries, keys, values, mask, dropout=0.0, scaling=attention.scaling, **how)
        residual = self._scaled(self.out.whole(mixed.flatten(2)))
        normed = self.norms[1].of(residual, added=given)
        return residual, self._scaled(self.mlp.of(normed) if isinstance(self.mlp, GatedMlp) else self.mlp(normed))

    def _in_one_call(
        self,
        states: Tensor,
        embeddings: tuple[Tensor, Tensor],
        sides: Sequence[tuple[Tensor, Tensor]],
        step: StepInputs,
        rule: LayerRule,
    ) -> Tensor:
        """The run's output for `states` [R, N, H]; `sides` are the cache's keys and values [rows, H, D], by layer."""
        assert self.run is not None and step.pages is not None
        result = torch.empty_like(states)
        cosines, sines = (each.expand(len(states), -1, -1).contiguous() for each in embeddings)
        self.run.call.run(
            step.pages.reader, self.attention.config._attn_implementation == NATIVE_EXACT,
            states.data_ptr(), result.data_ptr(), cosines.data_ptr(), sines.data_ptr(), *states.shape[:2],
            _places(sides), step.write_rows.data_ptr(), (rule.window or 0, rule.chunk or 0), team_size(),
        )  # fmt: skip
        return result

    def _heads(
        self, states: Tensor, cosines: Tensor, sines: Tensor, cache: KVCache, step: StepInputs
    ) -> tuple[Tensor, ...]:
        """The rotated queries [R, H, N, D] of the fused projection `states` [R, N, sum of H * D], in place.

        Its keys, rotated, and values go to the cache; returns, too, the K and V that attention reads.
        """
        layer, dim = self.attention.layer_idx, self.attention.head_dim
        counts = [size // dim for size in self.qkv.sizes]
        if self.head_norms is not None:
            for norm, first, count in zip(self.head_norms, (0, self.qkv.sizes[0]), counts, strict=False):
                norm_heads(states, norm.weight, norm.epsilon, norm.weighing, first, count)
        if len(cosines) != len(states):
            cosines, sines = (each.expand(len(states), -1, -1) for each in (cosines, sines))
        cosines, sines = cosines.contiguous(), sines.contiguous()
        by_head = states.unflatten(2, (-1, dim)).transpose(1, 2)
        sides = cache.layer_tensors.get(layer) if states.is_cuda and counts[1] == counts[2] else None
        # A compiler has the cache in parts of its pools; FP8 is another type.
        if sides is not None and sides[0].dtype is states.dtype and not torch.compiler.is_compiling():
            place(states, cosines, sines, counts[0], step.write_rows, *sides)
            return by_head[:, : counts[0]], *cache.read(layer, step)
        rotate(states, cosines, sines, counts[0] + counts[1])
        queries, keys, values = by_head.split(counts, 1)
        return queries, *cache.update(keys, values, layer)

    def _scaled(self, states: Tensor) -> Tensor:
        return states if self.multiplier == 1 else states * self.multiplier


Places = tuple[list[int], tuple[int, int], list[int], tuple[int, int]]
"""Addresses of each layer's keys, their strides of heads and rows; the same for values. All layers share strides."""


def _places(sides: Sequence[tuple[Tensor, Tensor]]) -> Places:
    addresses = [[each.data_ptr() for each in side] for side in zip(*sides, strict=True)]
    (key_row, key_head, _), (value_row, value_head, _) = (each.stride() for each in sides[0])
    return addresses[0], (key_head, key_row), addresses[1], (value_head, value_row)


def cache_places(cache: KVCache, layers: Sequence[int]) -> Places:
    return _places([cache.layer_tensors[layer] for layer in layers])


class DecoderLayers(Fused):
    """Decoder layers of Llama's structure; on a CPU all of them in one call, if all have the same LayerRule."""

    name = "decoder layers"

    def find(self, module: Any, setting: Setting) -> DecoderLayer | None:
        return layer_of(module, setting.device.type)

    def finish(self, model: nn.Module) -> None:
        join_layers(model)


def join_layers(model: nn.Module) -> None:
    """Let the first layer of each list of decoder layers compute all of them, if all have the same LayerRule."""
    for stack in model.modules():
        if not isinstance(stack, nn.ModuleList) or len(stack) < 2:
            continue
        found = [vars(each).get("forward") for each in stack]
        layers = [each for each in found if isinstance(each, DecoderLayer)]
        if len(layers) < len(stack) or len({each.whole is None for each in layers}) > 1:
            continue
        if any(each._forward_hooks or each._forward_pre_hooks for each in stack):
            continue
        config = layers[0].attention.config
        if len(stack) != config.num_hidden_layers:
            continue
        kinds = getattr(config, "layer_types", None) or ["full_attention"]
        shapes = {(*each.qkv.sizes, each.attention.head_dim) for each in layers}
        if len(set(kinds)) == len(shapes) == 1:
            layers[0].begin(layers)


def layer_of(module: Any, device: str | None = None) -> DecoderLayer | None:
    """The fused form of the decoder layer `module`; None if it, or a part of it, is unknown."""
    attention: Any = getattr(module, "self_attn", None)
    mlp: Any = getattr(module, "mlp", None)
    projections = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    if mlp is None or None in projections:
        return None
    qkv, out = pack_of(*projections[:3]), pack_of(projections[3], device=device)
    multiplier = float(getattr(module, "residual_multiplier", 1.0))
    if qkv is None or out is None or not is_decoder_layer(module, qkv.sizes, qkv.dtype, multiplier):
        return None
    has_head_norms = hasattr(attention, "q_norm")
    head_norms = (attention.q_norm, attention.k_norm) if has_head_norms else ()
    all_norms = module.input_layernorm, module.post_attention_layernorm, *head_norms
    norms = [norm_of(each, device) for each in all_norms]
    found = [norm for norm in norms if norm is not None and norm.weight.dtype is qkv.dtype]
    if len(found) < len(norms):
        return None
    argument = cache_argument(type(module).forward)
    assert argument is not None
    of_layer, of_heads = (found[0], found[1]), (found[2], found[3]) if has_head_norms else None
    parts = attention, mlp_of(mlp, device) or mlp, of_layer, of_heads
    return DecoderLayer(OwnForward(module), argument, *parts, qkv, out, multiplier)


def _whole(layer: DecoderLayer) -> Any:
    """`layer` as one native call; None if its weights are not in panels, or if it has a multiplier."""
    attention, mlp, (queries, keys, values) = layer.attention, layer.mlp, layer.qkv.sizes
    if native.DecoderLayer is None or not isinstance(mlp, GatedMlp) or layer.multiplier != 1:
        return None
    dim, addresses = attention.head_dim, list[Address]()
    for pack in (layer.qkv, layer.out, mlp.gate_up, mlp.down):
        address = getattr(getattr(pack, "packed", None), "address", None)
        if address is not None and pack.group is None:  # the call has no collectives
            addresses.append(address(pack.bias))
    if len(addresses) < 4 or keys != values or queries % dim or keys % dim:
        return None
    all_norms = *layer.norms, *(layer.head_norms or ())
    norms = [(each.weight.data_ptr(), each.epsilon, each.weighing) for each in all_norms]
    how = queries // dim, keys // dim, dim, mlp.activation, attention.scaling
    return native.DecoderLayer(layer.qkv.dtype is torch.bfloat16, *addresses, norms, *how)
