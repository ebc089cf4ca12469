"""A copy's forward as one call in C++, where the code of transformers around its layers does no more than that.

A pass reads all weights, so that the interpreter's own memory is cold behind it: what takes 0.3 ms otherwise takes 1.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lpr.core.noise_keys import Choice
from lpr.model.attention.layer_rules import LayerRule
from lpr.model.cpu.tiles import PANEL
from lpr.model.fused.decoder_layer import DecoderLayer, Run, cache_places
from lpr.model.fused.modules import Norm
from lpr.model.kv_cache import KVCache
from lpr.model.low_bit.products import LowBitPack, Rounded
from lpr.model.low_bit.tiles import Int4Tiles, Int8Tiles
from lpr.model.step_inputs import Row
from lpr.model.threads import team_size

LEAST_PANELS = 512
"""Panels of the output head of which a pass reads all: where there are more, the head is a good part of a pass."""
LONGEST = 16  # most tokens of a draft
REMEMBERED = 8192  # tokens of the other half during which the panel of one of them is read


PassRules = tuple[list[float], list[float], list[float], list[float], float, int]
"""Thresholds for a further pass (lpr.core.passes.Passes.rules), and the number of likely tokens to return."""
MadePass = tuple[list[int], list[float], list[list[int]], list[list[float]], float]
"""The evaluated text and its shares; per entry the likely tokens, the chosen one first, and their odds;
milliseconds."""


class LikelyTokens:
    """The panels of the output head that a pass reads: one half, and those of tokens that have come of late.

    Byte pair encoding numbers its tokens in the order of its merges, so the first half has nearly all of a text. The
    copy drafts no token of another panel until one of that panel has come.
    """

    def __init__(self, num_tokens: int) -> None:
        num_panels = -(-num_tokens // PANEL)
        self.all: np.ndarray = np.arange(num_panels, dtype=np.int32)
        self.panels: np.ndarray = self.all  # int32, ascending
        self._num_always = num_panels // 2 if num_panels > LEAST_PANELS else num_panels
        self._latest = np.full(num_panels, -REMEMBERED)
        self._num_seen = 0
        self._choose()

    def learn(self, tokens: Sequence[int]) -> None:
        """Read the panels of `tokens` from now on."""
        rare = [token // PANEL for token in tokens if token // PANEL >= self._num_always]
        if not rare:
            return
        is_new = (self._latest[rare] <= self._num_seen - REMEMBERED).any()
        self._num_seen += len(rare)
        self._latest[rare] = self._num_seen
        if is_new:
            self._choose()

    def _choose(self) -> None:
        is_likely = self._latest > self._num_seen - REMEMBERED
        is_likely[: self._num_always] = True
        self.panels = self.all[is_likely]


@dataclass(frozen=True)
class Direct:
    """Embeddings, decoder layers that one call computes, the last norm and the head."""

    model: nn.Module  # keeps the weights of all layers alive; `run` has only their addresses
    run: Run
    embeddings: Tensor
    norm: Norm
    head: Int8Tiles | Int4Tiles
    bias: Tensor | None  # of the head
    rotary: nn.Module
    rule: LayerRule
    likely: LikelyTokens

    @classmethod
    def of(cls, model: Any, rules: dict[int | None, Any]) -> Direct | None:
        """That of `model`, whose layers have one of `rules` each (StepInputs.layer_rules); None if it has other parts.

        Parts alone do not tell that nothing lies between them: the logits must be compared with the model's.
        """
        decoder = model.get_decoder()
        names = "layers", "norm", "embed_tokens", "rotary_emb"
        stack, norm, embedding, rotary = [getattr(decoder, name, None) for name in names]
        pack = getattr(model.get_output_embeddings(), "pack", None)
        if not isinstance(stack, nn.ModuleList) or type(embedding) is not nn.Embedding or rotary is None:
            return None
        first, last = vars(stack[0]).get("forward"), vars(norm).get("forward") if norm is not None else None
        if not isinstance(first, DecoderLayer) or not isinstance(last, Norm) or not isinstance(pack, LowBitPack):
            return None
        weight, found = embedding.weight.data, [*rules.values()]
        is_alike = {weight.dtype, last.weight.dtype, pack.dtype} == {first.qkv.dtype} and weight.is_contiguous()
        if first.run is None or len(first.run.layers) < len(stack) or len(pack.sizes) > 1 or not is_alike:
            return None
        if len(found) != 1 or not isinstance(found[0], LayerRule) or isinstance(pack.packed, Rounded):
            return None
        tokens = LikelyTokens(pack.packed.num_outputs)
        return cls(model, first.run, weight, last, pack.packed, pack.bias, rotary, found[0], tokens)

    def logits(self, rows: Sequence[Row], cache: KVCache, of_all: bool = True) -> Tensor:
        """The logits [entries, V] after each entry of each row, whose keys and values are written to the cache.

        Unless `of_all`, those of tokens that are not likely are -inf.
        """
        panels = self.likely.all if of_all else self.likely.panels
        ends = [*accumulate(row.num_entries for row in rows)]
        places = [(0, end - row.num_entries) for end, row in zip(ends, rows, strict=True)]
        pages = cache.read_pages(rows, places, team_size())
        entries = pages.lay_out(1, ends[-1], cache.num_rows - 1)
        shape = ends[-1], self.head.num_outputs
        is_whole = len(panels) == len(self.likely.all)
        logits = self.embeddings.new_empty(shape) if is_whole else self.embeddings.new_full(shape, -torch.inf)
        tables = self._cosines_and_sines(torch.from_numpy(entries[1]))
        self.run.call.run_model(
            pages.reader, self._ends(), *(each.data_ptr() for each in tables), entries[:, 0], *self._cache(cache),
            logits.data_ptr(), panels, team_size(),
        )  # fmt: skip
        return logits

    def make_passes(
        self, cache: KVCache, place: tuple[int, int, int, int], text: tuple[Any, ...], choice: Choice, rules: PassRules
    ) -> list[MadePass]:
        """Run passes for one sequence in one call, one after the other while they pay (native/draft_passes.h).

        `place` is the slot, the number of cached tokens, the largest number of drafted tokens, and the last token.
        `text` is the sequence's state, the tokens that the state lacks, the ids that end a draft, and the text that the
        first pass evaluates with its shares.
        """
        slot, num_cached, *rest = place
        count = LONGEST + len(rules[1])
        tables = self._cosines_and_sines(torch.arange(num_cached, num_cached + count)[None])
        return self.run.call.make_passes(
            self._ends(), cache.tables, (slot, cache.page_size, num_cached, *rest), text, choice, rules,
            *(each.data_ptr() for each in tables), *self._cache(cache), self.likely.panels, team_size(),
        )  # fmt: skip

    def _cosines_and_sines(self, positions: Tensor) -> list[Tensor]:
        return [each.contiguous() for each in self.rotary(self.embeddings, position_ids=positions)]

    def _ends(self) -> tuple[Any, ...]:
        norm = self.norm.weight.data_ptr(), self.norm.epsilon, self.norm.weighing
        return self.embeddings.data_ptr(), norm, self.head.address(self.bias)

    def _cache(self, cache: KVCache) -> tuple[Any, ...]:
        return cache_places(cache, self.run.layers), (self.rule.window or 0, self.rule.chunk or 0)
