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

    marks = [mark for mark in test.pytestmark if mark.name != "parametrize" or mark.args[0] != names]  # type: ignore[attr-defined]
    assert len(marks) == len(test.pytestmark) - 1, f"{test.__name__} has no parameters {names!r}"  # type: ignore[attr-defined]
    known = list(without)
    more = pytest.mark.parametrize(names, [case for case in cases if case not in known])
    repeated.pytestmark = [*marks, more.mark]  # type: ignore[attr-defined]
    return repeated
