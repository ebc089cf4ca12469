"""Attention by the Triton kernels, as implementations of transformers, over trees that are given as bits."""

from collections.abc import Callable
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from lpr.config import InputError
from lpr.model.attention.dense import Mask, Scoring, additive, check_passed_on, tree_attention, visible_nodes
from lpr.model.attention.layer_rules import LayerRule, kernel_mask
from lpr.model.step_inputs import current_step
from lpr.model.tree_mask import find_paths

TRITON, TRITON_EXACT = "lpr_tree_triton", "lpr_tree_triton_exact"  # names of the implementations
_MODULES = {TRITON: "lpr.model.kernels.attention_kernel", TRITON_EXACT: "lpr.model.kernels.exact_kernel"}
_versions: dict[str, Any] = {}
_MOST_BLOCKS = 1 << 12  # keys are split only where there are fewer blocks than multiprocessors
_counts: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()


def load_kernel(name: str) -> None:
    """Import a kernel before the first forward: an import within it would cause a graph break in every layer."""
    _versions[name] = import_module(_MODULES[name])


def _arrived(cache: Any, query: Tensor) -> Tensor | None:
    """The zeros of a cache for counting splits: its steps run one after the other. None where none can be made now."""
    if torch.compiler.is_compiling():
        return None
    if (found := _counts.get(cache)) is None and not (query.is_cuda and torch.cuda.is_current_stream_capturing()):
        found = _counts[cache] = query.new_zeros(_MOST_BLOCKS, dtype=torch.int32)
    return found


def kernel_attention(name: str) -> Callable[..., tuple[Tensor, None]]:
    """For AttentionInterface: attention by the version `name`, which `load_kernel` has imported."""
    is_exact = name == TRITON_EXACT

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, rule: LayerRule | Mask, **given: Any
    ) -> tuple[Tensor, None]:
        step, scoring = current_step(), Scoring.of(query, **given)
        if is_exact and step is not None and (scoring.bias is not None or not isinstance(rule, LayerRule)):
            raise InputError("exact attention on a GPU knows causal, sliding and chunked masks and no bias on scores")
        if not isinstance(rule, LayerRule):
            return tree_attention(module, query, key, value, rule, **given)
        assert step is not None and step.blocks[0].tree_mask is not None
        block, bits = step.blocks[0], step.blocks[0].tree_mask
        if scoring.bias is not None:  # the kernels take none
            mask = additive(visible_nodes(block, rule.mask_function), query.dtype)
            return tree_attention(module, query, key, value, mask, **given)
        if is_exact and block.paths is None:  # once per step, for all layers
            block.paths = find_paths(bits)
        rules: dict[str, Any] = {"window": rule.window, "chunk": rule.chunk}
        rules |= {"softcap": scoring.softcap, "scale": scoring.scale, "sinks": scoring.sinks}
        parts = query, key, value, bits, *([block.paths] if is_exact else [])
        if block.table is not None:
            check_passed_on(step, key, value)
            arrived = None if is_exact else _arrived(step.cache, query)
            rules["pages"] = _versions[name].Pages(block.table, step.cache.page_size, block.num_kv, arrived)
        return _versions[name].tree_attention(*parts, **rules).transpose(1, 2).contiguous(), None

    return attend


for _name in _MODULES:
    AttentionInterface.register(_name, kernel_attention(_name))
    AttentionMaskInterface.register(_name, kernel_mask)
