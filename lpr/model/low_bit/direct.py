"""A copy's forward as one call in C++, where the code of transformers around its layers does no more than that.

A pass reads all weights, so that the interpreter's own memory is cold behind it: what takes 0.3 ms otherwise takes 1.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from lpr.model.attention.layer_rules import LayerRule
from lpr.model.fused.decoder_layer import DecoderLayer, Run, cache_places
from lpr.model.fused.modules import Norm
from lpr.model.kv_cache import KVCache
from lpr.model.low_bit.products import LowBitPack, Rounded
from lpr.model.low_bit.tiles import Int4Tiles, Int8Tiles
from lpr.model.step_inputs import Row
from lpr.model.threads import team_size


@dataclass(frozen=True)
class Direct:
    """Embeddings, decoder layers that one call computes, the last norm and the head."""

    run: Run
    embeddings: Tensor
    norm: Norm
    head: Int8Tiles | Int4Tiles
    bias: Tensor | None
    """Of the head."""
    rotary: nn.Module
    rule: LayerRule

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
        return cls(first.run, weight, last, pack.packed, pack.bias, rotary, found[0])

    def logits(self, rows: Sequence[Row], cache: KVCache) -> Tensor:
        """The logits [entries, V] after each entry of each row, whose keys and values are written to the cache."""
        ends = [*accumulate(row.num_entries for row in rows)]
        places = [(0, end - row.num_entries) for end, row in zip(ends, rows, strict=True)]
        pages = cache.read_pages(rows, places, team_size())
        entries = pages.lay_out(1, ends[-1], cache.num_rows - 1)
        positions = torch.from_numpy(entries[1])
        cosines, sines = (each.contiguous() for each in self.rotary(self.embeddings, position_ids=positions))
        logits = self.embeddings.new_empty(ends[-1], self.head.num_outputs)
        norm = self.norm.weight.data_ptr(), self.norm.epsilon, self.norm.weighing
        self.run.call.run_model(
            pages.reader, self.embeddings.data_ptr(), norm, self.head.address(self.bias),
            cosines.data_ptr(), sines.data_ptr(), entries[:, 0], cache_places(cache, self.run.layers),
            (self.rule.window or 0, self.rule.chunk or 0), logits.data_ptr(), team_size(),
        )  # fmt: skip
        return logits
