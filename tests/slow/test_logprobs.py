"""The other cases of tests/model/sampling/test_logprobs.py."""

from __future__ import annotations

from tests.fakes.again import again
from tests.model.sampling import test_logprobs as fast
from tests.model.sampling.test_logprobs import bundled, generate, model

test_penalties_and_bias_as_openai_defines_them = again(
    fast.test_penalties_and_bias_as_openai_defines_them,
    "temperature, presence, frequency, bias",
    [(0.8, 0.7, 0.0, ()), (0.0, 0.0, 0.4, ()), (0.8, 0.0, 0.4, ()), (0.0, -0.5, 0.3, ((7, 2.0), (9, -50.0)))],
)


test_an_output_keeps_to_its_grammar = again(
    fast.test_an_output_keeps_to_its_grammar_and_equals_plain_decoding, "temperature", [0.0]
)
