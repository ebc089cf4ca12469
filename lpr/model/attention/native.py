"""Tree attention in C++ on a CPU (native/paged_attention.h), which reads block tables and the trees of a step.

Keys and values are read once for all entries of a sequence and all heads of a group; nothing is gathered and no mask is
built. In exact mode each entry walks its own path (native/attention.h), in the order of positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from lpr import native
from lpr.model.threads import has_team

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class LayerRule:
    """The rule of a layer kind besides the tree: keys of the last `window` positions, or of the same `chunk`."""

    window: int | None = None
    chunk: int | None = None
    mask_function: Callable[..., Any] = field(default=causal_mask_function, compare=False)
    """The model's own function, for a layer that needs a dense mask after all."""


def why_not_native(dtype: torch.dtype) -> str | None:
    """Why attention in C++ cannot be had for a model of `dtype` on this machine; None if it can."""
    if native.PagedAttention is None:
        return "it needs the extension (reinstall lpr where there is a compiler)"
    if dtype not in DTYPES:
        return f"it works in float32 and bfloat16, not {str(dtype)[6:]}"
    return None if has_team() or torch.get_num_threads() == 1 else "torch's threads cannot be reached on this platform"


def attend_pages(
    pages: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: LayerRule,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    exact: bool = False,
) -> Tensor:
    """Attention of `query` [B, Hq, T, D] over all rows of a cache, `key`, `value` [Hk, rows, D(v)]: [B, T, Hq, Dv].

    `pages` is a native.PagedAttention. Padding entries return 0. Raises TypeError for other dtypes than DTYPES.
    """
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"attention='native' works in float32 and bfloat16, not {query.dtype} over {key.dtype}")
    if query.stride(3) != 1:
        query = query.contiguous()
    batch, num_heads, length, dim = query.shape
    own_sinks = None if sinks is None else sinks.float().contiguous()
    out = query.new_zeros(batch, length, num_heads, value.shape[2])
    pages.attend(
        query.dtype == torch.bfloat16,
        query.data_ptr(),
        query.stride()[:3],
        key.data_ptr(),
        key.stride()[:2],
        value.data_ptr(),
        value.stride()[:2],
        out.data_ptr(),
        length,
        num_heads,
        len(key),
        dim,
        value.shape[2],
        dim**-0.5 if scale is None else scale,
        softcap or 0.0,
        rule.window or 0,
        rule.chunk or 0,
        0 if own_sinks is None else own_sinks.data_ptr(),
        exact,
    )
    return out
