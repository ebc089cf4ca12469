"""The engine: requests in, exact completions out, several sequences in every step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from lpr.config import DecodeConfig, InputError, SamplingParams, TreeSizes
from lpr.core.accept import NOT_A_NUMBER
from lpr.core.state import SequenceState
from lpr.core.step_times import StepTimes
from lpr.core.suffix_index import SuffixIndex
from lpr.dist.comm import Comm, SoloComm, agree
from lpr.engine.exchange import Exchange, check_replica
from lpr.engine.measure import measure_step_times
from lpr.engine.request import Chunk, Completion, Prompt, Request, StepRecorder
from lpr.engine.sizing import Sizer
from lpr.engine.step import Outcome, Running, decode_step, fill_row, untimed
from lpr.engine.text import TextStream
from lpr.engine.trie_file import fingerprint_of, read_trie, write_trie
from lpr.model.loader import Loaded, digest, load, model_digest, tokenizer_digest, wrap
from lpr.model.parallel import TensorParallel
from lpr.model.processors import Processor, Processors
from lpr.model.runner import TreeModel
from lpr.model.self_check import self_check

_LONGEST_STEP = 4.0
"""Automatic sizes end where a step takes this many times as long as one that evaluates one token."""
_FEWEST_NODES = 16
"""But not below this many nodes per rank: a draft that is sure of itself pays almost anywhere."""


class Engine:
    """Decodes requests with one model; `submit` and `step` drive it, `generate` and `stream` do so for you.

    The output of a request depends on the model, its prompt, SamplingParams and processors only, never on the
    DecodeConfig, the other requests or the number of ranks (exactly in fp32; half precision rounds by the height of a
    GEMM).
    """

    def __init__(
        self,
        loaded: Loaded,
        decode: DecodeConfig | None = None,
        comm: Comm | None = None,
        costs: StepTimes | None = None,
        attention: str = "auto",
        graphs: bool = True,
        compile: bool = False,
    ) -> None:
        """An engine for a loaded model; `attention` is one of `lpr.model.runner.ATTENTION`.

        `graphs` False evaluates steps on a GPU without CUDA graphs, `compile` lets torch.compile fuse those with.
        `costs` are step times to decide by instead of measured ones: the steps of a run can then be repeated exactly.

        Raises InputError if the model cannot run a token tree or the cache does not fit, with several ranks on every
        rank if it is so on one, or if one has another model, tokenizer or configuration.
        """
        decode = decode if decode is not None else DecodeConfig()
        self.tokenizer = loaded.tokenizer
        self.eos_token_ids = loaded.eos_token_ids
        self.comm = comm if comm is not None else SoloComm()
        # Ranks that share weights must not enter a forward with different rows.
        check = partial(check_replica, self.comm) if self.comm.tp_mesh is not None else None
        self.model = TreeModel(loaded.model, attention=attention, graphs=graphs, check_rows=check)
        failure = None
        try:
            if compile and self.model.capturer is None:
                raise InputError(
                    f"compile works on captured steps: {self.model.graph_reason or 'it needs a GPU and graphs=True'}"
                )
            self._like = self_check(self.model)
            if compile:
                self.model.compile()
        except InputError as error:
            failure = str(error)
        limit = loaded.max_positions or 4096
        if decode.max_length is not None and loaded.max_positions and decode.max_length > loaded.max_positions:
            reason = f" ({loaded.limit_reason})" if loaded.limit_reason else ""
            raise InputError(
                f"max_length={decode.max_length} exceeds the model's {loaded.max_positions} positions{reason}"
            )
        self.recorder: StepRecorder | None = None
        """Takes down every step while it is set (lpr.cli.trace)."""
        self.max_length = decode.max_length or min(limit, 4096)
        facts, replica_facts = {}, {}
        if self.comm.size * self.comm.tp_size > 1:
            facts["configuration"] = digest(repr((decode, self.max_length)))
            facts["tokenizer"] = tokenizer_digest(loaded.tokenizer)
            facts["form of a batch (packed or padded)"] = int(self.model.packed)
            replica_facts["model"] = model_digest(loaded.model)
        agree(self.comm, failure, facts, replica_facts)
        self._costs = costs
        """Step times as all ranks know them."""
        self._follows = costs is None
        self._configure(decode)

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str,
        decode: DecodeConfig | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        comm: Comm | None = None,
        costs: StepTimes | None = None,
        attention: str = "auto",
        graphs: bool = True,
        compile: bool = False,
        tp_backend: str = "transformers",
    ) -> Engine:
        """Load a transformers causal LM from a folder or a hub id.

        `dtype` "auto" is the checkpoint's own on an accelerator and float32 on a CPU. Where the ranks of `comm` share
        replicas (`lpr.dist.runtime.join(..., tp=N)`), each loads its part; `tp_backend` says who splits the model,
        "transformers" or "deepspeed". Raises InputError, with several ranks on all of them if one cannot load.
        """
        loaded, failure = None, None
        try:
            tp = None
            if comm is not None and comm.tp_mesh is not None:
                tp = TensorParallel(comm.tp_mesh, tp_backend)
            loaded = load(str(path_or_hub_id), dtype, device, tp)
        except InputError as error:
            failure = str(error)
        if comm is not None:
            agree(comm, failure)
        if loaded is None:
            raise InputError(failure)
        return cls(loaded, decode, comm, costs, attention, graphs, compile)

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        tokenizer: Any | None = None,
        decode: DecodeConfig | None = None,
        comm: Comm | None = None,
        costs: StepTimes | None = None,
        attention: str = "auto",
        graphs: bool = True,
        compile: bool = False,
    ) -> Engine:
        """An engine for a model in memory, which is switched to tree attention."""
        return cls(wrap(model, tokenizer), decode, comm, costs, attention, graphs, compile)

    def reconfigure(self, decode: DecodeConfig) -> None:
        """Decode further requests with other settings, forgetting what drafts were learnt; needs an idle engine."""
        if self.busy:
            raise RuntimeError("reconfigure needs an engine without running requests")
        self._costs = self.costs or self._costs
        self._configure(decode)

    def _configure(self, decode: DecodeConfig) -> None:
        self.decode = decode
        self.config = config = self._sizes(decode)
        self._sizer = Sizer(config, self._costs if decode.adaptive else None, self.comm, self._follows)
        self.shared = SuffixIndex(config.trie_capacity)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._outgoing = b""
        self._received: deque[bytes] = deque()
        shard = config.evaluated_capacity(self.comm.size)
        sizes = (decode.max_batch_size, self.max_length, shard, self._like)
        agree(self.comm, self.model.shortage(*sizes, self.comm.num_sharing))
        self.model.allocate(*sizes)
        self._exchange = Exchange(config, decode.max_batch_size, self.comm, self.model.device)
        if self.model.graphs is not None:
            self.model.graphs.prepare(config.num_recycled, show=self.comm.rank == self.comm.tp_rank == 0)

    def _sizes(self, decode: DecodeConfig) -> TreeSizes:
        """The sizes of `decode` in numbers; automatic ones end where a step takes several times that of one token."""
        if not decode.adaptive:
            return decode.resolved(self.comm.size)
        if self._costs is None:
            smallest = (decode.max_batch_size, self.max_length, 1, self._like)
            agree(self.comm, self.model.shortage(*smallest, self.comm.num_sharing))  # before anything is measured
            self._costs = measure_step_times(
                self.model, self._like, self.comm, decode.max_nodes, self.max_length, decode.max_batch_size
            )
        longest = max(_FEWEST_NODES, self._costs.longest(_LONGEST_STEP))
        return decode.resolved(self.comm.size, min(longest, decode.max_nodes))

    # Driving it yourself.

    @property
    def busy(self) -> bool:
        """Is any request waiting or running?"""
        return bool(self._waiting or self._running)

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, logits_processors: Sequence[Processor] = ()
    ) -> Request:
        """Queue a request; `step` advances it. Raises InputError for a prompt that cannot be completed.

        With several ranks, every rank must submit the same requests, with the same processors, between the same steps;
        `lpr.engine.lead` does that for requests that only rank 0 knows of.
        """
        request = self.prepare(prompt, params, logits_processors)
        self.enqueue(request)
        return request

    def enqueue(self, request: Request) -> None:
        """Queue a request that `prepare` made."""
        self._waiting.append(request)

    def prepare(
        self, prompt: Prompt, params: SamplingParams | None = None, logits_processors: Sequence[Processor] = ()
    ) -> Request:
        """A request that is not queued yet. Raises InputError for a prompt that cannot be completed.

        `logits_processors` are applied in their order, after those that `params` ask for and before temperature, top-k,
        top-p and min-p; see lpr.model.processors for what they get and when.
        """
        params = params if params is not None else SamplingParams()
        ids = self.encode(prompt)
        if len(ids) + params.max_new_tokens > self.max_length:
            raise InputError(
                f"the prompt's {len(ids)} tokens and max_new_tokens={params.max_new_tokens} exceed the context of "
                f"{self.max_length} tokens"
            )
        stream = TextStream(self.tokenizer, ids, params, self.eos_token_ids)
        processors = Processors.of(params, len(ids), stream.stop_ids, self.model.device, logits_processors)
        return Request(prompt, ids, params, stream, processors=processors)

    def step(self) -> list[Chunk]:
        """Advance the running requests by one step; return what it added, finished requests included."""
        self._admit()
        batch, filling = self._schedule()
        fills = []
        for request, count in filling:
            assert request.running is not None
            fills.append(fill_row(request.running, count, self.comm.rank))
            request.stats.num_fill_steps += 1
        fills = [row for row in fills if row.tokens]
        if filling and not batch:
            if fills:
                self.model.fill(fills)
            return []
        runs = []
        for request in batch:
            assert request.running is not None
            left = request.params.max_new_tokens - len(request.text_stream.token_ids)
            request.running.max_depth = left - 1
            runs.append(request.running)
        began, captures = time.perf_counter(), self.model.num_captures
        end_phase = self.recorder.begin() if self.recorder is not None else untimed
        outcomes, announced = decode_step(
            runs, self.config, self.model, self._exchange, self._sizer.budget, len(self._outgoing), fills, end_phase
        )
        if announced:
            message = self.comm.broadcast(self._outgoing, announced)
            self._outgoing = b""
            if not self._sizer.receive(message):
                self._received.append(message)
        chunks = []
        for request, outcome in zip(batch, outcomes, strict=True):
            request.stats.count_step(outcome.tree, outcome.path)
            chunks.append(self._emit(request, outcome))
        if self.recorder is not None:
            self.recorder.record(batch, outcomes, chunks)
        for request in batch:
            if request.finish_reason is not None:
                self._release(request)
        if outcomes and not fills and captures == self.model.num_captures:
            self._sizer.observe(outcomes, runs, (time.perf_counter() - began) * 1e3)
            self._outgoing = self._outgoing or self._sizer.message()
        return chunks

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
        requests = [self.prepare(*each, logits_processors) for each in zip(prompts, params, strict=True)]
        for request in requests:
            self.enqueue(request)
        while any(request.finish_reason is None for request in requests):
            self.step()
        return [request.completion() for request in requests]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, logits_processors: Sequence[Processor] = ()
    ) -> Iterator[Chunk]:
        """Complete one prompt, yielding text and ids as each step commits them."""
        request = self.submit(prompt, params, logits_processors)
        try:
            while request.finish_reason is None:
                for chunk in self.step():
                    if chunk.request is request:
                        yield chunk
        finally:
            self.abort(request)

    def learn(self, token_ids: Sequence[int]) -> None:
        """Let further requests draft from an output, as if it had just been decoded; on every rank alike."""
        if self.config.trie_nodes and token_ids:
            self.shared.extend(token_ids)
            self.shared.end_document()

    @cached_property
    def fingerprint(self) -> str:
        """What a token id means to this model; a saved trie fits engines with the same."""
        return fingerprint_of(self.tokenizer, self.model.vocab_size)

    def save_trie(self, path: str | Path) -> Path:
        """Write the outputs learnt so far to a file, as a whole or not at all; returns it. Raises InputError."""
        return write_trie(path, self.shared, self.fingerprint)

    def load_trie(self, path: str | Path) -> None:
        """Draft from the outputs in a file instead of those learnt so far; of too many, the newest are taken.

        Raises InputError for a file that is none of `save_trie`, damaged, or of another tokenizer. With several ranks,
        `lpr.engine.lead` does this for a file that only rank 0 has.
        """
        self.restore(self.read_trie(path))

    def read_trie(self, path: str | Path) -> np.ndarray:
        """The history in a file, int32 [num_tokens], without drafting from it. Raises InputError as `load_trie`."""
        history = read_trie(path, self.fingerprint)
        if len(history) and not -1 <= history.min() <= history.max() < self.model.vocab_size:
            raise InputError(f"the trie {path} holds token ids outside the vocabulary of {self.model.vocab_size}")
        return history[-self.config.trie_capacity :]

    def restore(self, history: np.ndarray) -> None:
        """Draft from a history instead of the outputs learnt so far; on every rank alike, without running requests."""
        if self.busy:
            raise RuntimeError("loading a trie needs an engine without running requests")
        self.shared = SuffixIndex.from_history(history, self.config.trie_capacity)
        self.shared.end_document()

    @property
    def costs(self) -> StepTimes | None:
        """Step times as all ranks know them by now; None where sizes are fixed."""
        return self._sizer.costs

    # Messages from rank 0 to all ranks.

    @property
    def payload_bytes(self) -> int:
        """Bytes that each rank contributes to a step's all-gather."""
        return self._exchange.payload_bytes

    @property
    def announcing(self) -> bool:
        """Is a message on its way?"""
        return bool(self._outgoing)

    def announce(self, message: bytes) -> None:
        """On rank 0: let the next step's header tell all ranks of `message`, and broadcast it after that step."""
        if self._outgoing:
            raise RuntimeError("a message is on its way already")
        self._outgoing = message

    def received(self) -> bytes | None:
        """The next broadcast message that has arrived, on every rank after the same step."""
        return self._received.popleft() if self._received else None

    def abort(self, request: Request) -> None:
        """Drop an unfinished request and free its slot; a finished one is left as it is."""
        if request.finish_reason is not None:
            return
        request.finish_reason = "abort"
        if request in self._running:
            self._release(request)
        elif request in self._waiting:
            self._waiting.remove(request)

    # Slots.

    def _schedule(self) -> tuple[list[Request], list[tuple[Request, int]]]:
        """The requests that decode in this step, and those that fill a number of tokens of their pending chain.

        Long pending chains (new prompts) share `prefill_chunk` tokens a step, so that the other requests never wait
        for a whole prompt. Padded rows would all become as long as the longest, so there a long chain is filled by
        itself, piece by piece, and the others wait.
        """
        together = self.model.packed or len(self._running) == 1
        room = self.decode.prefill_chunk
        decoding, filling = [], []
        for request in self._running:
            assert request.running is not None
            above = request.running.state.num_pending - 1
            if above <= self.config.num_nodes:
                decoding.append(request)
                continue
            count = min(above, room)
            room -= count
            if together and count == above:
                decoding.append(request)
            elif count:
                filling.append((request, count))
        if filling and not together:
            return [], filling[:1]
        return decoding, filling

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.decode.max_batch_size:
            request = self._waiting.popleft()
            state = SequenceState(request.prompt_ids, request.params, self.config, self.comm.size, self.shared)
            request.running = Running(state, slot=len(self._running), processors=request.processors)
            self._running.append(request)

    def _emit(self, request: Request, outcome: Outcome) -> Chunk:
        """Feed a step's tokens one by one: what follows the end of the request inside a step never existed."""
        tokens, taken = outcome.emitted, 0
        while taken < len(tokens) and request.finish_reason is None:
            request.finish_reason = request.text_stream.push(tokens[taken])
            taken += 1
        request.stats.num_tokens += taken
        if request.finish_reason is None and outcome.failure is not None:
            self._fail(request, outcome)
        return Chunk(request, list(tokens[:taken]), request.text_stream.take(), request.finish_reason)

    def _fail(self, request: Request, outcome: Outcome) -> None:
        """End a request of which the next token cannot be said; every rank does, but only some know a processor's why.

        Logits that are not numbers are asked for once more without a draft, which may have spoilt them.
        """
        if outcome.failure == NOT_A_NUMBER:
            if len(outcome.tree) > 1:
                return
            at = len(request.text_stream.token_ids)
            request.error = f"the model's logits for output token {at + 1} are not numbers (NaN)"
        else:
            known = request.processors.failure if request.processors is not None else None
            request.error = known or "a logits processor failed on another rank, whose Completion says how"
        request.finish_reason = "error"
        request.text_stream.close("error")

    def _release(self, request: Request) -> None:
        """Learn from a request's output and give its slot to the last running one, so that slots stay neighbours."""
        assert request.running is not None and self.model.cache is not None
        self.learn(request.text_stream.token_ids)
        slot = request.running.slot
        if request.error is not None or not request.stats.num_tokens:
            self.model.cache.clear(slot, 0)  # its K/V may be NaN, which would spoil the slot's next request
        last = self._running.pop()
        if last is not request:
            assert last.running is not None
            held = last.running.state.num_computed_tokens[self.comm.rank]
            self.model.cache.move_slot(last.running.slot, slot, held)
            last.running.slot = slot
            self._running[slot] = last
        request.running = None
