"""A proposer for vLLM's interface `custom_class` (vLLM 0.32: v1/spec_decode/custom_class_proposer.py).

vLLM creates one per rank of its last pipeline stage, and calls `propose` after each step with the batch's rows. It
verifies the drafts by its own rejection sampling, so they change the number of steps and never the distribution. vLLM
disables async scheduling for such proposers, and uses the drafts of one rank on all ranks.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from lpr.config import TreeSizes
from lpr.native import Chains, ChainState
from lpr.vllm.metrics import Metrics
from lpr.vllm.requests import Request, Requests
from lpr.vllm.settings import settings_of
from lpr.vllm.sources import Sources, tenant_of

MOST_PARKED = 64  # most requests without a row whose state is kept, because they may be preempted


class Proposer:
    """Drafts for vLLM's batch: vLLM's `--speculative-config` names it as `lpr.vllm.Proposer`."""

    def __init__(self, vllm_config: Any) -> None:
        """Read vLLM's configuration and lpr's settings in it; raises InputError for settings that cannot work."""
        self._num_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self._longest = int(vllm_config.model_config.max_model_len)
        self._settings = settings_of(vllm_config.additional_config)
        most = min(MOST_PARKED, int(vllm_config.scheduler_config.max_num_seqs))
        self._clock = self._settings.step_clock(vllm_config)
        self._chains = Chains(self._settings.num_nodes, self._clock.row(1))
        self._sizes = TreeSizes(
            trie_nodes=self._settings.num_nodes, branch_length=self._num_tokens, trie_capacity=self._longest
        )
        self._requests = Requests(most, self._begin)
        self._sources = Sources(self._settings, vllm_config)
        self._metrics = Metrics(self._settings.metrics_port)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A draft of at most `num_speculative_tokens` tokens per row; none for a row that has sampled none.

        `sampled_token_ids` are the tokens that each row has got in the step, none while its prompt is being computed.
        Row i has the first `num_tokens_no_spec[i]` tokens of `token_ids_cpu` (int32 [rows, max_model_len]), those of
        the step included.
        """
        began = time.perf_counter()
        rows = [row for row, sampled in enumerate(sampled_token_ids) if sampled]
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if not rows:
            self._clock.end((), ())
            return drafts
        texts = [token_ids_cpu[row, : num_tokens_no_spec[row]] for row in rows]
        counts = [len(sampled_token_ids[row]) for row in rows]
        running, gone = self._requests.recognise(rows, texts, counts)
        self._clock.begin(began, running, is_whole=len(rows) == len(drafts))
        self._sources.learn(running, gone)
        states = [request.state for request in running]
        depths = [min(self._num_tokens, self._longest - len(text) - 1) for text in texts]
        self._chains.times, self._chains.plain_part = self._clock.to_draft(len(rows))
        found = self._chains.draft(states, texts, depths)
        self._clock.end(running, found)
        for row, draft in zip(rows, found, strict=True):
            drafts[row] = draft
        seconds, cost = time.perf_counter() - began, self._clock.token_cost(len(rows))
        self._metrics.count(drafts, len(rows), seconds, self._sources.num_learnt, cost)
        return drafts

    def close(self) -> None:
        """Disconnect from the fleet's store; also happens at the end of the process."""
        self._sources.close()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: there is no model to load. vLLM calls this on a CPU."""

    def _begin(self, text: np.ndarray, num_prompt: int) -> Request:
        tenant = tenant_of(text[:num_prompt], self._settings.share)
        running = {request.tenant for request in self._requests.running.values()}
        return Request(ChainState(self._sizes, self._sources.index_of(tenant, running)), tenant, num_prompt)
