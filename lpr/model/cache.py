"""The preallocated K/V cache that trees are written to, and whose accepted rows are moved into place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from lpr.model.attention import current_step
from lpr.model.inputs import Row, StepInputs
from lpr.model.transfer import to_device


class TreeCache(Cache):
    """K/V of `num_slots` sequences; slot s owns the rows `[s * rows_per_slot, (s+1) * rows_per_slot)`.

    Committed token j of a sequence lies in its slot's row j, entry i of the running step in row `num_cached + i`; the
    last row of a slot is spare, for padding. Layers with equal shapes share one tensor [layers, rows, heads, dim] for
    their keys and one for their values, so a commit is one gather and one scatter of each for all of them. (Apart,
    because a compiler takes a write to one for a change of all that shares its memory.)

    Only what models call on a cache is overridden; there are no per-layer cache objects. Sliding layers keep all
    rows, since a rolling buffer cannot take a rejected branch back; their mask hides what slid out of the window.
    """

    def __init__(self, num_slots: int, rows_per_slot: int) -> None:
        """An empty cache; the tensors are made when the first forward shows the layers' shapes."""
        super().__init__(layers=[])
        self.num_slots = num_slots
        self.rows_per_slot = rows_per_slot
        self._pools: list[torch.Tensor] = []
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._by_slot: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """The same tensors as [slots, heads, rows, dim], as attention reads them."""
        self._flat: dict[int, tuple[tuple[torch.Tensor, int], tuple[torch.Tensor, int]]] = {}
        """All rows [layers * rows, heads, dim] of what holds a layer's keys and values, and where the layer's begin."""

    def allocate(self, like: TreeCache) -> None:
        """Make the tensors at once, with the layer shapes of another cache of the same model."""
        groups: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        for layer, pair in like._layers.items():
            for side, tensor in enumerate(pair):
                groups.setdefault((side, tensor.shape[1:], tensor.dtype, tensor.device), []).append((layer, side))
        sides: dict[tuple[int, int], torch.Tensor] = {}
        places: dict[tuple[int, int], tuple[torch.Tensor, int]] = {}
        rows = self.num_slots * self.rows_per_slot
        for (_, shape, dtype, device), members in groups.items():
            flat = torch.zeros((len(members) * rows, *shape), dtype=dtype, device=device)
            pool = flat.unflatten(0, (len(members), rows))
            self._pools.append(pool)
            sides.update(zip(members, pool, strict=True))
            places.update({member: (flat, index * rows) for index, member in enumerate(members)})
        for layer in like._layers:
            self._keep(layer, sides[layer, 0], sides[layer, 1])
            self._flat[layer] = (places[layer, 0], places[layer, 1])

    @property
    def bytes_per_row(self) -> int:
        """Bytes that one token's K and V take in all layers."""
        sides = [side for pair in self._layers.values() for side in pair]
        return sum(side[0].numel() * side.element_size() for side in sides)

    # What models call.

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the step's K and V [R, H, N, D]; return what attention reads, as views without a copy.

        That is [B, H, KV, D] for a single block, and all rows of the cache, [1, H, rows, D], for packed inputs.
        """
        step = current_step()
        assert step is not None, "a TreeCache works only inside step_scope"
        if layer_idx not in self._layers:
            self._add_layer(layer_idx, key_states, value_states)
        if step.packed:
            return self._update_flat(step, layer_idx, (key_states, value_states))
        if torch.compiler.is_compiling() and layer_idx in self._flat:
            return self._update_compiled(step, layer_idx, (key_states, value_states))
        block, views = step.blocks[0], []
        for side, all_slots, new in zip(
            self._layers[layer_idx], self._by_slot[layer_idx], (key_states, value_states), strict=True
        ):
            mine = all_slots.narrow(0, block.first_slot, len(block.positions))
            if block.run is not None:  # the entries lie side by side
                mine.narrow(2, block.run[1], new.shape[2]).copy_(new)
            else:
                side.index_copy_(0, step.write_rows, new.transpose(1, 2).flatten(0, 1))
            views.append(mine.narrow(2, 0, block.num_kv))
        return views[0], views[1]

    def _update_flat(
        self, step: StepInputs, layer: int, states: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `update`, for packed inputs."""
        views = []
        for side, new in zip(self._layers[layer], states, strict=True):
            side.index_copy_(0, step.write_rows, new.transpose(1, 2).flatten(0, 1))
            step.cache_storages.add(side.untyped_storage().data_ptr())
            views.append(side.transpose(0, 1)[None])
        return views[0], views[1]

    def _update_compiled(
        self, step: StepInputs, layer: int, states: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `update`, in terms that a compiler writes in place: of the whole tensors, of which none is a view.

        Of views that share their memory it would copy all of it, before a write and behind it, in every layer.
        """
        block, views = step.blocks[0], []
        for (flat, start), new in zip(self._flat[layer], states, strict=True):
            flat.index_copy_(0, step.write_rows + start, new.transpose(1, 2).flatten(0, 1))
            slots = flat.narrow(0, start, self.num_slots * self.rows_per_slot).unflatten(0, (self.num_slots, -1))
            mine = slots.transpose(1, 2).narrow(0, block.first_slot, len(block.positions))
            views.append(mine.narrow(2, 0, block.num_kv))
        return views[0], views[1]

    def _add_layer(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        rows = self.num_slots * self.rows_per_slot
        pair = tuple(new.new_zeros(rows, new.shape[1], new.shape[3]) for new in (keys, values))
        self._keep(layer, pair[0], pair[1])
        self._pools.extend(side[None] for side in pair)

    def _keep(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._layers[layer] = (keys, values)
        first, second = (side.unflatten(0, (self.num_slots, -1)).transpose(1, 2) for side in (keys, values))
        self._by_slot[layer] = (first, second)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Committed length, for model code that asks; positions are always passed explicitly."""
        step = current_step()
        return step.length if step is not None else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Number of visible cache rows and their offset."""
        step = current_step()
        return (max(block.num_kv for block in step.blocks) if step is not None else query_length), 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Rows of a slot."""
        return self.rows_per_slot

    # What the runtime calls.

    def first_rows(self, rows: Sequence[Row]) -> list[int]:
        """The flat row in which each row's first entry lies."""
        return [row.slot * self.rows_per_slot + row.num_cached for row in rows]

    def move(self, rows: np.ndarray) -> None:
        """Copy the flat rows `rows[0]` to `rows[1]` (int64 [2, n]) in every layer; overlaps are safe."""
        if not rows.shape[1]:
            return
        source, target = to_device(rows, self._pools[0].device)
        for pool in self._pools:
            pool.index_copy_(1, target, pool.index_select(1, source))

    def commit(self, slot: int, num_cached: int, entries: Sequence[int]) -> None:
        """Keep the step's `entries` (indices into the slot's row of the step, in order) as the next committed rows."""
        base = slot * self.rows_per_slot + num_cached
        moved = [(base + entry, base + index) for index, entry in enumerate(entries) if entry != index]
        self.move(np.array(moved, np.int64).reshape(-1, 2).T)

    def clear(self, slot: int, num_cached: int) -> None:
        """Zero a slot's rows from `num_cached` on: what is masked still spoils a sum if it is NaN."""
        rows = self.rows_per_slot
        for pool in self._pools:
            pool[:, slot * rows + num_cached : (slot + 1) * rows] = 0

    def exchange_slots(self, first: int, second: int, num_cached: int) -> None:
        """Exchange the committed rows of two slots, of which neither has more than `num_cached`."""
        rows = self.rows_per_slot
        for pool in self._pools:
            one, other = (pool[:, slot * rows : slot * rows + num_cached] for slot in (first, second))
            held = one.clone()
            one.copy_(other)
            other.copy_(held)

    def move_slot(self, source: int, target: int, num_cached: int) -> None:
        """Copy the committed rows of slot `source` over those of slot `target`."""
        rows = self.rows_per_slot
        for pool in self._pools:
            pool[:, target * rows : target * rows + num_cached] = pool[:, source * rows : source * rows + num_cached]
