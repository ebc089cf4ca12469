"""The work of a rank: join the mesh, load the model, drive the engine or take part.

Rank 0 submits the front's requests to the engine, and sends the new chunks of each step to the front.
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpr.config import InputError
from lpr.dist.comm import Comm, is_driver
from lpr.dist.runtime import World, join
from lpr.engine.engine import Engine
from lpr.engine.hooks import StepHooks
from lpr.engine.request import Request
from lpr.engine.trie_file import check_writable, read_trie, trie_path
from lpr.model.loader import bundled_model
from lpr.protocol import Abort, Chunk, ErrorCode, Failure, Stop, Submit
from lpr.serve import messages
from lpr.serve.options import ServeArgs
from lpr.serve.ranks import ORIGIN, SOCKET
from lpr.serve.ranks.line import PULSE_EVERY, FrontGoneError, Line

if TYPE_CHECKING:
    from lpr.fleet.sharing import SharedDrafts  # its client is an optional package

MOST_READ = 1024  # delivered tokens of new requests that are read between two steps, at least those of one request
COMPILING_EVERY = 0.005  # seconds between two polls of compiling grammars, without other work
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def run(args: ServeArgs, line: Line | None) -> None:
    """Join the world, load the same engine on every rank, and let rank 0 drive."""
    _tell(line, "meeting the other ranks", 1)
    world = World.from_environment()
    world.mesh_shape(args.tp, args.lp)
    device = world.device(args.engine.device)
    with join(world, device, args.timeout, args.tp, args.load_timeout) as comm:
        _tell(line, "loading the model", 2)
        model = args.model or bundled_model()
        enabled = args.engine.enable_lora or args.allow_runtime_lora_updating
        options = replace(args.engine, device=device, enable_lora=enabled)
        engine = Engine.from_pretrained(model, args.decode, options, comm=comm)
        # Otherwise each full garbage collection traverses a million permanent objects during a step.
        gc.freeze()
        if line is not None:
            if engine.memory is not None:
                print(f"lpr.serve: {engine.memory}", file=sys.stderr, flush=True)
            _drive(engine, line, model, args, takes_over=False)
            return
        is_first = is_driver(engine.comm)  # of a new mesh, as all others were lost
        engine.work()
        if engine.is_stopped:
            engine.close()
            return
        # The driver was lost, and this rank has taken its place.
        if SOCKET not in os.environ:
            raise FrontGoneError("the driver was lost, and the front with it")
        line = Line(Path(os.environ[SOCKET]), epoch=epoch_of(engine.comm), loaded=not is_first)
        with contextlib.closing(line):
            _drive(engine, line, model, args, takes_over=not is_first)


def _drive(engine: Engine, line: Line, model: str, args: ServeArgs, takes_over: bool) -> None:
    kept = _kept_trie(args.trie, engine, loads=not takes_over)
    with _stopped(engine, line), kept, _shared(args, engine, line) as drafts:
        EngineBridge(engine, line, model, drafts).run()


@contextlib.contextmanager
def _shared(args: ServeArgs, engine: Engine, line: Line) -> Iterator[SharedDrafts | None]:
    if args.fleet.draft_store is None or not engine.sizes.trie_nodes:
        yield None
        return
    from lpr.fleet.sharing import SharedDrafts  # its client is an optional package

    drafts = SharedDrafts(
        args.fleet,
        fingerprint=engine.fingerprint,
        model=args.names[0],
        vocab_size=engine.model.vocab_size,
        origin=bytes.fromhex(os.environ.get(ORIGIN) or secrets.token_hex(8)),
        positions=engine.read_to,
        wake=line.wake,
    )
    with contextlib.closing(drafts):
        yield drafts


@contextlib.contextmanager
def _stopped(engine: Engine, line: Line) -> Iterator[None]:
    """Context: ends the other ranks too, unless a rank was lost or failed in a step, which they detect as a loss."""
    try:
        yield
    except (FrontGoneError, InputError):
        engine.close()
        raise
    except BaseException:
        line.close()  # now, as communicators may take long to end
        raise
    engine.close()


@contextlib.contextmanager
def _kept_trie(path: Path | None, engine: Engine, loads: bool) -> Iterator[None]:
    """Context: loads the trie at `path` if `loads`, and saves it at the end."""
    if path is not None:
        if loads and trie_path(path).exists():
            read_trie(path)
            engine.load_trie(path)
        check_writable(path)
    yield
    if path is not None:
        engine.save_trie(path)


def _tell(line: Line | None, stage: str, number: int) -> None:
    if line is not None:
        line.send(messages.Loading(stage, number, 3))


class EngineBridge(StepHooks):
    """Connects the front's socket with rank 0's engine."""

    def __init__(self, engine: Engine, line: Line, model: str, drafts: SharedDrafts | None = None) -> None:
        """Connect `engine` and `line`; raises InputError for a model that cannot be served.

        After a change of drivers the engine holds requests already, and the front tells which of them continue.
        `drafts` shares outputs with other replicas.
        """
        self.engine = engine
        self.overlaps = engine.model.device.type == "cuda"
        """True if the device runs asynchronously: chunks are then sent while the next step runs."""
        self._drafts = drafts
        self._line = line
        self._open: dict[int, Request] = {}
        self._new: dict[int, Submit] = {}  # requests that are not submitted yet
        self._compiling: dict[int, Future[Any]] = {}
        """Compiling grammars of new requests, which are submitted afterwards so that no step waits."""
        self._changes: dict[str, Future[None]] = {}  # by name, the futures of adapters being loaded or unloaded
        self._num_steps = 0
        self._ready: list[Chunk] = []  # chunks outside steps, to be sent with the next ones
        self._advanced: list[Request] = []
        self._begun: set[int | str] = set()  # requests with a slot, as the front was told
        self._has_heard = False  # True if the messages for the next step were handled
        self._has_to_stop = False
        line.moved(self._load())
        line.send(facts_of(engine, model))

    def run(self) -> None:
        """Work until the front sends Stop; raises FrontGoneError if it hangs up."""
        self.engine.hooks = self
        try:
            while True:
                if self.engine.is_idle or not self._has_heard:
                    self._hear(self._patience)
                if self._has_to_stop:
                    return
                self._has_heard = False
                # Without work this only checks that the other ranks are alive.
                self._advanced += self.engine.step()
                self._num_steps += not self.engine.is_idle
                if self.engine.is_idle or not self.overlaps:
                    self._send()
        finally:
            self.engine.hooks = StepHooks()

    def _hear(self, wait: float) -> None:
        """Handle what the front and other replicas have sent; waits up to `wait` seconds for the front."""
        self._has_heard = True
        self._obey(self._line.take(wait))
        if not self._has_to_stop:
            self._learn()

    def _obey(self, received: Sequence[messages.ToDriver]) -> None:
        """Handle the front's messages up to Stop, new requests last and as many as delay no running ones."""
        for message in received:
            if isinstance(message, Stop):
                self._has_to_stop = True
                return
            if isinstance(message, Submit):
                self._new[int(message.id)] = message
                if message.params.grammar and (compiling := self.engine.compile(message.params.grammar)) is not None:
                    self._compiling[int(message.id)] = compiling
            elif isinstance(message, Abort):
                self._new.pop(int(message.id), None)
                request = self._open.pop(int(message.id), None) or self.engine.requests.get(message.id)
                if request is not None:
                    self.engine.abort(request)
            elif isinstance(message, messages.Finish):
                self._finish(message)
            elif isinstance(message, messages.LoadAdapter | messages.UnloadAdapter):
                self._change(message)
            else:
                self._resume(message)
        num_read = 0
        self._compiling = {id: each for id, each in self._compiling.items() if id in self._new and not each.done()}
        self._tell_changes()
        for id in [id for id in self._new if id not in self._compiling] if not self._changes else ():
            if num_read >= MOST_READ:
                break
            message = self._new.pop(id)
            num_read += len(message.token_ids) - message.num_prompt
            self._ready += self._submit(message)

    def _change(self, message: messages.LoadAdapter | messages.UnloadAdapter) -> None:
        """Load or unload an adapter; later requests wait for it."""
        name = message.name
        try:
            if isinstance(message, messages.LoadAdapter):
                self._changes[name] = self.engine.load_adapter(name, message.path)
            else:
                self._changes[name] = self.engine.unload_adapter(name)
        except InputError as failure:
            self._changes[name] = Future()
            self._changes[name].set_exception(failure)

    def _tell_changes(self) -> None:
        if not all(done.done() for done in self._changes.values()):  # the front drops adapters that are not listed
            return
        for name, done in self._changes.items():
            failure = None if done.exception() is None else str(done.exception())
            self._line.send(messages.Adapters(adapters_of(self.engine), name, failure))
        self._changes.clear()

    def begin_step(self) -> None:
        """Tell the front which requests got a slot, before a step that may kill the ranks."""
        running = {request.id for request in self.engine.scheduler.running}
        if not running <= self._begun:
            self._line.moved(self._load())
            self._line.send(messages.Pulse(self._line.load))
            self._line.flush()
        self._begun = running

    def between_steps(self) -> None:
        if self.overlaps:
            self._hear(0.0)

    def while_busy(self) -> None:
        if self.overlaps:
            self._send()

    @property
    def _patience(self) -> float:
        """Seconds to wait for the front's next message."""
        if self._changes or len(self._new) > len(self._compiling) or not self.engine.is_idle:
            return 0.0
        if self._compiling:
            return COMPILING_EVERY
        return 0.0 if self._drafts is not None and self._drafts.is_waiting else PULSE_EVERY

    def _learn(self) -> None:
        """Learn some finished outputs of other replicas, and hand over a snapshot if one is due."""
        if self._drafts is None:
            return
        batch = self._drafts.take()
        if batch is not None:
            self.engine.learn_history(batch.history, batch.tenant, batch.read_to)
        if (tenant := self._drafts.wanted) is not None:
            self._drafts.offer(tenant, *self.engine.learned(tenant))

    def _send(self) -> None:
        chunks, self._ready = self._ready, []
        for request in self._advanced:
            if not isinstance(request.id, int) or request.id not in self._open:
                continue
            chunks += request.take()
            if request.finish_reason is not None:
                del self._open[request.id]
                self._share(request)
        self._advanced.clear()
        self._line.moved(self._load())
        if chunks:
            self._line.send(messages.Stepped(chunks, self._line.load))

    def _share(self, request: Request) -> None:
        """Let other replicas draft from a request that has finished well."""
        is_whole = request.finish_reason in ("stop", "length")
        if self._drafts is not None and is_whole and request.learns and not request.params.forced_ids:
            self._drafts.finished(request.tenant, request.prompt_ids, request.token_ids)

    def _submit(self, message: Submit) -> Iterator[Chunk]:
        """Submit a request, or continue one that the ranks hold; yields chunks to send at once."""
        id = int(message.id)
        request = self.engine.requests.get(id)
        try:
            if request is None:
                request = self.engine.submit(message)
            else:
                request.take()  # sent again below
        except InputError as failure:
            yield Chunk(id, [], "", "error", Failure(ErrorCode.GENERATION_FAILED, str(failure)))
            return
        if self._drafts is not None:
            self._drafts.follow(request.tenant)
        self._open[id] = request
        if request.num_output:
            yield request.resend(len(message.token_ids) - message.num_prompt)

    def _finish(self, message: messages.Finish) -> None:
        """End a request whose text is complete, and send its usage at once, as the client waits for it."""
        if (new := self._new.pop(message.id, None)) is not None:
            self._ready += self._submit(new)
        request = self._open.pop(message.id, None)
        if request is not None:  # otherwise its last chunk is on its way
            self.engine.abort(request)
            chunk = Chunk(message.id, [], "", "stop", usage=request.usage, predicted=request.predicted)
            self._line.send(messages.Stepped([chunk], self._line.load))

    def _resume(self, message: messages.Resume) -> None:
        """Abort the requests that the front has dropped while there was no driver."""
        if self._drafts is not None:
            for tenant in message.tenants:
                self._drafts.follow(tenant)
        if message.adapters is not None:  # of ranks that are gone
            there, named = adapters_of(self.engine), {each.name for each in message.adapters}
            for adapter in message.adapters:
                if adapter not in there:
                    self._change(messages.LoadAdapter(adapter.name, adapter.path))
            for adapter in there:
                if adapter.name not in named:
                    self._change(messages.UnloadAdapter(adapter.name))
        wanted = set(message.ids)
        for request in list(self.engine.requests.values()):
            if request.id not in wanted:
                self.engine.abort(request)

    def _load(self) -> messages.Load:
        engine = self.engine
        running = engine.scheduler.running
        cached, counts = engine.scheduler.retained, engine.scheduler.counts
        swapped, *moved = engine.scheduler.placement.swapped
        return messages.Load(
            running=[request.id for request in running if isinstance(request.id, int)],
            kv_usage=engine.scheduler.placement.usage,
            num_steps=self._num_steps,
            num_ranks=engine.comm.size * engine.comm.tp_size,
            epoch=epoch_of(engine.comm),
            num_cached_pages=cached[0],
            num_cached_tokens=cached[1],
            drafts=self._drafts.counts if self._drafts is not None else None,
            num_slots=engine.scheduler.capacity,
            num_preemptions=counts.preemptions,
            num_recomputed=counts.recomputed,
            num_swapped_pages=swapped,
            num_swapped=(moved[0], moved[1]),
        )


def adapters_of(engine: Engine) -> list[messages.Adapter]:
    return [messages.Adapter(each.name, each.path, each.digest) for each in engine.replica.adapters.names.values()]


def epoch_of(comm: Comm) -> int:
    """The epoch of `comm`'s mesh; 0 if a lost rank ends the job."""
    return comm.membership.epoch if comm.membership is not None else 0


def facts_of(engine: Engine, model: str) -> messages.Facts:
    """The facts of an engine; raises InputError for a model without a fast tokenizer."""
    tokenizer: Any = engine.tokenizer
    if tokenizer is None:
        raise InputError(f"the model {model!r} has no tokenizer, and a service speaks text")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError(f"the tokenizer of {model!r} is a {type(tokenizer).__name__}; a service needs a fast one")
    template = getattr(tokenizer, "chat_template", None)
    templates = template if isinstance(template, dict) else {"default": template} if template else {}
    special = {name: getattr(tokenizer, name, None) for name in _SPECIAL}
    config = getattr(engine.model.model, "generation_config", None)
    defaults = config.to_diff_dict() if config is not None else {}  # without those that are transformers'
    limits = engine.scheduler.limits
    return messages.Facts(
        model=model,
        vocab_size=engine.model.vocab_size,
        max_length=engine.max_length,
        max_batch_size=engine.scheduler.capacity,
        page_size=limits.page_size,
        num_pages=limits.num_pages * (limits.num_ranks if limits.is_elastic else 1),
        lp=engine.comm.size,
        tp=engine.comm.tp_size,
        device=str(engine.model.device),
        dtype=str(engine.model.model.dtype).removeprefix("torch."),
        eos_token_ids=sorted(engine.eos_token_ids),
        tokenizer=backend.to_str(),
        special_tokens={name: str(value) for name, value in special.items() if value is not None},
        chat_templates=dict(templates),
        adapters=adapters_of(engine),
        generation={name: value for name, value in defaults.items() if type(value) in (int, float)},
    )
