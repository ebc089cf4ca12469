"""The selective scan of Mamba 1 (arXiv 2312.00752) over token trees. Shapes: lpr.model.recurrent.scans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lpr.model.recurrent import scans
from lpr.model.recurrent.tree import Path, Tree


@dataclass(frozen=True)
class Selective:
    """A scan with a decay per token, channel and place of its state: x and dt [B, n, C], B and C [B, n, K].

    There is no chunk form with matrix products, so the states of all entries are computed, one depth at a time. Source:
    mamba_selective_scan of transformers.
    """

    rates: Tensor  # A [C, K], negative
    padding = (1,)  # as Rule.padding

    def scan(self, inputs: Sequence[Tensor], state: Tensor, tree: Tree) -> tuple[Tensor, Steps]:
        """As Scan, with a state [B, C, K] and outputs [B, n, C]; some channels at a time (MOST_VALUES)."""
        batch, count, channels = inputs[0].shape
        outputs, last, most = [], [], max(1, scans.MOST_VALUES // (batch * (count + 1) * state.shape[2]))
        for first in range(0, channels, most):
            here = slice(first, first + most)
            given = [*(each[..., here] for each in inputs[:2]), *inputs[2:]]
            states = self._states(self.rates[here], given, state[:, here], tree)
            outputs.append((states @ inputs[3][..., None]).squeeze(-1))
            last.append(states[:, -1].clone())
        return torch.cat(outputs, 2), Steps(self, list(inputs), torch.cat(last, 1))

    def enter(self, state: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        x, dt, keys, queries = inputs
        state.mul_((dt[:, None] * self.rates).exp()).add_((dt * x)[:, None] * keys)
        return (state * queries).sum(-1)

    def _states(self, rates: Tensor, inputs: Sequence[Tensor], state: Tensor, tree: Tree) -> Tensor:
        """The states [B, n, C, K] after all entries: S = exp(dt A) S_parent + dt x B."""
        batch, count = inputs[0].shape[:2]
        found = torch.cat([state.new_empty(batch * count, *state.shape[1:]), state])
        flat = [each.flatten(0, 1) for each in inputs]
        for entries, parents in tree.levels:
            x, dt, keys, _ = (each[entries] for each in flat)
            written = (x * dt)[..., None] * keys[..., None, :]
            found[entries] = (dt[..., None] * rates).exp() * found[parents] + written
        return found[: batch * count].unflatten(0, (batch, count))


@dataclass(frozen=True)
class Steps:
    """The inputs of a scan, kept instead of all entries' states, which would take K times the memory."""

    rule: Selective
    inputs: list[Tensor]
    last: Tensor  # the state after the last entry

    def after(self, state: Tensor, path: Path | None = None) -> Tensor:
        if path is None:
            return self.last
        if not path.entries.shape[1]:
            return state
        along = [path.of(each, 1) for each in self.inputs]
        for place in self.rule.padding:
            along[place] = torch.where(path.real[..., None], along[place], 0)
        return self.rule.scan(along, state, Tree.chain(len(state), along[0].shape[1], state.device))[1].last
