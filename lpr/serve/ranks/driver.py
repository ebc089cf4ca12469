"""The driver: rank 0's engine, driven by what the front sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lpr.config import InputError
from lpr.dist.comm import Comm
from lpr.engine.engine import Engine
from lpr.engine.hooks import StepHooks
from lpr.engine.request import Request
from lpr.serve.messages import Abort, Chunk, Facts, Finish, Load, Resume, Stepped, Stop, Submit
from lpr.serve.ranks.delivery import Delivery, usage_of
from lpr.serve.ranks.line import PULSE_EVERY, Line

if TYPE_CHECKING:
    from lpr.fleet.sharing import SharedDrafts  # its client is an optional package

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Driver:
    """Rank 0's loop: commands from the front, a step, chunks to the front."""

    def __init__(
        self, engine: Engine, line: Line, model: str, learns: bool = True, drafts: SharedDrafts | None = None
    ) -> None:
        """Drive `engine`; raises InputError for a model that cannot be served.

        The engine may hold requests already, where its rank takes over from a driver that was lost: the front says
        which of them go on, and what it has got of them. `learns` says whether requests may draft from outputs of
        others of their tenant, `drafts` shares these with other replicas.
        """
        self.engine = engine
        self._drafts = drafts
        self._learns = learns
        self._line = line
        self._open: dict[int, Delivery] = {}
        self._num_steps = 0
        self._said: list[Chunk] = []
        self._advanced: list[Request] = []
        self._overlaps = engine.model.device.type == "cuda"
        """Does a device work while the host goes on? Then what a step added is sent while the next one runs."""
        engine.hooks = _SendWhileBusy(self._send) if self._overlaps else StepHooks()
        line.moved(self._load())
        line.send(facts_of(engine, model))

    def run(self) -> None:
        """Work until the front says Stop; raises FrontGoneError if it hangs up."""
        while True:
            for message in self._line.take(PULSE_EVERY if self._is_idle else 0.0):
                if isinstance(message, Stop):
                    return
                if isinstance(message, Submit):
                    self._said += self._submit(message)
                elif isinstance(message, Abort):
                    self._abort(message)
                elif isinstance(message, Finish):
                    self._finish(message)
                else:
                    self._drop_all_but(message)
            self._learn()
            # Without work this only looks whether the other ranks still live.
            self._advanced += self.engine.step()
            self._num_steps += not self.engine.is_idle
            if self.engine.is_idle or not self._overlaps:
                self._send()

    @property
    def _is_idle(self) -> bool:
        return self.engine.is_idle and (self._drafts is None or not self._drafts.is_waiting)

    def _learn(self) -> None:
        """Learn a little of what other replicas have finished, and say what was learnt if a snapshot is due."""
        if self._drafts is None:
            return
        batch = self._drafts.take()
        if batch is not None:
            self.engine.learn_history(batch.history, batch.tenant, batch.read_to)
        if (tenant := self._drafts.wanted) is not None:
            self._drafts.offer(tenant, *self.engine.learned(tenant))

    def _share(self, request: Request) -> None:
        """Let other replicas draft from what was finished."""
        if self._drafts is not None and request.learns and not request.params.forced_ids:
            self._drafts.finished(request.tenant, request.prompt_ids, request.token_ids)

    def _send(self) -> None:
        """Tell the front what there is to say of requests, and what steps added since the last call."""
        chunks, self._said = self._said, []
        for request in self._advanced:
            if isinstance(request.id, int) and request.id in self._open:
                chunks += self._chunks(request.id)
        self._advanced.clear()
        self._line.moved(self._load())
        if chunks:
            self._line.send(Stepped(chunks, self._line.load))

    def _submit(self, message: Submit) -> Iterator[Chunk]:
        """Begin a request, or go on with one that the ranks hold; yields what of it can be said at once."""
        num_prompt = message.num_prompt if message.num_prompt is not None else len(message.prompt_ids)
        delivered = message.prompt_ids[num_prompt:]
        request = self.engine.requests.get(message.id)
        try:
            if request is None:
                request = self.engine.submit(
                    message.prompt_ids[:num_prompt],
                    message.params,
                    id=message.id,
                    delivered=delivered,
                    tenant=message.tenant,
                    learns=self._learns,
                )
            else:
                request.take()  # `missed` says it
        except InputError as failure:
            yield Chunk(message.id, [], "", "error", str(failure))
            return
        if self._drafts is not None:
            self._drafts.follow(message.tenant)
        delivery = Delivery(request, len(delivered), message.num_characters, message.details)
        self._open[message.id] = delivery
        if (missed := delivery.missed()) is not None:
            yield missed

    def _abort(self, message: Abort) -> None:
        delivery = self._open.pop(message.id, None)
        request = delivery.request if delivery is not None else self.engine.requests.get(message.id)
        if request is not None:
            self.engine.abort(request)

    def _finish(self, message: Finish) -> None:
        """End a request whose text is complete, and say what it took: at once, as its client waits for that."""
        delivery = self._open.pop(message.id, None)
        if delivery is not None:  # else its last chunk is on its way
            self.engine.abort(delivery.request)
            chunk = Chunk(message.id, [], "", "stop", usage=usage_of(delivery.request))
            self._line.send(Stepped([chunk], self._line.load))

    def _drop_all_but(self, message: Resume) -> None:
        """Abort what the front does not want any more: it has said so to a driver that was lost."""
        if self._drafts is not None:
            for tenant in message.tenants:
                self._drafts.follow(tenant)
        wanted = set(message.ids)
        for request in list(self.engine.requests.values()):
            if request.id not in wanted:
                self.engine.abort(request)

    def _chunks(self, id: int) -> Iterator[Chunk]:
        """What the last step added to a request, as far as the front has not got it."""
        delivery = self._open[id]
        for each in delivery.request.take():
            chunk = delivery.new(each)
            if chunk is not None:
                yield chunk
            if each.finish_reason is not None:
                self._open.pop(id, None)
                if each.finish_reason in ("stop", "length"):
                    self._share(delivery.request)

    def _load(self) -> Load:
        engine = self.engine
        running = engine.scheduler.running
        held = sum(len(request.tokens) for request in running)
        cached = engine.scheduler.retained
        return Load(
            num_running=len(running),
            num_waiting=max(0, len(self._open) - len(running)),
            kv_usage=held / (engine.max_length * engine.scheduler.capacity),
            num_steps=self._num_steps,
            num_ranks=engine.comm.size * engine.comm.tp_size,
            epoch=epoch_of(engine.comm),
            num_cached_prefixes=cached[0],
            num_cached_tokens=cached[1],
            drafts=self._drafts.counts if self._drafts is not None else None,
            num_slots=engine.scheduler.capacity,
        )


class _SendWhileBusy(StepHooks):
    """Sends what the last step added while the device computes the next one."""

    def __init__(self, send: Callable[[], None]) -> None:
        self._send = send

    def while_busy(self) -> None:
        self._send()


def epoch_of(comm: Comm) -> int:
    """How often the ranks of `comm` have re-formed; 0 where a lost rank ends the job."""
    return comm.membership.epoch if comm.membership is not None else 0


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
        max_batch_size=engine.scheduler.capacity,
        lp=engine.comm.size,
        tp=engine.comm.tp_size,
        device=str(engine.model.device),
        dtype=str(engine.model.model.dtype).removeprefix("torch."),
        eos_token_ids=sorted(engine.eos_token_ids),
        tokenizer=backend.to_str(),
        special_tokens={name: str(value) for name, value in special.items() if value is not None},
        chat_templates=dict(templates),
    )
