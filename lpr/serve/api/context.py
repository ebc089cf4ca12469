"""The state that every endpoint uses."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Receive

from lpr.fleet.affinity import prefix_keys
from lpr.protocol import ErrorCode, Submit
from lpr.serve import limits
from lpr.serve.bodies.completions import ResponseFormat, Sampling
from lpr.serve.errors import ApiError, bad
from lpr.serve.generation import DisconnectedError, Generation, TextLimit, disconnected
from lpr.serve.limits import PRIORITY
from lpr.serve.metrics import Metrics
from lpr.serve.options import ServeArgs
from lpr.serve.sandbox import ExhaustedError, Sandbox, sandbox
from lpr.serve.service import Service
from lpr.serve.text.grammars import Grammars
from lpr.serve.text.served import Served
from lpr.serve.text.tokens import LONG
from lpr.serve.turns import Turns

STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}, "application/json": {"schema": {}}}}
}
"""In the schema of an endpoint whose answers can be streams."""
NUM_THREADS = 2  # long texts that are encoded at once
P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Context:
    service: Service
    metrics: Metrics
    args: ServeArgs
    served: Served | None = None  # None until the model is loaded
    open: dict[tuple[str, str], tuple[Generation, str]] = field(default_factory=dict)
    """Running requests by the name of their key and their id, with the X-Request-Id of the answer, which several may
    share. DELETE reaches those of the same key only."""
    trace: Callable[[Request, Generation], None] | None = None
    """Called with every answered request, if spans are wanted."""
    _starting: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        weights, fleet = self.service.weights, self.args.fleet
        self.names_prefix = fleet.replica_name is not None or fleet.draft_store is not None
        """Answers carry the keys of their prompt's prefix, which a router of a fleet asks for."""
        self.checks: Sandbox = sandbox(
            "lpr.serve.checks", limits.BODY_TIME, limits.BODY_MEMORY, limits.PROCESSES.most, weights
        )
        """Checks long bodies, renders conversations with what a client makes of a template, and compiles grammars."""
        self.grammars = Grammars(self.checks)
        self._pool = ThreadPoolExecutor(NUM_THREADS, "lpr-texts")
        self._turns = Turns(NUM_THREADS, weights)

    def start(self) -> None:
        """Start the processes beside this one, or give them what they lack, without waiting for them."""
        self._starts(self.checks.start())

    def _starts(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def close(self) -> None:
        for task in list(self._starting):
            task.cancel()
        await self.checks.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def load(self, served: Served) -> None:
        self._prepare_checks(served)
        self.served = served
        self.start()
        if served.templates:
            self._starts(self._learn_first(served))

    async def learn(self, served: Served) -> None:
        """Learn what the chat templates read, where they can do no harm; raises ApiError."""
        if not served.templates.is_known:
            try:
                fits = await self.checks.run("learn")
            except ExhaustedError:
                fits = {}
            served.templates.know(fits)
            self._prepare_checks(served)
            self.start()

    async def _learn_first(self, served: Served) -> None:
        with suppress(ApiError, OSError):  # the first chat tries again
            await self.learn(served)

    def _prepare_checks(self, served: Served) -> None:
        facts, templates = served.facts, served.templates
        grammars = (facts.tokenizer, facts.vocab_size, facts.eos_token_ids) if self.grammars.is_installed else None
        fits = templates.learnt() if templates.is_known else None
        model = (facts.max_length, templates.sources, facts.special_tokens, served.most_characters)
        self.checks.prepare(*model, fits, grammars)

    async def grammar(
        self, request: Request, wanted: ResponseFormat | None, held: str = "", schemas: Mapping[str, Any] | None = None
    ) -> str:
        """A grammar in llguidance's JSON form, "" for plain text; raises ApiError or DisconnectedError.

        `held` is a grammar for tool calls, which includes the `wanted` one and replaces it. `schemas` are those of the
        tools, by name.
        """
        if held:
            return await unless_gone(request.receive, self.grammars.held(held, schemas or {}, key_name(request)))
        if wanted is None or wanted.type == "text":
            return ""
        return await unless_gone(request.receive, self.grammars.compiled(wanted, key_name(request)))

    async def aside(self, request: Request, size: int, work: Callable[[], R]) -> R:
        """Run `work` on a text of `size` in a thread; raises ApiError if too many wait, and DisconnectedError."""
        loop = asyncio.get_running_loop()
        turn = self._turns.run(key_name(request), size, lambda: loop.run_in_executor(self._pool, work))
        return await unless_gone(request.receive, turn)

    async def in_thread(self, work: Callable[[], R]) -> R:
        """Run `work` in a thread for a finished answer, without a limit on waiting requests."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def ready(self) -> Served:
        """The served model; raises ApiError while there is none."""
        self.service.check_ready()
        if self.served is None:
            raise ApiError(ErrorCode.LOADING, "the model is not loaded yet")
        return self.served

    def name(self, request: Request, kind: str, wanted: str | None = None) -> str:
        """The id of a request: `kind`, and the body's `wanted` or the header's X-Request-Id.

        Proxies send one X-Request-Id with several calls of a trace, and clients retry slow requests: if it is in use, a
        suffix is added. Raises ApiError if the body's id is in use.
        """
        key = key_name(request)
        if wanted is not None:
            if (key, f"{kind}-{wanted}") in self.open:
                raise bad("request_id", f"request_id: {wanted!r} is the id of a request that is still running")
            request.state.request_id = wanted
        full = f"{kind}-{request.state.request_id}"
        while (key, full) in self.open:
            full = f"{kind}-{request.state.request_id}-{secrets.token_hex(4)}"
        return full

    def generation(
        self,
        request: Request,
        body: Sampling | None,
        wanted: Sequence[Submit],
        scored: Sequence[Submit] = (),
        limits: Callable[[], TextLimit] | None = None,
        model: str | None = None,
    ) -> Generation:
        """Accept the requests `wanted` with the settings of key and body; `model` without a body. Raises ApiError."""
        key, named = key_name(request), self.ready().check_model(model if body is None else body.model)
        adapter = (self.service.adapters or {}).get(named)
        common: dict[str, Any] = {"share": key, "weight": self.service.weights.get(key, 1.0)}
        common |= {"tenant": self.tenant(request), "learns": self.args.share_drafts != "none"}
        common["adapter"] = adapter.digest if adapter is not None else ""
        if body is not None:
            common["priority"] = max(-PRIORITY.most, min(PRIORITY.most, body.priority))
        details = body is not None and bool(body.return_sources)
        texts = [msgspec.structs.replace(each, **common, details=details) for each in wanted]
        known = [msgspec.structs.replace(each, **common) for each in scored]
        return Generation(self.service, texts, request.receive, self.args.request_timeout, key, limits, known)

    @contextmanager
    def running(self, request: Request, name: str, generation: Generation) -> Iterator[None]:
        """Context: DELETE finds the request by its id; cancels unfinished texts at the end.

        Enter it before the first `await` after `name`, so that no other request takes the same name.
        """
        place = (key_name(request), name)
        self.open[place] = (generation, request.state.request_id)
        try:
            yield
        finally:
            del self.open[place]
            generation.cancel()
            choices = generation.choices
            request.state.log = {
                "prompt_tokens": sum(choice.job.submit.num_prompt for choice in choices),
                "completion_tokens": sum(len(choice.token_ids) for choice in choices),
                "steps": sum(choice.num_steps for choice in choices),
                "finish": [choice.finish_reason or "abort" for choice in choices],
            }
            if self.trace is not None:
                self.trace(request, generation)

    def cancel(self, request: Request, name: str) -> bool:
        """Cancel the key's requests with this id (with or without its kind) or X-Request-Id; False if there is none."""
        found = False
        for (key, full), (generation, came_with) in list(self.open.items()):
            if key == key_name(request) and name in (full, full.partition("-")[2], came_with):
                generation.stop()
                found = True
        return found

    def tenant(self, request: Request) -> str:
        """The tenant of a request; "" without keys, or if all share."""
        return "" if self.args.share_drafts == "all" else key_name(request)


async def begin(request: Request, user: str | None = None) -> tuple[Context, Served]:
    """The context and the model for a prompt; records the user and the keys of the prefix. Raises ApiError."""
    context = context_of(request)
    request.state.user = user  # for the access log
    if context.names_prefix and not is_long(request):  # a long one's are noted already
        request.state.prefix_keys = prefix_keys(await request.json())
    return context, context.ready()


async def aside(request: Request, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run `work`; for a long request in a thread, so that the event loop is not blocked."""
    if not is_long(request):
        return work(*args, **kwargs)
    return await context_of(request).aside(request, request.state.size, partial(work, *args, **kwargs))


def is_long(request: Request) -> bool:
    """True if the work on a request's body would block the event loop."""
    return getattr(request.state, "size", 0) > LONG


async def unless_gone(receive: Receive, work: Awaitable[R]) -> R:
    """The result of `work`. If the client disconnects, cancels `work` and raises DisconnectedError."""
    working, gone = asyncio.ensure_future(work), asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise DisconnectedError
        return working.result()
    finally:
        for each in (working, gone):
            each.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


def key_name(request: Request) -> str:
    """The name of a request's key; "" if none is needed."""
    return str(getattr(request.state, "key_name", ""))


def context_of(request: Request) -> Context:
    found: Any = request.app.state.context
    assert isinstance(found, Context)
    return found
