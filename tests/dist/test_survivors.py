"""A rank dies in any collective, at any moment: the others go on, and no output changes."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from lpr import DecodeConfig, Engine, EngineOptions, InputError, SamplingParams
from lpr.dist.comm import ProcessComm, is_driver
from lpr.dist.errors import CommError
from lpr.dist.rendezvous import Results
from lpr.engine import handover
from lpr.engine.replica import Replica
from lpr.model.exact import check
from tests.fakes.adapters import ATTENTION, merged, write_adapter
from tests.fakes.elastic_world import ElasticWorld, Fault
from tests.fakes.worlds import ThreadComm, ThreadWorld, run_ranks

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


def number_of(comm: ProcessComm) -> int:
    """The number of a rank's replica in the job."""
    assert comm.membership is not None
    return comm.membership.replica


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

    def engine(self, comm: ProcessComm) -> Engine:
        return Engine.from_model(self.model, decode=self.decode, comm=comm)

    def __call__(self, comm: ProcessComm) -> None:
        engine = self.engine(comm)
        while not engine.is_stopped:
            if is_driver(comm):
                self.drive(engine, comm)
                engine.close()
            else:
                engine.work()
        comm.finish()

    def drive(self, engine: Engine, comm: ProcessComm) -> None:
        self.drivers.append(number_of(comm))
        for number in range(self.num_learns):
            engine.learn([number, number + 1, number + 2])
            self.step(engine, comm)
        for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            if number not in self.delivered and number not in engine.requests:
                engine.submit(prompt, params, id=number, tenant="ab"[number % 2])
                self.step(engine, comm)
        while not engine.is_idle:
            self.step(engine, comm)

    def step(self, engine: Engine, comm: ProcessComm) -> None:
        self.before_step(engine, comm)
        for request in engine.step():
            if request.finish_reason is not None:
                assert request.finish_reason in ("stop", "length"), request.error
                self.delivered[int(request.id)] = request.completion().token_ids
                assert len(request.logprobs) == (request.num_output if request.params.logprobs is not None else 0)
        self.widths.append(comm.size)

    def before_step(self, engine: Engine, comm: ProcessComm) -> None:
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


def run_start(model: PreTrainedModel, decode: DecodeConfig = DECODE) -> int:
    """Collectives of a start: a loss there ends the job, as nothing is lost."""
    world = ElasticWorld(3)

    def only_start(comm: ProcessComm) -> None:
        Engine.from_model(model, decode=decode, comm=comm)

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
    assert span[1] - span[0] > 12, "enough places to die at"


def test_a_rank_dies_anywhere(llama: PreTrainedModel, expected: list[list[int]], span: tuple[int, int]) -> None:
    """Whoever dies, in whichever collective, and whoever has its result: the survivors deliver the same tokens."""
    faults = every_fault(*span)
    for fault in sample(faults, 10):
        job = Job(llama)
        world = run(job, fault)
        assert texts(job) == expected, fault
        assert world.died == {fault.victim}, fault
        if fault.index < span[1] - 2:  # the last ones spread Stop, after which nobody needs a driver
            assert job.drivers == ([0, 1] if fault.victim == 0 else [0]), fault


def test_a_second_rank_dies_while_the_first_is_mourned(
    llama: PreTrainedModel, expected: list[list[int]], span: tuple[int, int]
) -> None:
    """The survivors of a loss lose another one in the first collectives of their new mesh, or finish alone."""
    middle = sum(span) // 2
    for later in range(2):
        for victim in range(2):
            some = frozenset({1 - victim}) if later else frozenset()
            faults = Fault(0, middle, 0, True, frozenset({2})), Fault(1, later, victim, bool(later), some)
            job = Job(llama)
            run(job, *faults)
            assert texts(job) == expected, faults


def test_idle_ranks_lose_their_driver(llama: PreTrainedModel, expected: list[list[int]], span: tuple[int, int]) -> None:
    """Commands without steps: idle ranks are handed what they missed, and many of them in a row are confirmed."""
    first = span[0]
    some = frozenset({2})
    for fault in (
        Fault(0, first + 3, 0),
        Fault(0, first + 3, 0, True, some),
        Fault(0, first + 20, 0, True, some),
        Fault(0, first + 4, 1, True),  # the driver lives, and says it again
        Fault(0, first + 4, 1, True, some),
        Fault(0, first + 16, 1),  # about where they confirm
    ):
        job = Job(llama, num_learns=40)
        world = run(job, fault)
        assert texts(job) == expected, fault
        assert world.died == {fault.victim} and job.drivers == ([0] if fault.victim else [0, 1]), fault


class JoinedJob(Job):
    """Starts replicas that join once the others have come to some step, one after the other."""

    world: ElasticWorld
    joiners: tuple[int, ...] = (2, 3)
    started: tuple[int, ...] = ()

    def before_step(self, engine: Engine, comm: ProcessComm) -> None:
        assert comm.membership is not None
        while (beside := comm.membership._beside) is not None and not beside.is_over:
            time.sleep(0.001)
        waiting = [each for each in self.started if each not in comm.replicas]
        if any(self.world.rendezvous(each).dead_reason(each) is None for each in waiting):
            return
        if self.joiners and len(self.widths) >= 3:
            joiner, *rest = self.joiners
            self.joiners, self.started = tuple(rest), (*self.started, joiner)
            self.world.start(joiner, self, joins=True)
            rendezvous = self.world.rendezvous(joiner)
            while not rendezvous.is_ready(rendezvous.member):
                pass
            rendezvous.offer([joiner])


@pytest.mark.parametrize(
    "fault, home_ranks",
    [(None, "auto"), (Fault(1, 0, 0), 0), (Fault(1, 2, 1), "auto"), (Fault(1, 1, 2), 0), (Fault(2, 1, 0), "auto")],
)
def test_replicas_join_a_running_mesh(
    llama: PreTrainedModel, expected: list[list[int]], fault: Fault | None, home_ranks: Any
) -> None:
    """They begin with the others' requests and none of their K/V; losses right after change nothing either."""
    job = JoinedJob(llama, replace(DECODE, home_ranks=home_ranks))
    world = job.world = ElasticWorld(2, *([fault] if fault is not None else []))
    for replica in range(2):
        world.start(replica, job)
    world.join()
    assert texts(job) == expected
    assert max(job.widths) == 4 if fault is None else max(job.widths) >= 3, job.widths
    assert world.num_beside == 7 if fault is None else world.num_beside >= 3, "ranks of a group connected beforehand"


@pytest.mark.parametrize("is_told", [True, False])
def test_a_newcomer_has_its_cache_before_the_mesh_waits_for_it(
    llama: PreTrainedModel, expected: list[list[int]], is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU it also captures its steps there: the first gather of the new mesh would wait for all of them."""
    kept: list[bool] = []
    resume = handover.resume

    def noted(replica: Replica, data: bytes) -> None:
        before = replica.model.cache
        resume(replica, data)
        kept.append(before is not None and replica.model.cache is before)

    monkeypatch.setattr(handover, "resume", noted)
    if not is_told:
        monkeypatch.setattr(handover, "tell_newcomers", lambda replica: None)
    job = JoinedJob(llama, DECODE)
    world = job.world = ElasticWorld(2)
    for replica in range(2):
        world.start(replica, job)
    world.join()
    assert texts(job) == expected and kept == [is_told] * 2


@pytest.mark.parametrize("is_same", [True, False])
def test_tp_ranks_that_a_change_of_sizes_finds_apart_make_their_caches_later(
    llama: PreTrainedModel, is_same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, applied = handover.SetUp.of(Engine.from_model(llama, decode=DECODE).replica), list[int]()
    monkeypatch.setattr(handover.SetUp, "apply", lambda self, replica: applied.append(self.num_pages))

    def program(comm: ThreadComm) -> bytes | None:
        mine = msgspec.structs.replace(known, num_pages=7 if is_same else 7 + comm.tp_rank)
        comm.membership = SimpleNamespace(set_up=msgspec.msgpack.encode(mine), await_welcome=lambda serves: b"state")  # type: ignore
        return handover.await_welcome(SimpleNamespace(comm=comm))  # type: ignore[arg-type]

    assert run_ranks(ThreadWorld(2, tp=2), program) == [b"state"] * 2
    assert applied == ([7, 7] if is_same else [])


class AdaptedJob(JoinedJob):
    """The driver loads an adapter, and every second request has it."""

    folder: Path

    def drive(self, engine: Engine, comm: ProcessComm) -> None:
        self.drivers.append(number_of(comm))
        loading = engine.load_adapter("a", self.folder)
        while not loading.done():
            self.step(engine, comm)
        for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            if number not in self.delivered and number not in engine.requests:
                engine.submit(prompt, params, id=number, adapter="a" if number % 2 else None)
                self.step(engine, comm)
        while not engine.is_idle:
            self.step(engine, comm)


@pytest.mark.parametrize("joins", [False, True])
def test_adapters_outlive_ranks_and_reach_those_that_join(
    llama: PreTrainedModel, expected: list[list[int]], span: tuple[int, int], tmp_path: Path, joins: bool
) -> None:
    """Ranks die while an adapter is loaded and later; others join while requests have it."""
    folder = write_adapter(tmp_path, llama, [*ATTENTION, "up_proj"])
    adapted = Engine.from_model(merged(llama, folder), decode=DECODE).generate(PROMPTS, PARAMS)
    wanted = [adapted[number].token_ids if number % 2 else ids for number, ids in enumerate(expected)]
    assert wanted != expected
    faults = [None] if joins else [Fault(0, span[0] + index, index % 3, index > 5) for index in range(0, 9, 2)]
    for fault in faults:
        job = AdaptedJob(llama)
        job.folder, job.joiners = folder, (3, 4) if joins else ()
        world = job.world = ElasticWorld(3, *([fault] if fault is not None else []))
        for replica in range(3):
            world.start(replica, job)
        world.join()
        assert texts(job) == wanted, fault
        assert max(job.widths) == 5 if fault is None else world.died == {fault.victim}


class UnlikeJob(JoinedJob):
    """Replica 2 has something else than those that it would join."""

    joiners = (2,)
    exact = False

    def change(self, patch: pytest.MonkeyPatch) -> None:
        """What is unlike on replica 2."""

    def engine(self, comm: ProcessComm) -> Engine:
        with pytest.MonkeyPatch.context() as patch:
            if number_of(comm) == 2:
                self.change(patch)
            options = EngineOptions(exact=self.exact)
            return Engine.from_model(self.model, decode=self.decode, comm=comm, options=options)

    def before_step(self, engine: Engine, comm: ProcessComm) -> None:
        if len(self.widths) == 3 and self.joiners:
            self.joiners = ()
            self.world.start(2, self, joins=True)
            self.world.await_end(2)


def another_processor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")


def other_bits(patch: pytest.MonkeyPatch) -> None:
    find = check.find_gemm_rows
    patch.setattr(check, "find_gemm_rows", lambda model: replace(find(model), bits=7))


def other_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("lpr.engine.prepare.model_digest", lambda model: 7)


@pytest.mark.parametrize(
    "change, exact, why",
    [
        (another_processor, True, "another kind of processor or version of torch (exact mode needs one of all ranks)"),
        (other_bits, True, "another result of matrix products (exact mode needs the same bits of all ranks)"),
        (other_weights, False, "another model"),
    ],
)
def test_a_newcomer_unlike_the_others_is_refused(
    change: Callable[[pytest.MonkeyPatch], None],
    exact: bool,
    why: str,
    llama: PreTrainedModel,
    expected: list[list[int]],
) -> None:
    """By name, before it is ready."""
    job = UnlikeJob(llama)
    job.change, job.exact = change, exact  # type: ignore[method-assign]
    world = job.world = ElasticWorld(2)
    for replica in range(2):
        world.start(replica, job)
    with pytest.raises(InputError) as refused:
        world.join()
    assert list(world.failures) == [2] and str(refused.value) == f"replica 2 cannot join: it has {why} than the mesh"
    assert texts(job) == expected and set(job.widths) == {2}, "those that run do not notice"


def test_replicas_that_were_all_lost_begin_anew(llama: PreTrainedModel, expected: list[list[int]]) -> None:
    """One that has loaded is the first of a new mesh; who has what was delivered submits the rest."""
    job = Job(llama)
    world = run(job, Fault(0, 12, 0), Fault(1, 0, 0), num_replicas=2)
    assert job.delivered == {} or texts(job) != expected
    world.start(2, job, joins=True)
    rendezvous = world.rendezvous(2)
    while not rendezvous.is_ready(rendezvous.member):
        pass
    world.found(2, 2)
    world.join()
    assert texts(job) == expected and job.drivers == [0, 1, 2]


class FailingJob(Job):
    """Replica 1 runs out of memory in the middle."""

    def __call__(self, comm: ProcessComm) -> None:
        if number_of(comm) != 1:
            super().__call__(comm)
            return
        engine = Engine.from_model(self.model, decode=self.decode, comm=comm)
        evaluate, calls = engine.model.evaluate, itertools.count()

        def out_of_memory(*arguments: object) -> object:
            if next(calls) == 6:
                raise MemoryError("no memory left on this rank")
            return evaluate(*arguments)  # type: ignore[arg-type]

        engine.model.evaluate = out_of_memory  # type: ignore[method-assign,assignment]
        engine.work()


def test_an_exception_in_one_rank_is_that_ranks_loss(llama: PreTrainedModel, expected: list[list[int]]) -> None:
    job = FailingJob(llama)
    world = ElasticWorld(3)
    for replica in range(3):
        world.start(replica, job)
    with pytest.raises(MemoryError, match="on this rank"):
        world.join()
    assert list(world.failures) == [1]
    assert texts(job) == expected and set(job.widths) == {2, 3}


# Seeded faults: each must be caught by the tests above.


def broken(
    llama: PreTrainedModel, expected: list[list[int]], span: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Does some loss in the middle change an output, or end a survivor?"""
    monkeypatch.setattr("tests.fakes.elastic_world.WAIT", 5.0)
    for index in range(span[0] + 8, span[0] + 14):
        job = Job(llama)
        try:
            run(job, Fault(0, index, 1, True, frozenset({0})))
        except Exception:
            return True
        if texts(job) != expected:
            return True
    return False


def test_mutant_results_are_not_handed_over(
    llama: PreTrainedModel, expected: list[list[int]], span: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Results, "take", lambda *_: None)
    assert broken(llama, expected, span, monkeypatch)


def test_mutant_counts_of_the_old_mesh_stay(
    llama: PreTrainedModel, expected: list[list[int]], span: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lpr.sched.placement.regrouped", lambda counts, kept: list(counts))
    assert broken(llama, expected, span, monkeypatch)


def test_mutant_ranks_take_on_the_mesh_in_the_middle_of_a_step(
    llama: PreTrainedModel, expected: list[list[int]], span: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shards of the old mesh, and the places of the new one."""
    monkeypatch.setattr(ProcessComm, "rank", property(lambda self: self.membership.replicas.index(number_of(self))))
    monkeypatch.setattr(ProcessComm, "size", property(lambda self: len(self.membership.replicas)))
    assert broken(llama, expected, span, monkeypatch)


LONG = [replace(params, max_new_tokens=30) for params in PARAMS]


class CrowdedJob(Job):
    """All requests at once, in a pool that holds two of them."""

    num_preemptions = 0

    def drive(self, engine: Engine, comm: ProcessComm) -> None:
        for number, (prompt, params) in enumerate(zip(PROMPTS, LONG, strict=True)):
            if number not in self.delivered and number not in engine.requests:
                engine.submit(prompt, params, id=number)
        while not engine.is_idle:
            self.step(engine, comm)
            self.num_preemptions = max(self.num_preemptions, engine.scheduler.counts.preemptions)


def test_a_rank_dies_where_pages_run_out(llama: PreTrainedModel) -> None:
    """Preempted requests, some of them with pages in host memory, go on with the survivors."""
    plain = Engine.from_model(llama, decode=DecodeConfig.autoregressive())
    expected = [done.token_ids for done in plain.generate(PROMPTS, LONG)]
    decode = replace(DECODE, kv_tokens=112, max_batch_size=4, home_ranks=0)
    world = run(job := CrowdedJob(llama, decode))
    assert texts(job) == expected and job.num_preemptions > 0
    start, last = run_start(llama, decode), world.num_collectives["epoch/0"]
    for fault in sample(every_fault(start, last), 2):
        run(job := CrowdedJob(llama, decode), fault)
        assert texts(job) == expected, fault


class DraftedJob(JoinedJob):
    """The last of three replicas only drafts."""

    def engine(self, comm: ProcessComm) -> Engine:
        engine = Engine.from_model(self.model, decode=self.decode, comm=comm, draft_ranks=1)
        assert (engine.replica.drafting is not None) == (number_of(comm) % 3 == 2)
        return engine

    def drive(self, engine: Engine, comm: ProcessComm) -> None:
        assert engine.replica.drafting is None, "it gives no step times, and has no model to describe"
        super().drive(engine, comm)


@pytest.mark.parametrize(
    "joiners, faults",
    [
        ((5,), [(0, 3, 2)]),
        ((3,), [(0, 6, 0)]),
        ((5, 8), [(0, 3, 2), (2, 1, 2)]),
        ((3,), [(0, 2, 0), (2, 3, 0)]),
    ],
)
def test_draft_ranks_are_lost_and_replaced(
    llama: PreTrainedModel, expected: list[list[int]], joiners: tuple[int, ...], faults: list[tuple[int, int, int]]
) -> None:
    """A lost draft rank costs no token, nor does a lost one beside it; a replacement has the same role.

    Each fault is an epoch, a collective of it and its victim. In some of these runs the last replica comes with the
    command that ends the job, and is not taken in: the others waited for it, and it for a command.
    """
    job, world = run_drafted(llama, joiners, faults)
    world.join()
    assert texts(job) == expected and len(world.died) == len(faults)
    assert max(job.widths) >= 3


def run_drafted(
    model: PreTrainedModel, joiners: tuple[int, ...], faults: list[tuple[int, int, int]]
) -> tuple[DraftedJob, ElasticWorld]:
    """A job of three replicas that has begun; collectives of epoch 0 are counted from the end of its start."""
    job, start = DraftedJob(model), ElasticWorld(3)

    def only_start(comm: ProcessComm) -> None:
        job.engine(comm)

    for replica in range(3):
        start.start(replica, only_start)
    start.join()
    job.joiners, first = joiners, start.num_collectives["epoch/0"]
    at = [Fault(epoch, index + (0 if epoch else first), victim) for epoch, index, victim in faults]
    world = job.world = ElasticWorld(3, *at)
    for replica in range(3):
        world.start(replica, job)
    return job, world


def test_a_draft_rank_without_ranks_that_serve_leaves(llama: PreTrainedModel, expected: list[list[int]]) -> None:
    """Its job is lost as one without replicas is: the first replacement that serves begins anew, a draft rank joins."""
    job, world = run_drafted(llama, (), [(0, 6, 0), (1, 3, 0)])
    with pytest.raises(CommError, match="all ranks that hold the model are lost"):
        world.join()
    assert list(world.failures) == [2] and len(job.delivered) < len(PROMPTS)
    world.failures.clear()
    for replica in (5, 3):
        world.start(replica, job, joins=True)
        rendezvous = world.rendezvous(replica)
        while not rendezvous.is_ready(rendezvous.member):
            pass
        assert rendezvous.only_drafts(rendezvous.member) == (replica == 5)
    world.rendezvous(5).offer([5])
    world.found(3, 3)
    world.join()
    assert texts(job) == expected and job.drivers == [0, 1, 3] and job.widths[-1] == 2
