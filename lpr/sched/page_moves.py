"""Operations on a rank's pages and states before a step, decided by the replicated scheduler."""

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
    """Recurrent states to be copied from one place to another. The first places are slots, the others snapshots."""

    source: int
    target: int


PageMove = PageCopy | PageClear | PageOut | PageIn | StateCopy
"""An operation on the pages and states of a rank; operations are applied in order before the next step."""
