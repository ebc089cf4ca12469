"""Exact mode's scans: each entry separately, from its parent's state.

So an entry has the same bits in every tree, chunk and batch, and a state depends only on its tokens. Linear attention
is evaluated in C++ (native/recurrence.h) or, without the extension, by torch; the bits of the two differ.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lpr import native
from lpr.model.recurrent.tree import Path, Tree
from lpr.model.threads import team_size

Enter = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""Advances one row's state in place by the inputs of one entry, and returns the entry's output."""


def enter_linear(state: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """Linear attention with decay: state [H, K, V], query and key [H, K], value [H, V], log decay [H] or [H, K].

    With a beta [H] as the last input, the delta rule: the state gets the difference of the value to its prediction.
    """
    query, key, value, decay, *beta = inputs
    state.mul_(decay.exp().view(*decay.shape, *[1] * (3 - decay.dim())))
    if beta:
        value = beta[0][:, None] * (value - (state * key[..., None]).sum(1))
    state.add_(key[..., None] * value[:, None])
    return (state * query[..., None]).sum(1)


@dataclass(frozen=True)
class Walked:
    """The contributions of entries to a state, as their inputs."""

    enter: Enter
    inputs: list[Tensor]  # [B, n, ...]
    last: Tensor  # the states after the last entries

    def after(self, state: Tensor, path: Path | None = None) -> Tensor:
        if path is None:
            return self.last
        found = state.clone()
        counts = path.real.sum(1).tolist()
        for row, (entries, count) in enumerate(zip(path.entries, counts, strict=True)):
            if count:
                along = [each[row].index_select(0, entries[:count]) for each in self.inputs]
                _walk_row(self.enter, along, np.arange(-1, count - 1), found[row])
        return found


def walk(enter: Enter, inputs: Sequence[Tensor], state: Tensor, tree: Tree, pads: np.ndarray) -> tuple[Tensor, Walked]:
    """As Scan: outputs [B, n, ...] of entries [B, n, ...]; the first `pads[b]` entries of row b are padding: 0."""
    last, count, outputs = state.clone(), tree.shape[1], dict[int, Tensor]()
    for row, (parents, pad) in enumerate(zip(tree.parents, pads.tolist(), strict=True)):
        if (pad := max(pad, 0)) < count:
            real = [each[row, pad:] for each in inputs]
            outputs[row] = _walk_row(enter, real, np.maximum(parents[pad:] - pad, -1), last[row])
    some = next(iter(outputs.values()))
    found = some.new_zeros(len(last), count, *some.shape[1:])
    for row, each in outputs.items():
        found[row, count - len(each) :] = each
    return found, Walked(enter, list(inputs), last)


def _walk_row(enter: Enter, inputs: Sequence[Tensor], parents: np.ndarray, state: Tensor) -> Tensor:
    """Outputs [n, ...] of one row's entries; `state` becomes the state after the last one."""
    if enter is enter_linear and native.walk_linear is not None:
        return _walk_natively(inputs, parents, state)
    outputs, states = list[Tensor](), {-1: state.clone()}
    last = {parent: entry for entry, parent in enumerate(parents.tolist())}  # the last child may reuse the state
    for entry, parent in enumerate(parents.tolist()):
        own = states.pop(parent) if last[parent] == entry else states[parent].clone()
        outputs.append(enter(own, [each[entry] for each in inputs]))
        if entry in last:
            states[entry] = own
        elif entry == len(parents) - 1:
            state.copy_(own)
    return torch.stack(outputs)


def _walk_natively(inputs: Sequence[Tensor], parents: np.ndarray, state: Tensor) -> Tensor:
    query, _, value, decay, *beta = (each.contiguous() for each in inputs)
    key = inputs[1].contiguous()
    assert native.walk_linear is not None and state.is_contiguous()
    out = torch.empty_like(value)
    order = np.ascontiguousarray(parents, np.int32)
    native.walk_linear(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), decay.data_ptr(), beta[0].data_ptr() if beta else 0,
        order, state.data_ptr(), out.data_ptr(), *state.shape, decay.dim() == 3, team_size(),
    )  # fmt: skip
    return out
