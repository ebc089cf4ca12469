"""OpenTelemetry spans of requests, by the conventions for generative AI; an extra: pip install 'lpr[otel]'."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request

from lpr.config import InputError
from lpr.serve.generation import Choice, Generation


def tracer(endpoint: str, model: str, exporter: Any = None) -> Callable[[Request, Generation], None]:
    """A function that sends the span of a request to an OTLP/HTTP `endpoint` or `exporter`; raises InputError."""
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
        operation = "chat" if request.url.path.endswith("/chat/completions") else "text_completion"
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
                **_attributes(choices),
            },
        )
        if first.first is not None:
            span.set_attribute("gen_ai.response.time_to_first_chunk", first.first - first.arrived)
        failed = next((choice.error for choice in choices if choice.error is not None), None)
        if failed is not None:
            span.set_attribute("error.type", failed.shown_code or "error")
            span.set_status(Status(StatusCode.ERROR, failed.message))
        span.end()

    trace.flush = provider.force_flush  # type: ignore[attr-defined]
    return trace


def _attributes(choices: Sequence[Choice]) -> dict[str, Any]:
    """Attributes of the request and its answer. A prompt of several choices counts once, as in OpenAI's usage."""
    params = choices[0].job.submit.params
    prompts = {id(choice.job.submit.token_ids): choice for choice in choices}.values()
    return {
        "gen_ai.request.choice.count": len(choices),
        "gen_ai.request.max_tokens": params.max_new_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.stop_sequences": list(params.stop),
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.usage.input_tokens": sum(choice.job.submit.num_prompt for choice in prompts),
        "gen_ai.usage.output_tokens": sum(len(choice.token_ids) for choice in choices),
        "gen_ai.usage.cache_read.input_tokens": sum(choice.usage.num_cached for choice in prompts if choice.usage),
        "gen_ai.response.finish_reasons": [choice.finish_reason or "abort" for choice in choices],
        "lpr.steps": sum(choice.num_steps for choice in choices),
    }
