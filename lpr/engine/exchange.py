"""The step's one all-gather: headers, and the results of the nodes that a rank owns.

A payload's size depends only on the configuration, the number of trees (rounded up to a power of two) and the number of
log-probabilities that running requests ask for (rule R2). All of these are replicated, so ranks whose other state
differs still take part in the same collective, and compare it by the headers. lpr.core.wire has the layout.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from lpr.config import TreeSizes
from lpr.core import wire
from lpr.core.budgets import Budgets
from lpr.core.digest import digest_of
from lpr.core.heads import block_words
from lpr.dist.comm import Comm
from lpr.dist.errors import DesyncError, check_digests
from lpr.model.exact.check import GemmRows
from lpr.model.step_inputs import Row, Rows
from lpr.model.transfer import copy_over, to_device
from lpr.native import Concluded, StepDraft
from lpr.protocol import TokenLogprobs


@dataclass(frozen=True)
class Gathered:
    """The payloads of all ranks in a step."""

    draft: StepDraft
    payloads: np.ndarray  # int32 [world ranks, words]
    width: int  # words of a node
    num_logprobs: int | None
    num_guesses: int
    drafting: Sequence[int] = ()  # ranks that only draft

    @property
    def num_command_bytes(self) -> int:
        """Length of the commands that the driver broadcasts after the step."""
        return wire.num_command_bytes(self.payloads)

    def conclude(self, budgets: Budgets) -> tuple[Concluded, np.ndarray]:
        """`StepDraft.conclude`; raises DesyncError that names the ranks whose headers or trees differ."""
        try:
            return self.draft.conclude(self.payloads, self.width, budgets, self.num_guesses, self.drafting)
        except ValueError as failure:
            check_digests(self.payloads[:, :2].tolist())
            for sent in wire.tree_digests(self.payloads, self.draft.served).values():
                check_digests([digest for _, digest in sent], [rank for rank, _ in sent])
            size = len(self.payloads) // len(self.draft.served)
            for first in range(0, len(self.payloads), size):
                rows = self.payloads[first : first + size, [wire.ROWS_WORD]]
                check_digests(rows.tolist(), range(first, first + size))
            raise DesyncError(f"what the ranks have sent in a step does not fit together: {failure}") from failure

    @property
    def of_replicas(self) -> np.ndarray:
        """The payload of the first rank of each replica, int32 [replicas, words] (rule R6)."""
        return self.payloads[:: len(self.payloads) // len(self.draft.served)]

    def blocks(self) -> np.ndarray:
        """Each replica's guesses, int32 [replicas, trees, words] (lpr.core.heads)."""
        return wire.blocks_of(self.of_replicas, self.draft.capacity, self.width, self.num_guesses)

    def logprobs(self, concluded: Concluded) -> list[list[TokenLogprobs]] | None:
        """Every node's log-probabilities per tree of a concluded step; None if no request asks for any."""
        if self.num_logprobs is None:
            return None
        draft, payloads = self.draft, self.of_replicas
        tables = wire.tables_of(payloads, draft.capacity, self.width, self.num_guesses)
        found: list[list[TokenLogprobs]] = []
        for index, each in enumerate(concluded):
            places = wire.places_of(index, draft.served)
            found.append(wire.read_logprobs(payloads, tables, places, each.shards, self.num_logprobs))
        return found


@dataclass(frozen=True)
class Layout:
    """A step's payload."""

    width: int  # words of a node
    num_words: int
    first: int  # where the results begin
    end: int  # and end
    payload: torch.Tensor | None
    """The payload in the exchange's buffer; None if it is too long for it."""
    table: np.ndarray | None
    """Its results on a CPU, int32 [trees * capacity, width]."""


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
        """The exchange between `comm`'s ranks of up to `max_batch_size` trees of `config`, with payloads on `device`.

        `carries_trees` is true if not every rank serves all requests (DecodeConfig.carries_trees).
        """
        self.config = config
        self.comm = comm
        self.carries_trees = carries_trees
        self._max_batch_size = max_batch_size
        self.capacity = config.owned_capacity(comm.num_serving)
        self._began = time.perf_counter()
        self._layouts: dict[tuple[int, int | None], Layout] = {}
        self._payload = torch.zeros(self.payload_words(max_batch_size), dtype=torch.int32, device=device)
        self._on_host = self._payload.numpy() if device.type == "cpu" else None

    def payload_words(self, num_trees: int, num_logprobs: int | None = None) -> int:
        """Words (int32) that each rank contributes to a step of `num_trees` trees: those of the next power of two.

        The number of trees depends only on the commands and the committed tokens before the step. The digest of the
        last step has compared both, so the size is the same on all ranks (rule R2). Powers of two keep the number of
        sizes small.
        """
        room = min(1 << (num_trees - 1).bit_length() if num_trees else 0, self._max_batch_size)
        return wire.payload_words(self.config, room, self.comm.num_serving, self.carries_trees, num_logprobs)

    def _layout(self, num_trees: int, num_logprobs: int | None) -> Layout:
        """The layout of a step's payload."""
        if (found := self._layouts.get((num_trees, num_logprobs))) is None:
            width = wire.node_width(self.config, self.carries_trees, num_logprobs)
            num_words, num_guesses = self.payload_words(num_trees, num_logprobs), self.config.num_guesses
            first = wire.first_result(num_words, self.capacity, width, num_guesses)
            end = num_words - wire.room_of(num_words, self.capacity, width, num_guesses) * block_words(num_guesses)
            payload = self._payload[:num_words] if num_words <= len(self._payload) else None
            table = None
            if payload is not None and payload.device.type == "cpu":
                table = payload.numpy()[first:end].reshape(-1, width)
            found = self._layouts[num_trees, num_logprobs] = Layout(width, num_words, first, end, payload, table)
        return found

    @property
    def payload_bytes(self) -> int:
        """Bytes per rank of a full batch's step without log-probabilities."""
        return self._payload.numel() * self._payload.element_size()

    def begin_step(self) -> None:
        """Start the clock of a step; the payload contains the time until the gather."""
        self._began = time.perf_counter()

    def gather(
        self,
        draft: StepDraft,
        local: torch.Tensor | None,
        num_logprobs: int | None = None,
        guesses: np.ndarray | None = None,
    ) -> Gathered:
        """Send this rank's results; return those of all ranks.

        `local` is int32 [nodes, words], the results of this rank's part of `draft`, or None if it has none. A node's
        result is its owner's, also on ranks that evaluated the node as an ancestor (rule R1). `num_logprobs` is the
        maximum over running requests; `guesses`, int32 [own trees, words], are those of this rank's head.
        """
        payload, layout = self._pack(draft, local, num_logprobs, guesses)
        return self._gathered(draft, layout, num_logprobs, self.comm.gather(payload))

    def begin_gather(self, draft: StepDraft, local: torch.Tensor | None) -> Callable[[], Gathered]:
        """Begin `gather` in a world of one rank; the returned function waits for the results."""
        payload, layout = self._pack(draft, local, None, None)
        wait = self.comm.begin_gather(payload)
        return lambda: self._gathered(draft, layout, None, wait())

    def _gathered(self, draft: StepDraft, layout: Layout, num_logprobs: int | None, payloads: torch.Tensor) -> Gathered:
        how = layout.width, num_logprobs, self.config.num_guesses, self.comm.drafting
        return Gathered(draft, payloads.numpy(), *how)

    def _pack(
        self, draft: StepDraft, local: torch.Tensor | None, num_logprobs: int | None, guesses: np.ndarray | None
    ) -> tuple[torch.Tensor, Layout]:
        """The payload of `gather`, on the device."""
        layout, num_guesses = self._layout(len(draft), num_logprobs), self.config.num_guesses
        width, num_words, first, end, table = layout.width, layout.num_words, layout.first, layout.end, layout.table
        payload = layout.payload
        if payload is None:  # only with log-probabilities
            payload = self._payload.new_zeros(num_words)
        draft.header[wire.TIME_WORD] = min(int((time.perf_counter() - self._began) * 1e6), 2**31 - 1)
        header, is_full = draft.header, local is not None and len(local) == len(draft) * self.capacity
        in_order = self.comm.size == 1 and (len(draft) == 1 or is_full)
        words = draft.placement if local is not None and not in_order else None
        if self.comm.tp_size > 1:
            header[wire.ROWS_WORD] = self.comm.evaluated.digest
        places: torch.Tensor | None = None
        if words is not None and payload.is_cuda:  # both in one copy
            sent = to_device(np.concatenate([words.reshape(-1).view(np.int32), header]), payload.device)
            payload[: len(header)] = sent[2 * words.size :]
            places = sent[: 2 * words.size].view(torch.int64).view(words.shape)
        elif self._on_host is not None and table is not None:
            self._on_host[: len(header)] = header
        else:
            copy_over(payload[: len(header)], header)
        if words is not None and places is None and (local is None or table is None):
            places = to_device(words, payload.device)
        if local is not None and table is not None:  # by numpy, in a fraction of torch's time
            results = local.numpy()
            table[words[1] if words is not None else slice(len(local)), : local.shape[1]] = (
                results if words is None or self.comm.size == 1 else results[words[0]]
            )
            if words is not None and self.carries_trees:
                table[words[1], -wire.NUM_NODE_WORDS :] = words[2, :, None].view(np.int32)
        elif local is not None:
            self._place(local, places, payload[first:end].view(-1, width))
        if num_guesses:
            blocks = np.zeros(num_words - end, np.int32)  # always: the buffer holds those of an earlier step
            if guesses is not None:
                blocks[: guesses.size] = guesses.reshape(-1)
            copy_over(payload[end:num_words], blocks)
        return payload, layout

    def _place(self, local: torch.Tensor, places: torch.Tensor | None, table: torch.Tensor) -> None:
        """Copy the results of the nodes that this rank owns into `table` [trees * capacity, width].

        `places` are StepDraft.placement; None: the results are contiguous and in order.
        """
        columns = table[:, : local.shape[1]]
        if places is None:
            columns[: len(local)] = local
            return
        source, target, words = places
        columns.index_copy_(0, target, local if self.comm.size == 1 else local.index_select(0, source))
        if self.carries_trees:
            table[:, -wire.NUM_NODE_WORDS :].index_copy_(0, target, words.unsqueeze(-1).view(torch.int32))


def check_replica(comm: Comm, rows: Sequence[Row], at_once: bool = True) -> Callable[[], None]:
    """Count the `rows` that the tp ranks of this replica are about to evaluate, and begin to compare them on the host.

    The returned function waits for the result and raises DesyncError if rows differ. Meanwhile the step is prepared.
    Unless `at_once`, it also begins the comparison.

    Tensor-parallel ranks have a collective in every layer, before the step's gather compares digests. With unequal
    shapes gloo would end the process. A captured step on a GPU does not wait for the host: its gather compares the
    rows, and a rank that it keeps waiting, as other ranks have replayed another shape, looks for theirs in the store
    (Rendezvous.check_rows).
    """
    step, found = Rows.of(rows), hashlib.blake2b(digest_size=4)
    for words in (np.array(comm.evaluated.digest), step.slots, step.columns, step.entries):
        found.update(words.tobytes())
    comm.evaluated.num_forwards += 1
    comm.evaluated.digest = int.from_bytes(found.digest(), "little", signed=True)
    payload = torch.tensor([comm.evaluated.digest], dtype=torch.int32)
    begun = comm.begin_gather_replica(payload) if at_once else None

    def wait() -> None:
        answers, first = begun or comm.begin_gather_replica(payload), comm.rank * comm.tp_size
        check_digests(answers().tolist(), range(first, first + comm.tp_size))

    return wait


def common_gemm_rows(comm: Comm, gemm_rows: GemmRows | str) -> GemmRows | str:
    """The numbers of rows that are exact on every rank of this replica; its shards may need different ones.

    If a rank has no such numbers, all ranks return the reason as a string.
    """
    found = [0, 0, 0, 0]
    if not isinstance(gemm_rows, str):
        found = [-gemm_rows.most, gemm_rows.fewest, gemm_rows.multiple, gemm_rows.head_multiple]
    everybody = comm.begin_gather_replica(torch.tensor(found, dtype=torch.int32))()
    if isinstance(gemm_rows, str):
        return gemm_rows
    most, fewest, multiple, head_multiple = everybody.amax(0).tolist()
    if not everybody.all() or fewest > -most:
        return "of another rank's shard"
    return replace(gemm_rows, fewest=fewest, most=-most, multiple=multiple, head_multiple=head_multiple)


def worst_of_replica(comm: Comm, outcome: int) -> int:
    """The maximum of `outcome` (a small integer) over the tp ranks of this replica; a collective call."""
    if comm.tp_size == 1:
        return outcome
    return int(comm.begin_gather_replica(torch.tensor([outcome], dtype=torch.int32))().max())


def decide_as_first(comm: Comm, decisions: list[int], *seen: object) -> list[int]:
    """The decisions of this replica's first tp rank; raises DesyncError if what the ranks have `seen` differs."""
    if comm.tp_size == 1:
        return decisions
    payload = torch.tensor([digest_of(repr(seen)) % 2**31, *decisions], dtype=torch.int32)
    found, first = comm.begin_gather_replica(payload)().tolist(), comm.rank * comm.tp_size
    check_digests([each[:1] for each in found], range(first, first + comm.tp_size))
    return list(found[0][1:])
