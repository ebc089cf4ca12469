"""The inputs of the recurrent Triton kernels in a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lpr.model.kernels import scan_kernel
from lpr.model.kernels.scan_kernel import BLOCK_M, Advance
from lpr.model.recurrent.layout import certain_entries
from lpr.model.step_inputs import Row, StepInputs
from lpr.model.transfer import to_device


class KernelStep:
    """The places of a step's entries, and the values that its forward keeps. Replays of a graph share one object."""

    def __init__(self, step: StepInputs) -> None:
        """For a step of one block with bits; a captured step has no rows, and so no trunk."""
        block, mask = step.blocks[0], step.blocks[0].tree_mask
        assert mask is not None
        self.first_slot, self.batch, self.device = block.first_slot, mask.bits.shape[0], mask.bits.device
        slots = torch.arange(self.first_slot, self.first_slot + self.batch, dtype=torch.int32, device=self.device)
        trunk, num_kept = None, None
        if step.rows:
            trunks = np.array([certain_entries(row) // BLOCK_M for row in step.rows], np.int32)
            behind = max(row.num_entries - BLOCK_M * each for row, each in zip(step.rows, trunks.tolist(), strict=True))
            num_kept = -(-max(behind, 1) // BLOCK_M) * BLOCK_M
            trunk = to_device(trunks, self.device) if trunks.any() else None
        self.places = scan_kernel.place(mask, slots, trunk, num_kept)
        self.advances: list[Advance] = []

    def advance(self, rows: Sequence[Row], kept: Sequence[Sequence[int]]) -> None:
        """As States.advance; one launch for each convolution and scan."""
        last = np.full(self.batch, -1, np.int32)
        for row, entries in zip(rows, kept, strict=True):
            if len(entries) and row.num_entries:
                last[row.slot - self.first_slot] = entries[-1]
        if (last >= 0).any():
            ends = to_device(last, self.device)
            for advance in self.advances:
                advance(ends)
