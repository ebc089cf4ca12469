"""The headers of a step's payload: what ranks compare, and what they must know to read each other's results.

A rank's headers are int32 words. First come the digest of what all ranks hold (low, high), the length of the commands
that the driver broadcasts after the step (rule R3), and how many candidates of a node the rank sends. Then comes for
each tree that it serves the digest of what the tree's home ranks alone hold (low, high), and how many of the tree's
nodes it owns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lpr.config import NUM_HEADER, NUM_TREE_HEADER


def pack(
    digest: int, num_command_bytes: int, num_candidates: int, signatures: Sequence[int], num_owned: Sequence[int]
) -> np.ndarray:
    """A rank's headers; `signatures` and `num_owned` are of its trees in their order."""
    words = [*_words(digest), num_command_bytes, num_candidates]
    for signature, count in zip(signatures, num_owned, strict=True):
        words += [*_words(signature), count]
    return np.array(words, np.int64).astype(np.int32)


def _words(digest: int) -> tuple[int, int]:
    return digest & 0xFFFFFFFF, digest >> 32


def num_owned(headers: np.ndarray, rank: int, place: int) -> int:
    """How many nodes of tree number `place` a rank owns, by the headers [ranks, words]."""
    return int(headers[rank, NUM_HEADER + place * NUM_TREE_HEADER + 2])


def num_candidates(headers: np.ndarray, rank: int) -> int:
    """How many candidates of a node a rank sends."""
    return int(headers[rank, 3])


def tree_digests(headers: np.ndarray, served: Sequence[Sequence[int]]) -> dict[int, list[tuple[int, list[int]]]]:
    """Per tree, the ranks that serve it and their digests; ranks beside each other may share an entry of `served`.

    `headers` are [world ranks, words], `served` the trees of every replica.
    """
    found: dict[int, list[tuple[int, list[int]]]] = {}
    num_sharing = len(headers) // len(served)
    for rank, words in enumerate(headers):
        for place, tree in enumerate(served[rank // num_sharing]):
            begin = NUM_HEADER + place * NUM_TREE_HEADER
            found.setdefault(tree, []).append((rank, words[begin : begin + 2].tolist()))
    return found


def agree(headers: np.ndarray, served: Sequence[Sequence[int]]) -> bool:
    """Do all ranks hold the same, and the ranks that serve a tree the same of it? As for `tree_digests`."""
    if (headers[:, :2] != headers[0, :2]).any():
        return False
    return all(digest == signed[0][1] for signed in tree_digests(headers, served).values() for _, digest in signed)
