"""Batch-invariant tree attention as a Triton kernel: exact mode on a GPU.

Three things are the same in every step: the tiles (16 query rows, 64 keys), and so the instructions of an addition; the
blocks of keys and their splits, by absolute position; and the order in which they are added. A tree's keys are gathered
along each entry's path, so a block has the same keys as in plain decoding.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from lpr.model.exact import BLOCK
from lpr.model.kernels import device_of
from lpr.model.kernels.attention_kernel import Pages, Rules, check, interpreted
from lpr.model.kernels.exact_code import add_splits, attend_exactly
from lpr.model.tree_mask import Paths, TreeMask

__all__ = ["Pages", "tree_attention"]
LEAST_ROWS = 16  # query rows of a tile: the minimum of a tensor core, because a plain step has few
SPLIT = 8  # blocks of keys per program


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: TreeMask, paths: Paths, pages: Pages | None = None, **given: Any
) -> Tensor:
    """As `attention_kernel.tree_attention`, with sums whose order does not depend on the tree.

    An online softmax processes BLOCK positions at a time; after SPLIT blocks a new one starts; they are then combined
    in order.
    """
    check(query, key, value)
    rules = Rules(**given)
    query, key, value = (each if each.stride(3) == 1 else each.contiguous() for each in (query, key, value))
    batch, num_heads, num_tokens, dim = query.shape
    pages = pages or Pages.none(key, mask)
    num_kv_heads, num_kv, dim_v = key.shape[1], pages.num_kv, value.shape[3]
    group = num_heads // num_kv_heads
    tokens = max(1, LEAST_ROWS // group)
    num_tiles, num_splits = -(-num_tokens // tokens), -(-num_kv // (BLOCK * SPLIT))
    block_dv = max(16, triton.next_power_of_2(dim_v))
    shape = (batch, num_kv_heads, num_tokens * group, num_splits)
    parts = [torch.empty(size, dtype=torch.float32, device=query.device) for size in ((*shape, dim_v), shape, shape)]
    out = query.new_empty(batch, num_tokens, num_heads, dim_v)
    with device_of(query):
        attend_exactly[(num_tiles * num_splits, num_kv_heads, batch)](
            query, key, value, pages.table, paths.entries, paths.num_shared, mask.num_cached, mask.num_entries,
            mask.positions.contiguous(), *parts, *rules.numbers(dim), num_tokens, num_tiles, num_splits,
            *query.stride()[:3], *pages.strides(key), *pages.strides(value), pages.table.stride(0),
            NUM_KV_HEADS=num_kv_heads, GROUP=group, D=dim, DV=dim_v, TOKENS=tokens,
            BLOCK_M=max(LEAST_ROWS, triton.next_power_of_2(group)), BLOCK_N=BLOCK,
            BLOCK_D=max(16, triton.next_power_of_2(dim)), BLOCK_DV=block_dv, SPLIT=SPLIT,
            **rules.flags(), UPCAST=interpreted() and query.dtype == torch.bfloat16, PAGE=pages.size,
            num_warps=4, num_stages=1,
        )  # fmt: skip
        add_splits[(-(-num_tokens * group // LEAST_ROWS), num_kv_heads, batch)](
            *parts, rules.sinks if rules.sinks is not None else out, out, num_tokens, num_splits,
            NUM_KV_HEADS=num_kv_heads, GROUP=group, DV=dim_v, BLOCK_M=LEAST_ROWS, BLOCK_DV=block_dv,
            HAS_SINKS=rules.sinks is not None, num_warps=4,
        )  # fmt: skip
    return out.transpose(1, 2)
