"""The tree's attention mask as one bit per pair of entries, for GPU kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lpr.core.rows import WORD_BITS
from lpr.model.transfer import to_device
from lpr.native import ancestor_words


@dataclass(frozen=True)
class TreeMask:
    """The visibility of entries in a forward of B rows with T entries each, padded on the left.

    Real entry i (counted without the padding) of row b has its K/V in cache row `num_cached[b] + i`; the cache rows
    before hold the committed tokens, token j in row j. All fields are tensors on the model's device.
    """

    bits: Tensor
    """[B, T, W] int64, 64 * W >= T: bit j % 64 of word j // 64 is set if real entry j is this entry or its ancestor."""
    num_cached: Tensor  # [B] int32: committed tokens, visible to every real entry
    num_entries: Tensor  # [B] int32: real entries
    positions: Tensor  # [B, T] int64: position of each entry in its sequence (of no meaning for padding)
    starts: Tensor | None = None
    """[S + 1] int32 of S packed sequences, which lie one after the other in a single row: B is 1, T their entries
    together, and the other tensors have S values. Sequence s has the entries from `starts[s]` to `starts[s + 1]`, those
    before the last `num_entries[s]` of them are padding. None: a sequence has a row."""
    slots: Tensor | None = None  # [S] int32: the slot of each packed sequence, whose block table it has

    def visible(self, num_kv: int) -> Tensor:
        """The dense mask [B, T, KV] bool; padding entries see nothing. Raises TypeError for packed sequences."""
        if self.starts is not None:
            raise TypeError("packed sequences have no dense mask")
        entry = self._entry(num_kv)[:, None]
        last = self.bits.shape[2] * WORD_BITS - 1
        words = self.bits.gather(2, (entry.clamp(0, last) // WORD_BITS).expand(-1, self.bits.shape[1], -1))
        ancestor = ((words >> entry.clamp(0, last) % WORD_BITS) & 1).bool() & (entry <= last)
        return (ancestor | (entry < 0)) & self.real()[:, :, None]

    def kv_positions(self, num_kv: int) -> Tensor:
        """[B, KV] int64: position of each cache row's token, undefined after the last entry's row."""
        entry = self._entry(num_kv)
        length = self.positions.shape[1]
        index = (entry + length - self.num_entries[:, None]).clamp(0, length - 1)
        return torch.where(entry < 0, entry + self.num_cached[:, None], self.positions.gather(1, index))

    def real(self) -> Tensor:
        """[B, T] bool: false for padding."""
        length = self.positions.shape[1]
        return torch.arange(length, device=self.bits.device) >= length - self.num_entries[:, None]

    def _entry(self, num_kv: int) -> Tensor:
        """[B, KV] int64: the entry that each cache row holds; below 0: a committed token."""
        return torch.arange(num_kv, device=self.bits.device) - self.num_cached[:, None]


def build_mask(
    parents: Sequence[Sequence[int] | np.ndarray], num_cached: Sequence[int], positions: Tensor, device: torch.device
) -> TreeMask:
    """The mask of rows with these `parents` (`parents[b][i] < i`, negative: none), for `positions` [B, T]."""
    num_rows, length = positions.shape
    num_words = -(-length // WORD_BITS)
    bits = np.zeros((num_rows, length, num_words), np.uint64)
    for row, each in enumerate(parents):
        bits[row, length - len(each) :] = ancestor_words(each, num_words)
    counts = to_device(np.array([list(num_cached), [len(each) for each in parents]], np.int32), device)
    return TreeMask(to_device(bits.view(np.int64), device), counts[0], counts[1], positions)


_ALL = 2**30


@dataclass(frozen=True)
class Paths:
    """The keys of entries, in the order of positions."""

    entries: Tensor
    """[B, T, T] int32: the entry, counted without padding, at position `num_cached` + i of an entry's path."""
    num_shared: Tensor
    """[B] int32: positions up to which a key's cache row is its position, on all paths that are so long."""


def find_paths(mask: TreeMask) -> Paths:
    """The paths of a step, by operators that do not wait for the device."""
    length = mask.positions.shape[1]
    entry = torch.arange(length, device=mask.bits.device)
    words = mask.bits.index_select(2, entry // WORD_BITS)
    is_ancestor = ((words >> entry % WORD_BITS) & 1).bool()
    depth = torch.where(is_ancestor, is_ancestor.long().cumsum(2) - 1, length)
    found = torch.zeros(*is_ancestor.shape[:2], length + 1, dtype=torch.int64, device=mask.bits.device)
    found = found.scatter_(2, depth, entry.expand_as(depth).contiguous())[..., :length]
    is_moved = (found != entry) & (entry < is_ancestor.sum(2, keepdim=True))
    first = torch.where(is_moved, entry, _ALL).flatten(1).amin(1)
    num_shared = torch.where(first == _ALL, _ALL, mask.num_cached + first)
    return Paths(found.to(torch.int32), num_shared.to(torch.int32))
