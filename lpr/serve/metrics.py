"""Prometheus metrics: vLLM's names and labels, so that its dashboards work, and lpr's own, of a service and a fleet."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from lpr.fleet.counts import DraftCounts
from lpr.protocol import Chunk, Usage
from lpr.serve.jobs import Job
from lpr.serve.port import Port
from lpr.serve.service import Service

_SHORT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_INTER = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_PAUSE = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0)
_PER_STEP = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


class Metrics:
    def __init__(self, service: Service, model: str) -> None:
        self.registry = CollectorRegistry()
        self._service = service
        self._names = {"model_name": model, "engine": "0"}
        histogram, counter = self._histogram, self._counter
        self.first_token = histogram("vllm:time_to_first_token_seconds", "Time to first token.", _SHORT)
        self.inter_token = histogram("vllm:inter_token_latency_seconds", "Time between tokens of a request.", _INTER)
        self.per_token = histogram(
            "vllm:request_time_per_output_token_seconds", "A request's mean time per output token.", _INTER
        )
        self.end_to_end = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _LONG)
        self.queue = histogram("vllm:request_queue_time_seconds", "Arrival to the first step.", _LONG)
        self.prefill = histogram("vllm:request_prefill_time_seconds", "First step to first token.", _LONG)
        self.decode = histogram("vllm:request_decode_time_seconds", "First to last token.", _LONG)
        self.inference = histogram("vllm:request_inference_time_seconds", "First step to last token.", _LONG)
        self.prompt_length = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.output_length = histogram("vllm:request_generation_tokens", "Tokens emitted for a request.", _TOKENS)
        self.max_tokens = histogram("vllm:request_params_max_tokens", "A request's max_tokens.", _TOKENS)
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens.")
        self.output_tokens = counter("vllm:generation_tokens", "Tokens emitted.")
        self.prefix_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.prefix_hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.drafts = counter("vllm:spec_decode_num_drafts", "Steps that evaluated a draft.")
        self.draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Drafted nodes evaluated.")
        self.accepted_tokens = counter("vllm:spec_decode_num_accepted_tokens", "Drafted nodes accepted.")
        self.accepted_at = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted nodes accepted, by depth in the tree (0 is the first).",
            "position",
        )
        self.finished = counter("vllm:request_success", "Requests by how they ended.", "finished_reason")
        self.steps = counter("lpr:steps", "Decode steps of requests; one step of a batch counts for each of them.")
        self.fill_steps = counter("lpr:fill_steps", "Steps that only filled the cache with a prompt.")
        self.tokens_per_step = histogram("lpr:tokens_per_step", "A request's tokens per decode step.", _PER_STEP)
        self.by_source = counter("lpr:draft_nodes", "Drafted nodes by source and outcome.", "source", "outcome")
        self.http_requests = counter("lpr:http_requests", "Answered HTTP requests.", "path", "status")
        self.pause = histogram("lpr:pause_seconds", "How long running requests stood still for a lost rank.", _PAUSE)
        self.events = counter(
            "lpr:rank_events",
            "Events of the ranks: lost ones, meshes formed again without them, drivers replaced by another rank, "
            "starts after the loss of all, requests that all died on.",
            "event",
        )
        for reason in ("stop", "length", "abort", "error"):
            self._of(self.finished, finished_reason=reason)
        for event in ("rank_lost", "reform", "takeover", "restart", "poison"):
            self._of(self.events, event=event)
        self._gauges()
        self.registry.register(_FleetCollector(service, self._names))
        service.on_open, service.on_chunk, service.on_end = self._opened, self._chunk, self._ended
        service.on_event = lambda event, count: self._of(self.events, event=event).inc(count)
        service.on_pause = self.pause.observe

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(name, text, list(self._names), registry=self.registry, buckets=buckets)
        return made.labels(**self._names)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        """A counter. One with labels of its own is used through `_of`."""
        made = Counter(name, text, [*self._names, *labels], registry=self.registry)
        return made if labels else made.labels(**self._names)

    def _of(self, counter: Counter, **labels: str) -> Counter:
        return counter.labels(**self._names, **labels)

    def _gauges(self) -> None:
        service, labels = self._service, list(self._names)
        for name, text, value in (
            ("vllm:num_requests_running", "Requests in slots.", lambda: service.num_running),
            ("vllm:num_requests_waiting", "Requests that wait for a slot.", lambda: service.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of the cache in use; 1 is all.", lambda: service.mesh.load.kv_usage),
            ("lpr:engine_steps", "Steps of all ranks since they started.", lambda: service.mesh.load.num_steps),
            ("lpr:lp", "Replicas of the mesh.", lambda: service.mesh.num_replicas),
            ("lpr:tp", "Ranks per replica.", lambda: service.mesh.facts.tp if service.mesh.facts else 0),
            ("lpr:ready", "1 while requests are taken.", lambda: float(service.ready_reason() is None)),
        ):
            Gauge(name, text, labels, registry=self.registry).labels(**self._names).set_function(value)
        text = "Ranks at the last gather, and missing ones."
        ranks = Gauge("lpr:ranks", text, [*labels, "state"], registry=self.registry)
        ranks.labels(**self._names, state="present").set_function(lambda: service.mesh.num_ranks)
        missing = ranks.labels(**self._names, state="missing")
        missing.set_function(lambda: max(0, service.mesh.num_wanted - service.mesh.num_ranks))

    def watch(self, port: Port) -> None:
        text = "Connections that are being answered, and that wait for their client."
        gauge = Gauge("lpr:connections", text, [*self._names, "state"], registry=self.registry)
        gauge.labels(**self._names, state="answered").set_function(lambda: port.num_answered)
        gauge.labels(**self._names, state="waiting").set_function(lambda: port.num_waiting)
        text = "Connections that were refused, gave way to new ones, or waited too long."
        ended = self._counter("lpr:connections_ended", text, "reason")
        for reason in ("refused", "replaced", "late"):
            self._of(ended, reason=reason)
        port.on_end = lambda reason: self._of(ended, reason=reason).inc()

    def answered(self, path: str, status: int) -> None:
        """Count an HTTP answer; `path` is one of the service's own."""
        self._of(self.http_requests, path=path, status=str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)

    # Scoring a prompt belongs to a request with another job, and its tokens are not output: only its steps count.

    def _opened(self, job: Job) -> None:
        if not job.is_scoring:
            self.max_tokens.observe(job.submit.params.max_new_tokens)

    def _chunk(self, job: Job, chunk: Chunk) -> None:
        if job.is_scoring:
            return
        # Called before the service notes the time of this chunk.
        now = time.monotonic()
        self.output_tokens.inc(len(chunk.token_ids))
        if job.first is None:
            self.first_token.observe(now - job.arrived)
            self.prompt_tokens.inc(job.submit.num_prompt)
        elif job.latest is not None:
            # The tokens of a step arrive together; each is assigned an equal share of the time since the last step.
            for _ in chunk.token_ids:
                self.inter_token.observe((now - job.latest) / len(chunk.token_ids))

    def _ended(self, job: Job, chunk: Chunk) -> None:
        if chunk.usage is not None:
            self._used(job, chunk.usage)
        if job.is_scoring:
            return
        self._of(self.finished, finished_reason=chunk.finish_reason or "error").inc()
        if job.ended is None or job.begun is None or job.first is None or job.latest is None:
            return
        self.end_to_end.observe(job.ended - job.arrived)
        self.queue.observe(job.begun - job.arrived)
        self.prefill.observe(job.first - job.begun)
        self.decode.observe(job.latest - job.first)
        self.inference.observe(job.ended - job.begun)
        self.prompt_length.observe(job.submit.num_prompt)
        num_tokens = len(job.token_ids) - job.num_delivered
        self.output_length.observe(num_tokens)
        if num_tokens > 1:
            self.per_token.observe((job.latest - job.first) / (num_tokens - 1))

    def _used(self, job: Job, usage: Usage) -> None:
        self.prefix_queries.inc(job.submit.num_prompt)
        self.prefix_hits.inc(usage.num_cached)
        self.steps.inc(usage.num_steps)
        self.fill_steps.inc(usage.num_fill_steps)
        if usage.num_steps and not job.is_scoring:
            self.tokens_per_step.observe(usage.num_tokens / usage.num_steps)
        if usage.drafted:
            self.drafts.inc(usage.num_steps)
        self.draft_tokens.inc(usage.drafted)
        self.accepted_tokens.inc(usage.accepted)
        for position, count in enumerate(usage.accepted_per_depth):
            self._of(self.accepted_at, position=str(position)).inc(count)
        for source, (drafted, accepted) in usage.by_source.items():
            self._of(self.by_source, source=source, outcome="drafted").inc(drafted)
            self._of(self.by_source, source=source, outcome="accepted").inc(accepted)


class _FleetCollector(Collector):
    """Counts and sizes in the latest load. The counts restart with the ranks, as Prometheus expects of counters."""

    def __init__(self, service: Service, names: Mapping[str, str]) -> None:
        self._service = service
        self._names = names

    def collect(self) -> Iterator[Metric]:
        load = self._service.mesh.load
        text = "Pages of the KV cache that no running request holds."
        yield self._gauge("lpr:cached_pages", text, {(): load.num_cached_pages})
        yield self._gauge("lpr:cached_prefix_tokens", "Tokens in the prefix cache.", {(): load.num_cached_tokens})
        text = "Pages of the KV cache in host memory."
        yield self._gauge("lpr:swapped_pages", text, {(): load.num_swapped_pages})
        moved = dict(zip((("out",), ("in",)), load.num_swapped, strict=True))
        yield self._counter("lpr:swaps", "Pages that went to host memory, and came back.", moved, "direction")
        text = "Times that a running request gave its pages to others."
        yield self._counter("vllm:num_preemptions", text, {(): load.num_preemptions})
        text = "Tokens of preempted requests that were computed again."
        yield self._counter("lpr:recomputed_tokens", text, {(): load.num_recomputed})
        facts = self._service.mesh.facts
        if facts is not None:
            size = {(str(facts.page_size), str(facts.num_pages)): 1.0}
            text = "Size of the KV cache, in the labels."
            yield self._gauge("vllm:cache_config_info", text, size, "block_size", "num_gpu_blocks")
        if load.drafts is not None:
            yield from self._drafts(load.drafts)

    def _drafts(self, counts: DraftCounts) -> Iterator[Metric]:
        events = ("sent", "unsent", "learnt", "own", "duplicate", "malformed", "passed_over")
        yield self._counter("lpr:shared_drafts", "Outputs shared with other replicas, by what became of them.",
                            {(event,): getattr(counts, event) for event in events}, "event")  # fmt: skip
        tokens = {("sent",): counts.sent_tokens, ("learnt",): counts.learnt_tokens}
        tokens["outside_vocabulary",] = counts.outside_vocabulary
        text = "Their tokens; those outside the vocabulary are dropped."
        yield self._counter("lpr:shared_draft_tokens", text, tokens, "event")
        errors = {(name,): getattr(counts, f"{name}_errors") for name in ("write", "read", "snapshot")}
        yield self._counter("lpr:shared_draft_errors", "Calls of the store that failed.", errors, "operation")
        snapshots = {("written",): counts.snapshots_written, ("loaded",): counts.snapshots_loaded}
        yield self._counter("lpr:shared_draft_snapshots", "Snapshots of what was learnt.", snapshots, "event")
        text = "1 if the store did what it was last asked for."
        up = {("write",): float(counts.write_up), ("read",): float(counts.read_up)}
        yield self._gauge("lpr:shared_draft_store_up", text, up, "operation")
        waiting = {("send",): counts.send_queue, ("learn",): counts.learn_queue}
        yield self._gauge("lpr:shared_draft_queue", "Outputs that wait to be sent or learnt.", waiting, "queue")
        lag = "Age of the newest output of another replica when it was learnt."
        yield self._gauge("lpr:shared_draft_lag_seconds", lag, {(): counts.lag})

    def _gauge(self, name: str, text: str, values: Mapping[Any, float], *labels: str) -> Metric:
        return self._filled(GaugeMetricFamily(name, text, labels=[*self._names, *labels]), values)

    def _counter(self, name: str, text: str, values: Mapping[Any, float], *labels: str) -> Metric:
        return self._filled(CounterMetricFamily(name, text, labels=[*self._names, *labels]), values)

    def _filled(self, family: Any, values: Mapping[Any, float]) -> Metric:
        for own, value in values.items():
            family.add_metric([*self._names.values(), *own], value)
        return family
