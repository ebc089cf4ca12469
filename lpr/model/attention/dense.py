"""Tree attention for unmodified transformers models, through the two registries that transformers offers.

A model calls `tree_mask` once per kind of mask and forward, `tree_attention` in every layer. The masks come from the
model's own rule (causal, sliding, chunked), evaluated on *positions* instead of cache rows, and from the visibility of
the tree. Outside a step (`current_step()` is None) both behave like transformers' "sdpa".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from lpr.model.attention import in_order
from lpr.model.step_inputs import Block, StepInputs, current_step

TREE_ATTENTION = "lpr_tree"  # name of the attention implementation, for models that dispatch through AttentionInterface
TREE_MASK_ONLY = "lpr_tree_mask"
"""Name for models with their own attention code, which take an additive mask from the mask registry."""


def visible_nodes(block: Block, mask_function: Callable[..., Any]) -> Tensor:
    """Bool mask [B, 1, T, KV]: the model's rule on positions, and the tree's visibility."""
    if block.visible is not None:
        visible = block.visible[:, None]
    elif block.tree_mask is not None:
        visible = block.tree_mask.visible(block.num_kv)[:, None]
    else:
        size = (len(block.positions), 1, block.positions.shape[1], block.num_kv)
        visible = torch.ones(size, dtype=torch.bool, device=block.positions.device)
        visible = visible.tril() if block.is_causal else visible
    if mask_function is causal_mask_function:
        return visible  # ancestors and committed tokens have earlier positions, so tree visibility implies causality
    batch = torch.arange(visible.shape[0], device=visible.device)[:, None, None, None]
    head = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=visible.device)
    rule = mask_function(batch, head, block.positions[:, None, :, None], block.kv_positions[:, None, None, :])
    return rule & visible


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The bool mask as an additive float mask; finite instead of -inf: a row without a visible key is not NaN."""
    floor = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=mask.device)
    return torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), floor)


Mask = Tensor | list[Tensor | None] | None


def tree_mask(stock: Callable[..., Tensor | None], may_be_none: bool) -> Callable[..., Mask]:
    """A mask function for AttentionMaskInterface that returns transformers' `stock` masks outside a step.

    In a step it returns the mask of one layer kind, [B, 1, T, KV] in `dtype`. It is additive, because models with their
    own attention code add it, and because SDPA on a CPU would convert a bool mask in every layer. Packed inputs have a
    list with one mask per block. With `may_be_none` it returns None if no key is hidden, or for a plain causal prompt.
    """

    def make(
        *sizes: Any,
        mask_function: Callable[..., Any] = causal_mask_function,
        dtype: torch.dtype = torch.float32,
        **kwargs: Any,
    ) -> Mask:
        step = current_step()
        if step is None:
            # No `is_causal` shortcut: our attention function would not know that a mask of None means causal.
            kwargs["allow_is_causal_skip"] = False
            return stock(*sizes, mask_function=mask_function, dtype=dtype, **kwargs)
        skips = may_be_none and mask_function is causal_mask_function
        masks = [
            None
            if skips and (block.is_open or block.is_causal)
            else additive(visible_nodes(block, mask_function), dtype)
            for block in step.blocks
        ]
        return masks if step.packed else masks[0]

    return make


_WITHOUT_EFFECT = {
    "attention_mask", "cache", "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "dropout", "is_causal", "labels",
    "logits_to_keep", "max_length_k", "max_length_q", "num_items_in_batch", "output_attentions", "output_hidden_states",
    "output_router_logits", "past_key_values", "position_ids", "return_dict", "sliding_window", "token_type_ids",
    "use_cache",
}  # fmt: skip
"""What models pass on to attention, and what does not change scores here: the mask has windows and positions."""


class Scoring(NamedTuple):
    """The modifications of attention scores besides the mask."""

    scale: float
    softcap: float | None = None  # bounds scores by `softcap * tanh(score / softcap)` (Gemma 2)
    sinks: Tensor | None = None  # [Hq]: attention-sink logits, part of the softmax without a value (GPT-OSS)
    bias: Tensor | None = None  # [B or 1, Hq, T or 1, KV], added to scores

    @classmethod
    def of(
        cls,
        query: Tensor,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        **others: Any,
    ) -> Scoring:
        """From the keyword arguments that transformers' models pass to attention.

        Raises TypeError for one that may change scores in a way that is not known here: the check at load compares a
        model with itself under this attention, and would not see that it is missing.
        """
        for name, value in others.items():
            if name not in _WITHOUT_EFFECT and isinstance(value, Tensor | int | float) and not isinstance(value, bool):
                raise TypeError(f"its attention is given {name!r}, which is not known here")
        return cls(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux, position_bias)

    @property
    def is_plain(self) -> bool:
        """True if PyTorch's SDPA supports all of them."""
        return self.softcap is None and self.sinks is None and self.bias is None


def tree_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Mask, **given: Any
) -> tuple[Tensor, None]:
    """Attention of `query` [B, Hq, T, D] over `key`, `value` [B, Hk, KV, D(v)]; returns [B, T, Hq, Dv].

    With packed inputs, `query` is [1, Hq, N, D], `key` and `value` are all rows of the cache, and the masks are a list.
    """
    scoring, step = Scoring.of(query, **given), current_step()
    if step is not None and step.blocks[0].table is not None:
        check_passed_on(step, key, value)
        key, value = (step.cache.of_block(each, step.blocks[0]) for each in (key, value))
    if not isinstance(attention_mask, list):
        parts = query, key, value, attention_mask, scoring
        out = _attend(*parts) if step is None else _attend_block(step, step.blocks[0], *parts)
        return out.transpose(1, 2).contiguous(), None
    assert step is not None and step.cache is not None
    if scoring.bias is not None:  # it is laid out for one block
        raise TypeError("this attention needs padded inputs")
    check_passed_on(step, key, value)
    packed = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    for block, mask in zip(step.blocks, attention_mask, strict=True):
        states = block.entries(query), step.cache.of_block(key, block), step.cache.of_block(value, block)
        block.entries(packed.transpose(1, 2)).copy_(_attend_block(step, block, *states, mask, scoring))
    return packed, None


def _attend_block(
    step: StepInputs, block: Block, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring
) -> Tensor:
    if step.gemm_rows is None:
        return _attend(query, key, value, mask, scoring, is_causal=block.is_causal and mask is None)
    if scoring.bias is not None:
        raise TypeError("exact attention takes no bias on scores")
    assert mask is not None
    paths = step.once_per_mask(mask, lambda: list(map(in_order.find_paths, mask[:, 0])))
    return in_order.attend(query, key, value, paths, scoring.scale, scoring.softcap, scoring.sinks)


class ComputedKeysError(TypeError):
    """The model computes keys or values from cached states, as MLA does."""


def check_passed_on(step: StepInputs, *states: Tensor) -> None:
    """Raise ComputedKeysError if `states` are not the tensors that the cache returned.

    A model that computes keys from them must get the rows of one block, or it would compute all rows of the cache.
    """
    if not step.came_from_cache(*states):
        raise ComputedKeysError("this attention needs the rows of a block alone")


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring, is_causal: bool = False
) -> Tensor:
    """[B, Hq, T, Dv]; with `is_causal` the T queries are the last of the KV entries, causal without a mask.

    The heads of a GQA group are folded into the query axis instead of repeating K and V (1.2 to 5 times faster on a
    CPU). Group sizes come from the tensors and never from the config, so a tensor-parallel shard works unchanged.
    """
    key, value = key.to(query.dtype), value.to(query.dtype)  # FP8 of a cache
    batch, num_heads, length, dim = query.shape
    num_kv_heads, num_kv = key.shape[1], key.shape[2]
    group = num_heads // num_kv_heads
    if is_causal and length == num_kv and scoring.is_plain:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scoring.scale, enable_gqa=group > 1
        )
    if is_causal:  # some layers continue with the wanted entries alone, which are the last (Gemma 4)
        seen = torch.ones(length, num_kv, dtype=torch.bool, device=query.device).tril(num_kv - length)
        mask = additive(seen[None, None], query.dtype)
    folded = query.reshape(batch, num_kv_heads, group * length, dim)
    if mask is not None and group > 1:
        mask = _folded_mask(mask, group)
    if scoring.is_plain:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scoring.scale)
    else:
        bias, sinks = scoring.bias, scoring.sinks
        if bias is not None:
            bias = bias.reshape(bias.shape[0], num_kv_heads, group * length, -1)
        if sinks is not None:
            sinks = sinks.reshape(1, num_kv_heads, group, 1).expand(batch, -1, -1, length)
            sinks = sinks.reshape(batch, num_kv_heads, group * length, 1)
        out = _attend_with_extras(folded, key, value, mask, scoring._replace(bias=bias, sinks=sinks))
    return out.reshape(batch, num_heads, length, value.shape[-1])


def _folded_mask(mask: Tensor, group: int) -> Tensor:
    """The mask repeated for the heads of a GQA group; one copy per mask and step, as all layers share it."""
    step = current_step()
    if step is None or torch.compiler.is_compiling():  # the compiler merges equal copies itself
        return mask.repeat(1, 1, group, 1)
    return step.once_per_mask(mask, lambda: mask.repeat(1, 1, group, 1))


def _attend_with_extras(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Attention with what SDPA lacks: soft-capped scores, sinks [B, Hk, T, 1], a bias on scores."""
    # Scaled before the product, which might exceed the largest float16.
    scores = ((query * scoring.scale) @ key.transpose(-1, -2)).float()
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if scoring.bias is not None:
        scores = scores + scoring.bias
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = additive(mask, scores.dtype)
        scores = scores + mask
    if scoring.sinks is not None:
        probs = torch.softmax(torch.cat([scores, scoring.sinks.float()], -1), -1)[..., :-1]
    else:
        probs = torch.softmax(scores, -1)
    return probs.to(value.dtype) @ value


AttentionInterface.register(TREE_ATTENTION, tree_attention)
AttentionMaskInterface.register(TREE_ATTENTION, tree_mask(sdpa_mask, may_be_none=True))
# Never called: models with their own attention code only need the name to be valid.
AttentionInterface.register(TREE_MASK_ONLY, tree_attention)
AttentionMaskInterface.register(TREE_MASK_ONLY, tree_mask(eager_mask, may_be_none=False))
