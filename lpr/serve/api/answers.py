"""How an answer is sent, whole or as a stream. Its shape is up to the endpoint's form."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from lpr.serve.api.context import Context
from lpr.serve.api.sse import COMMENT, DONE, EventStream, error_event, event
from lpr.serve.bodies import Sampling, StreamOptions
from lpr.serve.errors import ApiError
from lpr.serve.generation import Choice, DisconnectedError, Event, Generation, decoding_of, usage_of
from lpr.serve.text.served import Served

KEEP_ALIVE = 10.0
"""Seconds without an event after which a stream sends a comment."""


class Form:
    """The shape of an endpoint's answers, as JSON values."""

    ends_with_done: ClassVar[bool] = True
    """True if a stream ends with OpenAI's `[DONE]`."""

    def whole(self, choices: Sequence[Choice]) -> Any:
        """The answer of finished choices."""
        raise NotImplementedError

    def begin(self, choices: Sequence[Choice]) -> Iterable[Any]:
        """Events before the first step."""
        return ()

    def step(self, each: Event, choices: Sequence[Choice]) -> Any:
        """The event of one step of one choice."""
        raise NotImplementedError

    def end(self, choices: Sequence[Choice]) -> Iterable[Any]:
        """Events after the last step."""
        return ()


class OpenAIForm(Form):
    """The common part of completions and chats. Subclasses say what a choice looks like."""

    def __init__(self, served: Served, body: Sampling, id: str, kind: str, num_prompt: int) -> None:
        """Prepare the answer to `body`, of the OpenAI object `kind`; `num_prompt` counts each prompt once."""
        self.served = served
        self.body = body
        self.head = {
            "id": id,
            "object": kind,
            "created": int(time.time()),
            "model": served.check_model(body.model),
            "system_fingerprint": served.fingerprint,
        }
        self._num_prompt = num_prompt
        self._options = body.stream_options or StreamOptions()

    def choices(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        """The finished choices to show."""
        raise NotImplementedError

    def delta(self, each: Event) -> dict[str, Any]:
        """One step of a choice."""
        raise NotImplementedError

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """See Form."""
        return {**self.head, "choices": self.choices(choices), "usage": self._usage(choices), **self.extras(choices)}

    def step(self, each: Event, choices: Sequence[Choice]) -> dict[str, Any]:
        """See Form."""
        return self.event(self.delta(each), choices if self._options.continuous_usage_stats else None)

    def end(self, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        """See Form."""
        if self._options.include_usage:
            yield {**self.head, "choices": [], "usage": self._usage(choices), **self._decoding(choices)}

    def extras(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Further fields of a whole answer."""
        return self._decoding(choices)

    def event(self, shown: dict[str, Any], choices: Sequence[Choice] | None = None) -> dict[str, Any]:
        """An event of one choice, with the usage so far of `choices`, if there are any and the client asks for it."""
        data = {**self.head, "choices": [shown]}
        if self._options.include_usage:
            data["usage"] = self._usage(choices) if choices is not None else None
        return data

    def shown(self, index: int, content: dict[str, Any], logprobs: Any, choice: Choice, **more: Any) -> dict[str, Any]:
        """A choice, or one step of it: its content, log-probabilities and end, and what else the client asks for."""
        end = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        wanted = {"token_ids": self.body.return_token_ids, "prompt_token_ids": self.body.return_token_ids}
        wanted["sources"] = self.body.return_sources
        asked = {name: more[name] for name in wanted if wanted[name] and name in more}
        return {"index": index, **content, "logprobs": logprobs, **end, **asked}

    def _usage(self, choices: Sequence[Choice]) -> dict[str, object]:
        return usage_of(choices, self._num_prompt)

    def _decoding(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {"lpr": decoding_of(choices)} if self.body.return_sources else {}


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
    """One event per step and choice. An error takes the place of the next event."""
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
