"""Sampling parameters of a step, one row per result."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch

from lpr.config import SamplingParams
from lpr.core.noise_keys import MASK32, Choice
from lpr.model.sampling.processors import ProcessorPath
from lpr.model.transfer import to_device
from lpr.native import selection_words

_MASK64 = 2**64 - 1
COLDEST = 1e-30  # lower bound of temperatures: at it, scores differ by far more than any noise, and none overflows


def choice_of(params: SamplingParams) -> Choice:
    """The parameters of a choice as its words have them; a top_k beyond any vocabulary is no limit either way."""
    temperature = max(params.temperature, COLDEST) if params.temperature else 0.0
    return params.seed & _MASK64, temperature, min(params.top_k, 2**31 - 1), params.top_p, params.min_p


@dataclass(eq=False)
class Selection:
    """Sampling parameters of n result rows with u noise keys; made once a step, on the host."""

    words: torch.Tensor
    """Int32 [5n + u or more] (lpr.core.noise_keys.selection_words); the tensors below are made of them at first use."""
    num_keys: int  # u
    num_rows: int  # n; 0 if no row is sampled: an argmax has no parameters
    sampled: bool  # True if any row is sampled
    filtered: bool  # True if any row has a top-k, top-p or min-p limit
    first_token: int = 0  # the token of the first column of the logits; not 0 where they are a part of the vocabulary
    processor_paths: list[ProcessorPath] = field(default_factory=list)
    """The sequences whose choices go through logits processors."""
    num_logprobs: int | None = None  # alternatives per row with log-probabilities; None disables log-probabilities

    @classmethod
    def build(
        cls, requests: Sequence[tuple[SamplingParams, Sequence[int] | np.ndarray]], device: torch.device | None = None
    ) -> Self:
        """`requests` holds, per sequence in order, its parameters and the positions of the tokens to be chosen."""
        if not any([params.temperature > 0 for params, _ in requests]):
            return cls(torch.empty(0, dtype=torch.int32), 0, 0, sampled=False, filtered=False)
        choices = [choice_of(params) for params, _ in requests]
        positions = [np.ascontiguousarray(each, np.int32) for _, each in requests]
        words = selection_words(choices, positions)
        count = sum(map(len, positions))
        filtered = any([p.temperature > 0 and bool(p.top_k or p.top_p < 1 or p.min_p) for p, _ in requests])
        return cls(torch.from_numpy(words), len(words) - 5 * count, count, True, filtered).to(device)

    def to(self, device: torch.device | None) -> Self:
        """This selection on `device`, by one asynchronous copy."""
        if device is None or not self.sampled or device == self.words.device:
            return self
        return replace(self, words=to_device(self.words.numpy(), device))

    def from_token(self, first: int) -> Self:
        """This selection for logits whose first column is token `first`."""
        return replace(self, first_token=first)

    def _column(self, index: int) -> torch.Tensor:
        return self.words[index * self.num_rows : (index + 1) * self.num_rows]

    @cached_property
    def keys(self) -> torch.Tensor:
        """[u] int64 noise keys, each once: rows at the same position (siblings in the tree) share their noise."""
        return self.words[5 * self.num_rows : 5 * self.num_rows + self.num_keys].long() & MASK32

    @cached_property
    def key_of(self) -> torch.Tensor:
        """[n] int64: each row's index in `keys`."""
        return self._column(0).long()

    @cached_property
    def top_k(self) -> torch.Tensor:
        """[n] int64; 0 is off."""
        return self._column(1).long()

    @cached_property
    def temperature(self) -> torch.Tensor:
        """[n] float32; 0 is greedy."""
        return self._column(2).view(torch.float32)

    @cached_property
    def top_p(self) -> torch.Tensor:
        """[n] float32; 1 is off."""
        return self._column(3).view(torch.float32)

    @cached_property
    def min_p(self) -> torch.Tensor:
        """[n] float32; 0 is off."""
        return self._column(4).view(torch.float32)

    @property
    def noise(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The temperature and the noise key of each row; None if no row is sampled."""
        return (self.temperature, self.keys[self.key_of]) if self.sampled else None

    def rows(self, index: np.ndarray) -> Self:
        """The selection of the rows `index`, in this order, each with a key of its own."""
        if not self.sampled:
            return self
        rows = to_device(index.astype(np.int64), self.words.device)
        columns = self.words[: 5 * self.num_rows].view(5, -1)[:, rows]
        keys = self.words[5 * self.num_rows :][self.key_of[rows]]
        columns[0] = torch.arange(len(index), device=self.words.device)
        words = torch.cat([columns.flatten(), keys])
        return replace(self, words=words, num_keys=len(index), num_rows=len(index))
