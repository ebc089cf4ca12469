"""A dispatch mode that notes the largest tensor that is made."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
        }
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in given:
                self.size = max(self.size, each.untyped_storage().nbytes())
        return result
