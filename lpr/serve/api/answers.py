"""Sends an answer as a whole or as a stream of server-sent events; the endpoint's form determines its shape."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from lpr.serve.api.context import Context
from lpr.serve.bodies.completions import Sampling, StreamOptions
from lpr.serve.errors import ApiError
from lpr.serve.generation import Choice, DisconnectedError, Event, Generation
from lpr.serve.inbox import Alarm
from lpr.serve.text.served import Served

KEEP_ALIVE = 10.0  # seconds without an event after which a stream sends a comment
LARGE = 2048  # answers of more tokens are serialised in a thread
BLOCK = 1024  # `--pad-stream` pads each write of a stream to a multiple of this many bytes


class Form:
    """The shape of an endpoint's answers, as JSON values."""

    ends_with_done: ClassVar[bool] = True  # True if a stream ends with OpenAI's `[DONE]`
    is_heavy = False  # True if a stream's events may be large, so that they are serialised in a thread

    def whole(self, choices: Sequence[Choice]) -> Any:
        raise NotImplementedError

    def begin(self, choices: Sequence[Choice]) -> Iterable[Any]:
        """Events before the first step."""
        return ()

    def steps(self, each: Event, choices: Sequence[Choice]) -> Iterable[Any]:
        """The events of one step of one choice: none, one or several."""
        raise NotImplementedError

    def end(self, choices: Sequence[Choice]) -> Iterable[Any]:
        """Events after the last step."""
        return ()

    def failed(self, failure: ApiError) -> Iterable[Any]:
        """The final events of a failed stream."""
        return (failure.body(),)

    def encode(self, data: Any) -> bytes:
        return event(data)


class OpenAIForm(Form):
    """The common part of completions and chats. Subclasses define the shape of a choice."""

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
        raise NotImplementedError

    def delta(self, each: Event) -> dict[str, Any]:
        raise NotImplementedError

    def finish_reason(self, choice: Choice) -> str | None:
        return choice.finish_reason

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        body = {**self.head, "choices": self.choices(choices), "usage": self._usage(choices)}
        return {**body, **_metrics(choices), **self.extras(choices)}

    def steps(self, each: Event, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        yield self.event(self.delta(each), choices if self._options.continuous_usage_stats else None)

    def end(self, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        if self._options.include_usage:
            usage = self._usage(choices)
            yield {**self.head, "choices": [], "usage": usage, **_metrics(choices), **self._decoding(choices)}

    def extras(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return self._decoding(choices)

    def event(self, shown: dict[str, Any], choices: Sequence[Choice] | None = None) -> dict[str, Any]:
        """An event of one choice, with the usage so far of `choices` if given and requested by the client."""
        data = {**self.head, "choices": [shown]}
        if self._options.include_usage:
            data["usage"] = self._usage(choices) if choices is not None else None
        return data

    def shown(self, index: int, content: dict[str, Any], logprobs: Any, choice: Choice, **more: Any) -> dict[str, Any]:
        """A choice, or one step of it: its content, log-probabilities, finish reason and requested extra fields."""
        end = {"finish_reason": self.finish_reason(choice), "stop_reason": choice.stop_reason}
        wanted = {"token_ids": self.body.return_token_ids, "prompt_token_ids": self.body.return_token_ids}
        wanted["sources"] = self.body.return_sources
        asked = {name: more[name] for name in wanted if wanted[name] and name in more}
        return {"index": index, **content, "logprobs": logprobs, **end, **asked}

    def _usage(self, choices: Sequence[Choice]) -> dict[str, object]:
        completion = sum(choice.job.num_delivered + len(choice.token_ids) for choice in choices)
        cached = max((choice.usage.num_cached for choice in choices if choice.usage is not None), default=0)
        usage: dict[str, object] = {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": completion,
            "total_tokens": self._num_prompt + completion,
            "prompt_tokens_details": {"cached_tokens": min(cached, self._num_prompt)},
        }
        if self.body.prediction is not None:
            drafted, accepted = (sum(choice.job.predicted[at] for choice in choices) for at in (0, 1))
            counts = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
            usage["completion_tokens_details"] = counts
        return usage

    def _decoding(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """If requested: steps, tokens per step, and drafted and accepted nodes by source, over `choices`."""
        if not self.body.return_sources:
            return {}
        steps = sum(choice.num_steps for choice in choices)
        tokens = sum(len(choice.token_ids) for choice in choices)
        sources: dict[str, dict[str, int]] = {}
        for choice in choices:
            for name, (drafted, accepted) in (choice.usage.by_source if choice.usage else {}).items():
                total = sources.setdefault(name, {"drafted": 0, "accepted": 0})
                total["drafted"] += drafted
                total["accepted"] += accepted
        per_step = round(tokens / steps, 4) if steps else 0.0
        return {"lpr": {"num_steps": steps, "tokens_per_step": per_step, "sources": sources}}


def _metrics(choices: Sequence[Choice]) -> dict[str, Any]:
    """`metrics.speculative_decoding` of a single text, in vLLM's shape (its pull request 48915); empty without drafts.

    The sums of all answers are the counters of `/metrics`. Entry j of the histogram counts steps that accepted j nodes.
    """
    usage = choices[0].usage if len(choices) == 1 else None
    if usage is None or not usage.drafted or not usage.num_steps:
        return {}
    at_least = [usage.num_steps, *usage.accepted_per_depth, 0]
    return {
        "metrics": {
            "speculative_decoding": {
                "mean_acceptance_length": 1 + usage.accepted / usage.num_steps,
                "draft_acceptance_rate": usage.accepted / usage.drafted,
                "acceptance_histogram": [more - fewer for more, fewer in pairwise(at_least)],
                "num_spec_steps": usage.num_steps,
                "num_accepted_draft_tokens": usage.accepted,
                "num_draft_tokens": usage.drafted,
                "num_spec_tokens": len(usage.accepted_per_depth),
            }
        }
    }


async def answer(
    context: Context, request: Request, name: str, generation: Generation, form: Form, stream: bool | None
) -> Response:
    """Wait for a generation, or stream it; `name` is the id by which it can be cancelled. Raises ApiError."""
    with ExitStack() as stack:
        stack.enter_context(context.running(request, name, generation))
        if stream:
            generation.keeps_logprobs = False
            events, block = _events(context, generation, form), BLOCK if context.args.pad_stream else 1
            return _EventStream(events, block, context.args.request_timeout, stack.pop_all().close)
        async with generation:
            try:
                await generation.finish()
            except DisconnectedError:
                return Response(status_code=499)

    def written() -> bytes:
        return msgspec.json.encode(form.whole(generation.choices))

    is_large = form.is_heavy or sum(len(choice.token_ids) for choice in generation.choices) > LARGE
    content = await context.in_thread(written) if is_large else written()
    return Response(content, media_type="application/json")


async def _events(context: Context, generation: Generation, form: Form) -> AsyncGenerator[bytes, None]:
    """One event per step and choice, or per --stream-interval. An error is sent as the last event."""
    choices, interval = generation.choices, context.args.stream_interval / 1e3
    try:
        async with generation:
            for data in form.begin(choices):
                yield form.encode(data)
            steps = generation.collected(interval) if interval else generation.events(KEEP_ALIVE)
            async for each in steps:
                if each is None:
                    yield b": keep-alive\n\n"
                    continue
                if each.chunk.failure is not None and each.choice.error is not None:
                    raise each.choice.error
                for data in await _written(context, form, partial(form.steps, each, choices)):
                    yield data
            for data in await _written(context, form, partial(form.end, choices)):
                yield data
    except ApiError as failure:
        for data in form.failed(failure):
            yield form.encode(data)
    except DisconnectedError:
        return
    if form.ends_with_done:
        yield b"data: [DONE]\n\n"


async def _written(context: Context, form: Form, make: Callable[[], Iterable[Any]]) -> list[bytes]:
    if form.is_heavy:
        return await context.in_thread(lambda: [form.encode(data) for data in make()])
    return [form.encode(data) for data in make()]


def padded(data: bytes, block: int) -> bytes:
    """`data` and a comment that fills it up to a multiple of `block` bytes."""
    missing = -len(data) % block
    if not missing:
        return data
    missing += block if missing < 3 else 0
    return data + b":" + b"." * (missing - 3) + b"\n\n"


def event(data: Any, name: str = "") -> bytes:
    """One event of one line, as this JSON has no line breaks; with a `name`, of two."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


class _EventStream(Response):
    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], block: int, stall: float, end: Callable[[], None]) -> None:
        """Send `events` in blocks of `block` bytes; a client that reads nothing for `stall` seconds is disconnected."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._block = block
        self._stall = stall
        self._end = end  # an unstarted generator would not run its clean-up

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with asyncio.timeout(None) as patience:
                with closing(Alarm(partial(patience.reschedule, 0.0))) as alarm:
                    async for data in self._events:
                        alarm.set(self._stall)
                        await send({"type": "http.response.body", "body": padded(data, self._block), "more_body": True})
                        alarm.at = None
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            pass  # the answer does not end, which closes the connection
        finally:
            self._end()  # first: the rest may be interrupted
            await self._events.aclose()
