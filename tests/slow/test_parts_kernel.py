"""The long tests of tests/model/kernels/test_parts_kernel.py."""

from __future__ import annotations

import pytest
import torch

from lpr import SamplingParams
from lpr.model.sampling import choice, specification
from lpr.model.sampling.selection import Selection
from tests.fakes.difficult_logits import PARAMS, peaked
from tests.model.kernels.test_parts_kernel import DEVICE, NARROW, together


@pytest.mark.parametrize("params", [*PARAMS[1:3], NARROW, SamplingParams(temperature=0.9, top_k=9, min_p=0.02)])
def test_candidates_and_half_precision(params: SamplingParams) -> None:
    logits = peaked(torch.Generator().manual_seed(9), 4, 3000)
    logits[3:] *= 0.2
    selection = Selection.build([(SamplingParams(), [4]), (params, range(3))])
    logits, selection = logits.bfloat16().to(DEVICE), selection.to(DEVICE)
    chosen, tokens, scores = together(logits, selection, (0, 1024, 2048, 3000), 8)
    assert chosen.tolist() == specification.pick(logits, selection).tolist()
    whole, whole_scores = choice.candidates(logits, 8)
    for row in (0, 1, 2):  # the others have ties in bfloat16
        assert sorted(tokens[row].tolist()) == sorted(whole[row].tolist())
    assert (scores.int() - whole_scores.int()).abs().max() <= 1, "sums of parts are rounded"
