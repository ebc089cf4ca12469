"""lpr's drafts inside vLLM, against a batch that behaves like vLLM's, and against vLLM's own sources where they are."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import lpr.native
import lpr.vllm.proposer
from lpr import InputError, bundled_model
from lpr.config import TreeSizes
from lpr.core.constants import KNOTS
from lpr.core.step_times import interpolate
from lpr.core.suffix_index import SuffixIndex
from lpr.engine.trie_file import fingerprint_of, write_trie
from lpr.vllm import Proposer
from lpr.vllm.requests import Request, Requests
from lpr.vllm.settings import CPU_TOKEN_COST, GPU_TOKEN_COST, settings_of
from lpr.vllm.step_clock import Step, StepClock, line_through
from tests.fakes.native_pair import PURE, native_core
from tests.fakes.redis_server import RedisServer
from tests.fakes.stores import HAS_SERVER, until

LONGEST, TOKENS, VOCABULARY = 400, 6, 50


def config(**lpr_settings: Any) -> Any:
    """What a proposer reads of vLLM's configuration; no time is measured, so that drafts can be repeated."""
    folder = str(bundled_model())
    model = SimpleNamespace(
        max_model_len=LONGEST, get_vocab_size=lambda: VOCABULARY, tokenizer=folder, tokenizer_revision=None,
        trust_remote_code=False, served_model_name="bundled", model=folder,
    )  # fmt: skip
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=TOKENS),
        model_config=model,
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        parallel_config=SimpleNamespace(distributed_executor_backend=None),
        device_config=SimpleNamespace(device_type="cuda"),
        additional_config={"lpr": {"token_cost": 0.001, **lpr_settings}},
    )


def model(text: Sequence[int]) -> int:
    """The next token of a text, a function of it: mostly what followed the same token before."""
    random_ = random.Random(hash(tuple(text[-3:])))
    places = [at for at in range(len(text) - 1) if text[at] == text[-1]]
    return text[places[-1] + 1] if places and random_.random() < 0.8 else random_.randrange(VOCABULARY)


class Batch:
    """vLLM's batch: rows without gaps, in an order that changes, and the arrays that a proposer sees."""

    def __init__(self, proposer: Any, num_rows: int = 8) -> None:
        self.proposer = proposer
        self.tokens = np.zeros((num_rows, LONGEST), np.int32)
        self.num_tokens = np.zeros(num_rows, np.int32)
        self.rows: list[str] = []
        self.texts: dict[str, list[int]] = {}
        self.drafts: dict[str, list[int]] = {}
        self.filling: dict[str, int] = {}
        """Steps until a prompt is computed."""
        self.emitted, self.steps = 0, 0

    def add(self, name: str, prompt: Sequence[int], pieces: int = 1) -> None:
        """Admit a request whose prompt takes some steps; one with the text of before was preempted."""
        self.texts.setdefault(name, list(prompt))
        self.rows.append(name)
        self.filling[name] = pieces

    def remove(self, name: str) -> None:
        """The request ends, or is preempted; the last row takes its place."""
        row = self.rows.index(name)
        self.rows[row] = self.rows[-1]
        self.rows.pop()
        self.drafts.pop(name, None)

    def step(self) -> dict[str, list[int]]:
        """Verify the drafts, emit, and draft anew; returns the new drafts."""
        sampled: list[list[int]] = []
        for row, name in enumerate(self.rows):
            text, new = self.texts[name], list[int]()
            self.filling[name] -= 1
            if self.filling[name] <= 0:
                for each in [*self.drafts.get(name, []), None]:
                    new.append(model([*text, *new]))
                    if new[-1] != each:
                        break
                self.emitted, self.steps = self.emitted + len(new), self.steps + 1
            text += new
            self.tokens[row, : len(text)], self.num_tokens[row] = text, len(text)
            sampled.append(new)
        found = self.proposer.propose(sampled, self.num_tokens, self.tokens, slot_mappings=None)
        assert len(found) == len(self.rows)
        for new, draft, count in zip(sampled, found, self.num_tokens, strict=False):
            assert all(0 <= token < VOCABULARY for token in draft)
            assert len(draft) <= (min(TOKENS, LONGEST - count - 1) if new else 0)
        self.drafts = dict(zip(self.rows, found, strict=True))
        return self.drafts


def day(proposer: Any, seed: int = 0, num_steps: int = 120) -> tuple[list[Any], Batch]:
    """A batch with arrivals in pieces, ends, aborts, preemptions that come back, and rows that change places."""
    random_, batch = random.Random(seed), Batch(proposer)
    record, waiting, number = list[Any](), list[str](), 0
    for _ in range(num_steps):
        if len(batch.rows) < 6 and random_.random() < 0.4:
            if waiting and random_.random() < 0.5:
                name = waiting.pop()
                batch.add(name, (), random_.randint(1, 3))
            else:
                number += 1
                prompt = [random_.randrange(VOCABULARY) for _ in range(random_.randint(1, 60))]
                batch.add(f"r{number}", [1, 2, 3, *prompt], random_.randint(1, 3))
        if batch.rows and random_.random() < 0.2:
            name = random_.choice(batch.rows)
            batch.remove(name)
            if random_.random() < 0.5:
                waiting.append(name)
        for name in [name for name in batch.rows if len(batch.texts[name]) > LONGEST - 2 * TOKENS - 2]:
            batch.remove(name)
        if len(batch.rows) > 1 and random_.random() < 0.3:
            random_.shuffle(batch.rows)
        if batch.rows:
            record.append({name: list(draft) for name, draft in sorted(batch.step().items())})
    return record, batch


def test_a_batch_of_every_kind_of_change_has_drafts_that_are_accepted() -> None:
    _, batch = day(Proposer(config()))
    assert batch.steps > 200
    assert batch.emitted / batch.steps > 1.7
    _, alone = day(Proposer(config(share="none")))
    assert alone.emitted / alone.steps > 1.6


@pytest.mark.parametrize("seed", range(3))
def test_both_cores_draft_the_same_chains(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not lpr.native.is_native:
        pytest.skip("the extension was not built")
    records = []
    for core in (PURE, native_core()):
        monkeypatch.setattr(lpr.vllm.proposer, "Chains", core.Chains)
        monkeypatch.setattr(lpr.vllm.proposer, "ChainState", core.ChainState)
        monkeypatch.setattr("lpr.engine.drafts.SuffixIndex", core.SuffixIndex)
        records.append(day(Proposer(config(token_cost=0.02)), seed)[0])
    assert records[0] == records[1]


def test_drafts_do_not_depend_on_the_rows() -> None:
    found = []
    for order in (1, -1):
        batch = Batch(Proposer(config(share="none")))
        for number in (0, 1, 2)[::order]:
            batch.add(f"r{number}", [number, 5, 6, 7, 8, number, 5, 6])
        drafts = []
        for step in range(30):
            drafts.append(dict(sorted(batch.step().items())))
            if order < 0 and step % 3 == 0:
                batch.rows.reverse()
        found.append((drafts, batch.texts))
    assert found[0] == found[1]


class Forgetful(Requests):
    """A mutant: no request is recognised when its row changes."""

    def recognise(self, rows: Any, texts: Any, counts: Any) -> Any:
        self.parked.clear()
        self.running = {row: each for row, each in self.running.items() if row in rows}
        return super().recognise(rows, texts, counts)


def by_row(request: Request, text: np.ndarray, count: int) -> bool:
    """A mutant: the request of a row is taken for the one that was there, if its text is long enough."""
    return len(request.state) <= len(text) - count


def new_request(text: np.ndarray, num_prompt: int) -> Request:
    state = lpr.native.ChainState(TreeSizes(trie_nodes=16))
    return Request(state, "", num_prompt)


class Rows:
    """Calls `recognise` for rows of texts, and reads what it found."""

    def __init__(self, kind: type[Requests] = Requests) -> None:
        self.requests = kind(2, new_request)
        self.chains = lpr.native.Chains(16, [1.0] * len(KNOTS))

    def __call__(self, *texts: Sequence[int], count: int = 1) -> tuple[list[Request], list[Request]]:
        arrays = [np.array(text, np.int32) for text in texts]
        found, gone = self.requests.recognise(range(len(texts)), arrays, [count] * len(texts))
        self.chains.draft([each.state for each in found], arrays, [3] * len(texts))
        return found, gone


def test_requests_are_recognised_by_their_text() -> None:
    step = Rows()
    (a, b), gone = step([1, 2, 3], [1, 2, 4])
    assert a is not b and not gone and (a.num_prompt, b.num_prompt) == (2, 2)
    assert step([1, 2, 4, 5], [1, 2, 3, 5])[0] == [b, a], "rows changed places"
    (found,), gone = step([1, 2, 3, 5, 6])
    assert found is a and gone == [b], "b was preempted"
    (c, a2), gone = step([9, 9, 9, 9, 9, 9, 9], [1, 2, 3, 5, 6, 7])
    assert a2 is a and not gone and c not in (a, b), "a new one took the row of a"
    assert step([9, 9, 9, 9, 9, 9, 9, 9], [1, 2, 4, 5, 8])[0] == [c, b], "b came back"
    (d,), gone = step([9, 9, 9, 9, 9, 9, 9, 9, 9, 9])
    assert d is not c, "a gap of two tokens where one was sampled is another request's prompt"
    assert set(gone) == {c, b}
    assert step.requests.parked == gone, "a was forgotten: two are kept at most"


@pytest.mark.parametrize("mutant", ["by_row", "forgetful"])
def test_a_mutant_that_takes_requests_for_others_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutant == "by_row":
        monkeypatch.setattr("lpr.vllm.requests._continues", by_row)
    with pytest.raises(AssertionError):
        if mutant == "forgetful":
            step = Rows(Forgetful)
            (a,), _ = step([1, 2, 3])
            step([7, 7])
            assert step([1, 2, 3, 4])[0] == [a]
        test_requests_are_recognised_by_their_text()


def test_what_is_learnt_is_the_output_once_and_some_of_the_prompt() -> None:
    step = Rows()
    prompt = list(range(100, 140))
    (a,), _ = step([*prompt, 1])
    step([*prompt, 1, 2])
    _, gone = step([5])
    assert gone == [a]
    assert a.take_output() == (prompt[-16:], [1, 2])
    step([*prompt, 1, 2, 3])
    assert a.take_output() == ([*prompt, 1, 2][-16:], [3]), "a preempted one's rest"
    assert a.take_output()[1] == []
    placeholders, _ = step([-1, 4, 4])
    assert placeholders[0].take_output() == ([], []), "a text with placeholders has no meaning"


def steps_of(proposer: Any, prompt: Sequence[int], tokens: int = 60) -> int:
    """Steps that a request takes."""
    batch = Batch(proposer)
    batch.add("r", prompt)
    while len(batch.texts["r"]) < len(prompt) + tokens:
        batch.step()
    batch.remove("r")
    batch.add("next", [0])
    batch.step()
    return batch.steps


def test_who_learns_of_whom() -> None:
    prompt, other = [7, 30, 31, 32], [8, 30, 31, 32]
    for share, same, apart in (("all", True, True), ("none", False, False), (1, True, False)):
        proposer = Proposer(config(share=share))
        first = steps_of(proposer, prompt)
        assert (steps_of(proposer, prompt) < 0.6 * first) is same
        fresh, after = steps_of(Proposer(config(share=share)), other), Proposer(config(share=share))
        steps_of(after, prompt)
        if not apart:
            assert steps_of(after, other) == fresh, "another's outputs changed its steps"


def test_a_draft_is_as_long_as_it_pays() -> None:
    lengths = []
    for cost in (0.0, 0.05, 0.3, 0.99):
        batch = Batch(Proposer(config(token_cost=cost)))
        for number in range(4):
            batch.add(f"r{number}", [number + 1, *range(10, 22), number + 1, 10, 11])
        lengths.append(sum(len(draft) for _ in range(40) for draft in batch.step().values()))
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > 1.2 * lengths[2], lengths
    assert lengths[0] > 40 * 4 * 4


class Clock:
    """The time that a proposer sees: each step takes what its tokens cost, and more where a prompt is computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: Callable[[int], float]) -> None:
        self.now, self.times = 100.0, times
        monkeypatch.setattr(lpr.vllm.proposer.time, "perf_counter", lambda: self.now)

    def pass_step(self, batch: Batch, seconds: float = 0.0) -> None:
        """The time of the step that `batch` takes next."""
        tokens = sum(1 + len(batch.drafts.get(name, ())) for name in batch.rows if batch.filling[name] <= 1)
        self.now += self.times(tokens) + seconds


def measured(proposer: Any, clock: Clock, num_requests: int = 4, num_steps: int = 200) -> list[int]:
    """Lengths of drafts while requests come and go; a prompt takes a second, and the server sleeps before it."""
    batch, lengths, number = Batch(proposer), list[int](), 0
    for step in range(num_steps):
        for name in [name for name in batch.rows if len(batch.texts[name]) > 120]:
            batch.remove(name)
        comes = len(batch.rows) < num_requests
        if comes:
            number += 1
            batch.add(f"r{number}", [number % 40, *range(10, 22), number % 40, 10, 11], pieces=1 + number % 2)
        clock.pass_step(batch, 1.0 if comes or max(batch.filling.values()) > 1 else 0.0)
        drafts = batch.step()
        lengths += [len(draft) for name, draft in drafts.items() if step > num_steps // 2 and batch.filling[name] <= 0]
    return lengths


def shape(proposer: Any, num_sequences: int, count: int) -> float:
    """Time of a step of `count` tokens over one without drafts."""
    row = proposer._clock.row(num_sequences)
    return interpolate(row, count) / interpolate(row, num_sequences)


@pytest.mark.parametrize(("device", "cost"), [("cuda", 0.08), ("cuda", 0.0), ("cpu", 0.3), ("cpu", 0.0)])
def test_the_cost_of_a_token_is_measured(device: str, cost: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps differ by 10 %, and every tenth one is disturbed."""
    noise = random.Random(0)
    disturbed = lambda: noise.gauss(1, 0.1) * (3 if noise.random() < 0.1 else 1)  # noqa: E731
    clock = Clock(monkeypatch, lambda tokens: 0.01 * (1 + cost * (tokens - 1)) * disturbed())
    vllm_config = config(token_cost="measured")
    vllm_config.device_config.device_type = device
    proposer = Proposer(vllm_config)
    first = CPU_TOKEN_COST if device == "cpu" else GPU_TOKEN_COST
    assert shape(proposer, 1, 11) == pytest.approx(1 + 10 * first)
    measured(proposer, clock)
    assert shape(proposer, 4, 16) == pytest.approx(shape(Proposer(config(token_cost=cost)), 4, 16), rel=0.25)


@pytest.mark.parametrize("part", [0.1, 1.0])
def test_what_a_step_without_drafts_takes_is_measured(part: float, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = random.Random(2)
    takes = lambda tokens: (part if tokens <= 4 else 1.0) * (1 + 0.01 * tokens) * noise.gauss(1, 0.05)  # noqa: E731
    proposer = Proposer(config(token_cost="measured"))
    lengths = measured(proposer, Clock(monkeypatch, takes))
    assert proposer._clock.plain_part(4) == pytest.approx(part, rel=0.15)
    assert bool(np.mean(lengths) > 1) is (part == 1), "28 tokens in 12 times the time of 4 are not worth it"


@pytest.mark.parametrize("cost", [0.0, 0.2])
def test_a_line_is_drawn_through_the_first_steps(cost: float) -> None:
    noise = random.Random(1)
    steps = [Step(n, 1, 5 * (1 + cost * (n - 1)) * noise.gauss(1, 0.05)) for n in (1, 2, 9, 20) * 8]
    steps[3::8] = [Step(n, 1, 4 * ms) for n, _, ms in steps[3::8]]
    line = line_through(steps, 0.5)
    assert interpolate(line, 20) / line[0] == pytest.approx(1 + 19 * cost, rel=0.1)
    alike = line_through([Step(3, 1, 8.0), Step(3, 1, 9.0), Step(3, 1, 10.0)], 0.5)
    assert alike[:3] == pytest.approx([4.5, 6.75, 11.25]), "the cost that is given"
    falling = line_through([Step(1, 1, 9.0), Step(5, 1, 8.0)], 0.5)
    assert falling == [8.5] * len(KNOTS)


def steps_that_count(monkeypatch: pytest.MonkeyPatch, num_steps: int = 60) -> list[tuple[int, float]]:
    """Tokens and seconds of the steps that are measured, where a token takes a hundredth of a second."""
    clock, found = Clock(monkeypatch, lambda tokens: 0.01 * tokens), list[tuple[int, float]]()
    monkeypatch.setattr(
        StepClock, "_observe", lambda self, step: found.append((step.num_tokens, step.milliseconds / 1e3))
    )
    measured(Proposer(config(token_cost="measured")), clock, num_steps=num_steps)
    return found


def test_steps_with_prompts_or_after_a_pause_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    found = steps_that_count(monkeypatch)
    assert len(found) > 20 and len({count for count, _ in found}) > 4
    assert [seconds for _, seconds in found] == pytest.approx([0.01 * count for count, _ in found])


@pytest.mark.parametrize("mutant", ["prompts count", "requests that came count"])
def test_a_mutant_that_counts_other_steps_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = StepClock.begin

    def begin(self: Any, now: float, running: Sequence[Request], is_whole: bool) -> None:
        if mutant == "requests that came count":
            self._evaluates = {each: self._evaluates.get(each, 1) for each in running}
        real(self, now, running, is_whole or mutant == "prompts count")

    monkeypatch.setattr(StepClock, "begin", begin)
    with pytest.raises(AssertionError):
        test_steps_with_prompts_or_after_a_pause_do_not_count(monkeypatch)


def test_a_server_that_always_computes_some_prompt_has_drafts() -> None:
    """No step is measured after two of them, in the middle of the trials."""
    batch = Batch(Proposer(config(token_cost="measured")))
    for number in range(4):
        batch.add(f"r{number}", [number, *range(10, 22), number, 10, 11])
    for _ in range(4):
        batch.step()
    batch.add("long", [7, 8, 9], pieces=10_000)
    lengths = [sum(map(len, batch.step().values())) for _ in range(60)]
    assert 0 in lengths[:40] and min(lengths[40:]) > 0, lengths


def test_ranks_that_schedule_alone_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda tokens: 0.01 * tokens)
    vllm_config = config(token_cost="measured")
    vllm_config.parallel_config.distributed_executor_backend = "external_launcher"
    proposer = Proposer(vllm_config)
    measured(proposer, clock)
    assert shape(proposer, 1, 11) == pytest.approx(1 + 10 * GPU_TOKEN_COST)


@pytest.mark.parametrize("seed", range(3))
def test_both_cores_cut_chains_alike_by_any_step_times(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not lpr.native.is_native:
        pytest.skip("the extension was not built")
    row = np.cumsum(np.random.default_rng(seed).exponential(size=len(KNOTS)) ** 3 + 1e-3).tolist()
    monkeypatch.setattr(StepClock, "to_draft", lambda self, num_sequences: (row, 0.8))
    test_both_cores_draft_the_same_chains(seed, monkeypatch)


def test_the_chains_of_a_batch_bring_most_tokens_for_their_time() -> None:
    """Steps of up to 8 tokens take one time, larger ones ten times that: so 8 are evaluated, whatever they promise."""
    times = [1.0 if knot <= 8 else 10.0 for knot in KNOTS]
    chains = lpr.native.Chains(64, times)
    states = [lpr.native.ChainState(TreeSizes(trie_nodes=64, branch_length=6)) for _ in range(2)]
    texts = [np.array([n, 5, 6, 7, 8, 9, 10, n, 5, 6, 7, 8, 9, 10, n], np.int32) for n in (1, 2)]
    assert sum(map(len, chains.draft(states, texts, [6, 6]))) == 6
    chains.plain_part = 0.1
    assert sum(map(len, chains.draft(states, texts, [6, 6]))) == 0, "8 tokens for 10 times the time of 2"
    chains.times, chains.plain_part = [1.0] * len(KNOTS), 0.9
    assert [len(draft) for draft in chains.draft(states, texts, [6, 4])] == [6, 4]
    with pytest.raises(ValueError, match="times must be"):
        lpr.native.Chains(64, [1.0])
    assert chains.draft([], [], []) == []


def test_a_batch_without_sampled_tokens_has_no_drafts() -> None:
    proposer = Proposer(config())
    tokens = np.ones((2, LONGEST), np.int32)
    assert proposer.propose([], np.zeros(0, np.int32), tokens) == []
    assert proposer.propose([[], []], np.array([3, 4], np.int32), tokens) == [[], []]
    assert proposer.propose([[1]], np.array([LONGEST - 1], np.int32), tokens) == [[]]
    assert proposer.propose([[1]], np.array([LONGEST], np.int32), tokens) == [[]]


def test_a_row_with_placeholders_is_left_alone() -> None:
    proposer = Proposer(config())
    tokens = np.tile(np.array([5, 6, 7, 8], np.int32), (2, LONGEST // 4))
    tokens[0, 3] = -1
    drafts = proposer.propose([[1], [1]], np.array([40, 40], np.int32), tokens)
    assert drafts[0] == [] and drafts[1] == [5, 6, 7, 8, 5, 6]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"token_cost": 2}, "lpr: Expected `float` < 1.0"),
        ({"token_cost": "little"}, "token_cost"),
        ({"tokencost": 0.1}, "unknown field `tokencost`"),
        ({"share": "some"}, "share"),
        ({"share": 0}, "share"),
        ({"share": "none", "trie": "x"}, "no request would draft from trie"),
        ({"draft_store": "ftp://x"}, "--draft-store must begin with one of"),
        ({"draft_snapshots": "/tmp"}, "needs --draft-store"),
        ({"trie": "/nowhere/trie.safetensors"}, "trie"),
        ([], "lpr"),
    ],
)
def test_settings_that_cannot_work_are_one_line(values: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LPR_DRAFT_STORE", raising=False)
    vllm_config = config()
    vllm_config.additional_config = {"lpr": values}
    with pytest.raises(InputError) as caught:
        Proposer(vllm_config)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_vllm_without_settings_of_ours() -> None:
    for additional in ({}, {"other": 1}, None, object()):
        assert settings_of(additional) == settings_of({"lpr": {}})
    assert settings_of(None).token_cost == "measured"


def test_a_trie_file_is_a_source(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    prompt = [7, 30, 31, 32]
    text = list(prompt)
    while len(text) < 64:
        text.append(model(text))
    trie = SuffixIndex(1000)
    trie.extend(text)
    fingerprint = fingerprint_of(AutoTokenizer.from_pretrained(bundled_model()), VOCABULARY)
    write_trie(tmp_path, trie, fingerprint)
    assert steps_of(Proposer(config(trie=str(tmp_path))), prompt) < 0.6 * steps_of(Proposer(config()), prompt)
    write_trie(tmp_path, trie, "tokenizer of another")
    with pytest.raises(InputError, match="another vocabulary"):
        Proposer(config(trie=str(tmp_path)))


@HAS_SERVER
def test_replicas_learn_of_each_other() -> None:
    prompt = [7, 30, 31, 32]
    store = RedisServer()
    store.start()
    one, two = (Proposer(config(draft_store=store.url, share=4)) for _ in range(2))
    try:
        alone = steps_of(one, prompt)
        until(
            lambda: steps_of(two, [*prompt, 9], 1) and two._sources._fleet.counts.learnt, "the other's output is learnt"
        )
        assert steps_of(two, prompt) < 0.6 * alone
    finally:
        one.close()
        two.close()
        store.close()


SOURCES = Path(os.environ.get("LPR_PEER_SOURCES", "/nonexistent")) / "vllm"
if not SOURCES.is_dir() and (installed := importlib.util.find_spec("vllm")) is not None and installed.origin:
    SOURCES = Path(installed.origin).parent
needs_vllm = pytest.mark.skipif(not SOURCES.is_dir(), reason="LPR_PEER_SOURCES names no folder with vLLM's sources")


def source(path: str) -> str:
    """A source file of vLLM, which importing would take seconds."""
    return (SOURCES / path).read_text()


def function(path: str, name: str) -> ast.FunctionDef:
    found = [each for each in ast.walk(ast.parse(source(path))) if isinstance(each, ast.FunctionDef)]
    return next(each for each in found if each.name == name)


@needs_vllm
def test_vllm_calls_propose_as_it_is_defined_here() -> None:
    whole = function("v1/worker/gpu_model_runner.py", "propose_draft_token_ids")
    branches = [each for each in ast.walk(whole) if isinstance(each, ast.If)]
    mine = next(each for each in branches if "'custom_class'" in ast.unparse(each.test))
    calls = [each for stmt in mine.body for each in ast.walk(stmt) if isinstance(each, ast.Call)]
    call = next(each for each in calls if isinstance(each.func, ast.Attribute) and each.func.attr == "propose")
    given = [ast.unparse(each) for each in call.args]
    assert given == ["sampled_token_ids", "self.input_batch.num_tokens_no_spec", "self.input_batch.token_ids_cpu"]
    assert [each.arg for each in call.keywords] == ["slot_mappings"]
    # vLLM's n-gram proposer takes the same, behind a number of tokens.
    theirs = [each.arg for each in function("v1/spec_decode/ngram_proposer.py", "propose").args.args]
    assert theirs[:2] == ["self", "num_speculative_tokens"]
    assert theirs[2:] == list(inspect.signature(Proposer.propose).parameters)[1:]


@needs_vllm
def test_vllm_makes_proposers_as_it_does_here() -> None:
    text = source("v1/spec_decode/custom_class_proposer.py")
    assert "user_class(vllm_config)" in text and 'hasattr(instance, "propose")' in text
    assert "self.drafter.load_model(self.model)" in source("v1/worker/cpu_model_runner.py")
    # Where a proposer's tokens are on the CPU, a step ends before the next is scheduled (0.32 and 0.33 say it alike).
    assert re.search(r"Async scheduling (not supported with %s-based|is disabled because)", source("config/vllm.py"))
    assert "additional_config: dict" in source("config/vllm.py")


@needs_vllm
def test_vllm_takes_its_first_model_runner_by_itself() -> None:
    """The second one, the default on GPUs, has no proposers of one's own; nobody has to set anything."""
    unsupported = ast.unparse(function("config/vllm.py", "_get_v2_model_runner_unsupported_features"))
    assert "'custom_class'" in unsupported
    choice = ast.unparse(function("config/vllm.py", "use_v2_model_runner"))
    assert re.search(r"if unsupported:.*return False", choice, re.DOTALL)
    assert "VLLM_USE_V2_MODEL_RUNNER" in choice
    assert "GPUModelRunner" in source("v1/worker/gpu_worker.py")


@needs_vllm
def test_vllm_takes_lists_of_several_lengths() -> None:
    assert "request.spec_token_ids = self.structured_output_manager.validate_tokens" in source(
        "v1/core/sched/scheduler.py"
    )


@pytest.mark.skipif(
    not {"LPR_VLLM", "LPR_VLLM_MODEL"} <= os.environ.keys(),
    reason="LPR_VLLM names no environment with vLLM 0.32, or LPR_VLLM_MODEL no model folder",
)
@pytest.mark.timeout(900)
def test_the_real_server(tmp_path: Path) -> None:
    from benchmarks.processes.services import free_port, started
    from benchmarks.servers.client import acceptance, counts_of
    from benchmarks.servers.configurations import Places, command_of

    folder = Path(os.environ["LPR_VLLM_MODEL"])
    prompts = [f"def f{n}(a, b):\n    return a + b\n\n\ndef g{n}(a, b):\n    return" for n in range(8)]
    texts: dict[str, list[str]] = {}
    for name in ("vllm-plain", "lpr-in-vllm5"):
        places = Places(folder, vllm=Path(os.environ["LPR_VLLM"]), threads=2, slots=4, length=512)
        command, environment = command_of(name, "float32", port := free_port(), places)
        log = tmp_path / f"{name}.log"
        with started(name, "vllm", [*command, "--enforce-eager"], environment, port, log, 400) as server:
            before = counts_of(server.url)
            texts[name] = complete(server.url, str(folder), prompts)
            found = acceptance(before, counts_of(server.url))
    assert texts["vllm-plain"] == texts["lpr-in-vllm5"]
    assert found["tokens_per_step"] > 1.1, found


def complete(url: str, name: str, prompts: Sequence[str]) -> list[str]:
    import httpx

    body = {"model": name, "prompt": list(prompts), "max_tokens": 48, "temperature": 0}
    answer = httpx.post(url + "/v1/completions", json=body, timeout=300).raise_for_status().json()
    return [choice["text"] for choice in sorted(answer["choices"], key=lambda each: each["index"])]


def test_drafting_is_fast() -> None:
    """A tenth of a millisecond a sequence is asked for; the test allows a loaded machine a hundred times that."""
    if not lpr.native.is_native:
        pytest.skip("the extension was not built")
    batch = Batch(Proposer(config()))
    for number in range(8):
        batch.add(f"r{number}", [number, *range(10, 40), number, 10, 11])
    spent: list[float] = []
    timed(batch.proposer, spent)
    for _ in range(30):
        batch.step()
    assert sorted(spent)[len(spent) // 2] / 8 < 0.01


def timed(proposer: Any, spent: list[float]) -> None:
    propose: Callable[..., Any] = proposer.propose

    def measured(*args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        found = propose(*args, **kwargs)
        spent.append(time.thread_time() - began)
        return found

    proposer.propose = measured
