"""Causal convolutions and scans over token trees, from a state before the tree.

A scan is linear attention with decay: a state S [K, V] per head, S_i = decay_i * S_parent + k_i (x) u_i, read by
q_i. Its chunk form (Yang et al., arXiv 2312.06635; Dao and Gu, arXiv 2405.21060) has a causal mask. Parents precede
children, so the mask "ancestor or self" is lower triangular and replaces the causal one, with decays summed along
paths. A tree then costs as much as a chunk of as many entries, and entries need no separate states.

All tensors are float32 except those of `convolve`. Shapes: B rows, n entries, H heads, K and V sizes of a state.
Padding entries have decay 0 and write nothing (`Rule.padding`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lpr.model.recurrent.in_order import Enter, enter_linear
from lpr.model.recurrent.tree import Path, Tree

PIECE = 64  # entries of a chain that are evaluated at once
MOST_VALUES = 1 << 20
"""Most values (4 MiB) of a temporary with decays per channel or states of entries; more only if one entry's decays to
all others, or one channel's states, exceed it."""


class Written(Protocol):
    """The contributions of a tree's entries to the state before it."""

    def after(self, state: Tensor, path: Path | None = None) -> Tensor:
        """The state after `path`; by default after the last entry of a chain."""
        ...


Scan = Callable[[Sequence[Tensor], Tensor, Tree], tuple[Tensor, Written]]
"""From inputs [B, n, ...], the state before them and the tree: outputs [B, n, H, V] and the contributions."""


@dataclass(frozen=True)
class Rule:
    """A scan, and the inputs that padding zeroes."""

    scan: Scan
    padding: tuple[int, ...]  # indices of the inputs that are set to 0 for padding
    enter: Enter  # the scan of one entry, for exact mode


def run_chain(rule: Rule, inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of a chain [B, n, ...] of any length, and the state after it."""
    outputs = []
    for start in range(0, inputs[0].shape[1], PIECE):
        piece = [each[:, start : start + PIECE] for each in inputs]
        out, written = rule.scan(piece, state, Tree.chain(len(state), piece[0].shape[1], state.device))
        state = written.after(state)
        outputs.append(out)
    return torch.cat(outputs, 1), state


# Convolution.


def convolve(
    x: Tensor,
    before: Tensor,
    tree: Tree,
    weight: Tensor,
    bias: Tensor | None,
    activation: Callable[[Tensor], Tensor],
    exact: bool = False,
    dilation: int = 1,
) -> Tensor:
    """A causal convolution per channel along each entry's path; an `exact` one adds in one order.

    x [B, C, n], `before` [B, C, dilation * (width - 1)] the inputs before the tree, weight [C, width]; returns
    [B, C, n].
    """
    whole, width = torch.cat([before, x], -1).to(weight.dtype), weight.shape[1]
    if tree.is_chain and not exact:
        out = F.conv1d(whole, weight[:, None], bias, groups=len(weight), dilation=dilation)
    else:
        index = tree.windows(before.shape[2] + 1)[..., ::dilation]
        taps = (gather_entries(whole, index[..., back]).float() * weight[:, back, None] for back in range(width))
        out = sum(taps, torch.zeros((), device=x.device) if bias is None else bias.float()[:, None]).to(weight.dtype)
    return activation(out).to(x.dtype)


def windows(x: Tensor, before: Tensor, tree: Tree) -> Tensor:
    """[B, C, n, width]: the last inputs along each entry's path, its own last. x and `before` as `convolve`."""
    whole, index = torch.cat([before, x], -1), tree.windows(before.shape[2] + 1)
    return gather_entries(whole, index.flatten(1)).unflatten(2, index.shape[1:])


def gather_entries(values: Tensor, index: Tensor) -> Tensor:
    """`values` [B, C, n] at `index` [B, m]: [B, C, m]."""
    if len(values) == 1:
        return values.index_select(2, index[0])
    return values.gather(2, index[:, None].expand(-1, values.shape[1], -1))


@dataclass(frozen=True)
class Convolved:
    x: Tensor  # [B, C, n]
    tree: Tree

    def after(self, state: Tensor, path: Path | None = None) -> Tensor:
        """The last inputs of a path, [B, C, width - 1]; `state` holds those before the tree."""
        width = state.shape[2] + 1
        whole = torch.cat([state, self.x], -1)
        if path is None:
            return whole[..., whole.shape[2] - width + 1 :]
        index = self.tree.windows(width)[torch.arange(len(path.last), device=state.device), path.last.clamp(min=0), 1:]
        kept = torch.arange(width - 1, device=state.device)
        return gather_entries(whole, torch.where(path.last[:, None] >= 0, index, kept))


# Linear attention.


@dataclass(frozen=True)
class Outer:
    keys: Tensor  # [B, H, n, K]
    values: Tensor  # [B, H, n, V]
    decay: Tensor  # [B, H, n, 1 or K]: logarithms, summed along the path of each entry

    def after(self, state: Tensor, path: Path | None = None) -> Tensor:
        """The state [B, H, K, V] after a path."""
        keys, values, decay = self.keys, self.values, self.decay
        last = decay[:, :, -1:]
        if path is not None:
            last = decay.gather(2, path.last.clamp(min=0)[:, None, None, None].expand(*last.shape))
            last = last * (path.last >= 0)[:, None, None, None]
            keys, values, decay = (path.of(each, 2) for each in (keys, values, decay))
            keys = keys * path.real[:, None, :, None]
        weighted = keys * (last - decay).clamp(max=0).exp()
        return last.exp().transpose(2, 3) * state + weighted.transpose(2, 3) @ values


def along_paths(values: Tensor, tree: Tree) -> Tensor:
    """Sums of `values` [B, H, n, K] over each entry and its ancestors."""
    return tree.mask.to(values.dtype) @ values


def decayed_scores(readers: Sequence[Tensor], keys: Tensor, log_decay: Tensor, tree: Tree) -> list[Tensor]:
    """Sums of `log_decay` [B, H, n, 1 or K] along paths, and the scores of each of `readers` [B, H, n, K].

    Scores are [B, H, n, n]: products with the `keys` [B, H, n, K] of ancestors, decayed. Decays per channel are made
    for a few entries at a time (MOST_VALUES).
    """
    total, hidden = along_paths(log_decay, tree), ~tree.mask
    if log_decay.shape[3] == 1:
        between = (total - total.transpose(2, 3)).masked_fill_(hidden, -torch.inf).exp_()
        return [total, *(each @ keys.transpose(2, 3) * between for each in readers)]
    batch, heads, count, size = keys.shape
    found = keys.new_zeros(len(readers), batch, heads, count, count)
    rows = min(batch, max(1, MOST_VALUES // (heads * count * size)))
    entries = max(1, MOST_VALUES // (rows * heads * count * size))
    for row, first in product(range(0, batch, rows), range(0, count, entries)):
        end, here = min(first + entries, count), slice(row, row + rows)  # ancestors of these lie before `end`
        between = total[here, :, first:end, None] - total[here, :, None, :end]
        between.masked_fill_(hidden[here, :, first:end, :end, None], -torch.inf).exp_().mul_(keys[here, :, None, :end])
        several = torch.stack([each[here, :, first:end] for each in readers], -1)
        found[:, here, :, first:end, :end] = (between @ several).movedim(-1, 0)
    return [total, *found]


def decayed_attention(inputs: Sequence[Tensor], state: Tensor, tree: Tree) -> tuple[Tensor, Outer]:
    """Mamba 2's SSD (mamba2_chunk_scan): queries and keys [B, n, H, K], values [B, n, H, V], log decay [B, n, H]."""
    queries, keys, values, decay = (each.transpose(1, 2) for each in inputs)
    total, scores = decayed_scores([queries], keys, decay[..., None], tree)
    out = total.exp() * (queries @ state) + scores @ values
    return out.transpose(1, 2), Outer(keys, values, total)


def delta_rule(inputs: Sequence[Tensor], state: Tensor, tree: Tree) -> tuple[Tensor, Outer]:
    """The gated delta rule, with inputs as `decayed_attention` and beta [B, n, H]; log decay may be [B, n, H, K].

    An entry writes the difference of its value to the state's prediction. The triangular system of the chunk form
    (Yang et al., arXiv 2412.06464) gets the tree's mask: row i has the writes of i's ancestors. A decay per channel is
    Kimi Delta Attention (arXiv 2510.26692). Source: torch_chunk_gated_delta_rule, chunk_kimi_delta_attention.
    """
    queries, keys, values, decay, beta = (each.transpose(1, 2) for each in inputs)
    decay = decay if decay.dim() == 4 else decay[..., None]
    total, among_keys, scores = decayed_scores([keys, queries], keys, decay, tree)
    beta, read = beta[..., None], total.exp()
    system = beta * among_keys  # its diagonal counts as 1
    wanted = beta * (values - read * keys @ state)
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = (read * queries) @ state + scores @ written
    return out.transpose(1, 2), Outer(keys, written, total)


DECAYED = Rule(decayed_attention, padding=(2, 3), enter=enter_linear)
DELTA = Rule(delta_rule, padding=(3, 4), enter=enter_linear)
