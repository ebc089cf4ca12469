"""Errors of other people's code, in one line."""

from __future__ import annotations


def first_line(failure: BaseException | str) -> str:
    """The first line of an error's message; the name of its type if the message is empty."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return lines[0] if lines else type(failure).__name__
