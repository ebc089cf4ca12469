"""The payload of a step's one all-gather: headers, and the results of the nodes that a rank owns.

Its size follows from the configuration and the number of trees, in powers of two (DESIGN rule R2, see
`Exchange.payload_words`), so ranks that disagree about anything still meet in the same collective, and the headers tell
them. The first one has a digest of what all ranks hold, and the length of the commands that the driver broadcasts after
the step (rule R3). Each tree has one more, with a digest of what its home ranks alone hold. Where a rank may not serve
all requests, each node's result travels with the node (lpr.core.carried).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np
import torch

from lpr.config import NUM_HEADER, NUM_NODE_WORDS, NUM_TREE_HEADER, TreeSizes, result_words
from lpr.core.headers import tree_digests
from lpr.dist.comm import Comm
from lpr.model.exact.check import Heights
from lpr.model.inputs import Row
from lpr.model.transfer import copy_over, to_device
from lpr.native import Shard, StepDraft
from lpr.protocol import MeshError, TokenLogprobs


class DesyncError(MeshError):
    """The replicated state differs between ranks; the message names the ranks that differ."""


@dataclass(frozen=True)
class Gathered:
    """What the ranks have sent in a step, as `StepDraft.conclude` takes it, and what the driver announces."""

    values: np.ndarray
    """int32 [ranks, trees, capacity, words], each rank's trees as `StepDraft.served` says."""
    headers: np.ndarray
    """int32 [ranks, words] (lpr.core.headers)."""
    num_command_bytes: int


class Exchange:
    """Packs, gathers and unpacks the payloads of one rank, in a buffer made once."""

    def __init__(
        self,
        config: TreeSizes,
        max_batch_size: int,
        comm: Comm,
        device: torch.device,
        carries_trees: bool = False,
    ) -> None:
        """The exchange of `comm`'s ranks for up to `max_batch_size` trees of `config`, with payloads on `device`.

        `carries_trees`: may a rank not serve all requests (DecodeConfig.carries_trees)?
        """
        self.config = config
        self.comm = comm
        self.carries_trees = carries_trees
        self._max_batch_size = max_batch_size
        self.capacity = config.owned_capacity(comm.size)
        self.width = result_words(config.num_recycled) + NUM_NODE_WORDS * carries_trees
        size = config.payload_words(max_batch_size, comm.size, carries_trees)
        self._payload = torch.zeros(size, dtype=torch.int32, device=device)
        self._on_host = self._payload.numpy() if device.type == "cpu" else None

    def payload_words(self, num_trees: int) -> int:
        """Words (int32) that each rank contributes to a step of `num_trees` trees: those of the next power of two.

        How many trees a step has follows from the commands applied and the tokens committed before it, which the
        digest of the step before has compared: ranks that differ there never come to this step. So this, too, is the
        same on all ranks (rule R2), and there are few sizes.
        """
        return self.config.payload_words(self._num_rows(num_trees), self.comm.size, self.carries_trees)

    def _num_rows(self, num_trees: int) -> int:
        """Trees that a rank has room for in such a step; one that serves fewer leaves room empty."""
        return min(1 << (num_trees - 1).bit_length() if num_trees else 0, self._max_batch_size)

    def first_result(self, num_trees: int) -> int:
        """Where the results begin in the payload of a step of `num_trees` trees."""
        return NUM_HEADER + self._num_rows(num_trees) * NUM_TREE_HEADER

    @property
    def payload_bytes(self) -> int:
        """Most bytes that each rank contributes to a step: those of a full batch."""
        return self._payload.numel() * self._payload.element_size()

    def gather(
        self,
        local: torch.Tensor | None,
        draft: StepDraft,
        digest: int,
        num_candidates: int,
        num_command_bytes: int = 0,
    ) -> Gathered:
        """Share this rank's results; return those of all ranks, and the length of the driver's commands.

        `local` is int32 [nodes, result_words(k)], the results of this rank's part of `draft` with k=`num_candidates`,
        at most what the payload has room for, or None when it has none. Of every node its owner's value counts, also on
        ranks that evaluated it as an ancestor (rule R1); of the ranks that share a replica the first one's (rule R6).
        `digest` is of what all ranks hold. Raises DesyncError if that of any rank differs, or what the home ranks of a
        request have drafted for it.
        """
        is_compared = self.comm.size * self.comm.tp_size > 1
        self._write_headers(draft.headers(digest, num_command_bytes, num_candidates, is_compared))
        if local is not None:
            self._pack(local, draft)
        gathered = self.comm.gather(self._payload[: self.payload_words(len(draft))]).numpy()
        everybody = gathered[:, : self.first_result(len(draft))]
        if is_compared and not draft.agrees(everybody):
            self._name_unequal(everybody, draft)
        return Gathered(self._results(gathered, draft), self._authoritative(everybody), int(everybody[0, 2]))

    def _name_unequal(self, everybody: np.ndarray, draft: StepDraft) -> NoReturn:
        """Raise DesyncError about the ranks whose headers differ, or that have drafted a tree from unequal states."""
        check_digests(everybody[:, :2].tolist())
        for signed in tree_digests(everybody, draft.served).values():
            check_digests([digest for _, digest in signed], [rank for rank, _ in signed])
        raise AssertionError("the headers differ, and no rank's does")

    def gather_logprobs(self, local: torch.Tensor | None, draft: StepDraft, n: int) -> np.ndarray:
        """All ranks' log-probabilities, from `local` [nodes, 1 + 2n] (`log_probabilities`) of every rank.

        A collective of its own, for steps in which some request asks for them: n is the same on all ranks. `local` is
        None on a rank that serves no tree. Returns int32 [ranks, trees, capacity, 1 + 2n] for `read_logprobs`.
        """
        width, num_rows = 1 + 2 * n, self._num_rows(len(draft))
        table = torch.zeros((num_rows * self.capacity, width), dtype=torch.int32, device=self._payload.device)
        if local is not None:
            self._place(local, draft, table)
        gathered = self._authoritative(self.comm.gather(table.flatten()).numpy())
        return gathered.reshape(self.comm.size, num_rows, self.capacity, width)

    def _write_headers(self, headers: np.ndarray) -> None:
        if self._on_host is not None:
            self._on_host[: len(headers)] = headers
        else:
            copy_over(self._payload[: len(headers)], headers)

    def _pack(self, local: torch.Tensor, draft: StepDraft) -> None:
        results = self._payload[self.first_result(len(draft)) : self.payload_words(len(draft))]
        self._place(local, draft, results.view(-1, self.width), self.carries_trees)

    def _place(self, local: torch.Tensor, draft: StepDraft, table: torch.Tensor, carries_trees: bool = False) -> None:
        """Copy the results of the nodes that this rank owns into `table` [trees * capacity, columns or more]."""
        columns = table[:, : local.shape[1]]
        if self.comm.size == 1 and len(draft) == 1:
            columns[: len(local)] = local
            return
        source, target, words = to_device(draft.placement(self.capacity), local.device)
        columns.index_copy_(0, target, local if self.comm.size == 1 else local.index_select(0, source))
        if carries_trees:
            table[:, -NUM_NODE_WORDS:].index_copy_(0, target, words.unsqueeze(-1).view(torch.int32))

    def _authoritative(self, gathered: np.ndarray) -> np.ndarray:
        """Of every replica's rows the first: the last bits of what its ranks compute may differ."""
        return gathered[:: self.comm.tp_size]

    def _results(self, gathered: np.ndarray, draft: StepDraft) -> np.ndarray:
        """What is behind the headers, int32 [ranks, trees, capacity, words]."""
        results = self._authoritative(gathered)[:, self.first_result(len(draft)) :]
        return results.reshape(self.comm.size, -1, self.capacity, self.width)


def read_logprobs(values: np.ndarray, draft: StepDraft) -> list[list[TokenLogprobs]]:
    """Every node's log-probabilities per tree, from `Exchange.gather_logprobs`, once `draft` is concluded."""
    found, n = [], values.shape[-1] // 2
    for index, (tree, split) in enumerate(zip(draft.trees, draft.shards, strict=True)):
        assert tree is not None and split is not None
        places = [list(served).index(index) if index in served else 0 for served in draft.served]
        rows = _owned(values[range(len(places)), places], len(tree), split)
        floats = rows.view(np.float32)
        found.append(
            [
                TokenLogprobs(
                    float(floats[node, 0]),
                    list(zip(rows[node, 1 : 1 + n].tolist(), floats[node, 1 + n :].tolist(), strict=True)),
                )
                for node in range(len(tree))
            ]
        )
    return found


def _owned(values: np.ndarray, num_nodes: int, split: Sequence[Shard]) -> np.ndarray:
    """Each node's row [num_nodes, columns], from its owner's part of `values` [ranks, capacity, columns]."""
    if len(split) == 1:
        return np.ascontiguousarray(values[0, :num_nodes])
    table = np.empty((num_nodes, values.shape[2]), np.int32)
    for rank, shard in enumerate(split):
        table[np.array(shard.owned, np.intp)] = values[rank, : len(shard.owned)]
    return table


def check_replica(comm: Comm, rows: Sequence[Row]) -> Callable[[], None]:
    """Ask whether all ranks of this replica are about to evaluate the same `rows`.

    What is returned waits for the answer, and raises DesyncError if they are not. In between the step is prepared.

    Ranks that share weights meet in every layer, long before the step's gather can compare digests. Rows of unequal
    height would abort the process there (gloo) or wait for the time-out (NCCL), and no error would name the rank.
    """
    found = hashlib.blake2b(digest_size=8)
    for row in rows:
        found.update(np.array([row.slot, row.num_cached, len(row.tokens), row.num_results], np.int32).tobytes())
        found.update(row.entries.tobytes())
    payload = torch.from_numpy(np.frombuffer(found.digest(), np.int32).copy())
    answers, first = comm.begin_gather_replica(payload), comm.rank * comm.tp_size
    return lambda: check_digests(answers().tolist(), range(first, first + comm.tp_size))


def common_heights(comm: Comm, heights: Heights | str) -> Heights | str:
    """The heights that agree on every rank of this replica, whose shards can ask for different ones.

    Why there are none, in words, on every rank if it is so on one.
    """
    found = [0, 0, 0, 0, 0] if isinstance(heights, str) else [
        -heights.most, heights.fewest, heights.attention, heights.multiple, heights.head_multiple
    ]  # fmt: skip
    everybody = comm.begin_gather_replica(torch.tensor(found, dtype=torch.int32))()
    if isinstance(heights, str):
        return heights
    most, fewest, attention, multiple, head_multiple = everybody.amax(0).tolist()
    if not everybody.all() or fewest > -most:
        return "of another rank's shard"
    return replace(
        heights, fewest=fewest, most=-most, attention=attention, multiple=multiple, head_multiple=head_multiple
    )


def check_digests(digests: Sequence[Sequence[int]], ranks: Sequence[int] | None = None) -> None:
    """Raise DesyncError if the rows of `digests` are not all equal; the majority counts as right.

    Row i is that of world rank `ranks[i]`, default: of rank i.
    """
    if digests.count(digests[0]) == len(digests):
        return
    rows = [tuple(row) for row in digests]
    # Of equally frequent digests, Counter keeps the first seen: rank 0's.
    agreed = Counter(rows).most_common(1)[0][0]
    named = range(len(rows)) if ranks is None else ranks
    others = [rank for rank, row in zip(named, rows, strict=True) if row != agreed]
    raise DesyncError(
        f"the replicated state of rank {', '.join(map(str, others))} differs from that of the other "
        f"{len(rows) - len(others)} of {len(rows)} ranks: their drafts or tokens are not the same"
    )
