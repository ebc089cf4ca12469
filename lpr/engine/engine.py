"""The engine: requests in, exact completions out, several sequences in every step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from lpr.config import DecodeConfig, InputError, SamplingParams
from lpr.dist.comm import Comm, MeshChangedError, SoloComm, agree, is_alone, is_driver
from lpr.engine import commands, handover
from lpr.engine.commands import Command, Configure, Costs, Drain, Learn, TakeIn
from lpr.engine.log import CommandLog
from lpr.engine.options import EngineOptions
from lpr.engine.replica import Replica
from lpr.engine.request import Completion, Prompt, Request
from lpr.engine.scheduler import Schedule
from lpr.engine.trie_file import fingerprint_of, read_trie, write_trie
from lpr.model.loader import Loaded, load, wrap
from lpr.model.parallel import TensorParallel
from lpr.model.sampling.processors import Processor
from lpr.protocol import Abort, Chunk, RequestId, Stop, Submit


class Engine(Replica):
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
        comm = comm if comm is not None else SoloComm()
        super().__init__(loaded, decode, options if options is not None else EngineOptions(), comm)
        self._log = CommandLog(comm)
        self._invited: set[int] = set()
        """Replicas that this rank, as the driver, has asked all to take in."""
        if comm.membership is not None and comm.membership.is_newcomer:
            state = comm.membership.await_welcome()
            if state is not None:
                self._resume(handover.decode(state))
                return
        if self._given_times is not None:
            self._post(Costs(self._given_times.to_json(), given=True))
        self._settle(Configure(decode))
        comm.loaded()

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
        try:
            while any(request.finish_reason is None for request in requests):
                self.step()
        finally:  # interrupted, they would run on beside later calls
            for request in requests:
                self.abort(request)
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
        tenant: str = "",
        learns: bool = True,
        details: bool = False,
        arrived: float | None = None,
    ) -> Request:
        """Queue a request; `step` advances it. Raises InputError for a prompt that cannot be completed.

        `logits_processors` are applied in their order, after those that `params` ask for and before temperature, top-k,
        top-p and min-p; see lpr.model.sampling.processors for what they get and when. They are code, so with several
        ranks every rank must submit the request. `id` must be new; default: the next number. `delivered` are ids that
        an earlier run has emitted, after which the output goes on as if it had never stopped. Requests share drafts and
        K/V with those of the same `tenant`, and with `learns` False no drafts at all; neither changes what they emit.
        With `details`, chunks name the draft source of each token. `arrived` is in seconds of time.monotonic; default:
        now. Requests wait in the order of arrival, shifted by `priority` (see lpr.engine.waiting).
        """
        params = params if params is not None else SamplingParams()
        more = (id, priority, delivered, tenant, learns, details, arrived)
        command, request = self._prepare(prompt, params, logits_processors, *more)
        return self._enter(command, request)

    def abort(self, request: Request) -> None:
        """Drop an unfinished request after the running step, on all ranks; a finished one is left as it is."""
        if request.finish_reason is None and is_driver(self.comm) and not self.is_stopped:
            self._post(Abort(request.id))

    def step(self) -> list[Request]:
        """Advance the running requests by one step; returns those that it added something to, or that ended.

        Without work, ranks other than the driver wait here for its next command.
        """
        if self.scheduler.is_idle:
            received = self._log.receive_idle()
            self._follow_mesh()
            self._apply(received)
        schedule = self.schedule()
        if not schedule.is_empty:
            self._advance(schedule)
        self._invite()
        advanced, self._advanced = self._advanced, []
        return advanced

    def _advance(self, schedule: Schedule[Request]) -> None:
        """Take a step and apply the commands behind it; if a rank was lost in it, take on the mesh that is left."""
        try:
            outcomes, num_command_bytes, times = self.run(schedule, self._log.announce())
        except MeshChangedError:
            self._follow_mesh()
            return
        self.update(schedule, outcomes)
        if times is not None:
            self._post(Costs(times.to_json()))
        received = self._log.receive(num_command_bytes)
        self._follow_mesh()
        self._apply(received)

    def work(self) -> None:
        """What every rank but the driver does: take part in each step until the driver calls `close`.

        Also returns when the driver was lost and this rank has taken its place (`is_driver(engine.comm)`); `requests`
        then holds what has to go on.
        """
        while not self.is_stopped and not is_driver(self.comm):
            self.step()

    def drain(self) -> None:
        """Take no further requests; those submitted are completed."""
        if is_driver(self.comm):
            self._post(Drain())

    def close(self) -> None:
        """End the job on all ranks, aborting what runs; frees captured graphs, which communicators must outlive."""
        if is_driver(self.comm) and not self.is_stopped:
            self._post(Stop())
        while not self.is_stopped:
            self.step()
        self._keep_times()
        self.model.release()

    def configure(self, decode: DecodeConfig) -> None:
        """Decode further requests with other settings, forgetting what drafts were learnt; needs an idle engine."""
        if not self.is_idle:
            raise RuntimeError("configure needs an engine without requests")
        self._settle(Configure(decode))

    # What drafts are learnt from.

    def learn(self, *documents: Sequence[int]) -> None:
        """Let further requests draft from outputs, as if they had just been decoded."""
        if is_driver(self.comm):
            self._post(commands.learn(documents))

    def learn_history(self, history: np.ndarray, tenant: str = "", read_to: str = "") -> None:
        """Let a tenant's further requests draft from documents that END separates, int32 [num_tokens].

        They come from other replicas of a fleet, whose stream was read up to its entry `read_to` with them.
        """
        if is_driver(self.comm):
            self._post(Learn(history.tobytes(), tenant=tenant, read_to=read_to))

    def learnt(self, tenant: str = "") -> tuple[np.ndarray, str]:
        """What a tenant's drafts come from besides the request itself, and how far its stream is in it.

        int32 [num_tokens]: documents that END separates, the oldest first.
        """
        trie = self._tenants.tries.get(tenant) if tenant else self.shared
        history = np.array(trie.history(), np.int32) if trie is not None else np.empty(0, np.int32)
        return history, self._tenants.read_to.get(tenant, "")

    @property
    def read_to(self) -> Mapping[str, str]:
        """By tenant, the last entry of its stream that was learnt (see `learn_history`)."""
        return MappingProxyType(self._tenants.read_to)

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

    # Commands.

    def _apply(self, received: Sequence[Command]) -> Sequence[Command]:
        newcomers = []
        for command in received:
            if isinstance(command, TakeIn):
                newcomers += command.replicas
            else:
                self.apply(command)
        if newcomers:  # last, as they do not know the commands that came with theirs
            self.apply(TakeIn(newcomers))
        return received

    def _follow_mesh(self) -> None:
        """Go on with the ranks that there are now, if ranks were lost; as the driver, if this is the first of them."""
        if self.comm.membership is None or not self.comm.membership.has_changed:
            return
        was_driver = is_driver(self.comm)
        self._take_mesh()
        if is_driver(self.comm) and not was_driver:
            for request in self._named.values():  # the lost driver has said nothing of them
                self._post(request.submit)

    def _invite(self) -> None:
        """On the driver: let replicas that have loaded join after this step."""
        membership = self.comm.membership
        if membership is None or self.is_stopped or not is_driver(self.comm):
            return
        newcomers = [each for each in membership.newcomers if each not in self._invited]
        if newcomers and all(request.is_portable for request in self._requests.values()):
            self._invited.update(newcomers)
            self._post(TakeIn(newcomers))

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

    def _prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        processors: Sequence[Processor] = (),
        id: RequestId | None = None,
        priority: int = 0,
        delivered: Sequence[int] = (),
        tenant: str = "",
        learns: bool = True,
        details: bool = False,
        arrived: float | None = None,
    ) -> tuple[Submit, Request]:
        """The command that submits a request, and the request itself; raises InputError."""
        ids = self.encode(prompt)
        if len(ids) + params.max_new_tokens > self.max_length:
            raise InputError(
                f"the prompt's {len(ids)} tokens and max_new_tokens={params.max_new_tokens} exceed the context of "
                f"{self.max_length} tokens"
            )
        if type(priority) is not int or not -(2**63) <= priority < 2**63:
            raise InputError(f"priority={priority!r} must be a whole number of 64 bits")
        if outside := [token for token, _ in params.logit_bias if token >= self.model.vocab_size]:
            raise InputError(f"logit_bias: {outside[0]} is not in the model's vocabulary of {self.model.vocab_size}")
        if outside := [token for token in params.forced_ids if token >= self.model.vocab_size]:
            raise InputError(f"forced_ids: {outside[0]} is not in the model's vocabulary of {self.model.vocab_size}")
        id = self._next_id if id is None else id
        if id in self._requests or id in self._named:
            raise InputError(f"request id {id!r} is in use")
        arrived = time.monotonic() if arrived is None else arrived
        more = (priority, bool(processors), tenant, learns, details, arrived)
        command = Submit(id, [*ids, *delivered], params, len(ids), *more)
        request = self._make(command, prompt, processors)
        self._count_id(id)
        return command, request

    def _enter(self, command: Submit, request: Request) -> Request:
        """Let the driver submit a request that all ranks, or it alone, have prepared."""
        self._named[command.id] = request
        if is_driver(self.comm):
            self._post(command)
        return request
