"""What is done while the device works changes nothing but the moment: chunks, texts, counts, and the next launch.

Steps that are launched before their plan run on the pretend GPU.
"""

from __future__ import annotations

import contextlib
import copy
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import lpr.engine.overlap
import lpr.engine.replica
import lpr.engine.step
from lpr import DecodeConfig, Engine, SamplingParams, bundled_model
from lpr.core.constants import KNOTS
from lpr.core.step_times import StepTimes
from lpr.dist.comm import Comm
from lpr.engine.driver import Driver
from lpr.engine.exchange import Exchange
from lpr.engine.hooks import StepHooks
from lpr.engine.overlap import Overlap
from lpr.engine.replica import Replica
from lpr.engine.request import Request
from lpr.model.graphs import GraphForward
from lpr.model.kv_cache import KVCache
from lpr.model.runner import TreeModel
from lpr.model.watch import Watch
from lpr.protocol import Stop, Submit
from lpr.serve.messages import Stepped
from lpr.serve.ranks.bridge import EngineBridge
from tests.fakes.elastic_world import ElasticWorld
from tests.fakes.interruptions import interrupted_at
from tests.fakes.models import plain_ids, tiny_model
from tests.fakes.pretend_gpu import PretendGpu, gpu, guard, quick_start, short_steps, to_gpu
from tests.fakes.pretend_graphs import Graph
from tests.fakes.pretend_streams import RaceError, Stream

__all__ = ["gpu", "guard", "quick_start", "short_steps"]

PROMPTS = ["def add(a, b):\n    return a", "import os\n\n\ndef main"]


class ScriptedLine:
    """A front that submits two requests, aborts nothing, and stops once both have ended."""

    def __init__(self, engine: Engine) -> None:
        self.load: Any = None
        self.sent: list[Any] = []
        self.waits: list[float] = []
        params = SamplingParams(max_new_tokens=24, ignore_eos=True)
        prompts = map(engine.encode, PROMPTS)
        self._script = [Submit(id, prompt, params, len(prompt)) for id, prompt in enumerate(prompts)]

    def moved(self, load: Any) -> None:
        self.load = load

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def flush(self) -> None:
        pass

    def take(self, wait: float) -> list[Any]:
        self.waits.append(wait)
        assert len(self.waits) < 500, "the requests do not end"
        if self._script:
            return [self._script.pop(0)]
        ended = [chunk for step in self.steps for chunk in step.chunks if chunk.finish_reason]
        return [Stop()] if len(ended) == len(PROMPTS) else []

    @property
    def steps(self) -> list[Stepped]:
        return [message for message in self.sent if isinstance(message, Stepped)]


@pytest.fixture(scope="module")
def engine() -> Engine:
    decode = DecodeConfig(window_size=0, trie_nodes=8, max_batch_size=2, max_length=256)
    return Engine.from_pretrained(str(bundled_model()), decode=decode)


def serve(engine: Engine, overlaps: bool) -> tuple[ScriptedLine, list[int]]:
    """Serve the script; also how many steps had been sent whenever a step's forward began."""
    engine.configure(engine.decode)
    line = ScriptedLine(engine)
    bridge = EngineBridge(engine, line, "bundled")  # type: ignore[arg-type]
    bridge.overlaps = overlaps
    sent, evaluate = [], engine.model.evaluate
    engine.model.evaluate = lambda *args: (sent.append(len(line.steps)), evaluate(*args))[1]  # type: ignore[method-assign,func-returns-value]
    try:
        bridge.run()
    finally:
        engine.model.evaluate = evaluate  # type: ignore[method-assign]
    return line, sent


def whole(line: ScriptedLine) -> list[Any]:
    found = []
    for id in range(len(PROMPTS)):
        mine = [chunk for step in line.steps for chunk in step.chunks if chunk.id == id]
        ids = [token for chunk in mine for token in chunk.token_ids]
        found.append([ids, "".join(chunk.text for chunk in mine), mine[-1].finish_reason, mine[-1].usage])
    return found


def test_chunks_that_are_sent_while_the_device_works_are_the_same(engine: Engine) -> None:
    at_once, sent_at_once = serve(engine, overlaps=False)
    later, sent_later = serve(engine, overlaps=True)
    assert whole(at_once) == whole(later) and len(whole(later)[0][0]) == 24
    assert sent_at_once == list(range(len(sent_at_once))), "each step's chunks leave before the next step"
    assert sent_later == [max(0, index - 1) for index in range(len(sent_later))], "or while it is evaluated"


def test_what_a_request_tells_does_not_wait_for_the_device(engine: Engine) -> None:
    engine.configure(engine.decode)
    request = engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=12, ignore_eos=True))
    num_tokens = 0
    while request.finish_reason is None:
        engine.step()
        assert request.stats.num_tokens == request.num_output > num_tokens
        assert request.stats.drafted.total() == request.stats.num_nodes
        emitted = [token for chunk in request.take() for token in chunk.token_ids]
        assert emitted == request.token_ids[num_tokens:]
        num_tokens = request.num_output
    assert request.completion().stats.num_tokens == 12


# Steps that are launched before their plan.

MANY = [[3, 5, 7, 9, 11, 13, 5, 7], [2, 4], [7, 8, 9] * 5, [(i * i) % 97 for i in range(60)], [1, 2, 3], [5] * 17]
PARAMS = [
    SamplingParams(max_new_tokens=14 + 7 * i, temperature=0.8 * (i % 2), top_k=20 * (i % 3), seed=i) for i in range(6)
]
PLAIN = DecodeConfig.autoregressive(max_batch_size=4, max_length=128, kv_tokens=512, prefill_chunk=64)
TREES = replace(PLAIN, window_size=3, trie_nodes=8, num_candidates=4)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(spread=0.12, num_hidden_layers=1)


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> list[list[int]]:
    return plain_ids(copy.deepcopy(model), MANY, PARAMS)


@pytest.fixture
def on_gpu(gpu: PretendGpu, quick_start: None, short_steps: None, model: PreTrainedModel) -> Callable[..., Engine]:
    """Makes an engine on the pretend GPU, with graphs of all batches of plain decoding."""

    def make(decode: DecodeConfig = PLAIN, of: PreTrainedModel = model, **options: Any) -> Engine:
        options = {"swap_space": 0, **options}
        return Engine.from_model(to_gpu(copy.deepcopy(of)), decode=decode, **options)

    return make


def ids(engine: Engine, prompts: Sequence[list[int]] = MANY, params: Any = PARAMS) -> list[list[int]]:
    return [each.token_ids for each in engine.generate(prompts, params)]


def warm(engine: Engine) -> Overlap:
    """Let the engine capture what it needs; returns its overlap, with fresh counts."""
    ids(engine)
    overlap = engine.replica.overlap
    overlap.num_launched = overlap.num_dropped = 0
    return overlap


def test_most_steps_are_launched_before_their_plan(
    gpu: PretendGpu, on_gpu: Callable[..., Engine], expected: list[list[int]]
) -> None:
    """Ends in the middle of a batch, a queue, page borders; greedy and sampled. One wait a step, as without."""
    engine = on_gpu()
    overlap = warm(engine)
    gpu.events.clear()
    assert ids(engine) == expected
    num_steps = gpu.count("read")
    assert overlap.num_launched > 0.8 * num_steps > 40 and overlap.num_dropped == 0
    assert gpu.count("wait") == gpu.count("pageable") == gpu.count("unpinned") == 0, gpu.events
    assert overlap.launched is None, "nothing is kept of an idle engine"
    overlap.is_on, overlap.num_launched = False, 0
    assert ids(engine) == expected and overlap.num_launched == 0


def test_the_next_step_is_launched_before_the_last_one_is_read(
    on_gpu: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the host waits, two steps are launched that it has not read; without overlap it is one."""
    engine, unread, found = on_gpu(), 0, []
    warm(engine)
    replay, note = Graph.replay, PretendGpu.note

    def replayed(graph: Graph) -> None:
        nonlocal unread
        unread += 1
        replay(graph)

    def noted(gpu: PretendGpu, kind: str, what: str) -> None:
        nonlocal unread
        if kind == "read":
            found.append(unread)
            unread -= 1
        note(gpu, kind, what)

    monkeypatch.setattr(Graph, "replay", replayed)
    monkeypatch.setattr(PretendGpu, "note", noted)
    for count, engine.replica.overlap.is_on in product((1, 4), (True, False)):
        requests = [engine.submit(prompt, SamplingParams(max_new_tokens=60)) for prompt in MANY[:count]]
        for _ in range(25):
            engine.step()
        assert found[-20:] == [1 + engine.replica.overlap.is_on] * 20
        engine.abort(*requests)
        unread = 0


def test_arrivals_and_aborts(on_gpu: Callable[..., Engine], expected: list[list[int]]) -> None:
    engine, dice = on_gpu(), random.Random(0)
    overlap = warm(engine)
    asked: list[tuple[int, Request]] = []
    for number in range(100):
        if number % 50 < 25 and dice.random() < 0.3:
            which = dice.randrange(6)
            asked.append((which, engine.submit(MANY[which], PARAMS[which])))
        if asked and dice.random() < 0.05:
            engine.abort(dice.choice(asked)[1])
        engine.step()
    while not engine.is_idle:
        engine.step()
    assert {request.finish_reason for _, request in asked} == {"length", "abort"}
    for which, request in asked:
        found = request.token_ids
        assert found == (expected[which] if request.finish_reason == "length" else expected[which][: len(found)])
    assert overlap.num_launched > 30 and overlap.num_dropped == 0, "a step that is launched is taken, in part at least"


def numbered_words() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(97)}, "t0"))
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words)


@pytest.mark.slow
def test_stop_strings(on_gpu: Callable[..., Engine], model: PreTrainedModel) -> None:
    tokenizer = numbered_words()
    plain = Engine.from_model(copy.deepcopy(model), tokenizer, PLAIN)
    whole = ids(plain, MANY, PARAMS)
    stops = ["t{}t{}".format(*each[4 + i : 6 + i]) for i, each in enumerate(whole)]
    params = [replace(each, stop=(stops[i],) if i % 2 else ()) for i, each in enumerate(PARAMS)]
    done = plain.generate(MANY, params)
    engine = Engine.from_model(to_gpu(copy.deepcopy(model)), tokenizer, PLAIN, swap_space=0)
    overlap = warm(engine)
    found = engine.generate(MANY, params)
    assert [(each.token_ids, each.text, each.finish_reason) for each in found] == [
        (each.token_ids, each.text, each.finish_reason) for each in done
    ]
    assert {each.finish_reason for each in found} == {"stop", "length"} and overlap.num_launched > 30


def test_preemption(on_gpu: Callable[..., Engine], model: PreTrainedModel) -> None:
    """Pages run out: the last request loses its pages, which others and the prefix cache get."""
    decode = DecodeConfig.autoregressive(max_batch_size=3, max_length=112, kv_tokens=144)
    prompts = [[(seed * i + seed) % 97 for i in range(20)] for seed in range(3, 9)]
    params = [SamplingParams(max_new_tokens=40, temperature=0.7 * (i % 2), seed=i) for i in range(6)]
    whole = plain_ids(copy.deepcopy(model), prompts, params)
    engine = on_gpu(decode, swap_space=300e3 / 2**30)
    for _ in range(2):
        assert ids(engine, prompts, params) == whole
    assert engine.scheduler.counts.preemptions > 2 and engine.replica.overlap.num_launched > 60


def test_every_row_that_is_launched_has_a_page_of_its_request(
    on_gpu: Callable[..., Engine], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page is the request's alone, and its row lies behind the computed ones."""
    engine, launch, places = on_gpu(), Overlap.launch, set()

    def watched(overlap: Overlap, plan: Any, following: Any, results: Any) -> None:
        tables, cache = engine.scheduler.placement, engine.model.cache
        assert cache is not None
        for request, cached in zip(plan.decoding, following.columns[0].tolist(), strict=True):
            table = tables._pages[0].table(request)
            assert cached == len(request.tokens) > request.num_computed_tokens[0]
            assert len(table.nodes) <= cached // 16 < len(table.pages)
            assert cache.tables[request.slots[0], cached // 16] == table.pages[cached // 16]
            places.add(cached % 16)
        launch(overlap, plan, following, results)

    monkeypatch.setattr(Overlap, "launch", watched)
    assert ids(engine) == expected
    assert places == set(range(16))


def tokens_of_other_rows(patch: pytest.MonkeyPatch) -> None:
    """After an end, results stay in the places of the rows that were launched."""
    patch.setattr(
        Overlap, "take", lambda overlap, plan, rows: (
            None if overlap.launched is None else overlap.launched.results[: len(plan.decoding)]
        )
    )  # fmt: skip


def positions_that_stand_still(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lpr.engine.overlap, "_NEXT_ENTRY", np.array([0, 0, 0], np.int32))


def rows_that_stand_still(patch: pytest.MonkeyPatch) -> None:
    """The token's K/V go where the last one's are."""
    take = Overlap.take

    def taken(overlap: Overlap, plan: Any, rows: Any) -> Any:
        if overlap.launched is not None:
            overlap.launched.rows.columns[0] += 1
        return take(overlap, plan, rows)

    patch.setattr(lpr.engine.overlap, "_NEXT_COLUMNS", np.zeros((3, 1), np.int64))
    patch.setattr(Overlap, "take", taken)


def tokens_of_the_host(patch: pytest.MonkeyPatch) -> None:
    replay = GraphForward._replay
    patch.setattr(GraphForward, "_replay", lambda self, shape, rows, selection, tokens=None: replay(
        self, shape, rows, selection))  # fmt: skip


def results_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    launch = TreeModel.launch_next

    def mutant(self: TreeModel, rows: Any, selection: Any, results: torch.Tensor) -> Any:
        before = results.clone()
        return before if launch(self, rows, selection, results) is not None else None

    patch.setattr(TreeModel, "launch_next", mutant)


def results_that_the_next_step_overwrites(patch: pytest.MonkeyPatch) -> None:
    """The copy to the host is enqueued behind the next step."""
    patch.setattr(Exchange, "begin_gather", lambda self, draft, local: lambda: self.gather(draft, local))


def noise_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    launch = Overlap.launch

    def mutant(self: Overlap, plan: Any, following: Any, results: Any) -> None:
        real = lpr.engine.overlap.selection

        def stale(batch: Any, rows: Any) -> Any:
            for row in rows:
                row.positions[:] -= 1
            found = real(batch, rows)
            for row in rows:
                row.positions[:] += 1
            return found

        with patch.context() as inner:
            inner.setattr(lpr.engine.overlap, "selection", stale)
            launch(self, plan, following, results)

    patch.setattr(Overlap, "launch", mutant)


FAULTS = (
    tokens_of_other_rows, positions_that_stand_still, rows_that_stand_still, tokens_of_the_host,
    results_of_the_step_before, results_that_the_next_step_overwrites, noise_of_the_step_before,
)  # fmt: skip


def test_faults_are_noticed(on_gpu: Callable[..., Engine], expected: list[list[int]]) -> None:
    engine = on_gpu(prefix_reuse=False)  # no K/V of one run reaches the next
    overlap = warm(engine)
    for fault in FAULTS:
        assert ids(engine) == expected
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            overlap.num_launched = 0
            assert ids(engine) != expected and overlap.num_launched > 20, fault


def test_a_request_is_not_admitted_to_a_step_that_is_launched(
    on_gpu: Callable[..., Engine], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins one step later; the fault drops a whole step instead, with the same ids."""
    admits = Overlap.admits
    for fault in (False, True):
        if fault:
            monkeypatch.setattr(Overlap, "admits", lambda *args: admits(*args) or True)
        engine = on_gpu()
        overlap = warm(engine)
        first = engine.submit(MANY[5], PARAMS[5])
        for _ in range(8):
            engine.step()
        second = engine.submit(MANY[4], PARAMS[4])
        while not engine.is_idle:
            engine.step()
        assert [first.token_ids, second.token_ids] == [expected[5], expected[4]]
        assert (overlap.num_dropped > 0) == fault


class Interrupting(StepHooks):
    """Interrupts the n-th call at a place."""

    def __init__(self, place: str, left: int) -> None:
        self.place, self.left = place, left

    def end_phase(self, phase: str) -> None:
        self.left -= phase == self.place
        if phase == self.place and self.left == 0:
            raise KeyboardInterrupt

    def while_busy(self) -> None:
        self.end_phase("while_busy")


@pytest.mark.slow
@pytest.mark.parametrize("decode", [PLAIN, TREES])
def test_an_interrupt(on_gpu: Callable[..., Engine], expected: list[list[int]], decode: DecodeConfig) -> None:
    """Between a launch and its reading no state has changed, and the step is taken again."""
    engine = on_gpu(decode)
    warm(engine)
    for place, after in product(("draft", "forward", "gather", "commit", "while_busy"), (5, 6)):
        engine.hooks = Interrupting(place, after)
        asked = [engine.submit(prompt, params) for prompt, params in zip(MANY, PARAMS, strict=True)]
        with pytest.raises(KeyboardInterrupt):
            while not engine.is_idle:
                engine.step()
        while not engine.is_idle:
            engine.step()
        for request, whole in zip(asked, expected, strict=True):
            assert request.finish_reason == "length" or place == "commit"
            assert request.token_ids == (whole if request.finish_reason == "length" else whole[: request.num_output])
    assert ids(engine) == expected


@pytest.mark.slow
@pytest.mark.parametrize("decode", [PLAIN, TREES])
def test_interrupts_at_any_line(on_gpu: Callable[..., Engine], expected: list[list[int]], decode: DecodeConfig) -> None:
    dice, engine = random.Random(3), on_gpu(decode)
    warm(engine)
    with interrupted_at(-1) as counted:
        ids(engine)
    for _ in range(5):
        number = dice.randrange(-counted.number)
        with interrupted_at(number) as countdown, contextlib.suppress(KeyboardInterrupt):
            ids(engine)
        assert ids(engine) == expected, countdown.where


@pytest.mark.slow
@pytest.mark.parametrize("fault", [False, True])
def test_logits_that_are_not_numbers(
    on_gpu: Callable[..., Engine], model: PreTrainedModel, expected: list[list[int]], fault: bool
) -> None:
    """The request fails, the others go on, and what it has left in its pages reaches nobody."""
    texts = [{*prompt, *tokens} for prompt, tokens in zip(MANY, expected, strict=True)]
    mine, poison = next(
        (i, token)
        for i, tokens in enumerate(expected)
        for token in tokens[2:-3]
        if sum(token in text for text in texts) == 1 and token not in MANY[i]
    )
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.embed_tokens.weight[poison] = torch.nan
    engine = on_gpu(of=broken)
    # Page 0 is this one's: what stands for the kernel reads it, with weight 0, for pages that a table lacks.
    ids(engine, [[1] * 17], SamplingParams(max_new_tokens=1))
    clamp = torch.clamp
    if fault:
        with pytest.MonkeyPatch.context() as patch, pytest.raises((IndexError, RuntimeError)):
            patch.setattr(torch, "clamp", lambda given, min, out: clamp(given, out=out, min=-9))
            [ids(engine) for _ in range(2)]
        return
    for _ in range(2):
        done = engine.generate(MANY, PARAMS)
        assert done[mine].finish_reason == "error" and "not numbers" in str(done[mine].error)
        assert done[mine].token_ids == expected[mine][: expected[mine].index(poison) + 1]
        assert all(each.token_ids == expected[i] or i == mine for i, each in enumerate(done))
    assert engine.replica.overlap.num_launched > 50


@pytest.mark.slow
def test_other_weights_drop_what_is_launched(
    on_gpu: Callable[..., Engine], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = on_gpu()
    overlap = warm(engine)
    asked = [engine.submit(prompt, params) for prompt, params in zip(MANY[:3], PARAMS[:3], strict=True)]
    for _ in range(6):
        engine.step()
    assert overlap.launched is not None
    with monkeypatch.context() as patch:
        patch.setattr(Watch, "hints", True)
        patch.setattr(Watch, "has_changed", lambda watch: True)
        engine.step()
    assert [request.finish_reason for request in asked] == ["error"] * 3 and overlap.launched is None
    assert ids(engine) == expected


def test_steps_with_drafts_and_python_in_the_choice_are_not_launched_early(
    on_gpu: Callable[..., Engine], model: PreTrainedModel
) -> None:
    params = [SamplingParams(max_new_tokens=12, repetition_penalty=1.1), SamplingParams(max_new_tokens=12, logprobs=2)]
    engine = on_gpu()
    for each in params:
        whole = plain_ids(copy.deepcopy(model), MANY, each)
        assert ids(engine, MANY, each) == whole and engine.replica.overlap.num_launched == 0
    engine = on_gpu(replace(PLAIN, window_size=3, trie_nodes=8))
    assert ids(engine) == plain_ids(copy.deepcopy(model), MANY, PARAMS)
    assert engine.replica.overlap.num_launched < 10


@pytest.mark.slow
@pytest.mark.parametrize("fault", [False, True])
def test_steps_on_other_streams(
    gpu: PretendGpu, on_gpu: Callable[..., Engine], expected: list[list[int]], fault: bool
) -> None:
    """A step waits for what an earlier one has launched on its stream, also if nothing of it is taken."""
    engine = on_gpu()
    warm(engine)
    streams = [Stream(gpu.streams), gpu.streams.default]
    with pytest.raises(RaceError) if fault else contextlib.nullcontext():
        for _ in range(2):
            asked = [engine.submit(prompt, params) for prompt, params in zip(MANY, PARAMS, strict=True)]
            while not engine.is_idle:
                streams.reverse()
                if fault:
                    engine.model._stream = None
                with torch.cuda.stream(streams[0]):  # type: ignore[arg-type]
                    engine.step()
            assert [each.token_ids for each in asked] == expected


@pytest.mark.slow
@pytest.mark.parametrize("price", [0.03, 1.0])
def test_automatic_sizes(on_gpu: Callable[..., Engine], expected: list[list[int]], price: float) -> None:
    """Where no draft pays, steps are launched early; where drafts come and go, few of those are dropped."""
    times = StepTimes({(1, 256): [1.0 + price * knot for knot in KNOTS]})
    auto = DecodeConfig(max_batch_size=4, max_length=128, kv_tokens=512, prefill_chunk=64)
    engine = on_gpu(auto, costs=times)
    warm(engine)
    engine.configure(auto)  # without the outputs, of which drafts would be sure
    assert ids(engine) == expected
    overlap = engine.replica.overlap
    assert (overlap.num_launched > 40) == (price == 1) and overlap.num_dropped <= 3


@pytest.mark.slow
def test_a_rank_that_others_may_join(gpu: PretendGpu, on_gpu: Callable[..., Engine], expected: list[list[int]]) -> None:
    """A mesh of one rank counts the gathers that it begins early."""
    found = []

    def rank(comm: Comm, decode: DecodeConfig) -> None:
        with PretendGpu():
            engine = on_gpu(decode, comm=comm)
            overlap = warm(engine)
            found.append((ids(engine) == expected, overlap.num_launched > 30, overlap.num_dropped))
            engine.close()

    for decode in (PLAIN, TREES):
        world = ElasticWorld(1)
        world.start(0, partial(rank, decode=decode))
        world.join()
    assert found == [(True, True, 0), (True, False, 0)]


# Steps that begin in the call before.


def early_steps(patch: pytest.MonkeyPatch) -> list[bool]:
    """For each step from now on: whether it began in the call before."""
    found, run = list[bool](), Replica.run

    def watched(replica: Replica, *args: Any) -> Any:
        found.append(replica.begun is not None)
        return run(replica, *args)

    patch.setattr(Replica, "run", watched)
    return found


def test_steps_with_trees_begin_in_the_call_before(
    gpu: PretendGpu, on_gpu: Callable[..., Engine], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the first. A step still has one wait, and nothing is evaluated twice."""
    engine, early = on_gpu(TREES), early_steps(monkeypatch)
    warm(engine)
    engine.configure(TREES)  # without the outputs, which leave few steps
    gpu.events.clear()
    early.clear()
    replays = gpu.num_replays
    assert ids(engine) == expected
    assert sum(early) == len(early) - 1 > 30, early
    assert gpu.count("read") == len(early) and gpu.count("wait") == gpu.count("pageable") == gpu.count("unpinned") == 0
    assert gpu.num_replays - replays == len(early)
    assert engine.replica.begun is None, "nothing is kept of an idle engine"
    engine.replica.overlap.begins_early = False
    early.clear()
    assert ids(engine) == expected and not any(early)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("seed", range(4))
def test_arrivals_and_aborts_beside_steps_that_are_begun(
    on_gpu: Callable[..., Engine], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Commands come between a launch and its reading; the step is completed before an abort, and no work is lost."""
    engine, dice = on_gpu(TREES), random.Random(seed)
    warm(engine)
    early, asked = early_steps(monkeypatch), list[tuple[int, Request]]()
    num_cut = 0
    for number in range(120):
        if number % 60 < 30 and dice.random() < 0.2:
            which = dice.randrange(6)
            asked.append((which, engine.submit(MANY[which], PARAMS[which])))
        running = [request for _, request in asked if request.finish_reason is None]
        if running and dice.random() < 0.1:
            request, is_begun = dice.choice(running), engine.replica.begun is not None
            before = request.num_output
            engine.abort(request)
            assert request.finish_reason is not None and engine.replica.begun is None
            num_cut += is_begun and request.num_output > before
        if dice.random() < 0.1:
            engine.learn([1, 2, 3, number % 97])
        engine.step()
    while not engine.is_idle:
        engine.step()
    assert {request.finish_reason for _, request in asked} == {"length", "abort"}
    for which, request in asked:
        found = request.token_ids
        assert found == (expected[which] if request.finish_reason == "length" else expected[which][: len(found)])
        assert [token for chunk in request.take() for token in chunk.token_ids] == found
    assert sum(early) > 10 and num_cut > 0, (sum(early), num_cut)


def ended_requests_go_on(patch: pytest.MonkeyPatch) -> None:
    """The next step has the rows of requests that have ended."""
    begin = Replica._begin

    def mutant(replica: Replica, schedule: Any, *how: Any, is_early: bool = False) -> Any:
        chosen = replica.last if is_early and replica.last is not None else schedule
        return begin(replica, chosen, *how, is_early=is_early)

    update = Replica.update

    def updated(replica: Any, schedule: Any, outcomes: Any) -> None:
        update(replica, schedule, outcomes)
        replica.last = schedule

    patch.setattr(Replica, "update", updated)
    patch.setattr(Replica, "_begin", mutant)
    patch.setattr(Replica, "last", None, raising=False)


def steps_without_a_schedule(patch: pytest.MonkeyPatch) -> None:
    """No page is reserved for the next step, and nobody is admitted to it."""
    update = Replica.update
    done: list[Any] = []

    def updated(replica: Any, schedule: Any, outcomes: Any) -> None:
        update(replica, schedule, outcomes)
        done[:] = [schedule] if replica._batch is not None and not schedule.filling else []

    schedule = Replica.schedule
    patch.setattr(Replica, "update", updated)
    patch.setattr(Replica, "schedule", lambda replica: done.pop() if done else schedule(replica))


def moves_behind_the_next_step(patch: pytest.MonkeyPatch) -> None:
    """The accepted path's K/V come to their places after the next step has read them."""
    commit_moves, begin, late = KVCache.commit_moves, Replica._begin, list[Any]()

    def moved(cache: KVCache, *args: Any) -> None:
        late.append((cache, args))

    def began(*args: Any, **how: Any) -> Any:
        found = begin(*args, **how)
        for cache, moves in late:
            commit_moves(cache, *moves)
        late.clear()
        return found

    patch.setattr(KVCache, "commit_moves", moved)
    patch.setattr(Replica, "_begin", began)


def results_of_another_step(patch: pytest.MonkeyPatch) -> None:
    """The gather of a step that is begun is read a step late."""
    begin_gather, last = Exchange.begin_gather, list[Any]()

    def mutant(exchange: Exchange, draft: Any, local: Any) -> Any:
        wait = begin_gather(exchange, draft, local)
        last.append(wait)
        return lambda: replace(last.pop(0)(), draft=draft) if len(last) > 1 else wait()

    patch.setattr(Exchange, "begin_gather", mutant)


EARLY_FAULTS = (
    ended_requests_go_on, steps_without_a_schedule, moves_behind_the_next_step, results_of_another_step,
)  # fmt: skip


@pytest.mark.parametrize("fault", EARLY_FAULTS)
def test_faults_of_steps_that_are_begun_are_noticed(
    on_gpu: Callable[..., Engine], expected: list[list[int]], fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    engine = on_gpu(TREES, prefix_reuse=False)
    warm(engine)
    assert ids(engine) == expected
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        early = early_steps(patch)
        try:
            found: Any = ids(engine)
        except Exception as failure:
            found = failure
        assert found != expected and any(early), found


@pytest.mark.parametrize("fault", [False, True])
def test_no_step_concludes_for_a_request_that_is_gone(
    on_gpu: Callable[..., Engine], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, fault: bool
) -> None:
    """Others may have its pages. The step that is begun is completed before an abort, whose request gets its tokens."""
    engine, commit_moves = on_gpu(TREES), KVCache.commit_moves
    warm(engine)
    engine.configure(TREES)

    def watched(cache: KVCache, rows: Any, moves: Any) -> None:
        assert set(rows.slots.tolist()) <= {request.slots[0] for request in engine.scheduler.running}
        commit_moves(cache, rows, moves)

    monkeypatch.setattr(KVCache, "commit_moves", watched)
    if fault:
        monkeypatch.setattr(Driver, "_complete_begun", lambda driver: None)
    first, second = (engine.submit(MANY[which], PARAMS[which]) for which in (3, 5))
    for _ in range(3):
        engine.step()
    assert engine.replica.begun is not None and first.state is not None
    before = len(first.state.tokens)
    with pytest.raises(AssertionError) if fault else contextlib.nullcontext():
        engine.abort(first)
        advanced = engine.step()
        assert len(advanced) == len({*advanced}) == 2, "each request once"
        assert len(first.prompt_ids) + first.num_output > before and first.finish_reason == "abort"
        while not engine.is_idle:
            engine.step()
        assert second.token_ids == expected[5] and first.token_ids == expected[3][: first.num_output]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [False, True])
def test_begun_steps_on_other_streams(
    gpu: PretendGpu, on_gpu: Callable[..., Engine], expected: list[list[int]], fault: bool
) -> None:
    """A step that an interrupt has dropped writes on its stream, behind which the next one waits."""
    engine = on_gpu(TREES)
    warm(engine)
    streams = [Stream(gpu.streams), gpu.streams.default]
    with pytest.raises(RaceError) if fault else contextlib.nullcontext():
        for _ in range(2):
            asked = [engine.submit(prompt, params) for prompt, params in zip(MANY, PARAMS, strict=True)]
            while not engine.is_idle:
                streams.reverse()
                engine.replica.begun = None
                if fault:
                    engine.model._stream = None
                with torch.cuda.stream(streams[0]):  # type: ignore[arg-type]
                    engine.step()
            assert [each.token_ids for each in asked] == expected


def test_the_time_of_a_step_that_is_begun(on_gpu: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts from its beginning, but not if the host came when the device may have been done."""
    engine = on_gpu(TREES)
    warm(engine)
    engine.configure(TREES)
    clock, begin_gather, waits, found = [0.0], Exchange.begin_gather, list[bool](), list[float | None]()
    engine.model.adapter.clock = lambda: clock[0]

    def gathering(exchange: Exchange, draft: Any, local: Any) -> Any:
        wait = begin_gather(exchange, draft, local)

        def waited() -> Any:
            waits.append(len(waits) % 3 > 0)
            time.sleep(2 * lpr.engine.step.SHORTEST_WAIT * waits[-1])
            clock[0] += 1.0
            return wait()

        return waited

    monkeypatch.setattr(Exchange, "begin_gather", gathering)
    monkeypatch.setattr(lpr.engine.step, "SHORTEST_WAIT", 1e-2)
    engine.submit(MANY[3], PARAMS[5])
    while not engine.is_idle:
        engine.replica._timed = None
        engine.step()
        clock[0] += 10.0  # of the caller
        found.append(engine.replica._timed[2] if engine.replica._timed is not None else None)
    first, *early = found
    assert len(waits) == len(early) > 10
    assert early == [11e3 if is_long else None for is_long in waits]


def test_what_the_front_sends_is_heard_before_the_next_step_begins(
    on_gpu: None, model: PreTrainedModel, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a step, with nothing launched: a request that came while the device worked joins the next step."""
    engine = Engine.from_model(to_gpu(copy.deepcopy(model)), numbered_words(), TREES, swap_space=0)
    warm(engine)
    engine.configure(TREES)
    early, begun = early_steps(monkeypatch), list[bool]()

    class Front(ScriptedLine):
        def __init__(self) -> None:
            self.sent, self.waits = [], []
            self._script = [Submit(which, MANY[which], PARAMS[which], len(MANY[which])) for which in (3, 5)]

        def take(self, wait: float) -> list[Any]:
            begun.append(engine.replica.begun is not None)
            if len(begun) == 1:
                return [self._script[0]]
            if len(begun) == 6:
                assert len(engine.scheduler.running) == 1
                return [self._script[1]]
            assert len(begun) != 7 or len(engine.scheduler.running) == 2
            return [Stop()] if len(begun) > 6 and engine.is_idle else []

    line = Front()
    bridge = EngineBridge(engine, line, "tiny")  # type: ignore[arg-type]
    assert bridge.overlaps
    bridge.run()
    assert not any(begun) and len(begun) <= len(early) + 3 and sum(early) > 0.8 * len(early)
    for which in (3, 5):
        chunks = [chunk for step in line.steps for chunk in step.chunks if chunk.id == which]
        assert [token for chunk in chunks for token in chunk.token_ids] == expected[which]
        assert chunks[-1].finish_reason == "length"
