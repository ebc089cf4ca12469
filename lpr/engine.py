"""The engine: requests in, exact completions out, several sequences in every step."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from lpr.config import DecodeConfig, InputError, SamplingParams, TreeConfig
from lpr.core.budget import AdaptiveBudget, Budget, FixedBudget
from lpr.core.calibration import Calibration
from lpr.core.cost import StepCost
from lpr.core.state import SequenceState
from lpr.core.trie import Trie
from lpr.dist.comm import Comm, SoloComm, agree
from lpr.exchange import Exchange
from lpr.measure import measure_costs
from lpr.metrics import DecodeStats
from lpr.model.loader import Loaded, digest, load, model_digest, tokenizer_digest, wrap
from lpr.model.runner import TreeModel
from lpr.model.self_check import self_check
from lpr.step import Outcome, Running, decode_step, fill_row
from lpr.text import TextStream

Prompt = str | Sequence[int]

_COSTS = b"costs "
"""Begins the message by which rank 0 shares its table of step times."""
_SHARE_EVERY = 32
"""Steps between two such messages, at least."""
_SHARE_PART = 0.05
"""A time that has changed by this part is worth a message."""
_LONGEST_STEP = 4.0
"""Automatic sizes end where a step takes this many times as long as one that evaluates one token."""
_FEWEST_NODES = 16
"""But not below this many nodes per rank: a draft that is sure of itself pays almost anywhere."""


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
    """`stop` (end of text or a stop string) or `length` (max_new_tokens)."""
    stats: DecodeStats


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

    def completion(self) -> Completion:
        """The finished request's result."""
        assert self.finish_reason is not None
        stream = self.text_stream
        return Completion(self.prompt, self.prompt_ids, stream.token_ids, stream.text, self.finish_reason, self.stats)


class Engine:
    """Decodes requests with one model; `submit` and `step` drive it, `generate` and `stream` do so for you.

    The output of a request depends on the model, its prompt and its SamplingParams only, never on the DecodeConfig,
    the other requests or the number of ranks (exactly in fp32; half precision rounds by the height of a GEMM).
    """

    def __init__(
        self,
        loaded: Loaded,
        decode: DecodeConfig | None = None,
        comm: Comm | None = None,
        costs: StepCost | None = None,
        graphs: bool = True,
        compile: bool = False,
    ) -> None:
        """An engine for a loaded model.

        `graphs` False evaluates steps on a GPU without CUDA graphs, `compile` lets torch.compile fuse those with.
        `costs` are step times to decide by instead of measured ones: the steps of a run can then be repeated exactly.
        Raises InputError if the model cannot run a token tree or, with several ranks, on every rank if one rank has
        another model, tokenizer or configuration.
        """
        decode = decode if decode is not None else DecodeConfig()
        self.tokenizer = loaded.tokenizer
        self.eos_token_ids = loaded.eos_token_ids
        self.comm = comm if comm is not None else SoloComm()
        self.model = TreeModel(loaded.model, graphs=graphs)
        if compile and self.model.capturer is None:
            raise InputError(
                f"compile works on captured steps: {self.model.graph_reason or 'it needs a GPU and graphs=True'}"
            )
        self._like = self_check(self.model)
        if compile:
            self.model.compile()
        limit = loaded.max_positions or 4096
        if decode.max_length is not None and loaded.max_positions and decode.max_length > loaded.max_positions:
            raise InputError(f"max_length={decode.max_length} exceeds the model's {loaded.max_positions} positions")
        self.max_length = decode.max_length or min(limit, 4096)
        if self.comm.size > 1:
            facts = {
                "configuration": digest(repr((decode, self.max_length))),
                "model": model_digest(loaded.model),
                "form of a batch (packed or padded)": int(self.model.packed),
                "tokenizer": tokenizer_digest(loaded.tokenizer),
            }
            agree(self.comm, None, facts)
        self._own_costs = costs
        self._configure(decode)

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str,
        decode: DecodeConfig | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        comm: Comm | None = None,
        costs: StepCost | None = None,
        graphs: bool = True,
        compile: bool = False,
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
        return cls(loaded, decode, comm, costs, graphs, compile)

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        tokenizer: Any | None = None,
        decode: DecodeConfig | None = None,
        comm: Comm | None = None,
        costs: StepCost | None = None,
        graphs: bool = True,
        compile: bool = False,
    ) -> Engine:
        """An engine for a model in memory, which is switched to tree attention."""
        return cls(wrap(model, tokenizer), decode, comm, costs, graphs, compile)

    def reconfigure(self, decode: DecodeConfig) -> None:
        """Decode further requests with other settings, forgetting what drafts were learnt; needs an idle engine."""
        if self.busy:
            raise RuntimeError("reconfigure needs an engine without running requests")
        self._configure(decode)

    def _configure(self, decode: DecodeConfig) -> None:
        self.config = config = self._sizes(decode)
        self._budget: Budget = FixedBudget(config)
        # With fixed sizes each request has its own, so that a job restarted from its output file takes the same steps.
        self._calibration = Calibration() if decode.adaptive else None
        if decode.adaptive:
            assert self._own_costs is not None
            self._budget = AdaptiveBudget(config, self._own_costs.copy(), self.comm.size)
        self._since_shared = 0
        self.shared = Trie(config.trie_capacity)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._exchange = Exchange(config, self.comm, self.model.device)
        self._outgoing = b""
        self._received: deque[bytes] = deque()
        shard = min(config.num_nodes, self._exchange.capacity + config.max_branch)
        self.model.allocate(config.max_batch_size, self.max_length, shard, self._like)
        if self.model.graphs is not None:
            self.model.graphs.prepare(config.num_recycled, show=self.comm.rank == 0)

    def _sizes(self, decode: DecodeConfig) -> TreeConfig:
        """The sizes of `decode` in numbers; automatic ones end where a step takes several times that of one token."""
        if not decode.adaptive:
            return decode.resolved(self.comm.size)
        if self._own_costs is None:
            self._own_costs = measure_costs(self.model, self._like, self.comm, decode.max_nodes)
        longest = self._own_costs.longest(_LONGEST_STEP, decode.max_nodes)
        return decode.resolved(self.comm.size, max(longest, min(_FEWEST_NODES, decode.max_nodes)))

    # Driving it yourself.

    @property
    def busy(self) -> bool:
        """Is any request waiting or running?"""
        return bool(self._waiting or self._running)

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """Queue a request; `step` advances it. Raises InputError for a prompt that cannot be completed.

        With several ranks, every rank must submit the same requests between the same steps; `lpr.lead` does that for
        requests that only rank 0 knows of.
        """
        request = self.prepare(prompt, params)
        self.enqueue(request)
        return request

    def enqueue(self, request: Request) -> None:
        """Queue a request that `prepare` made."""
        self._waiting.append(request)

    def prepare(self, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """A request that is not queued yet. Raises InputError for a prompt that cannot be completed."""
        params = params if params is not None else SamplingParams()
        ids = self.encode(prompt)
        if len(ids) + params.max_new_tokens > self.max_length:
            raise InputError(
                f"the prompt's {len(ids)} tokens and max_new_tokens={params.max_new_tokens} exceed the context of "
                f"{self.max_length} tokens"
            )
        return Request(prompt, ids, params, TextStream(self.tokenizer, ids, params, self.eos_token_ids))

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
        outcomes, announced = decode_step(
            runs, self.config, self.model, self._exchange, self._budget, len(self._outgoing), fills
        )
        if announced:
            self._receive(self.comm.broadcast(self._outgoing, announced))
            self._outgoing = b""
        chunks = []
        for request, outcome in zip(batch, outcomes, strict=True):
            sources = outcome.tree.sources
            request.stats.count_step(sources, [sources[node] for node in outcome.path])
            chunks.append(self._emit(request, outcome.emitted))
        for request in batch:
            if request.finish_reason is not None:
                self._release(request)
        if outcomes and not fills and captures == self.model.num_captures:
            self._keep_current(outcomes, runs, (time.perf_counter() - began) * 1e3)
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
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete every prompt; completions come in the order of `prompts`.

        `params` is one for all or one per prompt. Raises InputError before any work if a prompt cannot be completed.
        """
        if isinstance(prompts, str):
            raise InputError("generate takes a list of prompts; put a single one in brackets")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InputError(f"{len(prompts)} prompts came with {len(params)} SamplingParams")
        requests = [self.prepare(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        for request in requests:
            self.enqueue(request)
        while any(request.finish_reason is None for request in requests):
            self.step()
        return [request.completion() for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Complete one prompt, yielding text and ids as each step commits them."""
        request = self.submit(prompt, params)
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

    def _receive(self, message: bytes) -> None:
        if not message.startswith(_COSTS):
            self._received.append(message)
        elif isinstance(self._budget, AdaptiveBudget):
            self._budget.cost = StepCost.from_json(json.loads(message.removeprefix(_COSTS)))

    def _keep_current(self, outcomes: Sequence[Outcome], runs: Sequence[Running], milliseconds: float) -> None:
        """On rank 0: learn from a step's time, and share the table that all ranks decide by when it has changed."""
        costs, budget = self._own_costs, self._budget
        if self.comm.rank or not isinstance(budget, AdaptiveBudget) or costs is None or costs.fixed:
            return
        longest = max(len(run.state.tokens) for run in runs)
        costs.observe(sum(outcome.num_entries for outcome in outcomes), len(runs), longest, milliseconds)
        self._since_shared += 1
        if self._since_shared >= _SHARE_EVERY and not self._outgoing and costs.differs(budget.cost, _SHARE_PART):
            self._outgoing = _COSTS + json.dumps(costs.to_json()).encode()
            self._since_shared = 0

    # Slots.

    def _schedule(self) -> tuple[list[Request], list[tuple[Request, int]]]:
        """The requests that decode in this step, and those that fill a number of tokens of their pending chain.

        Long pending chains (new prompts) share `prefill_chunk` tokens a step, so that the other requests never wait
        for a whole prompt. Padded rows would all become as long as the longest, so there a long chain is filled by
        itself, piece by piece, and the others wait.
        """
        together = self.model.packed or len(self._running) == 1
        room = self.config.prefill_chunk
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
        while self._waiting and len(self._running) < self.config.max_batch_size:
            request = self._waiting.popleft()
            state = SequenceState(
                request.prompt_ids, request.params, self.config, self.comm.size, self.shared, self._calibration
            )
            request.running = Running(state, slot=len(self._running))
            self._running.append(request)

    def _emit(self, request: Request, tokens: Sequence[int]) -> Chunk:
        """Feed a step's tokens one by one: what follows the end of the request inside a step never existed."""
        taken = 0
        while taken < len(tokens) and request.finish_reason is None:
            request.finish_reason = request.text_stream.push(tokens[taken])
            taken += 1
        request.stats.num_tokens += taken
        return Chunk(request, list(tokens[:taken]), request.text_stream.take(), request.finish_reason)

    def _release(self, request: Request) -> None:
        """Learn from a request's output and give its slot to the last running one, so that slots stay neighbours."""
        assert request.running is not None and self.model.cache is not None
        self.learn(request.text_stream.token_ids)
        slot = request.running.slot
        last = self._running.pop()
        if last is not request:
            assert last.running is not None
            held = last.running.state.held[self.comm.rank]
            self.model.cache.move_slot(last.running.slot, slot, held)
            last.running.slot = slot
            self._running[slot] = last
        request.running = None
