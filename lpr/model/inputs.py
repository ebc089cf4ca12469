"""The tensors of one forward: what rows of committed tokens and tree nodes become for the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from lpr.core.tree import ancestor_bits
from lpr.model.kernels.mask import TreeMask, build_mask


@dataclass
class Row:
    """What one sequence has evaluated in a forward: its pending chain and, below it, its nodes of the tree.

    `parents[i] < i` within the row; -1 attaches to the committed tokens whose K/V the cache holds. The last
    `num_results` entries are the ones whose next token is wanted.
    """

    slot: int
    num_cached: int
    tokens: list[int]
    parents: list[int]
    positions: list[int]
    num_results: int


@dataclass
class StepInputs:
    """One forward over B slots, T entries each, KV cache rows; rows are padded on the left.

    Padding on the left lets every model return just the last logits (`logits_to_keep` as a number, which every
    transformers version takes).
    """

    tokens: torch.Tensor
    """[B, T] int64."""
    positions: torch.Tensor
    """[B, T] int64: position of each entry in its sequence."""
    write_rows: torch.Tensor
    """[B * T] int64: the flat cache row that each entry's K/V goes to; padding goes to the slot's spare row."""
    kv_positions: torch.Tensor
    """[B, KV] int64: position of what each cache row holds (of no meaning where it is not visible)."""
    visible: torch.Tensor | None
    """[B, T, KV] bool: may the entry attend to the cache row? None where `tree_mask` says it in bits."""
    first_slot: int
    num_kv: int
    """KV, a Python number so that a captured graph can hold it."""
    length: int
    """Longest cached length; only for model code that asks the cache for it."""
    num_logits: int
    """Entries, at the end of each row, whose logits are wanted."""
    tree_mask: TreeMask | None = None
    """What the GPU kernels take for a mask."""
    folded_masks: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


def round_up(count: int, bucket: int) -> int:
    """The next multiple of `bucket`."""
    return -(-count // bucket) * bucket


def build_inputs(
    rows: Sequence[Row],
    rows_per_slot: int,
    device: torch.device,
    node_bucket: int = 1,
    kv_bucket: int = 1,
    tree_bits: bool = False,
) -> StepInputs:
    """Lay `rows` (neighbouring slots, in order) out as the tensors of one forward.

    T is padded to a multiple of `node_bucket` and KV to one of `kv_bucket`, so that steps repeat a few shapes.
    Entry i of a row is written to cache row `num_cached + i` of its slot. `tree_bits` asks for a `tree_mask` in place
    of a dense `visible`.
    """
    num_rows = len(rows)
    num_entries = round_up(max(len(row.tokens) for row in rows), node_bucket)
    num_kv = round_up(max(row.num_cached + len(row.tokens) for row in rows), kv_bucket)
    num_kv = min(num_kv, rows_per_slot)
    tokens = np.zeros((num_rows, num_entries), np.int64)
    positions = np.zeros((num_rows, num_entries), np.int64)
    write_rows = np.empty((num_rows, num_entries), np.int64)
    kv_positions = np.empty((num_rows, num_kv), np.int64)
    kv_positions[:] = np.arange(num_kv)
    visible = np.zeros((num_rows, num_entries, 0 if tree_bits else num_kv), bool)
    for index, row in enumerate(rows):
        count, cached = len(row.tokens), row.num_cached
        start = num_entries - count
        spare = (row.slot + 1) * rows_per_slot - 1
        write_rows[index, :start] = spare
        write_rows[index, start:] = np.arange(count) + (row.slot * rows_per_slot + cached)
        if count == 0:
            visible[index, :, :1] = True
            continue
        tokens[index, start:] = row.tokens
        positions[index, start:] = row.positions
        kv_positions[index, cached : cached + count] = row.positions
        if tree_bits:
            continue
        visible[index, start:, :cached] = True
        visible[index, start:, cached : cached + count] = ancestor_matrix(row.parents)
        visible[index, :start, 0] = True  # a padding entry needs one visible key to stay finite
    positions_there = torch.from_numpy(positions).to(device)
    tree_mask = None
    if tree_bits:
        parents, cached_counts = [row.parents for row in rows], [row.num_cached for row in rows]
        tree_mask = build_mask(parents, cached_counts, positions_there, device)
    return StepInputs(
        tokens=torch.from_numpy(tokens).to(device),
        positions=positions_there,
        write_rows=torch.from_numpy(write_rows.reshape(-1)).to(device),
        kv_positions=torch.from_numpy(kv_positions).to(device),
        visible=None if tree_bits else torch.from_numpy(visible).to(device),
        tree_mask=tree_mask,
        first_slot=rows[0].slot,
        num_kv=num_kv,
        length=max(row.num_cached for row in rows),
        num_logits=max(row.num_results for row in rows),
    )


def ancestor_matrix(parents: Sequence[int]) -> np.ndarray:
    """Bool [n, n]: is j the node i itself or one of its ancestors?"""
    count = len(parents)
    if count and parents[0] == -1 and all(parent == node - 1 for node, parent in enumerate(parents)):
        return np.tri(count, dtype=bool)  # a chain; a long prompt's bit sets would take quadratic time
    num_bytes = (count + 7) // 8
    packed = b"".join([bits.to_bytes(num_bytes, "little") for bits in ancestor_bits(parents)])
    rows = np.frombuffer(packed, np.uint8).reshape(count, num_bytes)
    return np.unpackbits(rows, axis=1, count=count, bitorder="little").view(bool)
