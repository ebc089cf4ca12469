"""Sparse attention: an indexer scores all earlier tokens, and each query attends to the best ones.

The model's own indexer selects. In a step it gets the dense mask of the tree, which hides other branches before the
top-k. Its keys are stored in the KV cache like those of a layer, so a commit moves them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function, eager_mask

from lpr.model.attention.dense import tree_attention, tree_mask, visible_nodes
from lpr.model.rewrite.base import Setting, WrappedForward
from lpr.model.step_inputs import StepInputs, current_step

SPARSE_ATTENTION = "lpr_tree_sparse"
"""Name of the attention implementation for models that select tokens; some add a bias for merged tokens to the mask."""
SELECTING_LAYERS = {"indexed_attention", "deepseek_sparse_attention", "minimax_m3_sparse"}
"""Kinds in `config.layer_types` that attend to selected tokens; the second is the first in transformers 5.17."""
MERGING_LAYERS = {"compressed_sparse_attention", "heavily_compressed_attention"}  # kinds that attend to merged tokens
_SELECTION_SIZES = ("index_topk", "topk_blocks", "block_topk")
"""Attributes of indexers: the number of tokens, or blocks of tokens, that a query attends to."""


def refusal(config: Any) -> str | None:
    """The reason why layers of this config cannot evaluate a tree; None if there is none."""
    if (getattr(config, "index_kpool", None) or 1) > 1 and not config.index_kpool_always_select_tail:
        return "sparse attention: the first tokens of a text attend to nothing (index_kpool_always_select_tail)"
    return None


def selects(config: Any) -> bool:
    return bool((SELECTING_LAYERS | MERGING_LAYERS).intersection(getattr(config, "layer_types", None) or ()))


def pools(config: Any) -> bool:
    """True if some layers pool tokens; lpr.model.attention.pooled finds the pools on the host."""
    sizes = (getattr(config, name, None) or 1 for name in ("index_kpool", "indexer_compress_ratio"))
    merges = MERGING_LAYERS.intersection(getattr(config, "layer_types", None) or ())
    return bool(merges) or max(sizes) > 1


def sparse_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """As `tree_attention`; each query attends to the selected tokens that its mask allows.

    `indices` [B, T, k] are cache rows; `block_indices` are MiniMax-M3's blocks, in a step its mask (`select_blocks`).
    """
    selected = None
    if indices is not None:
        selected = torch.zeros(*query.shape[::2], key.shape[2], dtype=torch.bool, device=query.device)
        selected = selected.scatter_(-1, indices.long(), True)[:, None]
    elif block_indices is not None and current_step() is not None:
        selected = block_indices
    elif block_indices is not None:
        blocks: Any = module.indexer
        given = attention_mask, key.shape[2], query.dtype, query.device, kwargs["position_ids"]
        group = query.shape[1] // key.shape[1]  # query heads that share a mask
        attention_mask = blocks.build_block_mask(block_indices, *given)[:, ::group]
    if selected is not None:
        attention_mask = attention_mask.masked_fill(~selected, torch.finfo(query.dtype).min)
    return tree_attention(module, query, key, value, attention_mask, **kwargs)


def select_blocks(
    indexer: Any,
    stock: Callable[..., Tensor],
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    cache: Any,
    *rest: Any,
) -> Tensor:
    """MiniMax-M3's indexer: bool [B, heads, T, KV], true for tokens in the blocks that a query attends to.

    A block is a run of positions. transformers uses runs of cache rows, which differ from positions on a branch.
    """
    step = current_step()
    if step is None or step.packed:
        return stock(hidden_states, position_embeddings, cache, *rest)
    rotate = import_module(type(indexer).__module__).apply_rotary_pos_emb
    shape = (*hidden_states.shape[:2], -1, indexer.head_dim)
    query = indexer.q_norm(indexer.q_proj(hidden_states).view(shape)).transpose(1, 2)
    key = indexer.k_norm(indexer.k_proj(hidden_states).view(shape)).transpose(1, 2)
    query, key = rotate(query, key, *(each[..., : indexer.head_dim] for each in position_embeddings))
    key = cache.update_indexer(key[:, 0], indexer.layer_idx)[:, None]
    scores = query.float() @ key.float().transpose(-1, -2)
    return best_blocks(scores, step, indexer.block_size, indexer.topk_blocks, indexer.local_blocks)


def best_blocks(scores: Tensor, step: StepInputs, block_size: int, num_blocks: int, num_local: int) -> Tensor:
    """Bool [B, H, T, KV]: the blocks with the best `scores` that an entry sees, its last `num_local` ones first."""
    block = step.blocks[0]
    scores = scores.masked_fill(~visible_nodes(block, causal_mask_function), float("-inf"))
    key_blocks = block.kv_positions // block_size
    of_key = key_blocks[:, None, None].expand(scores.shape)
    most = block.num_kv // block_size + 1
    best = scores.new_full((*scores.shape[:3], most), float("-inf")).scatter_reduce(-1, of_key, scores, "amax")
    own = block.positions // block_size
    near = own[..., None] - torch.arange(num_local, device=own.device)
    best.scatter_(-1, near.clamp(min=0)[:, None].expand(-1, scores.shape[1], -1, -1), float("inf"))
    chosen = best.topk(min(num_blocks, most), dim=-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, chosen.indices, chosen.values > float("-inf"))
    return kept.gather(-1, of_key)


class FirstOfEqual(TorchFunctionMode):
    """Makes `topk` choose the first of equal scores (ReLU scores are often zero).

    The tokens of a path are in the order of positions, so the choice does not depend on the rows between them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.topk:
            return first_of_equal(*args)
        return func(*args, **(kwargs or {}))


def first_of_equal(scores: Tensor, count: int) -> Any:
    """As `scores.topk(count)` of fp32 scores, taking the first of equal ones; unsorted if all scores are taken."""
    rows = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape)
    if count == scores.shape[-1]:
        return torch.return_types.topk((scores, rows))
    bits = (scores + 0.0).view(torch.int32).long()  # + 0.0 makes -0.0 equal to 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    chosen = ((ordered << 32) - rows).topk(count).indices
    return torch.return_types.topk((scores.gather(-1, chosen), chosen))


def _in_order(module: Any, stock: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    with FirstOfEqual():
        return stock(*args, **kwargs)


class Indexers(WrappedForward):
    """Indexers select by position instead of cache row."""

    name = "selection by position"

    def find(self, module: Any, setting: Setting) -> Callable[..., Tensor] | None:
        if hasattr(module, "build_block_mask"):
            return select_blocks
        return _in_order if hasattr(module, "index_topk") or hasattr(module, "block_topk") else None


@contextmanager
def few_selected(model: PreTrainedModel, count: int = 4) -> Iterator[None]:
    """Context: indexers select at most `count` tokens or blocks, so that a short text tests the selection."""
    found = [(module, name) for module in model.modules() for name in _SELECTION_SIZES if hasattr(module, name)]
    sizes = [getattr(module, name) for module, name in found]
    for (module, name), size in zip(found, sizes, strict=True):
        setattr(module, name, min(size, count * getattr(module, "index_kpool", 1)))
    try:
        yield
    finally:
        for (module, name), size in zip(found, sizes, strict=True):
            setattr(module, name, size)


AttentionInterface.register(SPARSE_ATTENTION, sparse_attention)
AttentionMaskInterface.register(SPARSE_ATTENTION, tree_mask(eager_mask, may_be_none=False))
