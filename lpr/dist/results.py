"""The results of the collectives since a rank's last gather, and how ranks hand them to those that missed them.

A gather ends on a rank only when all ranks have begun it, so no rank misses more than the results since the last
gather. They travel through the rendezvous store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from lpr.dist.rendezvous import Member, Rendezvous

Result = torch.Tensor | bytes
"""Of a gather, int32 [ranks, words], or of a broadcast."""


class Results:
    """The results of one rank, by the number of their collective."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        """No collective has ended yet."""
        self.completed = 0
        """Number of the last collective that has ended for this rank."""
        self._rendezvous = rendezvous
        self._by_number: dict[int, Result] = {}

    @property
    def known(self) -> int:
        """Number of the last collective whose result this rank has, from its group or from other ranks."""
        return max([self.completed, *self._by_number])

    @property
    def next(self) -> Result | None:
        """The result of the collective after the last completed one, if it is known."""
        return self._by_number.get(self.completed + 1)

    @property
    def num_broadcasts(self) -> int:
        """Broadcasts that have ended for this rank since its last gather."""
        ended = (result for number, result in self._by_number.items() if number <= self.completed)
        return sum(isinstance(result, bytes) for result in ended)

    def add(self, result: Result) -> None:
        """Keep the result of the collective after the last completed one."""
        self._by_number[self.completed + 1] = result

    def end(self) -> Result:
        """Complete the next collective and return its result. After a gather, no rank needs earlier results."""
        self.completed += 1
        result = self._by_number[self.completed]
        if isinstance(result, torch.Tensor):
            self._by_number = {number: kept for number, kept in self._by_number.items() if number >= self.completed}
        return result

    def forget(self) -> None:
        """Drop all results: every rank has them."""
        self._by_number.clear()

    def leave(self, epoch: int) -> None:
        """Write the results to the store, for ranks that come to `epoch` without them."""
        rows = {number: _pack(result) for number, result in self._by_number.items()}
        self._rendezvous.put(_key(epoch, self._rendezvous.member), msgspec.msgpack.encode(rows))

    def take(self, epoch: int, members: Sequence[Member], timeout: float, find_loss: Callable[[], str | None]) -> None:
        """Take the missed results from the first of `members` that has left its own; raises CommError."""
        keys = [_key(epoch, member) for member in members]
        key = next(filter(self._rendezvous.has, keys), keys[0])
        found = self._rendezvous.get(key, timeout, find_loss)
        for number, packed in msgspec.msgpack.decode(found, type=dict[int, tuple[int, bytes]]).items():
            if number > self.known:
                self._by_number[number] = _unpack(*packed)


def _key(epoch: int, member: Member) -> str:
    return f"epoch/{epoch}/results/{member.key}"


def _pack(result: Result) -> tuple[int, bytes]:
    """A result as its number of rows, 0 for a broadcast's, and bytes."""
    return (0, result) if isinstance(result, bytes) else (len(result), result.numpy().tobytes())


def _unpack(num_rows: int, data: bytes) -> Result:
    return torch.from_numpy(np.frombuffer(data, np.int32).copy()).view(num_rows, -1) if num_rows else data
