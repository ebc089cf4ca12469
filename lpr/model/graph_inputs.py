"""A captured graph's inputs, at fixed device addresses, filled by one copy per step.

A step is padded to one of a few `StaticShape`s. A packed step has its sequences, prompt chunks included, one after the
other in a single row [1, N], and only N is padded. Otherwise each sequence has its own row. All values that differ
between two steps of one shape are in one block of int32 words: tokens, positions, cache rows, ancestor bits, and the
sampling parameters. A dense mask, if needed, is made from the bits on the device, as part of the graph.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np
import torch

from lpr.model.kv_cache import KVCache
from lpr.model.sampling.selection import Selection
from lpr.model.step_inputs import Block, Row, Rows, StepInputs
from lpr.model.transfer import to_device
from lpr.model.tree_mask import WORD_BITS, TreeMask

NODE_BUCKETS = (1, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""T: entries per row, pending chain included."""
KV_BUCKETS = tuple(sorted([1 << octave for octave in range(8, 24)] + [3 << octave for octave in range(8, 23)]))
"""KV: cache rows that attention reads; two per octave, so that a kernel without lengths reads at most half too many."""
BATCH_NODE_BUCKETS = (1, 16, 48, 96, 192, 384, 1024)
"""T of a batch: fewer buckets, because there are several batch sizes."""
PACKED_BUCKETS = (
    1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 128, 160, 192,
    256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 2048,
)  # fmt: skip
"""N of a packed step: all entries together. A step of more is evaluated directly."""
MANY_ENTRIES = 256  # N from which on packed steps have fewer shapes: the cost of unneeded sampling is then negligible
SEQUENCE_BUCKETS = (1, 4, 16, 64, 256)
"""S of a packed step: it decides the launch grid of attention; unused sequences cost almost nothing."""
WIDE_KV = (1024,)  # KV for kernels that read the lengths: there KV only decides the number of key splits
WIDE_BATCH = 8  # number of sequences from which on keys are not split by length, because the batch fills a GPU
FEW_KEYS = 16  # noise keys per sequence of a sampling shape; trees with more positions use a shape with one key per row


@dataclass(frozen=True)
class StaticShape:
    """The constants of a captured graph; steps of equal shape are replays of one graph."""

    first_slot: int
    batch: int  # B rows, those without a sequence included
    num_entries: int  # T
    num_kv: int  # KV
    num_candidates: int
    num_keys: int  # noise keys; 0: no row is sampled
    filtered: bool
    """True if top-k, top-p and min-p are applied. For fewer shapes, always true for sampled rows, except with
    vocab-parallel sampling, which gathers whole logits for limits."""
    tree_bits: bool = False  # True if attention reads the ancestors as bits, in place of a dense mask
    by_table: bool = False  # True if it reads block tables, in place of a block's own rows
    only_logits: bool = False  # True if the graph ends at the logits [B * T, V]; tokens are then chosen outside of it
    num_kept: int = 0
    """M results of a packed step, in which `batch` are the sequences and `num_entries` is N; 0: it is not packed."""
    with_adapters: bool = False  # True if some entries have adapters; other steps do not read adapter weights

    @property
    def num_computed(self) -> int:
        """Entries that the forward computes, padding included."""
        return self.num_entries if self.num_kept else self.batch * self.num_entries

    @property
    def num_results(self) -> int:
        """Rows of results."""
        return self.num_kept or self.num_computed

    @cached_property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shape in int32 words of each part, in memory order; 64-bit parts first."""
        batch, entries = (self.batch,), (1 if self.num_kept else self.batch, self.num_entries)
        of_packed = {"wanted": (self.num_kept,), "starts": (self.batch + 1,), "slots": batch}
        return {
            # Two words at least: to a compiler a size of 1 is another form of the forward.
            "bits": (*entries, 2 * max(2, -(-self.num_entries // WORD_BITS))),
            **dict.fromkeys(("tokens", "positions", "write_rows"), entries),
            **(of_packed if self.num_kept else {}),
            **dict.fromkeys(("num_cached", "num_real"), batch),
            "adapters": entries if self.with_adapters else (0,),
            "selection": (5 * self._num_sampled + self.num_keys,),
        }

    @property
    def _num_sampled(self) -> int:
        return self.num_results if self.num_keys else 0

    @cached_property
    def num_words(self) -> int:
        """Words of all parts."""
        return sum(map(prod, self.sizes.values()))

    def place(self, words: np.ndarray, rows: Sequence[Row], selection: Selection, cache: KVCache) -> None:
        """Write the words of a step of `rows` on the host; unless packed, slots are consecutive from `first_slot`."""
        if self.num_kept:
            cache.place_packed(words, rows, self.batch, self.num_entries, self.num_kept)
        else:
            cache.place(words, rows, self.first_slot, self.batch, self.num_entries)
        if self.with_adapters:
            end = self.num_words - prod(self.sizes["selection"])
            entries = words[end - prod(self.sizes["adapters"]) : end]
            cache.adapters.place(entries.reshape(self.sizes["adapters"]), rows)
        if not self.num_keys:
            return
        # Each row's parameters are among the last of its T entries; the other entries are greedy.
        columns, given_keys = np.split(selection.words.numpy(), [5 * selection.num_rows])
        columns = columns.reshape(5, -1)
        placed = np.zeros((5, self.num_results), np.int32)
        if self.num_kept:
            placed[:, : columns.shape[1]] = columns
            rows = ()
        by_row, start = placed.reshape(5, -1, self.num_kept or self.num_entries), 0
        for index, row in enumerate(rows):
            end = start + row.num_results
            by_row[:, index, self.num_entries - row.num_results :] = columns[:, start:end]
            start = end
        keys = np.zeros(self.num_keys, np.int32)
        keys[: selection.num_keys] = given_keys
        words[-prod(self.sizes["selection"]) :] = np.concatenate([placed.reshape(-1), keys])

    def read(self, words: torch.Tensor, cache: KVCache) -> tuple[StepInputs, Selection]:
        """The inputs as functions of `words` and tables on the device; all entries have results, or `num_kept`."""
        parts = dict(zip(self.sizes, words[: self.num_words].split([*map(prod, self.sizes.values())]), strict=True))
        parts = {name: part.view(self.sizes[name]) for name, part in parts.items()}
        positions = parts["positions"].long()
        of_packed = parts.get("starts"), parts.get("slots")
        mask = TreeMask(parts["bits"].view(torch.int64), parts["num_cached"], parts["num_real"], positions, *of_packed)
        if self.tree_bits:
            block = Block(0, self.first_slot, self.num_kv, positions, None, None, mask)
        else:  # padding sees the first cache row, to stay finite
            first = torch.arange(self.num_kv, device=words.device) == 0
            visible = torch.where(mask.real()[..., None], mask.visible(self.num_kv), first)
            block = Block(0, self.first_slot, self.num_kv, positions, mask.kv_positions(self.num_kv), visible)
        cache.place_static(block, None if self.by_table else mask.num_cached + mask.num_entries)
        inputs = StepInputs(
            tokens=parts["tokens"].long(),
            positions=positions,
            write_rows=parts["write_rows"].reshape(-1).long(),
            blocks=[block],
            length=0,
            num_results=[self.num_kept] if self.num_kept else [self.num_entries] * self.batch,
            logits_to_keep=parts["wanted"].long() if self.num_kept else self.num_entries,
        )
        if self.with_adapters:
            inputs.adapters = cache.adapters.read(parts["adapters"])
        keys = self.num_keys
        sizes = keys, self._num_sampled, keys > 0, self.filtered
        return inputs, Selection(parts["selection"], *sizes)


def static_shape(
    rows: Sequence[Row],
    selection: Selection,
    num_candidates: int,
    num_slots: int,
    rows_per_slot: int,
    max_entries: int,
    tree_bits: bool = False,
    row_multiple: int = 1,
    in_parts: bool = False,
    tables: bool = True,
) -> StaticShape | None:
    """The smallest shape for `rows`, with a multiple of `row_multiple` entries per row and at most `max_entries`.

    None if there is none: a shape is one block of consecutive slots. With vocab-parallel sampling (`in_parts`), limits
    need whole logits, so they are applied only if asked for.
    """
    first = rows[0].slot
    longest = max([row.num_entries for row in rows])
    if longest > max_entries or any([row.slot != first + index for index, row in enumerate(rows)]):
        return None
    num_kv = max([row.num_cached + row.num_entries for row in rows])
    batch = min(power_of_two(len(rows)), num_slots - first)
    num_entries = bucket_of(longest, node_buckets(batch, row_multiple))
    num_keys = batch * (FEW_KEYS if selection.num_keys <= batch * FEW_KEYS else num_entries)
    kv_bucket = bucket_of(num_kv, wide_kv(batch, rows_per_slot) if tree_bits else KV_BUCKETS)
    num_keys = num_keys if selection.sampled else 0
    sizes = (first, batch, num_entries, min(kv_bucket, rows_per_slot), num_candidates)
    filtered = selection.filtered if in_parts else selection.sampled
    return _known_shape(*sizes, num_keys, filtered, tree_bits, tree_bits and tables)


def packed_shape(
    rows: Sequence[Row],
    selection: Selection,
    num_candidates: int,
    num_slots: int,
    rows_per_slot: int,
    most_results: int,
    in_parts: bool = False,
) -> StaticShape | None:
    """The smallest packed shape for `rows` of any slots, with up to `most_results` results; None without one."""
    step = Rows.of(rows)
    num_entries = bucket_of(step.num_entries, PACKED_BUCKETS)
    kept = next((each for each in kept_buckets(num_entries, most_results) if each >= step.num_results), 0)
    if num_entries > PACKED_BUCKETS[-1] or not kept:
        return None
    batch = next(each for each in sequence_buckets(num_entries, num_slots) if each >= len(rows))
    num_kv = bucket_of(step.longest, packed_kv(batch, num_entries, rows_per_slot))
    sampled = selection.sampled or num_entries >= MANY_ENTRIES
    filtered = selection.filtered if in_parts else sampled
    sizes = 0, batch, num_entries, num_kv, num_candidates, kept if sampled else 0, filtered
    return _known_shape(*sizes, True, True, False, kept)


@lru_cache(maxsize=1024)
def kept_buckets(num_entries: int, most_results: int) -> Sequence[int]:
    """The values of M of a packed step: all entries have results or, beside prompt chunks, at most a quarter."""
    most = min(num_entries, bucket_of(most_results, PACKED_BUCKETS))
    return (most,) if num_entries < MANY_ENTRIES else sorted({min(num_entries // 4, most), most})


@lru_cache(maxsize=1024)
def sequence_buckets(num_entries: int, num_slots: int) -> Sequence[int]:
    """The values of S of a packed step."""
    buckets = (1,) if num_entries >= MANY_ENTRIES else SEQUENCE_BUCKETS
    return [*(each for each in buckets if each < num_slots), num_slots]


@lru_cache(maxsize=1024)
def packed_kv(batch: int, num_entries: int, rows_per_slot: int) -> Sequence[int]:
    """The values of KV of a packed step: with few entries of one sequence, keys are split by length."""
    return wide_kv(1 if batch == 1 and num_entries < MANY_ENTRIES else WIDE_BATCH, rows_per_slot)


def packed_inputs(rows: Sequence[Row], cache: KVCache, device: torch.device, bucket: int, kv_bucket: int) -> StepInputs:
    """The inputs of a packed step that is evaluated directly; N and KV are multiples of `bucket` and `kv_bucket`."""
    step = Rows.of(rows)
    num_entries, num_results = -(-step.num_entries // bucket) * bucket, step.num_results
    num_kv = -(-step.longest // kv_bucket) * kv_bucket
    sizes = 0, len(rows), num_entries, min(num_kv, cache.rows_per_slot), 0, 0, False
    shape = StaticShape(*sizes, tree_bits=True, by_table=True, num_kept=max(1, num_results))
    words = np.empty(shape.num_words, np.int32)
    shape.place(words, step, Selection.build([]), cache)
    inputs, _ = shape.read(to_device(words, device), cache)
    inputs.num_results, inputs.rows, inputs.length = [num_results], rows, max([row.num_cached for row in rows])
    return inputs


@lru_cache(maxsize=1024)
def _known_shape(*fields: Any) -> StaticShape:
    """A shape, cached so that its derived properties are computed once instead of in every step."""
    return StaticShape(*fields)


def node_buckets(batch: int, row_multiple: int) -> Sequence[int]:
    """The values of T in a batch of that size, multiples of `row_multiple`."""
    if row_multiple == 1:
        return NODE_BUCKETS if batch == 1 else BATCH_NODE_BUCKETS
    return [size for size in NODE_BUCKETS if size % row_multiple == 0]


def wide_kv(batch: int, rows_per_slot: int) -> Sequence[int]:
    """The values of KV where a kernel reads the lengths, for a batch of that size."""
    shorter = [size for size in WIDE_KV if size < rows_per_slot and batch < WIDE_BATCH]
    return [*shorter, rows_per_slot]


def bucket_of(count: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `count`; `count` itself beyond the last."""
    place = bisect_left(buckets, count)
    return buckets[place] if place < len(buckets) else count


def power_of_two(count: int) -> int:
    """The smallest power of two that is not below `count` (at least 1)."""
    return 1 << (count - 1).bit_length()
