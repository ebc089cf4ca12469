"""What the collectives since a rank's last gather have brought, and how ranks hand it to those that missed it.

A gather ends somewhere only when all have begun it, so nobody misses more than the results since the last gather; they
travel through the register (lpr.dist.elastic).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from lpr.dist.channel import CommError
from lpr.dist.register import Member, Register

Result = torch.Tensor | bytes
"""Of a gather, int32 [ranks, words], or of a broadcast."""


class Results:
    """The results of one rank, by the number of their collective."""

    def __init__(self, register: Register) -> None:
        """Nothing has ended yet."""
        self.completed = 0
        """Number of the last collective that has ended for this rank."""
        self._register = register
        self._by_number: dict[int, Result] = {}

    @property
    def known(self) -> int:
        """Number of the last collective whose result this rank has, also by others."""
        return max([self.completed, *self._by_number])

    @property
    def next(self) -> Result | None:
        """The result of the collective after the last one, where it is known."""
        return self._by_number.get(self.completed + 1)

    def add(self, result: Result) -> None:
        """This rank has taken part in the collective after the last one, which brought `result`."""
        self._by_number[self.completed + 1] = result

    def end(self) -> Result:
        """Count the collective after the last one as ended; its result."""
        self.completed += 1
        return self._by_number[self.completed]

    def forget_earlier(self) -> None:
        """All ranks have begun the last collective, so nobody needs what was before."""
        self._by_number = {number: result for number, result in self._by_number.items() if number >= self.completed}

    def forget(self) -> None:
        """All ranks have all results."""
        self._by_number.clear()

    def leave(self, epoch: int) -> None:
        """Leave them in the register for those that come to `epoch` without them."""
        rows = {number: _pack(result) for number, result in self._by_number.items()}
        self._register.leave_behind(_key(epoch, self._register.member), msgspec.msgpack.encode(rows))

    def take(self, epoch: int, members: Sequence[Member], timeout: float, is_hopeless: Callable[[], bool]) -> None:
        """Take what the first of `members` has left for those behind; raises CommError, also where there is nobody."""
        if not members:
            raise CommError("nobody has left the results that this rank missed")
        found = self._register.get(_key(epoch, members[0]), timeout, is_hopeless)
        for number, packed in msgspec.msgpack.decode(found, type=dict[int, tuple[int, bytes]]).items():
            if number > self.known:
                self._by_number[number] = _unpack(*packed)

    def holders(self, epoch: int, members: Sequence[Member]) -> list[Member]:
        """Those of `members` that have left theirs."""
        return [member for member in members if self._register.has_left(_key(epoch, member))]


def _key(epoch: int, member: Member) -> str:
    return f"epoch/{epoch}/results/{member.key}"


def _pack(result: Result) -> tuple[int, bytes]:
    """A result as its number of rows, 0 for a broadcast's, and bytes."""
    return (0, result) if isinstance(result, bytes) else (len(result), result.numpy().tobytes())


def _unpack(num_rows: int, data: bytes) -> Result:
    if not num_rows:
        return data
    return torch.from_numpy(np.frombuffer(data, np.int32).copy()).view(num_rows, -1)
