"""The KV cache as a model's forward, a step's inputs and the runtime see it.

A *row* holds the K and V of one token. A sequence sees its own rows: committed token j is row j, entry i of the running
step is row `num_cached + i`. Where they lie among the rows of the whole cache, only PagedCache knows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from lpr.model.recurrent.states import States, StatesInCache
from lpr.model.step_inputs import Block, Row, current_step


class KVCache(StatesInCache, Cache, ABC):
    """K/V of up to `num_slots` running sequences, each with up to `rows_per_slot` rows."""

    num_slots: int
    rows_per_slot: int
    """Most rows of a sequence: its committed tokens and a step's entries."""
    page_size: int
    num_pages: int
    states: States
    """The states of recurrent layers."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(layers=[])  # without transformers' objects per layer
        self.states = States(num_slots)

    @abstractmethod
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the current step's K and V [R, H, N, D]; return the K and V that attention reads, without a copy.

        That is [B, H, KV, D] for a single block, and for packed inputs what `of_block` takes.
        """

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Write the current step's keys [R, N, D] of a sparse layer's indexer; return those that it scores [B, KV, D].

        They lie in the cache like the keys of a layer of their own, number -1 - `layer_idx`, that has no values.
        """
        keys = indexer_key_states[:, None]
        return self.update(keys, keys[..., :0], -1 - layer_idx)[0][:, 0]

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

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Rows of all pages, and the spare row behind them, which padding is written to."""

    @abstractmethod
    def assign(self, slot: int, pages: Sequence[int]) -> None:
        """Let the sequence in a slot have these pages, in the order of its rows."""

    @abstractmethod
    def send_tables(self) -> None:
        """Bring what `assign` has changed to the device, for captured steps."""

    @abstractmethod
    def write_rows(self, rows: Sequence[Row], num_entries: int) -> np.ndarray:
        """Int64 [B, T]: the cache row of each entry, padded on the left to `num_entries`; padding: a spare row."""

    @abstractmethod
    def place(self, words: np.ndarray, rows: Sequence[Row], first_slot: int, batch: int, num_entries: int) -> None:
        """Write the int32 words of a captured step on the host (StaticShape.place), all but its selection."""

    @abstractmethod
    def lie_evenly(self, rows: Sequence[Row]) -> bool:
        """True if one view holds the keys of these rows, whose slots are neighbours."""

    @abstractmethod
    def read_pages(self, rows: Sequence[Row], places: Sequence[tuple[int, int]], num_threads: int) -> Any:
        """A native.PagedAttention of a step's rows, each of whose first entry has a place in the step's [B, T]."""

    @abstractmethod
    def place_block(self, block: Block, device: torch.device, by_table: bool, num_used: Sequence[int]) -> None:
        """Let a block know where the keys of its slots lie, of which attention sees the first `num_used` of each.

        `by_table` if attention reads block tables. No row of another sequence is read, not even with weight 0: it may
        be NaN.
        """

    @abstractmethod
    def place_static(self, block: Block, num_used: torch.Tensor | None) -> None:
        """The same on the device alone, for a captured step; without `num_used` [B] by table."""

    @abstractmethod
    def of_block(self, states: torch.Tensor, block: Block) -> torch.Tensor:
        """A block's K or V [B, H, KV, D], a view of what `update` returned for packed inputs."""

    @property
    @abstractmethod
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V in all layers."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the whole cache."""

    @abstractmethod
    def resized(
        self, num_slots: int, rows_per_slot: int, num_pages: int | None = None, num_snapshots: int = 0
    ) -> KVCache:
        """Another cache for the same layers, its memory allocated; without `num_pages` one with room for all rows.

        `num_snapshots` are places for recurrent states besides those of slots.
        """

    @abstractmethod
    def add_fixed(self, layer: int) -> None:
        """Before its first forward: the rows of `layer` stay where they are when a commit moves entries."""

    @abstractmethod
    def move(self, rows: np.ndarray) -> None:
        """Copy the cache rows `rows[0]` to `rows[1]` (int64 [2, n]) in every layer but fixed ones; they may overlap."""

    @abstractmethod
    def commit_moves(self, rows: Sequence[Row], moves: np.ndarray) -> None:
        """Move entries of a step's rows, int64 [3, n]: row, entry, and the entry in whose place it belongs."""

    def commit(self, row: Row, entries: Sequence[int]) -> None:
        """Keep `entries` of a step's row (indices, in order) as the sequence's next committed tokens."""
        moves = [(0, entry, index) for index, entry in enumerate(entries) if entry != index]
        self.commit_moves([row], np.array(moves, np.int64).reshape(-1, 3).T)
        self.states.advance([row], [entries])

    @property
    def has_states(self) -> bool:
        """True for a model with recurrent layers: `states.advance` has to follow each `commit_moves`."""
        return not self.states.is_empty

    @abstractmethod
    def clear_entries(self, row: Row) -> None:
        """Zero what a step has written for a row: a NaN changes sums even where its weight is 0."""

    @abstractmethod
    def copy_page(self, source: int, target: int, num_rows: int) -> None:
        """Copy the first `num_rows` rows of a page to another one."""

    @abstractmethod
    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages."""

    @abstractmethod
    def clear_all(self) -> None:
        """Zero all pages that a slot has had."""

    @abstractmethod
    def swap_out(self, page: int, host_page: int) -> None:
        """Copy a page to a page of host memory."""

    @abstractmethod
    def swap_in(self, host_page: int, page: int) -> None:
        """Copy a page of host memory to a page."""

    @abstractmethod
    def swap_ms(self) -> float:
        """Measured milliseconds of both."""


def free_bytes(device: torch.device) -> int | None:
    """Free bytes of `device`, or None where they are unknown (a CPU without /proc).

    What torch holds between tensors that live is not among them: no large tensor fits there.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not meminfo.exists():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
