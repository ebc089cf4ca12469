"""Attention that pools runs of tokens into one key: indexers with pooled keys (QSA, k-pool DSA), compressed K/V (V4).

A pool of `size` tokens is computed at its last token, from the preceding tokens of that token's path, and is stored in
that token's cache row, in a separate layer. So each branch of a tree has its own pools, a query sees the pools whose
last token is the query or its ancestor, and a commit moves pools like keys. The inputs of pools are cached too, so that
prefixes can be shared by pages: this takes twice the memory of transformers' cache.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from lpr.model.attention.dense import additive, visible_nodes
from lpr.model.attention.sparse import first_of_equal
from lpr.model.recurrent.tree import Tree
from lpr.model.rewrite.base import Setting, WrappedForward
from lpr.model.step_inputs import StepInputs, current_step
from lpr.model.transfer import to_device

Make = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Makes pools [B, C, D] from windows [B, C, reach, E], bool [B, C, reach] of real tokens, first positions [B, C]."""


class Pools:
    """The pools of a step: M per row, those of committed tokens and then the C that the row's entries complete."""

    def __init__(self, step: StepInputs, size: int, reach: int) -> None:
        """Pools of `size` tokens, each computed from the last `reach` tokens of a path."""
        if step.packed or not step.rows:
            raise TypeError("pools of tokens need padded inputs")
        block, self.size = step.blocks[0], size
        batch, length = block.positions.shape
        closing = [np.nonzero((row.positions + 1) % size == 0)[0] for row in step.rows]
        most, committed = max(map(len, closing)), max(row.num_cached for row in step.rows) // size
        windows, entries = np.full((batch, most, reach), -1), np.full((batch, most), length)
        ends, is_pool = np.zeros((batch, committed + most), np.int64), np.zeros((batch, committed + most), bool)
        numbers = np.tile(np.arange(committed + most), (batch, 1))
        ends[:, :committed] = size * np.arange(1, committed + 1) - 1
        for index, (row, found) in enumerate(zip(step.rows, closing, strict=True)):
            paths = Tree(row.parents[None].astype(np.int64), torch.device("cpu")).windows(reach)[0].numpy()
            windows[index, : len(found)] = paths[found] - (reach - 1) + row.num_cached
            entries[index, : len(found)] = found + length - row.num_entries
            mine = slice(committed, committed + len(found))
            ends[index, mine], numbers[index, mine] = row.num_cached + found, row.positions[found] // size
            is_pool[index, : row.num_cached // size], is_pool[index, mine] = True, True
        device = step.tokens.device
        self.windows = to_device(windows, device)
        self.entries = to_device(entries, device)  # [B, C] int64: the entry that closes each pool; `length` for none
        self.ends = to_device(np.where(is_pool, ends, 0), device)
        """[B, M] int64: the cache row of the last token of each."""
        self.numbers = to_device(np.where(is_pool, numbers, 0), device)  # [B, M] int64: index of each pool on its path
        self.starts = self.numbers[:, committed:] * size
        self.visible = visible_nodes(block, causal_mask_function)[:, 0].expand(batch, length, -1)  # [B, T, KV] bool
        seen = self.visible.gather(2, self.ends[:, None].expand(-1, length, -1))
        self.seen = seen & to_device(is_pool, device)[:, None]  # [B, T, M] bool: the entry sees the pool
        self._key_numbers = (block.kv_positions // size).expand(batch, -1)
        self._whole = (block.positions + 1) // size

    @classmethod
    def of(cls, step: StepInputs, size: int, reach: int) -> Pools:
        return step.once(("pools", size, reach), lambda: cls(step, size, reach))

    def pooled(self, cache: Any, layer: int, first: int, inputs: Tensor, make: Make) -> Tensor:
        """All pools [B, M, D] of `inputs` [B, T, E] and of earlier tokens; the cache stores inputs and pools."""
        batch, length = inputs.shape[:2]
        known, places = cache.update_indexer(inputs, layer, first), torch.arange(batch, device=inputs.device)
        closed = make(known[places[:, None, None], self.windows.clamp(min=0)], self.windows >= 0, self.starts)
        written = closed.new_zeros(batch, length + 1, closed.shape[2])
        written.scatter_(1, self.entries[..., None].expand_as(closed), closed)
        return cache.update_indexer(written[:, :length], layer, first + 1)[places[:, None], self.ends]

    def best(self, scores: Tensor, count: int) -> Tensor:
        """[B, T, M] bool: the pools with the `count` best fp32 scores among those that an entry sees."""
        chosen = first_of_equal(scores.masked_fill(~self.seen, float("-inf")), min(count, scores.shape[2]))
        return torch.zeros_like(self.seen).scatter(2, chosen.indices, chosen.values > float("-inf"))

    def tokens(self, selected: Tensor) -> Tensor:
        """[B, T, KV] bool: the tokens of `selected` pools [B, T, M], and those after an entry's last complete pool."""
        most = self.visible.shape[2] // self.size + 1
        kept = torch.zeros(*selected.shape[:2], most, device=selected.device)
        kept.scatter_reduce_(2, self.numbers[:, None].expand_as(selected), selected.float(), "amax")
        numbers = self._key_numbers[:, None].expand_as(self.visible)
        return (kept.gather(2, numbers).bool() | (numbers >= self._whole[..., None])) & self.visible


def _rotate_of(layer: Any) -> Any:
    return import_module(type(layer).__module__).apply_rotary_pos_emb


# Qwen 4: a layer attends to the tokens of the pools whose mean key has the best indexer score.


def _select_by_mean(
    indexer: Any, stock: Callable[..., Tensor], hidden_states: Tensor, positions: Any, mask: Any, cache: Any
) -> Tensor:
    """As Qwen4ExpTextQSAIndexer.forward: bool [B, 1, T, KV]. `positions` are those of all cache rows, then entries."""
    step = current_step()
    if step is None:
        return stock(hidden_states, positions, mask, cache)
    rotate, dim, length = _rotate_of(indexer), indexer.index_head_dim, hidden_states.shape[1]
    both = indexer.index_qk_proj(hidden_states).unflatten(2, (-1, dim))
    queries, keys = both[:, :, : indexer.index_n_heads], both[:, :, -1]
    cos, sin = (each[:, -length:] for each in positions)
    queries = rotate(indexer.q_layernorm(queries), cos=cos, sin=sin, unsqueeze_dim=2)

    def make(windows: Tensor, present: Tensor, starts: Tensor) -> Tensor:
        mean = indexer.k_layernorm(windows.float().mean(2).to(keys.dtype))[:, :, None]
        cos, sin = (each.gather(1, starts[..., None].expand(-1, -1, each.shape[2])) for each in positions)
        return rotate(mean, cos=cos, sin=sin, unsqueeze_dim=2)[:, :, 0]

    pools = Pools.of(step, indexer.compress_ratio, indexer.compress_ratio)
    pooled = pools.pooled(cache, indexer.layer_idx, 0, keys, make)
    scores = torch.relu(torch.einsum("bthd,bmd->bthm", queries.float(), pooled.float())).sum(2) / dim**0.5
    return pools.tokens(pools.best(scores, indexer.block_topk))[:, None]


# GLM 5 next: the same, with a learned weighting of a pool's tokens and without positions.


def _select_by_gate(
    indexer: Any, stock: Callable[..., Tensor], hidden_states: Tensor, q_resid: Tensor, attention_mask: Any, cache: Any
) -> Tensor:
    """As Glm5NextTextIndexer.forward: int32 [B, T, KV], the selected cache rows and -1 for the others."""
    step = current_step()
    if step is None:
        return stock(hidden_states, q_resid, attention_mask, cache)
    dim, size = indexer.head_dim, indexer.index_kpool
    queries = indexer.wq_b(q_resid).unflatten(2, (-1, dim))
    gate = F.linear(hidden_states, indexer.index_kpool_compress_gate)
    inputs = torch.cat([indexer.k_norm(indexer.wk(hidden_states)), gate], 2)

    def make(windows: Tensor, present: Tensor, starts: Tensor) -> Tensor:
        weights = (windows[..., dim:].float() + indexer.index_kpool_compress_ape.float()).softmax(2)
        return (weights.to(windows.dtype) * windows[..., :dim]).sum(2)

    pools = Pools.of(step, size, size)
    pooled = pools.pooled(cache, indexer.layer_idx, 0, inputs, make)
    scores = F.relu(torch.einsum("bthd,bmd->bthm", queries.float(), pooled.float()) * indexer.softmax_scale)
    weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float() * indexer.n_heads**-0.5
    chosen = pools.tokens(pools.best((weights[:, :, None] @ scores)[:, :, 0], indexer.index_topk // size))
    rows = torch.arange(chosen.shape[2], dtype=torch.int32, device=chosen.device)
    return torch.where(chosen, rows, -1)


# DeepSeek V4: pools are additional keys and values beside those of a sliding window.


def _compressed(module: Any, step: StepInputs, hidden_states: Tensor, cache: Any, layer: int, first: int) -> Tensor:
    """The pools [B, M, D] of a compressor or an indexer; a pool of CSA also covers the tokens of the previous pool."""
    dim, size = module.head_dim, module.compress_rate
    overlaps = module.position_bias.shape[1] == 2 * dim
    inputs = torch.cat([module.kv_proj(hidden_states), module.gate_proj(hidden_states)], 2)

    def make(windows: Tensor, present: Tensor, starts: Tensor) -> Tensor:
        values, gate = windows.chunk(2, 3)
        gate = gate + module.position_bias.repeat(windows.shape[2] // size, 1)
        if overlaps:
            values, gate = (torch.cat([each[:, :, :size, :dim], each[:, :, size:, dim:]], 2) for each in (values, gate))
            values, gate = values * present[..., None], gate.masked_fill(~present[..., None], float("-inf"))
        pool = module.kv_norm((values * gate.softmax(2, dtype=torch.float32).to(values.dtype)).sum(2))
        angles = module.rotary_emb(pool, position_ids=starts, layer_type=module.rope_layer_type)
        return _rotate_of(module)(pool[:, None], *angles)[:, 0]

    return _pools_of(module, step).pooled(cache, layer, first, inputs, make)


def _pools_of(module: Any, step: StepInputs) -> Pools:
    size = module.compress_rate
    return Pools.of(step, size, size * (module.position_bias.shape[1] // module.head_dim))


def _compress(
    module: Any, stock: Callable[..., Any], hidden_states: Tensor, q_residual: Tensor, positions: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """As DeepseekV4HCACompressor.forward and DeepseekV4CSACompressor.forward: keys [B, 1, M, D], bias [B, 1, T, M]."""
    step, (cache, layer) = current_step(), rest
    if step is None:
        return stock(hidden_states, q_residual, positions, *rest)
    keys, seen = _compressed(module, step, hidden_states, cache, layer, 2), _pools_of(module, step).seen
    if hasattr(module, "indexer"):
        seen = module.indexer(hidden_states, q_residual, positions, *rest)
    return keys[:, None], additive(seen, keys.dtype)[:, None]


def _select_compressed(
    indexer: Any, stock: Callable[..., Any], hidden_states: Tensor, q_residual: Tensor, positions: Tensor, *rest: Any
) -> Tensor:
    """As DeepseekV4Indexer.forward, but bool [B, T, M]."""
    step, (cache, layer) = current_step(), rest
    if step is None:
        return stock(hidden_states, q_residual, positions, *rest)
    keys = _compressed(indexer, step, hidden_states, cache, layer, 0)
    angles = indexer.rotary_emb(hidden_states, position_ids=positions, layer_type=indexer.rope_layer_type)
    queries = indexer.q_b_proj(q_residual).unflatten(2, (-1, indexer.head_dim)).transpose(1, 2)
    queries = _rotate_of(indexer)(queries, *angles).transpose(1, 2)
    return _pools_of(indexer, step).best(indexer.scorer(queries, keys, hidden_states), indexer.index_topk)


class PooledKeys(WrappedForward):
    name = "pools along paths"

    def find(self, module: Any, setting: Setting) -> Callable[..., Any] | None:
        if hasattr(module, "index_kpool_compress_gate"):
            return _select_by_gate
        if hasattr(module, "index_qk_proj") and hasattr(module, "block_topk"):
            return _select_by_mean
        if hasattr(module, "compress_rate") and hasattr(module, "gate_proj"):
            return _select_compressed if hasattr(module, "scorer") else _compress
        return None
