"""The payload of a step's one all-gather: a header, and the results of the nodes that a rank owns.

Its size follows from the configuration alone (DESIGN rule R2), so ranks that disagree about anything still meet in the
same collective, and the header tells them: it carries a digest of the replicated state, which must be equal on
all ranks, and the length of the commands that the driver broadcasts after the step (rule R3).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from lpr.config import NUM_HEADER, TreeSizes
from lpr.core.partition import Shard
from lpr.core.state import TreeResult
from lpr.core.tree import TokenTree
from lpr.dist.comm import Comm
from lpr.model.inputs import Row
from lpr.model.transfer import copy_over, to_device


class DesyncError(RuntimeError):
    """The replicated state differs between ranks; the message names the ranks that differ."""


class Exchange:
    """Packs, gathers and unpacks the payloads of one rank, in a buffer made once."""

    def __init__(self, config: TreeSizes, max_batch_size: int, comm: Comm, device: torch.device) -> None:
        """The exchange of `comm`'s ranks for up to `max_batch_size` trees of `config`, with payloads on `device`."""
        self.config = config
        self._max_batch_size = max_batch_size
        self.comm = comm
        self.capacity = config.owned_capacity(comm.size)
        self.width = 1 + 2 * config.num_recycled
        size = config.payload_words(max_batch_size, comm.size)
        self._payload = torch.zeros(size, dtype=torch.int32, device=device)

    @property
    def payload_bytes(self) -> int:
        """Bytes that each rank contributes to a step."""
        return self._payload.numel() * self._payload.element_size()

    def gather(
        self,
        local: torch.Tensor | None,
        trees: Sequence[TokenTree],
        shards: Sequence[Sequence[Shard]],
        digest: int,
        num_command_bytes: int = 0,
    ) -> tuple[list[TreeResult], int]:
        """Share this rank's results; return every node's result per tree, and the length of the driver's commands.

        `local` is int32 [entries, 1 + 2k], the results of this rank's shards one after the other, or None when there
        are no trees; k is the same on all ranks, and at most what the payload has room for. A node's result is its
        owner's on every rank, also on ranks that evaluated it as an ancestor (rule R1), and of the ranks that share a
        replica the first one's (rule R6). Raises DesyncError if the digest of any rank differs.
        """
        header = np.array([*_words(digest), num_command_bytes], np.int32)
        copy_over(self._payload[:NUM_HEADER], header)
        if local is not None:
            self._pack(local, [split[self.comm.rank] for split in shards])
        gathered = self.comm.gather(self._payload).numpy()
        check_digests(gathered[:, :2])
        k = (local.shape[1] - 1) // 2 if local is not None else 0
        return self._unpack(self._authoritative(gathered)[:, NUM_HEADER:], trees, shards, k), int(gathered[0, 2])

    def _pack(self, local: torch.Tensor, mine: Sequence[Shard]) -> None:
        table = self._payload[NUM_HEADER:].view(-1, self.capacity, self.width)
        start = 0
        for index, shard in enumerate(mine):
            results = local[start : start + len(shard.nodes)]
            start += len(shard.nodes)
            if len(shard.owned) < len(shard.nodes):
                entries = np.searchsorted(shard.nodes, shard.owned).astype(np.int64)
                results = results.index_select(0, to_device(entries, local.device))
            table[index, : len(shard.owned), : results.shape[1]] = results

    def _authoritative(self, gathered: np.ndarray) -> np.ndarray:
        """Of every replica's rows the first: the last bits of what its ranks compute may differ."""
        return gathered[:: self.comm.tp_size]

    def _unpack(
        self, gathered: np.ndarray, trees: Sequence[TokenTree], shards: Sequence[Sequence[Shard]], k: int
    ) -> list[TreeResult]:
        values = gathered.reshape(self.comm.size, self._max_batch_size, self.capacity, self.width)
        results = []
        for index, (tree, split) in enumerate(zip(trees, shards, strict=True)):
            table = values[0, index, : len(tree)]
            if len(split) > 1:
                table = np.empty((len(tree), self.width), np.int32)
                for rank, shard in enumerate(split):
                    table[np.array(shard.owned, np.intp)] = values[rank, index, : len(shard.owned)]
            results.append(
                TreeResult(table[:, 0].tolist(), table[:, 1 : 1 + k].tolist(), table[:, 1 + k : 1 + 2 * k].tolist())
            )
        return results


def check_replica(comm: Comm, rows: Sequence[Row]) -> None:
    """Raise DesyncError unless all ranks of this replica are about to evaluate the same `rows`.

    Ranks that share weights meet in every layer, long before the step's gather can compare digests. Rows of unequal
    height would abort the process there (gloo) or wait for the time-out (NCCL), and no error would name the rank.
    """
    description = repr([(row.slot, row.num_cached, row.tokens, row.parents, row.positions) for row in rows])
    found = hashlib.blake2b(description.encode(), digest_size=8).digest()
    payload = torch.from_numpy(np.frombuffer(found, np.int32).copy())
    check_digests(comm.gather_replica(payload).numpy(), first_rank=comm.rank * comm.tp_size)


def check_digests(digests: np.ndarray, first_rank: int = 0) -> None:
    """Raise DesyncError if the rows of `digests` [ranks, 2] are not all equal; the majority counts as right.

    Row i is that of world rank `first_rank` + i.
    """
    rows = [tuple(row) for row in digests.tolist()]
    if len(set(rows)) == 1:
        return
    # Of equally frequent digests, Counter keeps the first seen: rank 0's.
    agreed = Counter(rows).most_common(1)[0][0]
    others = [rank for rank, row in enumerate(rows, first_rank) if row != agreed]
    raise DesyncError(
        f"the replicated state of rank {', '.join(map(str, others))} differs from that of the other "
        f"{len(rows) - len(others)} of {len(rows)} ranks: their drafts or tokens are not the same"
    )


def _words(digest: int) -> list[int]:
    """A 64-bit digest as two signed 32-bit words."""
    return [(word ^ 0x80000000) - 0x80000000 for word in (digest & 0xFFFFFFFF, digest >> 32)]
