"""How the next tokens of a step are chosen, one row of parameters per result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from lpr.config import SamplingParams
from lpr.model.noise import MASK32, noise_key
from lpr.model.processors import ProcessorPath
from lpr.model.transfer import to_device


@dataclass
class Selection:
    """Per result row, how its next token is chosen; made once a step, on the host, which knows all of it."""

    keys: torch.Tensor
    """[u] int64 noise keys, each once: rows at the same position (siblings in the tree) share their noise."""
    key_of: torch.Tensor
    """[n] int64: which of the keys is the row's."""
    temperature: torch.Tensor
    """[n] float32; 0 is greedy."""
    top_k: torch.Tensor
    """[n] int64; 0 is off."""
    top_p: torch.Tensor
    """[n] float32; 1 is off."""
    min_p: torch.Tensor
    """[n] float32; 0 is off."""
    sampled: bool
    """Is any row sampled at all? If none is, there are no rows here: the argmax asks for none of it."""
    filtered: bool
    """Has any row a top-k, top-p or min-p limit?"""
    processor_paths: list[ProcessorPath] = field(default_factory=list)
    """The sequences whose choices go through logits processors."""
    num_logprobs: int | None = None
    """Alternatives per row whose log-probabilities are asked for; None: not even the chosen token's."""

    def row(self, index: int) -> Selection:
        """The selection of one row alone."""
        return self.rows(np.array([index])) if self.sampled else self

    def rows(self, index: np.ndarray) -> Selection:
        """The selection of the rows `index`, in this order; of sampled ones only."""
        rows = to_device(index.astype(np.int64), self.keys.device)
        return Selection(
            self.keys[self.key_of[rows]],
            torch.arange(len(index), device=self.keys.device),
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            sampled=True,
            filtered=self.filtered,
        )

    @classmethod
    def build(
        cls, requests: Sequence[tuple[SamplingParams, Sequence[int]]], device: torch.device | None = None
    ) -> Selection:
        """`requests` holds, per sequence in order, its parameters and the positions of the tokens to be chosen."""
        counts = [len(positions) for _, positions in requests]
        sampled = any(params.temperature > 0 for params, _ in requests)
        if not sampled:
            nothing = torch.empty(0, dtype=torch.int64)
            return cls(nothing, nothing, nothing, nothing, nothing, nothing, sampled=False, filtered=False)
        known: dict[tuple[int, int], int] = {}
        key_of = [known.setdefault((params.seed, at), len(known)) for params, positions in requests for at in positions]
        keys = [noise_key(seed, position) for seed, position in known]

        def per_row(name: str, dtype: type) -> torch.Tensor:
            # As int32 in `words`; a top_k beyond any vocabulary is no limit either way.
            values: np.ndarray = np.array([min(getattr(params, name), 2**31 - 1) for params, _ in requests], dtype)
            return torch.from_numpy(np.repeat(values, counts))

        return cls(
            keys=torch.tensor(keys, dtype=torch.int64),
            key_of=torch.tensor(key_of, dtype=torch.int64),
            temperature=per_row("temperature", np.float32),
            top_k=per_row("top_k", np.int64),
            top_p=per_row("top_p", np.float32),
            min_p=per_row("min_p", np.float32),
            sampled=True,
            filtered=any(p.temperature > 0 and (p.top_k or p.top_p < 1 or p.min_p) for p, _ in requests),
        ).to(device)

    def to(self, device: torch.device | None) -> Selection:
        """The same on `device`, by one copy that nobody waits for."""
        if device is None or not self.sampled or device == self.keys.device:
            return self
        words = to_device(self.words(), device)
        there = self.from_words(words, len(self.keys), len(self.key_of), self.sampled, self.filtered)
        there.processor_paths, there.num_logprobs = self.processor_paths, self.num_logprobs
        return there

    def words(self) -> np.ndarray:
        """On the host: all rows and then the keys as int32 [5n + u], which `from_words` reads."""
        floats = (self.temperature, self.top_p, self.min_p)
        rows = [self.key_of.int(), self.top_k.int(), *(each.view(torch.int32) for each in floats), self.keys.int()]
        return torch.cat(rows).numpy()

    @classmethod
    def from_words(cls, words: torch.Tensor, num_keys: int, num_rows: int, sampled: bool, filtered: bool) -> Selection:
        """What `words` made, from where the words are: without any rows if `sampled` is False."""
        rows = words[: 5 * num_rows].view(5, num_rows)
        return cls(
            keys=words[5 * num_rows : 5 * num_rows + num_keys].long() & MASK32,
            key_of=rows[0].long(),
            temperature=rows[2].view(torch.float32),
            top_k=rows[1].long(),
            top_p=rows[3].view(torch.float32),
            min_p=rows[4].view(torch.float32),
            sampled=sampled,
            filtered=filtered,
        )
