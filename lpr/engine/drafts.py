"""The suffix indexes that requests draft from: outputs of earlier requests, shared by all or by one tenant only.

The decoding speed of a request depends on its drafts, so through a shared index one client could infer another's text.
Each named tenant therefore has its own index. Every rank accesses the tenants in the same order, so all ranks evict the
same ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from lpr.core.suffix_index import as_learnt
from lpr.engine.commands import Learn
from lpr.engine.request import Request
from lpr.native import SuffixIndex

MOST_TENANTS = 64  # most tenants with an index; the least recently used one is evicted
SHARE = 16
"""A tenant's index has 1/SHARE of the shared index's capacity; MOST_TENANTS of them have 4 times that capacity."""


class DraftIndexes:
    """One index that requests without a tenant share, and one per tenant. The same on every rank."""

    def __init__(self, capacity_tokens: int) -> None:
        """Empty indexes; `capacity_tokens` is that of the shared one."""
        self.capacity_tokens = capacity_tokens
        self.shared = SuffixIndex(capacity_tokens)
        self.tenants: dict[str, SuffixIndex] = {}  # by tenant, the least recently used one first
        self.read_to: dict[str, str] = {}
        """By tenant, "" for the shared index: the last entry of its stream that was learned (lpr.fleet)."""

    def source(self, request: Request, running: Iterable[Request]) -> SuffixIndex | None:
        """The index that a request drafts from: its forced text, or other requests' outputs; None without either.

        The indexes of `running` requests are not evicted.
        """
        if not request.params.forced_ids:
            return self._learned(request, running)
        known = SuffixIndex(self.capacity_tokens)
        known.extend([*request.prompt_ids, *request.params.forced_ids])
        return known

    def learn_output(self, request: Request, running: Iterable[Request]) -> None:
        """Let later requests draft from the output of a request that has ended."""
        index = self._learned(request, running)
        if index is not None and request.num_output:
            index.extend(as_learnt(request.prompt_ids, request.token_ids))
            index.end_document()

    def learn(self, command: Learn) -> None:
        """Apply a Learn command.

        Documents from other replicas do not count as a use of a tenant's index, and are dropped if they would evict a
        tenant with requests here.
        """
        tenant, index = command.tenant, self.shared
        if command.replace:
            index = self.shared = SuffixIndex(self.capacity_tokens)
        if tenant:
            if tenant not in self.tenants:
                if len(self.tenants) >= MOST_TENANTS:
                    return
                self.tenants = {tenant: self._new(), **self.tenants}
            index = self.tenants[tenant]
        index.insert(np.frombuffer(command.history, np.int32))
        if command.read_to:
            self.read_to[tenant] = command.read_to

    def history(self, tenant: str = "") -> np.ndarray:
        """The contents of a tenant's index, int32 [num_tokens]: documents separated by END, the oldest first."""
        index = self.tenants.get(tenant) if tenant else self.shared
        return np.array(index.history(), np.int32) if index is not None else np.empty(0, np.int32)

    def of(self, tenant: str, in_use: Collection[str] = ()) -> SuffixIndex:
        """A tenant's index, marked as most recently used; an empty one for a new or evicted tenant.

        Tenants `in_use` are not evicted: a replica that joins needs the indexes of running requests.
        """
        index = self.tenants.pop(tenant, None)
        index = index if index is not None else self._new()  # no `or`: an empty index is falsy
        self.tenants[tenant] = index
        forgotten = next((name for name in self.tenants if name != tenant and name not in in_use), None)
        if len(self.tenants) > MOST_TENANTS and forgotten is not None:
            del self.tenants[forgotten]
            self.read_to.pop(forgotten, None)
        return index

    def restore(self, shared: np.ndarray, tenants: Iterable[tuple[str, np.ndarray]], read_to: dict[str, str]) -> None:
        """Take over another rank's indexes from their histories, tenants in the order of their use."""
        self.shared.insert(shared)
        for tenant, history in tenants:
            self.of(tenant).insert(history)
        self.read_to = dict(read_to)

    def _learned(self, request: Request, running: Iterable[Request]) -> SuffixIndex | None:
        if not request.learns or request.params.forced_ids:
            return None
        return self.of(request.tenant, {each.tenant for each in running}) if request.tenant else self.shared

    def _new(self) -> SuffixIndex:
        return SuffixIndex(max(1, self.capacity_tokens // SHARE))
