"""Steps as CUDA graphs: everything between a step's inputs and its results, launched by one call.

A forward of a 32-layer model is two thousand kernel launches, which take a host longer than a GPU needs to run them
for one sequence. A graph per `StaticShape` launches them at once. Nothing of a step but its words changes between two
replays, so a graph is right for any tree and any length that its shape holds. Graphs share one pool of memory: they
never run at the same time, and a step's results are copied on, in stream order, before the next replay. What is not
captured (long pending chains, logits processors, a model that cannot be) is evaluated directly, with the same results.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import Progress
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from lpr.model.inputs import Row, StepInputs
from lpr.model.sampling.selection import Selection
from lpr.model.static_inputs import (
    FEW_KEYS,
    KV_BUCKETS,
    NODE_BUCKETS,
    WIDE_KV,
    StaticShape,
    bucket_of,
    node_buckets,
    power_of_two,
    static_shape,
)
from lpr.model.transfer import Upload

logger = logging.getLogger(__name__)

MAX_GRAPHS = 256
"""Graphs kept; the one not used for longest goes first."""
PENDING = 32
"""Entries beyond the tree's nodes that a graph may hold: committed tokens that another rank has evaluated."""
COMMON_KV = 512
"""Cached lengths up to this are captured when the model is loaded, longer ones when they come."""
_WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "masked_select",
    "is_nonzero",
    "equal",
)
"""Operators whose result's value or shape the host must wait for."""
_DYNAMIC_ROPE = ("dynamic", "longrope")

Program = Callable[[], torch.Tensor]


class Capturer(Protocol):
    """What turns a program into its replay; a fake one, in tests, does so on a CPU."""

    def capture(self, program: Program) -> Program:
        """Run `program` once for real, then record it; the replay returns the same tensor each time."""
        ...


class CudaCapturer:
    """Captures with torch.cuda.graph, on a stream of its own, into one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        """For programs whose tensors are on `device`."""
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, program: Program) -> Program:
        """As Capturer.capture. The first run sets libraries up, which a capture does not allow."""
        with torch.cuda.device(self.device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                program()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            try:
                # NCCL's watchdog asks for events from a thread of its own meanwhile: only this thread must not wait.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    results = program()
            except Exception:
                torch.cuda.set_stream(stream)  # the failed end of a capture leaves its own stream current
                raise

        def replay() -> torch.Tensor:
            graph.replay()
            return results

        return replay


def is_capturing(device: torch.device) -> bool:
    """Is a graph captured just now on this thread's stream of `device`?"""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class WaitsError(RuntimeError):
    """The model's forward makes the host wait for the device, or depends on the host."""


class NoWaiting(TorchDispatchMode):
    """Raises WaitsError at an operator that the host would have to wait for: no graph can hold it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the operator's name and at what it copies, then run it."""
        name = func.name()
        if name.split("::")[-1].split(".")[0] in _WAITING:
            raise WaitsError(f"its forward waits for the device ({name})")
        result = func(*args, **(kwargs or {}))
        if name in ("aten::_to_copy", "aten::copy_"):
            source = args[1] if name == "aten::copy_" else args[0]
            if source.device != result.device:
                raise WaitsError(f"its forward copies from {source.device.type} to {result.device.type} ({name})")
        return result


def uncapturable(model: PreTrainedModel, accepts_positions: bool) -> str | None:
    """Why `model` can be known not to fit a graph, from its configuration; None if nothing is known against it."""
    config: Any = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    for kind in kinds:
        name = kind.get("rope_type", kind.get("type"))
        if name in _DYNAMIC_ROPE:
            return f"its rope_type {name!r} looks at the longest position of each step on the host"
    asks = getattr(config, "_experts_implementation", None) == "eager" and model._can_set_experts_implementation()
    if asks and _has_experts(config):  # families with experts of their own (Llama 4) do not look at the setting
        return "its experts implementation 'eager' asks the device which experts are hit (use 'grouped_mm')"
    if not accepts_positions:
        return "its forward takes no positions, so that the cached length would be a constant of the graph"
    return None


def _has_experts(config: Any) -> bool:
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


class GraphRunner:
    """Evaluates steps by replaying graphs, captured when a shape is first needed or by `prepare`."""

    def __init__(
        self,
        compute: Callable[[StepInputs, Selection, int], torch.Tensor],
        logits: Callable[[StepInputs], torch.Tensor],
        capturer: Capturer,
        device: torch.device,
        num_slots: int,
        rows_per_slot: int,
        tree_bits: bool = False,
        max_graphs: int = MAX_GRAPHS,
        height: int = 1,
        meet: Callable[[], None] = lambda: None,
        in_parts: bool = False,
    ) -> None:
        """Graphs of `compute`, on a cache of `num_slots` slots with `rows_per_slot` rows each.

        `logits` is the forward in `compute`, by which the first capture is checked. With `tree_bits` attention reads
        who is whose ancestor in bits, and no dense mask is made. Shapes have a multiple of `height` entries.
        `meet` is called when a step's words are in place, before anything is captured or replayed. Where the vocabulary
        is `in_parts`, steps with limits and without are other graphs.
        """
        self._compute = compute
        self._logits = logits
        self.capturer = capturer
        self._num_slots = num_slots
        self._rows_per_slot = rows_per_slot
        self._tree_bits = tree_bits
        self.max_graphs = max_graphs
        self._height = height
        self._meet = meet
        self._in_parts = in_parts
        self.reason: str | None = None
        """Why no further step is captured, once something has failed."""
        self.is_wrong = False
        """Is a program of this model wrong, captured or not, for what depends on the host?"""
        self.num_captures = 0
        self._num_candidates = 0
        self.limit(1)
        self._graphs: OrderedDict[StaticShape, Program] = OrderedDict()
        num_keys = num_slots * NODE_BUCKETS[-1]
        largest = StaticShape(0, num_slots, NODE_BUCKETS[-1], 0, 0, 0, num_keys, True)
        # One place for all shapes: graphs never overlap, and a replay reads it in stream order.
        self._words = torch.zeros(largest.num_words, dtype=torch.int32, device=device)
        self._upload = Upload(self._words)

    def limit(self, max_nodes: int) -> None:
        """Capture steps of up to `max_nodes` nodes a row; longer pending chains, such as prompts, are rare shapes."""
        self._max_nodes = max_nodes
        longest = max_nodes if max_nodes == 1 else max_nodes + PENDING
        self.max_entries = min(bucket_of(longest, node_buckets(1, self._height)), NODE_BUCKETS[-1])

    def __len__(self) -> int:
        return len(self._graphs)

    def shape_of(self, rows: Sequence[Row], selection: Selection, num_candidates: int) -> StaticShape | None:
        """The shape whose graph evaluates a step; None if it has none."""
        limits = self._num_slots, self._rows_per_slot, self.max_entries
        return static_shape(rows, selection, num_candidates, *limits, self._tree_bits, self._height, self._in_parts)

    def evaluate(self, rows: Sequence[Row], selection: Selection, num_candidates: int) -> torch.Tensor | None:
        """As TreeModel.evaluate, valid until the next call; None if the step has to be evaluated directly."""
        if self.is_wrong:
            return None
        shape = self.shape_of(rows, selection, num_candidates)
        if shape is None:
            return None
        if not num_candidates and shape.num_entries > 1:
            shape = replace(shape, num_candidates=self._num_candidates)  # that of trees, which is captured already
        found = self._replay(shape, rows, selection)
        return found if found is None or num_candidates == shape.num_candidates else found[:, :1]

    def logits(self, rows: Sequence[Row]) -> torch.Tensor | None:
        """The logits [sum of num_results, V] of `rows`, valid until the next call; None as for `evaluate`."""
        nothing = Selection.build([])
        shape = None if self.is_wrong else self.shape_of(rows, nothing, 0)
        return None if shape is None else self._replay(replace(shape, only_logits=True), rows, nothing)

    def _replay(self, shape: StaticShape, rows: Sequence[Row], selection: Selection) -> torch.Tensor | None:
        self._place(shape, rows, selection)
        self._meet()
        replay = self._graph(shape)
        if replay is None:
            return None
        results = replay().view(shape.batch, shape.num_entries, -1)
        parts = [each[shape.num_entries - row.num_results :] for each, row in zip(results, rows, strict=False)]
        return parts[0] if len(rows) == 1 else torch.cat(parts)

    def _place(self, shape: StaticShape, rows: Sequence[Row], selection: Selection) -> None:
        shape.place(self._upload.words(shape.num_words), rows, selection)
        self._upload.send(shape.num_words)

    def _graph(self, shape: StaticShape) -> Program | None:
        replay = self._graphs.get(shape)
        if replay is None:
            while len(self._graphs) >= self.max_graphs:
                self._graphs.popitem(last=False)
            program = partial(self._run, shape)
            try:
                replay = program if self.reason is not None else self._capture(shape, program)
            except WaitsError as failure:
                self._give_up(failure)
                self.is_wrong = True
                return None
            except Exception as failure:  # of CUDA, of Triton's compiler: of any type
                self._give_up(failure)
                replay = program
            self._graphs[shape] = replay
        self._graphs.move_to_end(shape)
        return replay

    def _give_up(self, failure: Exception) -> None:
        """Capture no more, say why once, and keep what is captured.

        The end of a capture that failed inside fails too, and its error hides the one that counts, its context.
        """
        first: BaseException = failure
        while first.__context__ is not None:
            first = first.__context__
        self.reason = (str(first).strip().splitlines() or [type(first).__name__])[0]
        logger.warning("further steps are evaluated without CUDA graphs: %s: %s", type(first).__name__, self.reason)

    @torch.no_grad()
    def _run(self, shape: StaticShape) -> torch.Tensor:
        """The step of `shape` whose words are in place, directly: as high as a replay on another rank of a replica."""
        inputs, selection = shape.read(self._words)
        if shape.only_logits:
            return self._logits(inputs)
        return self._compute(inputs, selection, shape.num_candidates)

    @torch.no_grad()
    def _capture(self, shape: StaticShape, program: Program) -> Program:
        if not self.num_captures:
            with NoWaiting():
                self._logits(shape.read(self._words)[0])
            self._check_length(shape)
        self.num_captures += 1
        return self.capturer.capture(program)

    def _check_length(self, shape: StaticShape) -> None:
        """The cached length is a Python number to a model that asks for it, and would be a constant of the graph."""
        logits = []
        for length in (0, self._rows_per_slot):
            inputs, _ = shape.read(self._words)
            inputs.length = length
            logits.append(self._logits(inputs).float())
        span = logits[0].amax() - logits[0].amin()
        if not (logits[0] - logits[1]).abs().amax() <= 1e-3 * span:
            raise WaitsError("its forward computes with the cached length, which would be a constant of the graph")

    def prepare(self, num_candidates: int, show: bool = True) -> None:
        """Capture the common shapes while no sequence is running; with a progress bar, if `show`, on a terminal."""
        console = Console(stderr=True)
        with Progress(console=console, disable=not (show and console.is_terminal), transient=True) as progress:
            for shape in progress.track(self.common_shapes(num_candidates), description="capturing CUDA graphs"):
                if shape in self._graphs or self.reason is not None:
                    continue
                tokens = [entry % 7 for entry in range(shape.num_entries)]
                positions = list(range(shape.num_entries))
                row = Row(shape.first_slot, 0, tokens, list(range(-1, shape.num_entries - 1)), positions, 0)
                self._place(shape, [row], Selection.build([]))
                self._graph(shape)

    def common_shapes(self, num_candidates: int) -> list[StaticShape]:
        """What is captured at the start, the largest first: the smaller ones then find their memory in the pool.

        Where attention reads lengths on the device these are all steps of up to `max_entries` entries, greedy and
        sampled; only trees with more than FEW_KEYS positions a sequence, sampled, come later. Where it takes a dense
        mask, whose size is a part of the shape, they are the greedy steps of one sequence over the first lengths.
        """
        self._num_candidates = num_candidates
        rows = self._rows_per_slot
        sizes = [size for size in node_buckets(1, self._height) if size <= self.max_entries]
        shapes = []
        if self._tree_bits:
            batches = {min(power_of_two(count), self._num_slots) for count in range(1, self._num_slots + 1)}
            lengths = {min(size, rows) for size in (*WIDE_KV, rows)}
            for batch in batches:
                buckets = node_buckets(batch, self._height)
                longest = bucket_of(self.max_entries, buckets)
                mine = sizes if batch == 1 else [size for size in buckets if size <= longest]
                for size, length, num_keys in product(mine, lengths, (0, batch * FEW_KEYS)):
                    shapes.append((batch, size, length, num_keys))
        else:
            sizes = [size for size in sizes if size <= bucket_of(self._max_nodes, NODE_BUCKETS)]
            short = {min(size, rows) for size in KV_BUCKETS if size <= COMMON_KV}
            shapes = [(1, size, length, 0) for size, length in product(sizes, short) if size <= length]
        return [
            StaticShape(
                0, batch, size, length, rows, num_candidates if size > 1 else 0, num_keys, filtered, self._tree_bits
            )
            for batch, size, length, num_keys in sorted(shapes, reverse=True)
            for filtered in ((True, False) if num_keys and self._in_parts else (num_keys > 0,))
        ]
