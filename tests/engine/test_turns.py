"""Threads that share an engine, and calls within a step, against engines of one thread."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import lpr
from lpr import DecodeConfig, Engine, InputError, SamplingParams
from lpr.engine.hooks import StepHooks
from lpr.engine.turns import Turns
from tests.fakes.models import tiny_model

DECODE = DecodeConfig(window_size=0, trie_nodes=16, max_batch_size=4, kv_tokens=2000)
PROMPTS = [[(k * 7 + 3 * i * i + i) % 97 for i in range(30)] for k in range(8)]
PARAMS = SamplingParams(max_new_tokens=40)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> list[list[int]]:
    return [done.token_ids for done in Engine.from_model(model, decode=DECODE).generate(PROMPTS, PARAMS)]


@pytest.fixture
def often() -> Iterator[None]:
    """Threads change after a tenth of a millisecond."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(interval)


def together(*works: Callable[[], Any]) -> list[Any]:
    """What functions return, or raise, that threads call at once."""
    results: list[Any] = ["hangs"] * len(works)

    def work(place: int) -> None:
        try:
            results[place] = works[place]()
        except BaseException as failure:
            results[place] = failure

    threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_four_threads_on_one_engine(model: PreTrainedModel, expected: list[list[int]], often: None) -> None:
    """They generate, stream, abort and learn at random; each answer is right, and the K/V that they leave is, too."""
    engine, end = Engine.from_model(model, decode=DECODE), time.monotonic() + 2

    def work(seed: int) -> int:
        dice, count = random.Random(seed), 0
        while time.monotonic() < end:
            k = dice.randrange(len(PROMPTS))
            match dice.randrange(5):
                case 0 | 1:
                    other = (k + 3) % len(PROMPTS)
                    done = engine.generate([PROMPTS[k], PROMPTS[other]], PARAMS)
                    assert [each.token_ids for each in done] == [expected[k], expected[other]]
                case 2:
                    ids = [token for chunk in engine.stream(PROMPTS[k], PARAMS) for token in chunk.token_ids]
                    assert ids == expected[k]
                case 3:
                    stream, taken = engine.stream(PROMPTS[k], PARAMS), []
                    for chunk in stream:
                        taken += chunk.token_ids
                        if len(taken) > 10:
                            break
                    del stream  # it aborts its request
                    assert taken == expected[k][: len(taken)]
                case 4:
                    request = engine.submit(PROMPTS[k], PARAMS)
                    engine.step()
                    engine.learn(PROMPTS[k], expected[k][::-1])
                    engine.abort(request)
                    assert request.token_ids == expected[k][: request.num_output] and request.stats
            count += 1
        return count

    counts = together(*[lambda seed=seed: work(seed) for seed in range(4)])
    assert all(type(count) is int and count > 0 for count in counts), counts
    assert [done.token_ids for done in engine.generate(PROMPTS, PARAMS)] == expected


def test_two_streams_interleave(model: PreTrainedModel, expected: list[list[int]], often: None) -> None:
    engine, order = Engine.from_model(model, decode=DECODE), list[int]()

    def read(k: int) -> list[int]:
        ids = []
        for chunk in engine.stream(PROMPTS[k], PARAMS):
            order.append(k)
            ids += chunk.token_ids
        return ids

    assert together(lambda: read(0), lambda: read(1)) == expected[:2]
    first, last = order.index(1), len(order) - order[::-1].index(0)
    assert first < last, "the second begins before the first has ended"


def test_turns_come_in_the_order_in_which_they_are_asked_for() -> None:
    """A thread that asks again at once waits for the one that has waited."""
    turns, order, started = Turns(), list[str](), threading.Event()

    def busy() -> None:
        for _ in range(50):
            with turns, turns:
                started.set()
                order.append("busy")
                time.sleep(1e-3)

    def other() -> None:
        assert started.wait(10)
        with turns:
            order.append("other")

    assert together(busy, other) == [None, None]
    assert order.index("other") < 25


def test_a_step_that_seems_to_go_on_is_over_when_its_turn_is() -> None:
    """Ctrl-C at the end of a step may leave its mark, which must not end the engine."""
    turns = Turns()
    with turns:
        turns.is_stepping = True
        with turns, pytest.raises(RuntimeError, match="within a step"):
            turns.refuse_within("step")
    with turns:
        turns.refuse_within("step")


def test_a_thread_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lpr.engine.turns, "PATIENCE", 0.05)
    turns = Turns()

    def ask() -> None:
        with turns:
            pass

    with turns:
        [failure] = together(ask)
    assert isinstance(failure, RuntimeError) and "another thread has worked on this engine" in str(failure)
    assert together(ask) == [None], "and asks again"


WITHIN: dict[str, Callable[[Engine], Any]] = {
    "generate": lambda engine: engine.generate([PROMPTS[1]], PARAMS),
    "step": lambda engine: list(engine.stream(PROMPTS[1], PARAMS)),
    "close": lambda engine: engine.close(),
    "configure": lambda engine: engine.configure(DECODE),
}


@pytest.mark.parametrize("name", WITHIN)
@pytest.mark.slow(first=2)
def test_a_step_within_a_step_is_an_error(name: str, model: PreTrainedModel, expected: list[list[int]]) -> None:
    """By a processor it ends that request; by a hook it is raised; and neither has changed anything."""
    engine = Engine.from_model(model, decode=DECODE)

    def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        WITHIN[name](engine)
        return scores

    request = engine.submit(PROMPTS[2], PARAMS)
    [done] = engine.generate([PROMPTS[0]], PARAMS, [processor])
    assert done.finish_reason == "error" and f"{name} was called within a step of the same engine" in (done.error or "")
    while not engine.is_idle:
        engine.step()
    assert request.token_ids == expected[2]

    class Hooks(StepHooks):
        def while_busy(self) -> None:
            WITHIN[name](engine)

    engine.hooks = Hooks()
    with pytest.raises(RuntimeError, match=f"{name} was called within a step"):
        engine.generate([PROMPTS[0]], PARAMS)
    engine.hooks = StepHooks()
    assert [each.token_ids for each in engine.generate(PROMPTS, PARAMS)] == expected


def test_engines_of_one_model_in_two_threads(model: PreTrainedModel, expected: list[list[int]], often: None) -> None:
    engines = [Engine.from_model(model, decode=DECODE, attention=name) for name in ("native", "sdpa")]
    runs = [lambda engine=engine: [each.token_ids for each in engine.generate(PROMPTS, PARAMS)] for engine in engines]
    assert together(*runs) == [expected, expected]


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 3, 2, 1)])
@pytest.mark.slow(first=1)
def test_threads_that_generate_with_the_drop_in(sizes: tuple[int, ...], often: None) -> None:
    """Calls that fit the kept engine share it; one of more rows waits. The model is trained between calls."""
    model = tiny_model(attention_dropout=0.3).train()
    batches = [torch.tensor(PROMPTS[k : k + size]) for k, size in enumerate(sizes)]
    how: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    model.eval()
    expected = [model.generate(ids, attention_mask=torch.ones_like(ids), **how) for ids in batches]
    model.train()

    def call(ids: torch.Tensor) -> list[torch.Tensor]:
        mask = torch.ones_like(ids)
        return [model.generate(ids, attention_mask=mask, **how, custom_generate=lpr.lookahead) for _ in range(3)]

    for found, wanted in zip(together(*[lambda ids=ids: call(ids) for ids in batches]), expected, strict=True):
        assert not isinstance(found, BaseException), found
        assert all(torch.equal(each, wanted) for each in found)
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == "sdpa"


def test_two_drop_in_streams_interleave(model: PreTrainedModel, often: None) -> None:
    """A reader that takes from both in turn does not wait for ever, with queues of one token."""
    order: list[int] = []
    meet = threading.Barrier(2, timeout=30)

    class Streamer:
        def __init__(self, k: int) -> None:
            self.k = k

        def put(self, value: torch.Tensor) -> None:
            if value.numel() == 1:
                order.append(self.k)
                if self.k < 2 and order.count(self.k) == 3:
                    meet.wait()  # each has begun before the other can end

        def end(self) -> None:
            pass

    def call(k: int) -> torch.Tensor:
        ids = torch.tensor([PROMPTS[k]])
        how: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
        how |= {"attention_mask": torch.ones_like(ids), "streamer": Streamer(k), "custom_generate": lpr.lookahead}
        return model.generate(ids, **how)

    call(2)
    order.clear()
    for found in together(lambda: call(0), lambda: call(1)):
        assert isinstance(found, torch.Tensor), found


def test_a_streamer_cannot_call_its_own_model(model: PreTrainedModel) -> None:
    ids = torch.tensor([PROMPTS[0]])
    how: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    how |= {"attention_mask": torch.ones_like(ids), "custom_generate": lpr.lookahead}
    wanted = model.generate(ids, **how)

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            if value.numel() == 1:
                model.generate(ids, **how)

        def end(self) -> None:
            pass

    with pytest.raises(InputError, match="cannot run inside another such call"):
        model.generate(ids, **how, streamer=Streamer())
    assert torch.equal(model.generate(ids, **how), wanted)
