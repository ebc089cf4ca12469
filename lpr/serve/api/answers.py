"""How an answer is sent, whole or as a stream; what it looks like is up to the endpoint's form."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from lpr.serve.api.context import Context
from lpr.serve.api.sse import COMMENT, DONE, EventStream, error_event, event
from lpr.serve.errors import ApiError
from lpr.serve.generation import Choice, DisconnectedError, Event, Generation

KEEP_ALIVE = 10.0
"""Seconds without an event after which a stream says that it lives."""


class Form(Protocol):
    """The shapes of an endpoint's answers, as JSON values."""

    @property
    def ends_with_done(self) -> bool:
        """Does a stream end with OpenAI's `[DONE]`?"""
        ...

    def whole(self, choices: Sequence[Choice]) -> Any:
        """The answer of finished choices."""
        ...

    def begin(self, choices: Sequence[Choice]) -> Iterable[Any]:
        """Events before the first step."""
        ...

    def step(self, each: Event, choices: Sequence[Choice]) -> Any:
        """The event of one step of one choice."""
        ...

    def end(self, choices: Sequence[Choice]) -> Iterable[Any]:
        """Events after the last step."""
        ...


async def answer(
    context: Context, request: Request, name: str, generation: Generation, form: Form, stream: bool | None
) -> Response:
    """Wait for a generation, or stream it; `name` is the id by which others may end it. Raises ApiError."""
    with ExitStack() as stack:
        stack.enter_context(context.running(request, name, generation))
        if stream:
            return EventStream(_events(generation, form), context.request_timeout, stack.pop_all().close)
        async with generation:
            try:
                await generation.finish()
            except DisconnectedError:
                return Response(status_code=499)
    return JSONResponse(form.whole(generation.choices))


async def _events(generation: Generation, form: Form) -> AsyncGenerator[bytes, None]:
    """One event per step and choice; an error takes the place of what should have come next."""
    choices = generation.choices
    try:
        async with generation:
            for data in form.begin(choices):
                yield event(data)
            async for each in generation.events(KEEP_ALIVE):
                if each is None:
                    yield COMMENT
                    continue
                if each.choice.error is not None:
                    raise each.choice.error
                yield event(form.step(each, choices))
            for data in form.end(choices):
                yield event(data)
    except ApiError as failure:
        yield error_event(failure)
    except DisconnectedError:
        return
    if form.ends_with_done:
        yield DONE
