"""Engines as ranks of a thread world: the rank logic of a job in one process and in milliseconds."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from lpr import Completion, DecodeConfig, Engine, SamplingParams
from lpr.dist.comm import Comm
from lpr.dist.errors import CommError

T = TypeVar("T")


class ThreadWorld:
    """Ranks that are threads of one process: rank logic in milliseconds, and every wait has a time-out."""

    def __init__(self, size: int, timeout: float = 60.0, tp: int = 1) -> None:
        """A world of `size` ranks, `tp` to a replica; one that waits longer than `timeout` seconds raises CommError.

        Nothing is sharded here: the ranks of a replica all hold the full model.
        """
        self.size = size
        self.tp = tp
        self._barrier = threading.Barrier(size, timeout=timeout)
        self._slots: list[torch.Tensor | bytes | None] = [None] * size
        self.announcements: list[queue.SimpleQueue[int | None]] = [queue.SimpleQueue() for _ in range(size)]
        self.replicas = [ThreadWorld(tp, timeout) for _ in range(size // tp)] if tp > 1 else []
        """The ranks of each replica."""
        self.timeout = timeout

    def comm(self, rank: int) -> ThreadComm:
        """The world as `rank` sees it."""
        return ThreadComm(self, rank)

    def exchange(self, rank: int, value: torch.Tensor | bytes) -> list[torch.Tensor | bytes | None]:
        """Every rank's value, in rank order."""
        self._slots[rank] = value
        try:
            self._barrier.wait()
            everything = list(self._slots)
            self._barrier.wait()  # nobody may write the next value before all have read this one
        except threading.BrokenBarrierError:
            raise CommError("another rank has ended or hangs") from None
        return everything

    def abort(self) -> None:
        """Wake every waiting rank with a CommError: called when one of them fails."""
        self._barrier.abort()
        for replica in self.replicas:
            replica.abort()
        for waiting in self.announcements:
            waiting.put(None)


class ThreadComm(Comm):
    """One rank of a ThreadWorld; counts its collectives and bytes, for tests."""

    rank: int = 0
    size: int = 1

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        """World rank `rank` of `world`."""
        super().__init__()
        self.world = world
        self._world_rank = rank
        self.rank, self.tp_rank = divmod(rank, world.tp)
        self.size, self.tp_size = world.size // world.tp, world.tp
        self.num_sharing = world.size
        self.gathered_bytes: list[int] = []
        self.num_broadcasts = 0

    def gather(self, payload: torch.Tensor) -> torch.Tensor:
        """As Comm.gather; ranks with unequal payloads are an error here, where NCCL would hang."""
        self.gathered_bytes.append(payload.numel() * payload.element_size())
        payloads = self.world.exchange(self._world_rank, payload.detach().cpu().clone())
        try:
            return torch.stack(payloads)  # type: ignore[arg-type]
        except RuntimeError as failure:
            raise CommError("ranks gathered payloads of different sizes") from failure

    def begin_gather_replica(self, payload: torch.Tensor) -> Callable[[], torch.Tensor]:
        """As Comm.begin_gather_replica, when its result is asked for."""
        replica = self.world.replicas[self.rank]
        return lambda: torch.stack(replica.exchange(self.tp_rank, payload))  # type: ignore[arg-type]

    def broadcast(self, message: bytes, length: int) -> bytes:
        """As Comm.broadcast."""
        self.num_broadcasts += 1
        received = self.world.exchange(self._world_rank, message)[0]
        assert isinstance(received, bytes) and len(received) == length
        return received

    def leave(self, reason: str) -> None:
        """As Comm.leave; the others do not hear the reason."""
        self.world.abort()

    def announce(self, num_bytes: int) -> None:
        """As Comm.announce."""
        for rank, waiting in enumerate(self.world.announcements):
            if rank != self._world_rank:
                waiting.put(num_bytes)

    def await_announcement(self) -> int:
        """As Comm.await_announcement, but not for ever."""
        try:
            num_bytes = self.world.announcements[self._world_rank].get(timeout=self.world.timeout)
        except queue.Empty:
            num_bytes = None
        if num_bytes is None:
            raise CommError("another rank has ended or hangs")
        return num_bytes


def run_ranks(world: ThreadWorld, program: Callable[[ThreadComm], T], timeout: float = 120.0) -> list[T]:
    """Run `program` as every rank of `world`; raises what the first failing rank raised, or after `timeout` seconds."""
    results: list[T | None] = [None] * world.size
    failures: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            results[rank] = program(world.comm(rank))
        except BaseException as failure:
            failures.append(failure)
            world.abort()

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=timeout)
        assert not thread.is_alive(), "a rank hangs"
    # The cause, not the other ranks' notice of it.
    for failure in sorted(failures, key=lambda each: isinstance(each, CommError)):
        raise failure
    return results  # type: ignore[return-value]


def generate_on(
    num_ranks: int,
    model: PreTrainedModel,
    decode: DecodeConfig,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    prepare: Callable[[Engine], None] = lambda engine: None,
    tp: int = 1,
    **options: Any,
) -> list[list[Completion]]:
    """Every rank's completions; `prepare` may change a rank's engine before it starts.

    With `tp`, that many neighbouring ranks are one replica, each of them with the full model. `options` are those of
    EngineOptions.
    """

    def program(comm: ThreadComm) -> list[Completion]:
        engine = Engine.from_model(model, decode=decode, comm=comm, **options)
        prepare(engine)
        return engine.generate(prompts, params)

    return run_ranks(ThreadWorld(num_ranks, tp=tp), program)
