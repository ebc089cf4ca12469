"""Evaluating token trees with one forward of a transformers causal LM."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedModel

from lpr.config import InputError
from lpr.model.attention import TREE_ATTENTION, TREE_MASK_ONLY, current_step, step_scope
from lpr.model.cache import TreeCache
from lpr.model.compiled import CompiledForward
from lpr.model.exact import check
from lpr.model.families import adapt
from lpr.model.graphs import Capturer, CudaCapturer, GraphRunner, is_capturing, uncapturable
from lpr.model.inputs import Row, StepInputs, build_inputs, round_up
from lpr.model.kernels.hook import EXACT_KERNELS, KERNELS, load_kernel
from lpr.model.memory import cache_shortage, free_bytes
from lpr.model.parallel import VocabularyPart
from lpr.model.pinned import HEIGHT, pin_heights
from lpr.model.sampling.choice import candidates, choose, four_to_a_word, log_probabilities
from lpr.model.sampling.parts import choose_by_parts, limits_work, may_be_in_parts
from lpr.model.sampling.selection import Selection

ATTENTION = ("auto", "sdpa", *KERNELS)
"""What `attention` may be: PyTorch's attention with a dense mask, a GPU kernel that reads bits, or lpr's choice."""


class TreeModel:
    """A causal LM whose forward takes rows of pending tokens and tree nodes, with its K/V cache."""

    packed: bool
    """Are unequal rows laid out without padding? The self-check takes this back for a model that cannot."""

    def __init__(
        self,
        model: PreTrainedModel,
        node_bucket: int | None = None,
        kv_bucket: int | None = None,
        packed: bool | None = None,
        attention: str = "auto",
        graphs: bool = True,
        check_rows: Callable[[Sequence[Row]], Callable[[], None]] | None = None,
        exact: bool = False,
        share_heights: Callable[[check.Heights | str], check.Heights | str] | None = None,
        part: VocabularyPart | None = None,
    ) -> None:
        """Switch `model` (any transformers causal LM) to tree attention; the cache comes with `allocate`.

        `check_rows` is called with the rows of every forward as soon as they are known, and what it returns just before
        anything is launched.

        The buckets pad the shapes of a step. On a GPU a few shapes repeat, as captured graphs and tuned kernels
        need; on a CPU every padded node costs its full arithmetic. For the same reason rows are packed on a CPU only,
        unless `packed` says so: their blocks are one attention call each. On a GPU, steps are captured as graphs,
        unless `graphs` is False.

        `exact` makes logits the same bits for every shape of a step (lpr.model.exact), if `self_check` finds it can.
        Ranks that share weights agree on the rows that this takes by `share_heights`.

        With a `part` of the vocabulary, ranks choose each among their own logits wherever that can be.

        `attention` is one of ATTENTION. "auto" is "triton" on a GPU, which `self_check` then verifies with this model
        before it is kept, and "sdpa" elsewhere. Raises InputError for a choice that cannot work.
        """
        self.model = model.eval()
        self.device = next(model.parameters()).device
        on_cpu = self.device.type == "cpu"
        self.node_bucket = node_bucket or (1 if on_cpu else 16)
        self.kv_bucket = kv_bucket or (32 if on_cpu else 256)
        self.packed = on_cpu if packed is None else packed
        self.config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = self.config.vocab_size
        self._accepts_positions = "position_ids" in inspect.signature(type(model).forward).parameters
        self.compiled: CompiledForward | None = None
        """Captured steps through torch.compile, once `compile` is called."""
        self._layer_rules: dict[int | None, Any] = {}
        self.cache: TreeCache | None = None
        self._check_rows = check_rows
        self._answer: Callable[[], None] | None = None
        self.attention_is_open = attention == "auto"
        """May `self_check` fall back to "sdpa"?"""
        self.exact = exact
        self._share_heights = share_heights
        self.part = part
        self._limits_in_parts = False
        if part is not None:
            part.install(lambda: (step := current_step()) is not None and step.in_parts)
        self.heights: check.Heights | None = None
        """Rows of the products of a step in exact mode; `why_not_exact` finds how many agree."""
        self.set_attention(self._choose_attention() if attention == "auto" else attention)
        self.graphs: GraphRunner | None = None
        self.capturer: Capturer | None = None
        """What captures steps from the next `allocate` on."""
        self._uncapturable: str | None = None
        if graphs and self.device.type == "cuda":
            self._uncapturable = uncapturable(model, self._accepts_positions)
            self.capturer = CudaCapturer(self.device) if self._uncapturable is None else None

    def why_not_exact(self) -> str | None:
        """Why logits depend on the shape of a step, as far as that is known without a forward; None if not."""
        if self.device.type != "cpu" and self.attention not in KERNELS:
            return f"on a GPU attention={self.attention!r} adds in the order of cache rows; use 'triton'"
        reason = check.refusal(self.model, not self.model._can_set_attn_implementation())
        if reason is not None:
            return reason
        pin_heights(self.model)
        if self.device.type != "cpu":
            self.heights = check.Heights(HEIGHT, HEIGHT, 1, None, HEIGHT, HEIGHT)
            self.node_bucket = HEIGHT
            return None
        found = check.find_heights(self.model)
        if self._share_heights is not None:
            found = self._share_heights(found)
        if isinstance(found, str):
            return f"on this machine the matrix product {found} rounds otherwise for other numbers of rows"
        self.heights = found
        return None

    def _choose_attention(self) -> str:
        reachable = self.model._can_set_attn_implementation()
        return "triton" if self.device.type == "cuda" and reachable and find_spec("triton") else "sdpa"

    def set_attention(self, choice: str) -> None:
        """Switch the model to one of ATTENTION except "auto"; raises InputError where it cannot work."""
        if choice not in ATTENTION[1:]:
            raise InputError(f"attention={choice!r} is none of {', '.join(ATTENTION)}")
        if choice in KERNELS and not self.model._can_set_attn_implementation():
            raise InputError(
                f"model type {self.config.model_type!r} has its own attention code, which attention={choice!r} does "
                "not reach; use attention='sdpa'"
            )
        if choice == "triton" and not find_spec("triton"):
            raise InputError(
                "attention='triton' needs the package triton (pip install triton); or use attention='sdpa'"
            )
        name = (EXACT_KERNELS if self.exact else KERNELS).get(choice, TREE_ATTENTION)
        load_kernel(name)
        self.attention = choice
        use_tree_attention(self.model, name)
        adapt(self.model)

    def shortage(
        self, num_slots: int, max_length: int, max_nodes: int, like: TreeCache, num_sharing: int
    ) -> str | None:
        """Why `allocate` with these sizes would run out of memory, which `num_sharing` ranks share; None if not."""
        free = free_bytes(self.device)
        if free is None:
            return None
        available = free // num_sharing
        if self.cache is not None:  # it makes room for the new one
            available += self.cache.bytes_per_row * self.cache.num_slots * self.cache.rows_per_slot
        return cache_shortage(available, like.bytes_per_row, num_slots, max_length, max_nodes + self.kv_bucket)

    @property
    def graph_reason(self) -> str | None:
        """Why steps that could be graphs on this device are evaluated directly; None if they are graphs."""
        return self._uncapturable if self.graphs is None else self.graphs.reason

    def allocate(self, num_slots: int, max_length: int, max_nodes: int, like: TreeCache) -> None:
        """Make the cache: `max_length` committed tokens and a tree of `max_nodes` per slot, and one spare row.

        A cache of that size is kept, with its graphs: these hold its addresses.
        """
        rows = round_up(max_length + max_nodes + 1, self.kv_bucket)
        known = self.cache is not None and (self.cache.num_slots, self.cache.rows_per_slot) == (num_slots, rows)
        if not known or (self.graphs.capturer if self.graphs is not None else None) is not self.capturer:
            self.graphs = self.cache = None  # first, as there may be no room for two
            self.cache = cache = TreeCache(num_slots, rows)
            cache.allocate(like)
            if self.capturer is not None:
                logits = partial(self.logits, cache=cache)
                bits, height = self.attention in KERNELS, self.heights.multiple if self.heights is not None else 1
                self.graphs = GraphRunner(
                    self._compute,
                    logits,
                    self.capturer,
                    self.device,
                    num_slots,
                    rows,
                    bits,
                    height=height,
                    meet=self._meet,
                    in_parts=self.part is not None,
                )
        if self.graphs is not None:
            self.graphs.limit(max_nodes)

    def release(self) -> None:
        """Drop captured graphs and the cache: a graph that holds a collective must go before its communicator."""
        had_graphs = self.graphs is not None
        self.graphs = self.cache = None
        if had_graphs:
            gc.unfreeze()  # what a command froze may hold them in a cycle
            gc.collect()

    @property
    def num_captures(self) -> int:
        """Graphs captured for the present cache; a step that captures takes longer."""
        return self.graphs.num_captures if self.graphs is not None else 0

    def compile(self, backend: str = "inductor") -> None:
        """Let torch.compile fuse what captured steps do between the matrix products; others are not compiled."""
        self.compiled = CompiledForward(self.model, backend)

    @torch.no_grad()
    def logits(self, inputs: StepInputs, cache: TreeCache) -> torch.Tensor:
        """One forward; the logits [sum of num_results, V] of the rows' last `num_results` entries, row after row."""
        # Another engine may have compiled the same model.
        is_compiled = getattr(self.model, "_compiled_call_impl", None) is not None
        with CompiledForward.off() if is_compiled else nullcontext():
            return self._call(inputs, cache)

    @torch.no_grad()
    def compiled_logits(self, inputs: StepInputs, cache: TreeCache) -> torch.Tensor:
        """As `logits`, by the compiled forward if there is one; where that fails, directly from now on."""
        if self.compiled is None:
            return self.logits(inputs, cache)
        try:
            return self._call(inputs, cache)
        except Exception as failure:  # of the compiler, of Triton, of a driver: of any type
            if is_capturing(self.device) or not self.compiled.give_up(failure):
                raise
        return self._call(inputs, cache)

    def _call(self, inputs: StepInputs, cache: TreeCache) -> torch.Tensor:
        self._meet()
        extra = {"position_ids": inputs.positions} if self._accepts_positions else {}
        inputs.layer_rules, inputs.heights = self._layer_rules, self.heights
        with step_scope(inputs):
            output = self.model(
                input_ids=inputs.tokens,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=inputs.logits_to_keep,
                **extra,
            )
        return inputs.results(output.logits)

    def fill(self, rows: Sequence[Row]) -> None:
        """Compute the K/V of pieces of pending chains; nothing is chosen."""
        assert self.cache is not None
        self._ask(rows)
        self.logits(self._inputs(rows), self.cache)

    def _ask(self, rows: Sequence[Row]) -> None:
        self._answer = self._check_rows(rows) if self._check_rows is not None else None

    def _meet(self) -> None:
        """Wait, once, for what `check_rows` has begun with."""
        answer, self._answer = self._answer, None
        if answer is not None:
            answer()

    @torch.no_grad()
    def evaluate(self, rows: Sequence[Row], selection: Selection, num_candidates: int) -> torch.Tensor:
        """The results of the rows' last `num_results` entries, on the device, without a synchronisation.

        Returns int32 [sum of num_results, result_words(k)]: the next token, its k candidates and their k scores, of
        which four share a word; behind them what `log_probabilities` returns, if the selection asks for it. They are
        overwritten by the next call.
        """
        self._ask(rows)
        assert self.cache is not None
        logits = None
        if self.graphs is not None and not selection.processor_paths and selection.num_logprobs is None:
            replayed = self.graphs.evaluate(rows, selection, num_candidates)
            if replayed is not None:
                return replayed
        elif self.graphs is not None:  # logits processors are code, which no graph holds; log-probabilities are rare
            logits = self.graphs.logits(rows)
        selection = selection.to(self.device)
        if logits is None:
            inputs = self._inputs(rows)
            inputs.in_parts = self._in_parts(selection)
            logits = self.logits(inputs, self.cache)
            if inputs.in_parts:
                return self._results_of_parts(logits, selection, num_candidates)
        return self._results(logits, selection, num_candidates)

    def check_part(self) -> None:
        """Choose among gathered logits after all, on all ranks, where the head's part is not a part of the logits."""
        if self.part is None:
            return
        found = []
        for in_parts in (False, True):
            cache = TreeCache(1, 256)
            inputs = self.inputs([Row(0, 0, [1, 2, 3], [-1, 0, 1], [0, 1, 2], 3)], 256)
            inputs.in_parts = in_parts
            found.append(self.logits(inputs, cache).float())
        whole, mine = found
        there = whole[:, self.part.first : self.part.first + mine.shape[1]]
        same = mine.shape == there.shape and torch.allclose(mine, there, atol=1e-3 * float(whole.max() - whole.min()))
        words = torch.tensor([[int(same), int(limits_work(self.device))]], dtype=torch.int32, device=self.device)
        same, self._limits_in_parts = self.part.gather(words).all(0)[0].tolist()
        if not same:
            self.part = None

    def _in_parts(self, selection: Selection) -> bool:
        return self.part is not None and may_be_in_parts(selection, self._limits_in_parts)

    def _compute(self, inputs: StepInputs, selection: Selection, num_candidates: int) -> torch.Tensor:
        """All of a step that a graph holds."""
        assert self.cache is not None
        inputs.in_parts = self._in_parts(selection)
        logits = self.compiled_logits(inputs, self.cache)
        results = self._results_of_parts if inputs.in_parts else self._results
        return results(logits, selection, num_candidates, fixed_shapes=True)

    def _results_of_parts(
        self, logits: torch.Tensor, selection: Selection, num_candidates: int, fixed_shapes: bool = False
    ) -> torch.Tensor:
        """As `_results`, of this rank's part of the logits."""
        assert self.part is not None
        chosen, tokens, scores = choose_by_parts(
            logits, selection, self.part.first, self.part.gather, num_candidates, fixed_shapes
        )
        columns = [chosen[:, None], tokens, four_to_a_word(scores)] if num_candidates else [chosen[:, None]]
        return torch.cat(columns, 1).to(torch.int32)

    def _results(
        self, logits: torch.Tensor, selection: Selection, num_candidates: int, fixed_shapes: bool = False
    ) -> torch.Tensor:
        columns = [choose(logits, selection, fixed_shapes)[:, None]]
        if not num_candidates and selection.num_logprobs is None:
            return columns[0].to(torch.int32)
        if num_candidates:
            tokens, scores = candidates(logits, num_candidates)
            columns += [tokens, four_to_a_word(scores)]
        if selection.num_logprobs is not None:
            columns.append(log_probabilities(logits, columns[0][:, 0], selection.num_logprobs))
        return torch.cat(columns, 1).to(torch.int32)

    def _inputs(self, rows: Sequence[Row]) -> StepInputs:
        assert self.cache is not None
        return self.inputs(rows, self.cache.rows_per_slot, self.node_bucket, self.kv_bucket, self.packed)

    def inputs(
        self,
        rows: Sequence[Row],
        rows_per_slot: int,
        node_bucket: int = 1,
        kv_bucket: int = 1,
        packed: bool = False,
    ) -> StepInputs:
        """The tensors of one forward over `rows`, with the kind of mask that the chosen attention reads."""
        bits = self.attention in KERNELS
        if self.heights is not None and self.heights.num_threads not in (None, torch.get_num_threads()):
            raise RuntimeError(
                f"exact mode was checked with {self.heights.num_threads} threads and torch has "
                f"{torch.get_num_threads()} now: set them before the model is loaded"
            )
        return build_inputs(
            rows, rows_per_slot, self.device, node_bucket, kv_bucket, packed and not bits, bits, self.heights
        )


def use_tree_attention(model: PreTrainedModel, name: str = TREE_ATTENTION) -> None:
    """Make `model` ask our mask and attention functions, by the registry where its code dispatches through it."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)
        return
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            config._attn_implementation_internal = TREE_MASK_ONLY
