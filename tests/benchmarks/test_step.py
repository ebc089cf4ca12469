"""The parts of a step's time (benchmarks.step)."""

from __future__ import annotations

import pytest

import lpr
from benchmarks import step
from lpr import Engine


@pytest.mark.parametrize("both", [False, True])
def test_the_parts_of_a_step_are_timed(both: bool) -> None:
    engine = Engine.from_pretrained(lpr.bundled_model(), step.tree_of(32, both), dtype="float32")
    found = step.time_steps(engine, step.tree_of(32, both), ["def f(x):\n"], 0.0, 12)
    parts = found["median_ms"]
    assert found["num_steps"] > 0 and set(step.PHASES.values()) < set(parts) == set(found["p99_ms"])
    assert 0 < parts["forward"] < parts["step"] and parts["host alone"] > 0
    params = lpr.SamplingParams(max_new_tokens=12)
    assert len(engine.generate(["def f(x):\n"], params)[0].token_ids) == 12, "the model is the engine's own again"
