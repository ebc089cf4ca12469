"""Builds the tensors of one forward from rows of committed tokens and tree nodes.

Rows that share a call of attention form a *block*: a rectangle of B consecutive slots with T entries each, padded on
the left. Padded inputs are one block, [B, T] for the model. Packed inputs are one block per row, concatenated to a
single row [1, N] of the model without padding; only attention separates them.
"""

from collections.abc import Sequence
from math import lcm

import numpy as np
import torch

from lpr.core.rows import WORD_BITS
from lpr.model.kv_cache import KVCache
from lpr.model.step_inputs import Block, GemmRows, Row, StepInputs
from lpr.model.threads import team_size
from lpr.model.transfer import to_device
from lpr.model.tree_mask import build_mask
from lpr.native import ancestor_words


def round_up(count: int, bucket: int) -> int:
    """The next multiple of `bucket`."""
    return -(-count // bucket) * bucket


def build_inputs(
    rows: Sequence[Row],
    cache: KVCache,
    device: torch.device,
    node_bucket: int = 1,
    kv_bucket: int = 1,
    packed: bool = False,
    tree_bits: bool = False,
    gemm_rows: GemmRows | None = None,
    tables: bool = True,
) -> StepInputs:
    """The tensors of a forward of `rows` over `cache`: one block (consecutive slots, in order), or packed.

    T and KV are padded to multiples of `node_bucket` and `kv_bucket`. With `tree_bits` the mask is a `tree_mask`
    instead of a dense `visible`, and keys are given by block tables if `tables`. With `gemm_rows`, products have the
    numbers of rows that exact mode needs.
    """
    node_bucket = lcm(node_bucket, gemm_rows.multiple) if gemm_rows is not None else node_bucket
    together = _same_shape(rows, node_bucket, kv_bucket) and cache.lie_evenly(rows)
    groups = [[row] for row in rows] if packed and not together else [list(rows)]
    fewest = 1  # least entries of a block, for exact products and for `_num_kept` logits
    if gemm_rows is not None:
        fewest = max(gemm_rows.fewest, _num_kept(max(row.num_results for row in rows), gemm_rows))
    parts: list[torch.Tensor] = []
    blocks: list[Block] = []
    for group in groups:
        start = blocks[-1].start + blocks[-1].positions.shape[1] if blocks else 0
        num_entries = round_up(max(fewest, *(each.num_entries for each in group)), node_bucket)
        how = tree_bits, tree_bits and tables, gemm_rows is None
        entries, block = _build_block(group, cache, device, start, num_entries, kv_bucket, *how)
        parts.append(entries)
        blocks.append(block)
    whole = parts[0] if len(parts) == 1 else torch.cat([part.flatten(1) for part in parts], 1)[:, None]
    tokens, positions, write_rows = whole
    length, num_results = max(row.num_cached for row in rows), [row.num_results for row in rows]
    kept: int | torch.Tensor
    if len(blocks) == 1:
        kept = _num_kept(max(1, *num_results), gemm_rows)
    else:
        ends = [block.start + block.positions.shape[1] for block in blocks]
        kept = _wanted(num_results, ends, gemm_rows, device)
    sizes = blocks, length, num_results, kept
    return StepInputs(tokens, positions, write_rows.reshape(-1), *sizes, gemm_rows=gemm_rows, rows=rows)


def build_page_inputs(
    rows: Sequence[Row], cache: KVCache, node_bucket: int, packed: bool, gemm_rows: GemmRows | None
) -> StepInputs:
    """As `build_inputs` on a CPU, for attention that reads pages: without mask and lists of cache rows.

    Packed inputs are one row with all entries, after the padding that exact products need.
    """
    node_bucket = lcm(node_bucket, gemm_rows.multiple) if gemm_rows is not None else node_bucket
    counts, num_results = [row.num_entries for row in rows], [row.num_results for row in rows]
    packed = packed and len(rows) > 1
    fewest = 1 if gemm_rows is None else max(gemm_rows.fewest, _num_kept(sum(num_results), gemm_rows))
    length = round_up(max(fewest, sum(counts) if packed else max(counts)), node_bucket)
    if packed:
        ends = length - sum(counts) + np.cumsum(counts)
        places = [(0, int(end) - count) for end, count in zip(ends, counts, strict=True)]
    else:
        places = [(index, length - count) for index, count in enumerate(counts)]
    batch = 1 if packed else len(rows)
    pages = cache.read_pages(rows, places, team_size())
    tokens, positions, write_rows = torch.from_numpy(pages.lay_out(batch, length, cache.num_rows - 1))
    num_kv = max(row.num_cached + row.num_entries for row in rows)
    block = Block(0, rows[0].slot, num_kv, positions, None, None)
    kept: int | torch.Tensor
    if gemm_rows is None and not any(num_results):
        kept = torch.empty(0, dtype=torch.int64)  # a prompt chunk needs no logits
    elif not packed:
        kept = _num_kept(max(1, *num_results), gemm_rows)
    else:
        kept = _wanted(num_results, ends.tolist(), gemm_rows, tokens.device)
    cached = max(row.num_cached for row in rows)
    written = write_rows.reshape(-1)
    if len(rows) == 1 and counts[0] == length and (np.diff(written.numpy()) == 1).all():
        block.first_row = int(written[0])
    sizes = [block], cached, num_results, kept
    return StepInputs(tokens, positions, written, *sizes, gemm_rows=gemm_rows, rows=rows, pages=pages)


def _build_block(
    group: Sequence[Row],
    cache: KVCache,
    device: torch.device,
    start: int,
    num_entries: int,
    kv_bucket: int,
    tree_bits: bool,
    by_table: bool,
    may_skip_mask: bool,
) -> tuple[torch.Tensor, Block]:
    """Tokens, positions and cache rows [3, B, T] of a block, and the block."""
    first = group[0]
    num_kv = min(round_up(max(row.num_cached + row.num_entries for row in group), kv_bucket), cache.rows_per_slot)
    is_run = len(group) == 1 and num_entries == first.num_entries
    is_open = is_run and num_entries == 1 and not tree_bits and may_skip_mask
    if is_open:  # a plain step hides no key; attention without a mask saves a tenth of it
        num_kv = first.num_cached + 1
    is_causal = is_run and num_entries == num_kv > 1 and may_skip_mask and not tree_bits and first.is_prompt
    without_mask = tree_bits or is_open or is_causal
    if is_open:
        token, _, position = first.entries[:, 0].tolist()
        array = np.array([token, position, cache.write_rows(group, 1)[0, 0]], np.int64).reshape(3, 1, 1)
        arrays = (array, np.arange(num_kv)[None], np.empty((1, 1, 0), bool))
    else:
        arrays = _rectangle(group, cache, num_entries, num_kv, without_mask)
    written = arrays[0][2]
    entries, kv_positions, visible = (to_device(array, device) for array in arrays)
    block = Block(start, first.slot, num_kv, entries[1], kv_positions, None if without_mask else visible)
    if is_run and (np.diff(written[0]) == 1).all():
        block.first_row = int(written[0, 0])
    block.is_causal = is_causal
    cache.place_block(block, device, by_table, [row.num_cached + row.num_entries for row in group])
    if tree_bits:
        parents, cached = [row.parents for row in group], [row.num_cached for row in group]
        block.tree_mask = build_mask(parents, cached, entries[1], device)
    return entries, block


def _num_kept(num_results: int, gemm_rows: GemmRows | None) -> int:
    """Number of logits rows to compute for `num_results` wanted ones."""
    return num_results if gemm_rows is None else round_up(max(num_results, gemm_rows.fewest), gemm_rows.head_multiple)


def _wanted(
    num_results: Sequence[int], ends: Sequence[int], gemm_rows: GemmRows | None, device: torch.device
) -> torch.Tensor:
    """Indices of the last `num_results` entries before each end, after unread ones if exact products need more rows."""
    wanted = [entry for count, end in zip(num_results, ends, strict=True) for entry in range(end - count, end)]
    return to_device(np.array([0] * (_num_kept(len(wanted), gemm_rows) - len(wanted)) + wanted, np.int64), device)


def _same_shape(rows: Sequence[Row], node_bucket: int, kv_bucket: int) -> bool:
    """True for neighbouring slots, in order, with equal numbers of entries and of cache rows."""
    shapes = set()
    for index, row in enumerate(rows):
        num_kv = round_up(row.num_cached + row.num_entries, kv_bucket)
        shapes.add((row.slot - index, round_up(row.num_entries, node_bucket), num_kv))
    return len(shapes) == 1


def _rectangle(
    rows: Sequence[Row], cache: KVCache, num_entries: int, num_kv: int, without_mask: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A block's arrays: tokens, positions and cache rows of its entries [3, B, T]; kv_positions; visible."""
    assert all(row.slot == rows[0].slot + index for index, row in enumerate(rows)), "a block's slots are neighbours"
    entries = np.zeros((3, len(rows), num_entries), np.int64)
    tokens, positions, entries[2] = entries[0], entries[1], cache.write_rows(rows, num_entries)
    kv_positions = np.tile(np.arange(num_kv), (len(rows), 1))
    visible = np.zeros((len(rows), num_entries, 0 if without_mask else num_kv), bool)
    for index, row in enumerate(rows):
        count, cached, start = row.num_entries, row.num_cached, num_entries - row.num_entries
        if count == 0:
            visible[index, :, :1] = True
            continue
        tokens[index, start:] = row.tokens
        positions[index, start:] = row.positions
        kv_positions[index, cached : cached + count] = row.positions
        if without_mask:
            continue
        visible[index, start:, :cached] = True
        visible[index, start:, cached : cached + count] = ancestor_matrix(row.parents)
        visible[index, :start, 0] = True  # a padding entry needs one visible key to stay finite
    return entries, kv_positions, visible


def ancestor_matrix(parents: Sequence[int] | np.ndarray) -> np.ndarray:
    """Bool [n, n]: true where j is node i itself or one of its ancestors."""
    count = len(parents)
    if np.array_equal(parents, np.arange(-1, count - 1)):
        return np.tri(count, dtype=bool)  # a chain: avoids quadratic time for a long prompt
    words = ancestor_words(parents, -(-count // WORD_BITS))
    return np.unpackbits(words.view(np.uint8), axis=1, count=count, bitorder="little").view(bool)
