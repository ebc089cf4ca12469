"""OpenTelemetry spans of requests, by the conventions for generative AI; an extra: pip install 'lpr[otel]'."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from starlette.requests import Request

from lpr.config import InputError
from lpr.serve.generation import Generation

_OPERATIONS = {"/v1/chat/completions": "chat", "/chat/completions": "chat"}


def tracer(endpoint: str, model: str, exporter: Any = None) -> Callable[[Request, Generation], None]:
    """What to call with every answered request, so that its span reaches an OTLP/HTTP `endpoint`.

    `exporter` takes the place of that endpoint, for tests. Raises InputError where OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.propagate import extract
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(endpoint=endpoint)
    except ImportError as failure:
        raise InputError(f"--otlp needs OpenTelemetry: pip install 'lpr[otel]' ({failure.name})") from failure
    provider = TracerProvider(resource=Resource.create({"service.name": "lpr"}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    spans = provider.get_tracer("lpr")

    def trace(request: Request, generation: Generation) -> None:
        choices = generation.choices
        if not choices:
            return
        ago = time.time() - time.monotonic()
        first = choices[0].job
        operation = _OPERATIONS.get(request.url.path, "text_completion")
        span = spans.start_span(
            f"{operation} {model}",
            context=extract(dict(request.headers)),
            kind=SpanKind.SERVER,
            start_time=int(1e9 * (ago + first.arrived)),
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "lpr",
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                "gen_ai.response.id": request.state.request_id,
                "gen_ai.request.max_tokens": first.params.max_new_tokens,
                "gen_ai.request.temperature": first.params.temperature,
                "gen_ai.request.top_p": first.params.top_p,
                "gen_ai.request.choice.count": len(choices),
                "gen_ai.usage.input_tokens": sum(len(choice.job.prompt_ids) for choice in choices),
                "gen_ai.usage.output_tokens": sum(len(choice.token_ids) for choice in choices),
                "gen_ai.response.finish_reasons": [choice.finish_reason or "abort" for choice in choices],
                "lpr.steps": sum(choice.num_steps for choice in choices),
            },
        )
        if first.first is not None:
            span.set_attribute("gen_ai.server.time_to_first_token", first.first - first.arrived)
        if any(choice.finish_reason == "error" for choice in choices):
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    trace.flush = provider.force_flush  # type: ignore[attr-defined]
    return trace
