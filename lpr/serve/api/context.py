"""What every endpoint needs at hand."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from lpr.fleet.affinity import prefix_keys
from lpr.serve.errors import ApiError, bad
from lpr.serve.generation import Generation
from lpr.serve.metrics import Metrics
from lpr.serve.service import Service
from lpr.serve.text.served import Served


@dataclass
class Running:
    """A request that is being answered."""

    generation: Generation
    key_name: str
    """Whose it is: others cannot end it."""


@dataclass
class Context:
    """The service behind the HTTP surface."""

    service: Service
    metrics: Metrics
    request_timeout: float
    """Seconds that a request may take."""
    share_drafts: str = "key"
    """Whose outputs drafts may come from: "none", "key" or "all"."""
    served: Served | None = None
    """None until the model is loaded."""
    open: dict[str, Running] = field(default_factory=dict)
    """Running requests by id, for DELETE."""
    trace: Callable[[Request, Generation], None] | None = None
    """Told of every request that was answered, if spans are wanted."""

    def ready(self) -> Served:
        """What is served; raises ApiError (503) while nothing is."""
        self.service.check_ready()
        if self.served is None:
            raise ApiError(503, "the model is not loaded yet", code="loading", retry_after=5)
        return self.served

    def name(self, request: Request, kind: str, wanted: str | None = None) -> str:
        """The id of a request: `kind`, and the body's `wanted`, the header's X-Request-Id or a new one.

        Raises ApiError for one that is in use.
        """
        base = wanted or request.state.request_id or uuid.uuid4().hex
        request.state.request_id = base
        full = f"{kind}-{base}"
        if full in self.open:
            raise bad("request_id", f"request_id: {base!r} is the id of a request that is still running")
        return full

    @asynccontextmanager
    async def running(self, request: Request, name: str, generation: Generation) -> AsyncIterator[None]:
        """Let DELETE find a request by its id while it runs; cancels what is left of it at the end."""
        self.open[name] = Running(generation, key_name(request))
        try:
            async with generation:
                yield
        finally:
            self.open.pop(name, None)
            choices = generation.choices
            request.state.log = {
                "prompt_tokens": sum(len(choice.job.prompt_ids) for choice in choices),
                "completion_tokens": sum(len(choice.token_ids) for choice in choices),
                "steps": sum(choice.num_steps for choice in choices),
                "finish": [choice.finish_reason or "abort" for choice in choices],
            }
            if self.trace is not None:
                self.trace(request, generation)

    def cancel(self, request: Request, name: str) -> bool:
        """End a running request of the same key by its id, with or without its kind; False if there is none."""
        for full, running in list(self.open.items()):
            if name in (full, full.partition("-")[2]) and running.key_name == key_name(request):
                running.generation.stop()
                return True
        return False

    def tenant(self, request: Request) -> str:
        """With whose requests this one shares drafts and K/V; "" where no key is asked for, or for all."""
        return "" if self.share_drafts == "all" else key_name(request)


async def note_prefix(request: Request) -> None:
    """Let the answer say by which keys a router can send requests that begin alike here."""
    request.state.prefix_keys = prefix_keys(await request.json())


def key_name(request: Request) -> str:
    """The name of the key that a request came with, "" if none is asked for."""
    return str(getattr(request.state, "key_name", ""))


def context_of(request: Request) -> Context:
    """The context of the app that got this request."""
    found: Any = request.app.state.context
    assert isinstance(found, Context)
    return found
