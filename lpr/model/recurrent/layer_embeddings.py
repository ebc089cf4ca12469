"""Qwen 4's embeddings of hashed n-grams, and a convolution with gaps over them, along the paths of a tree."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lpr.model.rewrite.base import Setting, WrappedForward
from lpr.model.step_inputs import current_step


class LayerEmbeddings(WrappedForward):
    name = "n-grams over trees"

    def find(self, module: Any, setting: Setting) -> Callable[..., Tensor] | None:
        if isinstance(module, nn.Conv1d):
            return _convolve if module.dilation[0] > 1 and module.groups == module.in_channels else None
        return _embed if hasattr(module, "ngram_embedding") and hasattr(module, "layer_multipliers") else None


def _convolve(layer: nn.Conv1d, stock: Callable[..., Tensor], padded: Tensor) -> Tensor:
    """The convolution of the step's entries, the last of `padded` [R, C, zeros + N]."""
    step = current_step()
    if step is None:
        return stock(padded)
    x, weight = padded[..., padded.shape[2] - step.tokens.shape[1] :], layer.weight.squeeze(1)
    return step.states.convolve(x, weight, layer.bias, lambda found: found, layer.dilation[0])


def _embed(layer: Any, stock: Callable[..., Tensor], input_ids: Tensor, cache: Any) -> Tensor:
    """As Qwen4ExpTextNGramEmbedding.forward. A state holds the last tokens plus 1: 0 stands before a text."""
    step = current_step()
    if step is None:
        return stock(input_ids, cache)
    states, size, end = step.states, layer.ngram_size, layer.eos_token_id
    states.begin_convolution(layer.layer_idx, 2)
    known = states.windows(input_ids.long()[:, None] + 1, size)[:, 0].flip(2)  # an entry's own token first
    tokens = torch.where(known == 0, end, known - 1)
    ended = torch.cat([torch.zeros_like(known[..., :1]), tokens[..., 1:] == end], 2).cumsum(2) > 0
    mixed, found = 0, []
    for place, token in enumerate(torch.where(ended, end, tokens).unbind(2)):
        mixed = token * layer.layer_multipliers[place] ^ mixed
        if place:
            heads = slice((place - 1) * layer.heads_per_ngram, place * layer.heads_per_ngram)
            sizes, first = layer.ngram_heads_vocab_sizes[heads], layer.ngram_heads_offsets[heads]
            found.append(torch.remainder(mixed[..., None], sizes) + first)
    weight = layer.ngram_embedding
    embedded: Tensor = weight(torch.cat(found, 2).to(weight.weight.device)).to(input_ids.device)
    return embedded.flatten(2)
