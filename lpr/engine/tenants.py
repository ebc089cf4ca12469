"""Outputs learnt from tenants that must not learn of each other.

How fast a request is decoded tells what its drafts were made of, so a trie that all share lets one client guess what
another wrote. Each tenant has a trie of its own instead. Every rank asks for the same tenants in the same order, so the
ranks forget the same ones.
"""

from __future__ import annotations

from collections.abc import Collection

from lpr.native import SuffixIndex

MOST_TENANTS = 64
"""Tenants remembered at a time; of more, the least recently used one is forgotten."""
SHARE = 16
"""A tenant's trie holds this part of `trie_capacity`: all together hold 4 times as much as one that is shared."""


class TenantTries:
    """A trie per tenant."""

    def __init__(self, capacity_tokens: int) -> None:
        """No tenants yet; `capacity_tokens` are those of a trie that is shared by all."""
        self._capacity = max(1, capacity_tokens // SHARE)
        self.tries: dict[str, SuffixIndex] = {}
        """By tenant, the least recently used one first."""
        self.read_to: dict[str, str] = {}
        """By tenant, "" for what all share: how far what other replicas have written is in its trie (lpr.fleet)."""

    def of(self, tenant: str, in_use: Collection[str] = ()) -> SuffixIndex:
        """A tenant's trie, which now counts as used; an empty one for a new or forgotten tenant.

        Those `in_use` are not forgotten: their requests run, and a replica that joins must find what they draft from.
        """
        trie = self.tries.pop(tenant, None)
        trie = trie if trie is not None else SuffixIndex(self._capacity)  # an empty one is false, and may be in use
        self.tries[tenant] = trie
        if len(self.tries) > MOST_TENANTS:
            idle = (name for name in self.tries if name != tenant and name not in in_use)
            forgotten = next(idle, "")
            if forgotten:
                del self.tries[forgotten]
                self.read_to.pop(forgotten, None)
        return trie

    def learning(self, tenant: str) -> SuffixIndex | None:
        """The trie for what other replicas have written for a tenant, which does not count as used by that.

        None if it would push out a tenant whose requests come here.
        """
        if tenant not in self.tries and len(self.tries) < MOST_TENANTS:
            self.tries = {tenant: SuffixIndex(self._capacity), **self.tries}
        return self.tries.get(tenant)
