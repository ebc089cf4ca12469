"""Metrics for routers and dashboards of a fleet: cached prefixes, the cache's size, and shared drafts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from lpr.fleet.counts import DraftCounts
from lpr.serve.service import Service

BLOCK_TOKENS = 16
"""Block size for routers that count in blocks. lpr itself reuses K/V to the token."""


class FleetCollector(Collector):
    """Reads the latest load. Its counts restart with the ranks, as Prometheus expects of counters."""

    def __init__(self, service: Service, names: Mapping[str, str]) -> None:
        """Read `service`; `names` are the labels."""
        self._service = service
        self._names = dict(names)

    def describe(self) -> list[Metric]:
        """Nothing, as the metrics depend on the driver."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics, as they are now."""
        load = self._service.mesh.load
        text = "Slots that retain a finished request's prefix."
        yield self._gauge("lpr:cached_prefixes", text, {(): load.num_cached_prefixes})
        yield self._gauge("lpr:cached_prefix_tokens", "Tokens of these prefixes.", {(): load.num_cached_tokens})
        facts = self._service.mesh.facts
        if facts is not None:
            blocks = facts.max_length * facts.max_batch_size // BLOCK_TOKENS
            size = {(str(BLOCK_TOKENS), str(blocks)): 1.0}
            text = "Size of the KV cache, in the labels."
            yield self._gauge("vllm:cache_config_info", text, size, "block_size", "num_gpu_blocks")
        if load.drafts is not None:
            yield from self._drafts(load.drafts)

    def _drafts(self, counts: DraftCounts) -> Iterator[Metric]:
        events = ("sent", "unsent", "learnt", "own", "duplicate", "malformed", "passed_over")
        yield self._counter("lpr:shared_drafts", "Outputs shared with other replicas, by what became of them.",
                            {(event,): getattr(counts, event) for event in events}, "event")  # fmt: skip
        tokens = {"sent": counts.sent_tokens, "learnt": counts.learnt_tokens}
        tokens["outside_vocabulary"] = counts.outside_vocabulary
        yield self._counter("lpr:shared_draft_tokens", "Their tokens; those outside the vocabulary are dropped.",
                            {(event,): count for event, count in tokens.items()}, "event")  # fmt: skip
        errors = {
            ("write",): counts.write_errors, ("read",): counts.read_errors, ("snapshot",): counts.snapshot_errors
        }  # fmt: skip
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
