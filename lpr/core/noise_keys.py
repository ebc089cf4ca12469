"""The keyed noise of sampling: its keys, their layout in device words, and its use in drafting.

A request with a seed samples by argmax(log q + g), with noise g that is a function of seed, position and token.
Twins: native/selection.h, native/known_noise.h.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MASK32 = 0xFFFFFFFF
ROUNDS = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
"""Multipliers of the 32-bit mixer "triple32" (C. Wellons, "Prospecting for hash functions", 2018): the lowest known
bias of a three-round integer hash."""
Choice = tuple[int, float, int, float, float]  # a request's seed (64 bits), temperature, top_k, top_p and min_p


def mix32(x: int) -> int:
    for shift, multiplier in ROUNDS:
        x ^= x >> shift
        x = (x * multiplier) & MASK32
    return x ^ (x >> 14)


def noise_key(seed: int, position: int) -> int:
    """32-bit key of the noise at `position` (index of the token to be chosen) of a request with `seed`."""
    low, high = seed & MASK32, (seed >> 32) & MASK32
    return mix32(mix32(mix32(low ^ 0x9E3779B9) ^ high) ^ (position & MASK32))


def token_bits(key: int, token: int) -> int:
    """32-bit hash behind the noise of `token` (lpr.model.sampling.specification); smaller is more noise."""
    return mix32(mix32(token ^ key) ^ ((key * 0x85EBCA6B) & MASK32))


def selection_words(choices: Sequence[Choice], positions: Sequence[np.ndarray]) -> np.ndarray:
    """The choice parameters of a step's tokens: int32 [5n + u] for n tokens with u noise keys.

    `positions` are those of the tokens of each sequence, int32. In this order: for every token the number of its key,
    top_k, and the bits of temperature, top_p and min_p in float32; then the keys, each once, since tokens of one
    request at one position (siblings in the tree) share their noise.
    """
    counts = [len(each) for each in positions]
    known: dict[tuple[int, int], int] = {}
    key_of = [
        known.setdefault((choice[0], at), len(known))
        for choice, mine in zip(choices, positions, strict=True)
        for at in mine.tolist()
    ]
    keys = [noise_key(seed, position) for seed, position in known]
    parts = [np.array(key_of, np.int32)]
    for place, dtype in ((2, np.int32), (1, np.float32), (3, np.float32), (4, np.float32)):
        values = np.array([choice[place] for choice in choices], dtype)
        parts.append(np.repeat(values, counts).view(np.int32))
    return np.concatenate([*parts, np.array(keys, np.uint32).view(np.int32)])


class KnownNoise:
    """The number of octaves by which the sampling noise raises a token's odds, in one draft; 0 for a greedy request.

    Given its noise, a token of probability q is chosen with probability exp(-E (1 - q) / q), where E = exp(-g) is
    exponentially distributed: a function of the odds over E. So a child's odds are divided by E, to the next power of
    two, before they choose its cell, and calibration does the rest.
    """

    def __init__(self, seed: int | None, position: int) -> None:
        """The noise of the tokens from `position` on, the sequence's next."""
        self.is_known = seed is not None
        self._seed = seed or 0
        self._position = position
        self._keys: dict[int, int] = {}

    def octaves(self, depth: int, token: int) -> int:
        """Octaves of a child of a node at `depth`: E is below 2^-octaves (-log(1 - u) is about u for small u)."""
        if not self.is_known:
            return 0
        key = self._keys.get(depth)
        if key is None:
            key = self._keys[depth] = noise_key(self._seed, self._position + depth)
        return 31 - token_bits(key, token).bit_length()
