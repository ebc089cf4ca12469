"""The replicated state of a job, the same on every rank, and its transitions.

Every rank applies the same commands after the same step. A step is schedule, run, update; of these only `run` depends
on the rank, by the shard that the rank evaluates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from lpr.config import DecodeConfig, TreeSizes
from lpr.core.passes import Passes
from lpr.core.step_times import StepTimes
from lpr.dist.comm import Comm, is_alone, is_driver
from lpr.dist.errors import CommError, MeshChangedError, first_line
from lpr.engine import handover
from lpr.engine.adapters import Adapters
from lpr.engine.ahead import begin_passes, count_passes, passes_ms
from lpr.engine.build import Parts, allocate, tree_sizes
from lpr.engine.commands import Command, Compile, Configure, Costs, Drain, Learn, LoadAdapter, TakeIn, UnloadAdapter
from lpr.engine.draft_rank import DraftRank
from lpr.engine.drafts import DraftIndexes
from lpr.engine.exchange import Exchange
from lpr.engine.hooks import StepHooks
from lpr.engine.kv_pool import DEFAULT_LENGTH, PoolSize, follow
from lpr.engine.options import EngineOptions
from lpr.engine.outcomes import Outcomes
from lpr.engine.overlap import Overlap
from lpr.engine.pace import Pace
from lpr.engine.plan import Batch, StepPlan
from lpr.engine.prepare import longest_sequence, prepare
from lpr.engine.request import Request
from lpr.engine.requests import RequestTable
from lpr.engine.sizing import Sizer
from lpr.engine.step import Begun, StepResult, begin_step, end_step
from lpr.engine.times_file import StartTimes
from lpr.engine.turns import Turns
from lpr.model.loader import Loaded
from lpr.model.watch import Watch
from lpr.native import SequenceState
from lpr.protocol import Abort, RequestId, Stop, Submit
from lpr.sched.limits import SHORTEST_FILL
from lpr.sched.scheduler import Schedule, Scheduler


class Replica(StepHooks):
    """A model, its requests and their draft sources: the same on every rank, except for the K/V that a rank holds."""

    scheduler: Scheduler[Request]
    drafts: DraftIndexes
    exchange: Exchange
    decode: DecodeConfig
    sizes: TreeSizes
    max_length: int  # most tokens of a sequence, prompt included
    memory: str | None = None  # the use of a GPU's memory, as one line

    def __init__(self, loaded: Loaded, decode: DecodeConfig, options: EngineOptions, comm: Comm) -> None:
        """Prepare and check a loaded model on all ranks of `comm`; a Configure command then creates the other parts."""
        self.loaded, self.options, self.comm = loaded, options, comm
        self.hooks = StepHooks()
        self.is_draining = False  # True if further requests are refused
        self.closed: RuntimeError | None = None  # of further calls: the driver has ended the job, or this rank failed
        self.is_whole = True
        """False while requests, their pages or their K/V change: an exception then leaves them inconsistent."""
        self.advanced: list[Request] = []  # those with new tokens and those that ended, since `take_advanced`
        self.new_times: StepTimes | None = None  # on the driver, after a step: those to send to all ranks, if changed
        self.sizer = Sizer(TreeSizes(), None, comm)
        self.pace: Pace | None = None  # decides when a prediction head rests, with automatic sizes
        self._timed: tuple[Sequence[Request], Outcomes, float, float, float] | None = None
        """The last step, its milliseconds, those without guesses, and those of the replica's first rank."""
        self._batch: Batch | None = None  # of the last step; none of its requests has ended
        self.begun: tuple[Schedule[Request], Begun] | None = None  # the next step, if it is begun (`go_on`)
        self.drafting: DraftRank | None = None  # the drafter of a draft-only rank
        self.model, self.like, given = prepare(loaded, decode, options, comm)
        self.parts = Parts(loaded, options, self.model, self.like)
        self.start_times = StartTimes(given, comm)
        self.turns = Turns()  # the lock of all threads that change this replica or read its requests
        self.requests = RequestTable(loaded.tokenizer, loaded.eos_token_ids, self.model.device, self.turns)
        self.adapters = Adapters(self.model if comm.serves else None)
        self.watch = Watch(self.model)

    def check_open(self) -> None:
        """Raise `closed`, if the engine takes no further step."""
        if self.closed is not None:
            raise self.closed.with_traceback(None)

    # Commands.

    def apply(self, command: Command) -> None:
        """Execute a command; every rank applies the same commands after the same step."""
        match command:
            case Submit():
                self._submit(command)
            case Abort():
                self._abort(command.id)
            case Learn():
                self.drafts.learn(command)
            case Compile():
                self.requests.compile(command.grammar, self.model.vocab_size)
            case LoadAdapter():
                self._with_survivors(lambda: self.adapters.load(command, self.comm))
                self.adapters.sweep(self.requests.open.values())
            case UnloadAdapter():
                self.adapters.unload(command.name, self.requests.open.values())
            case Costs():
                times = StepTimes.from_json(command.table)
                if command.given:
                    self.start_times.times, self.start_times.follows = times, False
                else:
                    self.sizer.times = times
            case Configure():
                self._with_survivors(lambda: self._configure(command.decode, command.keep_drafts))
            case TakeIn():
                handover.take_in(self, command)
            case Drain():
                self.is_draining = True
            case Stop():
                for id in list(self.requests.open):
                    self._abort(id)
                self.closed = RuntimeError("the engine is closed")

    def _submit(self, command: Submit) -> None:
        self.is_whole = False
        request = self.requests.submit(command)
        if request.adapter and request.adapter not in self.adapters.loaded:
            request.error = "its adapter was unloaded before it began"
            self._end(request, "error")
        elif request.finish_reason is not None or self.is_draining:  # the delivered tokens may end it already
            self._end(request, request.finish_reason or "abort")
        else:
            self.scheduler.add(request)
        self.is_whole = True

    def _abort(self, id: RequestId) -> None:
        request = self.requests.open.get(id)
        if request is None:
            return
        self.is_whole = False
        if request.state is None:
            self.scheduler.withdraw(request)
        else:
            request.collect()
            self._release([request])
        self._end(request, "abort")
        self.is_whole = True

    def _end(self, request: Request, reason: str) -> None:
        request.end(reason)
        self.requests.open.pop(request.id, None)
        self.advanced.append(request)

    # A step.

    def schedule(self) -> Schedule[Request]:
        """Admit waiting requests to free slots; returns the work of the running requests in the next step.

        The step that is begun already, if there is one. Raises InputError if the model's weights have changed in a way
        that this engine does not support.
        """
        if self.begun is not None:
            return self.begun[0]
        self.is_whole = False
        self.adapters.sweep(self.requests.open.values())
        if self.watch.hints or (self.scheduler.waiting and not self.scheduler.running):
            self.follow_model()
        admits = self.overlap.admits(self.scheduler)
        while admits and (admitted := self.scheduler.admit()) is not None:
            request, computed = admitted
            request.state = self.new_state(request, computed)
        schedule = self.scheduler.schedule()
        for request in self.scheduler.looked_at:
            request.running.care_at = self.scheduler.care_at(request)
        for request in schedule.preempted:
            request.collect()
            request.state = None
        self._move()
        self.is_whole = True
        return schedule

    def follow_model(self) -> None:
        """If the model's weights have changed: drop all K/V, and end requests that have some with an error."""
        changed = self.watch.has_changed()
        self.model.adapter.trains = self.watch.trains
        if not changed:
            return
        for request in list(self.scheduler.running):
            request.collect()
            request.error = "the model's weights have changed while this request was decoded"
            self._release([request])
            self._end(request, "error")
        self.scheduler.placement.forget()
        if self.drafting is not None:
            self.drafting.forget()

    def run(self, schedule: Schedule[Request], num_command_bytes: int) -> StepResult:
        """Take the scheduled step, whose header announces `num_command_bytes` on the driver."""
        begun = self.begun[1] if self.begun is not None else self._begin(schedule, num_command_bytes)
        self.begun = None
        result = end_step(begun, self.model, self.exchange, self.sizer.budgets, self)
        if result.outcomes:
            self.sizer.end_step(result.outcomes.num_entries)
        self.scheduler.pass_step(schedule, result.outcomes.num_entries)
        if result.outcomes and result.ms is not None and not schedule.filling:
            own_ms = step_ms = result.ms - self.model.guess_ms
            if self.comm.tp_size > 1:
                own_ms = result.replica_ms - passes_ms(self.model)
            self._timed = schedule.decoding, result.outcomes, result.ms, step_ms, own_ms
        return result

    def go_on(self) -> None:
        """Begin the next step at the end of this one's call, unless the host waits for its logits within the step."""
        running, overlap = self.scheduler.running, self.overlap
        # A step that is launched already keeps the device busy.
        if not overlap.begins_early or overlap.launched is not None or not running or self.watch.hints:
            return
        if (self._batch or Batch(running, 1)).chooses_on_device and not (schedule := self.schedule()).is_empty:
            self.begun = schedule, self._begin(schedule, is_early=True)

    def _begin(self, schedule: Schedule[Request], num_command_bytes: int = 0, is_early: bool = False) -> Begun:
        """Draft and launch the scheduled step."""
        self.new_times, self.model.guess_ms = None, 0.0
        self.hooks.begin_step()
        spent_ms = passes_ms(self.model) if is_alone(self.comm) else 0.0
        if self._batch is None or self._batch.requests is not schedule.decoding:
            self._batch = Batch(schedule.decoding, self.comm.size)
        others = self.scheduler.others(schedule.decoding)
        self.sizer.begin_step(self._batch.states, schedule.filling, others, spent_ms)
        if self.drafting is None:
            begin_passes(self.model, schedule.decoding, self.sizer.times)
        assert self.model.cache is not None
        self.model.cache.adapters = self.adapters.of_slots(self.scheduler.running, self.comm.rank)
        # Includes the length of the shared index, which detects a rank that has learned other documents.
        digest = (self.scheduler.placement.digest + len(self.drafts.shared)) % 2**64
        what = self._batch, schedule.filling, self.sizes, self.sizer.times, digest, self.drafting, num_command_bytes
        parts = self.model, self.exchange, self.sizer.budgets, self.overlap
        return begin_step(StepPlan(*what), *parts, self, is_early)

    def end_phase(self, phase: str) -> None:
        """As StepHooks.end_phase."""
        self.hooks.end_phase(phase)
        if phase == "gather":  # after this a step can no longer be dropped
            self.is_whole = False

    def while_busy(self) -> None:
        """Do the deferred work of the last step; no later decision of this step depends on it."""
        self.is_whole = False
        if self._timed is not None:
            batch, outcomes, ms, step_ms, own_ms = self._timed
            if self.pace is not None:
                self.pace.steer(self.model, outcomes, ms)
            if self.drafting is None:
                count_passes(self.model, outcomes, own_ms, self.sizes.num_nodes)
            # The time of a head or copy does not depend on the tree; counted in, it would raise the price of all nodes.
            self.new_times, self._timed = self.sizer.observe(batch, outcomes, step_ms), None
        Request.require_whole(self.turns.changing)
        self.is_whole = True
        self.hooks.while_busy()

    def update(self, schedule: Schedule[Request], outcomes: Outcomes) -> None:
        """Pass a step's results to its requests; finished ones release their slots."""
        batch = schedule.decoding
        for request, _ in schedule.filling:
            request.stats.num_fill_steps += 1
        ended = Request.advance(batch, outcomes)
        self.advanced += batch
        if batch:
            self.hooks.end_step(batch, outcomes, (request.chunks[-1] for request in batch))
        self.scheduler.end_step([batch[index] for index in outcomes.concluded.grown])
        self._release(ended)
        for request in ended:
            del self.requests.open[request.id]
        self.is_whole = True

    def recover(self, failure: BaseException) -> None:
        """After an exception that left the state inconsistent: end the running requests, and drop all K/V.

        Waiting requests stay in the queue. If this is interrupted, it can be called again.
        """
        table, cache = self.requests, self.model.cache
        assert cache is not None
        running = [each for each in table.open.values() if each.state is not None or each.finish_reason is not None]
        self._abandon(running, failure)
        self.scheduler.begin_anew(list(table.open.values()))
        cache.clear_all()
        self._timed = self._batch = self.begun = self.overlap.launched = None
        self.is_whole = True

    def abandon_all(self, failure: BaseException) -> None:
        """End all requests after an exception with which this rank leaves the job."""
        self._abandon([*self.requests.open.values(), *self.requests.announced.values()], failure)

    def _abandon(self, requests: Iterable[Request], failure: BaseException) -> None:
        error = None
        if isinstance(failure, Exception):  # a BaseException ends the program or the call
            error = f"an exception ended its step: {type(failure).__name__}: {first_line(failure)}"
        for request in requests:
            request.abandon(error)
            self.advanced.append(request)
            self.requests.open.pop(request.id, None)
            self.requests.announced.pop(request.id, None)

    def take_advanced(self) -> list[Request]:
        """The requests with new tokens and those that ended, since the last call."""
        advanced, self.advanced = dict.fromkeys(self.advanced), []
        return list(advanced)

    def new_state(self, request: Request, computed: Sequence[int]) -> SequenceState:
        """The decoding state of a request that starts with `computed` tokens' K/V per rank."""
        source, stop_ids = self.drafts.source(request, self.scheduler.running), request.text_stream.stop_ids
        known = request.tokens, request.params, self.sizes, self.comm.size, source, computed
        state = SequenceState(*known, request.longest, stop_ids, request.prediction, request.num_prompt)
        state.homes = request.homes
        return state

    def _release(self, requests: Sequence[Request]) -> None:
        """Learn the output of requests, and release their pages."""
        for request in requests:
            if self.sizes.trie_nodes:
                self.drafts.learn_output(request, self.scheduler.running)
            self.scheduler.finish(request, keep=request.is_sound)
            request.state = self._batch = None
        if requests:
            self._move()
        if not self.scheduler.running:
            self.overlap.launched = None

    def _move(self) -> None:
        """Apply the scheduler's page moves to this rank's cache."""
        cache, rank = self.model.cache, self.comm.rank
        assert cache is not None
        follow(cache, self.scheduler.take_moves()[rank], self.scheduler.placement.take_tables(rank))

    # Configuration.

    def _configure(self, decode: DecodeConfig, keep_drafts: bool) -> None:
        if self.sizer.times is not None:
            self.start_times.times = self.sizer.times
        times = None
        if decode.adaptive:
            longest = longest_sequence(self.loaded, decode) or DEFAULT_LENGTH
            limits = decode.max_nodes, min(longest, DEFAULT_LENGTH), decode.max_batch_size
            times = self.start_times.find(self.model, self.like, *limits)
        self.set_up(decode, tree_sizes(self.parts, decode, self.comm, times), times, self.comm, keep_drafts)
        handover.tell_newcomers(self)

    def _with_survivors(self, action: Callable[[], None]) -> None:
        """Run a collective action; if a rank is lost in it, the remaining ranks run it again."""
        while True:
            try:
                return action()
            except MeshChangedError:
                self.adopt_mesh()

    def set_up(
        self,
        decode: DecodeConfig,
        sizes: TreeSizes,
        times: StepTimes | None,
        comm: Comm,
        keep_drafts: bool = False,
        given: PoolSize | None = None,
    ) -> None:
        """Create everything whose size depends on `decode`; raises InputError on all ranks of `comm` if one lacks room.

        `given` is the pool's size in a running mesh, for a rank that joins.
        """
        self.decode, self.sizes = decode, sizes
        if not keep_drafts or self.drafts.capacity_tokens != sizes.trie_capacity:
            self.drafts = DraftIndexes(sizes.trie_capacity)
        built = allocate(self.parts, decode, sizes, times, self.comm, comm, given)
        self.max_length, self.memory = built.max_length, built.memory
        self.scheduler = Scheduler(built.limits)
        self._fit_mesh(times)
        if not self.comm.serves:
            self.drafting = DraftRank(self.model, self.comm)
        else:
            self.model.prepare(sizes.num_recycled, show=is_driver(self.comm))

    def _fit_mesh(self, times: StepTimes | None) -> None:
        """Create everything that depends on the number of ranks; `times` are None if sizes are fixed."""
        limits, num_serving, num_slots = self.scheduler.limits, self.comm.num_serving, self.scheduler.limits.num_slots
        carries_trees = self.comm.num_drafting > 0 or self.decode.carries_trees(num_serving)
        if self.comm.num_drafting:  # draft ranks draft for all requests
            num_slots = limits.capacity
        self.sizer, self._timed = Sizer(self.sizes, times, self.comm, self.start_times.follows), None
        self.exchange = Exchange(self.sizes, num_slots, self.comm, self.model.device, carries_trees)
        self.overlap = Overlap(self.model, self.comm)
        self.model.adapter.choose_clock(waits=not is_alone(self.comm))
        # The tp ranks of a replica run the head together, so none may pause it by its own clock.
        has_pace = times is not None and self.sizes.num_guesses and self.comm.tp_size == 1
        self.pace, self.model.rests = Pace() if has_pace else None, False
        if (drafter := self.model.self_drafter) is not None:
            drafter.passes = Passes(fewest=int(self.options.self_draft != "auto"), first_ms=drafter.first_ms)
        if times is not None:
            limits.join_chunk = max(SHORTEST_FILL, times.critical_length())
            targets = self.decode.first_token_ms or math.inf, self.decode.per_token_ms or math.inf
            num_nodes = self.sizes.num_nodes // num_serving
            sizer = self.sizer  # not `self`: a reference cycle would keep a dropped engine's K/V
            limits.decide_by(lambda: cast(StepTimes, sizer.times), num_nodes, *targets)

    # The mesh.

    def adopt_mesh(self) -> None:
        """Continue with the present ranks. Weights and K/V are kept; the drafting state of requests is reset.

        The result is the same on all ranks, also if some had begun a step that others had not.
        """
        assert self.comm.membership is not None
        kept = self.comm.membership.adopt()
        if not self.comm.num_serving:
            raise CommError("all ranks that hold the model are lost")
        self.begun = None
        lost = self.scheduler.regroup(kept, self.comm.drafting)
        self._move()
        for request in [*lost, *self.scheduler.running]:
            request.collect()
            request.state = self.new_state(request, request.num_computed_tokens) if request.homes else None
        self._fit_mesh(self.sizer.times)
