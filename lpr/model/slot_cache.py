"""A KV cache in slots: every sequence has one run of rows, as long as the longest sequence allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lpr.model.kv_cache import KVCache
from lpr.model.step_inputs import Block, Row, StepInputs, current_step
from lpr.model.transfer import to_device
from lpr.native import place_rows

Pair = tuple[Tensor, Tensor]


class SlotCache(KVCache):
    """K/V of `num_slots` sequences; slot s owns the rows `[s * rows_per_slot, (s+1) * rows_per_slot)`, the last spare.

    Layers with equal shapes share one tensor [layers, rows, heads, dim] for their keys and one for their values, so a
    commit is one gather and one scatter of each for all of them. Sliding layers keep all rows, since a rolling buffer
    cannot take a rejected branch back; their mask hides what slid out of the window.
    """

    def __init__(self, num_slots: int, rows_per_slot: int) -> None:
        """An empty cache; the first forward shows the layers' shapes and makes the tensors."""
        super().__init__()
        self.num_slots, self.rows_per_slot = num_slots, rows_per_slot
        self.layer_tensors: dict[int, Pair] = {}
        """Per layer its keys and values, [rows, heads, dim] each."""
        self._pools: list[Tensor] = []
        self._by_slot: dict[int, Pair] = {}
        """The same tensors as [slots, heads, rows, dim], as attention reads them."""
        self._flat: dict[int, tuple[tuple[Tensor, int], tuple[Tensor, int]]] = {}
        """All rows [layers * rows, heads, dim] of what holds a layer's keys and values, and where the layer's begin."""

    def resized(self, num_slots: int, rows_per_slot: int) -> SlotCache:
        """As KVCache.resized."""
        made = SlotCache(num_slots, rows_per_slot)
        groups: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        for layer, pair in self.layer_tensors.items():
            for side, tensor in enumerate(pair):
                groups.setdefault((side, tensor.shape[1:], tensor.dtype, tensor.device), []).append((layer, side))
        places: dict[tuple[int, int], tuple[Tensor, int]] = {}
        rows = num_slots * rows_per_slot
        for (_, shape, dtype, device), members in groups.items():
            flat = torch.zeros((len(members) * rows, *shape), dtype=dtype, device=device)
            made._pools.append(flat.unflatten(0, (len(members), rows)))
            places.update({member: (flat, index * rows) for index, member in enumerate(members)})
        for layer in self.layer_tensors:
            made._flat[layer] = (places[layer, 0], places[layer, 1])
            made._keep(layer, *(flat[start : start + rows] for flat, start in made._flat[layer]))
        return made

    def _keep(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.layer_tensors[layer] = (keys, values)
        first, second = (side.unflatten(0, (self.num_slots, -1)).transpose(1, 2) for side in (keys, values))
        self._by_slot[layer] = (first, second)

    def _add_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        rows = self.num_slots * self.rows_per_slot
        pair = tuple(new.new_zeros(rows, new.shape[1], new.shape[3]) for new in (keys, values))
        self._keep(layer, pair[0], pair[1])
        self._pools.extend(side[None] for side in pair)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Pair:
        """As KVCache.update; for packed inputs all rows of the cache, [1, H, rows, D]."""
        step = current_step()
        assert step is not None, "a KVCache works only inside step_scope"
        if layer_idx not in self.layer_tensors:
            self._add_layer(layer_idx, key_states, value_states)
        if step.packed:
            return self._update_flat(step, layer_idx, (key_states, value_states))
        if torch.compiler.is_compiling() and layer_idx in self._flat:
            return self._update_compiled(step, layer_idx, (key_states, value_states))
        block, views = step.blocks[0], []
        for side, all_slots, new in zip(
            self.layer_tensors[layer_idx], self._by_slot[layer_idx], (key_states, value_states), strict=True
        ):
            mine = all_slots.narrow(0, block.first_slot, len(block.positions))
            if block.first_row is not None:  # the entries lie side by side
                mine.narrow(2, block.first_row, new.shape[2]).copy_(new)
            else:
                side.index_copy_(0, step.write_rows, new.transpose(1, 2).flatten(0, 1))
            views.append(mine.narrow(2, 0, block.num_kv))
        return views[0], views[1]

    def _update_flat(self, step: StepInputs, layer: int, states: Pair) -> Pair:
        views = []
        for side, new in zip(self.layer_tensors[layer], states, strict=True):
            side.index_copy_(0, step.write_rows, new.transpose(1, 2).flatten(0, 1))
            step.cache_storages.add(side.untyped_storage().data_ptr())
            views.append(side.transpose(0, 1)[None])
        return views[0], views[1]

    def _update_compiled(self, step: StepInputs, layer: int, states: Pair) -> Pair:
        """As `update`, of whole tensors, as a compiler would copy all memory that views share around each write."""
        block, views = step.blocks[0], []
        for (flat, start), new in zip(self._flat[layer], states, strict=True):
            flat.index_copy_(0, step.write_rows + start, new.transpose(1, 2).flatten(0, 1))
            slots = flat.narrow(0, start, self.num_slots * self.rows_per_slot).unflatten(0, (self.num_slots, -1))
            mine = slots.transpose(1, 2).narrow(0, block.first_slot, len(block.positions))
            views.append(mine.narrow(2, 0, block.num_kv))
        return views[0], views[1]

    def first_rows(self, rows: Sequence[Row]) -> list[int]:
        """As KVCache.first_rows."""
        return [row.slot * self.rows_per_slot + row.num_cached for row in rows]

    def write_rows(self, rows: Sequence[Row], num_entries: int) -> np.ndarray:
        """As KVCache.write_rows."""
        found = np.empty((len(rows), num_entries), np.int64)
        for places, row, first in zip(found, rows, self.first_rows(rows), strict=True):
            padding = num_entries - row.num_entries
            places[:padding] = (row.slot + 1) * self.rows_per_slot - 1
            places[padding:] = np.arange(first, first + row.num_entries)
        return found

    def place(self, words: np.ndarray, rows: Sequence[Row], first_slot: int, batch: int, num_entries: int) -> None:
        """As KVCache.place."""
        slots = range(first_slot, first_slot + batch)
        cached, entries = [row.num_cached for row in rows], [row.entries for row in rows]
        place_rows(words, batch, num_entries, slots, self.rows_per_slot, cached, entries)

    def of_block(self, states: Tensor, block: Block) -> Tensor:
        """As KVCache.of_block, of all rows [1, H, slots * rows_per_slot, D]."""
        slots = states[0].unflatten(1, (self.num_slots, self.rows_per_slot))
        mine = slots.narrow(1, block.first_slot, len(block.positions))
        return mine[:, :, : block.num_kv].transpose(0, 1)

    @property
    def bytes_per_token(self) -> int:
        """As KVCache.bytes_per_token."""
        sides = [side for pair in self.layer_tensors.values() for side in pair]
        return sum(side[0].numel() * side.element_size() for side in sides)

    def move(self, rows: np.ndarray) -> None:
        """As KVCache.move."""
        if not rows.shape[1]:
            return
        source, target = to_device(rows, self._pools[0].device)
        for pool in self._pools:
            pool.index_copy_(1, target, pool.index_select(1, source))

    def clear(self, slot: int, num_cached: int) -> None:
        """As KVCache.clear."""
        for rows in self._rows_of(slot, num_cached, self.rows_per_slot):
            rows.zero_()

    def exchange_slots(self, first: int, second: int, num_cached: int) -> None:
        """As KVCache.exchange_slots."""
        for one, other in zip(self._rows_of(first, 0, num_cached), self._rows_of(second, 0, num_cached), strict=True):
            held = one.clone()
            one.copy_(other)
            other.copy_(held)

    def move_slot(self, source: int, target: int, num_cached: int) -> None:
        """As KVCache.move_slot."""
        for old, new in zip(self._rows_of(source, 0, num_cached), self._rows_of(target, 0, num_cached), strict=True):
            new.copy_(old)

    def _rows_of(self, slot: int, start: int, end: int) -> list[torch.Tensor]:
        first = slot * self.rows_per_slot
        return [pool[:, first + start : first + end] for pool in self._pools]
