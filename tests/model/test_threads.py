"""Work that is shared out to threads."""

from __future__ import annotations

import threading

import pytest
import torch

from lpr.model.threads import share_out


@pytest.mark.parametrize(("number", "num_parts"), [(0, 1), (1, 1), (2, 2), (7, 3), (300, 3)])
def test_each_thing_is_in_one_part(number: int, num_parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    parts: list[slice] = []
    share_out(parts.append, number)
    assert len(parts) == num_parts
    assert sorted(at for part in parts for at in range(part.start, part.stop)) == list(range(number))
    assert max(part.stop - part.start for part in parts) - min(part.stop - part.start for part in parts) <= 1


def test_parts_run_side_by_side_and_errors_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    meeting = threading.Barrier(2)

    def work(part: slice) -> None:
        meeting.wait(timeout=30)
        if part.start:
            raise ValueError("the second part")

    with pytest.raises(ValueError, match="the second part"):
        share_out(work, 2)
