"""The engine: requests in, exact completions out, several sequences in every step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedModel

from lpr.config import DecodeConfig, InputError, SamplingParams, TreeSizes
from lpr.core.state import SequenceState
from lpr.core.step_times import StepTimes
from lpr.core.suffix_index import SuffixIndex
from lpr.dist.comm import Comm, SoloComm, agree, is_alone, is_driver
from lpr.engine import commands
from lpr.engine.commands import Abort, Command, Configure, Costs, Drain, Learn, RequestId, Stop, Submit
from lpr.engine.exchange import DesyncError, Exchange, check_replica
from lpr.engine.log import CommandLog
from lpr.engine.options import EngineOptions, load_step_times
from lpr.engine.request import Chunk, Completion, Outcome, Prompt, Request, make_request
from lpr.engine.scheduler import Schedule, Scheduler, SlotMove
from lpr.engine.sizing import Sizer, measure_step_times, resolve_sizes
from lpr.engine.step import PhaseTimer, decode_step, untimed
from lpr.engine.trie_file import fingerprint_of, read_trie, write_trie
from lpr.model.loader import Loaded, digest, load, model_digest, tokenizer_digest, wrap
from lpr.model.parallel import TensorParallel
from lpr.model.processors import Processor
from lpr.model.runner import TreeModel
from lpr.model.self_check import self_check


class StepRecorder(Protocol):
    """Takes down what an engine's steps did (lpr.cli.trace)."""

    def begin(self) -> PhaseTimer:
        """Start the clock of a step; returns what to call at the end of each phase."""
        ...

    def record(self, batch: Sequence[Request], outcomes: Sequence[Outcome], chunks: Sequence[Chunk]) -> None:
        """Take down the step that has just been timed, which advanced `batch` together."""
        ...


class Engine:
    """Decodes requests with one model; `generate` and `stream` do all of it, `submit` and `step` let you drive it.

    The output of a request depends on the model, its prompt, SamplingParams and processors only, never on the
    DecodeConfig, the other requests or the number of ranks (exactly in fp32; half precision rounds by the height of a
    GEMM).

    With several ranks, rank 0 is the driver: its calls become commands, which every rank applies after the same step.
    The others call `work`, which takes part until the driver calls `close`. Where every rank runs the same program
    instead, they may make the same calls in the same order, and each gets the results; rank 0's word counts.
    """

    def __init__(
        self,
        loaded: Loaded,
        decode: DecodeConfig | None = None,
        options: EngineOptions | None = None,
        *,
        comm: Comm | None = None,
    ) -> None:
        """An engine for a loaded model.

        Raises InputError if the model cannot run a token tree or the cache does not fit, with several ranks on every
        rank if it is so on one, or if one has another model, tokenizer or configuration.
        """
        decode = decode if decode is not None else DecodeConfig()
        self.options = options if options is not None else EngineOptions()
        self.tokenizer = loaded.tokenizer
        self.eos_token_ids = loaded.eos_token_ids
        self.comm = comm if comm is not None else SoloComm()
        self.recorder: StepRecorder | None = None
        """Takes down every step while it is set (lpr.cli.trace)."""
        self.is_draining = False
        """Are further requests refused?"""
        self.is_stopped = False
        """Has the driver ended the job?"""
        self._loaded = loaded
        self._log = CommandLog(self.comm)
        self._requests: dict[RequestId, Request] = {}
        """Submitted and not finished."""
        self._named: dict[RequestId, Request] = {}
        """Made by this rank's own `submit`, whose command has not been applied yet."""
        self._next_id = 0
        self._advanced: list[Request] = []
        self._times: StepTimes | None = None
        """Step times at the start, as all ranks know them: given or measured."""
        self._follows = True
        self._sizer = Sizer(TreeSizes(), None, self.comm)
        costs = self._load(decode)
        if is_driver(self.comm) and costs is not None:
            self._post(Costs(costs.to_json(), given=True))
        self._settle(Configure(decode))
        self.comm.loaded()

    def _load(self, decode: DecodeConfig) -> StepTimes | None:
        """Prepare and check the model on all ranks; returns the step times that were given to rank 0."""
        loaded, options = self._loaded, self.options
        # Ranks that share weights must not enter a forward with different rows.
        check = partial(check_replica, self.comm) if self.comm.tp_mesh is not None else None
        self.model = TreeModel(loaded.model, attention=options.attention, graphs=options.graphs, check_rows=check)
        failure, costs = None, None
        try:
            if options.compile and self.model.capturer is None:
                raise InputError(
                    f"compile works on captured steps: {self.model.graph_reason or 'it needs a GPU and graphs=True'}"
                )
            self._like = self_check(self.model)
            if options.compile:
                self.model.compile()
            self._longest(decode)
            if is_driver(self.comm):
                costs = load_step_times(options.costs) if isinstance(options.costs, Path) else options.costs
        except InputError as error:
            failure = str(error)
        facts, replica_facts = {}, {}
        if not is_alone(self.comm):
            facts["configuration"] = digest(repr(decode))
            facts["tokenizer"] = tokenizer_digest(loaded.tokenizer)
            facts["form of a batch (packed or padded)"] = int(self.model.packed)
            replica_facts["model"] = model_digest(loaded.model)
        agree(self.comm, failure, facts, replica_facts)
        return costs

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str,
        decode: DecodeConfig | None = None,
        options: EngineOptions | None = None,
        *,
        comm: Comm | None = None,
        **overrides: Any,
    ) -> Engine:
        """Load a transformers causal LM from a folder or a hub id.

        `overrides` are fields of EngineOptions, such as `dtype` and `device`. Where the ranks of `comm` share replicas
        (`lpr.dist.runtime.join(..., tp=N)`), each loads its part. Raises InputError, with several ranks on all of them
        if one cannot load.
        """
        options = replace(options or EngineOptions(), **overrides)
        loaded, failure = None, None
        try:
            tp = None
            if comm is not None and comm.tp_mesh is not None:
                tp = TensorParallel(comm.tp_mesh, options.tp_backend)
            loaded = load(str(path_or_hub_id), options.dtype, options.device, tp)
        except InputError as error:
            failure = str(error)
        if comm is not None:
            agree(comm, failure)
        if loaded is None:
            raise InputError(failure)
        return cls(loaded, decode, options, comm=comm)

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        tokenizer: Any | None = None,
        decode: DecodeConfig | None = None,
        options: EngineOptions | None = None,
        *,
        comm: Comm | None = None,
        **overrides: Any,
    ) -> Engine:
        """An engine for a model in memory, which is switched to tree attention; else as `from_pretrained`."""
        return cls(wrap(model, tokenizer), decode, replace(options or EngineOptions(), **overrides), comm=comm)

    # The whole way.

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        logits_processors: Sequence[Processor] = (),
    ) -> list[Completion]:
        """Complete every prompt; completions come in the order of `prompts`.

        `params` is one for all or one per prompt; `logits_processors` are applied to every request (`submit` takes them
        per request). Raises InputError before any work if a prompt cannot be completed. A request that fails later
        has `finish_reason` "error" and says why in `error`; the others are completed.
        """
        if isinstance(prompts, str):
            raise InputError("generate takes a list of prompts; put a single one in brackets")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InputError(f"{len(prompts)} prompts came with {len(params)} SamplingParams")
        prepared = [self._prepare(*each, logits_processors) for each in zip(prompts, params, strict=True)]
        requests = [self._enter(*each) for each in prepared]
        while any(request.finish_reason is None for request in requests):
            self.step()
        return [request.completion() for request in requests]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, logits_processors: Sequence[Processor] = ()
    ) -> Iterator[Chunk]:
        """Complete one prompt, yielding text and ids as each step commits them.

        Streams can be read in turn: each has its own queue, and a step advances all of them.
        """
        request = self.submit(prompt, params, logits_processors)
        try:
            while request.chunks or request.finish_reason is None:
                if not request.chunks:
                    self.step()
                yield from request.take()
        finally:
            self.abort(request)

    # Driving it yourself.

    @property
    def is_idle(self) -> bool:
        """Is there no request that waits or runs, and none on its way?"""
        return self.scheduler.is_idle and not self._named

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        logits_processors: Sequence[Processor] = (),
        *,
        id: RequestId | None = None,
        priority: int = 0,
        delivered: Sequence[int] = (),
    ) -> Request:
        """Queue a request; `step` advances it. Raises InputError for a prompt that cannot be completed.

        `logits_processors` are applied in their order, after those that `params` ask for and before temperature, top-k,
        top-p and min-p; see lpr.model.processors for what they get and when. They are code, so with several ranks every
        rank must submit the request. `id` must be new; default: the next number. `delivered` are ids that an earlier
        run has emitted, after which the output goes on as if it had never stopped.
        """
        params = params if params is not None else SamplingParams()
        return self._enter(*self._prepare(prompt, params, logits_processors, id, priority, delivered))

    def abort(self, request: Request) -> None:
        """Drop an unfinished request after the running step, on all ranks; a finished one is left as it is."""
        if request.finish_reason is None and is_driver(self.comm) and not self.is_stopped:
            self._post(Abort(request.id))

    def step(self) -> list[Request]:
        """Advance the running requests by one step; returns those that it added something to, or that ended.

        Without work, ranks other than the driver wait here for its next command.
        """
        if self.scheduler.is_idle:
            self._apply(self._log.receive_idle())
        self._admit()
        schedule = self.scheduler.schedule()
        if schedule.decoding or schedule.filling:
            num_command_bytes = self._run(schedule)
            self._apply(self._log.receive(num_command_bytes))
        advanced, self._advanced = self._advanced, []
        return advanced

    def work(self) -> None:
        """What every rank but the driver does: take part in each step until the driver calls `close`."""
        while not self.is_stopped:
            self.step()

    def drain(self) -> None:
        """Take no further requests; those submitted are completed."""
        if is_driver(self.comm):
            self._post(Drain())

    def close(self) -> None:
        """End the job on all ranks, aborting what runs; frees captured graphs, which communicators must outlive."""
        if is_driver(self.comm) and not self.is_stopped:
            self._post(Stop())
        self.work()
        self.model.release()

    def configure(self, decode: DecodeConfig) -> None:
        """Decode further requests with other settings, forgetting what drafts were learnt; needs an idle engine."""
        if not self.is_idle:
            raise RuntimeError("configure needs an engine without requests")
        self._settle(Configure(decode))

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

    # What drafts are learnt from.

    def learn(self, *documents: Sequence[int]) -> None:
        """Let further requests draft from outputs, as if they had just been decoded."""
        if is_driver(self.comm):
            self._post(commands.learn(documents))

    @cached_property
    def fingerprint(self) -> str:
        """What a token id means to this model; a saved trie fits engines with the same."""
        return fingerprint_of(self.tokenizer, self.model.vocab_size)

    def save_trie(self, path: str | Path) -> Path:
        """Write the outputs learnt so far to a file, as a whole or not at all; returns it. Raises InputError."""
        return write_trie(path, self.shared, self.fingerprint)

    def load_trie(self, path: str | Path) -> None:
        """Draft from the outputs in a file instead of those learnt so far; of too many, the newest are taken.

        With several ranks only rank 0 reads the file. Raises InputError for a file that is none of `save_trie`,
        damaged, or of another tokenizer.
        """
        if not self.is_idle:
            raise RuntimeError("load_trie needs an engine without requests")
        history = self._read_trie(path) if is_driver(self.comm) else np.empty(0, np.int32)
        self._settle(Learn(history.tobytes(), replace=True))

    def _read_trie(self, path: str | Path) -> np.ndarray:
        """The history in a file, int32 [num_tokens]."""
        history = read_trie(path, self.fingerprint)
        if len(history) and not -1 <= history.min() <= history.max() < self.model.vocab_size:
            raise InputError(f"the trie {path} holds token ids outside the vocabulary of {self.model.vocab_size}")
        return history[-self.sizes.trie_capacity :]

    # What it is by now.

    @property
    def costs(self) -> StepTimes | None:
        """Step times as all ranks know them by now; None where sizes are fixed."""
        return self._sizer.times

    @property
    def payload_bytes(self) -> int:
        """Bytes that each rank contributes to a step's all-gather."""
        return self._exchange.payload_bytes

    # Commands.

    def apply(self, command: Command) -> None:
        """Do what a command says; every rank applies the same commands after the same step."""
        match command:
            case Submit():
                self._submit(command)
            case Abort():
                self._abort(command.id)
            case Learn():
                if command.replace:
                    self.shared = SuffixIndex(self.sizes.trie_capacity)
                self.shared.insert(np.frombuffer(command.history, np.int32))
            case Costs():
                self._take_times(StepTimes.from_json(command.table), command.given)
            case Configure():
                self._configure(command.decode)
            case Drain():
                self.is_draining = True
            case Stop():
                for id in list(self._requests):
                    self._abort(id)
                self.is_stopped = True

    def _apply(self, received: Sequence[Command]) -> Sequence[Command]:
        for command in received:
            self.apply(command)
        return received

    def _post(self, command: Command) -> None:
        """Put a command at the end of the log; a world of one has nobody to wait for."""
        self._log.post(command)
        if is_alone(self.comm):
            self._apply(self._log.receive_idle())

    def _settle(self, command: Command) -> None:
        """On idle ranks that all come here, see that the driver's `command` and all before it are applied."""
        if is_driver(self.comm):
            self._post(command)
            while not self._log.is_empty:
                self._apply(self._log.receive_idle())
            return
        while not any(type(each) is type(command) for each in self._apply(self._log.receive_idle())):
            pass

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

    def _prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        processors: Sequence[Processor] = (),
        id: RequestId | None = None,
        priority: int = 0,
        delivered: Sequence[int] = (),
    ) -> tuple[Submit, Request]:
        """The command that submits a request, and the request itself; raises InputError."""
        ids = self.encode(prompt)
        if len(ids) + params.max_new_tokens > self.max_length:
            raise InputError(
                f"the prompt's {len(ids)} tokens and max_new_tokens={params.max_new_tokens} exceed the context of "
                f"{self.max_length} tokens"
            )
        id = self._next_id if id is None else id
        if id in self._requests or id in self._named:
            raise InputError(f"request id {id!r} is in use")
        command = Submit(id, [*ids, *delivered], params, len(ids), priority, has_processors=bool(processors))
        request = self._make(command, prompt, processors)
        self._count_id(id)
        return command, request

    def _enter(self, command: Submit, request: Request) -> Request:
        """Let the driver submit a request that all ranks, or it alone, have prepared."""
        self._named[command.id] = request
        if is_driver(self.comm):
            self._post(command)
        return request

    def _make(self, command: Submit, prompt: Prompt, processors: Sequence[Processor] = ()) -> Request:
        return make_request(command, prompt, self.tokenizer, self.eos_token_ids, self.model.device, processors)

    def _abort(self, id: RequestId) -> None:
        request = self._requests.get(id)
        if request is None:
            return
        request.text_stream.close()
        if request.state is None:
            self.scheduler.withdraw(request)
            self._end(request, "abort")
        else:
            request.finish_reason = "abort"
            self._release(request)
            self._end(request, "abort")

    def _end(self, request: Request, reason: str) -> None:
        """End a request between two steps."""
        request.finish_reason = reason
        self._requests.pop(request.id, None)
        self._tell(Chunk(request, [], request.text_stream.take(), reason))

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
        num_slots, num_ranks = decode.max_batch_size, self.comm.size
        self.max_length = self._longest(decode)
        self._times = self._sizer.times or self._times
        if decode.adaptive and self._times is None:
            smallest = (num_slots, self.max_length, 1, self._like)
            agree(self.comm, self.model.shortage(*smallest, self.comm.num_sharing))  # before anything is measured
            self._times = measure_step_times(
                self.model, self._like, self.comm, decode.max_nodes, self.max_length, num_slots
            )
        times = self._times if decode.adaptive else None
        self.decode, self.sizes = decode, resolve_sizes(decode, times, num_ranks)
        self._sizer = Sizer(self.sizes, times, self.comm, self._follows)
        self.shared = SuffixIndex(self.sizes.trie_capacity)
        self.scheduler: Scheduler[Request] = Scheduler(
            num_slots,
            num_ranks,
            decode.prefill_chunk,
            self.sizes.num_nodes,
            self.model.packed,
            self.options.prefix_reuse,
        )
        cache = (num_slots, self.max_length, self.sizes.evaluated_capacity(num_ranks), self._like)
        agree(self.comm, self.model.shortage(*cache, self.comm.num_sharing))
        self.model.allocate(*cache)
        self._exchange = Exchange(self.sizes, num_slots, self.comm, self.model.device)
        if self.model.graphs is not None:
            self.model.graphs.prepare(self.sizes.num_recycled, show=is_driver(self.comm))

    # One step: schedule, run, update.

    def _admit(self) -> None:
        while (admission := self.scheduler.admit()) is not None:
            self._move(admission.moves)
            request, computed = admission.request, admission.num_computed_tokens
            request.num_cached_tokens = min(computed)
            request.state = SequenceState(
                request.tokens, request.params, self.sizes, self.comm.size, self.shared, computed
            )

    def _run(self, schedule: Schedule[Request]) -> int:
        """Take the step that `schedule` says and feed its results to the requests; returns the bytes of commands."""
        for request, _ in schedule.filling:
            request.stats.num_fill_steps += 1
        began, captures = time.perf_counter(), self.model.num_captures
        end_phase = self.recorder.begin() if self.recorder is not None else untimed
        outcomes, num_command_bytes = decode_step(
            schedule.decoding,
            schedule.filling,
            self.sizes,
            self.model,
            self._exchange,
            self._sizer.budget,
            self._log.announce(),
            end_phase,
        )
        self._update(schedule.decoding, outcomes)
        if outcomes and not schedule.filling and captures == self.model.num_captures:
            news = self._sizer.observe(schedule.decoding, outcomes, (time.perf_counter() - began) * 1e3)
            if news is not None:
                self._post(Costs(news.to_json()))
        return num_command_bytes

    def _update(self, batch: Sequence[Request], outcomes: Sequence[Outcome]) -> None:
        chunks = []
        for request, outcome in zip(batch, outcomes, strict=True):
            request.stats.count_step(outcome.tree, outcome.path)
            chunks.append(request.emit(outcome))
        if self.recorder is not None and batch:
            self.recorder.record(batch, outcomes, chunks)
        for request, chunk in zip(batch, chunks, strict=True):
            self._tell(chunk)
            if request.finish_reason is not None:
                self._release(request)
                del self._requests[request.id]

    def _tell(self, chunk: Chunk) -> None:
        chunk.request.chunks.append(chunk)
        self._advanced.append(chunk.request)

    def _release(self, request: Request) -> None:
        """Learn from a request's output, and take its slot."""
        assert self.model.cache is not None
        if self.sizes.trie_nodes and request.num_output:
            self.shared.extend(request.token_ids)
            self.shared.end_document()
        sound = request.error is None and request.num_output > 0
        if not sound:  # its K/V may be NaN, which would spoil the slot's next request
            self.model.cache.clear(request.slot, 0)
        self._move(self.scheduler.finish(request, keep=sound))
        request.state = None

    def _move(self, moves: Sequence[SlotMove]) -> None:
        assert self.model.cache is not None
        for move in moves:
            copy = self.model.cache.exchange_slots if move.exchange else self.model.cache.move_slot
            copy(move.source, move.target, move.num_rows[self.comm.rank])
