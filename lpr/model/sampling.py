"""Choosing next tokens: a deterministic function of (logits, seed, position), greedy and sampling alike.

Sampling uses the Gumbel-max trick with noise from a counter-based generator keyed by (request seed, absolute
position, token id): `argmax(processed_logits / temperature + gumbel)` is an exact sample of
softmax(processed_logits / temperature), and no random state exists that a different number of steps, another batch or
another rank could leave in a different place. So sampled text depends on the prompt, the parameters and the seed only,
however it was drafted (DESIGN rule R4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from lpr.config import SamplingParams
from lpr.core.accept import NOT_A_NUMBER
from lpr.core.recycle import MAX_SCORE, SCORE_STEPS
from lpr.model.processors import ProcessorPath
from lpr.model.transfer import to_device

_MASK32 = 0xFFFFFFFF
# Multipliers of the 32-bit mixer "triple32" (C. Wellons, "Prospecting for hash functions", 2018): the lowest known
# bias of a three-round integer hash. Below 2^32 times 2^32 an int64 product wraps, and its low 32 bits stay right.
_ROUNDS = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """Hash 32-bit values held in int64, elementwise; the same integers on every device."""
    for shift, multiplier in _ROUNDS:
        x = x ^ (x >> shift)
        x = (x * multiplier) & _MASK32
    return x ^ (x >> 14)


def _mix32_number(x: int) -> int:
    for shift, multiplier in _ROUNDS:
        x ^= x >> shift
        x = (x * multiplier) & _MASK32
    return x ^ (x >> 14)


def noise_key(seed: int, position: int) -> int:
    """32-bit key of the noise at `position` (index of the token to be chosen) of a request with `seed`."""
    low, high = seed & _MASK32, (seed >> 32) & _MASK32
    return _mix32_number(_mix32_number(_mix32_number(low ^ 0x9E3779B9) ^ high) ^ (position & _MASK32))


def gumbel(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32, for int64 `keys` and token ids that broadcast against each other.

    Two hash rounds with the key folded in between decorrelate the rows of neighbouring keys. With v uniform in (0, 1),
    -log(v) is exponential; log1p keeps its small values, which decide the maximum, exact in float32.
    """
    bits = _mix32(_mix32(tokens ^ keys) ^ ((keys * 0x85EBCA6B) & _MASK32))
    uniform = (bits.to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform.clamp_max(1.0 - 2.0**-24)))


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
        if not self.sampled:
            return self
        one = slice(index, index + 1)
        return Selection(
            self.keys,
            self.key_of[one],
            self.temperature[one],
            self.top_k[one],
            self.top_p[one],
            self.min_p[one],
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
            keys=words[5 * num_rows : 5 * num_rows + num_keys].long() & _MASK32,
            key_of=rows[0].long(),
            temperature=rows[2].view(torch.float32),
            top_k=rows[1].long(),
            top_p=rows[3].view(torch.float32),
            min_p=rows[4].view(torch.float32),
            sampled=sampled,
            filtered=filtered,
        )


def choose(logits: torch.Tensor, selection: Selection) -> torch.Tensor:
    """The next token [n] int64 of every row of `logits` [n, V], or a code below 0 (see lpr.core.accept)."""
    chosen = pick(logits, selection)
    for path in selection.processor_paths:
        path.follow(logits, chosen, lambda scores, row: int(pick(scores, selection.row(row))))
    return chosen


def pick(logits: torch.Tensor, selection: Selection) -> torch.Tensor:
    """The argmax [n] int64 of tempered, limited, noised logits [n, V]; NOT_A_NUMBER where there is no such thing."""
    scores = logits.float()
    if not selection.sampled:
        best = scores.max(-1)  # unlike argmax it also shows a NaN, at the same price
        return torch.where(best.values.isnan(), NOT_A_NUMBER, best.indices)
    broken = scores.amax(-1).isnan()
    warm = selection.temperature[:, None] > 0
    scaled = scores / torch.where(warm, selection.temperature[:, None], torch.ones_like(scores[:, :1]))
    if selection.filtered:
        scaled = limit(scaled, selection)
    noise = gumbel(selection.keys[:, None], torch.arange(scores.shape[1], device=scores.device)[None])
    best = torch.where(warm, scaled + noise[selection.key_of], scores).max(-1)
    broken |= warm[:, 0] & ~best.values.isfinite()
    return torch.where(broken, NOT_A_NUMBER, best.indices)


def limit(scaled: torch.Tensor, selection: Selection) -> torch.Tensor:
    """Apply top-k, then top-p, then min-p to tempered logits [n, V], in transformers' order; excluded: -inf."""
    ordered, index = scaled.sort(-1, descending=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)[None]
    top_k = torch.where(selection.top_k > 0, selection.top_k, scaled.shape[1])[:, None]
    kth = ordered.gather(1, (top_k - 1).clamp_max(scaled.shape[1] - 1))
    keep = ordered >= kth  # ties with the k-th stay, as in transformers
    ordered = ordered.masked_fill(~keep, float("-inf"))
    probs = torch.softmax(ordered, -1)
    before = probs.cumsum(-1) - probs
    # Rounding takes the sum a little past 1, which must not cut a row without a limit.
    keep &= (before < selection.top_p[:, None]) | (selection.top_p[:, None] >= 1) | (rank == 0)
    probs = torch.softmax(ordered.masked_fill(~keep, float("-inf")), -1)
    keep &= probs >= selection.min_p[:, None] * probs[:, :1]
    allowed = torch.zeros_like(keep).scatter(1, index, keep)
    return scaled.masked_fill(~allowed, float("-inf"))


def log_probabilities(logits: torch.Tensor, chosen: torch.Tensor, count: int) -> torch.Tensor:
    """Of every row of `logits` [n, V] what the model itself gives its `chosen` [n] token and the `count` likeliest.

    Returns int32 [n, 1 + 2 count]: the bits of the chosen one's float32 log-probability, ids, the bits of theirs.
    """
    scores = logits.float()
    total = scores.logsumexp(-1, keepdim=True)
    mine = scores.gather(1, chosen.clamp_min(0)[:, None]) - total
    top, tokens = scores.topk(min(count, scores.shape[1]), dim=-1)
    parts = [mine.view(torch.int32), tokens.to(torch.int32), (top - total).contiguous().view(torch.int32)]
    return torch.cat(parts, 1)


def candidates(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most likely next tokens [n, k] of every row and their scores [n, k] (see SCORE_STEPS)."""
    scores = logits.float()
    top, tokens = scores.topk(min(k, scores.shape[1]), dim=-1)
    log_probs = top - scores.logsumexp(-1, keepdim=True)
    steps = (log_probs * -SCORE_STEPS).round().nan_to_num(nan=MAX_SCORE)
    return tokens, steps.clamp(0, MAX_SCORE).to(torch.int64)
