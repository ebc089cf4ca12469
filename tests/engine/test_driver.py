"""Commands wait for the step's end, and an exception in a step leaves an engine whose answers are right, or none."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lpr import DecodeConfig, Engine, InputError, SamplingParams
from lpr.dist.errors import CommError
from lpr.engine import step
from lpr.engine.driver import Driver
from lpr.engine.hooks import StepHooks
from lpr.engine.replica import Replica
from lpr.engine.request import Request
from lpr.model.step_inputs import Row, current_step, in_step
from lpr.protocol import Chunk
from tests.fakes.interruptions import interrupted_at
from tests.fakes.worlds import ThreadComm, ThreadWorld, run_ranks

DECODE = DecodeConfig(window_size=3, trie_nodes=12, max_batch_size=3, kv_tokens=700, prefill_chunk=48)
PROMPTS = [[(7 * i + 3 * i * i + k) % 97 for i in range(40 + k)] for k in range(3)]
PARAMS = [SamplingParams(max_new_tokens=30, temperature=t, seed=5, logprobs=1) for t in (0.0, 0.8, 0.8)]


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> list[list[int]]:
    plain = Engine.from_model(model, decode=DecodeConfig.autoregressive(), prefix_reuse=False)
    return [each.token_ids for each in plain.generate(PROMPTS, PARAMS)]


@pytest.fixture
def engine(model: PreTrainedModel) -> Engine:
    return Engine.from_model(model, decode=DECODE)


def assert_right(engine: Engine, expected: list[list[int]], prompts: list[list[int]] = PROMPTS) -> None:
    """The engine is idle, its pages are in order, and its answers are right, also to prompts that repeat outputs."""
    assert engine.is_idle and not engine.requests and current_step() is None
    for pages in engine.scheduler.placement._pages:
        nodes = list(pages.pool.roots)
        for node in nodes:
            nodes += node.children.values()
        assert pages.pool.num_held == 0 and all(node.num_users == 0 for node in nodes)
        assert sum(pages.pool._used) == sum(node.is_resident and node.parent is not None for node in nodes)
    for _ in range(2):
        assert [each.token_ids for each in engine.generate(prompts, PARAMS)] == expected
    longer = [[*prompt, *ids[:20]] for prompt, ids in zip(prompts, expected, strict=True)]
    rest = [SamplingParams(max_new_tokens=10)] * 3
    ids = [each.token_ids for each in engine.generate(longer[:1], rest[:1])]
    assert ids == [expected[0][20:30]]


class Raising(StepHooks):
    """Raises in one of its calls, once, in a step that evaluates trees."""

    def __init__(self, place: str, failure: BaseException, after: int = 3) -> None:
        self.place, self.failure, self.left = place, failure, after

    def _at(self, place: str) -> None:
        self.left -= place == self.place
        if place == self.place and self.left == 0:
            raise self.failure

    def begin_step(self) -> None:
        self._at("begin")

    def end_phase(self, phase: str) -> None:
        self._at(phase)

    def while_busy(self) -> None:
        self._at("busy")

    def end_step(self, *seen: Any) -> None:
        self._at("end")


PLACES = ["begin", "draft", "busy", "forward", "gather", "commit", "end"]
FAILURES = [KeyboardInterrupt(), ValueError("of a hook"), MemoryError()]
RAISED = [(place, FAILURES[number % 3]) for number, place in enumerate(PLACES)]


@pytest.mark.parametrize("place, failure", RAISED, ids=repr)
def test_a_hook_that_raises(engine: Engine, expected: list[list[int]], place: str, failure: BaseException) -> None:
    engine.hooks = Raising(place, failure)
    with pytest.raises(type(failure)):
        engine.generate(PROMPTS, PARAMS)
    assert_right(engine, expected)


def test_the_requests_of_the_step_end_and_others_wait_on(engine: Engine, expected: list[list[int]]) -> None:
    four = [*PROMPTS, PROMPTS[0]]
    asked = [engine.submit(prompt, params) for prompt, params in zip(four, [*PARAMS, PARAMS[0]], strict=True)]
    engine.hooks = Raising("end", ValueError("of a hook"))
    with pytest.raises(ValueError, match="of a hook"):
        while True:
            engine.step()
    for request, ids in zip(asked[:3], expected, strict=True):
        done = request.completion()
        assert done.finish_reason == "error" and done.error == "an exception ended its step: ValueError: of a hook"
        chunks = request.take()
        assert done.token_ids == [token for chunk in chunks for token in chunk.token_ids] == ids[: len(done.token_ids)]
        assert len(done.logprobs or ()) == len(done.token_ids) < len(ids)
        assert chunks[-1].finish_reason == "error" and chunks[-1].failure is not None
    assert asked[3].finish_reason is None and set(engine.step()) >= set(asked[:3]), "the ended ones are told"
    while not engine.is_idle:
        engine.step()
    assert asked[3].token_ids == expected[0] and engine.scheduler.retained[0] > 0
    assert_right(engine, expected)


def interrupt(engine: Engine, number: int, make: Callable[[], BaseException]) -> str:
    """Interrupt a call at one of its lines; returns the line."""
    with interrupted_at(number, make) as countdown, contextlib.suppress(KeyboardInterrupt, MemoryError):
        engine.generate(PROMPTS, PARAMS)
    return countdown.where


def wrong_after_interrupts(model: PreTrainedModel, expected: list[list[int]], count: int, seed: int = 1) -> list[str]:
    """The lines of lpr after an interrupt at which an engine answers wrongly, of `count` random ones."""
    dice, engine, wrong = random.Random(seed), Engine.from_model(model, decode=DECODE), []
    engine.generate(PROMPTS, PARAMS)
    with interrupted_at(-1) as counted:
        engine.generate(PROMPTS, PARAMS)
    for _ in range(count):
        make = dice.choice((KeyboardInterrupt, MemoryError))
        number = dice.randrange(-counted.number)
        where = ""
        try:
            where = interrupt(engine, number, make)
            assert_right(engine, expected)
        except Exception as failure:
            wrong.append(f"{where}: {failure!r}"[:300])
            engine = Engine.from_model(model, decode=DECODE)
    return wrong


def test_interrupts_at_any_line(model: PreTrainedModel, expected: list[list[int]]) -> None:
    assert wrong_after_interrupts(model, expected, 15) == []


@pytest.mark.parametrize("stop", [()])
def test_an_answer_that_an_interrupt_meets_at_its_end_can_be_taken(
    model: PreTrainedModel, stop: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each line at which its last step is told: with text and all ids, or with an end that says so."""
    names = {f"t{number}": number for number in range(97)}
    words = Tokenizer(models.WordLevel(names, "t0"))
    words.decoder = decoders.Fuse()
    engine = Engine.from_model(model, PreTrainedTokenizerFast(tokenizer_object=words), decode=DECODE)
    params, update, ends = SamplingParams(max_new_tokens=4, stop=stop), Replica.update, set[str | None]()
    wanted = engine.generate(PROMPTS[:1], params)[0]
    for number in itertools.count(1):
        is_whole = True

        def broken(*args: Any, number: int = number) -> None:
            nonlocal is_whole
            if all(each.num_output >= 3 for each in args[0].scheduler.running):
                with interrupted_at(number) as countdown:
                    update(*args)
                is_whole = countdown.number > 0
            else:
                update(*args)

        monkeypatch.setattr(Replica, "update", broken)
        request = engine.submit(PROMPTS[0], replace(params))
        while request.finish_reason is None or not engine.is_idle:
            try:
                engine.step()
            except KeyboardInterrupt:
                is_whole = False
        chunks, done = request.take(), request.completion()
        ends.add(done.finish_reason)
        ids, text = [token for each in chunks for token in each.token_ids], "".join(each.text for each in chunks)
        assert ids == done.token_ids == wanted.token_ids[: len(ids)] and wanted.text.startswith(text)
        assert chunks[-1].finish_reason == done.finish_reason
        assert done.finish_reason == "abort" or (ids, text) == (wanted.token_ids, wanted.text)
        if is_whole:
            break
    assert number > 50 and ends == {"abort", "length"}


@pytest.mark.parametrize("number", range(1, 10))
def test_an_interrupt_leaves_no_current_step(model: PreTrainedModel, number: int) -> None:
    """A forward of the model by its own program would be spoilt by one."""
    runner = Engine.from_model(model, decode=DECODE).model
    inputs = runner.adapter.inputs([Row(0, 0, [1], [-1], [0], 1)], runner.cache)
    with interrupted_at(number), contextlib.suppress(KeyboardInterrupt):
        in_step(inputs, current_step)
    assert current_step() is None


def test_mutant_nothing_is_recovered(
    model: PreTrainedModel, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Replica, "recover", lambda replica, failure: setattr(replica, "is_whole", True))
    assert wrong_after_interrupts(model, expected, 15)


@pytest.mark.parametrize("seed", range(4))
def test_an_interrupt_before_rows_are_moved(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    plain = Engine.from_model(model, decode=DecodeConfig.autoregressive(), prefix_reuse=False)
    engine, real, num_moving = Engine.from_model(model, decode=DECODE), step.commit, 0
    params = SamplingParams(max_new_tokens=60, temperature=0.7, seed=seed)
    ids = plain.generate([PROMPTS[0]], params)[0].token_ids

    def commit(*args: Any) -> Any:
        nonlocal num_moving
        moves = args[4]
        num_moving += moves.shape[1] > 0
        if moves.shape[1] and num_moving == 2:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(step, "commit", commit)
        for _ in range(20):
            engine.generate([PROMPTS[0]], params)
    assert engine.generate([PROMPTS[0]], params)[0].token_ids == ids
    short = SamplingParams(max_new_tokens=20)
    longer = [PROMPTS[0] + ids[:40]]
    assert engine.generate(longer, short)[0].token_ids == plain.generate(longer, short)[0].token_ids


class Slow:
    """A tokenizer that has no token for some ids, as many slow ones: it raises."""

    all_special_ids: tuple[int, ...] = ()
    bad: int = -1

    def convert_tokens_to_ids(self, token: str) -> None:
        """None: it has no tokens for bytes."""

    def decode(self, ids: list[int], **options: Any) -> str:
        if self.bad in ids:
            raise KeyError(self.bad)
        return "".join(chr(97 + token % 26) for token in ids)


@pytest.mark.parametrize("stop", [(), ("zzzz",)])
def test_a_tokenizer_that_raises(model: PreTrainedModel, expected: list[list[int]], stop: tuple[str, ...]) -> None:
    tokenizer = Slow()
    engine = Engine.from_model(model, tokenizer, decode=DECODE)
    known = [*PROMPTS[1], *expected[1]]
    tokenizer.bad = next(known[i] for i in range(len(PROMPTS[1]) + 3, len(known)) if known[i] not in known[:i])
    params = SamplingParams(max_new_tokens=30, temperature=0.8, seed=5, stop=stop)
    with pytest.raises(KeyError):
        engine.generate([PROMPTS[1]], params)
    assert engine.is_idle
    tokenizer.bad = -1
    done = engine.generate([PROMPTS[1]], params)[0]
    assert done.token_ids == expected[1] and done.text == tokenizer.decode(expected[1])


def test_a_text_is_never_wrong_after_an_interrupt(model: PreTrainedModel, expected: list[list[int]]) -> None:
    """A token that was being decoded is lost: the request says so, and later ones are right."""
    tokenizer = Slow()
    engine = Engine.from_model(model, tokenizer, decode=DECODE)
    request = engine.submit(PROMPTS[1], PARAMS[1])
    while request.num_output < 5:
        engine.step()
    tokenizer.bad = request.token_ids[request.num_output - 1]
    with pytest.raises(KeyError):
        request.take()
    tokenizer.bad = -1
    with pytest.raises(RuntimeError, match=f"has left the output of request {request.id} in part"):
        while True:
            engine.step()
            request.take()
    assert_right(engine, expected)


def test_chunks_without_text_say_where_they_begin(model: PreTrainedModel) -> None:
    """The step before an exception has added chunks whose text is not made yet, and is lost."""
    engine = Engine.from_model(model, Slow(), decode=DECODE)
    request = engine.submit(PROMPTS[1], PARAMS[1])
    while request.num_output < 5:
        engine.step()
    chunks = request.take()
    engine.hooks = Raising("end", ValueError("of a hook"), after=1)
    with pytest.raises(ValueError, match="of a hook"):
        engine.step()
    chunks += request.take()
    for before, after in itertools.pairwise(chunks):
        assert after.start_character == before.start_character + len(before.text)
    assert request.completion().text == "".join(chunk.text for chunk in chunks)


def test_an_exception_between_the_texts_of_two_chunks() -> None:
    """What has been written of several chunks is lost with the rest: those that follow begin where the first did."""
    texts = iter(("ab",))
    request: Any = SimpleNamespace(_num_characters=5, _unwritten=[Chunk(1, [3], ""), Chunk(1, [4], "")],
                                   text_stream=SimpleNamespace(take=lambda count: next(texts)))  # fmt: skip
    with pytest.raises(StopIteration):
        Request._write_texts(request)
    assert request._num_characters == 5 and len(request._unwritten) == 2
    request.text_stream.take = lambda count: "cde"
    Request._write_texts(request)
    assert request._num_characters == 11 and not request._unwritten


# Commands.


def abandon(stream: Any) -> Callable[[], None]:
    """Leave a stream to Python's collector, which finds it when what is returned is called."""

    class Holder:
        pass

    holder: Any = Holder()
    holder.me, holder.stream = holder, stream
    return lambda: gc.collect() and None


class Calling(StepHooks):
    """Calls something in a step, once."""

    def __init__(self, place: str, action: Callable[[], Any]) -> None:
        self.place, self.action = place, action

    def _at(self, place: str) -> None:
        if place == self.place:
            self.place = ""
            self.action()

    def while_busy(self) -> None:
        self._at("busy")

    def end_phase(self, phase: str) -> None:
        self._at(phase)

    def end_step(self, *seen: Any) -> None:
        self._at("end")


@pytest.mark.parametrize("place", ["busy", "gather", "commit", "end"])
@pytest.mark.parametrize("is_collected", [False, True])
def test_an_abort_in_a_step_waits_for_its_end(
    engine: Engine, expected: list[list[int]], place: str, is_collected: bool
) -> None:
    gc.disable()
    try:
        streams = [engine.stream(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
        first = [next(stream) for stream in streams]
        victim = next(request for request in engine.requests.values() if request.prompt == PROMPTS[0])
        kept = streams[1:]
        action = abandon(streams.pop(0)) if is_collected else partial(engine.abort, victim)
        engine.hooks = Calling(place, action)
        for stream, chunk, ids in zip(kept, first[1:], expected[1:], strict=True):
            assert [*chunk.token_ids, *(token for each in stream for token in each.token_ids)] == ids
    finally:
        gc.enable()
    assert victim.finish_reason == "abort" and victim.token_ids == expected[0][: victim.num_output]
    assert_right(engine, expected)


def test_mutant_commands_act_in_a_step(
    engine: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Driver, "_is_busy", property(lambda driver: False, lambda driver, value: None), raising=False)
    with pytest.raises((RuntimeError, ValueError, IndexError, AssertionError)):
        test_an_abort_in_a_step_waits_for_its_end(engine, expected, "end", False)


def test_requests_submitted_in_a_step_begin_behind_it(engine: Engine, expected: list[list[int]]) -> None:
    asked: list[Request] = []
    engine.hooks = Calling("gather", lambda: asked.append(engine.submit(PROMPTS[2], PARAMS[2])))
    assert [each.token_ids for each in engine.generate(PROMPTS[:2], PARAMS[:2])] == expected[:2]
    while not engine.is_idle:
        engine.step()
    assert asked[0].token_ids == expected[2]


def test_a_step_in_a_step_is_refused(engine: Engine, expected: list[list[int]]) -> None:
    engine.hooks = Calling("busy", engine.step)
    with pytest.raises(RuntimeError, match="within a step"):
        engine.generate(PROMPTS, PARAMS)
    assert_right(engine, expected)


@pytest.mark.parametrize("chunks", [1, 3])
def test_an_abort_in_prefill_keeps_what_was_computed(engine: Engine, chunks: int) -> None:
    long = [(i * i * 3 + i) % 97 for i in range(200)]

    def ask(num_steps: int | None = None) -> Request:
        request = engine.submit(long, SamplingParams(max_new_tokens=8))
        while request.finish_reason is None and num_steps != 0:
            engine.step()
            num_steps = num_steps - 1 if num_steps is not None else None
        engine.abort(request)
        return request

    ask(chunks)
    again = ask()
    assert again.num_cached_tokens == chunks * DECODE.prefill_chunk
    fresh = Engine.from_model(engine.model.model, decode=DecodeConfig.autoregressive(), prefix_reuse=False)
    assert again.token_ids == fresh.generate([long], SamplingParams(max_new_tokens=8))[0].token_ids


@pytest.mark.parametrize("wrong", [97, 2**31 - 1, 2**40, -1, -5, "a", 1.5])
def test_ids_outside_the_vocabulary_are_refused(engine: Engine, expected: list[list[int]], wrong: Any) -> None:
    assert engine.model.vocab_size == 97
    learned = [*PROMPTS[0], wrong, 7]
    for call in (
        partial(engine.learn, [1, 2], learned),
        partial(engine.submit, PROMPTS[0], delivered=[wrong]),
        partial(engine.submit, PROMPTS[0], prediction=learned),
        partial(engine.submit, learned),
    ):
        with pytest.raises(InputError):
            call()
    assert_right(engine, expected)


def test_a_learned_history_outside_the_vocabulary_is_refused(engine: Engine) -> None:
    import numpy as np

    for ids in ([1, 97], [-2, 3]):
        with pytest.raises(InputError, match="a learned history has ids outside the model's vocabulary of 97"):
            engine.learn_history(np.array(ids, np.int32))
    engine.learn_history(np.array([1, -1, 3], np.int32))


def test_a_closed_engine_says_so(engine: Engine) -> None:
    engine.close()
    engine.close()
    for call in (
        partial(engine.generate, PROMPTS, PARAMS),
        partial(next, engine.stream(PROMPTS[0])),
        partial(engine.submit, PROMPTS[0]),
        engine.step,
        partial(engine.learn, [1, 2]),
        engine.drain,
        partial(engine.configure, DECODE),
    ):
        with pytest.raises(RuntimeError, match="^the engine is closed$"):
            call()


# Several ranks.


ENDED = [("begin", 0), ("busy", 1), ("gather", 0), ("gather", 1), ("commit", 1), ("end", 0)]


@pytest.mark.parametrize("place, failing", ENDED)
def test_an_exception_on_one_rank_ends_all_of_them(
    model: PreTrainedModel, expected: list[list[int]], failing: int, place: str
) -> None:
    """The others hear of it, and the rank itself refuses further calls: none goes on from another state."""
    said: dict[int, list[str]] = {0: [], 1: [], 2: []}

    def program(comm: ThreadComm) -> None:
        engine = Engine.from_model(model, decode=DECODE, comm=comm)
        if comm.rank == failing:
            engine.hooks = Raising(place, ValueError("of a hook"))
        for _ in range(2):
            try:
                engine.generate(PROMPTS, PARAMS)
            except (ValueError, CommError) as failure:
                said[comm.rank].append(f"{type(failure).__name__}: {failure}")
        if comm.rank == failing:
            assert engine.is_stopped and not engine.requests
            engine.close()

    run_ranks(ThreadWorld(3), program)
    reason = f"rank {failing} failed in a step: ValueError: of a hook"
    assert said.pop(failing) == ["ValueError: of a hook", f"CommError: {reason}"]
    for heard in said.values():
        assert len(heard) == 2 and all(line.startswith("CommError: ") for line in heard), heard
