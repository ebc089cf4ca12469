"""Sampling as one Triton kernel: noise in registers, a running argmax, limits without a sort.

One program per row reads its logits twice, DIGITS times more for top-k, and a few times more if a limit excludes the
token that the noise prefers. `specification.pick` is the specification. Logarithms are rounded as on the device, so a
near tie may be decided differently than on a CPU, but not differently for another shape of step.
"""

import torch
import triton
from torch import Tensor

from lpr.core.accept import NOT_A_NUMBER
from lpr.model.kernels import device_of
from lpr.model.kernels.likely_code import choose_likeliest, list_likeliest
from lpr.model.kernels.sampling_code import choose_rows
from lpr.model.sampling.selection import Selection

BLOCK = 4096  # tokens per block
NUM_WARPS = 8
DIGITS = {torch.bfloat16: 2, torch.float16: 3, torch.float32: 4}
"""Passes over a row that find the k-th largest logit: the number of 8-bit digits of its values."""


def choose(logits: Tensor, selection: Selection, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """As `specification.choose`, of a selection that samples; logits [n, V] on a GPU, or interpreted."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, vocabulary = logits.shape
    chosen = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    totals = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    parameters = selection.keys, selection.key_of, selection.temperature
    limits = selection.top_k, selection.top_p, selection.min_p
    with device_of(logits):
        choose_rows[num_rows,](
            logits, *parameters, *limits, chosen, totals, vocabulary, logits.stride(0), selection.first_token,
            NOT_A_NUMBER=NOT_A_NUMBER, LIMITED=selection.filtered, DIGITS=DIGITS[logits.dtype],
            BLOCK=min(block, triton.next_power_of_2(vocabulary)), num_warps=NUM_WARPS,
        )  # fmt: skip
    return chosen, totals


def likeliest(logits: Tensor, count: int, block: int = BLOCK) -> tuple[Tensor, Tensor, Tensor]:
    """As `specification.likeliest`, of equal ones the first; a program goes through a block `count` times."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, vocabulary = logits.shape
    count, block = min(count, vocabulary), max(min(block, triton.next_power_of_2(vocabulary)), 16)
    num_blocks = triton.cdiv(vocabulary, block)
    tops = torch.empty(num_rows, num_blocks, count, dtype=torch.float32, device=logits.device)
    ids, sums = torch.empty_like(tops, dtype=torch.int32), torch.empty_like(tops[..., 0])
    best, tokens = torch.empty_like(tops[:, 0]), torch.empty_like(tops[:, 0], dtype=torch.int64)
    totals = torch.empty_like(best[:, 0])
    with device_of(logits):
        sizes = {"COUNT": count, "BLOCK": block, "num_warps": NUM_WARPS}
        list_likeliest[num_rows, num_blocks](logits, tops, ids, sums, vocabulary, logits.stride(0), **sizes)
        sizes = {"COUNT": count, "BLOCKS": triton.next_power_of_2(num_blocks), "num_warps": 4}
        sizes["BLOCK"] = triton.next_power_of_2(num_blocks * count)
        choose_likeliest[num_rows,](tops, ids, sums, best, tokens, totals, num_blocks, **sizes)
    return best, tokens, totals
