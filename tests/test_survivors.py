"""A rank dies in any collective, at any moment: the others go on, and no output changes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from transformers import PreTrainedModel

from lpr import DecodeConfig, Engine, SamplingParams
from lpr.dist.comm import is_driver
from lpr.dist.elastic import ElasticComm
from tests.elastic_world import ElasticWorld, Fault

PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9, 3, 9, 3, 9], list(range(10, 40)), [1, 2, 3, 1, 2]]
PARAMS = [
    SamplingParams(max_new_tokens=10),
    SamplingParams(max_new_tokens=7, temperature=0.8, seed=3, logprobs=1),
    SamplingParams(max_new_tokens=6, repetition_penalty=1.2, stop_token_ids=(11,)),
    SamplingParams(max_new_tokens=5, temperature=0.8, seed=5),
]
DECODE = DecodeConfig(window_size=0, trie_nodes=8, max_batch_size=2, prefill_chunk=8, branch_length=4)


@pytest.fixture(scope="module")
def expected(llama: PreTrainedModel) -> list[list[int]]:
    engine = Engine.from_model(llama, decode=DECODE)
    return [each.token_ids for each in engine.generate(PROMPTS, PARAMS)]


class Job:
    """All prompts on ranks that may die: whoever is the driver submits what is missing, as a front would."""

    def __init__(self, model: PreTrainedModel, decode: DecodeConfig = DECODE, num_learns: int = 0) -> None:
        self.model = model
        self.decode = decode
        self.num_learns = num_learns
        self.delivered: dict[int, list[int]] = {}
        self.drivers: list[int] = []
        self.widths: list[int] = []
        self.num_joined = 0

    def __call__(self, comm: ElasticComm) -> None:
        engine = Engine.from_model(self.model, decode=self.decode, comm=comm)
        while not engine.is_stopped:
            if is_driver(comm):
                self.drive(engine, comm)
                engine.close()
            else:
                engine.work()
        comm.finish()

    def drive(self, engine: Engine, comm: ElasticComm) -> None:
        self.drivers.append(comm._replica)
        for number in range(self.num_learns):
            engine.learn([number, number + 1, number + 2])
            self.step(engine, comm)
        for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            if number not in self.delivered and number not in engine.requests:
                engine.submit(prompt, params, id=number)
                self.step(engine, comm)
        while not engine.is_idle:
            self.step(engine, comm)

    def step(self, engine: Engine, comm: ElasticComm) -> None:
        self.before_step(engine, comm)
        for request in engine.step():
            if request.finish_reason is not None:
                assert request.finish_reason in ("stop", "length"), request.error
                self.delivered[int(request.id)] = request.completion().token_ids
                assert len(request.logprobs) == (request.num_output if request.params.logprobs is not None else 0)
        self.widths.append(comm.size)

    def before_step(self, engine: Engine, comm: ElasticComm) -> None:
        """Nothing more."""


def run(job: Job, *faults: Fault, num_replicas: int = 3) -> ElasticWorld:
    world = ElasticWorld(num_replicas, *faults)
    for replica in range(num_replicas):
        world.start(replica, job)
    world.join()
    return world


def every_fault(first: int, last: int, num_ranks: int = 3) -> list[Fault]:
    """Each way in which one of `num_ranks` ranks can die in the collectives from `first` to `last`."""
    found = []
    for index, victim in itertools.product(range(first, last), range(num_ranks)):
        found.append(Fault(0, index, victim))
        others = [rank for rank in range(num_ranks) if rank != victim]
        for count in range(num_ranks):
            found += [Fault(0, index, victim, True, frozenset(some)) for some in itertools.combinations(others, count)]
    return found


def texts(job: Job) -> list[list[int]]:
    return [job.delivered[number] for number in sorted(job.delivered)]


@pytest.fixture(scope="module")
def span(llama: PreTrainedModel) -> tuple[int, int]:
    """The collectives of a job that nothing disturbs, from the end of its start on."""
    job = Job(llama)
    world = run(job)
    first = run_start(llama)
    return first, world.num_collectives["epoch/0"]


def run_start(model: PreTrainedModel) -> int:
    """Collectives of a start: a loss there ends the job, as nothing is lost."""
    world = ElasticWorld(3)

    def only_start(comm: ElasticComm) -> None:
        Engine.from_model(model, decode=DECODE, comm=comm)

    for replica in range(3):
        world.start(replica, only_start)
    world.join()
    return world.num_collectives["epoch/0"]


def sample(items: Sequence[Fault], count: int) -> list[Fault]:
    return random.Random(13).sample(list(items), min(count, len(items)))


def test_an_undisturbed_job(llama: PreTrainedModel, expected: list[list[int]], span: tuple[int, int]) -> None:
    job = Job(llama)
    run(job)
    assert texts(job) == expected
    assert job.drivers == [0] and set(job.widths) == {3}
    assert span[1] - span[0] > 15, "enough places to die at"


def test_a_rank_dies_anywhere(llama: PreTrainedModel, expected: list[list[int]], span: tuple[int, int]) -> None:
    """Whoever dies, in whichever collective, and whoever has its result: the survivors deliver the same tokens."""
    faults = every_fault(*span)
    for fault in sample(faults, 60):
        job = Job(llama)
        world = run(job, fault)
        assert texts(job) == expected, fault
        assert world.died == {fault.victim}, fault
        assert job.drivers == ([0, 1] if fault.victim == 0 else [0]), fault
