"""Causal convolutions and scans over token trees, from a state before the tree.

A scan is linear attention with decay: a state S [K, V] per head, S_i = decay_i * S_parent + k_i (x) u_i, read by
q_i. Its chunk form (Yang et al., arXiv 2312.06635; Dao and Gu, arXiv 2405.21060) has a causal mask. Entries stand
parents first, so "ancestor or self" is lower triangular and takes that mask's place, with decays summed along paths.
A tree then costs what a chunk of as many entries costs, and no entry needs a state of its own.

All tensors are float32 except those of `convolve`. Shapes: B rows, n entries, H heads, K and V sizes of a state.
Entries that pad a row have decay 0 and write nothing (`Rule.padding`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lpr.model.recurrent.tree import Tree

PIECE = 64
"""Entries of a chain that are evaluated at once."""


@dataclass(frozen=True)
class Path:
    """Entries of each row that become part of its sequence."""

    entries: Tensor
    """[B, m] int64: their places, ancestors first; 0 behind the last one."""
    real: Tensor
    """[B, m] bool."""
    last: Tensor
    """[B] int64: the last one's place, -1 if there is none."""

    def of(self, values: Tensor, dim: int) -> Tensor:
        """`values` along the path: dimension `dim` becomes m."""
        shape = [1] * values.dim()
        shape[0], shape[dim] = self.entries.shape
        sizes = list(values.shape)
        sizes[dim] = self.entries.shape[1]
        return values.gather(dim, self.entries.view(shape).expand(sizes))


class Written(Protocol):
    """What the entries of a tree add to the state before it."""

    def after(self, state: Tensor, path: Path | None = None) -> Tensor:
        """The state behind `path`; without it behind the last entry of a chain."""
        ...


Scan = Callable[[Sequence[Tensor], Tensor, Tree], tuple[Tensor, Written]]
"""Takes inputs [B, n, ...], the state before them and the tree; returns outputs [B, n, H, V] and what was written."""


@dataclass(frozen=True)
class Rule:
    """A scan and what pads its rows."""

    scan: Scan
    padding: tuple[int, ...]
    """Inputs that are 0 for entries that pad a row."""


def run_chain(rule: Rule, inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of a chain [B, n, ...] of any length, and the state behind it."""
    outputs = []
    for start in range(0, inputs[0].shape[1], PIECE):
        piece = [each[:, start : start + PIECE] for each in inputs]
        out, written = rule.scan(piece, state, Tree.chain(len(state), piece[0].shape[1], state.device))
        state = written.after(state)
        outputs.append(out)
    return torch.cat(outputs, 1), state


# Convolution.


def convolve(
    x: Tensor, before: Tensor, tree: Tree, weight: Tensor, bias: Tensor | None, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    """A causal convolution per channel along each entry's path.

    x [B, C, n], `before` [B, C, width - 1] the inputs before the tree, weight [C, width]; returns [B, C, n].
    """
    whole, width = torch.cat([before, x], -1).to(weight.dtype), weight.shape[1]
    if tree.is_chain:
        out = F.conv1d(whole, weight[:, None], bias, groups=len(weight))
    else:
        index = tree.windows(width)
        taps = (gather_entries(whole, index[..., back]).float() * weight[:, back, None] for back in range(width))
        out = sum(taps, torch.zeros((), device=x.device) if bias is None else bias.float()[:, None]).to(weight.dtype)
    return activation(out).to(x.dtype)


def gather_entries(values: Tensor, index: Tensor) -> Tensor:
    """`values` [B, C, n] at `index` [B, m]: [B, C, m]."""
    if len(values) == 1:
        return values.index_select(2, index[0])
    return values.gather(2, index[:, None].expand(-1, values.shape[1], -1))


@dataclass(frozen=True)
class Convolved:
    """The inputs of a convolution over a tree."""

    x: Tensor
    """[B, C, n]"""
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
    """Products of keys and values with decay."""

    keys: Tensor
    """[B, H, n, K]"""
    values: Tensor
    """[B, H, n, V]"""
    decay: Tensor
    """[B, H, n, 1 or K]: logarithms, summed along the path of each entry."""

    def after(self, state: Tensor, path: Path | None = None) -> Tensor:
        """The state [B, H, K, V] behind a path."""
        keys, values, decay = self.keys, self.values, self.decay
        last = decay[:, :, -1:]
        if path is not None:
            last = decay.gather(2, path.last.clamp(min=0)[:, None, None, None].expand(*last.shape))
            last = last * (path.last >= 0)[:, None, None, None]
            keys, values, decay = (path.of(each, 2) for each in (keys, values, decay))
            keys = keys * path.real[:, None, :, None]
        weighted = keys * (last - decay).clamp(max=0).exp()
        return last.exp().transpose(2, 3) * state + weighted.transpose(2, 3) @ values


def decays(log_decay: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
    """Sums along paths [B, H, n, 1 or K] of logarithms of decay, and decays between entries [B, H, n, n, (K)].

    Between an entry and what is not its ancestor the decay is 0.
    """
    total = tree.mask.to(log_decay.dtype) @ log_decay
    between = total[:, :, :, None] - total[:, :, None]
    return total, between.masked_fill(~tree.mask[..., None], -torch.inf).exp().squeeze(-1)


def scores(queries: Tensor, keys: Tensor, between: Tensor) -> Tensor:
    """[B, H, n, n]: products of queries and earlier keys, decayed."""
    if between.dim() == 4:
        return queries @ keys.transpose(2, 3) * between
    return torch.einsum("bhik,bhjk,bhijk->bhij", queries, keys, between)


def decayed_attention(inputs: Sequence[Tensor], state: Tensor, tree: Tree) -> tuple[Tensor, Outer]:
    """Mamba 2's SSD and lightning attention: queries and keys [B, n, H, K], values [B, n, H, V], log decay [B, n, H].

    Source: mamba2_chunk_scan and MiniMaxLightningAttention of transformers.
    """
    queries, keys, values, decay = (each.transpose(1, 2) for each in inputs)
    total, between = decays(decay[..., None], tree)
    out = total.exp() * (queries @ state) + scores(queries, keys, between) @ values
    return out.transpose(1, 2), Outer(keys, values, total)


def delta_rule(inputs: Sequence[Tensor], state: Tensor, tree: Tree) -> tuple[Tensor, Outer]:
    """The gated delta rule, with inputs as `decayed_attention` and beta [B, n, H]; log decay may be [B, n, H, K].

    An entry writes what its value differs from what the state predicts. The triangular system of the chunk form
    (Yang et al., arXiv 2412.06464) gets the tree's mask: row i holds what i's ancestors wrote. A decay per channel is
    Kimi Delta Attention (arXiv 2510.26692). Source: torch_chunk_gated_delta_rule, chunk_kimi_delta_attention.
    """
    queries, keys, values, decay, beta = (each.transpose(1, 2) for each in inputs)
    total, between = decays(decay if decay.dim() == 4 else decay[..., None], tree)
    beta, read = beta[..., None], total.exp()
    system = beta * scores(keys, keys, between)  # its diagonal counts as 1
    wanted = beta * (values - read * keys @ state)
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = (read * queries) @ state + scores(queries, keys, between) @ written
    return out.transpose(1, 2), Outer(keys, written, total)


DECAYED = Rule(decayed_attention, padding=(2, 3))
DELTA = Rule(delta_rule, padding=(3, 4))


# Mamba 1.


@dataclass(frozen=True)
class Selective:
    """The selective scan of Mamba 1 (arXiv 2312.00752): each channel and place of its state has its own decay.

    That has no chunk form by matrix products. States of all entries are computed, depth by depth.
    """

    rates: Tensor
    """A [C, K], negative."""

    def scan(self, inputs: Sequence[Tensor], state: Tensor, tree: Tree) -> tuple[Tensor, Steps]:
        """x and dt [B, n, C], B and C [B, n, K], state [B, C, K]; returns [B, n, C]. Source: mamba_selective_scan."""
        states = self.states(inputs, state, tree)
        out = (states @ inputs[3][..., None]).squeeze(-1)
        return out, Steps(self, list(inputs), states[:, -1].clone())

    def states(self, inputs: Sequence[Tensor], state: Tensor, tree: Tree) -> Tensor:
        """The states [B, n, C, K] behind all entries."""
        x, steps, keys, _ = inputs
        batch, count = x.shape[:2]
        found = torch.cat([x.new_empty(batch * count, *state.shape[1:]), state])
        x, steps, keys = (x * steps).flatten(0, 1), steps.flatten(0, 1), keys.flatten(0, 1)
        for entries, parents in tree.levels:
            decay = (steps[entries, :, None] * self.rates).exp()
            found[entries] = decay * found[parents] + x[entries, :, None] * keys[entries, None]
        return found[: batch * count].unflatten(0, (batch, count))


@dataclass(frozen=True)
class Steps:
    """The inputs of a selective scan; states of all entries would take K times as much."""

    rule: Selective
    inputs: list[Tensor]
    last: Tensor
    """The state behind the last entry."""

    def after(self, state: Tensor, path: Path | None = None) -> Tensor:
        """The state [B, C, K] behind a path."""
        if path is None:
            return self.last
        if not path.entries.shape[1]:
            return state
        along = [path.of(each, 1) for each in self.inputs]
        along[1] = along[1] * path.real[..., None]
        return self.rule.states(along, state, Tree.chain(len(state), along[0].shape[1], state.device))[:, -1]
