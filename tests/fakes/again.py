"""A test of the fast suite with more cases, for tests/slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import pytest


def again(
    test: Callable[..., None], names: str, cases: Iterable[Any], without: Iterable[Any] = ()
) -> Callable[..., None]:
    """`test` over those `cases` of its parameters `names` that are not in `without`, those which the fast suite has.

    `names` are written as in the test's own parametrize, whose place this one takes.
    """

    @wraps(test)
    def repeated(*args: Any, **kwargs: Any) -> None:
        test(*args, **kwargs)

    marks: list[pytest.Mark] = list(test.pytestmark)  # type: ignore[attr-defined]
    (mine,) = (mark for mark in marks if mark.name == "parametrize" and mark.args[0] == names)
    others, known = [mark for mark in marks if mark is not mine], list(without)
    more = pytest.mark.parametrize(names, [case for case in cases if case not in known], **mine.kwargs)
    repeated.pytestmark = [*others, more.mark]  # type: ignore[attr-defined]
    return repeated
