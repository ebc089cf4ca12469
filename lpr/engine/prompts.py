"""Prompts as token ids, and the checks that a request must pass before it is submitted."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Sequence
from typing import Any

from lpr.config import InputError, SamplingParams
from lpr.engine.request import Prompt


def encode_prompt(prompt: Prompt, tokenizer: Any | None, vocab_size: int) -> list[int]:
    """The token ids of a prompt; raises InputError if it is empty or has an id outside the vocabulary."""
    ids = _tokenize(prompt, tokenizer) if isinstance(prompt, str) else _as_ids(prompt)
    if not ids:
        raise InputError("the prompt is empty: a model needs at least one token to continue")
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise InputError(f"token id {outside[0]} is not in the model's vocabulary of {vocab_size}")
    return ids


def _tokenize(prompt: str, tokenizer: Any | None) -> list[int]:
    if tokenizer is None:
        raise InputError("this model has no tokenizer: give prompts as lists of token ids")
    try:
        prompt.encode()
    except UnicodeEncodeError as failure:
        raise InputError(f"the prompt is no Unicode text: {failure.reason} at {failure.start}") from None
    return list(tokenizer(prompt)["input_ids"])


def _as_ids(prompt: Sequence[int]) -> list[int]:
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise InputError(f"a prompt is text or a list of token ids, not {reprlib.repr(prompt)}") from None


def check_request(num_prompt: int, params: SamplingParams, priority: int, max_length: int, vocab_size: int) -> None:
    """Raise InputError for a request that an engine of these limits cannot complete."""
    if num_prompt + params.max_new_tokens > max_length:
        raise InputError(
            f"the prompt's {num_prompt} tokens and max_new_tokens={params.max_new_tokens} exceed the context of "
            f"{max_length} tokens"
        )
    if type(priority) is not int or not -(2**63) <= priority < 2**63:
        raise InputError(f"priority={priority!r} must be a whole number of 64 bits")
    biased = [token for token, _ in params.logit_bias]
    for name, tokens in (("logit_bias", biased), ("forced_ids", params.forced_ids)):
        outside = [token for token in tokens if token >= vocab_size]
        if outside:
            raise InputError(f"{name}: {outside[0]} is not in the model's vocabulary of {vocab_size}")
