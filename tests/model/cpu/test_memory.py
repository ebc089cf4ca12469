"""Memory of weights and K/V: huge pages, zeros that the system takes meanwhile, and nothing kept of what is dropped."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lpr.model.cpu import memory
from lpr.model.cpu.memory import LEAST_BYTES, in_huge_pages, wait_for_pages, zeros

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
    wait_for_pages()
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


def wants_huge_pages(tensor: torch.Tensor) -> bool:
    """True if the system was asked to put the memory of `tensor` in huge pages, or has none."""
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        return True
    begin = middle = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if first == "VmFlags:" and begin:
            middle = "hg" in rest
            break
        if "-" in first and not first.endswith(":"):
            low, high = (int(each, 16) for each in first.split("-"))
            begin = low <= tensor.data_ptr() + tensor.nbytes // 2 < high
    return middle


def test_what_each_step_reads_lies_in_huge_pages() -> None:
    assert wants_huge_pages(in_huge_pages(torch.ones(40 << 20, dtype=torch.int8)))
    assert wants_huge_pages(in_huge_pages(torch.ones(3 << 20, dtype=torch.int8)))
    assert wants_huge_pages(zeros((ROWS, 1024), torch.float32))


@pytest.mark.parametrize("seed", range(3))
def test_copies_share_blocks_and_nothing_else(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(memory, "_BLOCK", 1 << 12)
    monkeypatch.setattr(memory, "_blocks", memory._Blocks())
    generator = torch.Generator().manual_seed(seed)
    given = []
    for _ in range(60):
        size = int(torch.randint(1, 1500, (), generator=generator))
        dtype = (torch.float32, torch.bfloat16, torch.int8)[size % 3]
        given.append(torch.randint(-9, 9, (size, 2), generator=generator).to(dtype).t())
    copies = [in_huge_pages(each) for each in given]
    for each, copy in zip(given, copies, strict=True):
        assert copy.equal(each) and copy.is_contiguous() and copy.dtype == each.dtype and not copy.data_ptr() % 64
    for each in copies[::2]:
        each.fill_(7)
    del each, copies[::2]
    assert all(copy.equal(each) for each, copy in zip(given[1::2], copies, strict=True))


def test_a_block_goes_with_its_last_tensor() -> None:
    before = resident_bytes()
    for _ in range(40):
        in_huge_pages(torch.ones(12 << 20, dtype=torch.int8))
    assert resident_bytes() - before < 5 * memory._BLOCK, "of 15; malloc keeps some of the tensors' own"
