"""Metrics of lpr inside vLLM, beside vLLM's own acceptance counters (vllm:spec_decode_num_accepted_tokens and others).

vLLM's server reads those of its own processes only, so these have a port of their own.
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

BUCKETS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3)


class Metrics:
    def __init__(self, port: int) -> None:
        """Serve them at `port` of 127.0.0.1; 0: nowhere. Raises OSError if it is taken."""
        self.registry = CollectorRegistry()
        self._drafted = Counter("lpr_drafted_tokens", "Drafted tokens", registry=self.registry)
        self._drafts = Counter("lpr_drafts", "Sequences times steps, with and without a draft", registry=self.registry)
        self._seconds = Histogram(
            "lpr_draft_seconds", "Drafting time of a step over its sequences", registry=self.registry, buckets=BUCKETS
        )
        self._learnt = Counter("lpr_learnt_tokens", "Tokens of outputs learnt", registry=self.registry)
        self._num_learnt = 0
        self._cost = Gauge(
            "lpr_token_cost", "Time of a further token, as a part of a step without drafts", ["sequences"],
            registry=self.registry,
        )  # fmt: skip
        if port:
            start_http_server(port, "127.0.0.1", self.registry)

    def count(
        self, drafts: Sequence[Sequence[int]], num_sequences: int, seconds: float, num_learnt: int, token_cost: float
    ) -> None:
        self._cost.labels(num_sequences).set(token_cost)
        self._drafted.inc(sum(map(len, drafts)))
        self._drafts.inc(num_sequences)
        self._seconds.observe(seconds / num_sequences)
        if num_learnt > self._num_learnt:
            self._learnt.inc(num_learnt - self._num_learnt)
            self._num_learnt = num_learnt
