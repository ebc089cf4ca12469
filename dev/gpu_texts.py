"""Texts that a head learns from, written on a GPU: transformers' own decoding, some 1500 prompts at a time.

So many rows hide that the host launches each kernel; an engine keeps a request's pages, stream and statistics besides,
and its host decides from some sixty requests on (docs/results.md, one GPU).
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel, StoppingCriteria
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from dev.head_texts import KINDS, Text

ENTRIES = 3 << 19
"""Tokens, prompts and padding included, of texts that are written at a time: SmolLM2-135M has 36 GB of K/V for them."""
ENDED = 0.85
"""Part of the texts of a group that have ended when it ends: the last ones would have the GPU for themselves."""
LOOK_EVERY = 16
"""Tokens between two looks at how many have ended, for which the host waits."""


def grouped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **more: Any
) -> tuple[Tensor, None]:
    """As transformers' `sdpa`, but one new token per row reads K/V of the heads that share it once, not copied."""
    if query.shape[2] > 1:
        found, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **more)
        return found, None
    batch, num_heads, _, size = query.shape
    groups = query.view(batch, key.shape[1], num_heads // key.shape[1], size)
    scores = (groups * scaling) @ key.transpose(2, 3)
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, float("-inf"))
    return (scores.softmax(-1) @ value).reshape(batch, 1, num_heads, size), None


AttentionInterface.register("grouped", grouped_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register("grouped", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


class MostEnded(StoppingCriteria):
    """Ends a group when ENDED of its texts have an end token."""

    def __init__(self, num_prompt: int, end: int) -> None:
        """Prompts are padded to `num_prompt` tokens; `end` is the end token."""
        self._num_prompt, self._end = num_prompt, end

    def __call__(self, input_ids: Tensor, scores: Tensor, **more: Any) -> Tensor:
        """As transformers asks after each token."""
        written = input_ids[:, self._num_prompt :]
        ends = written.shape[1] % LOOK_EVERY == 0 and bool((written == self._end).any(1).float().mean() > ENDED)
        return torch.full((len(input_ids),), ends, device=input_ids.device)


def writing_model(folder: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The model of `folder`, ready for `write`."""
    how = {"dtype": dtype, "attn_implementation": "grouped"}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, **how).eval().to(device)
    return model


@torch.no_grad()
def write(
    model: PreTrainedModel, prompts: Sequence[list[int]], temperature: float, seed: int, new_tokens: int, end: int
) -> list[list[int]]:
    """What `model` writes after each of `prompts`, all together, up to the end token."""
    torch.manual_seed(seed)
    how: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    padded = {
        "input_ids": pad_sequence([torch.tensor(ids) for ids in prompts], True, end, "left"),
        "attention_mask": pad_sequence([torch.ones(len(ids)).long() for ids in prompts], True, 0, "left"),
    }
    longest = padded["input_ids"].shape[1]
    model_any: Any = model
    outputs = model_any.generate(
        **{name: each.to(model.device) for name, each in padded.items()}, **how, max_new_tokens=new_tokens,
        pad_token_id=end, eos_token_id=end, stopping_criteria=[MostEnded(longest, end)],
    )  # fmt: skip
    written = outputs[:, longest:].tolist()
    return [ids[: ids.index(end) + 1] if end in ids else ids for ids in written]


def pieces_of(prompts: Sequence[list[int]], new_tokens: int) -> list[list[list[int]]]:
    """`prompts` cut into groups alike in length, each of at most ENTRIES tokens when all of it is written."""
    rest, found = sorted(prompts, key=len), []
    while rest:
        number = max(1, ENTRIES // (len(rest[-1]) + new_tokens))
        found.append(rest[-number:])
        rest = rest[:-number]
    return found


def write_texts(
    model: PreTrainedModel, prompts: Sequence[list[int]], new_tokens: int, end: int, minutes: float = float("inf")
) -> list[Text]:
    """Texts after `prompts` at every temperature of KINDS, until `minutes` are over, in an order by chance.

    A group that would not end in time is not begun.
    """
    groups = [(temperature, piece) for temperature in KINDS for piece in pieces_of(prompts, new_tokens)]
    random.Random(0).shuffle(groups)
    found, began, took = list[Text](), time.monotonic(), 0.0
    for seed, (temperature, piece) in enumerate(groups):
        begun = time.monotonic()
        if begun - began + took > 60 * minutes:
            break
        for prompt, written in zip(piece, write(model, piece, temperature, seed, new_tokens, end), strict=True):
            found.append(Text(torch.tensor((prompt + written)[:-1]), len(prompt), None, temperature, seed))
        took = time.monotonic() - begun
        number = sum(len(text.ids) - text.num_prompt for text in found)
        print(f"{(time.monotonic() - began) / 60:.1f} min: {len(found)} texts, {number} tokens written", flush=True)
    random.Random(1).shuffle(found)
    return found
