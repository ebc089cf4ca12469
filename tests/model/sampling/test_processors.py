"""Logits processors on a tree, and failures that end one request: both against plain decoding, written out here."""

from __future__ import annotations

import copy
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

import lpr
import lpr.engine.step
import lpr.model.sampling.processors
from lpr import Completion, DecodeConfig, Engine, InputError, SamplingParams
from lpr.cli.generate import main
from lpr.core.accept import NOT_A_NUMBER, PROCESSOR_FAILED, accept, as_guess, likely
from lpr.core.noise_keys import noise_key
from lpr.core.tree import TokenTree
from lpr.engine.exchange import Exchange
from lpr.model.kv_cache import KVCache
from lpr.model.sampling.choice import pick
from lpr.model.sampling.processors import (
    NOTHING_LEFT,
    ROW_BY_ROW,
    Forced,
    LogitBias,
    OutputPenalty,
    Processor,
    ProcessorPath,
    Processors,
    is_row_by_row,
)
from lpr.model.sampling.selection import Selection
from lpr.model.sampling.specification import gumbel
from lpr.native import StepDraft
from tests.fakes.altered_gather import change_received
from tests.fakes.models import stock_greedy, tiny_model
from tests.fakes.worlds import ThreadComm, ThreadWorld, run_ranks

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [(3 * i) % 89 for i in range(40)], [9, 9, 4, 2] * 6]
TREES = DecodeConfig(window_size=5, ngram_size=4, guess_set_size=4, trie_nodes=24, max_batch_size=2)
PLAIN = DecodeConfig.autoregressive()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(seed=7, spread=0.12)


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel) -> Engine:
    return Engine.from_model(model, decode=TREES)


def sticky(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Depends on the whole path: favours the token that follows from the sum of all ids and from the last two."""
    scores = scores.clone()
    for row, ids in enumerate(input_ids.tolist()):
        scores[row, (sum(ids) * 31 + len(ids)) % 13] += 2.0
        scores[row, (ids[-1] * 7 + ids[-2]) % 97] += 2.0
    return scores


def plain_decoding(
    model: PreTrainedModel, prompt: list[int], count: int, processors: list[Processor], params: SamplingParams
) -> list[int]:
    """The definition: one forward without a cache per token, processors, then temperature, top-k and keyed noise."""
    chain = LogitsProcessorList(processors)
    if params.temperature:
        chain.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[:, -1].float()
        scores = chain(torch.tensor([ids]), logits)
        if params.temperature:
            key = torch.tensor([[noise_key(params.seed, len(ids))]])
            scores = scores + gumbel(key, torch.arange(scores.shape[1])[None])
        ids.append(int(scores.argmax()))
    return ids[len(prompt) :]


def penalties() -> list[Processor]:
    return [RepetitionPenaltyLogitsProcessor(1.4), NoRepeatNGramLogitsProcessor(3)]


def output_penalties(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """By the definition of OpenAI's API, token by token; each prompt here has another length."""
    scores = scores.clone()
    ids = input_ids[0].tolist()
    num_prompt = next(len(prompt) for prompt in PROMPTS if ids[: len(prompt)] == prompt)
    output = ids[num_prompt:]
    for token in set(output):
        scores[0, token] -= 0.7 * output.count(token) + 0.9
    for token, bias in ((3, 2.5), (60, -4.0)):
        scores[0, token] += bias
    return scores


CASES: dict[str, tuple[SamplingParams, SamplingParams, Callable[[], list[Processor]]]] = {
    # What lpr is asked for, what plain decoding is asked for, and the processors that plain decoding has.
    "user": (SamplingParams(), SamplingParams(), lambda: [sticky]),
    "penalties": (
        SamplingParams(repetition_penalty=1.4, no_repeat_ngram_size=3),
        SamplingParams(),
        penalties,
    ),
    "output penalties and bias": (
        SamplingParams(frequency_penalty=0.7, presence_penalty=0.9, logit_bias=((3, 2.5), (60, -4.0)), temperature=0.5),
        SamplingParams(temperature=0.5),
        lambda: [output_penalties],
    ),
    "penalties, then user, then sampling": (
        SamplingParams(repetition_penalty=1.4, no_repeat_ngram_size=3, temperature=0.7, top_k=30, seed=3),
        SamplingParams(temperature=0.7, top_k=30, seed=3),
        lambda: [*penalties(), sticky],
    ),
}


@cache
def plain_texts(model: PreTrainedModel, case: str) -> list[list[int]]:
    _, plain_params, processors = CASES[case]
    return [plain_decoding(model, prompt, 25, processors(), plain_params) for prompt in PROMPTS]


def check(engine: Engine, model: PreTrainedModel, case: str) -> None:
    params, _, processors = CASES[case]
    own = [sticky] if sticky in processors() else []
    expected = plain_texts(model, case)
    engine.configure(TREES)
    done = engine.generate(PROMPTS, SamplingParams(**{**vars(params), "max_new_tokens": 25}), own)
    assert [each.token_ids for each in done] == expected


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow(first=2)
def test_equals_plain_decoding(engine: Engine, model: PreTrainedModel, case: str) -> None:
    check(engine, model, case)


@pytest.mark.parametrize("case", ["user", "penalties, then user, then sampling"])
def test_ranks_agree(model: PreTrainedModel, case: str) -> None:
    params, _, processors = CASES[case]
    own = [sticky] if sticky in processors() else []
    expected = plain_texts(model, case)

    def program(comm: ThreadComm) -> list[Completion]:
        engine = Engine.from_model(model, decode=TREES, comm=comm)
        return engine.generate(PROMPTS, SamplingParams(**{**vars(params), "max_new_tokens": 25}), own)

    for completions in run_ranks(ThreadWorld(3), program):
        assert [each.token_ids for each in completions] == expected


def test_a_rank_that_strays_reports_guesses_only(model: PreTrainedModel) -> None:
    """As if another last bit had led it off the path at the root, which rank 0 owns: shorter steps, the same tokens."""

    def strays(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 96] = 1e9
        return scores

    def program(comm: ThreadComm, stray: bool) -> list[Completion]:
        engine = Engine.from_model(model, decode=replace(TREES, home_ranks=0), comm=comm)  # all ranks serve all
        mine = [sticky, strays] if stray and comm.rank else [sticky]
        return engine.generate(PROMPTS, SamplingParams(max_new_tokens=25), mine)

    together = run_ranks(ThreadWorld(2), lambda comm: program(comm, False))
    strayed = run_ranks(ThreadWorld(2), lambda comm: program(comm, True))
    for before, after in zip(together, strayed, strict=True):
        assert [each.token_ids for each in after] == [each.token_ids for each in before]
    assert sum(each.stats.num_steps for each in strayed[0]) > sum(each.stats.num_steps for each in together[0])


def test_a_processor_is_called_once_per_token_and_in_order(engine: Engine) -> None:
    """As by plain decoding, also for tokens that come several in a step: it may keep a state."""
    seen: list[list[int]] = []

    def watching(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.dtype == torch.int64 and scores.dtype == torch.float32 and scores.shape == (1, 97)
        seen.append(input_ids[0].tolist())
        scores[:, 13] = -float("inf")  # in place, which must not reach anything else
        return scores

    engine.configure(TREES)
    done = engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=60), [watching])[0]
    assert done.stats.num_steps < 40
    whole = PROMPTS[0] + done.token_ids
    assert seen == [whole[:end] for end in range(len(PROMPTS[0]), len(whole))]


def parents_ids(patch: pytest.MonkeyPatch) -> None:
    follow = ProcessorPath.follow

    def mutant(self: ProcessorPath, *args: object) -> None:
        call = self.processors.functions
        self.processors.functions = tuple(lambda ids, scores, f=f: f(ids[:, :-1], scores) for f in call)
        follow(self, *args)  # type: ignore[arg-type]
        self.processors.functions = call

    patch.setattr(ProcessorPath, "follow", mutant)


def roots_ids_for_all_nodes(patch: pytest.MonkeyPatch) -> None:
    follow = ProcessorPath.follow

    def mutant(self: ProcessorPath, *args: object) -> None:
        call, count = self.processors.functions, len(self.tokens)
        self.processors.functions = tuple(lambda ids, scores, f=f: f(ids[:, :count], scores) for f in call)
        follow(self, *args)  # type: ignore[arg-type]
        self.processors.functions = call

    patch.setattr(ProcessorPath, "follow", mutant)


def guesses_taken_for_choices(patch: pytest.MonkeyPatch) -> None:
    """Nodes that no processor was asked about count as chosen by the raw logits, and so does the path."""

    def mutant(exchange: Exchange, draft: StepDraft, values: np.ndarray) -> None:
        values[..., 0] = np.reshape(likely(values[..., 0].flatten().tolist()), values.shape[:3])

    change_received(patch, mutant)
    patch.setattr(ProcessorPath, "follow", lambda self, logits, chosen, pick: None)


def processors_after_the_temperature(patch: pytest.MonkeyPatch) -> None:
    of = lpr.model.sampling.processors.Processors.of

    def mutant(params: SamplingParams, *args: object):  # type: ignore[no-untyped-def]
        made = of(params, *args)  # type: ignore[arg-type]
        if made is not None and params.temperature:
            warm = params.temperature
            made.functions = (lambda ids, s: s / warm, *made.functions, lambda ids, s: s * warm)
        return made

    patch.setattr(lpr.model.sampling.processors.Processors, "of", mutant)


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        (parents_ids, "user"),
        (roots_ids_for_all_nodes, "user"),
        (guesses_taken_for_choices, "penalties"),
        (processors_after_the_temperature, "penalties, then user, then sampling"),
    ],
)
def test_plain_decoding_notices(
    fault: Callable[[pytest.MonkeyPatch], None],
    case: str,
    engine: Engine,
    model: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check(engine, model, case)


def row_by_row() -> list[Processor]:
    eos = torch.tensor([3, 9])
    return [
        Forced([4, 5, 6, 7, 8, 9, 1], 4), ForcedBOSTokenLogitsProcessor(7), ForcedEOSTokenLogitsProcessor(7, eos),
        InfNanRemoveLogitsProcessor(), LogitBias([(3, 1.5), (8, -2.0)], torch.device("cpu")),
        MinLengthLogitsProcessor(9, eos), MinNewTokensLengthLogitsProcessor(4, 4, eos),
        NoBadWordsLogitsProcessor([[4], [2, 3]]), NoRepeatNGramLogitsProcessor(2), OutputPenalty(2, 0.7, 0.3),
        RepetitionPenaltyLogitsProcessor(1.3), SequenceBiasLogitsProcessor({(2, 3): 4.0, (5,): -1.0}),
        SuppressTokensAtBeginLogitsProcessor([1, 2], 6), SuppressTokensLogitsProcessor([5, 6]),
    ]  # fmt: skip


@pytest.mark.parametrize("processor", row_by_row(), ids=lambda each: type(each).__name__)
def test_paths_of_one_length_can_be_asked_about_together(processor: Processor) -> None:
    generator = torch.Generator().manual_seed(4)
    changed = False
    for length in (1, 2, 6, 7, 30):
        ids = torch.randint(0, 12, (40, length), generator=generator)
        scores = torch.randn(40, 11, generator=generator) * 5  # token 11 is one that the model cannot say
        scores[0, 3], scores[1, 5] = torch.nan, -torch.inf
        apart = torch.cat([processor(*each) for each in zip(ids.split(1), scores.split(1), strict=True)])
        together = processor(ids, scores.clone())
        assert torch.equal(together.view(torch.int32), apart.view(torch.int32))
        changed |= not torch.equal(together.view(torch.int32), scores.view(torch.int32))
    assert changed and is_row_by_row(processor)


def test_every_row_by_row_processor_is_compared() -> None:
    assert {type(each) for each in row_by_row()} == ROW_BY_ROW
    ignoring = RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=torch.tensor([2, 3]))
    assert not is_row_by_row(ignoring) and not is_row_by_row(sticky)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_all_nodes_of_a_tree_are_chosen_for_as_along_their_paths(temperature: float) -> None:
    """A node whose logits are not numbers says so, even where a processor would repair it: it is asked once more."""
    generator = torch.Generator().manual_seed(6)
    parents = [-1, 0, 0, 1, 2, 3, 2, 5]
    tokens = torch.randint(0, 12, (8,), generator=generator).tolist()
    logits = torch.randn(20, 12, generator=generator) * 3
    logits[9, 4] = torch.nan
    functions = [RepetitionPenaltyLogitsProcessor(1.3), OutputPenalty(2, 0.7, 0.3), Forced([1], 7)]
    for start, spoilt in ((0, None), (7, 2), (9, 0)):
        params = SamplingParams(temperature=temperature, top_k=5)
        selection = Selection.build([(params, range(20))])

        def choices(scores: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
            return pick(scores, selection.rows(rows))  # noqa: B023 - called at once

        path = ProcessorPath(Processors(functions), [1, 2, 3, 4, 5, tokens[0]], start, tokens, parents)
        together = pick(logits, selection)
        untouched = together.clone()
        assert path.choose_all(logits, together, choices)
        for node in range(len(tokens)):
            above, up = [], node
            while up > 0:
                above.insert(0, tokens[up])
                up = parents[up]
            scores = path.processors(torch.tensor([[*path.tokens, *above]]), logits[start + node][None].clone())
            alone = int(choices(scores, np.array([start + node])))
            assert together[start + node] == (NOT_A_NUMBER if node == spoilt else alone)
        outside = [row for row in range(20) if not start <= row < start + 8]
        assert torch.equal(together[outside], untouched[outside])


def test_min_new_tokens_and_stop_token_ids(model: PreTrainedModel) -> None:
    """Ends where transformers ends, with the same ids as end-of-text tokens."""
    engine = Engine.from_model(model, decode=TREES)
    for prompt in PROMPTS[:2]:
        free = stock_greedy(model, prompt, 40)
        for stop in sorted(set(free[3:20]))[:2]:
            ids = torch.tensor([prompt])
            for least in (0, 9):
                expected = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False,
                    eos_token_id=[stop, 96], pad_token_id=0, min_new_tokens=least,
                )[0, len(prompt) :].tolist()  # fmt: skip
                params = SamplingParams(max_new_tokens=40, stop_token_ids=(stop, 96), min_new_tokens=least)
                done = engine.generate([prompt], params)[0]
                assert done.token_ids == expected
                assert done.finish_reason == ("stop" if expected[-1] in (stop, 96) else "length")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be float >= 1e-38"),
        *(
            ({"temperature": value}, rf"temperature={value} must be 0 or from 1e-38 to 1e\+38")
            for value in (9e-39, 5e-324)
        ),
        *(({"temperature": value}, "temperature=") for value in (1.1e38, 1e300, math.inf, math.nan, -1e-300)),
        *(({name: 1.1e38}, name) for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")),
        *(({name: math.nan}, name) for name in ("top_p", "min_p", "repetition_penalty", "presence_penalty")),
        ({"repetition_penalty": 1e-39}, "repetition_penalty"),
        ({"logit_bias": {1: -1.1e38}}, "logit_bias"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size=-1 must be int >= 0"),
        ({"min_new_tokens": 65}, "min_new_tokens=65 must be from 0 to max_new_tokens=64"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
    ],
)
def test_impossible_params(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SamplingParams(**arguments)


# Failures.


def test_accept_stops_at_failures_and_before_guesses() -> None:
    tree = TokenTree(1)
    a = tree.add(0, 10, 1)
    b = tree.add(a, 11, 1)
    c = tree.add(b, 12, 1)
    assert accept(tree, [10, 11, 12, 13]) == [0, a, b, c]
    assert accept(tree, [10, 11, as_guess(12), 13]) == [0, a]
    assert accept(tree, [10, 11, NOT_A_NUMBER, 13]) == [0, a, b]
    assert accept(tree, [10, 11, PROCESSOR_FAILED, 13]) == [0, a, b]
    assert accept(tree, [NOT_A_NUMBER, 11, 12, 13]) == [0]
    assert likely([5, NOT_A_NUMBER, PROCESSOR_FAILED, as_guess(0), as_guess(7)]) == [5, 0, 0, 0, 7]


def failing_at(length: int, how: str) -> Processor:
    def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] < length:
            return scores
        if how == "raises":
            raise ValueError("no such state\nand more of it")
        if how == "returns nonsense":
            return scores[:, :5]
        return torch.full_like(scores, float(how.split()[1]))

    return processor


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "logits processor processor failed: ValueError: no such state"),
        ("returns nonsense", r"logits processor processor failed: it returned \[1, 5\] for scores \[1, 97\]"),
        ("returns NaN", "left no token to choose"),
        ("returns -inf", "left no token to choose"),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.slow(first=3)
def test_a_failing_processor_ends_its_request_only(
    model: PreTrainedModel, how: str, message: str, num_ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    expected = [stock_greedy(model, prompt, 30) for prompt in PROMPTS]

    def program(comm: ThreadComm) -> list[Completion]:
        engine = Engine.from_model(model, decode=TREES, comm=comm)
        params = SamplingParams(max_new_tokens=30)
        bad = failing_at(len(PROMPTS[0]) + 17, how)
        requests = [engine.submit(p, params, [bad] if i == 0 else []) for i, p in enumerate(PROMPTS)]
        while not engine.is_idle:
            engine.step()
        return [request.completion() for request in requests]

    ranks = run_ranks(ThreadWorld(num_ranks), program)
    for done in ranks:
        assert [each.finish_reason for each in done] == ["error", "length", "length"]
        assert done[0].token_ids == expected[0][:17]
        assert [each.token_ids for each in done[1:]] == expected[1:]
        assert done[0].error and "\n" not in done[0].error and done[1].error is None
        assert re.search(f"{message}|^a logits processor failed on rank [01], whose log says how$", done[0].error)
    assert any(re.search(message, done[0].error or "") for done in ranks), [done[0].error for done in ranks]
    assert bool(re.search(message, caplog.text)) == (num_ranks > 1), "a service shows what the driver's rank knows"


def broken_engine(model: PreTrainedModel, token: int, comm: ThreadComm, attention: str = "auto") -> Engine:
    """An engine for a copy of `model` that says nothing but NaN after `token`."""
    decode = replace(TREES, prefill_chunk=16)
    engine = Engine.from_model(copy.deepcopy(model), decode=decode, comm=comm, attention=attention)
    with torch.no_grad():
        engine.model.model.get_input_embeddings().weight[token] = float("nan")  # type: ignore[index,operator]
    return engine


@pytest.fixture(scope="module")
def often_drafted(model: PreTrainedModel) -> tuple[int, list[list[int]]]:
    """A token that drafts propose often and no output holds, and the outputs."""
    expected = [stock_greedy(model, prompt, 50) for prompt in PROMPTS]
    drafted: Counter[int] = Counter()
    draft_step = lpr.engine.step.draft_step
    with pytest.MonkeyPatch.context() as patch:

        def counting(*args: Any) -> Any:
            draft = draft_step(*args)
            for tree in draft.trees:
                drafted.update(tree.tokens)
            return draft

        patch.setattr(lpr.engine.step, "draft_step", counting)
        Engine.from_model(model, decode=TREES).generate(PROMPTS, SamplingParams(max_new_tokens=50))
    used = {token for ids in PROMPTS + expected for token in ids}
    return next(token for token, _ in drafted.most_common() if token not in used), expected


def check_rejected_nan(
    model: PreTrainedModel,
    often_drafted: tuple[int, list[list[int]]],
    num_ranks: int,
    packed: bool = True,
    attention: str = "auto",
) -> None:
    token, expected = often_drafted
    spoilt: list[bool] = []
    commit = lpr.engine.step.commit

    def watching(model: Any, rows: Any, mine: Any, concluded: Any, *rest: Any) -> Any:
        spoilt.extend(concluded[index].failure == NOT_A_NUMBER for index in mine)
        return commit(model, rows, mine, concluded, *rest)

    def program(comm: ThreadComm) -> list[Completion]:
        engine = broken_engine(model, token, comm, attention)
        engine.model.adapter.packed = engine.scheduler.limits.packed = packed
        return engine.generate(PROMPTS, SamplingParams(max_new_tokens=50))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lpr.engine.step, "commit", watching)
        for done in run_ranks(ThreadWorld(num_ranks), program):
            assert [each.error for each in done] == [None] * 3
            assert [each.token_ids for each in done] == expected
    assert num_ranks > 1 or any(spoilt), "no draft held the token"


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_rejected_nodes_nan_does_not_matter(
    model: PreTrainedModel, often_drafted: tuple[int, list[list[int]]], num_ranks: int
) -> None:
    check_rejected_nan(model, often_drafted, num_ranks)


def test_a_cache_that_keeps_nan_is_noticed(
    model: PreTrainedModel, often_drafted: tuple[int, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masked rows side by side in a padded batch are read further than their own entries."""
    check_rejected_nan(model, often_drafted, 1, packed=False, attention="sdpa")
    for name in ("clear", "clear_entries"):
        monkeypatch.setattr(KVCache, name, lambda self, given: None)
    with pytest.raises(AssertionError):
        check_rejected_nan(model, often_drafted, 1, packed=False, attention="sdpa")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.slow(first=2)
def test_nan_ends_its_request_only(model: PreTrainedModel, num_ranks: int, temperature: float) -> None:
    """In the prompt, and in the middle of an output; the slots are used again afterwards."""
    params = SamplingParams(max_new_tokens=40, temperature=temperature, top_k=5 if temperature else 0)
    clean = [each.token_ids for each in Engine.from_model(model, decode=PLAIN).generate(PROMPTS, params)]
    token = next(t for t in clean[0][10:] if t not in {*PROMPTS[0], *PROMPTS[1], *PROMPTS[2], *clean[1], *clean[2]})
    # The first is so long that its cache is filled before anything is chosen.
    prompts = [[3, token, *PROMPTS[1], *PROMPTS[1]], *PROMPTS, PROMPTS[1]]

    def program(comm: ThreadComm) -> list[Completion]:
        return broken_engine(model, token, comm).generate(prompts, params)

    for done in run_ranks(ThreadWorld(num_ranks), program):
        assert [each.finish_reason for each in done] == ["error", "error", "length", "length", "length"]
        kept = clean[0][: clean[0].index(token) + 1]
        assert [each.token_ids for each in done] == [[], kept, clean[1], clean[2], clean[1]]
        assert done[0].error == "the model's logits for output token 1 are not numbers (NaN), or all -inf"
        assert (
            done[1].error == f"the model's logits for output token {len(kept) + 1} are not numbers (NaN), or all -inf"
        )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_request_whose_every_token_is_forbidden_ends(engine: Engine, temperature: float) -> None:
    """Each token once, and no vocabulary is longer than that: the other request goes on."""
    params = SamplingParams(max_new_tokens=100, no_repeat_ngram_size=1, temperature=temperature)
    used, other = engine.generate([PROMPTS[0], PROMPTS[2]], [params, SamplingParams(max_new_tokens=100)])
    assert (used.finish_reason, used.error) == ("error", NOTHING_LEFT)
    assert sorted({*used.token_ids, *PROMPTS[0]}) == list(range(97)) and len(used.token_ids) == 97 - 3
    assert other.finish_reason == "length" and other.token_ids == stock_greedy(engine.model.model, PROMPTS[2], 100)


@pytest.mark.parametrize("temperature", [1e-38, 1e-30, 1e-20])
def test_the_coldest_choice_is_the_greedy_one(engine: Engine, temperature: float) -> None:
    """Also where a logit over the temperature is beyond float32."""
    params = SamplingParams(max_new_tokens=20, temperature=temperature, logit_bias={3: 50.0})
    greedy = engine.generate(PROMPTS, SamplingParams(max_new_tokens=20, logit_bias={3: 50.0}))
    assert [d.token_ids for d in engine.generate(PROMPTS, params)] == [d.token_ids for d in greedy]


def test_an_aborted_request_leaves_no_nan_behind(model: PreTrainedModel) -> None:
    """Aborted while its cache is filled, before anyone saw a logit."""
    engine = broken_engine(model, 96, ThreadWorld(1).comm(0))
    expected = stock_greedy(model, [5, 6, 7], 1)
    waiting = engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=40))
    request = engine.submit([3, 96, *PROMPTS[1], *PROMPTS[1]], SamplingParams(max_new_tokens=5))
    engine.step()
    assert request.stats.num_fill_steps == 1 and request.state is not None
    engine.abort(request)
    assert engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=1))[0].token_ids == expected
    assert waiting.error is None


def test_text_of_a_failed_request_is_complete() -> None:
    """Also the part that was held back, because it might have become a stop string."""
    engine = Engine.from_pretrained(lpr.bundled_model(), TREES, device="cpu")
    params = SamplingParams(max_new_tokens=30)
    free = engine.generate(["def add(a, b):"], params)[0]
    request = engine.submit(
        "def add(a, b):",
        SamplingParams(max_new_tokens=30, stop=(free.text[-8:] + "\0",)),
        [failing_at(len(free.prompt_token_ids) + 20, "raises")],
    )
    pieces = []
    while request.finish_reason is None:
        engine.step()
        pieces.extend(chunk.text for chunk in request.take())
    done = request.completion()
    assert len(done.token_ids) == 20 and done.text == "".join(pieces) != ""
    assert free.text.startswith(done.text)


@pytest.mark.slow
def test_the_command_names_failed_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    tokenizer = AutoTokenizer.from_pretrained(lpr.bundled_model())
    model = AutoModelForCausalLM.from_pretrained(lpr.bundled_model(), dtype=torch.float32, tie_word_embeddings=False)
    token = tokenizer("\u00a7")["input_ids"][-1]
    with torch.no_grad():
        model.get_output_embeddings().weight = torch.nn.Parameter(model.get_input_embeddings().weight.clone())
        model.get_input_embeddings().weight[token] = float("nan")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("a = ", "\u00a7 = ", "b = ")))
    arguments = ["--model", str(folder), "--prompts", str(source), "--output", str(target), "--max-new-tokens", "6"]
    assert main([*arguments, "--no-repeat-ngram-size", "2", "--repetition-penalty", "1.2"]) == 2
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [len(row["token_ids"]) for row in rows] == [6, 0, 6]
    assert [row["finish_reason"] for row in rows] == ["length", "error", "length"]
    assert "are not numbers" in rows[1]["error"] and "error" not in rows[0]
    assert "lpr.generate: line 2: the model's logits" in capsys.readouterr().err
    params = SamplingParams(max_new_tokens=6, no_repeat_ngram_size=2, repetition_penalty=1.2)
    expected = Engine.from_model(model, tokenizer, PLAIN).generate(["a = "], params)[0]
    assert rows[0]["token_ids"] == expected.token_ids
