"""The kernels as attention implementations of transformers: a mask function without a mask.

In a step the mask function returns the rule of a layer kind: a window, a chunk, or neither. It is read off the model's
own mask function if that consists of known parts; otherwise the dense mask is built, as for "lpr_tree".
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.masking_utils import causal_mask_function, sdpa_mask

from lpr.config import InputError
from lpr.model.attention.dense import Mask, additive, check_passed_on, tree_attention, tree_mask, visible_nodes
from lpr.model.attention.native import LayerRule, attend_pages
from lpr.model.step_inputs import current_step
from lpr.model.tree_mask import find_paths

KERNELS = {"triton": "lpr_tree_triton", "native": "lpr_tree_native"}
"""Names of the attention implementations, by the choice that `TreeModel` takes."""
EXACT_KERNELS = {"triton": "lpr_tree_triton_exact", "native": "lpr_tree_native_exact"}
"""The same in exact mode."""
_MODULES = {
    "lpr_tree_triton": "lpr.model.kernels.attention_kernel",
    "lpr_tree_triton_exact": "lpr.model.kernels.exact_kernel",
}


# Closures of one factory share their code object, so `is` on it tells which factory made a function.
_AND = masking_utils.and_masks(causal_mask_function).__code__
_SLIDING = masking_utils.sliding_window_overlay(1).__code__
_CHUNKED = masking_utils.chunked_overlay(1, torch.zeros(1)).__code__


def layer_rule(mask_function: Callable[..., Any]) -> LayerRule | None:
    """The rule that a mask function of transformers stands for; None if any part of it is unknown.

    Known are causal, alone or together with sliding windows and chunks, whose left padding is zero in a step.
    """
    windows: list[Any] = []
    chunks: list[Any] = []
    causal, parts = False, [mask_function]
    while parts:
        part = parts.pop()
        code = getattr(part, "__code__", None)
        if part is causal_mask_function:
            causal = True
        elif code is _AND:
            parts.extend(_captured(part).get("mask_functions", ()))
        elif code is _SLIDING:
            windows.append(_captured(part).get("sliding_window"))
        elif code is _CHUNKED:
            chunks.append(_captured(part).get("chunk_size"))
        else:
            return None
    if not causal or len(set(chunks)) > 1 or not all(isinstance(size, int) and size > 0 for size in windows + chunks):
        return None
    return LayerRule(min(windows, default=None), chunks[0] if chunks else None, mask_function)


def _captured(closure: Any) -> dict[str, Any]:
    cells = [cell.cell_contents for cell in closure.__closure__]
    return dict(zip(closure.__code__.co_freevars, cells, strict=True))


_dense_mask = tree_mask(sdpa_mask, may_be_none=False)


def kernel_mask(
    *sizes: Any, mask_function: Callable[..., Any] = causal_mask_function, local_size: int | None = None, **kwargs: Any
) -> LayerRule | Mask:
    """For AttentionMaskInterface: a LayerRule in a step that has bits, else the masks of "lpr_tree".

    A compiler cannot look into functions: it takes what direct forwards have found for layers of this `local_size`.
    """
    step = current_step()
    if step is not None and (step.pages is not None or step.blocks[0].tree_mask is not None):
        if torch.compiler.is_compiling():
            rule = step.layer_rules.get(local_size)
        else:
            rule = layer_rule(mask_function)
            known = step.layer_rules.get(local_size, rule)
            step.layer_rules[local_size] = rule if known == rule else None
        if rule is not None:
            return rule
        if step.pages is not None:
            raise TypeError("the model has a mask of its own")
    return _dense_mask(*sizes, mask_function=mask_function, local_size=local_size, **kwargs)


_versions: dict[str, Any] = {}


def load_kernel(name: str) -> None:
    """Import a version before the first forward: an import would break a compiled forward in every layer."""
    if name in _MODULES:
        _versions[name] = import_module(_MODULES[name])


def kernel_attention(name: str) -> Callable[..., tuple[torch.Tensor, None]]:
    """For AttentionInterface: attention by the version `name`, which `load_kernel` has imported."""
    is_exact = name in EXACT_KERNELS.values()

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: LayerRule | Mask,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        rule, step = attention_mask, current_step()
        if is_exact and step is not None and (position_bias is not None or not isinstance(rule, LayerRule)):
            raise InputError("exact attention on a GPU knows causal, sliding and chunked masks and no bias on scores")
        if not isinstance(rule, LayerRule):
            return tree_attention(module, query, key, value, rule, scaling, softcap, s_aux, position_bias)
        assert step is not None and step.blocks[0].tree_mask is not None
        block, bits = step.blocks[0], step.blocks[0].tree_mask
        if position_bias is not None:  # the kernels take none
            mask = additive(visible_nodes(block, rule.mask_function), query.dtype)
            return tree_attention(module, query, key, value, mask, scaling, softcap, s_aux, position_bias)
        if is_exact and block.paths is None:  # once a step, for all layers
            block.paths = find_paths(bits)
        rules = {"window": rule.window, "chunk": rule.chunk, "softcap": softcap, "scale": scaling, "sinks": s_aux}
        parts = query, key, value, bits, *([block.paths] if is_exact else [])
        if block.table is not None:
            check_passed_on(step, key, value)
            rules["pages"] = _versions[name].Pages(block.table, step.cache.page_size, block.num_kv)
        return _versions[name].tree_attention(*parts, **rules).transpose(1, 2).contiguous(), None

    return attend


def native_attention(is_exact: bool) -> Callable[..., tuple[torch.Tensor, None]]:
    """For AttentionInterface: attention in C++ in a step that has pages, else by "lpr_tree"."""

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: LayerRule | Mask,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        rule, step = attention_mask, current_step()
        if not isinstance(rule, LayerRule):  # not in a step that has pages
            return tree_attention(module, query, key, value, rule, scaling, softcap, s_aux, position_bias)
        assert step is not None and step.pages is not None
        if position_bias is not None:
            raise TypeError("the model adds a bias to scores")
        check_passed_on(step, key, value)
        return attend_pages(step.pages, query, key[0], value[0], rule, scaling, softcap, s_aux, is_exact), None

    return attend


for _name in _MODULES:
    AttentionInterface.register(_name, kernel_attention(_name))
for _names in (KERNELS, EXACT_KERNELS):
    AttentionInterface.register(_names["native"], native_attention(_names is EXACT_KERNELS))
for _name in (*KERNELS.values(), *EXACT_KERNELS.values()):
    AttentionMaskInterface.register(_name, kernel_mask)
