"""Choosing next tokens by one Triton kernel: noise in registers, a running argmax, limits without a sort.

A program per row reads its logits twice, or a few times more where a limit refuses what the noise prefers.
`specification.pick` is the specification. The logarithms round as the device does, so a near tie may fall otherwise
than on a CPU, but never otherwise for another shape of step.
"""

from __future__ import annotations

import torch
import triton

from lpr.core.accept import NOT_A_NUMBER
from lpr.model.kernels import device_of
from lpr.model.kernels.parts_code import list_winners, weigh_prefixes
from lpr.model.kernels.sampling_code import choose_rows
from lpr.model.sampling.selection import Selection

BLOCK = 4096
"""Tokens that a program looks at together."""
NUM_WARPS = 8


def choose(logits: torch.Tensor, selection: Selection, block: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """As `specification.choose`, of a selection that samples; logits [n, V] on a GPU, or interpreted."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, vocabulary = logits.shape
    chosen = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    totals = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    with device_of(logits):
        choose_rows[(num_rows,)](
            logits, selection.keys, selection.key_of, selection.temperature, selection.top_k, selection.top_p,
            selection.min_p, chosen, totals, vocabulary, logits.stride(0), selection.first_token,
            NOT_A_NUMBER=NOT_A_NUMBER, LIMITED=selection.filtered,
            BLOCK=min(block, triton.next_power_of_2(vocabulary)), num_warps=NUM_WARPS,
        )  # fmt: skip
    return chosen, totals


def find_winners(
    logits: torch.Tensor, selection: Selection, length: int, block: int = BLOCK
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per row of a part [n, v] of the logits every token that is the best of some limits' prefix of the part.

    Scores, tokens of the whole vocabulary (int32) and totals, [n, length] each; where there are fewer the total is
    -inf, and the first is NaN where the part has a value that is no number to choose by, or more than `length`.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, vocabulary = logits.shape
    scores = torch.full((num_rows, length), -torch.inf, dtype=torch.float32, device=logits.device)
    tokens, totals = torch.zeros_like(scores, dtype=torch.int32), scores.clone()
    with device_of(logits):
        list_winners[(num_rows,)](
            logits, selection.keys, selection.key_of, selection.temperature, scores, tokens, totals, vocabulary,
            logits.stride(0), selection.first_token, LENGTH=length,
            BLOCK=min(block, triton.next_power_of_2(vocabulary)), num_warps=NUM_WARPS,
        )  # fmt: skip
    return scores, tokens, totals


def weigh(
    logits: torch.Tensor,
    selection: Selection,
    winners: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    kept: torch.Tensor,
    top: torch.Tensor,
    block: int = BLOCK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of a part [n, v] of the logits in front of each of `winners` [n, m] of all parts, and in all.

    A weight is exp(score - `top` [n]), of tokens with a score of `kept` [n] or more: float64 [n, m] and [n].
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    (num_rows, vocabulary), (scores, tokens, totals) = logits.shape, winners
    before = torch.zeros(scores.shape, dtype=torch.float64, device=logits.device)
    whole = torch.zeros(num_rows, dtype=torch.float64, device=logits.device)
    with device_of(logits):
        weigh_prefixes[scores.shape](
            logits, selection.temperature, scores.contiguous(), tokens.contiguous(), totals.contiguous(),
            kept.contiguous(), top.contiguous(), before, whole, vocabulary, logits.stride(0), selection.first_token,
            BLOCK=min(block, triton.next_power_of_2(vocabulary)), num_warps=NUM_WARPS,
        )  # fmt: skip
    return before, whole
