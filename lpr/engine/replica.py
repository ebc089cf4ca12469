"""A replica of the job's state: what every rank holds and does alike, the driver included.

One sentence carries it: *every rank applies the same commands after the same step*. So a step reads schedule, run,
update, and nothing in it asks which rank this is, but for the shard that the rank evaluates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch

from lpr.config import DecodeConfig, InputError, TreeSizes
from lpr.core.digest import digest_of
from lpr.core.step_times import StepTimes, interpolate
from lpr.core.suffix_index import as_learnt
from lpr.dist.comm import Comm, MeshChangedError, agree, is_alone, is_driver
from lpr.engine import handover
from lpr.engine.commands import Abort, Command, Configure, Costs, Drain, Learn, RequestId, Stop, Submit, TakeIn
from lpr.engine.exchange import DesyncError, Exchange, check_replica, highest_of_replica
from lpr.engine.homes import speedup
from lpr.engine.options import EngineOptions, load_step_times
from lpr.engine.request import Chunk, Outcome, Prompt, Request, make_request
from lpr.engine.scheduler import Schedule, Scheduler
from lpr.engine.sizing import Sizer, measure_step_times, resolve_sizes
from lpr.engine.step import PhaseTimer, decode_step, untimed
from lpr.engine.tenants import TenantTries
from lpr.engine.times_file import TimesFile
from lpr.model.loader import Loaded, model_digest, tokenizer_digest
from lpr.model.packing import pack_projections
from lpr.model.parallel import vocabulary_part
from lpr.model.processors import Processor
from lpr.model.runner import TreeModel
from lpr.model.self_check import check_compiled, self_check
from lpr.native import SequenceState, SuffixIndex

SHORTEST_FILL = 32
"""Tokens that a rank computes at least in a step of a request that it joins, or it would never catch up."""
ANY_NUMBER = 1 << 30
"""Home ranks of a request at most, where nobody sets a limit."""


class StepRecorder(Protocol):
    """Takes down what an engine's steps did (lpr.cli.trace)."""

    def begin(self) -> PhaseTimer:
        """Start the clock of a step; returns what to call at the end of each phase."""
        ...

    def record(self, batch: Sequence[Request], outcomes: Sequence[Outcome], chunks: Sequence[Chunk]) -> None:
        """Take down the step that has just been timed, which advanced `batch` together."""
        ...


_KIND = "kind of processor or version of torch (exact mode needs one of all ranks)"
_THREADS = "number of threads (exact mode needs one of all ranks)"
_KERNELS = "result of matrix products (exact mode needs the same bits of all ranks)"


class Replica:
    """A model, its requests and what they draft from, as commands and steps change them."""

    def __init__(self, loaded: Loaded, decode: DecodeConfig, options: EngineOptions, comm: Comm) -> None:
        """Prepare and check a loaded model on all ranks of `comm`; a Configure command makes it ready.

        Raises InputError if the model cannot run a token tree, with several ranks on every rank if it is so on one, or
        if one has another model, tokenizer or `decode`.
        """
        self.options = options
        self.comm = comm
        self.tokenizer = loaded.tokenizer
        self.eos_token_ids = loaded.eos_token_ids
        self.recorder: StepRecorder | None = None
        """Takes down every step while it is set (lpr.cli.trace)."""
        self.while_busy: Callable[[], None] | None = None
        """Called in every step as soon as the device has work: what it does takes no time, up to the device's."""
        self.is_draining = False
        """Are further requests refused?"""
        self.is_stopped = False
        """Has the driver ended the job?"""
        self._loaded = loaded
        self._requests: dict[RequestId, Request] = {}
        """Submitted and not finished."""
        self._named: dict[RequestId, Request] = {}
        """Made by this rank's own program, whose command has not been applied yet."""
        self._next_id = 0
        self._advanced: list[Request] = []
        self._times: StepTimes | None = None
        """Step times at the start, as all ranks know them: given or measured."""
        self._follows = True
        self._times_file: TimesFile | None = None
        """Where measured step times are kept."""
        self._sizer = Sizer(TreeSizes(), None, comm)
        self._timed: tuple[Sequence[Request], Sequence[Outcome], float] | None = None
        """The last step and its milliseconds, until the sizer has seen it."""
        self._new_times: StepTimes | None = None
        self._given_times = self._load(decode)
        """Step times that the options give, on the driver."""

    def _load(self, decode: DecodeConfig) -> StepTimes | None:
        """Prepare and check the model on all ranks; returns the step times that were given to rank 0."""
        loaded, options = self._loaded, self.options
        # Ranks that share weights must not enter a forward with different rows.
        is_split = self.comm.tp_mesh is not None
        self.model = TreeModel(
            loaded.model,
            attention=options.attention,
            graphs=options.graphs,
            check_rows=partial(check_replica, self.comm) if is_split else None,
            exact=options.exact,
            share_heights=partial(highest_of_replica, self.comm) if is_split else None,
            part=vocabulary_part(loaded.model) if is_split else None,
        )
        failure, costs = None, None
        try:
            compiles = self._compiles()
            if compiles:
                pack_projections(loaded.model)
            self._like = self_check(self.model)
            self.model.check_part()
            if compiles:
                self._compile()
            self._longest(decode)
            if is_driver(self.comm):
                costs = load_step_times(options.costs) if isinstance(options.costs, Path) else options.costs
        except InputError as error:
            failure = str(error)
        facts, replica_facts = {}, {}
        if not is_alone(self.comm):
            facts["configuration"] = digest_of(repr((decode, options.exact)))
            facts["tokenizer"] = tokenizer_digest(loaded.tokenizer)
            facts["form of a batch (packed or padded)"] = int(self.model.packed)
            replica_facts["model"] = model_digest(loaded.model)
            for name, value in self._machine().items():
                (replica_facts if name == _KERNELS else facts)[name] = value
        agree(self.comm, failure, facts, replica_facts)
        return costs

    def _compiles(self) -> bool:
        """Is the model to be compiled? Raises InputError if it is asked for and cannot be."""
        wanted, captures = self.options.compile, self.model.capturer is not None
        if wanted == "on" and not captures:
            raise InputError(
                f"compile works on captured steps: {self.model.graph_reason or 'it needs a GPU and graphs=True'}"
            )
        if wanted == "on" and self.options.exact:
            raise InputError("compile adds in an order that the compiler chooses: it cannot be exact")
        # A model of somebody else is theirs to call as well, and collectives have not been compiled yet.
        mine = captures and self._loaded.is_ours and self.comm.tp_mesh is None
        return wanted == "on" or (wanted == "auto" and mine and not self.options.exact)

    def _compile(self) -> None:
        """Compile a first step; without success steps are as they were, or it is an InputError if it was asked for."""
        self.model.compile()
        check_compiled(self.model, self._like)
        assert self.model.compiled is not None
        if self.options.compile == "on" and self.model.compiled.reason is not None:
            raise InputError(f"this model cannot be compiled: {self.model.compiled.reason}")

    def _machine(self) -> dict[str, int]:
        """What decides the bits of a sum besides the program, in exact mode, which needs it to be one; none without."""
        heights = self.model.heights
        if not self.options.exact or heights is None:  # one that failed says so in its own line
            return dict.fromkeys((_KIND, _THREADS, _KERNELS), 0)
        device = self.model.device
        is_gpu = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if is_gpu else torch.backends.cpu.get_cpu_capability()
        kind = (name, torch.__version__, torch.version.cuda if is_gpu else None)
        rows = (heights.model, heights.attention, heights.multiple, heights.head_multiple, heights.bits)
        return {_KIND: digest_of(repr(kind)), _THREADS: heights.num_threads or 0, _KERNELS: digest_of(repr(rows))}

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt; raises InputError for one that is empty or not of this model's vocabulary."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InputError("this model has no tokenizer: give prompts as lists of token ids")
            ids = list(self.tokenizer(prompt)["input_ids"])
        else:
            ids = [int(token) for token in prompt]
        if not ids:
            raise InputError("the prompt is empty: a model needs at least one token to continue")
        outside = [token for token in ids if not 0 <= token < self.model.vocab_size]
        if outside:
            raise InputError(f"token id {outside[0]} is not in the model's vocabulary of {self.model.vocab_size}")
        return ids

    @property
    def requests(self) -> Mapping[RequestId, Request]:
        """Submitted and not finished requests by their ids, on every rank alike: ids, text, what nobody has taken."""
        return MappingProxyType(self._requests)

    @property
    def costs(self) -> StepTimes | None:
        """Step times as all ranks know them by now; None where sizes are fixed."""
        return self._sizer.times

    @property
    def payload_bytes(self) -> int:
        """Bytes that each rank contributes to a step's all-gather."""
        return self._exchange.payload_bytes

    def _keep_times(self) -> None:
        """Let the next start decide by the step times found so far."""
        if self._times_file is not None and self._follows and self._sizer.times is not None:
            self._times_file.write(self._sizer.times)

    # Commands.

    def apply(self, command: Command) -> None:
        """Do what a command says; every rank applies the same commands after the same step."""
        match command:
            case Submit():
                self._submit(command)
            case Abort():
                self._abort(command.id)
            case Learn():
                self._learn(command)
            case Costs():
                self._take_times(StepTimes.from_json(command.table), command.given)
            case Configure():
                self._configure(command.decode)
            case TakeIn():
                self._take_in(command.replicas)
            case Drain():
                self.is_draining = True
            case Stop():
                for id in list(self._requests):
                    self._abort(id)
                self.is_stopped = True

    def _learn(self, command: Learn) -> None:
        if command.replace:
            self.shared = SuffixIndex(self.sizes.trie_capacity)
        trie = self._tenants.learning(command.tenant) if command.tenant else self.shared
        if trie is not None:
            trie.insert(np.frombuffer(command.history, np.int32))
            if command.read_to:
                self._tenants.read_to[command.tenant] = command.read_to

    def _count_id(self, id: RequestId) -> None:
        if isinstance(id, int):
            self._next_id = max(self._next_id, id + 1)

    def _submit(self, command: Submit) -> None:
        self._count_id(command.id)
        request = self._named.pop(command.id, None)
        if request is None:
            if command.has_processors:
                raise InputError(f"request {command.id} has logits processors, which are code: submit it on every rank")
            request = self._make(command, command.token_ids[: command.num_prompt])
        elif (request.tokens, request.params) != (command.token_ids, command.params):
            raise DesyncError(f"request {command.id} of this rank differs from that of rank 0")
        self._requests[command.id] = request
        if request.finish_reason is not None:  # what was delivered already says so
            self._end(request, request.finish_reason)
        elif self.is_draining:
            self._end(request, "abort")
        else:
            self.scheduler.add(request)

    def _make(self, command: Submit, prompt: Prompt, processors: Sequence[Processor] = ()) -> Request:
        return make_request(command, prompt, self.tokenizer, self.eos_token_ids, self.model.device, processors)

    def _abort(self, id: RequestId) -> None:
        request = self._requests.get(id)
        if request is None:
            return
        if request.state is None:
            self.scheduler.withdraw(request)
        else:
            request.settle()
            self._release(request)
        self._end(request, "abort")

    def _end(self, request: Request, reason: str) -> None:
        """End a request between two steps."""
        request.end(reason)
        self._requests.pop(request.id, None)
        self._advanced.append(request)

    def _take_times(self, times: StepTimes, given: bool) -> None:
        if given:
            self._times, self._follows = times, False
        else:
            self._sizer.times = times

    def _longest(self, decode: DecodeConfig) -> int:
        """Longest sequence under `decode`; raises InputError if the model has fewer positions."""
        most, reason = self._loaded.max_positions, self._loaded.limit_reason
        if decode.max_length is not None and most and decode.max_length > most:
            why = f" ({reason})" if reason else ""
            raise InputError(f"max_length={decode.max_length} exceeds the model's {most} positions{why}")
        return decode.max_length or min(most or 4096, 4096)

    def _configure(self, decode: DecodeConfig) -> None:
        while True:
            try:
                times = self._find_times(decode)
                # Sizes are those of the full mesh: lost ranks come back, and meanwhile the budget cuts trees anyway.
                membership = self.comm.membership
                num_ranks = membership.num_replicas if membership is not None else self.comm.size
                self._set_up(decode, resolve_sizes(decode, times, num_ranks), times, partial(agree, self.comm))
                return
            except MeshChangedError:  # on all survivors alike, which begin again
                self._take_mesh()

    def _find_times(self, decode: DecodeConfig) -> StepTimes | None:
        """The step times to decide by under `decode`, the same on all ranks; None where sizes are fixed."""
        num_slots, longest = decode.max_batch_size, self._longest(decode)
        self._times = self._sizer.times or self._times
        if decode.adaptive and self._times is None:
            smallest = (num_slots, longest, 1, self._like)
            agree(self.comm, self.model.shortage(*smallest, self.comm.num_sharing))  # before anything is measured
            limits = (decode.max_nodes, longest, num_slots)
            self._times_file = TimesFile(self.model, self.comm, *limits)
            measure = partial(measure_step_times, self.model, self._like, self.comm, *limits)
            self._times = self._times_file.read_or(measure)
        return self._times if decode.adaptive else None

    def _set_up(
        self, decode: DecodeConfig, sizes: TreeSizes, times: StepTimes | None, check: Callable[[str | None], None]
    ) -> None:
        """Make everything whose size `decode` decides; `check` raises InputError for a reason why there is no room."""
        num_slots, num_ranks = decode.max_batch_size, self.comm.size
        self.max_length = self._longest(decode)
        self.decode, self.sizes = decode, sizes
        self.shared = SuffixIndex(sizes.trie_capacity)
        self._tenants = TenantTries(sizes.trie_capacity)
        self.scheduler: Scheduler[Request] = Scheduler(
            num_slots,
            num_ranks,
            decode.prefill_chunk,
            sizes.num_nodes,
            self.model.packed,
            self.options.prefix_reuse,
            ANY_NUMBER if decode.home_ranks == "auto" else decode.home_ranks,
        )
        # A mesh that can shrink may leave whole trees to one rank, and must not move its K/V then.
        fewest = num_ranks if self.comm.membership is None else 1
        cache = (num_slots, self.max_length, sizes.evaluated_capacity(fewest), self._like)
        check(self.model.shortage(*cache, self.comm.num_sharing))
        self.model.allocate(*cache)
        self._meet_ranks(times)
        if self.model.graphs is not None:
            self.model.graphs.prepare(sizes.num_recycled, show=is_driver(self.comm))

    def _meet_ranks(self, times: StepTimes | None) -> None:
        """Make what depends on how many ranks there are, deciding by `times`."""
        self._sizer, self._timed = Sizer(self.sizes, times, self.comm, self._follows), None
        self._exchange = Exchange(self.sizes, self.decode.max_batch_size, self.comm, self.model.device)
        self.scheduler.speedup = self._speedup if times is not None else None
        self.scheduler.join_chunk = max(SHORTEST_FILL, times.critical_length()) if times is not None else None

    def _speedup(self, request: Request, width: int) -> float:
        """By what factor one more rank than `width` would speed a request up, by the step times of all ranks."""
        times, stats = self._sizer.times, request.stats
        assert times is not None
        row = times.row(1, len(request.tokens))
        nodes = self.sizes.num_nodes // self.comm.size
        return speedup(width, partial(interpolate, row), nodes, stats.num_steps, stats.num_tokens, stats.num_nodes)

    # Ranks that are lost, and ranks that join.

    def _take_mesh(self) -> None:
        """Go on with the ranks that there are now. Weights and K/V stay; drafts begin to learn anew.

        What is left is the same on all ranks, also on those that had begun a step which others had not.
        """
        assert self.comm.membership is not None
        lost = self.scheduler.regroup(self.comm.membership.adopt())
        self._move()
        for request in lost:
            request.state = None
        for request in self.scheduler.running:
            request.state = self._new_state(request, request.num_computed_tokens)
        self._meet_ranks(self._sizer.times)

    def _new_state(self, request: Request, computed: Sequence[int]) -> SequenceState:
        source = self._forced(request) if request.params.forced_ids else self._learnt(request)
        state = SequenceState(
            *(request.tokens, request.params, self.sizes, self.comm.size, source, computed),
            *(request.longest, request.text_stream.stop_ids),
        )
        state.homes = request.homes
        return state

    def _forced(self, request: Request) -> SuffixIndex:
        """A text that is known to come, as what its request drafts from."""
        known = SuffixIndex(self.sizes.trie_capacity)
        known.extend([*request.prompt_ids, *request.params.forced_ids])
        return known

    def _take_in(self, newcomers: Sequence[int]) -> None:
        """Go on together with further replicas, which the driver tells what all know."""
        membership = self.comm.membership
        assert membership is not None
        membership.take_in(newcomers)
        self._take_mesh()
        membership.meet(handover.encode(self._state()) if is_driver(self.comm) else b"")

    def _state(self) -> handover.State:
        times = self._sizer.times
        return handover.State(
            decode=self.decode,
            sizes=self.sizes,
            times=times.to_json() if times is not None else None,
            follows=self._follows,
            is_draining=self.is_draining,
            next_id=self._next_id,
            history=history_of(self.shared),
            tenants=[(tenant, history_of(trie)) for tenant, trie in self._tenants.tries.items()],
            read_to=self._tenants.read_to,
            running=[handover.carried(request) for request in self.scheduler.running],
            waiting=[handover.carried(request, *at) for *at, request in self.scheduler.waiting],
            num_arrivals=self.scheduler.num_arrivals,
            num_queries=self.scheduler.num_queries,
            num_hits=self.scheduler.num_hits,
        )

    def _resume(self, state: handover.State) -> None:
        """On a newcomer: hold what the others hold; raises InputError if there is no room for it."""
        self._follows, self.is_draining, self._next_id = state.follows, state.is_draining, state.next_id
        self._times = StepTimes.from_json(state.times) if state.times is not None else None
        self._set_up(state.decode, state.sizes, self._times, _refuse)
        self.shared.insert(np.frombuffer(state.history, np.int32))
        for tenant, history in state.tenants:
            self._tenants.of(tenant).insert(np.frombuffer(history, np.int32))
        self._tenants.read_to = dict(state.read_to)
        running, waiting = ([self._restored(each) for each in part] for part in (state.running, state.waiting))
        places = [(each.place, each.arrival) for each in state.waiting]
        queue = [(*at, request) for at, request in zip(places, waiting, strict=True)]
        self.scheduler.resume(running, queue, state.num_arrivals)
        self.scheduler.num_queries, self.scheduler.num_hits = state.num_queries, state.num_hits
        for request, each in zip(running, state.running, strict=True):
            request.state = self._new_state(request, each.num_computed_tokens)
        for tenant, _ in state.tenants:  # what was looked up for the running requests is no use of theirs
            self._tenants.of(tenant)

    def _restored(self, carried: handover.Carried) -> Request:
        request = carried.restore(self._make(carried.submit, carried.token_ids[: carried.num_prompt]))
        self._requests[request.id] = request
        return request

    # One step: schedule, run, update.

    def schedule(self) -> Schedule[Request]:
        """Give free slots to waiting requests; what each running request does in the next step."""
        while (admission := self.scheduler.admit()) is not None:
            request, computed = admission.request, admission.num_computed_tokens
            request.num_cached_tokens = min(computed[rank] for rank in request.homes)
            request.state = self._new_state(request, computed)
        schedule = self.scheduler.schedule()
        self._move()
        return schedule

    def run(self, schedule: Schedule[Request], num_command_bytes: int) -> tuple[list[Outcome], int, StepTimes | None]:
        """Take the step that `schedule` says, whose header announces `num_command_bytes` on the driver.

        Returns what it did to each decoding request, the bytes of commands that the driver announced, and on the
        driver, now and then, the step times that all ranks should decide by, as far as the step before tells.
        """
        began, captures = time.perf_counter(), self.model.num_captures
        self._new_times = None
        outcomes, num_command_bytes = decode_step(
            schedule.decoding,
            schedule.filling,
            self.sizes,
            self.model,
            self._exchange,
            self._sizer.budget,
            num_command_bytes,
            self.recorder.begin() if self.recorder is not None else untimed,
            self._catch_up,
            self.scheduler.signature,
        )
        if outcomes and not schedule.filling and captures == self.model.num_captures:
            self._timed = schedule.decoding, outcomes, (time.perf_counter() - began) * 1e3
        return outcomes, num_command_bytes, self._new_times

    def _catch_up(self) -> None:
        """While the device works, do what the last step left: nothing that decides what comes next."""
        if self._timed is not None:
            self._new_times, self._timed = self._sizer.observe(*self._timed), None
        for request in self.scheduler.running:
            request.write()
            request.stats.count_nodes()
        if self.while_busy is not None:
            self.while_busy()

    def update(self, schedule: Schedule[Request], outcomes: Sequence[Outcome]) -> None:
        """Feed a step's results to its requests; those that are finished give their slots back."""
        for request, _ in schedule.filling:
            request.stats.num_fill_steps += 1
        batch = schedule.decoding
        for request, outcome in zip(batch, outcomes, strict=True):
            request.advance(outcome)
        self._advanced += batch
        if self.recorder is not None and batch:
            for request in batch:
                request.write()
            self.recorder.record(batch, outcomes, [request.chunks[-1] for request in batch])
        for request in [request for request in batch if request.finish_reason is not None]:
            self._release(request)
            del self._requests[request.id]

    def _release(self, request: Request) -> None:
        """Learn from a request's output, and take its slot."""
        assert self.model.cache is not None
        learnt = self._learnt(request)
        if learnt is not None and self.sizes.trie_nodes and request.num_output:
            learnt.extend(as_learnt(request.prompt_ids, request.token_ids))
            learnt.end_document()
        sound = request.error is None and request.num_output > 0
        if not sound:  # its K/V may be NaN, which would spoil the slot's next request
            slot = request.slots[self.comm.rank]
            if slot >= 0:
                self.model.cache.clear(slot, 0)
        self.scheduler.finish(request, keep=sound)
        self._move()
        request.state = None

    def _learnt(self, request: Request) -> SuffixIndex | None:
        """The outputs that a request drafts from and leaves its own to; None: no others."""
        if not request.learns or request.params.forced_ids:
            return None
        in_use = {each.tenant for each in self.scheduler.running}
        return self._tenants.of(request.tenant, in_use) if request.tenant else self.shared

    def _move(self) -> None:
        """Do to this rank's K/V what the scheduler has decided."""
        assert self.model.cache is not None
        for move in self.scheduler.take_moves():
            if move.rank == self.comm.rank:
                copy = self.model.cache.exchange_slots if move.exchange else self.model.cache.move_slot
                copy(move.source, move.target, move.num_rows)


def history_of(trie: SuffixIndex) -> bytes:
    """The tokens that a trie holds, as int32."""
    return np.array(trie.history(), np.int32).tobytes()


def _refuse(reason: str | None) -> None:
    """Raise InputError if there is a reason."""
    if reason:
        raise InputError(reason)
