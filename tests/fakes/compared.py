"""Ids and bits of logits of every way to decode, compared with plain decoding.

Compared are the ids, and a digest of the logits from which each token was chosen: of every evaluated node on the path
of the text, on every rank. Ranks are threads of this process.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from lpr import DecodeConfig, Engine, SamplingParams
from lpr.dist.comm import Comm
from lpr.engine.request import Request
from lpr.model.input_builder import Row, StepInputs
from lpr.model.kv_cache import KVCache
from lpr.model.loader import load
from lpr.model.sampling.selection import Selection
from tests.fakes.worlds import ThreadComm, ThreadWorld, run_ranks

WINDOW = DecodeConfig(window_size=5, trie_nodes=0, max_batch_size=1)
TRIE = DecodeConfig(window_size=0, trie_nodes=24, max_batch_size=1)
BOTH = DecodeConfig(window_size=4, trie_nodes=16, max_batch_size=1)
BATCH = DecodeConfig(window_size=4, trie_nodes=16, max_batch_size=4, prefill_chunk=32)
PLAIN = DecodeConfig.autoregressive(max_batch_size=1)
WAIT = 36000.0
"""Seconds that ranks wait for each other: they share a core, and may be stopped meanwhile."""
Ids = list[list[int]]
T = TypeVar("T")


def in_batches(decode: DecodeConfig) -> DecodeConfig:
    """`decode` with four requests in a step."""
    return replace(decode, max_batch_size=4)


@dataclass
class Shape:
    """A way to decode the prompts of a group."""

    decode: DecodeConfig
    num_ranks: int = 1
    delivered: bool = False  # True if the first half of each output is given, as to a request that resumes.
    again: bool = False  # True if the engine has just decoded the same prompts, and finds their K/V.


SHAPES = {
    "window": Shape(WINDOW),
    "trie": Shape(TRIE),
    "both": Shape(BOTH),
    "both, batch of 4, fills of 32": Shape(BATCH),
    "the same again, prefixes found": Shape(BATCH, again=True),
    "taken up again in the middle": Shape(BATCH, delivered=True),
    "window, batch of 4": Shape(in_batches(WINDOW)),
    "trie, batch of 4": Shape(in_batches(TRIE)),
    "window, 2 ranks": Shape(WINDOW, num_ranks=2),
    "trie, 4 ranks": Shape(TRIE, num_ranks=4),
    "both, batch of 4, 2 ranks that share every tree": Shape(replace(BATCH, home_ranks=0), num_ranks=2),
    "both, batch of 4, 4 ranks that share every tree": Shape(replace(BATCH, home_ranks=0), num_ranks=4),
    "both, batch of 4, 4 ranks, home ranks": Shape(BATCH, num_ranks=4),
}
USUAL = ("window, batch of 4", "trie, batch of 4", "both, batch of 4, fills of 32")
"""Shapes that are also decoded without exact mode."""


@dataclass
class Watch:
    """Digests of the logits that an engine's tokens are chosen from, by (request, position of the token)."""

    texts: Sequence[Sequence[int]] | None = None
    """Prompt and output of each request, where known; then only nodes on their path count."""
    digests: dict[tuple[int, int], set[bytes]] = field(default_factory=dict)
    prompts: dict[tuple[int, ...], int] = field(default_factory=dict)

    def attach(self, engine: Engine, prompts: Ids) -> None:
        """Watch every step of `engine`, which decodes `prompts`."""
        self.prompts = {tuple(prompt): index for index, prompt in enumerate(prompts)}
        model = engine.model
        rows_of_step: list[Row] = []
        evaluate, forward_of = type(model).evaluate, type(model.adapter).forward

        def evaluated(rows: Sequence[Row], selection: Selection, num_candidates: int) -> torch.Tensor:
            rows_of_step[:] = rows
            return evaluate(model, rows, selection, num_candidates)

        def forward(inputs: StepInputs, cache: KVCache) -> torch.Tensor:
            found = forward_of(model.adapter, inputs, cache)
            if rows_of_step:
                here = {each.slots[engine.comm.rank]: each for each in engine.scheduler.running}
                self.look(here, rows_of_step, found)
                rows_of_step.clear()
            return found

        model.evaluate = evaluated  # type: ignore[method-assign]
        model.adapter.forward = forward  # type: ignore[method-assign, assignment]

    def look(self, running: dict[int, Request], rows: Sequence[Row], logits: torch.Tensor) -> None:
        """Take the digests of the results of `rows`, whose logits [n, V] follow one another."""
        start = 0
        for row in rows:
            first = row.num_entries - row.num_results
            if row.num_results:
                request = running[row.slot]
                index = self.prompts[tuple(request.tokens[: request.num_prompt])]
                for entry in self.on_path(row, index):
                    if entry >= first:
                        values = logits[start + entry - first].cpu().contiguous().view(torch.uint8).numpy()
                        key = index, int(row.positions[entry]) + 1
                        self.digests.setdefault(key, set()).add(
                            hashlib.blake2b(values.tobytes(), digest_size=16).digest()
                        )
            start += row.num_results

    def on_path(self, row: Row, index: int) -> list[int]:
        """The entries of `row` that are tokens of the text, where it is known."""
        if self.texts is None:
            return list(range(row.num_entries))
        text, found = self.texts[index], {-1}
        for entry, (token, parent, position) in enumerate(row.entries.T.tolist()):
            if parent in found and position < len(text) and token == text[position]:
                found.add(entry)
        return sorted(found - {-1})


def decode(engine: Engine, shape: Shape, prompts: Ids, params: Sequence[SamplingParams], outputs: Ids) -> Any:
    """The requests of a group, decoded by `engine` in its configuration."""
    requests = []
    for prompt, each, output in zip(prompts, params, outputs, strict=True):
        delivered = output[: len(output) // 2] if shape.delivered else []
        requests.append(engine.submit(prompt, each, delivered=delivered))
    while any(request.finish_reason is None for request in requests):
        engine.step()
    if shape.again and not any(request.num_cached_tokens for request in requests):
        raise RuntimeError("no prompt's K/V was found again")
    return requests


class Worlds:
    """Engines of one model: alone, and as ranks of worlds, each loaded and checked once."""

    def __init__(self, model: Any, dtype: str, exact: bool, engine: Engine | None = None) -> None:
        """`engine` serves as the world of one; `model` is a folder, a hub id, or a model in memory."""
        self.exact = exact
        self._model, self._dtype = model, dtype
        self._tokenizer: Any = None
        self._made: dict[int, list[Engine]] = {1: [engine]} if engine is not None else {}

    def engines(self, num_ranks: int) -> list[Engine]:
        """An engine for each of so many ranks, which share the model."""
        if isinstance(self._model, str | Path):
            loaded = load(str(self._model), self._dtype, "cpu")
            self._model, self._tokenizer = loaded.model, loaded.tokenizer
        if num_ranks not in self._made:
            world = ThreadWorld(num_ranks, timeout=WAIT)
            self._made[num_ranks] = [self._make(None)] if num_ranks == 1 else run_ranks(world, self._make, WAIT)
        return self._made[num_ranks]

    def run(self, num_ranks: int, program: Callable[[Engine], T]) -> list[T]:
        """What `program` returns on each of `num_ranks` ranks, in order."""
        engines = self.engines(num_ranks)
        if num_ranks == 1:
            return [program(engines[0])]
        world = cast("ThreadComm", engines[0].comm).world
        return run_ranks(world, lambda comm: program(engines[comm.rank]), WAIT)

    def _make(self, comm: ThreadComm | None) -> Engine:
        engine = Engine.from_model(self._model, decode=PLAIN, comm=cast("Comm | None", comm), exact=self.exact)
        engine.tokenizer = self._tokenizer
        return engine


@dataclass
class Group:
    """A few prompts and their outputs by plain decoding."""

    worlds: Worlds
    prompts: Ids
    params: Sequence[SamplingParams]
    outputs: Ids = field(default_factory=list)
    digests: dict[tuple[int, int], set[bytes]] = field(default_factory=dict)

    def run(self, names: Sequence[str]) -> dict[str, Any]:
        """The comparison of each of the shapes `names` with plain decoding."""
        self.decode_plainly()
        return {name: self.compare(SHAPES[name]) for name in names}

    def decode_plainly(self) -> None:
        """Find the outputs and logits that the others are compared with."""
        [(self.outputs, self.digests, _)] = self.worlds.run(1, lambda engine: self.watched(engine, Shape(PLAIN), None))

    def compare(self, shape: Shape) -> dict[str, Any]:
        """The numbers of ids and logits of one shape that differ."""
        began = time.process_time()
        texts = [[*prompt, *output] for prompt, output in zip(self.prompts, self.outputs, strict=True)]
        found = self.worlds.run(shape.num_ranks, lambda engine: self.watched(engine, shape, texts))
        outputs, num_steps = found[0][0], found[0][2]
        digests: dict[tuple[int, int], set[bytes]] = {}
        for ids, mine, _ in found:
            if ids != outputs:
                raise RuntimeError("ranks differ")
            for key, each in mine.items():
                digests.setdefault(key, set()).update(each)
        chosen = self.chosen(shape) if self.worlds.exact else set(digests)
        return {
            "prompts": len(self.prompts),
            "tokens": sum(map(len, outputs)),
            "steps": num_steps,
            "outputs_that_differ": sum(mine != theirs for mine, theirs in zip(outputs, self.outputs, strict=True)),
            "logits_compared": len(chosen),
            "logits_that_differ": sum(digests.get(key) != self.digests.get(key) for key in chosen),
            "cpu_seconds": round(time.process_time() - began, 1),
        }

    def chosen(self, shape: Shape) -> set[tuple[int, int]]:
        """(request, position) of every token that the shape chooses itself."""
        keys = set()
        for index, (prompt, output) in enumerate(zip(self.prompts, self.outputs, strict=True)):
            first = len(output) // 2 if shape.delivered else 0
            keys |= {(index, len(prompt) + at) for at in range(first, len(output))}
        return keys

    def watched(
        self, engine: Engine, shape: Shape, texts: Ids | None
    ) -> tuple[Ids, dict[tuple[int, int], set[bytes]], int]:
        """Outputs, digests of the logits on the path of `texts`, where known, and steps on one rank."""
        if not shape.again:
            engine.configure(shape.decode)
        watch = Watch(texts)
        watch.attach(engine, self.prompts)
        outputs = self.outputs or [[] for _ in self.prompts]
        requests = decode(engine, shape, self.prompts, self.params, outputs)
        steps = sum(request.completion().stats.num_steps for request in requests)
        return [list(request.token_ids) for request in requests], watch.digests, steps
