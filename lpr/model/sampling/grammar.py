"""Outputs that keep to a grammar: a JSON schema, a regular expression or a context-free grammar, by llguidance.

The processor is a function of its arguments: it goes back to where a path leaves the one that it saw last.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from lpr.config import InputError
from lpr.model.transfer import to_device

_tokenizers: WeakKeyDictionary[Any, dict[int, Any]] = WeakKeyDictionary()
"""llguidance's tokenizers, which take seconds to build for a large vocabulary, by ours and the vocabulary's size."""


class Grammar:
    """A logits processor that leaves the tokens with which an output can still keep to a grammar."""

    def __init__(self, grammar: str, num_prompt: int, tokenizer: Any) -> None:
        """Constrain what follows the first `num_prompt` tokens to `grammar`, in llguidance's JSON form.

        Raises InputError where llguidance is not installed, the grammar cannot be read, or there is no tokenizer.
        """
        try:
            import llguidance
        except ImportError as failure:
            raise InputError("grammars need the package llguidance: pip install 'lpr[grammar]'") from failure
        if tokenizer is None:
            raise InputError("grammar needs a tokenizer, and this model was loaded without one")
        if problem := llguidance.LLMatcher.validate_grammar(grammar):
            raise InputError(f"grammar: {problem.strip().splitlines()[0]}")
        self._grammar, self._num_prompt, self._tokenizer = grammar, num_prompt, tokenizer
        self._matcher: Any = None
        self._path: list[int] = []
        self._mask: np.ndarray = np.empty(0, np.int32)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores [1, V] after a path [1, L]: -inf where the grammar cannot go on."""
        import llguidance.numpy

        if self._matcher is None:
            self._start(scores.shape[1])
        self._follow(input_ids[0, self._num_prompt :].tolist())
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._mask, 0)
        bits = np.unpackbits(self._mask.view(np.uint8)[0], bitorder="little")[: scores.shape[1]]
        allowed = to_device(bits.astype(bool), scores.device)
        return scores.masked_fill(~allowed[None], float("-inf"))

    def _start(self, vocab_size: int) -> None:
        import llguidance
        import llguidance.hf
        import llguidance.numpy

        known = _tokenizers.setdefault(self._tokenizer, {})
        if vocab_size not in known:
            known[vocab_size] = llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=vocab_size)
        self._matcher = llguidance.LLMatcher(known[vocab_size], self._grammar)
        self._mask = llguidance.numpy.allocate_token_bitmask(1, vocab_size)

    def _follow(self, path: list[int]) -> None:
        shared = 0
        while shared < min(len(path), len(self._path)) and path[shared] == self._path[shared]:
            shared += 1
        if len(self._path) > shared:
            self._matcher.rollback(len(self._path) - shared)
        if not self._matcher.consume_tokens(path[shared:]):
            raise ValueError(f"the output left its grammar: {self._matcher.get_error()}")
        self._path = path
