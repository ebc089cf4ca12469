"""What test_recurrent.py and test_sparse.py ask of one family of each kind, asked of all; not part of the suite.

pytest -n 2 tests/slow/every_recurrent_family.py
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from transformers import PreTrainedModel

from dev.families import DECODE, NEW_TOKENS, PROMPTS, stock_greedy, tiny_model
from dev.family_table import FAMILIES, WORKS
from lpr import DecodeConfig, Engine, SamplingParams
from lpr.model.attention.sparse import selects
from lpr.model.families import is_recurrent
from tests.dist import test_survivors as survivors
from tests.fakes.elastic_world import Fault
from tests.fakes.worlds import generate_on

MORE = [*PROMPTS, (PROMPTS[1] + PROMPTS[0])[:90], [*PROMPTS[1][:17], 5, 6, 7], (PROMPTS[1] * 3)[:90]]
SAMPLED = [SamplingParams(max_new_tokens=24, temperature=0.8, seed=seed) for seed in range(len(MORE))]
PLAIN = DecodeConfig.autoregressive(max_length=120)


@cache
def model(name: str) -> PreTrainedModel:
    return tiny_model(next(family for family in FAMILIES if family.name == name))


def names() -> list[str]:
    """Families that work and have recurrent layers or sparse attention."""
    found = []
    for family in FAMILIES:
        if family.status == WORKS:
            made = model(family.name)
            if is_recurrent(made) or selects(made.config.get_text_config(decoder=True)):
                found.append(family.name)
    model.cache_clear()
    return found


@cache
def plain(name: str) -> list[list[int]]:
    return [done.token_ids for done in Engine.from_model(model(name), decode=PLAIN).generate(MORE, SAMPLED)]


@pytest.mark.parametrize("name", names())
def test_every_shape(name: str) -> None:
    """Greedy ids are transformers', again by the prefix cache; sampled ids are plain decoding's; a rank dies."""
    greedy = stock_greedy(model(name))
    engine = Engine.from_model(model(name), decode=DECODE)
    done = engine.generate(PROMPTS, SamplingParams(max_new_tokens=NEW_TOKENS))
    assert [each.token_ids for each in done] == greedy
    for _ in range(2):
        asked = [engine.submit(prompt, params) for prompt, params in zip(MORE, SAMPLED, strict=True)]
        while not engine.is_idle:
            engine.step()
        assert [request.token_ids for request in asked] == plain(name)
    assert max(request.num_cached_tokens for request in asked) >= 80
    decode = replace(DECODE, max_batch_size=3)
    drafting = Engine.from_model(model(name), decode=decode)
    for text in plain(name):
        drafting.learn([token if i % 6 else (token + 1) % 97 for i, token in enumerate(text)])
    done = drafting.generate(MORE, SAMPLED)
    assert [each.token_ids for each in done] == plain(name)
    assert sum(each.stats.num_steps for each in done) < sum(each.stats.num_tokens for each in done)
    for rank in generate_on(2, model(name), decode, MORE, SAMPLED):
        assert [each.token_ids for each in rank] == plain(name)
    whole = Engine.from_model(model(name), decode=survivors.DECODE).generate(survivors.PROMPTS, survivors.PARAMS)
    job, first = survivors.Job(model(name)), survivors.run_start(model(name))
    world = survivors.run(job, Fault(0, first + 9, 0, True, frozenset({2})))
    assert world.died == {0} and survivors.texts(job) == [each.token_ids for each in whole]
