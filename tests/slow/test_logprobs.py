"""The other cases of tests/model/sampling/test_logprobs.py."""

from __future__ import annotations

import copy

import lpr
from lpr import DecodeConfig, Engine, SamplingParams
from lpr.model.loader import load
from tests.fakes.again import again
from tests.fakes.worlds import ThreadWorld, run_ranks
from tests.model.sampling import test_logprobs as fast
from tests.model.sampling.test_logprobs import REGEX, bundled, generate, model

test_penalties_and_bias_as_openai_defines_them = again(
    fast.test_penalties_and_bias_as_openai_defines_them,
    "temperature, presence, frequency, bias",
    [(0.8, 0.7, 0.0, ()), (0.0, 0.0, 0.4, ()), (0.8, 0.0, 0.4, ()), (0.0, -0.5, 0.3, ((7, 2.0), (9, -50.0)))],
)


test_an_output_keeps_to_its_grammar = again(
    fast.test_an_output_keeps_to_its_grammar_and_equals_plain_decoding, "temperature", [0.0]
)


def test_ranks_keep_to_a_grammar_together(bundled):
    params = SamplingParams(max_new_tokens=20, temperature=0.9, seed=1, grammar=REGEX)
    loaded = load(lpr.bundled_model(), "float32")

    def program(comm):
        own = copy.deepcopy(loaded.model)
        engine = Engine.from_model(own, loaded.tokenizer, DecodeConfig(window_size=3), comm=comm)
        if comm.rank:
            engine.work()
            return None
        done = engine.generate(["# code\n", "class A:\n"], params)
        engine.close()
        return done

    done = run_ranks(ThreadWorld(2), program)[0]
    alone = bundled["plain"].generate(["# code\n", "class A:\n"], params)
    assert [each.token_ids for each in done] == [each.token_ids for each in alone]
    assert all(each.error is None for each in done)
