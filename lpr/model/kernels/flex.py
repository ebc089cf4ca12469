"""Tree attention through FlexAttention, whose mask function reads the bits.

On a GPU it is compiled once per shape (seconds); uncompiled it is slow and materialises the scores, which is good
enough to test what the mask function means on a CPU. The BlockMask says how many key blocks a row has, in a tensor on
the device; within them every block is partial, because a BlockMask that were built from one tree would be wrong for
the next one in the same captured graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from lpr.model.kernels.mask import WORD_BITS, TreeMask

BLOCK = 128


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: TreeMask,
    *,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference.tree_attention`; returns [B, Hq, T, Dv]."""
    visible = mask_mod(mask, window, chunk)
    attend: Any = compiled() if query.is_cuda else flex_attention
    out: Any = attend(
        query,
        key,
        value,
        score_mod=None if softcap is None else _soft_cap(softcap),
        block_mask=block_mask(mask, visible, key.shape[2]),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is not None:
        # A sink is one more logit in the denominator.
        out, aux = out
        out = out * torch.sigmoid(aux.lse - sinks.float()[:, None])[..., None].to(out.dtype)
    return out.masked_fill(~mask.real()[:, None, :, None], 0)


def mask_mod(mask: TreeMask, window: int | None, chunk: int | None) -> Callable[..., torch.Tensor]:
    """The rule of `reference.tree_attention` for one (batch, head, query, key) index, as FlexAttention asks for it."""
    length = mask.positions.shape[1]
    last = mask.bits.shape[2] * WORD_BITS - 1

    def visible(batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        cached, entries = mask.num_cached[batch], mask.num_entries[batch]
        entry = (key - cached).clamp(0, last)
        word = mask.bits[batch, query, entry // WORD_BITS]
        committed = key < cached
        ancestor = ((word >> (entry % WORD_BITS)) & 1) != 0
        # `entry` is clamped: a cache row behind all words would repeat the last bit.
        seen = (committed | (ancestor & (key - cached < entries))) & (query >= length - entries)
        if window is not None or chunk is not None:
            index = (length - entries + entry).clamp(0, length - 1)
            held = torch.where(committed, key, mask.positions[batch, index])
            asked = mask.positions[batch, query]
            if window is not None:
                seen = seen & (held > asked - window)
            if chunk is not None:
                seen = seen & (held // chunk == asked // chunk)
        return seen

    return visible


def block_mask(mask: TreeMask, visible: Callable[..., torch.Tensor], num_kv: int) -> BlockMask:
    """All key blocks up to the last entry's, each partial."""
    batch, length = mask.positions.shape
    num_q_blocks, num_kv_blocks = -(-length // BLOCK), -(-num_kv // BLOCK)
    counts = (mask.num_cached + mask.num_entries + BLOCK - 1) // BLOCK
    counts = counts[:, None, None].expand(batch, 1, num_q_blocks).contiguous()
    blocks = torch.arange(num_kv_blocks, dtype=torch.int32, device=counts.device)
    return BlockMask.from_kv_blocks(
        counts.to(torch.int32),
        blocks.expand(batch, 1, num_q_blocks, num_kv_blocks).contiguous(),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(length, num_kv),
        compute_q_blocks=False,
    )


def _soft_cap(softcap: float) -> Callable[..., torch.Tensor]:
    def capped(score: torch.Tensor, batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


@lru_cache
def compiled() -> Callable[..., Any]:
    """FlexAttention's kernel; compiling waits for the first call of each shape."""
    return torch.compile(flex_attention, dynamic=False)
