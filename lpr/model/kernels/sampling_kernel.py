"""Choosing next tokens by one Triton kernel: noise in registers, a running argmax, limits without a sort.

In operators of torch a sampled step writes the noise of the whole vocabulary 57 times, and a limit sorts it for every
node. Here a program per row reads its logits twice, or a few times more where a limit refuses what the noise prefers.
`sampling_reference.pick` is the specification. The hash is integer arithmetic, the same everywhere; the two logarithms
round as the device does, so a near tie may fall otherwise than on a CPU, but never otherwise for another shape of step.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton

from lpr.core.accept import NOT_A_NUMBER
from lpr.model.kernels.sampling_code import choose_rows
from lpr.model.selection import Selection

BLOCK = 4096
"""Tokens that a program looks at together."""
NUM_WARPS = 8


def pick(logits: torch.Tensor, selection: Selection, block: int = BLOCK) -> torch.Tensor:
    """As `sampling_reference.pick`, of a selection that samples; logits [n, V] on a GPU, or interpreted."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, vocabulary = logits.shape
    chosen = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    where: Any = torch.cuda.device(logits.device) if logits.is_cuda else nullcontext()
    with where:
        choose_rows[(num_rows,)](
            logits, selection.keys, selection.key_of, selection.temperature, selection.top_k, selection.top_p,
            selection.min_p, chosen, vocabulary, logits.stride(0), selection.first_token, NOT_A_NUMBER=NOT_A_NUMBER,
            LIMITED=selection.filtered, BLOCK=min(block, triton.next_power_of_2(vocabulary)), num_warps=NUM_WARPS,
        )  # fmt: skip
    return chosen
