"""Evaluating token trees with one forward of a transformers causal LM."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from lpr.model.attention import TREE_ATTENTION, TREE_MASK_ONLY, step_scope
from lpr.model.cache import TreeCache
from lpr.model.inputs import Row, StepInputs, build_inputs, round_up
from lpr.model.memory import cache_shortage, free_bytes
from lpr.sampling import Selection, candidates, choose


class TreeModel:
    """A causal LM whose forward takes rows of pending tokens and tree nodes, with its K/V cache."""

    def __init__(
        self,
        model: PreTrainedModel,
        node_bucket: int | None = None,
        kv_bucket: int | None = None,
        check_rows: Callable[[Sequence[Row]], None] | None = None,
    ) -> None:
        """Switch `model` (any transformers causal LM) to tree attention; the cache comes with `allocate`.

        `check_rows` is called with the rows of every forward, before it.

        The buckets pad the shapes of a step. On a GPU a few shapes repeat, as captured graphs and tuned kernels
        need; on a CPU every padded node costs its full arithmetic.
        """
        self.model = model.eval()
        self.device = next(model.parameters()).device
        on_cpu = self.device.type == "cpu"
        self.node_bucket = node_bucket or (1 if on_cpu else 16)
        self.kv_bucket = kv_bucket or (32 if on_cpu else 256)
        self.config = model.config.get_text_config(decoder=True)
        self.vocab_size: int = self.config.vocab_size
        self._accepts_positions = "position_ids" in inspect.signature(type(model).forward).parameters
        self.cache: TreeCache | None = None
        self._check_rows = check_rows
        use_tree_attention(model)

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

    def allocate(self, num_slots: int, max_length: int, max_nodes: int, like: TreeCache) -> None:
        """Make the cache: `max_length` committed tokens and a tree of `max_nodes` per slot, and one spare row."""
        rows = round_up(max_length + max_nodes + 1, self.kv_bucket)
        self.cache = TreeCache(num_slots, rows)
        self.cache.allocate(like)

    @torch.no_grad()
    def logits(self, inputs: StepInputs, cache: TreeCache) -> torch.Tensor:
        """One forward; the logits [B, num_logits, V] of the last `num_logits` entries of every row."""
        extra = {"position_ids": inputs.positions} if self._accepts_positions else {}
        with step_scope(inputs):
            output = self.model(
                input_ids=inputs.tokens,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=max(1, inputs.num_logits),
                **extra,
            )
        return output.logits

    def fill(self, row: Row) -> None:
        """Compute the K/V of a piece of a pending chain; nothing is chosen."""
        assert self.cache is not None
        self.logits(self._inputs([row]), self.cache)

    @torch.no_grad()
    def evaluate(self, rows: Sequence[Row], selection: Selection, num_candidates: int) -> torch.Tensor:
        """The results of the rows' last `num_results` entries, on the device, without a synchronisation.

        Returns int32 [sum of num_results, 1 + 2k]: next token, its k candidates, their k scores.
        """
        assert self.cache is not None
        inputs = self._inputs(rows)
        logits = self.logits(inputs, self.cache)
        wanted = [row.num_results for row in rows]
        if len(rows) == 1:
            flat = logits[0]
        else:
            flat = torch.cat([logits[i, inputs.num_logits - count :] for i, count in enumerate(wanted)])
        columns = [choose(flat, selection)[:, None]]
        if num_candidates:
            columns.extend(candidates(flat, num_candidates))
        return torch.cat(columns, 1).to(torch.int32)

    def _inputs(self, rows: Sequence[Row]) -> StepInputs:
        assert self.cache is not None
        if self._check_rows is not None:
            self._check_rows(rows)
        return build_inputs(rows, self.cache.rows_per_slot, self.device, self.node_bucket, self.kv_bucket)


def use_tree_attention(model: PreTrainedModel) -> None:
    """Make `model` ask our mask and attention functions, by the registry where its code dispatches through it."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(TREE_ATTENTION)
        return
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            config._attn_implementation_internal = TREE_MASK_ONLY
