"""The sampling noise as a drafter knows it, before the model has spoken.

A request with a seed samples by argmax(log q + g) with noise g that is a function of seed, position and token
(lpr.core.noise_keys). Given its own noise, a token of probability q is chosen with probability exp(-E (1 - q) / q),
where E = exp(-g) is exponentially distributed: that is a function of the odds over E. So a child's odds are divided by
E, to the next power of two, before they choose its cell, and calibration does the rest.
"""

from __future__ import annotations

from lpr.core.noise_keys import noise_key, token_bits


class KnownNoise:
    """By how many octaves the sampling noise raises a token's odds, in one draft; 0 for a request that is greedy."""

    def __init__(self, seed: int | None, position: int) -> None:
        """Of the tokens at `position`, the next of the sequence, and behind it."""
        self.is_known = seed is not None
        self._seed = seed or 0
        self._position = position
        self._keys: dict[int, int] = {}

    def octaves(self, depth: int, token: int) -> int:
        """Of a child of a node at `depth`: E is below 2^-octaves, and -log(1 - u) is as good as u for small ones."""
        if not self.is_known:
            return 0
        key = self._keys.get(depth)
        if key is None:
            key = self._keys[depth] = noise_key(self._seed, self._position + depth)
        return 31 - token_bits(key, token).bit_length()
