"""The mask function of backends that read the tree themselves and need no dense mask.

In a step the mask function returns the rule of a layer kind: a sliding window, a chunk, or neither. The rule is derived
from the model's own mask function if that consists of known parts; otherwise a dense mask is built, as for "lpr_tree".
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import masking_utils
from transformers.masking_utils import causal_mask_function, sdpa_mask

from lpr.model.attention.dense import Mask, tree_mask
from lpr.model.step_inputs import current_step


@dataclass(frozen=True)
class LayerRule:
    """The mask rule of a layer kind besides the tree: keys of the last `window` positions, or of the same `chunk`."""

    window: int | None = None
    chunk: int | None = None
    mask_function: Callable[..., Any] = field(default=causal_mask_function, compare=False)
    """The model's own mask function, for a layer that needs a dense mask anyway."""


# Closures of one factory share their code object, so comparing it with `is` identifies the factory.
_AND = masking_utils.and_masks(causal_mask_function).__code__
_SLIDING = masking_utils.sliding_window_overlay(1).__code__
_CHUNKED = masking_utils.chunked_overlay(1, torch.zeros(1)).__code__


def layer_rule(mask_function: Callable[..., Any]) -> LayerRule | None:
    """The rule of a mask function of transformers; None if any part of it is unknown.

    Known parts: causal, sliding windows, and chunks, whose left padding is zero in a step.
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

    A compiler cannot inspect functions: it uses the rule that an uncompiled forward found for this `local_size`.
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
