"""Recurrent layers of a step whose tree is given as bits, by Triton kernels.

A call of the model is one launch, including norms, step sizes and gates besides the scan. Advancing the states of a
layer is one more. Steps without bits (attention other than 'triton') use the torch forms on any device.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from lpr.model.kernels import scan_kernel
from lpr.model.kernels.scan_kernel import BLOCK_M, Advance, Options
from lpr.model.recurrent.layout import Site, certain_entries
from lpr.model.recurrent.states import States
from lpr.model.step_inputs import Row, StepInputs
from lpr.model.transfer import to_device

SILU = ("silu", "swish")


class KernelStep:
    """The places of a step's entries, and the values that its forward keeps. Replays of a graph share one object."""

    def __init__(self, step: StepInputs, splits: bool = True) -> None:
        """For a step of one block with bits; a captured step has no rows, and so no trunk, as one without `splits`."""
        block, mask = step.blocks[0], step.blocks[0].tree_mask
        assert mask is not None
        self.first_slot, self.batch, self.device = block.first_slot, mask.bits.shape[0], mask.bits.device
        slots = torch.arange(self.first_slot, self.first_slot + self.batch, dtype=torch.int32, device=self.device)
        trunk, num_kept = None, None
        if step.rows and splits:
            trunks = np.array([certain_entries(row) // BLOCK_M for row in step.rows], np.int32)
            behind = max(row.num_entries - BLOCK_M * each for row, each in zip(step.rows, trunks.tolist(), strict=True))
            num_kept = -(-max(behind, 1) // BLOCK_M) * BLOCK_M
            trunk = to_device(trunks, self.device) if trunks.any() else None
        self.places = scan_kernel.place(mask, slots, trunk, num_kept)
        self.advances: list[tuple[Site, Advance]] = []

    def convolve(
        self, states: States, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        """The convolution of x [R, C, N] by weight [C, width]: [R, C, N]."""
        site, tensor = states.of_convolution(x, weight.shape[1])
        memory, is_silu = states.memory(site, x.device), activation in SILU
        out, advance = scan_kernel.convolve(x, weight, bias, is_silu, tensor, self.places, memory)
        self.advances.append((site, advance))
        return out if activation is None or is_silu else ACT2FN[activation](out)

    def linear(
        self, states: States, query: Tensor, key: Tensor, value: Tensor, decay: Tensor | None, beta: Tensor, **how: Any
    ) -> Tensor:
        """As `linear_scan` of the kernels, with Options `how`."""
        site, tensor = states.of_scan((value.shape[2], key.shape[3], value.shape[3]), value.device)
        given = query, key, value, decay, beta, tensor, self.places, states.memory(site, value.device)
        out, advance = scan_kernel.linear_scan(*given, Options(**how), exact=states.is_exact)
        self.advances.append((site, advance))
        return out

    def selective(
        self, states: States, x: Tensor, steps: Tensor, rates: Tensor, keys: Tensor, queries: Tensor, **how: Any
    ) -> Tensor:
        """As `selective_scan` of the kernels."""
        site, tensor = states.of_scan(rates.shape, rates.device)
        given = x, steps, rates, keys, queries, tensor, self.places, states.memory(site, rates.device)
        out, advance = scan_kernel.selective_scan(*given, **how)
        self.advances.append((site, advance))
        return out

    def advance(self, rows: Sequence[Row], kept: Sequence[Sequence[int]], states: States) -> None:
        """As States.advance, of `states`; one launch for each convolution and scan."""
        last = np.full(self.batch, -1, np.int32)
        for row, entries in zip(rows, kept, strict=True):
            if len(entries) and row.num_entries:
                last[row.slot - self.first_slot] = entries[-1]
        if (last >= 0).any():
            ends = to_device(last, self.device)
            for site, advance in self.advances:
                advance(ends, states.at(site))
