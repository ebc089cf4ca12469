"""Work that is shared out to threads."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from lpr.model import threads
from lpr.model.threads import drafting_threads, share_out


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


@pytest.mark.parametrize(
    ("device", "cores", "num_gpus", "num_sharing", "given", "expected"),
    [
        ("cuda:0", 64, 8, 1, 1, 8),  # torchrun gives each of eight ranks one thread
        ("cuda:0", 16, 8, 1, 1, 2),
        ("cuda:0", 16, 1, 1, 1, 8),
        ("cuda:0", 16, 1, 4, 1, 4),  # ranks that share a GPU share its cores too
        ("cuda:0", 2, 8, 1, 1, 1),
        ("cuda:0", 16, 8, 1, 12, 12),  # what somebody asks for stays
        ("cpu", 64, 0, 8, 1, 1),  # on a CPU the forward needs the cores
    ],
)
def test_ranks_with_gpus_draft_on_their_share_of_the_cores(
    device: str,
    cores: int,
    num_gpus: int,
    num_sharing: int,
    given: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads._share.cache_clear()
    monkeypatch.setattr(threads, "has_team", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: given)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert drafting_threads(torch.device(device), num_sharing) == expected
    threads._share.cache_clear()
