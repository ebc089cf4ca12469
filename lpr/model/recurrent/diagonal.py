"""Scans over token trees with a decay per token, channel and place of its state. Shapes: lpr.model.recurrent.scans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lpr.model.recurrent import scans
from lpr.model.recurrent.scans import Path
from lpr.model.recurrent.tree import Tree


class Diagonal(ABC):
    """A scan whose states have no chunk form by matrix products: those of all entries are computed, depth by depth.

    Its first two inputs are [B, n, C].
    """

    padding: tuple[int, ...]
    """As Rule.padding."""

    @abstractmethod
    def decay(self, inputs: Sequence[Tensor]) -> Tensor:
        """Factors [m, C, K] of the state before entries with these inputs [m, ...]."""

    @abstractmethod
    def write(self, inputs: Sequence[Tensor]) -> Tensor:
        """What they add to it, [m, C, K]."""

    @abstractmethod
    def read(self, states: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Outputs [B, n, C] of states [B, n, C, K] behind entries with inputs [B, n, ...]."""

    def of_channels(self, channels: slice) -> Diagonal:
        """The scan of some channels."""
        return self

    def scan(self, inputs: Sequence[Tensor], state: Tensor, tree: Tree) -> tuple[Tensor, Steps]:
        """As Scan, with a state [B, C, K] and outputs [B, n, C]; some channels at a time (MOST_VALUES)."""
        batch, count, channels = inputs[0].shape
        outputs, last, most = [], [], max(1, scans.MOST_VALUES // (batch * (count + 1) * state.shape[2]))
        for first in range(0, channels, most):
            here = slice(first, first + most)
            rule, given = self.of_channels(here), [*(each[..., here] for each in inputs[:2]), *inputs[2:]]
            states = rule.states(given, state[:, here], tree)
            outputs.append(rule.read(states, given))
            last.append(states[:, -1].clone())
        return torch.cat(outputs, 2), Steps(self, list(inputs), torch.cat(last, 1))

    def states(self, inputs: Sequence[Tensor], state: Tensor, tree: Tree) -> Tensor:
        """The states [B, n, C, K] behind all entries."""
        batch, count = inputs[0].shape[:2]
        found = torch.cat([state.new_empty(batch * count, *state.shape[1:]), state])
        flat = [each.flatten(0, 1) for each in inputs]
        for entries, parents in tree.levels:
            here = [each[entries] for each in flat]
            found[entries] = self.decay(here) * found[parents] + self.write(here)
        return found[: batch * count].unflatten(0, (batch, count))


@dataclass(frozen=True)
class Selective(Diagonal):
    """The selective scan of Mamba 1 (arXiv 2312.00752): x and dt [B, n, C], B and C [B, n, K].

    Source: mamba_selective_scan of transformers.
    """

    rates: Tensor
    """A [C, K], negative."""
    padding = (1,)

    def of_channels(self, channels: slice) -> Selective:
        """With their rates."""
        return Selective(self.rates[channels])

    def decay(self, inputs: Sequence[Tensor]) -> Tensor:
        """exp(dt A)."""
        return (inputs[1][..., None] * self.rates).exp()

    def write(self, inputs: Sequence[Tensor]) -> Tensor:
        """dt x B."""
        return (inputs[0] * inputs[1])[..., None] * inputs[2][..., None, :]

    def read(self, states: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Products with C."""
        return (states @ inputs[3][..., None]).squeeze(-1)


@dataclass(frozen=True)
class Steps:
    """The inputs of a diagonal scan; states of all entries would take K times as much."""

    rule: Diagonal
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
        for place in self.rule.padding:
            along[place] = torch.where(path.real[..., None], along[place], 0)
        return self.rule.scan(along, state, Tree.chain(len(state), along[0].shape[1], state.device))[1].last
