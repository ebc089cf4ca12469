"""The moves of a commit as a Triton kernel: one launch for all layers of a pool.

torch's index_copy_ and index_select split what 32-bit offsets do not reach, into some 16 launches for 30 GiB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lpr.model.kernels import device_of, jit

MOVES, BLOCK = 32, 128  # moves and words of a row that a program holds at a time
_WORDS = torch.int32, torch.int16, torch.int8


@jit(("num_moves",))
def copy_rows(pool_at, source_at, target_at, num_moves, num_rows, width, MOVES: tl.constexpr, BLOCK: tl.constexpr):
    """Copy BLOCK words of every move's row in layer `program_id(0)`, in the order of the moves.

    A program reads MOVES rows before it writes any of them, because its threads hold words of several moves.
    """
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = pool_at + tl.program_id(0).to(tl.int64) * num_rows * width + word[None, :]
    for first in range(0, num_moves, MOVES):
        move = first + tl.arange(0, MOVES)
        source = tl.load(source_at + move, mask=move < num_moves, other=0)
        target = tl.load(target_at + move, mask=move < num_moves, other=0)
        held = (move < num_moves)[:, None] & (word < width)[None, :]
        values = tl.load(at + (source * width)[:, None], mask=held)
        tl.debug_barrier()
        tl.store(at + (target * width)[:, None], values, mask=held)


def move_rows(pool: Tensor, source: Tensor, target: Tensor) -> None:
    """As `lpr.model.moves.by_operators`. No move may read a row that an earlier one writes."""
    num_bytes = pool.shape[2:].numel() * pool.element_size()
    if not num_bytes:  # values of a layer that has keys alone
        return
    words = pool.flatten(2).view(next(each for each in _WORDS if num_bytes % each.itemsize == 0))
    layers, rows, width = words.shape
    with device_of(pool):
        sizes = {"MOVES": MOVES, "BLOCK": BLOCK, "num_warps": 4}
        moves = source.contiguous(), target.contiguous(), len(source)
        copy_rows[layers, triton.cdiv(width, BLOCK)](words, *moves, rows, width, **sizes)
