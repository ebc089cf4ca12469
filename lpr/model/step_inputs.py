"""The inputs of one forward: rows, blocks and tensors; and a context variable with the current step.

transformers' registries pass no user arguments to a mask function, so masks, attention, family shims and the cache read
the step from the context variable.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from lpr.model.tree_mask import Paths, TreeMask

T = TypeVar("T")
_step: ContextVar[StepInputs | None] = ContextVar("_step", default=None)


@dataclass(frozen=True)
class GemmRows:
    """The numbers of rows M of a GEMM at which a row has the same bits, at any place in it, on this machine."""

    fewest: int  # least M of a product with the model's weights
    most: int  # most M; for the output head also at most MOST_LOGITS
    num_threads: int | None  # torch's number of threads for which this holds; None: any
    multiple: int = 1  # M of a step is a multiple of this
    head_multiple: int = 1  # the number of logits rows is a multiple of this
    bits: int = 0  # a digest of the tested products' bits, which differs between machines with different kernels


class Row:
    """The entries of one sequence in a forward: its pending chain and, below it, its nodes of the tree."""

    __slots__ = ("entries", "num_cached", "num_entries", "num_results", "slot")

    def __init__(
        self,
        slot: int,
        num_cached: int,
        tokens: Sequence[int] | np.ndarray,
        parents: Sequence[int] | np.ndarray,
        positions: Sequence[int] | np.ndarray,
        num_results: int,
    ) -> None:
        """Results are wanted for the last entries. `parents[i] < i` within the row; -1 is the last cached token."""
        self.slot, self.num_cached, self.num_results = slot, num_cached, num_results
        self.entries = np.array([tokens, parents, positions], np.int32)  # tokens, parents and positions, int32 [3, n]
        self.num_entries = self.entries.shape[1]

    @classmethod
    def of(cls, slot: int, num_cached: int, entries: np.ndarray, num_results: int) -> Row:
        """A row of `entries`, without a copy (see lpr.core.rows.row_entries)."""
        row = cls.__new__(cls)
        row.slot, row.num_cached, row.entries, row.num_results = slot, num_cached, entries, num_results
        row.num_entries = entries.shape[1]
        return row

    @classmethod
    def chain(cls, slot: int, num_cached: int, tokens: Sequence[int], num_results: int) -> Row:
        """A row of `tokens` as a chain after the cached tokens."""
        count = len(tokens)
        return cls(slot, num_cached, tokens, range(-1, count - 1), range(num_cached, num_cached + count), num_results)

    @property
    def tokens(self) -> np.ndarray:
        return self.entries[0]

    @property
    def parents(self) -> np.ndarray:
        return self.entries[1]

    @property
    def positions(self) -> np.ndarray:
        return self.entries[2]

    @property
    def is_prompt(self) -> bool:
        """True for a sequence from its first token on, without a branch."""
        return not self.num_cached and np.array_equal(self.parents, np.arange(-1, self.num_entries - 1))


class Rows(Sequence[Row]):
    """The rows of a step as columns. A Row is made when one is asked for."""

    def __init__(
        self, slots: np.ndarray, columns: np.ndarray, entries: np.ndarray, totals: tuple[int, int, int]
    ) -> None:
        """Rows of int64 `slots` [n], with the columns, entries and totals of a StepDraft."""
        self.slots, self.columns, self.entries = slots, columns, entries
        self.num_entries, self.num_results, self.longest = totals
        self._made: list[Row] | None = None

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Rows:
        """The same rows as columns."""
        if isinstance(rows, Rows):
            return rows
        columns = np.array([(row.num_cached, row.num_results, row.num_entries) for row in rows], np.int64).reshape(
            -1, 3
        )
        entries = np.concatenate([np.empty(0, np.int32), *[row.entries.reshape(-1) for row in rows]])
        longest = int((columns[:, 0] + columns[:, 2]).max(initial=0))
        totals = int(columns[:, 2].sum()), int(columns[:, 1].sum()), longest
        return cls(np.array([row.slot for row in rows], np.int64), np.ascontiguousarray(columns.T), entries, totals)

    def _all(self) -> list[Row]:
        if self._made is None:
            self._made, begin = [], 0
            for slot, cached, results, count in zip(self.slots.tolist(), *self.columns.tolist(), strict=True):
                end = begin + 3 * count
                self._made.append(Row.of(slot, cached, self.entries[begin:end].reshape(3, count), results))
                begin = end
        return self._made

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._all())


@dataclass
class Block:
    """B consecutive slots that share one call of attention: T entries each over KV cache rows each."""

    start: int  # offset of the block's entries among the N of packed inputs
    first_slot: int
    num_kv: int  # KV, a Python number so that a captured graph can hold it
    positions: torch.Tensor  # [B, T] int64: position of each entry in its sequence
    given_kv_positions: torch.Tensor | None
    """[B, KV] int64: `kv_positions`; None derives them from `tree_mask` at first use."""
    visible: torch.Tensor | None
    """[B, T, KV] bool: the entry attends to the cache row. None where `tree_mask` or `is_causal` decides, or all do."""
    tree_mask: TreeMask | None = None  # the mask of the GPU kernels
    is_causal: bool = False  # True for a plain causal prompt: a sequence from its first token on, without a branch
    first_row: int | None = None
    """Cache row that the first entry is written to, if the others follow; None for several rows, or with padding."""
    run: tuple[int, int] | None = None
    """Cache row of the first slot's first key, and the stride between slots, if each slot's keys are contiguous."""
    kv_rows: torch.Tensor | None = None
    """[B * KV] int64: the cache rows of the keys, if they are not contiguous and attention reads no table."""
    table: torch.Tensor | None = None  # [B, pages] int32: the slots' block tables, for attention that reads them
    paths: Paths | None = None  # the paths of entries, for exact attention on a GPU; computed by the first layer

    @property
    def kv_positions(self) -> torch.Tensor:
        """[B, KV] int64: position of each cache row's token (undefined where it is not visible)."""
        if self.given_kv_positions is None:
            if self.tree_mask is None:
                raise TypeError("the positions of cache rows are not known here")
            self.given_kv_positions = self.tree_mask.kv_positions(self.num_kv)
        return self.given_kv_positions

    @property
    def is_open(self) -> bool:
        """True if every entry may attend to all KV cache rows."""
        return self.visible is None and self.tree_mask is None and not self.is_causal

    def entries(self, states: torch.Tensor) -> torch.Tensor:
        """The part [1, H, T, D] of packed queries or outputs [1, H, N, D], as a view."""
        return states[:, :, self.start : self.start + self.positions.shape[1]]


@dataclass
class StepInputs:
    """One forward: [R, N] is [B, T] for a single block, padded on the left, and [1, sum of T] for several."""

    tokens: torch.Tensor  # [R, N] int64
    positions: torch.Tensor  # [R, N] int64: position of each entry in its sequence
    write_rows: torch.Tensor  # [R * N] int64: the cache row that each entry's K/V goes to; padding goes to a spare row
    blocks: list[Block]
    length: int  # longest cached length; only for model code that asks the cache for it
    num_results: list[int]  # per row, in the given order, the number of last entries whose logits are wanted
    logits_to_keep: int | torch.Tensor
    """The model's argument: a number of last entries of every row, or indices int64 among N."""
    in_parts: bool = False  # True if a vocab-parallel head returns only this rank's part of the logits
    gemm_rows: GemmRows | None = None  # rows of matrix products in exact mode
    pages: Any = None
    """A native.PagedAttention with the trees and block tables of all rows, for attention that reads them on a CPU;
    there is then one block, without a mask and without cache rows."""
    rows: Sequence[Row] = ()  # the rows, block after block; recurrent layers read them, and captured steps have none
    hidden: torch.Tensor | None = None
    """Last hidden states [R, N, H], after the final norm; set by the forward if there is a prediction head."""
    cache: Any = None  # the KVCache of the forward; set by the adapter, as `layer_rules` are
    states: Any = None  # the States that recurrent layers read: the cache's, or for a low-bit copy its scratch states
    layer_rules: dict[int | None, Any] = field(default_factory=dict)
    """Per window or chunk size, the LayerRule (lpr.model.attention.layer_rules) found by earlier steps."""
    made_of_masks: dict[int, tuple[torch.Tensor, Any]] = field(default_factory=dict)
    """By the id of a mask: the mask (kept alive so that its id is not reused) and the derived value."""
    made: dict[Hashable, Any] = field(default_factory=dict)  # other values that layers share; see `once`
    adapters: Any = None  # the RowAdapters of its entries (lpr.model.lora.bank); None if no row has one
    computed: int = -1  # last layer that an earlier layer's call has computed already (lpr.model.fused.decoder_layer)
    cache_storages: set[int] = field(default_factory=set)
    """Storages of the K/V that the cache returned, by which attention checks that they are unchanged."""

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of `make`, called for the first layer only."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def once_per_mask(self, mask: torch.Tensor, make: Callable[[], T]) -> T:
        """The value of `make`, called for the first layer only; all layers of a kind share `mask`."""
        if id(mask) not in self.made_of_masks:
            self.made_of_masks[id(mask)] = (mask, make())
        return self.made_of_masks[id(mask)][1]

    @property
    def packed(self) -> bool:
        return len(self.blocks) > 1

    def results(self, logits: torch.Tensor) -> torch.Tensor:
        """The wanted logits [sum of num_results, V], row after row, of the model's logits [R, kept, V]."""
        if len(logits) == 1:
            return logits[0, logits.shape[1] - sum(self.num_results) :]
        kept = logits.shape[1]
        return torch.cat([logits[i, kept - count :] for i, count in enumerate(self.num_results)])

    def places(self) -> list[tuple[int, int]]:
        """Per row, the row of [R, N] and the column of its first entry."""
        length = self.tokens.shape[1]
        if self.packed:
            ends = [block.start + block.positions.shape[1] for block in self.blocks]
            return [(0, end - row.num_entries) for end, row in zip(ends, self.rows, strict=True)]
        if len(self.rows) > len(self.tokens):  # side by side, at the end of one row
            counts = [row.num_entries for row in self.rows]
            return [(0, length - sum(counts[index:])) for index in range(len(counts))]
        return [(index, length - row.num_entries) for index, row in enumerate(self.rows)]

    def hand_out(self, states: torch.Tensor) -> None:
        """Record K or V of the cache, before the model gets them."""
        if not torch.compiler.is_compiling():
            self.cache_storages.add(storage_of(states))

    def came_from_cache(self, *states: torch.Tensor) -> bool:
        """True if the model passed K and V to attention unchanged."""
        return torch.compiler.is_compiling() or self.cache_storages.issuperset(map(storage_of, states))


def storage_of(tensor: torch.Tensor) -> int:
    """An identifier of a tensor's storage, equal for all its views."""
    return tensor.untyped_storage()._cdata


def in_step(inputs: StepInputs, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call `function` with `inputs` as the current step of this thread.

    The context is left in C: with a `finally` in Python, Ctrl-C could leave a step set, which breaks later forwards.
    """
    return copy_context().run(_call_in, inputs, function, args, kwargs)


def _call_in(inputs: StepInputs, function: Callable[..., T], args: Any, kwargs: Any) -> T:
    _step.set(inputs)
    return function(*args, **kwargs)


def current_step() -> StepInputs | None:
    """The step that this thread evaluates, or None outside a step."""
    return _step.get()
