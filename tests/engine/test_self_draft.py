"""A model that drafts for itself: ids are those of plain decoding, drafts agree, and faults that must show."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import lpr
import lpr.engine.ahead
import lpr.engine.step
from lpr import Completion, DecodeConfig, Engine, SamplingParams
from lpr.config import InputError
from lpr.core.passes import Agreement, Passes
from lpr.core.tree import Source
from lpr.drop_in.lookahead import EngineCache
from lpr.engine.ahead import Ahead
from lpr.engine.exchange import Exchange
from lpr.engine.guesses import Followed, follow_all
from lpr.model.adapter import Adapter
from lpr.model.cpu.tiles import can_tile
from lpr.model.exact.check import _multiplier
from lpr.model.exact.functions import in_pieces
from lpr.model.kv_cache import KVCache
from lpr.model.low_bit import direct
from lpr.model.low_bit.copy import LowBitCopy
from lpr.model.runner import TreeModel
from lpr.model.sampling.processors import pure
from lpr.model.self_draft import Ending, SelfDrafter
from lpr.model.step_inputs import Row
from lpr.native import StepDraft
from tests.fakes.altered_gather import change_received
from tests.fakes.models import tiny_model
from tests.fakes.worlds import generate_on

PROMPTS = [[(7 * i + 3 * j * j + j) % 97 for j in range(6 + 20 * (i % 2))] for i in range(4)]
GREEDY = [SamplingParams(max_new_tokens=40)] * 4
SAMPLED = [SamplingParams(max_new_tokens=40, temperature=0.8, seed=seed) for seed in range(4)]
DECODE = DecodeConfig(window_size=0, trie_nodes=16, max_batch_size=2, prefill_chunk=8)


def model_of(model_type: str = "llama", **overrides: object) -> PreTrainedModel:
    return tiny_model(model_type, seed=3, spread=0.12, **overrides)


@cache
def plain() -> Engine:
    return Engine.from_model(model_of(), decode=DecodeConfig.autoregressive())


def fix(engine: Engine) -> None:
    """Let an engine make four passes in every step, whatever they take."""
    assert engine.model.self_drafter is not None
    engine.model.self_drafter.passes = Passes(fixed=4)


def drafting(
    decode: DecodeConfig = DECODE, form: str = "int8", model: PreTrainedModel | None = None, **more: Any
) -> Engine:
    engine = Engine.from_model(model or model_of(), decode=decode, self_draft=form, **more)
    fix(engine)
    return engine


def ids(completions: Sequence[Completion]) -> list[list[int]]:
    return [each.token_ids for each in completions]


@cache
def plain_ids(*params: SamplingParams) -> list[list[int]]:
    """Of the prompts, each by its own."""
    return ids(plain().generate(PROMPTS, params))


def copied(completions: Sequence[Completion]) -> tuple[int, int]:
    """Nodes of the copy that were drafted and accepted."""
    counts = [each.stats.sources["copy"] for each in completions if "copy" in each.stats.sources]
    return sum(each.drafted for each in counts), sum(each.accepted for each in counts)


@pytest.mark.parametrize("form, attention", [("int8", "auto"), ("fp8", "auto"), ("int4", "sdpa")])
def test_ids_are_those_of_plain_decoding(form: str, attention: str) -> None:
    engine = drafting(form=form, attention=attention)
    for params in (GREEDY, SAMPLED):
        done = engine.generate(PROMPTS, params)
        assert ids(done) == plain_ids(*params)
        drafted, accepted = copied(done)
        assert accepted > (60 if form == "int8" else 20)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_exact_mode_rounds_as_much(name: str) -> None:
    """The model's own products stay pinned, whose packs the copy shares."""
    model, found, pinned = model_of(name), [], []
    for exact in (False, True, False):
        engine = Engine.from_model(model, decode=DECODE, self_draft="int8", exact=exact)
        assert engine.model.self_drafter is not None and isinstance(engine.model.self_drafter.copy, LowBitCopy)
        found.append(engine.model.self_drafter.copy.num_bytes)
        multipliers = [getattr(*_multiplier(each)) for each in model.modules() if isinstance(each, torch.nn.Linear)]
        pinned.append(sum(isinstance(each, partial) and each.func is in_pieces for each in multipliers))
    assert found == [found[0]] * 3 and found[0] > 0
    assert pinned == [0, len(multipliers), len(multipliers)] and pinned[1] > 5


def test_passes_do_not_hold_up_a_first_token() -> None:
    engine, begun = drafting(), list[int]()
    draft = engine.model.draft
    engine.model.draft = lambda endings: (begun.extend(each.num_cached for each in endings), draft(endings))[1]  # type: ignore[method-assign]
    assert ids(engine.generate(PROMPTS[:1], GREEDY[0])) == plain_ids(*GREEDY)[:1]
    assert begun and min(begun) > len(PROMPTS[0])


@pytest.mark.parametrize("max_batch_size, sizes", [(1, [1]), (2, [1, 4]), (8, [1, 4, 16])])
def test_passes_of_a_batch_are_timed_at_the_start(max_batch_size: int, sizes: list[int]) -> None:
    engine = drafting(replace(DECODE, max_batch_size=max_batch_size))
    assert engine.model.self_drafter is not None
    assert list(engine.model.self_drafter.first_ms) == sizes
    assert min(engine.model.self_drafter.first_ms.values()) > 0


def test_a_pass_that_reads_half_of_the_head_drafts_what_the_text_has_beyond_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "LEAST_PANELS", 1)
    accepted = []
    for learns in (True, False):
        if not learns:
            monkeypatch.setattr(direct.LikelyTokens, "learn", lambda self, tokens: None)
        engine = drafting()
        assert engine.model.self_drafter is not None
        if engine.model.self_drafter.direct is None:
            pytest.skip("no extension")
        done = engine.generate(PROMPTS, SAMPLED)
        assert ids(done) == plain_ids(*SAMPLED)
        accepted.append(copied(done)[1])
    assert accepted[0] > 1.2 * accepted[1] > 0


@pytest.mark.parametrize("by_gain", [False, True])
def test_passes_in_one_call_draft_as_one_after_the_other(by_gain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many of them, with the same guesses; by limits of the choice, text, ends and lengths."""
    engine = drafting(replace(DECODE, max_batch_size=1))
    drafter, draft, found = engine.model.self_drafter, SelfDrafter.draft, list[Ending]()
    assert drafter is not None
    if drafter.direct is None:
        pytest.skip("no extension")
    if by_gain:
        drafter.passes = Passes(fewest=1, first_ms={1: 1.0})
        monkeypatch.setattr(Passes, "_price", lambda self, count: 1.0)
        monkeypatch.setattr(Passes, "pass_time", lambda self, num_entries: 0.6 + 0.02 * num_entries)
        monkeypatch.setattr(Passes, "_longer_ms", lambda self, num_made, count: 0.01 * num_made)

    def both(self: SelfDrafter, endings: Sequence[Ending], *cache: KVCache) -> None:
        (mine,) = endings
        twin, passes = copy.copy(mine), self.passes
        twin.chain, twin.shares, twin.draft, self.passes = [], [], copy.deepcopy(mine.draft), copy.deepcopy(passes)
        draft(self, [twin], *cache, self._pays)  # which leaves the path of one call
        self.passes, expected = passes, entries[:]
        entries.clear()
        draft(self, endings, *cache)
        assert mine.chain == twin.chain and mine.draft == twin.draft and mine.shares == twin.shares
        assert entries == expected
        entries.clear()
        found.append(mine)

    def count(self: Passes, num_entries: int, ms: float) -> None:
        entries.append(num_entries)
        count_pass(self, num_entries, ms)

    monkeypatch.setattr(Agreement, "count", lambda *args: None)  # one call counts behind its last pass
    entries, count_pass = list[int](), Passes.count_pass
    monkeypatch.setattr(Passes, "count_pass", count)
    monkeypatch.setattr(SelfDrafter, "draft", both)
    text = plain().generate(PROMPTS[:1], SAMPLED[0])[0].token_ids
    for more in ({}, {"top_k": 5, "top_p": 0.9}, {"temperature": 0.0}, {"stop_token_ids": (text[17],)}):
        params = [replace(each, **more) for each in SAMPLED[:2]]
        assert ids(engine.generate(PROMPTS[:2], params)) == ids(plain().generate(PROMPTS[:2], params))
    assert len(found) > 20 and len({len(each.chain) for each in found}) > 3 and any(each.text for each in found)


def test_sampling_agrees_as_much_as_greedy_decoding() -> None:
    for params in (GREEDY, [replace(each, temperature=1.3, top_k=20, top_p=0.95) for each in SAMPLED]):
        done = drafting().generate(PROMPTS, params)
        assert sum(each.stats.num_tokens for each in done) > 2.2 * sum(each.stats.num_steps for each in done)


@pytest.mark.parametrize("num_ranks, decode", [(3, replace(DECODE, home_ranks=0)), (2, replace(DECODE, window_size=3))])
def test_ranks(num_ranks: int, decode: DecodeConfig) -> None:
    params = [GREEDY[0], *SAMPLED[1:]]
    expected = plain_ids(*params)
    every = generate_on(num_ranks, model_of(), decode, PROMPTS, params, fix, self_draft="int4")
    for completions in every:
        assert ids(completions) == expected and copied(completions)[1] > 20
        assert copied(completions) == copied(every[0])


@pytest.mark.parametrize("decode", [replace(DECODE, home_ranks=0)])
def test_a_single_request_has_the_copies_of_all_ranks(decode: DecodeConfig) -> None:
    expected = ids(plain().generate(PROMPTS[1:2], SAMPLED[1:2]))
    for completions in generate_on(2, model_of(), decode, PROMPTS[1:2], SAMPLED[1:2], fix, self_draft="int8"):
        assert ids(completions) == expected and copied(completions)[1] > 15


@pytest.mark.parametrize("adaptive", [False, True])
def test_batches_come_and_go(adaptive: bool) -> None:
    prompts = [[(5 * i + 3 * j) % 89 for j in range(5 + 9 * i)] for i in range(9)]
    params = [SamplingParams(max_new_tokens=9 + 7 * i % 31, temperature=0.8 * (i % 2), seed=i) for i in range(9)]
    sizes: dict[str, Any] = {"window_size": "auto", "trie_nodes": "auto"} if adaptive else {}
    engine = drafting(replace(DECODE, max_batch_size=4, **sizes))
    assert ids(engine.generate(prompts, params)) == ids(plain().generate(prompts, params))


def test_auto_makes_passes_in_some_steps_and_none_in_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways are taken by turns here, as experience would; greedily and with eight seeds."""
    turns = itertools.count()
    monkeypatch.setattr(Passes, "begins", lambda self, runs, num_entries: next(turns) % 3 > 0)
    decode = DecodeConfig(max_batch_size=2, max_nodes=24)
    engine = Engine.from_model(model_of(), decode=decode, self_draft="auto")
    drafter = engine.model.self_drafter
    assert drafter is not None and drafter.copy.form == ("int4" if can_tile(torch.float32, 2) else "int8")  # type: ignore[attr-defined]
    for params in (GREEDY, SAMPLED, [replace(each, seed=each.seed + 4) for each in SAMPLED]):
        assert ids(engine.generate(PROMPTS, params)) == plain_ids(*params)
    for drafts in (False, True):
        ways = [way for key, way in drafter.passes._ways.items() if key[-1] is drafts]
        assert sum(way.num_steps for way in ways) > 20, "both ways are counted"
    assert drafter.spent_ms >= 0.0 and drafter.passes._load != 1.0


def test_other_programs_lengthen_no_step_and_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleep stands for what other programs take. A step that waits for another rank counts its waiting."""
    engine, steps, passes, evaluate = drafting(), list[float](), list[float](), TreeModel.evaluate

    def after_others(self: TreeModel, *args: Any) -> torch.Tensor:
        time.sleep(0.05)
        return evaluate(self, *args)

    monkeypatch.setattr(TreeModel, "evaluate", after_others)
    monkeypatch.setattr(SelfDrafter, "_expect", lambda self, tokens: time.sleep(0.05))
    monkeypatch.setattr(Passes, "count_step", lambda self, entries, count, ms: steps.append(ms))
    monkeypatch.setattr(Passes, "count_pass", lambda self, num_entries, ms: passes.append(ms))
    monkeypatch.setattr(Passes, "pass_time", lambda self, num_entries: 1.0)
    for waits, prompts in ((True, PROMPTS[:2]), (False, PROMPTS[2:])):
        steps.clear(), passes.clear()
        engine.model.adapter.choose_clock(waits)
        engine.generate(prompts, [SamplingParams(max_new_tokens=12)] * 2)
        assert steps and passes
        # The last step of the first run is counted in the second.
        as_expected = [max(each) > 50 if waits else median(each) < 25 for each in (steps, passes)]
        assert all(as_expected), (steps, passes)


def test_a_rank_waits_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[bool]()
    monkeypatch.setattr(Adapter, "choose_clock", lambda self, waits: found.append(waits))
    drafting()
    assert found and not any(found)
    found.clear()
    generate_on(2, model_of(), DECODE, PROMPTS[:1], GREEDY[:1])
    assert found and all(found)


def test_preemption_and_prefixes_that_are_found() -> None:
    engine = drafting(replace(DECODE, kv_tokens=224, max_length=120, max_batch_size=4))
    prompts = [[*range(40), 7 * i] for i in range(5)]
    params = [replace(SAMPLED[0], seed=i) for i in range(5)]
    expected = ids(plain().generate(prompts, params))
    for _ in range(2):
        assert ids(engine.generate(prompts, params)) == expected
    assert engine.scheduler.placement.retained[1] > 0


RULES = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4, "no_repeat_ngram_size": 3},
    {"logit_bias": {3: 2.0, 8: -5.0}, "min_new_tokens": 6, "stop_token_ids": (3, 9)},
    {"forced_ids": (1, 2, 3)},
    {"top_p": 0.8, "min_p": 0.02, "top_k": 30},
]


@pytest.mark.parametrize("rule", RULES[:3], ids=lambda rule: next(iter(rule)))
@pytest.mark.slow(first=1)
def test_penalties_and_limits_act_on_drafts(rule: dict[str, Any]) -> None:
    engine = drafting()
    for each in (GREEDY[0], SAMPLED[1]):
        params = [replace(each, seed=seed, **rule) for seed in range(4)]
        done = engine.generate(PROMPTS, params)
        assert ids(done) == plain_ids(*params)
        drafted, accepted = copied(done)
        assert accepted >= 0.6 * sum(each.stats.num_tokens - each.stats.num_steps for each in done)


def test_a_processor_of_the_caller_is_called_as_without_drafts() -> None:
    calls: list[int] = []

    def remember(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(input_ids.shape[1])
        return scores - 3.0 * (torch.arange(scores.shape[1]) % 7 == len(calls) % 7)

    found = []
    for engine in (plain(), drafting(replace(DECODE, max_batch_size=1))):
        calls.clear()
        done = engine.generate(PROMPTS[:1], GREEDY[0], [remember])
        found.append((ids(done), list(calls)))
    assert found[0] == found[1]


def test_nothing_is_drafted_behind_the_end() -> None:
    text = plain().generate(PROMPTS[:1], GREEDY[0])[0].token_ids
    params = replace(GREEDY[0], stop_token_ids=(text[11],))
    done = drafting().generate(PROMPTS[:1], params)
    assert ids(done) == ids(plain().generate(PROMPTS[:1], params))
    ending = Ending(0, 5, 1, GREEDY[0], most=3, ends=frozenset([4]))
    ending.take([7], [[7]], [[1.0]])
    assert ending.is_open
    ending.take([4], [[4]], [[1.0]])
    assert not ending.is_open


FAMILIES = {
    "mixtral": {"num_local_experts": 4},
    "gemma2": {"sliding_window": 8, "head_dim": 16},
}


@pytest.mark.parametrize("model_type", ["gemma2"])
def test_families(model_type: str) -> None:
    model = model_of(model_type, **FAMILIES[model_type])
    engine = Engine.from_model(model, decode=DecodeConfig.autoregressive())
    expected = [ids(engine.generate(PROMPTS, params)) for params in (GREEDY, SAMPLED)]
    engine = drafting(model=model)
    done = [engine.generate(PROMPTS, params) for params in (GREEDY, SAMPLED)]
    assert [ids(each) for each in done] == expected and copied([*done[0], *done[1]])[1] > 60


def test_plain_decoding_stays_plain() -> None:
    engine = Engine.from_model(model_of(), decode=DecodeConfig.autoregressive(), self_draft="int8")
    done = engine.generate(PROMPTS, GREEDY)
    assert copied(done) == (0, 0) and all(each.stats.num_steps == each.stats.num_tokens for each in done)


def test_a_form_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InputError, match="self_draft='int5'"):
        Engine.from_model(model_of(), decode=DECODE, self_draft="int5")


def test_exact_mode() -> None:
    engine = Engine.from_model(model_of(), decode=DecodeConfig.autoregressive(), exact=True)
    expected = ids(engine.generate(PROMPTS, SAMPLED))
    done = drafting(exact=True).generate(PROMPTS, SAMPLED)
    assert ids(done) == expected and copied(done)[1] > 60


def test_the_copy_follows_the_weights_of_its_model() -> None:
    model = model_of()
    engine = drafting(model=model)
    engine.generate(PROMPTS, GREEDY)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.roll(weight, 1, 0))
    changed = Engine.from_model(copy.deepcopy(model), decode=DecodeConfig.autoregressive())
    done = engine.generate(PROMPTS, GREEDY)
    assert ids(done) == ids(changed.generate(PROMPTS, GREEDY)) and copied(done)[1] > 60


def test_the_drop_in_drafts_with_a_copy() -> None:
    model: Any = model_of()
    stock: Any = model_of()
    given = torch.tensor(PROMPTS[:1])
    how = {"attention_mask": torch.ones_like(given), "max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    found = model.generate(given, custom_generate=lpr.Lookahead(DECODE, self_draft="int8"), **how)
    assert found.tolist() == stock.generate(given, **how).tolist()
    engine = EngineCache.of(model).engine
    assert engine is not None and engine.model.self_drafter is not None


# Seeded faults.


def run_with(patch: Callable[[pytest.MonkeyPatch], None] | None, form: str = "int4") -> tuple[bool, int]:
    """Whether ids of two ranks are those of plain decoding under a fault, and the accepted nodes of the copy."""
    params = [GREEDY[0], *SAMPLED[1:]]
    expected = plain_ids(*params)
    decode = replace(DECODE, home_ranks=0, max_batch_size=4)
    with pytest.MonkeyPatch.context() as context:
        if patch is not None:
            patch(context)
        done = generate_on(2, model_of(), decode, PROMPTS, params, fix, self_draft=form, attention="sdpa")
    return all(ids(each) == expected for each in done), copied(done[0])[1]


@cache
def without_a_fault(form: str) -> tuple[bool, int]:
    return run_with(None, form)


def kv_of_the_copy_stays(patch: pytest.MonkeyPatch) -> None:
    """What a pass has written for a token stays, though the model has evaluated the token since."""
    written: dict[int, list[tuple[np.ndarray, list[torch.Tensor]]]] = {}
    run, look_ahead = SelfDrafter._logits, lpr.engine.step.look_ahead

    def remember(self: SelfDrafter, rows: Sequence[Row], cache: KVCache) -> torch.Tensor:
        logits = run(self, rows, cache)
        for row in rows:
            places = cache.write_rows([row], row.num_entries)[0, :1]
            written.setdefault(id(cache), []).append((places, [pool[:, places].clone() for pool in cache._pools]))
        return logits

    def put_back(plan: Any, model: TreeModel, *args: Any) -> Ahead:
        assert isinstance(model.cache, KVCache)
        for places, values in written.pop(id(model.cache), []):
            for pool, value in zip(model.cache._pools, values, strict=True):
                pool[:, places] = value
        return look_ahead(plan, model, *args)

    patch.setattr(SelfDrafter, "_logits", remember)
    patch.setattr(lpr.engine.step, "look_ahead", put_back)


def a_choice_of_the_copy_counts(patch: pytest.MonkeyPatch) -> None:
    """A token of the copy, its last one behind the root, is accepted whatever the model has chosen."""

    def change(exchange: Exchange, draft: StepDraft, tables: np.ndarray) -> None:
        for place, index in enumerate(draft.served[0]):
            tree, shards = draft.trees[index], draft.shards[index]
            assert tree is not None and shards is not None
            for node in range(1, len(tree)):
                if tree.sources[node] == Source.COPY and tree.parents[node] == 0:
                    for rank, shard in enumerate(shards):
                        if 0 in shard.owned:
                            tables[rank, place, list(shard.owned).index(0), 0] = tree.tokens[node]

    change_received(patch, change)


def noise_of_another_seed(patch: pytest.MonkeyPatch) -> None:
    choose = SelfDrafter._choose

    def mutant(self: SelfDrafter, logits: torch.Tensor, active: Sequence[Ending], *rest: Any) -> Any:
        others = [replace(each, params=replace(each.params, seed=each.params.seed + 1)) for each in active]
        return choose(self, logits, others, *rest)

    patch.setattr(SelfDrafter, "_choose", mutant)


def another_path_is_taken(patch: pytest.MonkeyPatch) -> None:
    """Each rank takes a wrong path for the accepted one, where its part of the tree has another."""

    def mutant(draft: StepDraft, rows: Sequence[Row], results: Any) -> list[Followed]:
        found = []
        for each in follow_all(draft, rows, results):
            row = rows[each.place]
            last = row.num_entries - 1
            if last not in each.entries and row.num_results > 1:
                each = replace(each, entries=[*range(row.num_entries - row.num_results + 1), last], is_end=True)
            found.append(each)
        return found

    patch.setattr(lpr.engine.ahead, "follow_all", mutant)


def moved_entries_are_kept(patch: pytest.MonkeyPatch) -> None:
    """The entries of a path that was not accepted stay where the rank has moved them."""
    another_path_is_taken(patch)
    patch.setattr(lpr.engine.step, "accepted_entries", lambda *args: [])


def moves_are_made_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ahead, "left", lambda self, moves: moves)


def test_without_a_fault() -> None:
    for form, fewest in (("int4", 30), ("int8", 60)):
        same, accepted = without_a_fault(form)
        assert same and accepted > fewest


@pytest.mark.parametrize(
    "fault", [kv_of_the_copy_stays, a_choice_of_the_copy_counts, moved_entries_are_kept, moves_are_made_twice]
)
def test_faults_change_ids(fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    try:
        same, _ = run_with(fault)
    except (RuntimeError, ValueError, AssertionError, IndexError):
        return  # noticed
    assert not same


def test_other_noise_loses_drafts() -> None:
    same, accepted = run_with(noise_of_another_seed, "int8")
    assert same and accepted < 0.8 * without_a_fault("int8")[1]


def test_a_rank_that_took_another_path_computes_the_accepted_one() -> None:
    same, _ = run_with(another_path_is_taken)
    assert same


def test_drafts_of_processors_that_keep_a_state_are_left_out() -> None:
    assert pure(None) is None
