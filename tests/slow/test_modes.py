"""The other cases of tests/model/test_modes.py."""

from __future__ import annotations

from itertools import cycle, product

import torch
from transformers import PreTrainedModel

from lpr import Engine
from tests.fakes.again import again
from tests.model import test_modes as fast
from tests.model.test_modes import DECODE, expected, model, model_of, output

USED = "inside", "outside", "both"
test_a_mode_changes_no_text = again(
    fast.test_a_mode_changes_no_text,
    "model, name, used",
    [*product(["llama"], fast.MODES, USED), *(("bamba", *each) for each in zip(fast.MODES, cycle(USED), strict=False))],
    without=fast.CASES,
)
test_a_default_dtype = again(fast.test_a_default_dtype_changes_no_text, "model", ["bamba"])
test_deterministic_algorithms = again(
    fast.test_deterministic_algorithms_and_another_number_of_threads, "model", ["bamba"]
)


def test_a_model_made_in_inference_mode(expected: list[list[int]], model: PreTrainedModel) -> None:
    with torch.inference_mode():
        made = model_of(model.config.model_type)
        engine = Engine.from_model(made, decode=DECODE)
        assert output(engine) == expected
    assert output(engine) == expected
