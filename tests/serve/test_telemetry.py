"""Spans by the conventions for generative AI, as an OpenTelemetry exporter gets them."""

import sys
import threading
import time

import pytest

from lpr.config import InputError
from lpr.serve.telemetry import tracer
from tests.fakes.fake_driver import served

conventions = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans():
    """A service, and what its spans are once they are exported."""
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    with served(request_timeout=2) as service:
        trace = service.front.context.trace = tracer("", "fake", exporter)

        def exported():
            end, ended = time.monotonic() + 10, threading.Event()
            while service.front.context.open and time.monotonic() < end:  # a stream ends just after its last byte
                time.sleep(0.01)
            service.call(ended.set)
            assert ended.wait(10)
            trace.flush()
            found = exporter.get_finished_spans()
            exporter.clear()
            return found

        yield service, exported


def test_a_completion_is_a_span_with_the_names_of_the_conventions(spans):
    service, exported = spans
    body = {"prompt": "def f(x):", "n": 2, "max_tokens": 4, "temperature": 0.5, "seed": 7, "stop": ["zz"]}
    headers = {"X-Request-Id": "abc", "traceparent": PARENT}
    answer = service.client.post("/v1/completions", json=body, headers=headers).json()
    (span,) = exported()
    found = dict(span.attributes)
    assert (
        span.name == "text_completion fake" and span.kind.name == "SERVER" and span.status.status_code.name == "UNSET"
    )
    assert f"{span.context.trace_id:032x}" == PARENT[3:35] and f"{span.parent.span_id:016x}" == PARENT[36:52]
    assert found.pop("lpr.steps") == 4
    assert set(found) <= {value for name, value in vars(conventions).items() if name.startswith("GEN_AI_")}
    assert found["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"] == 8
    assert found["gen_ai.usage.cache_read.input_tokens"] == 3
    assert found["gen_ai.response.finish_reasons"] == ("length", "length")
    asked = {"max_tokens": 4, "temperature": 0.5, "seed": 7, "stop_sequences": ("zz",), "choice.count": 2}
    assert {name: found[f"gen_ai.request.{name}"] for name in asked} == asked
    assert found["gen_ai.response.id"] == "abc" and found["gen_ai.operation.name"] == "text_completion"
    assert 0 < found["gen_ai.response.time_to_first_chunk"] <= (span.end_time - span.start_time) / 1e9


def test_a_chat_is_a_chat_and_what_was_ended_early_says_so(spans):
    service, exported = spans
    body = {"messages": [{"role": "user", "content": "u"}], "stream": True}
    service.client.post("/v1/chat/completions", json=body).raise_for_status()
    (span,) = exported()
    assert span.name == "chat fake"
    service.client.post("/v1/completions", json={"prompt": 1})
    assert not exported(), "what was never accepted is no generation"
    service.driver.hold = True
    assert service.client.post("/v1/completions", json={"prompt": "a"}).status_code == 504
    (span,) = exported()
    assert span.attributes["gen_ai.response.finish_reasons"] == ("abort",)


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InputError, match=r"pip install 'lpr\[otel\]'"):
        tracer("http://127.0.0.1:1", "fake")
