"""Results of a step that are made when one asks for them, and what becomes of them after an exception."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel

from lpr import DecodeConfig, Engine, SamplingParams
from lpr.engine.hooks import StepHooks
from lpr.engine.request import Request
from tests.fakes.models import tiny_model

PROMPTS = [[5, 17, 3, 9], [8, 2, 44, 6, 21], [7, 7, 1]]
DECODES = {
    "plain": DecodeConfig.autoregressive(),
    "trees": DecodeConfig(window_size=0, trie_nodes=12, num_candidates=4),
}
LENGTH = 24


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(vocab_size=97)


def engine_of(model: PreTrainedModel, kind: str) -> Engine:
    return Engine.from_model(model, decode=DECODES[kind], prefix_reuse=False)


def begun(engine: Engine, **params: Any) -> list[Request]:
    wanted = SamplingParams(max_new_tokens=LENGTH, ignore_eos=True, **params)
    return [engine.submit(prompt, wanted) for prompt in PROMPTS]


class Watching(StepHooks):
    """Reads all outcomes of each step, also from behind."""

    def __init__(self) -> None:
        self.emitted: dict[int, list[int]] = {}
        self.nodes: dict[int, int] = {}

    def end_step(self, batch: Any, outcomes: Any, chunks: Any) -> None:
        assert len(outcomes) == len(batch) and outcomes[-1].concluded.path == outcomes[len(batch) - 1].concluded.path
        with pytest.raises(IndexError):
            outcomes[len(batch)]
        for request, outcome, chunk in zip(batch, outcomes, chunks, strict=True):
            concluded = outcome.concluded
            assert concluded.emitted == chunk.token_ids == request.tokens[-len(concluded.emitted) :]
            assert concluded.next_tokens[concluded.path[-1]] == concluded.emitted[-1] and not concluded.has_nan
            assert [len(shard.nodes) for shard in concluded.shards] == [len(concluded.tree)]
            self.emitted.setdefault(request.id, []).extend(concluded.emitted)
            self.nodes[request.id] = self.nodes.get(request.id, 0) + len(concluded.tree)


@pytest.mark.parametrize("kind", DECODES)
def test_an_outcome_is_the_same_whether_it_is_asked_for_or_not(model: PreTrainedModel, kind: str) -> None:
    asked, unasked = engine_of(model, kind), engine_of(model, kind)
    asked.hooks = watching = Watching()
    seen, others = begun(asked), begun(unasked)
    while not (asked.is_idle and unasked.is_idle):
        asked.step()
        unasked.step()
    for one, other in zip(seen, others, strict=True):
        assert one.token_ids == other.token_ids == watching.emitted[one.id] and len(one.token_ids) == LENGTH
        assert one.stats == other.stats and one.stats.num_nodes == watching.nodes[one.id]
        assert one.stats.drafted.total() == one.stats.num_nodes
        assert sum(len(chunk.token_ids) for chunk in other.take()) == other.stats.num_tokens == LENGTH


def test_only_requests_that_need_it_are_looked_at(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, collect, seen = engine_of(model, "plain"), Request.collect, list[int]()

    def watched(request: Request, last: Any = None) -> None:
        seen.append(int(request.id))
        collect(request, last)

    with_details = engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=LENGTH, ignore_eos=True), details=True)
    plain = begun(engine)[0]
    monkeypatch.setattr(Request, "collect", watched)
    for _ in range(10):
        engine.step()
    assert seen.count(int(with_details.id)) >= 8 and plain.id not in seen
    assert plain.num_output >= 8 and plain.stats.num_tokens == plain.num_output


@pytest.mark.parametrize("fault", ["none", "collected without its result"])
def test_a_request_that_takes_each_step_gets_none_of_a_step_that_breaks_off(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Its tokens would come without their log-probabilities."""
    engine, collect, left = engine_of(model, "plain"), Request.collect, 5
    requests = begun(engine, logprobs=2)

    def broken(request: Request, last: Any = None) -> None:
        nonlocal left
        left -= last is not None and request is requests[0]
        if last is not None and left == 0:
            left = -1
            for each in requests if fault != "none" else ():
                each.wants_each_step = False
            raise ValueError("of a tokenizer")
        collect(request, last)

    with monkeypatch.context() as patch, pytest.raises(ValueError, match="of a tokenizer"):
        patch.setattr(Request, "collect", broken)
        while True:
            engine.step()
    known = [len(each.logprobs) == len(each.token_ids) == sum(len(one.token_ids) for one in each.take())
             for each in requests]  # fmt: skip
    assert all(known) == (fault == "none")
    assert all(each.finish_reason == "error" for each in requests) and engine.is_idle
