"""A tree of entries, as the input of convolutions and scans."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

from lpr.model.transfer import to_device


@dataclass(frozen=True)
class Path:
    """Entries of each row that become part of its sequence."""

    entries: Tensor  # [B, m] int64: their indices, ancestors first; 0 after the last one
    real: Tensor  # [B, m] bool
    last: Tensor  # [B] int64: index of the last one, -1 if there is none

    def of(self, values: Tensor, dim: int) -> Tensor:
        """`values` along the path: dimension `dim` becomes m."""
        shape = [1] * values.dim()
        shape[0], shape[dim] = self.entries.shape
        sizes = list(values.shape)
        sizes[dim] = self.entries.shape[1]
        return values.gather(dim, self.entries.view(shape).expand(sizes))


class Tree:
    """The entries of B rows, n each, that follow B states; parents precede their children."""

    def __init__(self, parents: np.ndarray, device: torch.device) -> None:
        """`parents` is int64 [B, n]: a parent's place in its row, or -1 for an entry that follows the state."""
        self.parents, self.device = parents, device
        self._windows: dict[int, Tensor] = {}

    @classmethod
    def chain(cls, batch: int, count: int, device: torch.device) -> Self:
        """`count` entries per row, one after the other."""
        return cls(np.tile(np.arange(-1, count - 1), (batch, 1)), device)

    @property
    def shape(self) -> tuple[int, int]:
        return self.parents.shape[0], self.parents.shape[1]

    @cached_property
    def is_chain(self) -> bool:
        """True if each entry follows the one before it, in all rows."""
        return bool((self.parents == np.arange(-1, self.shape[1] - 1)).all())

    @cached_property
    def mask(self) -> Tensor:
        """[B, 1, n, n] bool: entry j is entry i or one of its ancestors. Lower triangular."""
        batch, count = self.shape
        if self.is_chain:
            return torch.ones(count, count, dtype=torch.bool, device=self.device).tril().expand(batch, 1, -1, -1)
        mask = np.zeros((batch, count + 1, count), bool)  # the last row is that of the state
        rows = np.arange(batch)
        for entry in range(count):
            mask[:, entry] = mask[rows, self.parents[:, entry]]
            mask[:, entry, entry] = True
        return to_device(mask[:, None, :count], self.device)

    @cached_property
    def levels(self) -> list[tuple[Tensor, Tensor]]:
        """By depth, the entries of all rows and their parents, int64, as places among B * n entries and B states."""
        batch, count = self.shape
        depth = np.zeros((batch, count + 1), np.int64)
        rows = np.arange(batch)
        for entry in range(count):
            depth[:, entry] = depth[rows, self.parents[:, entry]] + 1
        row = np.arange(batch)[:, None]
        above = np.where(self.parents >= 0, row * count + self.parents, batch * count + row).reshape(-1)
        flat = depth[:, :count].reshape(-1)
        found = [np.nonzero(flat == level)[0] for level in range(1, int(flat.max(initial=0)) + 1)]
        return [(to_device(each, self.device), to_device(above[each], self.device)) for each in found]

    def windows(self, width: int) -> Tensor:
        """[B, n, width] int64: the last `width` entries of each entry's path, itself last.

        Entry j is width - 1 + j, and the last of the `width` - 1 entries that a state holds is width - 2.
        """
        if width not in self._windows:
            at = np.tile(np.arange(self.shape[1]), (self.shape[0], 1))
            found = np.empty((*self.shape, width), np.int64)
            for back in range(width - 1, -1, -1):
                found[..., back] = at + width - 1
                above = np.take_along_axis(self.parents, at.clip(min=0), 1) if self.shape[1] else at
                at = np.where(at >= 0, above, at - 1)
            self._windows[width] = to_device(found, self.device)
        return self._windows[width]
