"""What every rank holds of the job, how it begins, and how it goes on with other ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Protocol

import numpy as np

from lpr.config import DecodeConfig, InputError, TreeSizes
from lpr.core.step_times import StepTimes, interpolate
from lpr.dist.comm import Comm, MeshChangedError, agree, is_driver
from lpr.engine import handover
from lpr.engine.exchange import Exchange
from lpr.engine.homes import speedup
from lpr.engine.hooks import StepHooks
from lpr.engine.options import EngineOptions
from lpr.engine.prepare import longest_sequence, prepare
from lpr.engine.request import Outcome, Prompt, Request, make_request
from lpr.engine.scheduler import Scheduler
from lpr.engine.sizing import Sizer, measure_step_times, resolve_sizes
from lpr.engine.step import PhaseTimer
from lpr.engine.targets import Seen, Targets
from lpr.engine.tenants import TenantTries
from lpr.engine.times_file import TimesFile
from lpr.model.loader import Loaded
from lpr.model.sampling.processors import Processor
from lpr.native import SequenceState, SuffixIndex
from lpr.protocol import Chunk, RequestId, Submit

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


class ReplicatedState:
    """A model, its requests and what they draft from, the same on every rank but for the K/V that a rank holds."""

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
        self.hooks = StepHooks()
        """Called by every step."""
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
        self.model, self._like, self._given_times = prepare(loaded, decode, options, comm)

    @property
    def costs(self) -> StepTimes | None:
        """Step times as all ranks know them by now; None where sizes are fixed."""
        return self._sizer.times

    @property
    def payload_bytes(self) -> int:
        """Bytes that each rank contributes to a step's all-gather."""
        return self._exchange.payload_bytes

    @property
    def requests(self) -> Mapping[RequestId, Request]:
        """Submitted and not finished requests by their ids, on every rank alike: ids, text, what nobody has taken."""
        return MappingProxyType(self._requests)

    def _keep_times(self) -> None:
        """Let the next start decide by the step times found so far."""
        if self._times_file is not None and self._follows and self._sizer.times is not None:
            self._times_file.write(self._sizer.times)

    def _make(self, command: Submit, prompt: Prompt, processors: Sequence[Processor] = ()) -> Request:
        return make_request(command, prompt, self.tokenizer, self.eos_token_ids, self.model.device, processors)

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
        num_slots, longest = decode.max_batch_size, longest_sequence(self._loaded, decode)
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
        self.max_length = longest_sequence(self._loaded, decode)
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
        carries_trees = self.decode.carries_trees(self.comm.size)
        self._exchange = Exchange(self.sizes, self.decode.max_batch_size, self.comm, self.model.device, carries_trees)
        self.scheduler.speedup = self._speedup if times is not None else None
        self.scheduler.join_chunk = max(SHORTEST_FILL, times.critical_length()) if times is not None else None
        if self.decode.first_token_ms or self.decode.per_token_ms:
            before, nodes = self.scheduler.targets, self.sizes.num_nodes // self.comm.size
            self.scheduler.targets = Targets(
                *(self._known_times, _seen, nodes),
                first_token_ms=self.decode.first_token_ms or math.inf,
                per_token_ms=self.decode.per_token_ms or math.inf,
                now=before.now if before is not None else 0.0,
            )

    def _known_times(self) -> StepTimes:
        times = self._sizer.times
        assert times is not None, "targets go by step times"
        return times

    def _speedup(self, request: Request, width: int) -> float:
        """By what factor one more rank than `width` would speed a request up, by the step times of all ranks."""
        stats = request.stats
        row = self._known_times().row(1, len(request.tokens))
        nodes = self.sizes.num_nodes // self.comm.size
        return speedup(width, partial(interpolate, row), nodes, stats.num_steps, stats.num_tokens, stats.num_nodes)

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

    def _learnt(self, request: Request) -> SuffixIndex | None:
        """The outputs that a request drafts from and leaves its own to; None: no others."""
        if not request.learns or request.params.forced_ids:
            return None
        in_use = {each.tenant for each in self.scheduler.running}
        return self._tenants.of(request.tenant, in_use) if request.tenant else self.shared

    def _take_in(self, newcomers: Sequence[int]) -> None:
        """Go on together with further replicas, which the driver tells what all know."""
        membership = self.comm.membership
        assert membership is not None
        membership.take_in(newcomers)
        self._take_mesh()
        membership.meet(handover.encode(self._state()) if is_driver(self.comm) else b"")

    def _state(self) -> handover.State:
        times = self._sizer.times
        return handover.state_of(
            self.scheduler,
            decode=self.decode,
            sizes=self.sizes,
            times=times.to_json() if times is not None else None,
            follows=self._follows,
            is_draining=self.is_draining,
            next_id=self._next_id,
            history=history_of(self.shared),
            tenants=[(tenant, history_of(trie)) for tenant, trie in self._tenants.tries.items()],
            read_to=self._tenants.read_to,
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
        handover.resume(self.scheduler, state, running, waiting)
        for request, each in zip(running, state.running, strict=True):
            request.state = self._new_state(request, each.num_computed_tokens)
        for tenant, _ in state.tenants:  # what was looked up for the running requests is no use of theirs
            self._tenants.of(tenant)

    def _restored(self, carried: handover.Carried) -> Request:
        request = carried.restore(self._make(carried.submit, carried.submit.token_ids[: carried.submit.num_prompt]))
        self._requests[request.id] = request
        return request

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


def _seen(request: Request) -> Seen:
    stats = request.stats
    return Seen(stats.num_steps, stats.num_tokens, stats.num_nodes)


def _refuse(reason: str | None) -> None:
    """Raise InputError if there is a reason."""
    if reason:
        raise InputError(reason)
