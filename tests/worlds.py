"""Engines as ranks of a thread world: the rank logic of a job in one process and in milliseconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from transformers import PreTrainedModel

from lpr import Completion, DecodeConfig, Engine, SamplingParams
from lpr.dist.comm import CommError, ThreadComm, ThreadWorld

T = TypeVar("T")


def run_ranks(world: ThreadWorld, program: Callable[[ThreadComm], T]) -> list[T]:
    """Run `program` as every rank of `world`; raises what the first failing rank raised."""
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
        thread.join(timeout=120)
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
) -> list[list[Completion]]:
    """Every rank's completions; `prepare` may change a rank's engine before it starts.

    With `tp`, that many neighbouring ranks are one replica, each of them with the full model.
    """

    def program(comm: ThreadComm) -> list[Completion]:
        engine = Engine.from_model(model, decode=decode, comm=comm)
        prepare(engine)
        return engine.generate(prompts, params)

    return run_ranks(ThreadWorld(num_ranks, tp=tp), program)
