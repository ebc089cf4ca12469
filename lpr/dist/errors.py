"""Errors of the exchange between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lpr.protocol import MeshError


class CommError(MeshError):
    """The ranks cannot exchange data: a rank was lost, hangs, or sent an unexpected message."""


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
    except CommError:
        raise
    except RuntimeError as failure:
        raise CommError(f"{meaning}: {first_line(failure)}") from failure
