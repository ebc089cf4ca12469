"""The long tests of tests/engine/test_prediction.py."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from lpr import Engine, SamplingParams
from tests.engine.test_prediction import DECODE


def test_wrong_predictions_cost_few_steps(model: PreTrainedModel) -> None:
    """At most 3 % of all steps, over enough of them that one step is less."""
    prompts = [[(seed * i * i + i) % 97 for i in range(30)] for seed in range(1, 13)]
    params = [SamplingParams(max_new_tokens=160, temperature=0.8 * (i % 2), seed=i) for i in range(len(prompts))]

    def run(predictions: list) -> tuple[list[list[int]], int]:
        engine = Engine.from_model(model, decode=DECODE)
        each = zip(prompts, params, predictions, strict=True)
        found = [engine.submit(prompt, wanted, prediction=prediction) for prompt, wanted, prediction in each]
        while not engine.is_idle:
            engine.step()
        return [request.token_ids for request in found], sum(request.stats.num_steps for request in found)

    texts, plain = run([None] * len(prompts))
    assert plain > 800
    for wrong in ([list(range(50, 90))] * len(prompts), [*texts[1:], texts[0]], [text[::-1] for text in texts]):
        found, steps = run(wrong)
        assert found == texts and steps <= 1.03 * plain, (steps, plain)
