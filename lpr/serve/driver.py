"""The driver: rank 0's engine, driven by what the front sends."""

from __future__ import annotations

from typing import Any

from lpr.config import InputError
from lpr.core.tree import Source
from lpr.engine.engine import Engine
from lpr.engine.request import Chunk as EngineChunk
from lpr.engine.request import Request
from lpr.engine.stats import DecodeStats
from lpr.serve.line import PULSE_EVERY, Line
from lpr.serve.messages import Abort, Chunk, Facts, Load, Stepped, Stop, Submit, TokenLogprobs, Usage

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Driver:
    """Rank 0's loop: commands from the front, a step, chunks to the front."""

    def __init__(self, engine: Engine, line: Line, model: str, learns: bool = True) -> None:
        """Drive `engine`; raises InputError for a model that cannot be served.

        `learns` says whether requests may draft from outputs of others of their tenant.
        """
        self.engine = engine
        self._learns = learns
        self._line = line
        self._requests: dict[int, Request] = {}
        self._details: set[int] = set()
        self._told: dict[int, DecodeStats] = {}
        self._num_steps = 0
        self._advanced: list[Request] = []
        self._overlaps = engine.model.device.type == "cuda"
        """Does a device work while the host goes on? Then what a step added is sent while the next one runs."""
        engine.while_busy = self._send if self._overlaps else None
        line.send(facts_of(engine, model))

    def run(self) -> None:
        """Work until the front says Stop; raises FrontGoneError if it hangs up."""
        while True:
            for message in self._line.take(PULSE_EVERY if self.engine.is_idle else 0.0):
                if isinstance(message, Stop):
                    return
                if isinstance(message, Submit):
                    self._submit(message)
                elif (request := self._forget(message)) is not None:
                    self.engine.abort(request)
            # Without work this only looks whether the other ranks still live.
            self._advanced += self.engine.step()
            self._num_steps += not self.engine.is_idle
            if self.engine.is_idle or not self._overlaps:
                self._send()

    def _send(self) -> None:
        """Tell the front what steps added since the last call."""
        chunks = [self._chunk(chunk) for request in self._advanced for chunk in request.take()]
        self._advanced.clear()
        self._line.load = self._load()
        if known := [chunk for chunk in chunks if chunk is not None]:
            self._line.send(Stepped(known, self._line.load))

    def _submit(self, message: Submit) -> None:
        num_prompt = message.num_prompt if message.num_prompt is not None else len(message.prompt_ids)
        try:
            request = self.engine.submit(
                message.prompt_ids[:num_prompt],
                message.params,
                id=message.id,
                delivered=message.prompt_ids[num_prompt:],
                tenant=message.tenant,
                learns=self._learns,
            )
        except InputError as failure:
            chunk = Chunk(message.id, [], "", "error", str(failure))
            self._line.send(Stepped([chunk], self._line.load))
            return
        self._requests[message.id] = request
        if message.details:
            self._details.add(message.id)

    def _forget(self, message: Abort) -> Request | None:
        self._details.discard(message.id)
        self._told.pop(message.id, None)
        return self._requests.pop(message.id, None)

    def _chunk(self, chunk: EngineChunk) -> Chunk | None:
        """A chunk as the front knows it; None of a request that it has aborted."""
        request = chunk.request
        if request.id not in self._requests or not isinstance(request.id, int):
            return None
        ended = chunk.finish_reason is not None
        sources = self._sources(request, len(chunk.token_ids)) if request.id in self._details else None
        found = getattr(chunk, "logprobs", None)
        logprobs = None if found is None else [TokenLogprobs(each.logprob, list(each.top)) for each in found]
        if ended:
            self._forget(Abort(request.id))
        return Chunk(
            request.id,
            chunk.token_ids,
            chunk.text,
            chunk.finish_reason,
            request.error,
            logprobs,
            sources,
            usage_of(request) if ended else None,
            request.text_stream.stop_reason if ended else None,
        )

    def _sources(self, request: Request, count: int) -> list[str]:
        """Which draft source named each of a step's tokens; the last one is the model's own."""
        before = self._told.get(int(request.id))
        told = before.accepted if before is not None else {}
        by_depth = {
            depth: Source(source).name.lower()
            for (source, depth), number in request.stats.accepted.items()
            if depth and number > told.get((source, depth), 0)
        }
        after = DecodeStats()
        after.accepted.update(request.stats.accepted)
        self._told[int(request.id)] = after
        return [by_depth.get(depth, "model") for depth in range(1, count + 1)]

    def _load(self) -> Load:
        scheduler, engine = self.engine.scheduler, self.engine
        running = scheduler.running
        held = sum(len(request.tokens) for request in running)
        return Load(
            num_running=len(running),
            num_waiting=len(self._requests) - len(running),
            kv_usage=held / (engine.max_length * engine.decode.max_batch_size),
            num_steps=self._num_steps,
        )


def usage_of(request: Request) -> Usage:
    """What a finished request took."""
    stats = request.stats
    depths: dict[int, int] = {}
    for (source, depth), count in stats.accepted.items():
        if source != Source.ROOT:
            depths[depth] = depths.get(depth, 0) + count
    sources = stats.sources
    return Usage(
        num_steps=stats.num_steps,
        num_fill_steps=stats.num_fill_steps,
        num_cached=request.num_cached_tokens,
        drafted=sum(each.drafted for each in sources.values()),
        accepted=sum(each.accepted for each in sources.values()),
        accepted_per_depth=[depths.get(depth, 0) for depth in range(1, max(depths, default=0) + 1)],
        by_source={name: (each.drafted, each.accepted) for name, each in sources.items()},
    )


def facts_of(engine: Engine, model: str) -> Facts:
    """What an engine serves; raises InputError for a model without a tokenizer that the front can use."""
    tokenizer: Any = engine.tokenizer
    if tokenizer is None:
        raise InputError(f"the model {model!r} has no tokenizer, and a service speaks text")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError(f"the tokenizer of {model!r} is a {type(tokenizer).__name__}; a service needs a fast one")
    template = getattr(tokenizer, "chat_template", None)
    templates = template if isinstance(template, dict) else {"default": template} if template else {}
    special = {name: getattr(tokenizer, name, None) for name in _SPECIAL}
    return Facts(
        model=model,
        vocab_size=engine.model.vocab_size,
        max_length=engine.max_length,
        max_batch_size=engine.decode.max_batch_size,
        lp=engine.comm.size,
        tp=engine.comm.tp_size,
        device=str(engine.model.device),
        dtype=str(engine.model.model.dtype).removeprefix("torch."),
        eos_token_ids=sorted(engine.eos_token_ids),
        tokenizer=backend.to_str(),
        special_tokens={name: str(value) for name, value in special.items() if value is not None},
        chat_templates=dict(templates),
    )
