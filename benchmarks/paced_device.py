"""A simulated device: a model whose forward takes t(n) from a table, without the host's processor, and replays text.

A step's launch returns at once, as on an accelerator, and the step's one synchronisation, reading the gathered results,
waits until the device would be done. Host work between the two is hidden; all other host work counts. The work of the
device (results, K/V moves, prompts) and of other ranks takes no time on the clock.

Results come from recorded text: after a path that the text follows, the text's next token; elsewhere the most frequent
follower in all recorded texts. Candidates are the most frequent followers, the result first; scores fall by a fixed
step.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch

from lpr.config import TreeSizes
from lpr.core.step_times import StepTimes
from lpr.core.wire import first_result, node_width, result_words
from lpr.dist.comm import Comm
from lpr.engine.engine import Engine
from lpr.model.graph_inputs import PACKED_BUCKETS, packed_shape
from lpr.model.input_builder import Row
from lpr.model.sampling.selection import Selection
from lpr.model.step_inputs import Rows

SCORE_STEP = 24
"""Score of each further candidate (see lpr.core.recycle): a fifth of the probability of the one before."""


class Clock:
    """Seconds: processor time of the host's thread, plus the time that it waits for the device."""

    def __init__(self) -> None:
        self._ahead = self._stopped = 0.0

    def now(self) -> float:
        """The time."""
        return time.thread_time() + self._ahead

    def wait_until(self, then: float) -> None:
        """Wait by polling, as CUDA's synchronisation does; the clock then shows `then`."""
        left = then - self.now()
        if left <= 0:
            return
        end = time.perf_counter() + left
        while time.perf_counter() < end:
            pass
        self._ahead += then - self.now()

    def stopped(self) -> Clock:
        """A context: time spent inside does not count."""
        return self

    def __enter__(self) -> None:
        self._stopped = time.thread_time()

    def __exit__(self, *failure: object) -> None:
        self._ahead -= time.thread_time() - self._stopped


@dataclass
class Lap:
    """One step on the clock, in seconds."""

    began: float = 0.0
    asked: float = 0.0  # When the model was asked to evaluate; before that: drafts, cuts, shards.
    launched: float = 0.0  # When its inputs were ready and the device began.
    waited: float = 0.0  # When the host began to wait; since the launch its work was hidden.
    ready: float = 0.0  # When the results were ready.
    ended: float = 0.0
    device: float = 0.0  # Time of the device for the results.
    num_entries: int = 0  # those of the results

    @property
    def is_early(self) -> bool:
        """True if the next step was launched behind the results, in the same call."""
        return self.launched > self.ready


class Recorded:
    """Texts in tokens, and the most frequent followers of each token."""

    def __init__(self, texts: Sequence[Sequence[int]], k: int = 64) -> None:
        """Count followers in `texts`, prompts included; keeps up to `k` of each token."""
        counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for text in texts:
            for left, right in pairwise(text):
                counts[left][right] += 1
        size = 1 + max(map(max, texts))
        self._followers = np.empty((size, k + 1), np.int32)
        for token in range(size):
            likely = [each for each, _ in counts[token].most_common(k + 1)] if token in counts else [token]
            others = (each for each in range(2 * k + 2) if each not in likely)
            self._followers[token] = [*likely, *islice(others, k + 1 - len(likely))]

    def answers(
        self,
        text: Sequence[int],
        root: int,
        tokens: Sequence[int],
        parents: Sequence[int],
        depths: Sequence[int],
        k: int,
    ) -> np.ndarray:
        """The results of the nodes of a tree whose root is `text[root]`: int32 [nodes, result_words(k)].

        It works on whole arrays, to disturb the processor's caches little.
        """
        results = np.zeros((len(tokens), result_words(k)), np.int32)
        likely = self._followers[np.asarray(tokens), : k + 1]
        for node in self._path(text, root, tokens, parents, depths):
            at = root + depths[node] + 1
            if at < len(text):
                others = likely[node][likely[node] != text[at]]
                likely[node] = [text[at], *others[:k]]
        results[:, 0] = likely[:, 0]
        results[:, 1 : 1 + k] = likely[:, :k]
        results[:, 1 + k :].view(np.uint8)[:, :k] = np.minimum(255, SCORE_STEP * np.arange(1, k + 1))
        return results

    @staticmethod
    def _path(
        text: Sequence[int], root: int, tokens: Sequence[int], parents: Sequence[int], depths: Sequence[int]
    ) -> list[int]:
        """The nodes that the text follows from its place `root` on, the tree's root first."""
        path = [0]
        for node in range(1, len(tokens)):
            at = root + depths[node]
            if parents[node] == path[-1] and at < len(text) and text[at] == tokens[node]:
                path.append(node)
        return path


class Script:
    """The recorded texts that the sequences in an engine's slots follow."""

    def __init__(self, recorded: Recorded, texts: Sequence[Sequence[int]]) -> None:
        """`texts` are the requests to come, with prompts, which begin differently."""
        self._recorded, self._texts = recorded, texts
        self.by_slot: dict[int, Sequence[int]] = {}

    def learn(self, rows: Sequence[Row]) -> None:
        """Note which text begins in a row."""
        step = Rows.of(rows)
        cached, results, counts = step.columns
        begins = np.flatnonzero((cached == 0) & (counts > 1))
        for row in begins.tolist():
            first = 3 * int(counts[:row].sum())
            begin = step.entries[first : first + int(counts[row] - max(0, results[row] - 1))].tolist()
            slot = int(step.slots[row])
            self.by_slot[slot] = next(text for text in self._texts if text[: len(begin)] == begin)

    def answer(self, rows: Sequence[Row], num_candidates: int) -> tuple[list[tuple[Sequence[int], int]], np.ndarray]:
        """Per row with results its text and the root's place there, and the results of all.

        No Row is made: what the step would have to free counts as its work.
        """
        step = Rows.of(rows)
        steps, results, end = [], [], 0
        slots, (_, kept, counts) = step.slots.tolist(), step.columns.tolist()
        for slot, num_results, count in zip(slots, kept, counts, strict=True):
            begin, end = end, end + 3 * count
            if not num_results:
                continue
            above, text = count - num_results, self.by_slot[slot]
            tokens, parents, positions = step.entries[begin:end].reshape(3, count)[:, above:]
            root = int(positions[0])
            steps.append((text, root))
            tree = tokens.tolist(), (parents - above).tolist(), (positions - root).tolist()
            results.append(self._recorded.answers(text, root, *tree, num_candidates))
        return steps, np.concatenate(results)


@dataclass
class Device:
    """The device, its clock, and the running step."""

    costs: StepTimes
    clock: Clock = field(default_factory=Clock)
    lap: Lap = field(default_factory=Lap)
    _free: float = 0.0
    _running: list[tuple[float, int]] = field(default_factory=list)  # seconds and entries of what was launched

    def launch(self, num_entries: int, batch: int, kv: int) -> None:
        """Begin a forward of so many tokens, once earlier ones are done."""
        self.lap.launched = self.clock.now()
        with self.clock.stopped():
            took = self.costs.time(num_entries, batch, kv) / 1e3
        self._free = max(self.lap.launched, self._free) + took
        self._running.append((took, num_entries))

    def wait(self) -> None:
        """Wait for the device without using the processor."""
        self.lap.waited = self.clock.now()
        self.clock.wait_until(self._free)
        self.lap.ready = self.clock.now()
        with self.clock.stopped():
            self.lap.device = sum(took for took, _ in self._running)
            self.lap.num_entries = sum(count for _, count in self._running)
            self._running.clear()


class PacedComm(Comm):
    """Rank 0 of `size` ranks; the others are simulated and take as long as this one, at the same time."""

    size: int = 1

    def __init__(self, size: int) -> None:
        """A world of `size` ranks."""
        super().__init__()
        self.size = self.num_sharing = size
        self.paced: PacedModel | None = None

    def begin_gather(self, payload: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: self.gather(payload)

    def gather(self, payload: torch.Tensor) -> torch.Tensor:
        """The payload of this rank once the device is done, and the simulated payloads of the other ranks."""
        if self.paced is not None and self.paced.steps:
            self.paced.device.wait()
            with self.paced.device.clock.stopped():
                return self.paced.payloads(payload)
        return payload.cpu()[None].expand(self.size, -1).contiguous()


class PacedModel:
    """Takes the place of an engine's forward."""

    def __init__(
        self, engine: Engine, device: Device, recorded: Recorded, texts: Sequence[Sequence[int]], num_ranks: int
    ) -> None:
        """Replace the forward of `engine`; `texts` are the requests to come, with prompts, which begin differently."""
        self.device = device
        self.batch = 0  # sequences of the last step
        self._num_ranks = num_ranks
        self.steps: list[tuple[Sequence[int], int]] = []
        """Per tree of the running step: its text, and the root's place in it."""
        self._recorded = recorded
        self._script = Script(recorded, texts)
        self._model = model = engine.model
        self._config: TreeSizes = engine.sizes
        self._words = torch.zeros(1 << 22, dtype=torch.int32)
        self._there = torch.zeros_like(self._words)
        self._draft: Any = None
        self._k = 0
        self._others: list[np.ndarray] = []
        model.evaluate = self.evaluate  # type: ignore[method-assign]
        model.fill = self.fill  # type: ignore[method-assign]
        cache: Any = model.cache
        self._num_slots, self._rows_per_slot = cache.num_slots, cache.rows_per_slot
        cache.move = lambda rows: None
        exchange: Any = engine.replica.exchange
        self._exchange = exchange
        self._gather, exchange.gather = exchange.gather, self.gather
        engine.replica.overlap.begins_early = num_ranks == 1  # as on a GPU

    def fill(self, rows: Sequence[Row]) -> None:
        """As TreeModel.fill; prompts are not measured."""
        with self.device.clock.stopped():
            self._script.learn(rows)

    def evaluate(self, rows: Sequence[Row], selection: Selection, num_candidates: int) -> torch.Tensor:
        """As TreeModel.evaluate: makes a graph step's inputs, and launches it."""
        self.device.lap.asked = self.device.clock.now()
        with self.device.clock.stopped():
            self._script.learn(rows)
        sizes = self._num_slots, self._rows_per_slot, PACKED_BUCKETS[-1]
        shape = packed_shape(rows, selection, num_candidates, *sizes)
        if shape is not None and self._model.cache is not None:
            shape.place(self._words.numpy()[: shape.num_words], rows, selection, self._model.cache)
            self._there[: shape.num_words].copy_(self._words[: shape.num_words])
        with self.device.clock.stopped():
            step = Rows.of(rows)
            longest, num_entries = int(step.columns[0].max()), step.num_entries
        self.device.launch(num_entries, len(rows), longest)
        self.batch = len(rows)
        with self.device.clock.stopped():
            self._k = num_candidates
            self.steps, results = self._script.answer(rows, num_candidates)
            return torch.from_numpy(results)

    def gather(self, draft: Any, local: Any, *rest: Any) -> Any:
        """As Exchange.gather; simulates the results of the other ranks while the device works."""
        with self.device.clock.stopped():
            self._draft, self._others = draft, []
            if self._num_ranks > 1:
                for (text, root), tree in zip(self.steps, draft.trees, strict=True):
                    columns = (tree.tokens, tree.parents, tree.depths)
                    self._others.append(self._recorded.answers(text, root, *columns, self._k))
        return self._gather(draft, local, *rest)

    def payloads(self, payload: torch.Tensor) -> torch.Tensor:
        """This rank's payload and those of the simulated ranks."""
        size = self._num_ranks
        everything = payload[None]
        if size > 1:
            everything = everything.repeat(size, 1)
            capacity, width = self._exchange.capacity, node_width(self._config, self._exchange.carries_trees)
            begin = first_result(len(payload), capacity, width)
            tables = everything[:, begin:].view(size, -1, capacity, width).numpy()
            for index, (split, found) in enumerate(zip(self._draft.shards, self._others, strict=True)):
                for rank in range(1, size):
                    owned = list(split[rank].owned)
                    tables[rank, index, : len(owned), : found.shape[1]] = found[owned]
        self.steps = []
        return everything
