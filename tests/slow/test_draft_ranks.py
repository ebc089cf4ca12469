"""The long tests of tests/serve/test_draft_ranks.py."""

from __future__ import annotations

from tests.fakes.serving import SMALL, serving
from tests.serve.test_draft_ranks import expected, kill


def test_a_killed_rank_that_served_alone_is_replaced_and_streams_go_on(expected: list[list[int]]) -> None:
    """The draft rank, which is left, cannot serve: it leaves, and both are started again."""
    with serving(None, *SMALL, "--share-drafts", "none", "--draft-ranks", "1", lp=2) as service:
        _, events = kill(service, 0, expected)
        assert events["restart"] == 1 and events["poison"] == 0
        assert "all ranks that hold the model are lost" in service.log()
