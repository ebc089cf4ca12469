"""Zeros that the system takes meanwhile: what is written ahead stays, and a dropped tensor keeps nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lpr.model.cpu.memory import LEAST_BYTES, settle, zeros

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is torch.zeros")
ROWS = 4 * LEAST_BYTES // 4096


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def wait_until(is_true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 30
    while not is_true() and time.monotonic() < end:
        time.sleep(0.01)
    return is_true()


def test_pages_are_taken_while_others_write() -> None:
    before = resident_bytes()
    found = zeros((ROWS, 1024), torch.float32)
    found[7] = 3.0
    found[-1] = 4.0
    assert wait_until(lambda: resident_bytes() - before > 0.95 * found.nbytes)
    assert float(found[7].sum()) == 3.0 * 1024 and float(found[-1].sum()) == 4.0 * 1024
    assert int(found.count_nonzero()) == 2 * 1024


def test_free_memory_is_told_after_what_is_being_taken() -> None:
    before = resident_bytes()
    found = zeros((ROWS, 1024), torch.float32)
    settle()
    assert resident_bytes() - before > 0.95 * found.nbytes


def test_a_dropped_tensor_gives_its_memory_back() -> None:
    before = resident_bytes()
    for _ in range(20):
        zeros((ROWS, 1024), torch.float32)
    assert wait_until(lambda: resident_bytes() - before < LEAST_BYTES)


def test_small_ones_are_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threading.Thread.start", lambda self: pytest.fail("a thread for a small tensor"))
    for dtype in (torch.float32, torch.bfloat16):
        assert zeros((3, 5), dtype).equal(torch.zeros(3, 5, dtype=dtype))
