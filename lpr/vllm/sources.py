"""Draft sources of vLLM's requests besides their own text: learnt outputs, a trie file, and the fleet's store.

vLLM gives a proposer neither a request's key nor its cache_salt. If users must not infer each other's outputs from
decoding speed, set `share` to "none", or to the number of leading prompt tokens that only they know.
"""

import atexit
import hashlib
import secrets
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from lpr.engine.commands import Learn
from lpr.engine.drafts import DraftIndexes
from lpr.engine.trie_file import fingerprint_of, read_history
from lpr.native import SuffixIndex
from lpr.vllm.requests import Request
from lpr.vllm.settings import Settings

LEARN_EVERY = 32
"""Tokens of a running request that are learnt together, so that requests which run beside it draft from them."""
LEARN_AT_ONCE = 4  # batches of the fleet's outputs learnt between two steps, each of 0.4 ms at most


def tenant_of(prompt: np.ndarray, share: str | int) -> str:
    """The tenant of a request by its prompt, int32 [num_prompt]: "" where all requests share."""
    if not isinstance(share, int):
        return ""
    return hashlib.blake2b(prompt[:share].astype("<i4").tobytes(), digest_size=16).hexdigest()


class Sources:
    def __init__(self, settings: Settings, vllm_config: Any) -> None:
        """Load the trie file and connect the fleet's store where `settings` name them; raises InputError."""
        self.num_learnt = 0  # tokens of this server's outputs that were learnt
        self._shares = settings.share != "none"
        self._indexes = DraftIndexes(settings.capacity)
        self._fleet: Any = None
        model, vocab_size = vllm_config.model_config, int(vllm_config.model_config.get_vocab_size())
        if settings.trie is not None:
            history = read_history(settings.trie, _fingerprint(model, vocab_size), vocab_size)
            self._indexes.learn(Learn(history.tobytes()))
        if settings.fleet.draft_store is not None and self._shares and _is_first(vllm_config.parallel_config):
            from lpr.fleet.sharing import SharedDrafts  # its client is an optional package

            self._fleet = SharedDrafts(
                settings.fleet,
                fingerprint=_fingerprint(model, vocab_size),
                model=_served_name(model),
                vocab_size=vocab_size,
                origin=secrets.token_bytes(8),
                positions={},
            )
            atexit.register(self.close)  # vLLM does not tell a proposer when it ends

    def index_of(self, tenant: str, in_use: Collection[str]) -> SuffixIndex | None:
        """The index that a new request of a tenant drafts from; tenants `in_use` are not evicted."""
        if not self._shares:
            return None
        if self._fleet is not None:
            self._fleet.follow(tenant)
        return self._indexes.of(tenant, in_use) if tenant else self._indexes.shared

    def learn(self, running: Sequence[Request], gone: Sequence[Request]) -> None:
        """Learn the new outputs of finished requests, running requests and other replicas since the last step."""
        if self._shares:
            for request in running:
                if len(request.state) - request.num_prompt >= LEARN_EVERY:
                    self._learn(request)
            for request in gone:
                self._learn(request)
        if self._fleet is not None:
            self._learn_of_others()

    def close(self) -> None:
        """Send queued outputs to the fleet's store, and disconnect."""
        if self._fleet is not None:
            atexit.unregister(self.close)
            self._fleet.close()
            self._fleet = None

    def _learn(self, request: Request) -> None:
        context, output = request.take_output()
        if not output:
            return
        index = self._indexes.of(request.tenant, {request.tenant}) if request.tenant else self._indexes.shared
        index.extend([*context, *output])
        index.end_document()
        self.num_learnt += len(output)
        if self._fleet is not None:
            self._fleet.finished(request.tenant, context, output)

    def _learn_of_others(self) -> None:
        for _ in range(LEARN_AT_ONCE):
            batch = self._fleet.take()
            if batch is None:
                break
            self._indexes.learn(Learn(batch.history.tobytes(), tenant=batch.tenant, read_to=batch.read_to))
        wanted = self._fleet.wanted
        if wanted is not None:
            self._fleet.offer(wanted, self._indexes.history(wanted), self._indexes.read_to.get(wanted, ""))


def _fingerprint(model: Any, vocab_size: int) -> str:
    """Identifies the meaning of token ids, as lpr's own engine does."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        model.tokenizer, revision=model.tokenizer_revision, trust_remote_code=model.trust_remote_code
    )
    return fingerprint_of(tokenizer, vocab_size)


def _served_name(model: Any) -> str:
    names = model.served_model_name
    return str(names if isinstance(names, str) else names[0] if names else model.model)


def _is_first(parallel: Any) -> bool:
    """True for the tensor-parallel rank whose drafts vLLM uses; False with one engine per rank."""
    if parallel.distributed_executor_backend == "external_launcher":
        return False
    with suppress(ImportError, AssertionError):
        from vllm.distributed import get_tensor_model_parallel_rank

        return bool(get_tensor_model_parallel_rank() == 0)
    return True
