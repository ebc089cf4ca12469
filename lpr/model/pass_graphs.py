"""Passes of a low-bit copy on a GPU: one upload, one launch and one download each.

A pass is a packed step that the copy computes (lpr.model.self_draft). With its choices, the likeliest tokens and their
odds it is one program of a `PassShape`, which is a graph where steps are. Processors look at logits outside of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lpr.config import SamplingParams
from lpr.model.adapter import Adapter
from lpr.model.eager_forward import EagerForward
from lpr.model.graph_capture import NoWaiting, WaitsError
from lpr.model.graph_inputs import PACKED_BUCKETS, StaticShape, bucket_of, packed_kv, packed_shape, sequence_buckets
from lpr.model.graphs import GraphForward
from lpr.model.heads.guesses import likeliest_of
from lpr.model.kv_cache import KVCache
from lpr.model.sampling.choice import pick
from lpr.model.sampling.selection import Selection
from lpr.model.step_inputs import Row, Rows
from lpr.model.transfer import to_device

logger = logging.getLogger(__name__)

MOST_ENTRIES = 64
"""Entries of the largest pass with a shape: one for each of so many sequences."""
MOST_PREPARED = 32  # passes captured at the start

Copy = Callable[..., Any]
Found = tuple[list[int], list[list[int]], list[list[float]]]
"""After each entry the choice of the request, or a code below 0, the likeliest tokens and their odds."""


class PassShape(StaticShape):
    """The constants of a pass. A step of equal values has a graph of its own."""

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(step: StaticShape) -> PassShape:
        """Cached, so that its derived properties are computed once."""
        return PassShape(*astuple(step))


class PassGraphs:
    """Launches passes beside the steps of a forward strategy, which keeps their graphs among its own."""

    def __init__(self, forward: EagerForward) -> None:
        """Beside the steps of `forward`, whose model `fits`."""
        forward.passes = True
        self._forward, self._is_checked, self._waits = forward, False, False
        self.lost = 0.0
        """Seconds of the last pass in which its graph was captured."""

    @staticmethod
    def fits(adapter: Adapter) -> bool:
        """True if passes of the model of `adapter` are packed steps on a GPU."""
        return adapter.device.type == "cuda" and adapter.packed and adapter.packs_bits

    def forget(self) -> None:
        """Drop the graphs, as the copy is made anew."""
        if isinstance(self._forward, GraphForward):
            self._forward.forget(lambda shape: isinstance(shape, PassShape))

    def choices(
        self, copy: Copy, rows: Sequence[Row], asked: Sequence[tuple[SamplingParams, Sequence[int]]]
    ) -> Found | None:
        """What a pass of `copy` finds after the last entries of `rows`, of which results are wanted.

        `asked` are the parameters of each row's request and the positions of the tokens that it chooses. None if there
        is no shape.
        """
        found = self._run(copy, rows, Selection.build(asked), only_logits=False)
        if found is None:
            return None
        words = found.cpu()  # the one wait
        count = words.shape[1] // 2
        odds = words[:, 1 + count :].contiguous().view(torch.float32)
        return words[:, 0].tolist(), words[:, 1 : 1 + count].tolist(), odds.tolist()

    def logits(self, copy: Copy, rows: Sequence[Row]) -> Tensor | None:
        """Likewise the logits [results, V], valid until the next replay."""
        return self._run(copy, rows, Selection.build([]), only_logits=True)

    def _run(self, copy: Copy, rows: Sequence[Row], selection: Selection, only_logits: bool) -> Tensor | None:
        cache, placed, self.lost = self._forward.cache, Rows.of(rows), 0.0
        step = packed_shape(placed, selection, 0, cache.num_slots, cache.rows_per_slot, MOST_ENTRIES)
        if step is None or step.num_entries > MOST_ENTRIES or self._waits:
            return None
        shape = PassShape.of(replace(step, only_logits=True) if only_logits else step)
        words = np.empty(shape.num_words, np.int32)
        shape.place(words, placed, selection, cache)
        found = self._launch(copy, shape, words)
        return found[: placed.num_results] if found is not None else None

    def _launch(self, copy: Copy, shape: PassShape, words: np.ndarray) -> Tensor | None:
        forward, began = self._forward, self._forward.adapter.clock()
        forward.cache.device_tables(forward.adapter.device)  # with what has changed since the step
        program, captures = partial(_pass, forward.adapter, copy, shape, forward.cache), forward.num_captures
        if not self._is_checked and not self._check(program, words):
            return None
        found = forward.run_program(shape, program, words, [])
        if forward.num_captures > captures:
            self.lost = forward.adapter.clock() - began
        return found

    def _check(self, program: Callable[[Tensor], Tensor], words: np.ndarray) -> bool:
        """False if the copy makes the host wait: then steps keep their graphs, and passes are none."""
        self._is_checked = True
        placed = to_device(words, self._forward.adapter.device)
        try:
            with NoWaiting():
                program(placed)
        except WaitsError as failure:
            logger.warning("passes of the copy are no CUDA graphs: %s", failure)
            self._waits = True
        return not self._waits

    @torch.no_grad()
    def prepare(self, copy: Copy, most_alone: int) -> None:
        """As `common_shapes`: capture passes while no sequence is running, the largest first."""
        if isinstance(self._forward, GraphForward) and not self._is_checked:
            cache = self._forward.cache
            for shape in common_shapes(cache.num_slots, cache.rows_per_slot, most_alone)[:MOST_PREPARED][::-1]:
                tokens = [entry % 7 for entry in range(min(shape.num_entries, cache.rows_per_slot))]
                words = np.empty(shape.num_words, np.int32)
                shape.place(words, [Row.chain(0, 0, tokens, 0)], Selection.build([]), cache)
                self._launch(copy, shape, words)


def common_shapes(num_slots: int, rows_per_slot: int, most_alone: int) -> list[PassShape]:
    """Those of up to `most_alone` entries of one sequence, and of one entry each of several, the smallest first."""
    shapes = list[PassShape]()
    for size in PACKED_BUCKETS[: PACKED_BUCKETS.index(MOST_ENTRIES) + 1]:
        if size > max(most_alone, bucket_of(num_slots, PACKED_BUCKETS)):
            break
        several = next(each for each in sequence_buckets(size, num_slots) if each >= min(size, num_slots))
        for batch in sorted({1, several} if size <= most_alone else {several}):
            for num_kv, keys in product(packed_kv(batch, size, rows_per_slot), (0, size)):
                sizes = 0, batch, size, num_kv, 0, keys, keys > 0
                shapes.append(PassShape(*sizes, tree_bits=True, by_table=True, num_kept=size))
    return shapes


@torch.no_grad()
def _pass(adapter: Adapter, copy: Copy, shape: PassShape, cache: KVCache, words: Tensor) -> Tensor:
    """Int32 [results, 1 + 2 n]: choices, n likely tokens of each and the bits of their odds; or logits."""
    inputs, selection = shape.read(words, cache)
    logits = adapter.forward(inputs, cache, model=copy)
    if shape.only_logits:
        return logits
    tokens, odds = likeliest_of(logits, selection.noise, None)
    chosen = pick(logits, selection, fixed_shapes=True)[:, None]
    return torch.cat([chosen.int(), tokens.int(), odds.float().view(torch.int32)], 1)
