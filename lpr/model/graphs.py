"""Steps as CUDA graphs: one launch per step.

There is one graph per `StaticShape`; only the words of a step change between replays. Graphs share one memory pool:
they never run at the same time, and a step's results are copied away, in stream order, before the next replay. Steps
that are not captured are evaluated directly, with the same results.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from lpr.config import first_line
from lpr.model.adapter import Adapter
from lpr.model.eager_forward import EagerForward
from lpr.model.graph_capture import Capturer, NoWaiting, Program, WaitsError
from lpr.model.graph_inputs import (
    FEW_KEYS,
    KV_BUCKETS,
    MANY_ENTRIES,
    NODE_BUCKETS,
    PACKED_BUCKETS,
    StaticShape,
    bucket_of,
    kept_buckets,
    node_buckets,
    packed_kv,
    packed_shape,
    power_of_two,
    sequence_buckets,
    static_shape,
    wide_kv,
)
from lpr.model.sampling.selection import Selection
from lpr.model.step_inputs import Row, Rows
from lpr.model.torch_compile import CompiledForward
from lpr.model.transfer import Upload

logger = logging.getLogger(__name__)

MAX_GRAPHS = 256  # most graphs kept; the least recently used one is evicted
MOST_COMMON = 192  # graphs captured at the start
PENDING = 32  # entries beyond the tree's nodes that a graph may hold: committed tokens that another rank has evaluated
CAPTURED, FAILED, WRONG = range(3)
"""Outcomes of a capture. WRONG: the model's forward cannot be a graph, nor the program that would be one."""
COMMON_KV = 512  # longest cached length captured at load; graphs of longer ones are captured when first needed


@dataclass(frozen=True)
class Captured:
    """A captured step. It does not hold the forward: in a cycle, a dropped engine would keep its graphs and K/V."""

    replay: Program
    evaluated: Any  # what recurrent layers keep of a step: it lies where the captured forward has put it
    hidden: torch.Tensor | None  # the step's hidden states [entries, H], as `GraphForward._kept_hidden`


class GraphForward(EagerForward):
    """Replays graphs, captured when a shape is first needed or by `prepare`; evaluates the rest as EagerForward."""

    capturer: Capturer

    def __init__(
        self,
        *parts: Any,
        capturer: Capturer,
        model: Adapter | CompiledForward,
        worst: Callable[[int], int] = lambda outcome: outcome,
    ) -> None:
        """With the `parts` of an EagerForward, capture steps by `capturer`, with the forward of `model`.

        Ranks that share weights hear by `worst` the worst outcome of a capture among them: a rank that captures runs
        its collectives once more than one that does not.
        """
        super().__init__(*parts)
        self.capturer = capturer
        self._model, self._worst = model, worst
        self._row_multiple = self.adapter.gemm_rows.multiple if self.adapter.gemm_rows is not None else 1
        self.is_wrong = False  # True if a program of this model is wrong, captured or not, as it depends on the host
        self._num_candidates = 0
        self._is_packed = self.adapter.packed and self.adapter.packs_bits
        self.limit(1)
        self._graphs: OrderedDict[Any, Captured | None] = OrderedDict()  # None for what could not be captured
        num_slots, kept = self.cache.num_slots, PACKED_BUCKETS[-1] if self._is_packed else 0
        sizes = num_slots, kept or NODE_BUCKETS[-1], 0, 0, kept or num_slots * NODE_BUCKETS[-1], True
        largest = StaticShape(0, *sizes, num_kept=kept, with_adapters=True)
        # One place for all shapes: graphs never overlap, and a replay reads it in stream order.
        num_words = largest.num_words + 2 * self.cache.tables.size  # with changes of all block tables
        self._words = torch.zeros(num_words, dtype=torch.int32, device=self.adapter.device)
        self._upload = Upload(self._words)
        self._rooms: dict[Any, torch.Tensor] = {}
        """Where graphs leave what outlives the next replay, or each of them would hold, and read states."""
        self._kept_hidden: torch.Tensor | None = None
        """The last step's hidden states [entries, H]. Each graph holds the memory that it writes to."""

    def limit(self, max_nodes: int) -> None:
        """Capture steps of up to `max_nodes` nodes a row; longer pending chains, such as prompts, are rare shapes."""
        self._max_nodes = max_nodes
        longest = max_nodes if max_nodes == 1 else max_nodes + PENDING
        self.most_results = self.cache.num_slots * max_nodes
        """Most results of a packed step: those of a tree of each sequence."""
        self.max_entries = min(bucket_of(longest, node_buckets(1, self._row_multiple)), NODE_BUCKETS[-1])

    def forget(self, is_stale: Callable[[Any], bool]) -> None:
        """Drop the graphs of shapes for which `is_stale` is true: they read weights that lie elsewhere by now."""
        self._graphs = OrderedDict((each, kept) for each, kept in self._graphs.items() if not is_stale(each))

    def __len__(self) -> int:
        return len(self._graphs)

    def shape_of(self, rows: Sequence[Row], selection: Selection, num_candidates: int) -> StaticShape | None:
        """The shape whose graph evaluates a step; None if it has none.

        Without bits, recurrent layers follow paths that the host lays out in each step.
        """
        if self.cache.has_states and not self.adapter.reads_bits:
            return None
        adapters = self.cache.adapters
        has_adapters = adapters is not None and any([row.slot in adapters.places for row in rows])
        known = rows, selection, num_candidates, self.cache.num_slots, self.cache.rows_per_slot
        is_split, bits, tables = self.sampler.part is not None, self.adapter.reads_bits, self.adapter.reads_tables
        if self._is_packed:
            found = packed_shape(*known, self.most_results, is_split)
        else:
            found = static_shape(*known, self.max_entries, bits, self._row_multiple, is_split, tables)
        return replace(found, with_adapters=True) if found is not None and has_adapters else found

    def evaluate(self, rows: Sequence[Row], selection: Selection, num_candidates: int) -> torch.Tensor:
        if selection.processor_paths or selection.num_logprobs is not None:  # code, which no graph holds; and rare
            nothing = Selection.build([])
            shape = self.shape_of(rows, nothing, 0)
            logits = self._replay(replace(shape, only_logits=True) if shape is not None else None, rows, nothing)
            if logits is not None:
                return self.sampler.results(logits, selection.to(self.adapter.device), num_candidates)
            return super().evaluate(rows, selection, num_candidates)
        shape = self._captured_shape(rows, selection, num_candidates)
        found = self._replay(shape, rows, selection)
        if shape is None or found is None:
            return super().evaluate(rows, selection, num_candidates)
        return found if num_candidates == shape.num_candidates else found[:, :1]

    def launch_next(self, rows: Rows, selection: Selection, results: torch.Tensor) -> torch.Tensor | None:
        """Launch the step that follows one with these `results`: `rows` of one entry each, whose tokens they are.

        Returns its results, valid until the next replay. None without a graph, as a capture would wait for the device,
        and if hidden states are kept, which the step would overwrite.
        """
        shape = self._captured_shape(rows, selection, 0)
        if shape is None or not shape.num_kept or self._graphs.get(shape) is None or "hidden" in self._rooms:
            return None
        found = self._replay(shape, rows, selection, results[:, 0])
        return found[:, :1] if found is not None else None

    def _captured_shape(self, rows: Sequence[Row], selection: Selection, num_candidates: int) -> StaticShape | None:
        """As `shape_of`; without candidates, where only the shape of trees is captured at the start, that shape."""
        shape = self.shape_of(rows, selection, num_candidates)
        fewest = shape.batch if shape is not None and shape.num_kept else 1
        if shape is not None and not num_candidates and shape.num_entries > fewest:
            return replace(shape, num_candidates=self._num_candidates)
        return shape

    def fill(self, rows: Sequence[Row]) -> None:
        """As EagerForward.fill; pieces of prompts are packed steps without results."""
        shape = self.shape_of(rows, Selection.build([]), self._num_candidates) if self._is_packed else None
        if self._replay(shape, rows, Selection.build([])) is None:
            super().fill(rows)

    def run_program(self, shape: Any, program: Any, words: np.ndarray, states: list[torch.Tensor]) -> torch.Tensor:
        """As EagerForward.run_program, by a graph if steps have graphs."""
        size, count, most = len(words), sum(map(len, states)), PACKED_BUCKETS[-1]
        can_check = self.num_captures or isinstance(shape, StaticShape)  # the model, before its first capture
        if shape is None or not can_check or size > len(self._words) or count > most:
            return super().run_program(shape, program, words, states)
        if states and "given" not in self._rooms:
            self._rooms["given"] = states[0].new_empty(most, states[0].shape[1])
        self._upload.words(size)[:] = words
        self._upload.send(size)
        given = [torch.cat(states, out=self._rooms["given"][:count])] if states else []
        program = partial(program, self._words[:size], *given)
        captured = self._graph(shape, program)
        return captured.replay() if captured is not None else program()

    def _replay(
        self,
        shape: StaticShape | None,
        rows: Sequence[Row],
        selection: Selection,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """The results of `rows`; `tokens` [n] on the device take the place of the tokens of a packed step."""
        if shape is None or self.is_wrong:
            return None
        self._place(shape, rows, selection)
        if tokens is not None:  # one of logits that are not numbers is negative, and no index of an embedding
            end = prod(shape.sizes["bits"]) + shape.num_entries
            torch.clamp(tokens, min=0, out=self._words[end - len(tokens) : end])
        # Before a capture, which has collectives of its own, and on a CPU, whose collectives no host would leave.
        if self._graphs.get(shape) is None or self.adapter.device.type != "cuda":
            self.before_launch()
        captured = self._graph(shape)
        if self.is_wrong:
            return None
        if captured is not None:
            self._kept_hidden, self.cache.states.evaluated = captured.hidden, captured.evaluated
        results = captured.replay() if captured is not None else self._run(shape)
        self.num_computed += shape.num_computed
        length, states = shape.num_entries, self._kept_hidden
        if shape.only_logits:  # the host reads them before the gather compares the rows
            self.before_launch()
        if states is not None:
            counts = [row.num_entries for row in rows]
            whole = states[length - sum(counts) :].split(counts) if shape.num_kept else states.split(length)
            self.hidden = {row.slot: own[len(own) - row.num_entries :] for row, own in zip(rows, whole, strict=False)}
        if shape.num_kept:
            return results[: Rows.of(rows).num_results]
        results = results.view(shape.batch, length, -1)
        if all(row.num_results == rows[0].num_results for row in rows):  # no piece for each of many plain rows
            return results[: len(rows), length - rows[0].num_results :].flatten(0, 1)
        return torch.cat([each[length - row.num_results :] for each, row in zip(results, rows, strict=False)])

    def _place(self, shape: StaticShape, rows: Sequence[Row], selection: Selection) -> None:
        changes, end = self.cache.changes(), shape.num_words
        words = self._upload.words(end + changes.size)
        shape.place(words[:end], rows, selection, self.cache)
        words[end:] = changes.reshape(-1)
        self._upload.send(len(words))
        if changes.size:
            self.cache.write_changes(self._words[end : len(words)].view(2, -1))

    def _graph(self, shape: Any, program: Program | None = None) -> Captured | None:
        """The graph of `shape`, of its step or of another `program`; captured if it is new."""
        if shape not in self._graphs:
            while len(self._graphs) >= MAX_GRAPHS:
                self._graphs.popitem(last=False)
            captured = self._captured_by_all(shape, program) if self.reason is None else None
            if self.is_wrong:
                return None
            self._graphs[shape] = captured
        self._graphs.move_to_end(shape)
        return self._graphs[shape]

    def _captured_by_all(self, shape: Any, program: Program | None) -> Captured | None:
        """The graph of `shape`, on all ranks of a replica; None if one could not capture it."""
        outcome, captured = CAPTURED, None
        try:
            captured = self._capture(shape, program)
        except WaitsError as failure:
            self._give_up(failure)
            outcome = WRONG
        except Exception as failure:  # of CUDA, of Triton's compiler: of any type
            self._give_up(failure)
            outcome = FAILED
        worst = self._worst(outcome)
        if worst > outcome:
            self._give_up(RuntimeError("another rank of this replica could not capture a step"))
        self.is_wrong = worst == WRONG
        return captured if worst == CAPTURED else None

    def _give_up(self, failure: Exception) -> None:
        """Capture no more, say why once, and keep what is captured."""
        if self.reason is not None:
            return
        first: BaseException = failure
        while first.__context__ is not None:  # the end of a failed capture fails too, and hides the error that counts
            first = first.__context__
        self.reason = first_line(first)
        logger.warning("further steps are evaluated without CUDA graphs: %s: %s", type(first).__name__, self.reason)

    @torch.no_grad()
    def _run(self, shape: StaticShape) -> torch.Tensor:
        """The step of `shape` whose words are in place, directly: as high as a replay on another rank of a replica."""
        inputs, selection = shape.read(self._words, self.cache)
        inputs.in_parts = not shape.only_logits and self.sampler.in_parts(selection)
        logits = (self.adapter if shape.only_logits else self._model).forward(inputs, self.cache)
        if inputs.hidden is not None:
            self._kept_hidden = self._kept("hidden", inputs.hidden.flatten(0, 1))
        if shape.only_logits:
            return self._kept("logits", logits)
        results = self.sampler.results(logits, selection, shape.num_candidates, fixed_shapes=True)
        has_programs = self.passes or inputs.hidden is not None  # which are replayed before results are gathered
        return self._kept(results.shape[1], results) if has_programs else results

    def _kept(self, name: Any, values: torch.Tensor) -> torch.Tensor:
        """`values` in the one place for all shapes, as far as it is large enough."""
        if name not in self._rooms or len(values) > len(self._rooms[name]):
            self._rooms[name] = values.clone()  # not while a graph is captured: its program has run before
        return self._rooms[name][: len(values)].copy_(values)

    @torch.no_grad()
    def _capture(self, shape: Any, program: Program | None) -> Captured:
        if not self.num_captures:
            with NoWaiting():
                self.adapter.forward(shape.read(self._words, self.cache)[0], self.cache)
            self._check_length(shape)
        self.num_captures += 1
        replay = self.capturer.capture(program or partial(self._run, shape))
        return Captured(replay, self.cache.states.evaluated, self._kept_hidden)

    def _check_length(self, shape: StaticShape) -> None:
        """Raise WaitsError if the forward depends on the cached length, a Python number that a graph would freeze."""
        logits = []
        for length in (0, self.cache.rows_per_slot):
            inputs, _ = shape.read(self._words, self.cache)
            inputs.length = length
            logits.append(self.adapter.forward(inputs, self.cache).float())
        span = logits[0].amax() - logits[0].amin()
        if not (logits[0] - logits[1]).abs().amax() <= 1e-3 * span:
            raise WaitsError("its forward computes with the cached length, which would be a constant of the graph")

    def prepare(self, num_candidates: int, show: bool = True) -> None:
        """Capture the common shapes while no sequence is running; with a progress bar, if `show`, on a terminal.

        In exact mode each number of rows is compared with a direct step.
        """
        console, shapes, most = Console(stderr=True), self.common_shapes(num_candidates), self._own_pages()
        with Progress(console=console, disable=not (show and console.is_terminal), transient=True) as progress:
            for shape in progress.track(shapes, description="capturing CUDA graphs"):
                if shape in self._graphs or self.reason is not None:
                    continue
                row = Row.chain(shape.first_slot, 0, [entry % 7 for entry in range(min(shape.num_entries, most))], 0)
                self._place(shape, [row], Selection.build([]))
                self._graph(shape)
        if self.adapter.gemm_rows is not None and self.adapter.reads_bits:
            self._compare_bits(shapes)

    def _own_pages(self) -> int:
        """Give the first slot pages of its own; the number of their rows.

        Before the first sequence all of a slot's pages are page 0, and a GPU writes rows that meet there in any order.
        """
        page, room = self.cache.page_size, min(self.cache.num_pages * self.cache.page_size, self.cache.rows_per_slot)
        self.cache.assign(0, range(room // page))
        return room // page * page

    def _compare_bits(self, shapes: Sequence[StaticShape]) -> None:
        """Replay a tree of every size; stop capturing unless its logits are the bits of a direct step.

        A library may choose another kernel within a capture, or by another workspace. Overwrites the first pages.
        """
        room = self._own_pages()
        tokens = [7 * entry % self.adapter.config.vocab_size for entry in range(COMMON_KV)]
        self.fill([Row.chain(0, 0, tokens[: room // 2], 0)])
        plain = dict(num_candidates=0, num_keys=0, filtered=False, only_logits=True)
        for shape in dict.fromkeys(replace(each, **plain) for each in shapes):  # type: ignore[arg-type]
            count = min(shape.num_entries - 3, room // 2)
            if self.reason is not None or count < 1:
                return
            parents = [(entry - 1) // 2 if entry else -1 for entry in range(count)]
            cached = min(COMMON_KV, room // 2)
            places = [cached + (entry + 1).bit_length() - 1 for entry in range(count)]
            row = Row(0, cached, [entry % 7 for entry in range(count)], parents, places, count)
            replayed = self._replay(shape, [row], Selection.build([]))
            self._graphs.pop(shape, None)
            direct = self._logits(self.adapter.step_inputs([row], self.cache))
            same = replayed is not None and torch.equal(replayed.view(torch.uint8), direct.view(torch.uint8))
            if self._worst(CAPTURED if same else WRONG) == WRONG:
                self._give_up(RuntimeError(f"a replay of {shape.num_computed} rows has other bits than a direct step"))
                self.is_wrong = True

    def common_shapes(self, num_candidates: int) -> list[StaticShape]:
        """The shapes captured at the start, the largest first: the smaller ones then find their memory in the pool.

        Where attention reads bits these are all steps of up to `max_entries` entries, but for sampled ones of more than
        FEW_KEYS positions a sequence; else the greedy steps of one sequence over the first lengths. Of more than
        MOST_COMMON these are the ones of fewest entries: graphs that push each other out are captured while serving.
        """
        self._num_candidates = num_candidates
        rows, num_slots, bits = self.cache.rows_per_slot, self.cache.num_slots, self.adapter.reads_bits
        if self.cache.has_states and not bits:
            return []
        if self._is_packed:
            return self._packed_shapes(num_candidates)
        tables = bits and self.adapter.reads_tables
        sizes = [size for size in node_buckets(1, self._row_multiple) if size <= self.max_entries]
        shapes = []
        if bits:
            for batch in {min(power_of_two(count), num_slots) for count in range(1, num_slots + 1)}:
                buckets = node_buckets(batch, self._row_multiple)
                longest = bucket_of(self.max_entries, buckets)
                mine = sizes if batch == 1 else [size for size in buckets if size <= longest]
                shapes += [(batch, *each) for each in product(mine, wide_kv(batch, rows), (0, batch * FEW_KEYS))]
        else:
            sizes = [size for size in sizes if size <= bucket_of(self._max_nodes, NODE_BUCKETS)]
            short = {min(size, rows) for size in KV_BUCKETS if size <= COMMON_KV}
            shapes = [(1, size, length, 0) for size, length in product(sizes, short) if size <= length]
        found = [
            StaticShape(0, batch, size, length, num_candidates if size > 1 else 0, num_keys, filtered, bits, tables)
            for batch, size, length, num_keys in sorted(shapes, key=lambda each: (each[0] * each[1], each))
            for filtered in ((False, True) if num_keys and self.sampler.part is not None else (num_keys > 0,))
        ]
        return found[:MOST_COMMON][::-1]

    def _packed_shapes(self, num_candidates: int) -> list[StaticShape]:
        """As `common_shapes`, of packed steps: of any sampling, and without candidates where no tree has a node."""
        found = list[StaticShape]()
        for size in PACKED_BUCKETS:
            batches = sequence_buckets(size, self.cache.num_slots)
            for batch, fewer in zip(batches, (0, *batches), strict=False):
                lengths = packed_kv(batch, size, self.cache.rows_per_slot)
                all_kept = kept_buckets(size, self.most_results)
                for length, kept in product(lengths, all_kept) if size > fewer else ():
                    keys = (kept,) if size >= MANY_ENTRIES else (0, kept)
                    for each, known in product(keys, sorted({num_candidates, 0 if size <= batch else num_candidates})):
                        is_split = self.sampler.part is not None and each > 0
                        for filtered in (False, True) if is_split else (each > 0,):
                            sizes = 0, batch, size, length, known, each, filtered
                            found.append(StaticShape(*sizes, tree_bits=True, by_table=True, num_kept=kept))
        return found[:MOST_COMMON][::-1]
