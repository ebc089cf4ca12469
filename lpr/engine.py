"""The engine: requests in, exact completions out, several sequences in every step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from lpr.config import DecodeConfig, InputError, SamplingParams
from lpr.core.accept import NOT_A_NUMBER
from lpr.core.state import SequenceState
from lpr.core.trie import Trie
from lpr.dist.comm import Comm, SoloComm, agree
from lpr.exchange import Exchange
from lpr.metrics import DecodeStats
from lpr.model.loader import Loaded, digest, load, model_digest, tokenizer_digest, wrap
from lpr.model.runner import TreeModel
from lpr.model.self_check import self_check
from lpr.processors import Processor, Processors
from lpr.step import Outcome, Running, decode_step, fill_step
from lpr.text import TextStream

Prompt = str | Sequence[int]


@dataclass
class Completion:
    """What a request came to."""

    prompt: Prompt
    prompt_token_ids: list[int]
    token_ids: list[int]
    """Emitted ids, an end-of-text token included."""
    text: str
    """Emitted text; it continues the prompt, and ends before a stop string or an end-of-text token."""
    finish_reason: str
    """`stop` (end of text or a stop string), `length` (max_new_tokens) or `error`."""
    stats: DecodeStats
    error: str | None = None
    """What ended the request early, in one line; ids and text are those before it."""


@dataclass
class Chunk:
    """What one step added to a request."""

    request: Request
    token_ids: list[int]
    """Ids committed by the step."""
    text: str
    """Text that is final now; it may lag behind the ids by an incomplete character or a possible stop string."""
    finish_reason: str | None


@dataclass(eq=False)
class Request:
    """A submitted prompt on its way."""

    prompt: Prompt
    prompt_ids: list[int]
    params: SamplingParams
    text_stream: TextStream
    stats: DecodeStats = field(default_factory=DecodeStats)
    finish_reason: str | None = None
    running: Running | None = None
    processors: Processors | None = None
    error: str | None = None

    def completion(self) -> Completion:
        """The finished request's result."""
        assert self.finish_reason is not None
        stream = self.text_stream
        ids, text = stream.token_ids, stream.text
        return Completion(self.prompt, self.prompt_ids, ids, text, self.finish_reason, self.stats, self.error)


class Engine:
    """Decodes requests with one model; `submit` and `step` drive it, `generate` and `stream` do so for you.

    The output of a request depends on the model, its prompt, SamplingParams and processors only, never on the
    DecodeConfig, the other requests or the number of ranks (exactly in fp32; half precision rounds by the height of a
    GEMM).
    """

    def __init__(self, loaded: Loaded, decode: DecodeConfig | None = None, comm: Comm | None = None) -> None:
        """An engine for a loaded model.

        Raises InputError if the model cannot run a token tree or, with several ranks, on every rank if one rank has
        another model, tokenizer or configuration.
        """
        decode = decode if decode is not None else DecodeConfig()
        self.tokenizer = loaded.tokenizer
        self.eos_token_ids = loaded.eos_token_ids
        self.comm = comm if comm is not None else SoloComm()
        self.model = TreeModel(loaded.model)
        self._like = self_check(self.model)
        limit = loaded.max_positions or 4096
        if decode.max_length is not None and loaded.max_positions and decode.max_length > loaded.max_positions:
            raise InputError(f"max_length={decode.max_length} exceeds the model's {loaded.max_positions} positions")
        self.max_length = decode.max_length or min(limit, 4096)
        if self.comm.size > 1:
            facts = {
                "configuration": digest(repr((decode, self.max_length))),
                "model": model_digest(loaded.model),
                "tokenizer": tokenizer_digest(loaded.tokenizer),
            }
            agree(self.comm, None, facts)
        self._configure(decode)

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str,
        decode: DecodeConfig | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        comm: Comm | None = None,
    ) -> Engine:
        """Load a transformers causal LM from a folder or a hub id.

        `dtype` "auto" is the checkpoint's own on an accelerator and float32 on a CPU. Raises InputError, with several
        ranks on all of them if one cannot load.
        """
        loaded, failure = None, None
        try:
            loaded = load(str(path_or_hub_id), dtype, device)
        except InputError as error:
            failure = str(error)
        if comm is not None:
            agree(comm, failure)
        if loaded is None:
            raise InputError(failure)
        return cls(loaded, decode, comm)

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        tokenizer: Any | None = None,
        decode: DecodeConfig | None = None,
        comm: Comm | None = None,
    ) -> Engine:
        """An engine for a model in memory, which is switched to tree attention."""
        return cls(wrap(model, tokenizer), decode, comm)

    def reconfigure(self, decode: DecodeConfig) -> None:
        """Decode further requests with other settings, forgetting what drafts were learnt; needs an idle engine."""
        if self.busy:
            raise RuntimeError("reconfigure needs an engine without running requests")
        self._configure(decode)

    def _configure(self, decode: DecodeConfig) -> None:
        self.config = decode = decode.scaled(self.comm.size)
        self.shared = Trie(decode.trie_capacity)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._exchange = Exchange(decode, self.comm, self.model.device)
        self._outgoing = b""
        self._received: deque[bytes] = deque()
        shard = min(decode.num_nodes, self._exchange.capacity + decode.max_branch)
        self.model.allocate(decode.max_batch_size, self.max_length, shard, self._like)

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
        `lpr.lead` does that for requests that only rank 0 knows of (without `logits_processors`, which are code).
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
        top-p and min-p; see lpr.processors for what they get and when.
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
        """Advance the running requests by one step; return what it added, finished requests included.

        A request whose pending chain is long (a new prompt) is first filled by itself, piece by piece, so that the
        others' rows need no padding to its length.
        """
        self._admit()
        for request in self._running:
            assert request.running is not None
            pending = request.running.state.num_pending
            alone = len(self._running) == 1 and pending <= self.config.prefill_chunk
            if pending > 1 + self.config.num_nodes and not alone:
                fill_step(request.running, min(pending - 1, self.config.prefill_chunk), self.model, self.comm)
                request.stats.num_fill_steps += 1
                return []
        batch = list(self._running)
        runs = []
        for request in batch:
            assert request.running is not None
            left = request.params.max_new_tokens - len(request.text_stream.token_ids)
            request.running.max_depth = left - 1
            runs.append(request.running)
        outcomes, announced = decode_step(runs, self.config, self.model, self._exchange, len(self._outgoing))
        if announced:
            self._received.append(self.comm.broadcast(self._outgoing, announced))
            self._outgoing = b""
        chunks = []
        for request, outcome in zip(batch, outcomes, strict=True):
            sources = outcome.tree.sources
            request.stats.count_step(sources, [sources[node] for node in outcome.path])
            chunks.append(self._emit(request, outcome))
        for request in batch:
            if request.finish_reason is not None:
                self._release(request)
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

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.config.max_batch_size:
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
            held = last.running.state.held[self.comm.rank]
            self.model.cache.move_slot(last.running.slot, slot, held)
            last.running.slot = slot
            self._running[slot] = last
        request.running = None
