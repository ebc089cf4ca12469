"""The KV cache as a model's forward, a step's inputs and the runtime see it.

A *row* holds the K and V of one token. A sequence sees its own rows: committed token j is row j, entry i of the running
step is row `num_cached + i`. Where they lie among the rows of the whole cache, only SlotCache knows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from lpr.model.step_inputs import Block, Row, current_step

_RESERVE = 0.05
"""Part of the free memory that is left to the activations of a step."""


class KVCache(Cache, ABC):
    """K/V of up to `num_slots` running sequences, each with up to `rows_per_slot` rows."""

    num_slots: int
    rows_per_slot: int
    """Rows of a sequence: its committed tokens, a step's entries, and one spare row that padding is written to."""

    def __init__(self) -> None:
        super().__init__(layers=[])  # without transformers' objects per layer

    @abstractmethod
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the current step's K and V [R, H, N, D]; return the K and V that attention reads, without a copy.

        That is [B, H, KV, D] for a single block, and for packed inputs what `of_block` takes.
        """

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Committed length, for model code that asks; positions are always passed explicitly."""
        step = current_step()
        return step.length if step is not None else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Number of visible cache rows and their offset."""
        step = current_step()
        return (max(block.num_kv for block in step.blocks) if step is not None else query_length), 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Rows of a sequence."""
        return self.rows_per_slot

    @abstractmethod
    def first_rows(self, rows: Sequence[Row]) -> list[int]:
        """The cache row of the first entry of each row of a step; its other entries follow."""

    @abstractmethod
    def write_rows(self, rows: Sequence[Row], num_entries: int) -> np.ndarray:
        """Int64 [B, T]: the cache row of each entry, padded on the left to `num_entries`; padding has a spare row."""

    @abstractmethod
    def place(self, words: np.ndarray, rows: Sequence[Row], first_slot: int, batch: int, num_entries: int) -> None:
        """Write the int32 words of a captured step on the host (StaticShape.place), all but its selection."""

    @abstractmethod
    def of_block(self, states: torch.Tensor, block: Block) -> torch.Tensor:
        """A block's K or V [B, H, KV, D], a view of what `update` returned for packed inputs."""

    @property
    @abstractmethod
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V in all layers."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.bytes_per_token * self.num_slots * self.rows_per_slot

    @abstractmethod
    def resized(self, num_slots: int, rows_per_slot: int) -> KVCache:
        """Another cache for the same layers, its memory allocated."""

    @abstractmethod
    def move(self, rows: np.ndarray) -> None:
        """Copy the cache rows `rows[0]` to `rows[1]` (int64 [2, n]) in every layer; they may overlap."""

    def commit(self, row: Row, entries: Sequence[int]) -> None:
        """Keep `entries` of a step's row (indices, in order) as the sequence's next committed tokens."""
        first = self.first_rows([row])[0]
        moves = [(first + entry, first + index) for index, entry in enumerate(entries) if entry != index]
        self.move(np.array(moves, np.int64).reshape(-1, 2).T)

    @abstractmethod
    def clear(self, slot: int, num_cached: int) -> None:
        """Zero a sequence's rows from `num_cached` on: a NaN changes sums even where its weight is 0."""

    @abstractmethod
    def exchange_slots(self, first: int, second: int, num_cached: int) -> None:
        """Exchange the first `num_cached` rows of two slots."""

    @abstractmethod
    def move_slot(self, source: int, target: int, num_cached: int) -> None:
        """Copy the first `num_cached` rows of slot `source` over those of slot `target`."""


def free_bytes(device: torch.device) -> int | None:
    """Free bytes of `device`, or None where they are unknown (a CPU without /proc)."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not meminfo.exists():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def cache_shortage(available: int, bytes_per_row: int, num_slots: int, max_length: int, extra_rows: int) -> str | None:
    """One line on how much of `available` bytes the cache lacks and what would fit, or None if it fits.

    A slot has `max_length` rows for committed tokens and `extra_rows` for a step's tree.
    """
    usable = int(available * (1 - _RESERVE))
    slot_bytes = (max_length + extra_rows) * bytes_per_row
    needed = num_slots * slot_bytes
    if needed <= usable:
        return None
    missing = (
        f"the cache of max_batch_size={num_slots} sequences of max_length={max_length} needs {_size(needed)}, and "
        f"{_size(usable)} are free: {_size(needed - usable)} are missing"
    )
    fitting = [f"max_batch_size={usable // slot_bytes}"] if usable >= slot_bytes else []
    for slots in dict.fromkeys((num_slots, 1)):
        length = usable // (slots * bytes_per_row) - extra_rows
        if 2 <= length < max_length:
            with_slots = "" if slots == num_slots else f"max_batch_size={slots} with "
            fitting.append(f"{with_slots}max_length={length}")
            break
    if not fitting:
        return f"{missing}; not even one sequence of 2 tokens would fit: use fewer nodes per step or a larger --tp"
    return f"{missing}; {' or '.join(fitting)} would fit"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
