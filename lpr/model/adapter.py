"""A transformers model that evaluates token trees: its attention, its family's shims, exact mode and its inputs."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from lpr.model.attention.backends import Reads, attention_configs, choose
from lpr.model.exact import check
from lpr.model.exact.functions import FixedFunctions
from lpr.model.families import is_recurrent
from lpr.model.graph_inputs import packed_inputs
from lpr.model.input_builder import build_inputs, build_page_inputs
from lpr.model.kv_cache import KVCache
from lpr.model.multimodal import takes_positions
from lpr.model.rewrite.base import Setting, Stage
from lpr.model.rewrite.sharded_layers import VocabularyHead
from lpr.model.rewrite.table import rewrite
from lpr.model.step_inputs import Row, StepInputs, current_step, in_step
from lpr.model.transformers_versions import passed

_locks: WeakKeyDictionary[PreTrainedModel, threading.RLock] = WeakKeyDictionary()
"""Per model, a lock: each engine that shares the model calls it with its own attention implementation."""
ShareGemmRows = Callable[[check.GemmRows | str], check.GemmRows | str]


class Adapter:
    """Owns a transformers model and calls it with rows of pending tokens and tree nodes."""

    def __init__(
        self,
        model: PreTrainedModel,
        attention: str = "auto",
        exact: bool = False,
        share_gemm_rows: ShareGemmRows = lambda found: found,
    ) -> None:
        """Change `model` (any transformers causal LM) to tree attention; raises InputError if that cannot work.

        `attention` is one of ATTENTION. "auto" is "triton" on a GPU and "native" on a CPU, if `self_check` finds that
        it works with this model, and "sdpa" otherwise. `exact` makes logits bitwise independent of a step's shape
        (lpr.model.exact); tensor-parallel ranks agree on the numbers of rows of matrix products by `share_gemm_rows`.
        """
        self.model = model.eval()
        self.lock = _locks.setdefault(model, threading.RLock())
        """Held during a forward; engines of one model take turns."""
        self.trains = False  # True if some module of the model is in training mode; set by the engine
        self.device = next(model.parameters()).device
        self.clock: Callable[[], float] = time.perf_counter  # seconds, for the times of steps and passes
        self.config = model.config.get_text_config(decoder=True)
        on_cpu = self.device.type == "cpu"
        self.node_bucket, self.kv_bucket = (1, 32) if on_cpu else (16, 256)
        """T and KV of a step are padded to multiples of these. Coarse on a GPU, where tuned kernels need few shapes;
        fine on a CPU, where padding costs full arithmetic."""
        self.packed = False
        """True if sequences of unequal length are packed without padding; `self_check` clears it for a model that
        fails so."""
        self.reads_tables = True
        """True if attention that reads bits also reads block tables; `self_check` may clear it like `packed`."""
        self.accepts_positions = takes_positions(model)
        self.exact = exact
        self.gemm_rows: check.GemmRows | None = None
        """In exact mode, the numbers of rows M at which a GEMM gives a row the same bits; set by `why_not_exact`."""
        self._functions: FixedFunctions | None = None
        self._share_gemm_rows = share_gemm_rows
        self.layer_rules: dict[int | None, Any] = {}  # as StepInputs.layer_rules, shared by all steps
        self.may_fall_back = attention == "auto"  # True if `self_check` may choose "sdpa" instead
        self.set_attention(attention)

    @property
    def attention(self) -> str:
        return self.backend.choice

    @property
    def attention_name(self) -> str:
        """The implementation's name in the registries of transformers."""
        return self.backend.name(self.exact)

    @property
    def reads_bits(self) -> bool:
        """True if attention on a GPU reads the tree as bits, in place of a dense mask."""
        return self.backend.reads is Reads.BITS

    @property
    def packs_bits(self) -> bool:
        """True if attention that reads bits takes packed sequences; not with recurrent layers or in exact mode."""
        return self.reads_bits and not self.exact and not is_recurrent(self.model)

    @property
    def reads_pages(self) -> bool:
        """True if attention on a CPU reads trees and block tables directly."""
        return self.backend.reads is Reads.PAGES

    def set_attention(self, choice: str) -> None:
        """Switch the model to one of ATTENTION; raises InputError where it cannot work."""
        self.backend = choose(self.model, choice)
        self.packed = self.device.type == "cpu" or self.packs_bits
        with self.lock:
            self.backend.set(self.model, self.exact)
            rewrite(self.model, Setting(self.device), Stage.TREE)
            self._configs = attention_configs(self.model)
            self._names = names_of(self._configs)

    def why_not_exact(self) -> str | None:
        """Prepare exact mode; returns the reason if it is impossible, as far as known without a forward, else None."""
        if self.device.type != "cpu" and not self.reads_bits:
            return f"on a GPU attention={self.attention!r} adds in the order of cache rows; use 'triton'"
        reason = check.refusal(self.model, not self.model._can_set_attn_implementation())
        if reason is not None:
            return reason
        rewrite(self.model, Setting(self.device, exact=True), Stage.EXACT)
        if self.device.type != "cpu":
            self.gemm_rows = check.GemmRows(check.GPU_ROWS, check.GPU_ROWS, None, check.GPU_ROWS, check.GPU_ROWS)
            self.node_bucket = check.GPU_ROWS
            return None
        found = self._share_gemm_rows(check.find_gemm_rows(self.model))
        if isinstance(found, str):
            return f"on this machine the matrix product {found} rounds otherwise for other numbers of rows"
        self.gemm_rows, self._functions = found, FixedFunctions(check.tried_sizes(self.model))
        return None

    def step_inputs(self, rows: Sequence[Row], cache: KVCache) -> StepInputs:
        """The tensors of a step's forward over `rows`, padded to this device's buckets."""
        return self.inputs(rows, cache, self.node_bucket, self.kv_bucket, self.packed)

    def inputs(
        self, rows: Sequence[Row], cache: KVCache, node_bucket: int = 1, kv_bucket: int = 1, packed: bool = False
    ) -> StepInputs:
        """As `build_inputs`, with the kind of mask that the chosen attention reads."""
        if self.gemm_rows is not None and self.gemm_rows.num_threads not in (None, torch.get_num_threads()):
            raise RuntimeError(
                f"exact mode was checked with {self.gemm_rows.num_threads} threads and torch has "
                f"{torch.get_num_threads()} now: set them before the model is loaded"
            )
        if self.reads_pages:
            return build_page_inputs(rows, cache, node_bucket, packed, self.gemm_rows)
        bits, tables = self.reads_bits, self.reads_tables
        if packed and self.packs_bits and len(rows) > 1:
            return packed_inputs(rows, cache, self.device, node_bucket, kv_bucket)
        return build_inputs(
            rows, cache, self.device, node_bucket, kv_bucket, packed and not bits, bits, self.gemm_rows, tables
        )

    def bind(self, inputs: StepInputs, cache: KVCache) -> None:
        """Set the fields of `inputs` that attention reads, before a forward."""
        inputs.layer_rules, inputs.gemm_rows = self.layer_rules, self.gemm_rows
        inputs.cache, inputs.states = cache, cache.states
        if cache.adapters is not None and inputs.rows:
            inputs.adapters = cache.adapters.of_step(inputs)

    def keep_hidden(self) -> None:
        """Keep the hidden states of every later step (StepInputs.hidden)."""
        self.model.get_decoder().register_forward_hook(_keep_hidden)

    @torch.no_grad()
    def forward(
        self, inputs: StepInputs, cache: KVCache, compiled: bool = False, model: Callable[..., Any] | None = None
    ) -> torch.Tensor:
        """One forward; the logits [sum of num_results, V] of the rows' last `num_results` entries, row after row.

        During the call the model has this adapter's attention and is in evaluation mode. With `compiled` the result of
        torch.compile is called, else the uncompiled model. `model` is a copy to call instead of the model.
        """
        self.bind(inputs, cache)
        if model is not None:
            inputs.adapters = None  # a copy drafts without adapters
            inputs.states = cache.states.scratch or cache.states
        given: dict[str, Any] = {"input_ids": inputs.tokens, "use_cache": True, "logits_to_keep": inputs.logits_to_keep}
        given |= passed(cache, self.model)
        if self.accepts_positions:
            given["position_ids"] = inputs.positions
        is_compiled = getattr(self.model, "_compiled_call_impl", None) is not None
        direct = torch.compiler.set_stance("force_eager") if is_compiled and not compiled else nullcontext()
        with self.lock, direct, self._functions or nullcontext():
            changed = self.trains or self.model.training or names_of(self._configs) != self._names
            with self._restored() if changed else nullcontext():
                output = in_step(inputs, model or self.model, **given)
        logits, head = inputs.results(output.logits), self.model.get_output_embeddings()
        return logits if inputs.in_parts or not isinstance(head, VocabularyHead) else head.whole(logits)

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Context: the model has this adapter's attention and is in evaluation mode."""
        names = names_of(self._configs)
        set_names(self._configs, self._names)
        try:
            with evaluating(self.model) if self.trains or self.model.training else nullcontext():
                yield
        finally:
            set_names(self._configs, names)

    def choose_clock(self, waits: bool) -> None:
        """Time steps by the processor time of the calling thread, unless it `waits` for a GPU or another rank.

        Other programs that take the processor for a while then lengthen no step and no pass of a copy.
        """
        self.clock = time.perf_counter if waits or self.device.type != "cpu" else time.thread_time

    def logits(
        self, rows: Sequence[Row], cache: KVCache, node_bucket: int = 1, kv_bucket: int = 1, packed: bool = False
    ) -> torch.Tensor:
        return self.forward(self.inputs(rows, cache, node_bucket, kv_bucket, packed), cache)


def names_of(configs: Sequence[Any]) -> list[Any]:
    return [config._attn_implementation_internal for config in configs]


def set_names(configs: Sequence[Any], names: Sequence[Any]) -> None:
    for config, name in zip(configs, names, strict=True):
        config._attn_implementation_internal = name


@contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Context: restores the present attention of `model` at the end."""
    configs = attention_configs(model)
    names = names_of(configs)
    try:
        yield
    finally:
        set_names(configs, names)


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Context: evaluation mode without dropout; restores each module's mode at the end."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _keep_hidden(module: torch.nn.Module, args: Any, output: Any) -> None:
    if (step := current_step()) is not None:  # in tests, ranks are threads that share a model
        step.hidden = output.last_hidden_state
