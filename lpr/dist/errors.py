"""Errors of the exchange between ranks."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lpr.protocol import MeshError


class CommError(MeshError):
    """The ranks cannot exchange data: a rank was lost, hangs, or sent an unexpected message."""


class DesyncError(MeshError):
    """The replicated state differs between ranks; the message names the ranks that differ."""


class MeshChangedError(CommError):
    """A gather failed because its mesh no longer exists, and no rank has the result. The step is dropped."""


def first_line(failure: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    lines = str(failure).strip().splitlines()
    return lines[0][:200] if lines else type(failure).__name__


@contextmanager
def comm_errors(meaning: str) -> Iterator[None]:
    """Raise torch's errors as CommError: one line that begins with their `meaning`."""
    try:
        yield
    except MeshError:
        raise
    except RuntimeError as failure:
        raise CommError(f"{meaning}: {first_line(failure)}") from failure


def check_digests(digests: Sequence[Sequence[int]], ranks: Sequence[int] | None = None) -> None:
    """Raise DesyncError if the rows of `digests` are not all equal; it names the ranks that differ from the majority.

    Row i belongs to world rank `ranks[i]`, default: rank i.
    """
    if digests.count(digests[0]) == len(digests):
        return
    rows = [tuple(row) for row in digests]
    # On a tie, Counter returns the digest seen first: rank 0's.
    agreed = Counter(rows).most_common(1)[0][0]
    named = range(len(rows)) if ranks is None else ranks
    others = [rank for rank, row in zip(named, rows, strict=True) if row != agreed]
    raise DesyncError(
        f"the replicated state of rank {', '.join(map(str, others))} differs from that of the other "
        f"{len(rows) - len(others)} of {len(rows)} ranks: their drafts or tokens are not the same"
    )
