"""Digests by which ranks compare replicated state. Twin: native/digest.h."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

MASK64 = 2**64 - 1


class Digest:
    """A 64-bit digest of a sequence of integers.

    A multiplicative hash instead of xxHash, because no package on PyPI ships the xxHash C header for a build.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1

    def update(self, words: Iterable[int]) -> None:
        """Append `words`, each modulo 2^64."""
        value = self.value
        for word in words:
            value = (value ^ word & MASK64) * 0x9E3779B97F4A7C15 & MASK64
            value ^= value >> 32
        self.value = value


def digest_of(text: str) -> int:
    """64-bit digest of a string, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
