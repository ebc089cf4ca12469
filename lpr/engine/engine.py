"""The engine's public API.

A submitted request becomes a command (`Driver.post`), which every rank applies (`Replica.apply`) after the same step.
The scheduler gives the request slots, and each step (`Replica.schedule`, `run`, `update`) adds tokens to it.
"""

from __future__ import annotations

import reprlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast

import msgspec
from transformers import PreTrainedModel

from lpr.config import DecodeConfig, InputError, SamplingParams
from lpr.dist.comm import Comm, is_driver
from lpr.engine import handover
from lpr.engine.commands import Compile, Configure, Costs, Drain
from lpr.engine.driver import Driver
from lpr.engine.engine_base import EngineBase
from lpr.engine.options import EngineOptions
from lpr.engine.prepare import load_on_all
from lpr.engine.replica import Replica
from lpr.engine.request import Completion, Prompt, Request
from lpr.engine.requests import check_request, encode_prediction, encode_prompt
from lpr.engine.turns import in_turn
from lpr.model.loader import Loaded, wrap
from lpr.model.modes import in_own_modes
from lpr.model.sampling.processors import Processor
from lpr.protocol import Abort, Chunk, RequestId, Stop, Submit


class Engine(EngineBase):
    """Decodes requests with one model: `generate` and `stream` run it, `submit` and `step` give control to the caller.

    The output of a request depends on the model, its prompt, SamplingParams and processors only, never on the
    DecodeConfig, the other requests or the number of ranks (exactly in fp32; in half precision rounding
    depends on the number of rows of a GEMM).

    With several ranks, rank 0 is the driver: its calls become commands, which every rank applies after the same step.
    The other ranks call `work`, which returns when the driver calls `close`. If every rank runs the same program
    instead, all make the same calls in the same order and get the same results; the arguments of rank 0 are used.

    Threads may share an engine: each call, and each step of `generate` and `stream`, holds a fair lock. A logits
    processor or a hook, which runs within a step, may not start another step of the same engine (RuntimeError).
    """

    @in_own_modes
    def __init__(
        self,
        loaded: Loaded,
        decode: DecodeConfig | None = None,
        options: EngineOptions | None = None,
        *,
        comm: Comm | None = None,
    ) -> None:
        """An engine for a loaded model.

        Raises InputError if the model cannot run a token tree, if the cache does not fit, or if ranks differ in model,
        tokenizer or configuration; with several ranks, on every rank.
        """
        decode = decode if decode is not None else DecodeConfig()
        self.comm = comm if comm is not None else Comm()
        self.options = options if options is not None else EngineOptions()
        self.tokenizer, self.eos_token_ids = loaded.tokenizer, loaded.eos_token_ids
        self.replica = Replica(loaded, decode, self.options, self.comm)
        self.turns = self.replica.turns
        """The engine's lock; `with engine.turns:` holds it over several calls."""
        self.driver = Driver(self.replica, self.comm)
        self.model = self.replica.model
        membership = self.comm.membership
        state = handover.await_welcome(self.replica) if membership and membership.is_newcomer else None
        if state is not None:
            handover.resume(self.replica, state)
            return
        self._load_at_start()
        if self.replica.start_times.given is not None:
            self.driver.post(Costs(self.replica.start_times.given.to_json(), given=True))
        self.driver.post_and_wait(Configure(decode))
        self.comm.loaded()

    @classmethod
    @in_own_modes
    def from_pretrained(
        cls,
        path_or_hub_id: str,
        decode: DecodeConfig | None = None,
        options: EngineOptions | None = None,
        *,
        comm: Comm | None = None,
        **overrides: Any,
    ) -> Engine:
        """Load a transformers causal LM from a folder or a hub id; raises InputError, on every rank if one fails.

        `overrides` are fields of EngineOptions, such as `dtype` and `device`. With tensor parallelism
        (`lpr.dist.runtime.join(..., tp=N)`) each rank loads its shard.
        """
        options = replace(options or EngineOptions(), **overrides)
        return cls(load_on_all(str(path_or_hub_id), decode, options, comm), decode, options, comm=comm)

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
        """An engine for a model in memory, which is changed to tree attention; otherwise as `from_pretrained`."""
        return cls(wrap(model, tokenizer), decode, replace(options or EngineOptions(), **overrides), comm=comm)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        logits_processors: Sequence[Processor] = (),
        *,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """Complete every prompt; completions come in the order of `prompts`.

        `params` and `adapter` are one for all or one per prompt; `logits_processors` are applied to every request
        (`submit` takes them per request). Raises InputError before any work if a prompt cannot be completed. A request
        that fails later has `finish_reason` "error" and the cause in `error`; the others are completed.
        """
        if isinstance(prompts, str):
            raise InputError("generate takes a list of prompts; put a single one in brackets")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InputError(f"{len(prompts)} prompts came with {len(params)} SamplingParams")
        adapters = [adapter] * len(prompts) if adapter is None or isinstance(adapter, str) else adapter
        if len(adapters) != len(prompts):
            raise InputError(f"{len(prompts)} prompts came with {len(adapters)} adapters")
        self.turns.refuse_within("generate")
        with self.turns:
            requests = [
                self._make(prompt, each, logits_processors, adapter=named)
                for prompt, each, named in zip(prompts, params, adapters, strict=True)
            ]
        try:
            with self.turns:
                for request in requests:
                    self.driver.submit(request)
            while any(request.finish_reason is None for request in requests):
                self.step()
        finally:  # after an interruption they would otherwise keep running during later calls
            self.abort(*requests)
        return [request.completion() for request in requests]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        logits_processors: Sequence[Processor] = (),
        *,
        adapter: str | None = None,
    ) -> Iterator[Chunk]:
        """Complete one prompt, yielding text and ids as each step commits them.

        Several streams can be read alternately: each has its own queue, and a step advances all of them.
        """
        request = self.submit(prompt, params, logits_processors, adapter=adapter)
        try:
            while request.finish_reason is None or request.chunks:  # in this order: another thread may end it between
                if not request.chunks:
                    self.step()
                yield from request.take()
        finally:
            self.abort(request)

    @in_turn
    def submit(
        self,
        prompt: Prompt | Submit,
        params: SamplingParams | None = None,
        logits_processors: Sequence[Processor] = (),
        **fields: Any,
    ) -> Request:
        """Queue a request; `step` advances it. Raises InputError for a prompt that cannot be completed.

        A lpr.protocol.Submit is passed without other arguments. `logits_processors` are applied in order, after those
        of `params` and before temperature, top-k, top-p and min-p; see lpr.model.sampling.processors for their
        arguments. They are not sent to other ranks, so with several ranks every rank must submit the request.

        `fields` are those of Submit. `id` must be new; default: the next number. `delivered` are ids that an earlier
        run has emitted; the output continues after them as in an uninterrupted run. Requests of the same `tenant` share
        drafts and K/V; with `learns` False a request shares no drafts. Neither changes the output. With `details`,
        chunks name the draft source of each token. `arrived` is in seconds of time.monotonic; default: now. Requests
        wait in the order of arrival, shifted by `priority` (see lpr.sched.queue); shares (`share`) get slots in
        proportion to their `weight` (see lpr.sched.fair_shares). `prediction` is a text, or ids, that the output is
        likely to repeat in large part; it is a draft source and never changes the output. `predicted` are the counts of
        an earlier run. `adapter` names a loaded adapter (`load_adapter`); only requests with the same adapter share
        drafts and K/V.
        """
        if isinstance(prompt, Submit) and (params is not None or logits_processors or fields):
            raise InputError("a Submit comes without other arguments")
        request = self._make(prompt, params, logits_processors, **fields)
        self.driver.submit(request)
        return request

    def _make(
        self,
        given: Prompt | Submit,
        params: SamplingParams | None,
        processors: Sequence[Processor],
        *,
        id: RequestId | None = None,
        delivered: Sequence[int] = (),
        arrived: float | None = None,
        prediction: Prompt | None = None,
        **fields: Any,
    ) -> Request:
        """The request that `submit` submits; raises InputError."""
        if not isinstance(params, SamplingParams | None):
            raise InputError(f"parameters are SamplingParams, not {reprlib.repr(params)}")
        table, prompt = self.replica.requests, None
        if isinstance(given, Submit) and params is None:
            command, id, delivered, prediction = given, given.id, given.delivered, given.prediction
            self.encode(given.prompt_ids)
        else:
            prompt, id = cast(Prompt, given), table.next_id if id is None else id
            fields |= {"has_processors": bool(processors), "arrived": time.monotonic() if arrived is None else arrived}
            command = Submit.of(self.encode(prompt), params or SamplingParams(), **fields)
        known = encode_prediction(prediction, self.tokenizer, self.model.vocab_size, self.max_length)
        tokens = [*command.prompt_ids, *self._ids(delivered, "delivered tokens are a list of ids")]
        adapter = self.replica.adapters.resolve(command.adapter)
        command = msgspec.structs.replace(command, id=id, token_ids=tokens, prediction=known, adapter=adapter)
        check_request(command, self.max_length, self.model.vocab_size)
        return table.new(command, prompt, processors)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt; raises InputError if it is empty or has an id outside the vocabulary."""
        return encode_prompt(prompt, self.tokenizer, self.model.vocab_size)

    @in_turn
    def abort(self, *requests: Request) -> None:
        """Abort requests after the running step, on all ranks; no effect on finished ones."""
        if not self.is_stopped:
            self.driver.post(*[Abort(request.id) for request in requests if request.finish_reason is None])

    def step(self) -> list[Request]:
        """Advance the running requests by one step; returns those with new tokens and those that ended.

        On one GPU the next step begins before this returns. Without work, ranks other than the driver wait here for its
        next command.
        """
        with self.turns:
            self.turns.refuse_within("step")
            try:
                self.turns.is_stepping = True
                self.driver.step()
            finally:
                self.turns.is_stepping = False
            return self.replica.take_advanced()

    def work(self) -> None:
        """On every rank but the driver: take part in each step until the driver calls `close`.

        Also returns when the driver was lost and this rank has taken its place (`is_driver(engine.comm)`); `requests`
        then holds the requests that go on.
        """
        while not self.is_stopped and not is_driver(self.comm):
            self.step()

    @in_turn
    def drain(self) -> None:
        """Refuse further requests; submitted ones are completed."""
        self.driver.post(Drain())

    @in_turn
    def close(self) -> None:
        """End the job on all ranks and abort running requests; frees captured graphs before their communicators."""
        self.turns.refuse_within("close")
        if not self.is_stopped:
            self.driver.post(Stop())
        while not self.is_stopped:
            self.step()
        self.replica.start_times.keep(self.step_times)
        self.replica.adapters.close()
        self.model.release()

    @in_turn
    def compile(self, grammar: str) -> Future[Any] | None:
        """Compile a grammar on all ranks while steps run; returns this rank's future, None without grammar support."""
        self.driver.post(Compile(grammar))
        return self.replica.requests.compile(grammar, self.model.vocab_size)
