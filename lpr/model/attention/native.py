"""Tree attention in C++ on a CPU (native/paged_attention.h), which reads block tables and the trees of a step.

Keys and values are read once for all entries of a sequence and all heads of a group; nothing is gathered and no mask is
built. In exact mode each entry walks its own path (native/attention.h), in the order of positions.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from lpr import native
from lpr.model.attention.dense import Mask, Scoring, check_passed_on, tree_attention
from lpr.model.attention.layer_rules import LayerRule, kernel_mask
from lpr.model.step_inputs import current_step
from lpr.model.threads import has_team

NATIVE, NATIVE_EXACT = "lpr_tree_native", "lpr_tree_native_exact"  # names of the implementations
DTYPES = (torch.float32, torch.bfloat16)


def why_not_native(dtype: torch.dtype) -> str | None:
    """The reason why C++ attention is unavailable for a model of `dtype` on this machine; None if it is available."""
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
        query.dtype == torch.bfloat16, query.data_ptr(), query.stride()[:3], key.data_ptr(), key.stride()[:2],
        value.data_ptr(), value.stride()[:2], out.data_ptr(), length, num_heads, len(key), dim, value.shape[2],
        dim**-0.5 if scale is None else scale, softcap or 0.0, rule.window or 0, rule.chunk or 0,
        0 if own_sinks is None else own_sinks.data_ptr(), exact,
    )  # fmt: skip
    return out


def native_attention(is_exact: bool) -> Callable[..., tuple[Tensor, None]]:
    """For AttentionInterface: attention in C++ in a step that has pages, else by "lpr_tree"."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, rule: LayerRule | Mask, **given: Any
    ) -> tuple[Tensor, None]:
        step, (scale, softcap, sinks, bias) = current_step(), Scoring.of(query, **given)
        if not isinstance(rule, LayerRule):  # not in a step that has pages
            return tree_attention(module, query, key, value, rule, **given)
        assert step is not None and step.pages is not None
        if bias is not None:
            raise TypeError("the model adds a bias to scores")
        check_passed_on(step, key, value)
        return attend_pages(step.pages, query, key[0], value[0], rule, scale, softcap, sinks, is_exact), None

    return attend


for _name in (NATIVE, NATIVE_EXACT):
    AttentionInterface.register(_name, native_attention(_name == NATIVE_EXACT))
    AttentionMaskInterface.register(_name, kernel_mask)
