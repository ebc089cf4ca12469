"""The model as an engine calls it: an adapter, a forward strategy, a sampler and a KV cache."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from lpr.config import PAGE_SIZE, InputError
from lpr.core.heads import HeadDraft
from lpr.model.adapter import Adapter, ShareGemmRows
from lpr.model.cpu.memory import wait_for_pages
from lpr.model.eager_forward import EagerForward
from lpr.model.graph_capture import Capturer, CudaCapturer, uncapturable
from lpr.model.graph_inputs import PACKED_BUCKETS
from lpr.model.graphs import MOST_COMMON, GraphForward
from lpr.model.heads.guesses import FOLLOWED, Chain, Guesser
from lpr.model.heads.head import DraftHead
from lpr.model.input_builder import round_up
from lpr.model.kv_cache import KVCache
from lpr.model.loader import lack_of_memory
from lpr.model.lora.bank import Bank
from lpr.model.reserve import MemoryNeeds, Steps, free_bytes, memory_needs, sizes_of
from lpr.model.rewrite.sharded_layers import VocabularyHead
from lpr.model.sampling.choice import has_kernels
from lpr.model.sampling.sampler import Sampler
from lpr.model.sampling.selection import Selection
from lpr.model.self_draft import Ending, SelfDrafter
from lpr.model.step_inputs import Row, Rows
from lpr.model.torch_compile import CompiledForward


def _nothing() -> None: ...


def _hear(answers: list[Callable[[], None]]) -> None:
    """Call and remove the functions in `answers`."""
    while answers:
        answers.pop()()


@dataclass(frozen=True)
class SharedWeights:
    """The collective operations of a tensor-parallel replica; the defaults are for a single rank."""

    check_rows: Callable[[Sequence[Row]], Callable[[], None]] = lambda rows: _nothing
    """Called with the rows of every forward when they are known; the returned function compares them on the host."""
    share_gemm_rows: ShareGemmRows = lambda found: found
    """Returns the exact-mode numbers of GEMM rows that hold on all ranks."""
    worst: Callable[[int], int] = lambda found: found  # returns the maximum of the argument over all ranks
    decide: Callable[..., list[int]] = lambda decisions, *seen: decisions
    """Returns the first rank's decisions; what the ranks have `seen` must not differ."""
    tp_rank: int = 0
    tp_size: int = 1
    part: VocabularyHead | None = None  # this rank's part of the output head, for vocab-parallel sampling; None without


class TreeModel:
    """A causal LM that evaluates rows of pending tokens and tree nodes, with its KV cache."""

    def __init__(
        self,
        model: PreTrainedModel,
        attention: str = "auto",
        graphs: bool = True,
        exact: bool = False,
        shared: SharedWeights | None = None,
    ) -> None:
        """Make an Adapter of `model`; on a GPU, steps are captured as graphs, unless `graphs` is False.

        `allocate` makes the cache. Raises InputError for an unsupported choice.
        """
        self._shared = shared or SharedWeights()
        self.adapter = Adapter(model, attention, exact, self._shared.share_gemm_rows)
        self.model, self.device, self.config = model, self.adapter.device, self.adapter.config
        self.bank = Bank(model, self._shared.tp_rank, self._shared.tp_size)  # the loaded LoRA adapters
        self.vocab_size: int = self.config.vocab_size
        self.exact = exact  # True in exact mode: logits do not depend on a step's shape
        self.sampler = Sampler(self._shared.part)
        self.compiled: CompiledForward | None = None  # the compiled forward of captured steps, after `compile`
        self.guesser: Guesser | None = None  # runs the model's prediction head, after `use_head`
        self.self_drafter: SelfDrafter | None = None  # runs a low-bit copy of the model, after `use_copy`
        self.rests = False  # True while the head makes no guesses and processes the text late
        self.guess_ms = 0.0  # milliseconds spent in `guess` and `draft` since the caller reset this
        self.cache: KVCache | None = None
        self.forward: EagerForward | None = None  # the strategy that evaluates steps; chosen by `allocate`
        self.capturer: Capturer | None = None  # captures steps after the next `allocate`; None evaluates them directly
        self._uncapturable: str | None = None
        if graphs and self.device.type == "cuda":
            self._uncapturable = uncapturable(model, self.adapter.accepts_positions)
            self.capturer = CudaCapturer(self.device) if self._uncapturable is None else None
        self._answer: list[Callable[[], None]] = []
        self._stream: torch.cuda.Stream | None = None  # of the last call

    @property
    def attention(self) -> str:
        return self.adapter.attention

    @property
    def packed(self) -> bool:
        return self.adapter.packed

    @property
    def graphs(self) -> GraphForward | None:
        """The forward strategy, if it captures steps as graphs."""
        return self.forward if isinstance(self.forward, GraphForward) else None

    @property
    def graph_reason(self) -> str | None:
        """The reason why steps are not captured although the device supports it; None if they are."""
        return self._uncapturable if self.forward is None else self._uncapturable or self.forward.reason

    @property
    def num_captures(self) -> int:
        """Graphs captured for the present cache; a step that captures takes longer."""
        return self.forward.num_captures if self.forward is not None else 0

    def forget_adapters(self) -> None:
        """Drop the graphs of steps with adapters, whose weights have moved in memory."""
        if self.graphs is not None:
            self.graphs.forget(lambda shape: shape.with_adapters)

    def compile(self, backend: str = "inductor") -> None:
        """Let torch.compile fuse the elementwise operations of captured steps; other steps are not compiled."""
        self.compiled = CompiledForward(self.adapter, backend)

    def use_head(self, head: DraftHead, like: KVCache) -> None:
        """Attach a prediction head, and add its K/V layer to `like`; raises any error of a head that does not fit."""
        head.set_attention(self.adapter.attention_name)
        guesser = Guesser(self.adapter, head)
        guesser.check(like)
        self.adapter.keep_hidden()
        self.guesser = guesser

    def guess(self, chains: Sequence[Chain]) -> list[HeadDraft]:
        """Feed `chains` of the last step's rows to the head; returns its guesses after each, [] while it rests."""
        assert self.guesser is not None and self.forward is not None and self.cache is not None
        began, drafts = self.adapter.clock(), list[HeadDraft]()
        if self.rests:
            self.guesser.rest(chains, self.forward.hidden, self.cache)
        else:
            drafts = self.guesser.guess(chains, self.forward)
        self.guess_ms += (self.adapter.clock() - began) * 1e3
        return drafts

    def use_copy(self, make_copy: Callable[[], Callable[..., Any]], like: KVCache, max_batch_size: int) -> None:
        """Attach a low-bit copy for drafting, checked in `like`; raises any error of a copy that does not fit."""
        try:
            drafter = SelfDrafter(self.adapter, make_copy, self._shared.decide)
        except Exception:  # modules with unexpected inputs may raise any type
            self._shared.worst(1)  # so that no other rank waits for this one's passes
            raise
        if self._shared.worst(0):
            raise InputError("another rank of this replica could not make a copy")
        if self._shared.tp_size == 1:  # in one call a rank would decide by its own clock
            drafter.go_direct(like)
        if like.has_states:
            like.states.scratch = like.states.resized(like.num_slots)
        try:
            drafter.measure(like, max_batch_size, self._strategy)
        except Exception:
            like.states.scratch = None  # or later caches would have scratch states, too
            raise
        finally:
            if self.capturer is not None:
                self.capturer.release()
        self.self_drafter = drafter

    def draft(self, endings: Sequence[Ending]) -> None:
        assert self.self_drafter is not None and self.cache is not None
        began = self.adapter.clock()
        self.self_drafter.draft(endings, self.cache)
        self.guess_ms += (self.adapter.clock() - began) * 1e3

    def free_bytes(self, num_sharing: int) -> int | None:
        """Bytes for the cache on this rank's device, which `num_sharing` ranks share; None: unknown."""
        wait_for_pages()
        free = free_bytes(self.device)
        # The present cache will be freed for the new one.
        return None if free is None else free // num_sharing + (self.cache.num_bytes if self.cache is not None else 0)

    def memory_needs(self, batch: int, num_ahead: int, prompt: int, longest: int, num_axes: int) -> MemoryNeeds | None:
        """A GPU's memory besides the cache, for steps of `batch` trees and `prompt` tokens; None on a CPU.

        Sequences have up to `longest` tokens, and the mesh has `num_axes` axes with more than one rank.
        """
        if self.device.type != "cuda":
            return None
        steps = Steps(
            batch=batch,
            num_ahead=num_ahead,
            prompt=prompt,
            num_graphs=MOST_COMMON if self.capturer is not None else 0,
            mask_rows=0 if self.adapter.reads_bits else longest,
            by_kernel=has_kernels(self.device),
            packed=self.captures_packed,
            num_followed=self.guesser.num_guesses // FOLLOWED if self.guesser is not None else 0,
            num_passed=self.self_drafter.most_results(batch) if self.self_drafter is not None else 0,
        )
        return memory_needs(sizes_of(self.model), steps, num_axes)

    @property
    def captures_packed(self) -> bool:
        """True if packed steps are captured as graphs."""
        return self.capturer is not None and self.adapter.packed and self.adapter.packs_bits

    def prompt_chunk(self, most: int, num_nodes: int) -> int:
        """Prompt tokens, up to `most`, that fit into a captured step beside trees of `num_nodes` nodes."""
        room = PACKED_BUCKETS[-1] - min(num_nodes, PACKED_BUCKETS[-1] // 2)
        return min(most, room) if self.captures_packed else most

    def free_host_bytes(self, num_sharing: int) -> int | None:
        """Bytes of host memory that each of `num_sharing` ranks of a device may use; None: unknown."""
        free = free_bytes(torch.device("cpu"))
        if free is None or self.cache is None:
            return None
        if self.device.type == "cuda":
            return free // (num_sharing * torch.cuda.device_count())
        return max(0, free // num_sharing - self.cache.num_bytes)  # its memory may not be in use yet

    def allocate(
        self,
        num_slots: int,
        max_length: int,
        max_nodes: int,
        like: KVCache,
        num_pages: int | None = None,
        num_snapshots: int = 0,
    ) -> None:
        """Make the cache, for the layers of `like`: `max_length` committed tokens and a tree of `max_nodes` per slot.

        Without `num_pages` each slot has pages for all of them. Recurrent states have `num_snapshots` additional
        places. If the sizes are unchanged, the cache and its graphs are kept.
        """
        rows = round_up(max_length + max_nodes, self.adapter.kv_bucket)
        size = num_slots, rows, num_pages if num_pages is not None else num_slots * -(-rows // PAGE_SIZE)
        known = self.cache is not None and size == (
            self.cache.num_slots,
            self.cache.rows_per_slot,
            self.cache.num_pages,
        )
        known = known and self.cache is not None and self.cache.states.num_places == num_slots + num_snapshots
        if self.forward is None or not known or self.forward.capturer is not self.capturer:
            self.release()  # first: there may be no room for two caches
            try:
                self.cache = like.resized(num_slots, rows, num_pages, num_snapshots)
            except torch.cuda.OutOfMemoryError as failure:
                needs = f"{size[2] * PAGE_SIZE * like.bytes_per_token / 2**30:.1f} GiB of K/V"
                raise InputError(f"{lack_of_memory(needs, self.device)}, or give it less kv_memory") from failure
            self.forward = self._strategy(self.cache)
            if self.self_drafter is not None:
                self.self_drafter.attach(self.forward)
        if self.graphs is not None:
            self.graphs.limit(max_nodes)

    def _strategy(self, cache: KVCache) -> EagerForward:
        hear = partial(_hear, self._answer)  # not a method: in a cycle, a dropped engine would keep its K/V
        parts = self.adapter, self.sampler, cache, hear
        if self.capturer is None:
            return EagerForward(*parts)
        model = self.compiled or self.adapter
        return GraphForward(*parts, capturer=self.capturer, model=model, worst=self._shared.worst)

    def prepare(self, num_candidates: int, show: bool = True) -> None:
        """Capture common steps before the first request; with a progress bar on a terminal, if `show`."""
        if self.graphs is not None:
            self.graphs.prepare(num_candidates, show)
        if self.self_drafter is not None:
            self.self_drafter.prepare()

    def release(self) -> None:
        """Drop captured graphs and the cache: a graph that holds a collective must go before its communicator."""
        has_captures = self.num_captures > 0
        if self.forward is not None and self.forward.capturer is not None:
            self.forward.capturer.release()
        if self.self_drafter is not None:
            self.self_drafter.attach(None)
        self.forward = self.cache = None
        if has_captures:
            gc.unfreeze()  # frozen objects may hold them in a reference cycle
            gc.collect()

    def evaluate(self, rows: Sequence[Row], selection: Selection, num_candidates: int) -> torch.Tensor:
        """The results of the rows' last `num_results` entries, on the device, without a synchronisation.

        Returns what `Sampler.results` does, int32 [sum of num_results, words]; the next call overwrites it.
        """
        assert self.forward is not None
        self._answer[:] = [self._shared.check_rows(rows)]
        results = self.forward.evaluate(rows, selection, num_candidates)
        if self.guesser is not None or self.self_drafter is not None:  # the host reads results before the gather
            _hear(self._answer)
        return results

    def launch_next(self, rows: Rows, selection: Selection, results: torch.Tensor) -> torch.Tensor | None:
        """As GraphForward.launch_next."""
        return self.graphs.launch_next(rows, selection, results) if self.graphs is not None else None

    def follow_stream(self) -> None:
        """Wait for the device's work of the last call, if the caller has changed to another stream."""
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            if self._stream is not None and stream != self._stream:
                stream.wait_stream(self._stream)
            self._stream = stream

    def worst_of_replica(self, found: int) -> int:
        """The maximum of `found` over the tp ranks of this replica; a collective call."""
        return self._shared.worst(found)

    def fill(self, rows: Sequence[Row]) -> None:
        """Compute the K/V of prompt chunks, without sampling."""
        assert self.forward is not None
        self._answer[:] = [self._shared.check_rows(rows)]
        self.forward.fill(rows)
