"""A KV cache in pages: a sequence's rows lie in the pages of its block table (PagedAttention, Kwon et al. 2023).

A *row* holds the K and V of one token. A sequence sees its own rows: committed token j is row j, entry i of the running
step is row `num_cached + i`. Where they lie among the rows of the whole cache, only this file knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from lpr.config import PAGE_SIZE
from lpr.model.cpu.memory import zeros
from lpr.model.fp8_cache import as_read, as_stored
from lpr.model.host_pages import HostPages, swap_ms
from lpr.model.moves import move_rows
from lpr.model.recurrent.states import States, StatesInCache
from lpr.model.step_inputs import Block, Row, Rows, StepInputs, current_step
from lpr.model.transfer import to_device
from lpr.native import PagedAttention, place_packed, place_rows

Pair = tuple[Tensor, Tensor]


class _NoLayers(list[Any]):
    """No layers; what Qwen 4 asks one of them for, the positions of all cache rows, is known here."""

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Int64 [3, B, KV], for three axes of rotation."""
        step = current_step()
        if step is None:
            return None
        batch, block = len(step.positions), step.blocks[0]
        return torch.arange(block.num_kv, device=step.positions.device).expand(3, batch, -1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        """Nothing: a forward keeps no positions."""

    def __getitem__(self, index: Any) -> Any:
        return self


class KVCache(StatesInCache, Cache):
    """K/V in pages of `page_size` rows: page p has the cache rows from `p * page_size` on; the last row is spare.

    Row j of the sequence in slot s is row `j % page_size` of page `tables[s, j // page_size]`. Layers with equal shapes
    share one tensor [layers, rows, heads, dim] for their keys and one for their values, so a commit is one gather and
    one scatter of each for all of them. Sliding layers keep all rows, since a rolling buffer cannot take a rejected
    branch back; their mask hides what slid out of the window.
    """

    def __init__(
        self, num_slots: int, rows_per_slot: int, num_pages: int | None = None, page_size: int = PAGE_SIZE
    ) -> None:
        """An empty cache; the first forward makes its tensors. Without `num_pages` each slot has pages of its own."""
        super().__init__(layers=_NoLayers())  # without transformers' objects per layer
        self.states = States(num_slots)
        """The states of recurrent layers."""
        self.num_slots, self.rows_per_slot, self.page_size = num_slots, rows_per_slot, page_size
        per_slot = -(-rows_per_slot // page_size)
        self.num_pages = num_slots * per_slot if num_pages is None else num_pages
        self.tables = np.zeros((num_slots, per_slot), np.int32)
        """The block table of each slot, on the host."""
        self.run_rows = np.zeros(num_slots, np.int64)
        """Per slot, its leading rows that lie side by side."""
        if num_pages is None:
            self.tables[:] = np.arange(self.num_pages).reshape(num_slots, per_slot)
            self.run_rows[:] = per_slot * page_size
        self.layer_tensors: dict[int, Pair] = {}
        """Per layer its keys and values, [rows, heads, dim] each."""
        self._pools: list[Tensor] = []
        self._fixed: set[int] = set()  # layers whose rows no commit moves
        self._moved: list[Tensor] = []  # the pools of all other layers
        self._flat: dict[int, tuple[tuple[Tensor, int], tuple[Tensor, int]]] = {}
        """All rows [layers * rows, heads, dim] of what holds a layer's keys and values, and where the layer's begin."""
        self.in_fp8 = False  # True: caches that `resized` makes keep K/V in FP8
        self.adapters: Any = None
        """The adapters of its slots, a SlotAdapters (lpr.model.lora.bank); None if no slot has one."""
        self._device_tables: Tensor | None = None
        self._num_begun = 0  # pages up to the last that a slot has had
        self._changed: list[np.ndarray] = []  # places among all tables that `device_tables` lacks

    @property
    def num_rows(self) -> int:
        """Rows of all pages, and the spare row behind them, which padding is written to."""
        return self.num_pages * self.page_size + 1

    def resized(
        self, num_slots: int, rows_per_slot: int, num_pages: int | None = None, num_snapshots: int = 0
    ) -> KVCache:
        """Another cache for the same layers, its memory allocated; without `num_pages` one with room for all rows.

        `num_snapshots` are places for recurrent states besides those of slots.
        """
        made = KVCache(num_slots, rows_per_slot, num_pages, self.page_size)
        made.states, made.in_fp8 = self.states.resized(num_slots, num_snapshots), self.in_fp8
        made._fixed = set(self._fixed)
        groups: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        for layer, pair in self.layer_tensors.items():
            for side, tensor in enumerate(pair):
                dtype = torch.uint8 if self.in_fp8 else tensor.dtype
                kind = (layer in made._fixed, side, tensor.shape[1:], dtype, tensor.device)
                groups.setdefault(kind, []).append((layer, side))
        places: dict[tuple[int, int], tuple[Tensor, int]] = {}
        rows = made.num_rows
        for (is_fixed, _, shape, dtype, device), members in groups.items():
            size = (len(members) * rows, *shape)
            flat = zeros(size, dtype) if device.type == "cpu" else torch.zeros(size, dtype=dtype, device=device)
            made._pools.append(flat.unflatten(0, (len(members), rows)))
            if not is_fixed:
                made._moved.append(made._pools[-1])
            places.update({member: (flat, index * rows) for index, member in enumerate(members)})
        for layer in self.layer_tensors:
            made._flat[layer] = (places[layer, 0], places[layer, 1])
            keys, values = (flat[start : start + rows] for flat, start in made._flat[layer])
            made.layer_tensors[layer] = (keys, values)
            if keys.device.type != "cpu":
                made.device_tables(keys.device)  # now, and not while a step is captured
        return made

    def _add_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        pair = tuple(new.new_zeros(self.num_rows, new.shape[1], new.shape[3]) for new in (keys, values))
        self.layer_tensors[layer] = (pair[0], pair[1])
        pools = [side[None] for side in pair]
        self._pools.extend(pools)
        if layer not in self._fixed:
            self._moved.extend(pools)

    # Block tables.

    def assign(self, slot: int, pages: Sequence[int], first: int = 0) -> None:
        """Let a slot have these pages from place `first` on; those that it has already there cost nothing."""
        table, run = self.tables[slot], min(first, int(self.run_rows[slot]) // self.page_size)
        if first and len(pages) == 1:  # of a sequence that grows: numpy takes several times as long
            different, last = [0] if table[first] != pages[0] else [], pages[0]
            run += bool(run == first and table[first - 1] + 1 == last)
        else:
            new, known = np.asarray(pages, np.int32), table[max(0, first - 1) : first]
            different, last = np.nonzero(table[first : first + len(new)] != new)[0].tolist(), int(new.max(initial=-1))
            if run == first:
                joined = np.concatenate([known, new])
                breaks = np.nonzero(np.diff(joined) != 1)[0]
                run += (int(breaks[0]) + 1 if len(breaks) else len(joined)) - len(known)
        self.run_rows[slot] = run * self.page_size
        if different:
            self._num_begun = max(self._num_begun, last + 1)
            table[first : first + len(pages)] = pages
            if self._device_tables is not None:
                self._changed.append(np.arange(different[0], different[-1] + 1) + (first + slot * len(table)))

    def changes(self) -> np.ndarray:
        """Int32 [2, n], for `write_changes`: places among all tables that `assign` has changed, and their pages."""
        places = np.unique(np.concatenate(self._changed)) if self._changed else np.empty(0, np.int64)
        return np.stack([places, self.tables.reshape(-1)[places]]).astype(np.int32)

    def write_changes(self, changes: Tensor) -> None:
        """Write all `changes`, which are on the device by now, to the tables there."""
        assert self._device_tables is not None
        target = changes[0].long()
        self._device_tables.index_copy_(0, target + target // self.tables.shape[1], changes[1])
        self._changed.clear()

    def device_tables(self, device: torch.device) -> Tensor:
        """Int32 [slots, pages]: the block tables on a device, with all changes; always the same memory.

        A compiler takes equal sizes for one: no dimension is a batch's, and no row as long as its stride.
        """
        slots, per_slot = self.tables.shape
        if self._device_tables is None:
            made = torch.arange(slots * (per_slot + 1), dtype=torch.int32, device=device)
            self._device_tables = made - made // (per_slot + 1)
            if (different := np.nonzero(self.tables.reshape(-1) != np.arange(self.tables.size))[0]).size:
                self._changed = [different]
        if self._changed:
            self.write_changes(to_device(self.changes(), device))
        return self._device_tables.view(slots, per_slot + 1)[:, :per_slot]

    def cache_rows(self, slots: np.ndarray | int, places: np.ndarray) -> np.ndarray:
        """The cache rows of rows `places` of the sequences in `slots`, int64, of both shapes broadcast."""
        pages = self.tables[slots, places // self.page_size].astype(np.int64)
        return pages * self.page_size + places % self.page_size

    def run(self, first_slot: int, batch: int, num_kv: int) -> tuple[int, int] | None:
        """Where the first `num_kv` rows of neighbouring slots begin, and how far apart; None if they are not runs."""
        slots = slice(first_slot, first_slot + batch)
        if self.run_rows[slots].min() < num_kv:
            return None
        starts = self.tables[slots, 0].astype(np.int64) * self.page_size
        steps = np.diff(starts)
        if batch > 1 and (steps[0] < 0 or (steps != steps[0]).any()):
            return None
        return int(starts[0]), int(steps[0]) if batch > 1 else 0

    # A forward.

    def lie_evenly(self, rows: Sequence[Row]) -> bool:
        """True if one view holds the keys of these rows, whose slots are neighbours."""
        longest = max(row.num_cached + row.num_entries for row in rows)
        return len(rows) == 1 or self.run(rows[0].slot, len(rows), longest) is not None

    def place_block(self, block: Block, device: torch.device, by_table: bool, num_used: Sequence[int]) -> None:
        """Let a block know where the keys of its slots lie, of which attention sees the first `num_used` of each.

        `by_table` if attention reads block tables. No row of another sequence is read, not even with weight 0: it may
        be NaN.
        """
        slots = slice(block.first_slot, block.first_slot + len(block.positions))
        if by_table:
            block.table = self.device_tables(device)[slots, : -(-block.num_kv // self.page_size)]
            return
        block.run = self.run(block.first_slot, len(block.positions), block.num_kv)
        if block.run is None:
            last = np.maximum(1, np.asarray(num_used))[:, None] - 1
            found = self.cache_rows(np.arange(self.num_slots)[slots, None], np.arange(block.num_kv).clip(max=last))
            block.kv_rows = to_device(found.reshape(-1), device)

    def read_pages(self, rows: Sequence[Row], places: Sequence[tuple[int, int]], num_threads: int) -> Any:
        """A native.PagedAttention of a step's rows, each of whose first entry has a place in the step's [B, T]."""
        assert PagedAttention is not None
        slots, cached = [row.slot for row in rows], [row.num_cached for row in rows]
        entries = [row.entries for row in rows]
        return PagedAttention(self.tables, self.page_size, slots, cached, entries, places, num_threads)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Pair:
        """Write the current step's K and V [R, H, N, D]; return the K and V that attention reads, without a copy.

        That is [B, H, KV, D] for a single block; where blocks are read by tables or packed, all rows of the cache,
        [1, H, rows, D], of which `of_block` takes a block's.
        """
        step = current_step()
        assert step is not None, "a KVCache works only inside in_step"
        if layer_idx not in self.layer_tensors:
            self._add_layer(layer_idx, key_states, value_states)
        states, block = (key_states, value_states), step.blocks[0]
        if torch.compiler.is_compiling() and layer_idx in self._flat:
            return self._update_compiled(step, layer_idx, states)
        for side, new in zip(self.layer_tensors[layer_idx], states, strict=True):
            new = as_stored(new, side)
            if block.first_row is not None and not step.packed:  # the entries lie side by side
                side.narrow(0, block.first_row, new.shape[2]).copy_(new[0].transpose(0, 1))
            else:
                side.index_copy_(0, step.write_rows, new.transpose(1, 2).flatten(0, 1))
        return self.read(layer_idx, step)

    def read(self, layer_idx: int, step: StepInputs) -> Pair:
        """The K and V of a layer that attention reads, as `update` returns them."""
        views, block = [], step.blocks[0]
        for side in self.layer_tensors[layer_idx]:
            step.hand_out(side)
            whole = as_read(side).transpose(0, 1)[None]
            by_row = step.packed or block.table is not None or step.pages is not None
            views.append(whole if by_row else self.of_block(whole, block))
        return views[0], views[1]

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int, number: int = 0) -> torch.Tensor:
        """Write the current step's keys [R, N, D] of a sparse layer's indexer; return those that it scores [B, KV, D].

        They lie in the cache like the keys of a layer without values, whose number is below 0. A layer may have
        several by `number`, of 4 at most.
        """
        keys = indexer_key_states[:, None]
        return self.update(keys, keys[..., :0], -1 - 4 * layer_idx - number)[0][:, 0]

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

    def _update_compiled(self, step: StepInputs, layer: int, states: Pair) -> Pair:
        """As `update`, of whole tensors, as a compiler would copy all memory that views share around each write."""
        block, views = step.blocks[0], []
        for (flat, start), new in zip(self._flat[layer], states, strict=True):
            flat.index_copy_(0, step.write_rows + start, as_stored(new, flat).transpose(1, 2).flatten(0, 1))
            whole = as_read(flat).narrow(0, start, self.num_rows).transpose(0, 1)[None]
            views.append(whole if block.table is not None else self.of_block(whole, block))
        return views[0], views[1]

    def of_block(self, states: Tensor, block: Block) -> Tensor:
        """A block's K or V [B, H, KV, D], a view of what `update` returned: all rows [1, H, rows, D]."""
        batch, rows = len(block.positions), states[0]
        if block.run is None:
            if block.kv_rows is None:  # attention by tables does not know the model's mask or bias
                assert block.tree_mask is not None
                self.place_static(block, block.tree_mask.num_cached + block.tree_mask.num_entries)
            assert block.kv_rows is not None
            # Row by row, as they lie: the same along dimension 1 would copy the whole cache first.
            return rows.transpose(0, 1).index_select(0, block.kv_rows).unflatten(0, (batch, -1)).transpose(1, 2)
        first, step = block.run
        if batch == 1:
            return rows.narrow(1, first, block.num_kv)[None]
        heads, width, dim = rows.stride()
        sizes, strides = (batch, len(rows), block.num_kv, rows.shape[2]), (step * width, heads, width, dim)
        return rows.as_strided(sizes, strides, rows.storage_offset() + first * width)

    def write_rows(self, rows: Sequence[Row], num_entries: int) -> np.ndarray:
        """Int64 [B, T]: the cache row of each entry, padded on the left to `num_entries`; padding: a spare row."""
        found = np.full((len(rows), num_entries), self.num_rows - 1, np.int64)
        for places, row in zip(found, rows, strict=True):
            if row.num_entries:
                wanted = np.arange(row.num_cached, row.num_cached + row.num_entries)
                places[num_entries - row.num_entries :] = self.cache_rows(row.slot, wanted)
        return found

    def place(self, words: np.ndarray, rows: Sequence[Row], first_slot: int, batch: int, num_entries: int) -> None:
        """Write the int32 words of a captured step on the host (StaticShape.place), all but its selection."""
        tables, spare = self.tables[first_slot : first_slot + batch], self.num_rows - 1
        cached, entries = [row.num_cached for row in rows], [row.entries for row in rows]
        place_rows(words, batch, num_entries, tables, self.page_size, spare, cached, entries)

    def place_packed(
        self, words: np.ndarray, rows: Sequence[Row], num_sequences: int, num_entries: int, num_kept: int
    ) -> None:
        """The same of a packed step, of rows of any slots."""
        step, where = Rows.of(rows), (self.tables, self.page_size, self.num_rows - 1)
        place_packed(words, num_sequences, num_entries, num_kept, *where, step.slots, step.columns, step.entries)

    def place_static(self, block: Block, num_used: Tensor | None) -> None:
        """The same on the device alone, for a captured step; without `num_used` [B] by table."""
        size, device = self.page_size, block.positions.device
        table = self.device_tables(device)
        if block.tree_mask is None or block.tree_mask.starts is None:  # packed ones look for their slots
            table = table[block.first_slot : block.first_slot + len(block.positions)]
        if num_used is None:
            block.table = table[:, : -(-block.num_kv // size)]
        else:
            last = num_used.long().clamp(min=1)[:, None] - 1
            places = torch.arange(block.num_kv, device=device).clamp(max=last)
            block.kv_rows = (table.gather(1, places // size).long() * size + places % size).reshape(-1)

    # Between forwards.

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V in all layers."""
        sides = [side for pair in self.layer_tensors.values() for side in pair]
        return sum(side[0].numel() * (1 if self.in_fp8 else side.element_size()) for side in sides)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.bytes_per_token * self.num_rows + self.states.num_bytes

    def commit_moves(self, rows: Sequence[Row], moves: np.ndarray) -> None:
        """Move entries of a step's rows, int64 [3, n]: row, entry, and the entry in whose place it belongs."""
        if not moves.shape[1] or not self._pools:
            return
        step = Rows.of(rows)
        slots, cached = step.slots, step.columns[0]
        self.move(self.cache_rows(slots[moves[0]], cached[moves[0]] + moves[1:]))

    def commit(self, row: Row, entries: Sequence[int]) -> None:
        """Keep `entries` of a step's row (indices, in order) as the sequence's next committed tokens."""
        moves = [(0, entry, index) for index, entry in enumerate(entries) if entry != index]
        self.commit_moves([row], np.array(moves, np.int64).reshape(-1, 3).T)
        self.states.advance([row], [entries])

    @property
    def has_states(self) -> bool:
        """True for a model with recurrent layers: `states.advance` has to follow each `commit_moves`."""
        return not self.states.is_empty

    def add_fixed(self, layer: int) -> None:
        """Before its first forward: the rows of `layer` stay where they are when a commit moves entries."""
        self._fixed.add(layer)

    def move(self, rows: np.ndarray) -> None:
        """As `move_rows`, in every layer but fixed ones.

        A commit moves the entries of a path, in order, to lower places: none reads what an earlier one has written.
        """
        if rows.shape[1] and self._moved:
            move_rows(self._moved, rows)

    def clear_entries(self, row: Row) -> None:
        """Zero what a step has written for a row: a NaN changes sums even where its weight is 0."""
        for pool in self._pools:
            pool[:, to_device(self.write_rows([row], row.num_entries)[0], pool.device)] = 0

    def copy_page(self, source: int, target: int, num_rows: int) -> None:
        """Copy the first `num_rows` rows of a page to another one."""
        first, last = source * self.page_size, target * self.page_size
        for pool in self._pools:
            pool[:, last : last + num_rows] = pool[:, first : first + num_rows]

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages."""
        for page in pages:
            for pool in self._pools:
                pool[:, page * self.page_size : (page + 1) * self.page_size].zero_()

    def clear_all(self) -> None:
        """Zero all pages that a slot has had."""
        for pool in self._pools:
            pool[:, : self._num_begun * self.page_size].zero_()

    @cached_property
    def host_pages(self) -> HostPages:
        """Room in host memory for pages that leave the cache."""
        return HostPages(self._pools, self.page_size)

    def swap_ms(self) -> float:
        """Measured milliseconds to copy a page to host memory and back."""
        return swap_ms(self._pools, self.page_size)
