"""What a rank does to its pages and states before a step, as the replicated scheduler decides it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PageCopy:
    """The first `num_rows` rows of one page, to be copied to another page before the next step."""

    source: int
    target: int
    num_rows: int


@dataclass(frozen=True)
class PageClear:
    """A page to be zeroed: its K/V may be NaN, which would reach the page's next request."""

    page: int


@dataclass(frozen=True)
class PageOut:
    """A page to be copied to a page of host memory."""

    page: int
    host_page: int


@dataclass(frozen=True)
class PageIn:
    """A page of host memory to be copied to a page."""

    host_page: int
    page: int


@dataclass(frozen=True)
class StateCopy:
    """States of one place to be copied to another. Slots are the first places, snapshots the ones behind."""

    source: int
    target: int


PageMove = PageCopy | PageClear | PageOut | PageIn | StateCopy
"""What is to be done to the pages and states of a rank before the next step, in the order of decision."""
